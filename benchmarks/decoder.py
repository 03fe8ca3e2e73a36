"""A small GPT-like decoder in flax and the real text that it learns.

The text is the source of Python's own standard library, which every machine has, cut
into a vocabulary of its most frequent tokens.
"""

import collections
import dataclasses
import functools
import pathlib
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from counting import State as State

HELD_BACK = 0.2
"""Share of the text that pre-training never sees; the tuning workloads train on it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Sizes of the decoder and of one batch of training.

    Attributes:
        vocabulary: Rows of the token table and of the head.
        width: Size of the residual stream.
        layers: Number of blocks.
        heads: Attention heads in a block.
        length: Tokens in one sequence.
        batch: Sequences in one batch.
        pretrain_steps: Steps of pre-training before a state is worth measuring.
        tune_steps: The same of a run that starts from pre-trained weights.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int
    batch: int
    pretrain_steps: int = 600
    tune_steps: int = 50


SCALES: Mapping[str, Scale] = {
    # Says only whether a program runs.
    "tiny": Scale(
        vocabulary=512,
        width=64,
        layers=2,
        heads=2,
        length=32,
        batch=4,
        pretrain_steps=20,
        tune_steps=5,
    ),
    "small": Scale(vocabulary=4096, width=256, layers=4, heads=4, length=128, batch=4),
    "medium": Scale(vocabulary=8192, width=384, layers=5, heads=6, length=128, batch=8),
    # For ratios of time, where what a save costs at least must not count: 1 GB. Trained
    # for moments that are no longer zero, not for a good model.
    "large": Scale(
        vocabulary=16384,
        width=768,
        layers=7,
        heads=12,
        length=64,
        batch=2,
        pretrain_steps=24,
        tune_steps=8,
    ),
}


@functools.cache
def library_tokens() -> tuple[str, ...]:
    """Returns Python's standard library as tokens: words, runs of blanks, signs."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "site-packages", "dist-packages", "idlelib"}
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not skipped & set(path.relative_to(root).parts)
    ]
    # A seeded shuffle of files makes the held-back part alike in kind to the rest.
    order = np.random.default_rng(0).permutation(len(paths))
    words = re.compile(r"\w+|[^\S\n]+|\n|[^\w\s]")
    tokens: list[str] = []
    for index in order:
        text = paths[index].read_text(encoding="utf-8", errors="replace")
        tokens += [sys.intern(token) for token in words.findall(text)]
    return tuple(tokens)


@functools.cache
def encoded_text(vocabulary: int) -> np.ndarray:
    """Returns the text as token numbers, the rarest tokens sharing number 0.

    Args:
        vocabulary: How many numbers there are.

    Returns:
        int32[tokens].
    """
    tokens = library_tokens()
    common = collections.Counter(tokens).most_common(vocabulary - 1)
    numbers = {token: rank for rank, (token, _) in enumerate(common, start=1)}
    return np.fromiter(
        (numbers.get(token, 0) for token in tokens), np.int32, len(tokens)
    )


def batches(sizes: Scale, *, seed: int, held_back: bool) -> Iterator[np.ndarray]:
    """Yields batches of random windows of the text, for ever.

    Args:
        sizes: Vocabulary, length and batch.
        seed: Seed of the places where windows start.
        held_back: Whether to read the part of the text that pre-training never sees.

    Yields:
        int32[batch, length + 1]: inputs are [:, :-1], wanted outputs [:, 1:].
    """
    text = encoded_text(sizes.vocabulary)
    border = int(len(text) * (1 - HELD_BACK))
    text = text[border:] if held_back else text[:border]
    rng = np.random.default_rng([seed, held_back])
    window = np.arange(sizes.length + 1)
    while True:
        starts = rng.integers(0, len(text) - len(window), size=sizes.batch)
        yield text[starts[:, None] + window]


class Block(nn.Module):
    """One pre-norm transformer block with causal attention and a GELU MLP."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[batch, length, width] to the same shape."""
        batch, length, width = x.shape
        dense = functools.partial(nn.Dense, kernel_init=nn.initializers.normal(0.02))
        qkv = dense(3 * width, name="qkv")(nn.LayerNorm(name="norm_1")(x))
        q, k, v = jnp.split(qkv.reshape(batch, length, self.heads, -1), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + dense(width, name="out")(mixed.reshape(batch, length, width))
        hidden = dense(4 * width, name="up")(nn.LayerNorm(name="norm_2")(x))
        return x + dense(width, name="down")(nn.gelu(hidden))


class Decoder(nn.Module):
    """A GPT-like decoder with learned positions and a head of its own.

    Attributes:
        sizes: Its sizes.
        with_head: Whether it ends in logits; else in what goes into the head.
    """

    sizes: Scale
    with_head: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps int[batch, length] to float[batch, length, vocabulary or width]."""
        sizes, init = self.sizes, nn.initializers.normal(0.02)
        table = nn.Embed(
            sizes.vocabulary, sizes.width, embedding_init=init, name="embed"
        )
        position = self.param("position", init, (sizes.length, sizes.width))
        x = table(tokens) + position[: tokens.shape[1]]
        for layer in range(sizes.layers):
            x = Block(sizes.heads, name=f"block_{layer}")(x)
        x = nn.LayerNorm(name="norm")(x)
        if not self.with_head:
            return x
        return nn.Dense(
            sizes.vocabulary, use_bias=False, kernel_init=init, name="head"
        )(x)


def initial_master(sizes: Scale, *, seed: int) -> State:
    """Returns the decoder's first fp32 weights."""
    tokens = jnp.zeros((1, sizes.length), jnp.int32)
    return Decoder(sizes).init(jax.random.key(seed), tokens)["params"]


def bf16_copy(tree: State) -> State:
    """Returns the tree with every leaf rounded to bf16."""
    return jtu.tree_map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


def rounded(tree: State) -> State:
    """Returns the values of the bf16 copy as fp32.

    The decoder multiplies in fp32 (bf16 is slow on a CPU) with the values that the bf16
    weights have, and so the gradients are fp32.
    """
    return jtu.tree_map(lambda leaf: leaf.astype(jnp.float32), bf16_copy(tree))


def sequence_losses(sizes: Scale, weights: State, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of the next token, float32[batch]."""
    logits = Decoder(sizes).apply({"params": weights}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(axis=1)


def mean_loss(sizes: Scale, weights: State, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of the next token over the batch, float32[]."""
    return sequence_losses(sizes, weights, tokens).mean()
