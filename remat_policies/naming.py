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
        From flat arguments to flat results.
    """

    def run(*flat: Any) -> list[Any]:
        cut = [
            _compat.cut.bind(leaf) if moves else leaf
            for moves, leaf in zip(split.inexact, flat, strict=True)
        ]
        values = evaluate(split.program, cut, names)
        count = len(split.outputs)
        changing = [leaf for moves, leaf in zip(split.inexact, flat) if moves]
        return _with_derivative(split, values[:count], values[count:], changing)

    return run


def evaluate(
    program: Program, args: Sequence[Any], names: Mapping[int, str]
) -> list[Any]:
    """Run a program's steps; each value that has a name here gets it when it is made.

    Args:
        program: What to run.
        args: Its arguments, flat.
        names: By number of value.
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
    return [values[number] for number in program.outputs]


def _with_derivative(
    split: Linearized,
    out: Sequence[Any],
    residuals: Sequence[Any],
    changing: Sequence[Any],
) -> list[Any]:
    """The results as they are, with the linear half as their derivative."""
    smooth = [jnp.issubdtype(jnp.result_type(one), jnp.inexact) for one in out]

    @jax.custom_jvp
    def attach(out: Any, residuals: Any, changing: Any) -> Any:
        return out

    def rule(primals: Any, tangents: Any) -> Any:
        out, residuals, _ = primals
        directions = [
            None if isinstance(one, SymbolicZero) else one for one in tangents[2]
        ]
        pushed = push(split.pushforward, residuals, directions)
        changes = [one for one, moves in zip(pushed, smooth, strict=True) if moves]
        return out, [
            jnp.zeros_like(value) if change is None else change
            for value, change in zip(out, changes, strict=True)
        ]

    attach.defjvp(rule, symbolic_zeros=True)
    attached = iter(
        attach(
            [one for one, moves in zip(out, smooth, strict=True) if moves],
            list(residuals),
            list(changing),
        )
    )
    return [
        next(attached) if moves else one for one, moves in zip(out, smooth, strict=True)
    ]
