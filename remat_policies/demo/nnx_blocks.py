"""The blocks as `flax.nnx` modules: the same parameters, the same mathematics.

Does not belong here: what a block computes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from remat_policies.demo import maths, pure
from remat_policies.demo.maths import Params
from remat_policies.demo.values import BlockConfig, shapes


class Block(nnx.Module):
    """One block; dropout is active until `eval()` switches it off.

    Attributes:
        config: Sizes of the block.
        deterministic: Whether dropout is off.
        dropout: The block's own generator; None where the rate is 0.
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        """Draw the parameters.

        Args:
            config: Sizes of the block.
            rngs: Generators "params" and, if there is dropout, "dropout".
        """
        self.config = config
        self.deterministic = False
        self.dropout = rngs.dropout.fork() if config.dropout else None
        for name, value in pure.init(config, rngs.params()).items():
            setattr(self, name, nnx.Param(value))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block: dtype[batch, seq, d_model], in and out."""
        params = {name: getattr(self, name)[...] for name in shapes(self.config)}
        key = None
        if self.dropout is not None and not self.deterministic:
            key = self.dropout()
        return maths.block(self.config, params, x, key)


BlockFn = Callable[[Block, jax.Array], jax.Array]
"""Applies a block to x: what `wrap` gets and gives back."""


class Stack(nnx.Module):
    """Several blocks, one after the other.

    Attributes:
        blocks: One `Block` whose variables lead with an axis of layers if scanned, else
            a list of blocks.
    """

    def __init__(
        self,
        config: BlockConfig,
        layers: int,
        *,
        scanned: bool = True,
        wrap: Callable[[BlockFn], BlockFn] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Draw the parameters; the same for equal generators, scanned or not.

        Args:
            config: Sizes of each block.
            layers: How many blocks.
            scanned: Whether they are the steps of one `nnx.scan`.
            wrap: How a block is rematerialised, such as `nnx.remat` with its policy
                bound; None does not.
            rngs: Generators "params" and, if there is dropout, "dropout".
        """
        self.scanned = scanned
        self.wrap = wrap
        keys = {"params": jax.random.split(rngs.params(), layers)}
        if config.dropout:
            keys["dropout"] = jax.random.split(rngs.dropout(), layers)

        def make(keys: dict[str, jax.Array]) -> Block:
            return Block(config, rngs=nnx.Rngs(**keys))

        self.blocks: Any
        if scanned:
            self.blocks = nnx.vmap(make)(keys)
        else:
            each = ({name: key[n] for name, key in keys.items()} for n in range(layers))
            self.blocks = nnx.List(map(make, each))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all blocks: dtype[batch, seq, d_model], in and out."""
        run: BlockFn = Block.__call__
        if self.wrap is not None:
            run = self.wrap(run)
        if not self.scanned:
            for block in self.blocks:
                x = run(block, x)
            return x
        scan = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        carry: jax.Array = scan(self.blocks, x)
        return carry


def load(model: Stack, params: Params | Sequence[Params]) -> None:
    """Replace a model's parameters by some in the form of `pure`.

    Args:
        model: Changed in place.
        params: Stacked parameters for a scanned stack, else those of each layer.
    """
    state = nnx.state(model, nnx.Param)
    blocks = params if isinstance(params, Mapping) else dict(enumerate(params))
    nnx.replace_by_pure_dict(state, {"blocks": blocks})
    nnx.update(model, state)


def to_pure(
    state: nnx.State[Any, Any],
) -> dict[str, jax.Array] | tuple[dict[str, jax.Array], ...]:
    """Parameters, or their gradients, in the form of `pure`.

    Args:
        state: Of a `Stack`, as `nnx.state(model, nnx.Param)` and `nnx.grad` give it.

    Returns:
        Stacked parameters of a scanned stack, else those of each layer.
    """
    blocks = nnx.to_pure_dict(state)["blocks"]
    if 0 in blocks:
        return tuple(dict(blocks[n]) for n in range(len(blocks)))
    return dict(blocks)
