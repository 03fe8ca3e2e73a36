"""Transformer blocks as pure functions of a dict of parameters.

A name stands where saving its value pays: on what a backward pass or a recomputation
reads, after the cast to a narrow dtype, before the activation. `mlpwo` alone is never
needed again in a dense block; it is there because MaxText has it.

Does not belong here: layers in sequence, and Flax.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from remat_policies.demo.attention import attend, named, rope
from remat_policies.demo.values import BlockConfig

Params = Mapping[str, jax.Array]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Scale every token to a root mean square of 1.

    Args:
        x: dtype[..., d].
        scale: dtype[d].
        eps: Added to the mean square.

    Returns:
        Of the shape and dtype of `x`; float32 inside.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)


def layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float
) -> jax.Array:
    """Shift and scale every token to mean 0 and variance 1.

    Args:
        x: dtype[..., d].
        scale: dtype[d].
        bias: dtype[d].
        eps: Added to the variance.

    Returns:
        Of the shape and dtype of `x`; float32 inside.
    """
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (wide * scale + bias).astype(x.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero a share of the values and scale up the others; nothing without a key.

    Args:
        x: Values of any shape.
        rate: Share to zero, in [0, 1).
        key: Typed random key, or None.

    Returns:
        Of the shape and dtype of `x`.
    """
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def self_attention(config: BlockConfig, params: Params, x: jax.Array) -> jax.Array:
    """Project, attend, project back.

    Args:
        config: Sizes of the block.
        params: The block's parameters; `query`, `key`, `value` and `out` are used.
        x: Normalised input, dtype[batch, seq, d_model].

    Returns:
        Of the shape and dtype of `x`.
    """
    query, key, value = (
        jnp.einsum("bsd,dhk->bshk", x, params[name])
        for name in ("query", "key", "value")
    )
    if config.kind == "decoder":
        query, key = (rope(heads, config.rope_theta) for heads in (query, key))
    # After RoPE: attention reads these, and RoPE's derivative reads no value at all.
    query = named(config, query, "query_proj")
    key = named(config, key, "key_proj")
    value = named(config, value, "value_proj")
    context = attend(config, query, key, value)
    out = jnp.einsum("bshk,hkd->bsd", context, params["out"])
    return named(config, out, "out_proj")


def swiglu(config: BlockConfig, params: Params, x: jax.Array) -> jax.Array:
    """The dense MLP of a decoder: dtype[batch, seq, d_model], in and out."""
    gate = named(config, x @ params["wi_0"], "mlpwi_0")
    up = named(config, x @ params["wi_1"], "mlpwi_1")
    return named(config, (jax.nn.silu(gate) * up) @ params["wo"], "mlpwo")


def gelu_mlp(config: BlockConfig, params: Params, x: jax.Array) -> jax.Array:
    """The MLP of an encoder: dtype[batch, seq, d_model], in and out."""
    inner = named(config, x @ params["wi"], "mlpwi")
    return named(config, jax.nn.gelu(inner) @ params["wo"], "mlpwo")


def route(
    config: BlockConfig, router: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of every token by the highest router logits.

    Args:
        config: Sizes of the block.
        router: dtype[d_model, experts].
        tokens: dtype[tokens, d_model].

    Returns:
        Indices of the chosen experts, int32[tokens, experts_per_token], and their
        weights, float32 of the same shape, which sum to 1 for each token.
    """
    logits = jnp.matmul(tokens, router, preferred_element_type=jnp.float32)
    logits = named(config, logits, "moe_router")
    chosen, experts = jax.lax.top_k(logits, config.experts_per_token)
    return experts, jax.nn.softmax(chosen, axis=-1)


def moe(config: BlockConfig, params: Params, x: jax.Array) -> jax.Array:
    """The MLP of a decoder with experts: no token is dropped, no expert computes more.

    Tokens are sorted by expert, so that each expert's are the rows of one ragged matrix
    product, whose shape does not depend on the routing.

    Args:
        config: Sizes of the block.
        params: The block's parameters; `router`, `wi_0`, `wi_1` and `wo` are used.
        x: Normalised input, dtype[batch, seq, d_model].

    Returns:
        Of the shape and dtype of `x`.
    """
    tokens = x.reshape(-1, config.d_model)
    experts, weights = route(config, params["router"], tokens)
    order = jnp.argsort(experts.reshape(-1))
    counts = jnp.bincount(experts.reshape(-1), length=config.experts)
    rows = tokens[order // config.experts_per_token]
    gate = jax.lax.ragged_dot(rows, params["wi_0"], counts)
    gate = named(config, gate, "moe_mlpwi_0")
    up = named(config, jax.lax.ragged_dot(rows, params["wi_1"], counts), "moe_mlpwi_1")
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, params["wo"], counts)
    # Unlike `mlpwo` this is needed again: the derivative of the weights reads it.
    out = named(config, out, "moe_mlpwo")
    out = out[jnp.argsort(order)].reshape(*experts.shape, config.d_model)
    mixed = jnp.einsum("tkd,tk->td", out, weights.astype(out.dtype))
    return mixed.reshape(x.shape)


def block(
    config: BlockConfig, params: Params, x: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """One pre-norm block of the configured kind.

    Args:
        config: Sizes of the block.
        params: Parameters, as described by `values.shapes`.
        x: dtype[batch, seq, d_model].
        key: Typed random key for dropout; None switches it off.

    Returns:
        Of the shape and dtype of `x`.
    """
    encoder = config.kind == "encoder"
    first, second = (None, None) if key is None else jax.random.split(key)

    def norm(values: jax.Array, name: str) -> jax.Array:
        if encoder:
            bias = params[f"{name}_bias"]
            return layer_norm(values, params[name], bias, config.eps)
        return rms_norm(values, params[name], config.eps)

    mlp = gelu_mlp if encoder else moe if config.experts else swiglu
    x = named(config, x, f"{config.kind}_layer_input")
    normed = named(config, norm(x, "attn_norm"), "attention_norm")
    out = self_attention(config, params, normed)
    x = x + dropout(out, config.dropout, first)
    out = mlp(config, params, named(config, norm(x, "mlp_norm"), "mlp_norm"))
    return x + dropout(out, config.dropout, second)
