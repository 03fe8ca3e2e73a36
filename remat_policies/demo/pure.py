"""Blocks in sequence as pure functions: scanned or unrolled, rematerialised or not.

Layers are either "stacked", one dict whose arrays lead with an axis of layers, or
"apart", one dict for each layer. Does not belong here: what a block computes.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from remat_policies.demo.maths import Params
from remat_policies.demo.maths import block as apply
from remat_policies.demo.values import BlockConfig, shapes

BlockFn = Callable[[Params, jax.Array, jax.Array | None], jax.Array]
"""A block as `wrap` gets it and gives it back: of parameters, x and dropout key."""

Wrap = Callable[[BlockFn], BlockFn]
"""How a block is rematerialised, such as `jax.checkpoint` with its policy bound."""


def init_param(
    key: jax.Array, config: BlockConfig, name: str, shape: tuple[int, ...]
) -> jax.Array:
    """First value of one parameter.

    Args:
        key: Typed random key.
        config: Sizes of the block.
        name: The parameter's name.
        shape: Its shape.

    Returns:
        config.dtype[shape]: 1 for scales, 0 for biases, else normal, divided by the
        square root of the inputs that each output sums over.
    """
    if name.endswith("_bias"):
        return jnp.zeros(shape, config.dtype)
    if name.endswith("_norm"):
        return jnp.ones(shape, config.dtype)
    if name == "out":
        inputs = config.heads * config.head_dim
    else:
        inputs = config.ffn_dim if name == "wo" else config.d_model
    drawn = jax.random.normal(key, shape, jnp.float32) / math.sqrt(inputs)
    return drawn.astype(config.dtype)


def init(config: BlockConfig, key: jax.Array) -> dict[str, jax.Array]:
    """First parameters of one block.

    Args:
        config: Sizes of the block.
        key: Typed random key.

    Returns:
        Arrays by name, as described by `values.shapes`.
    """
    wanted = shapes(config)
    keys = jax.random.split(key, len(wanted))
    return {
        name: init_param(each, config, name, shape)
        for each, (name, shape) in zip(keys, wanted.items())
    }


def init_stack(
    config: BlockConfig, key: jax.Array, layers: int
) -> dict[str, jax.Array]:
    """First parameters of several blocks, stacked.

    Args:
        config: Sizes of each block.
        key: Typed random key.
        layers: How many blocks.

    Returns:
        Arrays by name, each [layers, *shape].
    """
    return jax.vmap(functools.partial(init, config))(jax.random.split(key, layers))


def apart(params: Params) -> tuple[dict[str, jax.Array], ...]:
    """From stacked parameters to those of each layer."""
    layers = next(iter(params.values())).shape[0]
    return tuple(
        {name: value[layer] for name, value in params.items()}
        for layer in range(layers)
    )


def stacked(layers: Sequence[Params]) -> dict[str, jax.Array]:
    """From the parameters of each layer to stacked ones."""
    return {name: jnp.stack([one[name] for one in layers]) for name in layers[0]}


def avals(
    config: BlockConfig, batch: int, seq: int, *, layers: int | None = None
) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Abstract arguments of a block, or of stacked layers: to trace without memory.

    Args:
        config: Sizes of each block.
        batch: Sequences.
        seq: Tokens of each.
        layers: How many blocks are stacked; None for one that is not.

    Returns:
        Parameters by name, and x, config.dtype[batch, seq, d_model].
    """

    def concrete() -> tuple[dict[str, jax.Array], jax.Array]:
        key = jax.random.key(0)
        params = (
            init(config, key) if layers is None else init_stack(config, key, layers)
        )
        return params, jnp.zeros((batch, seq, config.d_model), config.dtype)

    abstract: tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]
    abstract = jax.eval_shape(concrete)
    return abstract


def stack(
    config: BlockConfig,
    params: Params | Sequence[Params],
    x: jax.Array,
    key: jax.Array | None = None,
    *,
    wrap: Wrap | None = None,
) -> jax.Array:
    """Several blocks, one after the other: one `jax.lax.scan` if they are stacked.

    Args:
        config: Sizes of each block.
        params: Stacked parameters, or those of each layer, which are unrolled.
        x: dtype[batch, seq, d_model].
        key: Typed random key for dropout, split over the layers; None switches it off.
        wrap: How a block is rematerialised; None does not.

    Returns:
        Of the shape and dtype of `x`.
    """
    block: BlockFn = functools.partial(apply, config)
    if wrap is not None:
        block = wrap(block)
    if isinstance(params, Mapping):
        return _scan(block, params, x, key)
    keys = (None,) * len(params) if key is None else jax.random.split(key, len(params))
    for layer, each in zip(params, keys):
        x = block(layer, x, each)
    return x


def _scan(
    block: BlockFn, params: Params, x: jax.Array, key: jax.Array | None
) -> jax.Array:
    """The blocks as steps of one loop; their keys are those of `stack` unrolled."""
    layers = next(iter(params.values())).shape[0]
    keys = None if key is None else jax.random.split(key, layers)

    def step(
        carry: jax.Array, layer: tuple[Params, jax.Array | None]
    ) -> tuple[jax.Array, None]:
        return block(layer[0], carry, layer[1]), None

    return jax.lax.scan(step, x, (params, keys))[0]


def loss(
    config: BlockConfig,
    params: Params | Sequence[Params],
    x: jax.Array,
    key: jax.Array | None = None,
    *,
    wrap: Wrap | None = None,
) -> jax.Array:
    """Mean square of what `stack` returns, float32[]: something to differentiate."""
    y = stack(config, params, x, key, wrap=wrap)
    return jnp.mean(y.astype(jnp.float32) ** 2)
