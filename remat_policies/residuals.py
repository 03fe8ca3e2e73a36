"""What a block keeps under a policy, value by value, and what it runs again.

Does not belong here: warnings, tables, plots.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from remat_policies import _compat
from remat_policies.choosing import Kept, choose
from remat_policies.errors import InvalidInputError, UnknownNameError
from remat_policies.linearized import Linearized, linearize
from remat_policies.policies import Policy
from remat_policies.program import automatic_names
from remat_policies.schedule import Schedule, needed, schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One value that is kept from the forward to the backward pass.

    Attributes:
        name: What the block or `autoname` calls it.
        source: File and line that make it.
        shape: Of the array.
        dtype: Of the array.
        nbytes: Size in bytes.
        place: "device" or "host".
        needed: The backward pass reads it.
        saves_flops: Operations that would be run again if it were not kept.
        with_kernel: No name asked for it: the kernel of a kept value makes it too.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    place: str
    needed: bool
    saves_flops: float
    with_kernel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """All values of one function that are kept under one policy.

    Attributes:
        policy: The policy.
        rows: One for each kept value, the largest first.
        argument_bytes: Size of the arguments that the backward pass reads. A scan over
            layers stacks those that differ from layer to layer.
        forward_flops: Operations of the forward pass.
        recompute_flops: Operations that the backward pass runs again.
        tokens: By how many tokens bytes are divided in tables.
    """

    policy: Policy
    rows: tuple[Residual, ...]
    argument_bytes: int
    forward_flops: float
    recompute_flops: float
    tokens: int

    @property
    def device_bytes(self) -> int:
        """Bytes kept on the device, arguments not among them."""
        return sum(
            row.nbytes for row in self.rows if row.place == "device" and row.needed
        )

    @property
    def host_bytes(self) -> int:
        """Bytes kept on the host."""
        return sum(
            row.nbytes for row in self.rows if row.place == "host" and row.needed
        )


def split_at(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    as_jax: bool = False,
) -> Linearized:
    """A function in two halves at arguments of these shapes."""
    leaves, tree = jtu.tree_flatten((tuple(args), dict(kwargs)))
    flat = [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in leaves]
    return linearize(fn, flat, tree, as_jax=as_jax)


def residuals(
    fn: Callable[..., Any],
    *args: Any,
    policy: Policy,
    wrt: Sequence[int] | None = None,
    tokens: int | None = None,
    **kwargs: Any,
) -> Residuals:
    """Say what a function keeps; nothing is computed.

    Args:
        fn: Of pytrees of arrays.
        *args: Of `fn`: arrays or `jax.ShapeDtypeStruct`s.
        policy: What is kept.
        wrt: Positions of the arguments by which the derivative is taken; None means
            all. What only the derivative by a frozen argument reads is not kept.
        tokens: By how many tokens to divide; None: the leading axes of the result.
        **kwargs: Of `fn`.

    A name that the function does not have keeps nothing, as with jax.
    """
    split = split_at(fn, args, kwargs)
    wanted = needed(split, asked_for(args, kwargs, wrt))
    return residuals_of(split, policy, wanted, tokens or _tokens(split))


def residuals_of(
    split: Linearized, policy: Policy, wanted: frozenset[int], tokens: int
) -> Residuals:
    """As `residuals`, of a function that is split already.

    Args:
        split: The function.
        policy: What is kept.
        wanted: Numbers of the values that the backward pass reads.
        tokens: By how many tokens to divide.
    """
    kept = _kept(split, policy, wanted)
    plan = schedule(split, kept.names, wanted)
    rows = [_row(split, kept, value, wanted, plan) for value in sorted(kept.names)]
    every = schedule(split, (), split.outputs)
    return Residuals(
        policy=policy,
        rows=tuple(sorted(rows, key=lambda row: (-row.nbytes, row.name))),
        argument_bytes=sum(map(split.program.nbytes, plan.arguments)),
        forward_flops=every.flops,
        recompute_flops=plan.flops,
        tokens=tokens,
    )


def asked_for(
    args: Sequence[Any], kwargs: Mapping[str, Any], wrt: Sequence[int] | None
) -> list[bool] | None:
    """Of each flat argument, whether the derivative by it is taken.

    Raises:
        InvalidInputError: `wrt` holds no position, or one that is no argument's.
    """
    if wrt is None:
        return None
    places = range(len(args))
    if isinstance(wrt, int) or not wrt or not all(one in places for one in wrt):
        raise InvalidInputError(
            f"wrt is a list of positions of arguments, from 0 to {len(args) - 1}, at"
            f" least one: {wrt!r}"
        )
    marks = [
        jtu.tree_map(lambda _, at=at: at in wrt, arg) for at, arg in enumerate(args)
    ]
    rest = jtu.tree_map(lambda _: False, dict(kwargs))
    return list(jtu.tree_leaves((tuple(marks), rest)))


def _kept(split: Linearized, policy: Policy, wanted: frozenset[int]) -> Kept:
    if policy.remat:
        try:
            return choose(split, policy.relaxed())
        except UnknownNameError:  # `lint` says so
            return Kept(save={}, offload={}, with_kernel=frozenset())
    # Without any policy all that the backward pass reads is kept.
    program = split.program
    made = program.producers()
    called = automatic_names(program) | {
        value: given[0] for value, given in program.names.items()
    }
    save = {value: called[value] for value in wanted if value in made}
    return Kept(save=save, offload={}, with_kernel=frozenset())


def _row(
    split: Linearized, kept: Kept, value: int, wanted: frozenset[int], plan: Schedule
) -> Residual:
    program = split.program
    aval = program.avals[value]
    others = set(kept.names) - {value}
    alone = schedule(split, others, wanted)
    maker = program.producers().get(value)
    source = "argument"
    if maker is not None:
        found = _compat.source_of(program.steps[maker].equation)
        source = f"{found.file}:{found.line}" if found.file else "jax"
    return Residual(
        name=kept.names[value],
        source=source,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        nbytes=program.nbytes(value),
        place="host" if value in kept.offload else "device",
        needed=value in plan.used,
        saves_flops=alone.flops - plan.flops,
        with_kernel=value in kept.with_kernel,
    )


def _tokens(split: Linearized) -> int:
    """The leading axes of the largest result; 1 where there is no result."""
    shapes = [split.program.avals[one].shape for one in split.outputs]
    return math.prod(max(shapes, key=math.prod, default=())[:-1]) or 1
