"""A large embedding table that trains lazily: only the rows of a batch ever change."""

import itertools
from collections.abc import Callable, Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from decoder import State, encoded_text
from jax.typing import ArrayLike
from rich.console import Console
from rich.progress import track

VOCABULARY = 8192
TABLE_ROWS = 1_000_000
TABLE_WIDTH = 32
CONTEXT = 8
ORDERS = 3
"""Each of the CONTEXT places before a token gives its n-grams of 1, 2, ... ORDERS."""
CLASSES = 512
WARM_UP_STEPS = 200


def ngram_rows(text: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the table rows of the n-grams that stand before each place.

    Args:
        text: int32[tokens].
        ends: int[batch], the places to predict.

    Returns:
        int32[batch, CONTEXT * ORDERS], a hash of each n-gram into the table.
    """
    rows = []
    for back, order in itertools.product(range(1, CONTEXT + 1), range(1, ORDERS + 1)):
        key = np.full(len(ends), order, np.uint64)
        for offset in range(order):
            token = text[ends - back - offset].astype(np.uint64)
            key = (key ^ token) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
        rows.append(key % np.uint64(TABLE_ROWS))
    return np.stack(rows, axis=1).astype(np.int32)


def embedding_step(
    batch: int,
) -> Callable[[State, ArrayLike, ArrayLike], tuple[State]]:
    """Returns a compiled step of a click-model-like classifier with a lazy table.

    Rows of the batch get a row-wise Adagrad update; all others stay as they are, bit
    for bit. The dense layers train with plain SGD.
    """
    touched = batch * CONTEXT * ORDERS

    def loss(layers: State, vectors: jax.Array, wanted: jax.Array) -> jax.Array:
        hidden = nn.relu(vectors.reshape(len(wanted), -1) @ layers["hidden"])
        logits = hidden @ layers["output"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

    @jax.jit
    def step(state: State, rows: ArrayLike, wanted: ArrayLike) -> tuple[State]:
        table, squares, layers = state["table"], state["squares"], state["layers"]
        unique, place = jnp.unique(
            rows, return_inverse=True, size=touched, fill_value=TABLE_ROWS
        )
        by_layer, by_vector = jax.grad(loss, (0, 1))(layers, table[rows], wanted)
        gradient = (
            jnp.zeros((touched, TABLE_WIDTH))
            .at[place.ravel()]
            .add(by_vector.reshape(-1, TABLE_WIDTH))
        )
        seen = squares.at[unique].add((gradient**2).mean(1), mode="drop")
        scale = 0.02 * jax.lax.rsqrt(seen[unique] + 1e-10)
        table = table.at[unique].add(-scale[:, None] * gradient, mode="drop")
        layers = jtu.tree_map(lambda w, g: w - 0.1 * g, layers, by_layer)
        return ({"table": table, "squares": seen, "layers": layers},)

    return step


def embedding_states(*, seed: int, batch: int = 440) -> Iterator[State]:
    """A table of 1,000,000 x 32 fp32, of which a step touches about 4,400 rows.

    The task: tell the next token from hashed n-grams of the tokens before it.
    """
    step = embedding_step(batch)
    text = encoded_text(VOCABULARY)

    def data() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng([seed, 2])
        while True:
            ends = rng.integers(CONTEXT + ORDERS, len(text), size=batch)
            yield ngram_rows(text, ends), text[ends] % CLASSES

    def initial() -> State:
        keys = jax.random.split(jax.random.key(seed), 3)
        inputs = CONTEXT * ORDERS * TABLE_WIDTH
        return {
            "table": 0.05 * jax.random.normal(keys[0], (TABLE_ROWS, TABLE_WIDTH)),
            "squares": jnp.zeros(TABLE_ROWS),
            "layers": {
                "hidden": 0.03 * jax.random.normal(keys[1], (inputs, 32)),
                "output": 0.1 * jax.random.normal(keys[2], (32, CLASSES)),
            },
        }

    stream, state = data(), initial()
    title = "warming up embedding"
    for _ in track(
        range(WARM_UP_STEPS), title, console=Console(stderr=True), transient=True
    ):
        (state,) = jax.block_until_ready(step(state, *next(stream)))
    while True:
        yield state
        (state,) = step(state, *next(stream))
