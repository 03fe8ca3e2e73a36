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
from remat_policies.program import Program, flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Linearized:
    """A function at arguments of known shape.

    Attributes:
        program: The forward half; its outputs are those of the function, then the
            residuals.
        out_tree: Structure of the function's result.
        inexact: Which of the flat arguments have a derivative.
        pushforward: Jaxpr of the linear half: (residuals, tangents of the inexact
            arguments) to tangents of the results.
    """

    program: Program
    out_tree: Any
    inexact: tuple[bool, ...]
    pushforward: Any

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
    inexact = tuple(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in flat)
    trees: dict[str, Any] = {}

    def forward(*leaves: Any) -> Any:
        def of_inexact(*changing: Any) -> Any:
            rest = iter(changing)
            whole = [
                next(rest) if moves else leaf
                for moves, leaf in zip(inexact, leaves, strict=True)
            ]
            args, kwargs = jtu.tree_unflatten(in_tree, whole)
            return fn(*args, **kwargs)

        changing = [leaf for moves, leaf in zip(inexact, leaves, strict=True) if moves]
        result, linear = jax.linearize(of_inexact, *changing)
        out, trees["out"] = jtu.tree_flatten(result)
        residuals, trees["linear"] = jtu.tree_flatten(linear)
        return out, residuals

    closed, (_, residuals) = jax.make_jaxpr(forward, return_shape=True)(*flat)
    # Arrays themselves as examples: a tangent has all that is known of its array's
    # type, such as the axes of a mesh over which it varies.
    tangents = [leaf for moves, leaf in zip(inexact, flat, strict=True) if moves]

    def backward(residuals: Any, tangents: Any) -> Any:
        linear = jtu.tree_unflatten(trees["linear"], residuals)
        return jtu.tree_leaves(linear(*tangents))

    return Linearized(
        program=flatten(closed, as_jax=as_jax),
        out_tree=trees["out"],
        inexact=inexact,
        pushforward=jax.make_jaxpr(backward)(residuals, tangents),
    )


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
        jnp.zeros(var.aval.shape, var.aval.dtype) if value is None else value
        for var, value in zip(variables, given, strict=True)
    ]
    return _compat.evaluate(jaxpr, equation, whole)
