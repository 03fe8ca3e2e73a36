"""The blocks as `flax.linen` modules: the same parameters, the same mathematics.

Does not belong here: what a block computes.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax

from remat_policies.demo import maths, pure
from remat_policies.demo.maths import Params
from remat_policies.demo.values import BlockConfig, shapes


class Block(nn.Module):
    """One block; dropout is active where the generator "dropout" is given.

    Attributes:
        config: Sizes of the block.
    """

    config: BlockConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block: dtype[batch, seq, d_model], in and out."""
        params = {
            name: self.param(
                name,
                functools.partial(
                    pure.init_param, config=self.config, name=name, shape=shape
                ),
            )
            for name, shape in shapes(self.config).items()
        }
        dropped = self.config.dropout > 0 and self.has_rng("dropout")
        key = self.make_rng("dropout") if dropped else None
        return maths.block(self.config, params, x, key)


class Stack(nn.Module):
    """Several blocks, one after the other.

    Attributes:
        config: Sizes of each block.
        layers: How many blocks.
        scanned: Whether they are the steps of one `nn.scan`.
        wrap: How the class is rematerialised, such as `nn.remat` with its policy bound;
            None does not.
    """

    config: BlockConfig
    layers: int
    scanned: bool = True
    wrap: Callable[[type[Block]], type[Block]] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all blocks: dtype[batch, seq, d_model], in and out."""
        block = Block if self.wrap is None else self.wrap(Block)
        if not self.scanned:
            for layer in range(self.layers):
                x = block(self.config, name=f"block_{layer}")(x)
            return x
        scan: Callable[..., tuple[jax.Array, None]] = nn.scan(
            lambda module, carry, _: (module(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        return scan(block(self.config, name="blocks"), x, None)[0]


def from_pure(params: Params | Sequence[Params]) -> dict[str, Any]:
    """Variables of a `Stack` from parameters in the form of `pure`.

    Args:
        params: Stacked parameters for a scanned stack, else those of each layer.

    Returns:
        What `Stack.apply` takes.
    """
    if isinstance(params, Mapping):
        return {"params": {"blocks": dict(params)}}
    return {"params": {f"block_{n}": dict(layer) for n, layer in enumerate(params)}}


def to_pure(
    variables: Mapping[str, Any],
) -> dict[str, jax.Array] | tuple[dict[str, jax.Array], ...]:
    """The inverse of `from_pure`, for variables or their gradients."""
    params = variables["params"]
    if "blocks" in params:
        return dict(params["blocks"])
    return tuple(dict(params[f"block_{n}"]) for n in range(len(params)))
