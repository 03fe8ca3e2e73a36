"""A function that gives names to the values on which its derivative depends.

jax's own `checkpoint_name` names a copy: what a derivative rule reads (the result of
`exp` or `tanh`, the outputs of an attention kernel's forward rule) has no name, and is
computed again although a value equal to it is kept. Here the function is split first
(`linearized`), its forward half is run with names on the very values that the linear
half reads, and the linear half is attached as the derivative. Values and derivatives of
any order are those of the function. Does not belong here: which names to give.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from remat_policies import _compat
from remat_policies.linearized import Linearized, push
from remat_policies.program import Program


def named(split: Linearized, names: Mapping[int, str]) -> Callable[..., list[Any]]:
    """The function again, with names for `jax.checkpoint` policies on its values.

    Args:
        split: The function.
        names: By number of value.

    Returns:
        From flat arguments, those of `split.outside` first, to flat results.
    """

    def run(*flat: Any) -> list[Any]:
        cut = [
            _compat.cut.bind(leaf) if moves else leaf
            for moves, leaf in zip(split.inexact, flat, strict=True)
        ]
        values = evaluate(split.program, cut, names)
        count = len(split.outputs)
        return _with_derivative(split, values[:count], values[count:], flat)

    return run


def evaluate(
    program: Program,
    args: Sequence[Any],
    names: Mapping[int, str],
    also: Sequence[int] = (),
) -> list[Any]:
    """Run a program's steps; each value that has a name here gets it when it is made.

    Args:
        program: What to run.
        args: Its arguments, flat.
        names: By number of value.
        also: Numbers of values that are returned after the results.
    """
    values: dict[int, Any] = dict(program.constants)

    def put(number: int, value: Any) -> None:
        name = names.get(number)
        values[number] = value if name is None else checkpoint_name(value, name)

    for number, arg in zip(program.arguments, args, strict=True):
        put(number, arg)
    for step in program.steps:
        inputs = [values[number] for number in step.inputs]
        found = _compat.evaluate(step.jaxpr, step.equation, inputs)
        for number, value in zip(step.outputs, found, strict=True):
            put(number, value)
    return [values[number] for number in (*program.outputs, *also)]


def _with_derivative(
    split: Linearized, out: Sequence[Any], residuals: Sequence[Any], flat: Sequence[Any]
) -> list[Any]:
    """The results as they are, with the linear half as their derivative."""
    # What no argument moves stays out: Flax creates parameters in here, and in a scan
    # over layers that share them has to see that they come from random keys alone.
    smooth = [
        follows and jnp.issubdtype(jnp.result_type(one), jnp.inexact)
        for one, follows in zip(out, split.following, strict=True)
    ]

    @jax.custom_jvp
    def attach(out: Any, residuals: Any, flat: Any) -> Any:
        return out

    def rule(primals: Any, tangents: Any) -> Any:
        out, residuals, _ = primals
        directions = [
            None if isinstance(one, SymbolicZero) else one for one in tangents[2]
        ]
        _refuse(split, directions)
        moving = [one for one, moves in zip(directions, split.moving) if moves]
        pushed = push(split.pushforward, residuals, moving)
        changes = [one for one, moves in zip(pushed, smooth, strict=True) if moves]
        return out, [
            jnp.zeros_like(value) if change is None else change
            for value, change in zip(out, changes, strict=True)
        ]

    attach.defjvp(rule, symbolic_zeros=True)
    inexact = [one for one, moves in zip(out, smooth, strict=True) if moves]
    attached = iter(attach(inexact, list(residuals), list(flat)))
    return [
        next(attached) if moves else one for one, moves in zip(out, smooth, strict=True)
    ]


def _refuse(split: Linearized, directions: Sequence[Any]) -> None:
    """Raise where a derivative is asked for that the function does not have."""
    for at, one in enumerate(directions):
        if one is not None and split.inexact[at] and not split.moving[at]:
            raise NotImplementedError(
                f"there is no derivative by array {at - len(split.outside)} of the"
                f" arguments: {split.refusal}"
            )
