"""What a backward pass keeps, and what it runs again to have the rest.

Exact, because it follows the same rule as jax: from each value that the linear half
reads, back to what is kept. Does not belong here: names.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax

from remat_policies import _compat, costs
from remat_policies.linearized import Linearized, push


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What the backward pass of a function does when some values are kept.

    Attributes:
        used: Numbers of the kept values that it reads.
        arguments: Numbers of the function's arguments that it reads.
        rerun: Numbers of the steps that it runs again, in their order.
        flops: Operations of those.
    """

    used: frozenset[int]
    arguments: frozenset[int]
    rerun: tuple[int, ...]
    flops: float


def needed(split: Linearized, wrt: Sequence[bool] | None = None) -> frozenset[int]:
    """Numbers of the values that the linear half reads.

    Args:
        split: The function.
        wrt: Of each flat argument, whether the derivative is asked for; None means
            all that have one.
    """
    if wrt is None or all(wrt):
        return frozenset(split.residuals)
    every = [True] * len(split.outside) + list(wrt)
    asked = [one for one, moves in zip(every, split.moving, strict=True) if moves]
    jaxpr, _ = _compat.opened(split.pushforward)
    count = len(split.residuals)
    shapes = [
        jax.ShapeDtypeStruct(
            var.aval.shape, var.aval.dtype, sharding=getattr(var.aval, "sharding", None)
        )
        for var in jaxpr.invars
    ]

    def partly(
        residuals: list[jax.Array], tangents: list[jax.Array]
    ) -> list[jax.Array]:
        given = [
            one if there else None for one, there in zip(tangents, asked, strict=True)
        ]
        found = push(split.pushforward, residuals, given)
        return [one for one in found if one is not None]

    closed = jax.make_jaxpr(partly)(shapes[:count], shapes[count:])
    pushed, _ = _compat.opened(closed)
    read = {
        var for one in pushed.eqns for var in one.invars if not _compat.is_literal(var)
    }
    return frozenset(
        value for value, var in zip(split.residuals, pushed.invars) if var in read
    )


def schedule(
    split: Linearized, kept: Collection[int], wanted: Collection[int]
) -> Schedule:
    """What is read and run again if some values are kept.

    Args:
        split: The function.
        kept: Numbers of values that are kept.
        wanted: Numbers of values that the backward pass reads.
    """
    used, arguments, rerun = reach(split, kept, wanted)
    steps = split.program.steps
    return Schedule(
        used=used,
        arguments=arguments,
        rerun=rerun,
        flops=math.fsum(costs.step_flops(split.program, steps[one]) for one in rerun),
    )


def reach(
    split: Linearized, kept: Collection[int], wanted: Collection[int]
) -> tuple[frozenset[int], frozenset[int], tuple[int, ...]]:
    """Walk back from what is wanted to what is there.

    Returns:
        As in `Schedule`: the kept values and the arguments that are met, and the steps
        in between. No sizes are asked for: they may be symbolic.
    """
    program = split.program
    producers = program.producers()
    there = set(kept)
    used: set[int] = set()
    arguments: set[int] = set()
    rerun: set[int] = set()
    seen = set(wanted)
    waiting = list(seen)
    while waiting:
        value = waiting.pop()
        if value in there:
            used.add(value)
        elif value in program.constants:
            continue
        elif value not in producers:
            arguments.add(value)
        elif producers[value] not in rerun:
            rerun.add(producers[value])
            inputs = set(program.steps[producers[value]].inputs) - seen
            seen |= inputs
            waiting.extend(inputs)
    return frozenset(used), frozenset(arguments), tuple(sorted(rerun))
