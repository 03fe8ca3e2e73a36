"""An output head that trains by sampled softmax: only the columns of a sample move."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from decoder import Decoder, State, batches, bf16_copy
from jax.typing import ArrayLike
from training import Setup, pretrained, run_steps

NEGATIVES = 64
WARM_UP_STEPS = 20
LEARNING_RATE = 0.02


def samples(setup: Setup) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields one sequence and the columns of its step, for ever.

    Columns are the tokens to tell and `NEGATIVES` random others, filled up to one count
    with the number after the last column, which stands for none.

    Yields:
        int32[1, length + 1] and int32[columns].
    """
    sizes = setup.sizes
    rng = np.random.default_rng([setup.seed, 3])
    for tokens in batches(sizes, seed=setup.seed, held_back=True):
        others = rng.integers(0, sizes.vocabulary, NEGATIVES)
        found = np.union1d(tokens[0, 1:], others)
        columns = np.full(sizes.length + NEGATIVES, sizes.vocabulary, np.int32)
        columns[: len(found)] = found
        yield tokens[:1], columns


def head_columns(setup: Setup) -> Iterator[State]:
    """A head [width, vocabulary] over a frozen model, trained by sampled softmax.

    Columns of the sample get an Adagrad update, one accumulator a column; all others
    stay as they are, bit for bit.
    """
    sizes = setup.sizes
    master = pretrained(setup)[0]
    frozen = bf16_copy({name: part for name, part in master.items() if name != "head"})

    def loss(chosen: jax.Array, hidden: jax.Array, places: jax.Array) -> jax.Array:
        logits = hidden @ chosen
        return optax.softmax_cross_entropy_with_integer_labels(logits, places).mean()

    @jax.jit
    def step(
        head: jax.Array, squares: jax.Array, sample: tuple[ArrayLike, ArrayLike]
    ) -> tuple[jax.Array, jax.Array]:
        tokens, columns = jnp.asarray(sample[0]), jnp.asarray(sample[1])
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), frozen)
        model = Decoder(sizes, with_head=False)
        hidden = model.apply({"params": weights}, tokens[:, :-1])[0]
        places = jnp.searchsorted(columns, tokens[0, 1:])
        chosen = jnp.take(head, columns, axis=1, fill_value=0)
        gradient = jax.grad(loss)(chosen, hidden, places)
        seen = squares.at[columns].add((gradient**2).mean(0), mode="drop")
        rate = LEARNING_RATE * jax.lax.rsqrt(jnp.take(seen, columns, fill_value=1))
        head = head.at[:, columns].add(-rate * gradient, mode="drop")
        return head, seen

    stream = samples(setup)
    state = master["head"]["kernel"], jnp.full(sizes.vocabulary, 1e-6)
    state = run_steps(step, state, stream, WARM_UP_STEPS, "warming up head_columns")
    while True:
        yield {"backbone": frozen, "head": state[0], "squares": state[1]}
        state = step(*state, next(stream))
