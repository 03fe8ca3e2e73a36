"""A function in two halves: what runs forward, and what is linear in the change.

Between them stand the residuals: values of the first half that the second reads, which
is what a backward pass has to keep or to compute again. Does not belong here: choosing
among them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from remat_policies import _compat
from remat_policies.errors import InvalidInputError
from remat_policies.program import Program, flatten

Run = Callable[..., list[Any]]
"""From flat arguments to flat results."""

_NO_DERIVATIVE = (NotImplementedError, ValueError, TypeError)
"""What jax raises where something has no derivative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linearized:
    """A function at arguments of known shape.

    Attributes:
        program: The forward half; its outputs are those of the function, then the
            residuals. Its arguments are those of `outside`, then the function's own.
        outside: What the function closes over that is being traced as well: it may
            have a derivative, like an argument.
        out_tree: Structure of the function's result.
        inexact: Which of all arguments are of floating-point numbers.
        moving: Which of these the function has a derivative by: nearly always all.
        following: Which results change with them.
        pushforward: Jaxpr of the linear half: (residuals, tangents of the moving
            arguments) to tangents of the results.
        refusal: Why the function has no derivative by the others.
    """

    program: Program
    outside: tuple[Any, ...]
    out_tree: Any
    inexact: tuple[bool, ...]
    moving: tuple[bool, ...]
    following: tuple[bool, ...]
    pushforward: Any
    refusal: str

    @property
    def outputs(self) -> tuple[int, ...]:
        """Numbers of the function's results."""
        return self.program.outputs[: self.out_tree.num_leaves]

    @property
    def residuals(self) -> tuple[int, ...]:
        """Numbers of what the linear half reads, in the order in which it does."""
        return self.program.outputs[self.out_tree.num_leaves :]


def linearize(
    fn: Callable[..., Any],
    flat: Sequence[Any],
    in_tree: Any,
    *,
    as_jax: bool = False,
) -> Linearized:
    """Split a function of pytrees of arrays; nothing is computed.

    Args:
        fn: Takes what `in_tree` makes of the flat arguments, (args, kwargs).
        flat: Arrays, tracers or `jax.ShapeDtypeStruct`s.
        in_tree: Structure of (args, kwargs).
        as_jax: Names as `jax.checkpoint` sees them; see `program.flatten`.
    """

    def of_leaves(*leaves: Any) -> Any:
        args, kwargs = jtu.tree_unflatten(in_tree, leaves)
        return fn(*args, **kwargs)

    closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*flat)
    jaxpr, consts = _compat.opened(closed)
    outside = tuple(one for one in consts if isinstance(one, jax.core.Tracer))
    _refuse_references([*consts, *flat])
    whole = (*outside, *flat)

    def run(*whole: Any) -> list[Any]:
        traced, leaves = iter(whole[: len(outside)]), whole[len(outside) :]
        mine = [
            next(traced) if isinstance(one, jax.core.Tracer) else one for one in consts
        ]
        return _compat.run(jaxpr, mine, leaves)

    inexact = tuple(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in whole)
    moving, refusal = inexact, ""
    try:
        forward, pushforward = _halves(run, whole, moving)
    except _NO_DERIVATIVE as error:
        # Not by all of them, such as a mask that goes to a kernel or a callback. Plain
        # jax would not ask for it until somebody does; nor must this.
        moving, refusal = _movable(run, whole, inexact), str(error)
        forward, pushforward = _halves(run, whole, moving)
    return Linearized(
        program=flatten(forward, as_jax=as_jax),
        outside=outside,
        out_tree=jtu.tree_structure(shapes),
        inexact=inexact,
        moving=moving,
        following=_following(pushforward, sum(moving)),
        pushforward=pushforward,
        refusal=refusal,
    )


def _refuse_references(values: Sequence[Any]) -> None:
    for value in values:
        if _compat.is_reference(value):
            raise InvalidInputError(
                "a mutable array (jax.new_ref) goes into the function: it would be"
                " changed once more by what is run again; take jax.checkpoint for it"
            )


def _movable(
    run: Run, whole: Sequence[Any], inexact: Sequence[bool]
) -> tuple[bool, ...]:
    """Which arguments a function has a derivative by, where not by all."""
    moving = [False] * len(whole)
    for at in range(len(whole)):
        moving[at] = inexact[at]
        try:
            _halves(run, whole, moving)
        except _NO_DERIVATIVE:
            moving[at] = False
    return tuple(moving)


def _halves(run: Run, whole: Sequence[Any], moving: Sequence[bool]) -> tuple[Any, Any]:
    """Closed jaxprs of the forward half and of the linear one."""
    trees: dict[str, Any] = {}

    def forward(*leaves: Any) -> Any:
        def of_moving(*changing: Any) -> Any:
            rest = iter(changing)
            return run(
                *(
                    next(rest) if moves else leaf
                    for moves, leaf in zip(moving, leaves, strict=True)
                )
            )

        changing = [leaf for moves, leaf in zip(moving, leaves, strict=True) if moves]
        results, linear = jax.linearize(of_moving, *changing)
        residuals, trees["linear"] = jtu.tree_flatten(linear)
        return results, residuals

    closed, (_, residuals) = jax.make_jaxpr(forward, return_shape=True)(*whole)
    # Arrays themselves as examples: a tangent has all that is known of its array's
    # type, such as the axes of a mesh over which it varies.
    tangents = [leaf for moves, leaf in zip(moving, whole, strict=True) if moves]

    def backward(residuals: Any, tangents: Any) -> Any:
        return jtu.tree_unflatten(trees["linear"], residuals)(*tangents)

    return closed, jax.make_jaxpr(backward)(residuals, tangents)


def _following(pushforward: Any, count: int) -> tuple[bool, ...]:
    """Which results of the linear half come from one of its last `count` arguments."""
    jaxpr, _ = _compat.opened(pushforward)
    moving = set(jaxpr.invars[len(jaxpr.invars) - count :])
    for equation in jaxpr.eqns:
        if any(
            not _compat.is_literal(var) and var in moving for var in equation.invars
        ):
            moving.update(equation.outvars)
    return tuple(not _compat.is_literal(var) and var in moving for var in jaxpr.outvars)


def push(closed: Any, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Run the linear half.

    Args:
        closed: `Linearized.pushforward`.
        residuals: Arrays.
        tangents: Arrays, or None where it is known to be zero. What only a known zero
            reads is not run at all: the residuals it needs are not kept.

    Returns:
        Tangents of the results; None where they are known to be zero.
    """
    jaxpr, consts = _compat.opened(closed)
    linear = [False] * len(residuals) + [True] * len(tangents)
    return _push(jaxpr, consts, [*residuals, *tangents], linear)


def _push(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], linear: Sequence[bool]
) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    moving = {var for var, moves in zip(jaxpr.invars, linear, strict=True) if moves}
    for equation in jaxpr.eqns:
        variables = [var for var in equation.invars if not _compat.is_literal(var)]
        changes = [var for var in variables if var in moving]
        if changes:
            moving.update(equation.outvars)
        if changes and all(values[var] is None for var in changes):
            found: list[Any] = [None] * len(equation.outvars)
        else:
            found = _push_one(jaxpr, equation, values, moving)
        values.update(zip(equation.outvars, found, strict=True))
    return [
        var.val if _compat.is_literal(var) else values[var] for var in jaxpr.outvars
    ]


def _push_one(
    jaxpr: Any, equation: Any, values: Mapping[Any, Any], moving: set[Any]
) -> list[Any]:
    """Run an equation of which some tangent is not zero."""
    if equation.primitive.name in ("jit", "pjit"):
        inner, consts = _compat.opened(equation.params["jaxpr"])
        args = [
            var.val if _compat.is_literal(var) else values[var]
            for var in equation.invars
        ]
        linear = [
            not _compat.is_literal(var) and var in moving for var in equation.invars
        ]
        return _push(inner, consts, args, linear)
    variables = [var for var in equation.invars if not _compat.is_literal(var)]
    given = [values[var] for var in variables]
    if equation.primitive.name == "add_any" and None in given:
        return [one for one in given if one is not None]
    whole = [
        _compat.zeros(var.aval) if value is None else value
        for var, value in zip(variables, given, strict=True)
    ]
    return _compat.evaluate(jaxpr, equation, whole)
