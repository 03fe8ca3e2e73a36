"""A mixture of experts that trains lazily: an expert that no text reaches stays.

Each sequence goes to the one expert that the router likes best for it; a bias that
grows while an expert is idle keeps all of them in use, without a loss for it. The text
comes file by file, and files differ, so that an expert is busy for a while and then
idle for long. Moments of idle experts do not decay: an optimizer that touches only what
has a gradient is what makes experts cheap to save.
"""

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from decoder import State, bf16_copy, encoded_text, rounded
from jax.typing import ArrayLike
from rich.console import Console
from rich.progress import track

VOCABULARY = 2048
WIDTH = 256
HIDDEN = 512
EXPERTS = 16
BATCH = 4
LENGTH = 48
CONTEXT = 4
"""Tokens before each place, whose vectors are what an expert sees."""
STRIDE = 400
"""Tokens by which the batch's place in the text moves at a step."""
SPAN = 4000
"""Tokens around that place that sequences are drawn from: a file or two."""
BIAS_RATE = 0.003
WARM_UP_STEPS = 60


def initial(seed: int) -> State:
    """Returns the first fp32 weights."""
    keys = jax.random.split(jax.random.key(seed), 5)
    normal = jax.random.normal
    return {
        "embed": 0.05 * normal(keys[0], (VOCABULARY, WIDTH)),
        "router": normal(keys[1], (WIDTH, EXPERTS)),
        "experts": {
            "up": 0.05 * normal(keys[2], (EXPERTS, WIDTH, HIDDEN)),
            "down": 0.05 * normal(keys[3], (EXPERTS, HIDDEN, WIDTH)),
        },
        "head": 0.05 * normal(keys[4], (WIDTH, VOCABULARY)),
    }


def expert_loss(
    weights: State, bias: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean cross entropy, and how many sequences each expert was given."""
    vectors = weights["embed"][tokens]
    windows = [vectors[:, i : i - CONTEXT] / (CONTEXT - i) for i in range(CONTEXT)]
    seen = sum(windows[1:], windows[0])
    summary = vectors.mean(1)
    summary /= jnp.linalg.norm(summary, axis=1, keepdims=True)
    gates = nn.sigmoid(summary @ weights["router"])
    chosen = (gates + bias).argmax(1)
    up, down = weights["experts"]["up"][chosen], weights["experts"]["down"][chosen]
    mixed = nn.gelu(jnp.einsum("blw,bwh->blh", seen, up))
    gate = jnp.take_along_axis(gates, chosen[:, None], axis=1)[:, :, None]
    out = seen + gate * jnp.einsum("blh,bhw->blw", mixed, down)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        out @ weights["head"], tokens[:, CONTEXT:]
    )
    return losses.mean(), jnp.zeros(EXPERTS).at[chosen].add(1)


def expert_step() -> Callable[..., tuple[Any, ...]]:
    """Returns a compiled step of AdamW that leaves idle experts as they are."""
    optimizer = optax.adamw(1e-3, weight_decay=0.01)

    @jax.jit
    def step(
        master: State, opt_state: optax.OptState, bias: jax.Array, tokens: ArrayLike
    ) -> tuple[State, optax.OptState, jax.Array]:
        gradients, load = jax.grad(expert_loss, has_aux=True)(
            rounded(master), bias, jnp.asarray(tokens)
        )
        updates, moved = optimizer.update(gradients, opt_state, master)
        old, new = (master, opt_state), (optax.apply_updates(master, updates), moved)

        def lazily(path: tuple[Any, ...], before: jax.Array, after: jax.Array) -> Any:
            if "experts" not in jtu.keystr(path):
                return after
            return jnp.where(load[:, None, None] > 0, after, before)

        bias += BIAS_RATE * jnp.sign(load.mean() - load)
        return *jtu.tree_map_with_path(lazily, old, new), bias

    return step


def sequences(seed: int) -> Iterator[np.ndarray]:
    """Yields batches int32[BATCH, LENGTH] from a place that moves through the text."""
    text = encoded_text(VOCABULARY)
    rng = np.random.default_rng([seed, 4])
    window, place = np.arange(LENGTH), 0
    while True:
        starts = rng.integers(place, place + SPAN, BATCH)
        yield text[(starts[:, None] + window) % len(text)]
        place += STRIDE


def expert_states(*, seed: int) -> Iterator[State]:
    """16 experts of 0.26 M parameters, of which a step moves at most four."""
    master = initial(seed)
    carry = master, optax.adamw(1e-3).init(master), jnp.zeros(EXPERTS)
    step, stream = expert_step(), sequences(seed)
    console = Console(stderr=True)
    title = "warming up moe"
    for _ in track(range(WARM_UP_STEPS), title, console=console, transient=True):
        carry = jax.block_until_ready(step(*carry, next(stream)))
    while True:
        master, (adam, *_), bias = carry
        yield {
            "master": master,
            "bias": bias,
            "moments": {"count": adam.count, "mu": adam.mu, "nu": adam.nu},
            "params": bf16_copy(master),
        }
        carry = step(*carry, next(stream))
