"""What real compilers for a TPU and a GPU make of presets; neither has to be here."""

import dataclasses
import functools

import compilers
import jax
import pytest

import remat_policies as rp
from remat_policies.demo import TINY, pure

CONFIG = dataclasses.replace(
    TINY, d_model=512, heads=4, kv_heads=2, head_dim=128, ffn_dim=1536
)
LAYERS, SHAPE = 32, (2, 512)
ORDER = ("none", "minimal_with_context", "save_dot_except_mlp", "full")


def compiled(config, policy, target, layers=LAYERS, in_scan=True):
    """The gradient of a stack under a preset, for a device."""
    wrap = functools.partial(rp.remat, policy=policy, in_scan=in_scan)
    gradient = jax.grad(functools.partial(pure.loss, config, wrap=wrap))
    params, x = pure.avals(config, *SHAPE, layers=layers)
    return rp.verify(gradient, params, x, target=target)


def kept(policy):
    """Bytes that all layers keep, inputs among them: device, host."""
    block = functools.partial(pure.apply, CONFIG)
    params, x = pure.avals(CONFIG, *SHAPE)
    found = rp.report(block, params, x, policy=policy).residuals
    inputs = x.size * x.dtype.itemsize
    return LAYERS * (found.device_bytes + inputs), LAYERS * found.host_bytes


@pytest.mark.parametrize("target", compilers.BOTH)
def test_temporaries_are_in_the_order_of_presets(target):
    """What is kept less is less, by about as much as `report` says."""
    temp = {policy: compiled(CONFIG, policy, target).temp_bytes for policy in ORDER}
    assert sorted(temp.values(), reverse=True) == list(temp.values())
    said = kept("minimal_with_context")[0] - kept("full")[0]
    found = temp["minimal_with_context"] - temp["full"]
    assert abs(found - said) < 0.2 * said


@pytest.mark.parametrize("target", compilers.BOTH)
def test_what_is_offloaded_is_on_the_host(target):
    """To the byte."""
    found = compiled(CONFIG, "minimal_offloaded", target)
    assert found.host_bytes == kept("minimal_offloaded")[1]
    assert found.temp_bytes < compiled(CONFIG, "minimal", target).temp_bytes


@compilers.needs_tpu_compiler
def test_outside_of_a_loop_xla_would_undo_a_policy():
    """`in_scan=True` where there is no scan; the lint for it is not for nothing."""
    config = dataclasses.replace(CONFIG, ffn_dim=512)

    def step(wrap):
        def loss(params, x):
            return pure.loss(config, [params] * 2, x, wrap=wrap)

        params, x = pure.avals(config, *SHAPE)
        taken = rp.verify(jax.grad(loss), params, x, target="v5e")
        return taken.flops

    right = step(functools.partial(rp.remat, policy="full"))
    undone = step(functools.partial(rp.remat, policy="full", in_scan=True))
    assert undone < 0.9 * right
