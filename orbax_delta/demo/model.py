"""What the demo trains: a small Flax decoder, its text and one training step.

Ordinary training code, with everything that the next step depends on in one state: an
exact restore of that state is then an exact continuation. Does not belong here: saving.
"""

import functools
import os
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from orbax_delta.demo.runs import DemoConfig

TEXT_BYTES = 400_000
VOCABULARY = 256
DROPOUT_RATE = 0.1
WARMUP_STEPS = 20
# The demo trains the first steps of a longer run: a learning rate that had already
# decayed to nothing would make successive states more alike than they usually are.
SCHEDULE_STEPS = 1_000


class Decoder(nn.Module):
    """A decoder-only transformer over bytes, with pre-norm blocks.

    Attributes:
        config: Sizes of the model.
    """

    config: DemoConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        """Predict each next byte.

        Args:
            tokens: int32[batch, context], byte values.
            train: Whether dropout is active; it then needs the "dropout" generator.

        Returns:
            Logits, float32[batch, context, 256].
        """
        width = self.config.width
        positions = jnp.arange(tokens.shape[1])
        hidden = nn.Embed(VOCABULARY, width, dtype=jnp.bfloat16)(tokens)
        hidden += nn.Embed(self.config.context, width, dtype=jnp.bfloat16)(positions)
        mask = nn.make_causal_mask(tokens)
        dropout = nn.Dropout(DROPOUT_RATE, deterministic=not train)
        for _ in range(self.config.layers):
            attention = nn.MultiHeadDotProductAttention(
                self.config.heads, dtype=jnp.bfloat16
            )
            normal = nn.LayerNorm(dtype=jnp.bfloat16)(hidden)
            hidden += dropout(attention(normal, mask=mask))
            normal = nn.LayerNorm(dtype=jnp.bfloat16)(hidden)
            inner = nn.gelu(nn.Dense(4 * width, dtype=jnp.bfloat16)(normal))
            hidden += dropout(nn.Dense(width, dtype=jnp.bfloat16)(inner))
        hidden = nn.LayerNorm(dtype=jnp.bfloat16)(hidden)
        logits = nn.Dense(VOCABULARY, dtype=jnp.bfloat16)(hidden)
        return logits.astype(jnp.float32)


@flax.struct.dataclass
class TrainState:
    """All that the next training step depends on.

    Attributes:
        step: int32[], training steps done.
        master: The parameters, float32.
        compute: bfloat16 copy of `master`, which the model computes with.
        optimizer: State of AdamW and of its learning-rate schedule.
        dropout_key: Typed random key, split at every step.
        text_position: int32[], where every row of the text is read next.
    """

    step: jax.Array
    master: Any
    compute: Any
    optimizer: optax.OptState
    dropout_key: jax.Array
    text_position: jax.Array


def read_text(rows: int) -> jax.Array:
    """Read Python's own standard library as training text.

    Args:
        rows: Number of equal streams that the text is cut into.

    Returns:
        uint8[rows, bytes per row].
    """
    text = bytearray()
    for source in sorted(Path(os.__file__).parent.glob("*.py")):
        text += source.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    row_bytes = min(len(text), TEXT_BYTES) // rows
    flat = np.frombuffer(bytes(text[: rows * row_bytes]), np.uint8)
    return jnp.asarray(flat.reshape(rows, row_bytes))


def optimizer() -> optax.GradientTransformation:
    """AdamW under a warm-up and cosine learning-rate schedule."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 1e-3, WARMUP_STEPS, SCHEDULE_STEPS, 1e-4
    )
    return optax.adamw(schedule, b2=0.95, weight_decay=0.1)


def compute_copy(master: Any) -> Any:
    """Cast a tree of float32 parameters to bfloat16."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), master)


def initial_state(config: DemoConfig) -> TrainState:
    """Build the state before the first step, from `config.seed` alone."""
    init_key, dropout_key = jax.random.split(jax.random.key(config.seed))
    tokens = jnp.zeros((1, config.context), jnp.int32)
    master = Decoder(config).init(init_key, tokens, train=False)["params"]
    return TrainState(
        step=jnp.int32(0),
        master=master,
        compute=compute_copy(master),
        optimizer=optimizer().init(master),
        dropout_key=dropout_key,
        text_position=jnp.int32(0),
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(
    config: DemoConfig, state: TrainState, text: jax.Array
) -> tuple[TrainState, jax.Array]:
    """Do one step of training; the old state's memory is given to the new one.

    Args:
        config: Sizes of the model.
        state: The state to go on from; it is donated.
        text: uint8[batch, bytes per row], as from `read_text`.

    Returns:
        The next state and the step's loss, float32[], in nats a byte.
    """
    dropout_key, next_key = jax.random.split(state.dropout_key)
    window = jax.lax.dynamic_slice_in_dim(
        text, state.text_position, config.context + 1, axis=1
    ).astype(jnp.int32)

    def loss_of(compute: Any) -> Any:
        logits = Decoder(config).apply(
            {"params": compute},
            window[:, :-1],
            train=True,
            rngs={"dropout": dropout_key},
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_of)(state.compute)
    grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
    updates, opt_state = optimizer().update(grads, state.optimizer, state.master)
    master = optax.apply_updates(state.master, updates)
    position = state.text_position + config.context
    at_end = position + config.context + 1 > text.shape[1]
    next_state = TrainState(
        step=state.step + 1,
        master=master,
        compute=compute_copy(master),
        optimizer=opt_state,
        dropout_key=next_key,
        text_position=jnp.where(at_end, 0, position),
    )
    return next_state, loss
