"""Compiles gradients of demo blocks for a TPU or GPU that is not here.

`python aot_blocks.py tpu` or `python aot_blocks.py gpu` prints a JSON list with a row
for each program. Needs the extra `aot`, like `aot.py`; `python aot_blocks.py cudnn`
needs NVIDIA's cuDNN (`nvidia-cudnn-cu12`) too. Does not belong here: judging.
"""

import functools
import json
import sys
from dataclasses import replace

import aot
import jax

from remat_policies import demo
from remat_policies.demo import pure, values

DENSE = (demo.D2048, 2, 2048, ())
MOE = (replace(demo.D2048, ffn_dim=1408, experts=4), 1, 512, ())
SPLASH = replace(demo.TINY, attention="splash")
CUDNN = replace(demo.TINY, attention="cudnn")
CUDNN_ENCODER = replace(demo.TINY_ENCODER, attention="cudnn")

PROGRAMS = {
    "tpu": {
        "dense": DENSE,
        "moe": MOE,
        "splash": (SPLASH, 2, 256, ()),
        "splash, names saved": (SPLASH, 2, 256, values.names(SPLASH)),
    },
    "gpu": {"dense": DENSE, "moe": MOE},
    "cudnn": {
        "decoder": (CUDNN, 2, 256, ()),
        "decoder, names saved": (CUDNN, 2, 256, values.names(CUDNN)),
        "encoder": (CUDNN_ENCODER, 2, 256, ()),
        "encoder, names saved": (CUDNN_ENCODER, 2, 256, values.names(CUDNN_ENCODER)),
    },
}
"""What to compile: sizes of the block, sequences, tokens of each, and names saved."""

KERNELS = ('"tpu_custom_call"', '"__cudnn$fmha')
"""How a compiled program calls what is not XLA's own."""


def measured(kind, name):
    """What the gradient of one rematerialised layer takes of one device."""
    config, batch, seq, saved = PROGRAMS[kind][name]
    device = aot.devices("tpu" if kind == "tpu" else "gpu")[0]
    place = jax.sharding.SingleDeviceSharding(device)
    params, x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        pure.avals(config, batch, seq, layers=2),
    )
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    wrap = functools.partial(jax.checkpoint, policy=policy)
    grad = jax.grad(functools.partial(pure.loss, config, wrap=wrap))
    compiled = jax.jit(grad).lower(params, x).compile()
    text = compiled.as_text()
    return {
        "program": name,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kernel_calls": sum(map(text.count, KERNELS)),
    }


def main(kind):
    """Compile all of them."""
    print(json.dumps([measured(kind, name) for name in PROGRAMS[kind]]))


if __name__ == "__main__":
    main(sys.argv[1])
