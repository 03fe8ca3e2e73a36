"""Attention with grouped heads: by XLA anywhere, by cuDNN on GPUs, by splash on TPUs.

Does not belong here: projections, and what a block does with the result.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import ad_checkpoint
from jax.experimental.pallas.ops.tpu import splash_attention

from remat_policies.demo.values import BlockConfig

# JAX gives it no types.
_checkpoint_name: Callable[[jax.Array, str], jax.Array] = ad_checkpoint.checkpoint_name

SPLASH_BLOCK = 512
"""Rows of queries and keys that the TPU kernel holds at once, at most."""


def named(config: BlockConfig, value: jax.Array, name: str) -> jax.Array:
    """Give a value its name, where the block has names."""
    return _checkpoint_name(value, name) if config.names else value


def rope(x: jax.Array, theta: float) -> jax.Array:
    """Turn each head's pairs (i, i + head_dim/2) by angles that grow with position.

    Args:
        x: dtype[batch, seq, heads, head_dim].
        theta: Base of the frequencies.

    Returns:
        Of the shape and dtype of `x`; float32 inside.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(
    config: BlockConfig, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Attention, causal in a decoder; its result is named `context`.

    XLA's derivative of the next projection reads `context`. Around cuDNN the name saves
    bytes but not the kernel's second run: its backward pass reads an output that has no
    name. Splash names its own residuals.

    Args:
        config: Sizes of the block and which implementation.
        query: dtype[batch, seq, heads, head_dim].
        key: dtype[batch, seq, kv_heads, head_dim].
        value: Like `key`.

    Returns:
        Of the shape and dtype of `query`.
    """
    if config.attention == "splash":
        return _splash(config, query, key, value)
    if config.attention == "cudnn":
        context = jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=config.kind == "decoder",
            implementation="cudnn",
        )
    else:
        context = _xla(config, query, key, value)
    return named(config, context, "context")


def _xla(
    config: BlockConfig, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Attention by matrix products; the softmax is float32[batch, heads, seq, seq]."""
    batch, seq, heads, head_dim = query.shape
    # Groups share their keys through the product: a repeated copy would be a residual.
    grouped = query.reshape(batch, seq, config.kv_heads, -1, head_dim)
    logits = jnp.einsum(
        "bqkgh,bskh->bkgqs", grouped, key, preferred_element_type=jnp.float32
    )
    logits = logits * head_dim**-0.5
    if config.kind == "decoder":
        seen = jnp.tril(jnp.ones((seq, seq), jnp.bool))
        logits = jnp.where(seen, logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(query.dtype)
    context = jnp.einsum("bkgqs,bskh->bqkgh", weights, value)
    return context.reshape(batch, seq, heads, head_dim)


def _splash(
    config: BlockConfig, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Attention by JAX's own TPU kernel, which takes heads before positions.

    Sequences are further heads to it: `vmap` of a kernel with names fails under the new
    remat of jax 0.10. Groups stay whole, as each sequence has `kv_heads` of them.
    """
    batch, seq, heads, head_dim = query.shape
    mask = (
        splash_attention.CausalMask((seq, seq))
        if config.kind == "decoder"
        else splash_attention.FullMask((seq, seq))
    )
    block = min(SPLASH_BLOCK, seq)
    kernel = splash_attention.make_splash_mha_single_device(
        splash_attention.MultiHeadMask([mask] * (batch * heads)),
        block_sizes=splash_attention.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        # Named inside, output and row sums are saved once; outside as well, twice.
        residual_checkpoint_name="context" if config.names else None,
    )
    query = query * jnp.asarray(head_dim**-0.5, query.dtype)
    query, key, value = (
        x.swapaxes(1, 2).reshape(-1, seq, head_dim) for x in (query, key, value)
    )
    context: jax.Array = kernel(query, key, value)
    return context.reshape(batch, heads, seq, head_dim).swapaxes(1, 2)
