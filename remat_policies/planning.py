"""The policy that runs least again within a number of bytes: an exact choice.

Which values to keep and which steps to run again is a mixed-integer linear program over
the block's own graph: a step that runs again needs each of its inputs kept or made
again, and so does the backward pass. It is solved by HiGHS (scipy). Does not belong
here: deriving the bytes from a device, compilers.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, sparse

from remat_policies import costs
from remat_policies.errors import InvalidInputError
from remat_policies.linearized import Linearized
from remat_policies.policies import Policy, from_json, names
from remat_policies.program import automatic_names
from remat_policies.residuals import asked_for, split_at
from remat_policies.schedule import needed, schedule

_EXACT = 1e-6
"""A share of the best cost; solutions closer than this are as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to keep of a block, and what that costs.

    Attributes:
        policy: An ordinary policy of names, for `remat_policies.remat`.
        budget_bytes: What it was made for.
        device_bytes: What it keeps; a scan over layers keeps as much for each layer.
        recompute_flops: What the backward pass runs again.
        forward_flops: Operations of the forward pass.
        gap: By how large a share a better plan could be better; 0 if none is.
    """

    policy: Policy
    budget_bytes: int
    device_bytes: int
    recompute_flops: float
    forward_flops: float
    gap: float

    def explain(self) -> str:
        """What it keeps and runs again, in plain words."""
        share = self.recompute_flops / self.forward_flops if self.forward_flops else 0
        words = (
            f"Keeps {len(self.policy.save)} values, {self.device_bytes / 1e6:.2f} of"
            f" {self.budget_bytes / 1e6:.2f} MB, and runs {share:.1%} of a forward pass"
            " again"
        )
        if self.gap > _EXACT:
            words += f"; the solver's time was up: at best {self.gap:.1%} less"
        return f"{words}. Kept: {', '.join(self.policy.save) or 'nothing'}."

    def to_json(self) -> str:
        """A JSON document that `load_plan` reads."""
        fields = dataclasses.asdict(self) | {
            "policy": json.loads(self.policy.to_json())
        }
        return json.dumps(fields, indent=1)


def load_plan(text: str) -> Plan:
    """The plan that `Plan.to_json` wrote.

    Raises:
        InvalidInputError: The text is no such document.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"not a plan in JSON: {error}") from error
    wanted = {field.name for field in dataclasses.fields(Plan)}
    if not isinstance(fields, dict) or set(fields) != wanted:
        raise InvalidInputError(f"a plan has the fields {sorted(wanted)}: {text!r}")
    return Plan(**fields | {"policy": from_json(json.dumps(fields["policy"]))})


def plan(
    block: Callable[..., Any],
    *avals: Any,
    budget_bytes: int,
    wrt: Sequence[int] | None = None,
    least_bytes: int = 4096,
    seconds: float = 20.0,
) -> Plan:
    """Choose what a block keeps so that it runs least again within a budget.

    Args:
        block: A function of pytrees of arrays; nothing of it is computed.
        *avals: Of the block: arrays or `jax.ShapeDtypeStruct`s.
        budget_bytes: What it may keep besides its arguments.
        wrt: Positions of the arguments by which the derivative is taken; None: all.
        least_bytes: Smaller values are kept only where the block names them.
        seconds: After that the best plan found so far is given, with its gap.

    Returns:
        The plan; its policy is for the same block at the same shapes.

    Raises:
        InvalidInputError: A negative budget.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> found = plan(lambda x, w: jnp.sin(x @ w), w, w, budget_bytes=16384)
        >>> found.device_bytes, found.recompute_flops
        (16384, 0.0)
    """
    (found,) = frontier(
        block,
        *avals,
        budgets=[budget_bytes],
        wrt=wrt,
        least_bytes=least_bytes,
        seconds=seconds,
    )
    return found


def frontier(
    block: Callable[..., Any],
    *avals: Any,
    budgets: Sequence[int],
    wrt: Sequence[int] | None = None,
    least_bytes: int = 4096,
    seconds: float = 20.0,
) -> tuple[Plan, ...]:
    """A plan for each budget: how much less is run again for how many more bytes.

    Args:
        block: As for `plan`.
        *avals: Of the block.
        budgets: In bytes.
        wrt: As for `plan`.
        least_bytes: As for `plan`.
        seconds: For each budget.

    Raises:
        InvalidInputError: A negative budget.
    """
    for budget in budgets:
        if budget < 0:
            raise InvalidInputError(f"a budget is 0 bytes or more, not {budget}")
    split = split_at(block, avals, {})
    wanted = needed(split, asked_for(avals, {}, wrt))
    problem = _Problem(split, wanted, least_bytes)
    forward = schedule(split, (), split.outputs).flops
    found = []
    for budget in budgets:
        kept, gap = problem.solve(budget, seconds)
        # What a solver gives is not believed: bytes and work are counted again.
        counted = schedule(split, kept, wanted)
        used = sorted(counted.used)
        found.append(
            Plan(
                policy=names(save=[problem.names[value] for value in used]),
                budget_bytes=budget,
                device_bytes=sum(map(split.program.nbytes, used)),
                recompute_flops=counted.flops,
                forward_flops=forward,
                gap=gap,
            )
        )
    return tuple(found)


class _Problem:
    """The linear program of one block; only its budget changes.

    Variables are first one for each step that may run again, in [0, 1], then one for
    each value that may be kept, 0 or 1.
    """

    def __init__(
        self, split: Linearized, wanted: frozenset[int], least_bytes: int
    ) -> None:
        program = split.program
        self.producers = program.producers()
        self.steps = _behind(split, wanted)
        self.names = _names(split)
        self.values = [
            value
            for step in self.steps
            for value in program.steps[step].outputs
            if program.nbytes(value) >= least_bytes
            or value in program.names
            or program.steps[step].kind == "kernel"
        ]
        self.step_at = {step: at for at, step in enumerate(self.steps)}
        self.value_at = {
            value: len(self.steps) + at for at, value in enumerate(self.values)
        }
        self.count = len(self.steps) + len(self.values)
        self.cost = np.zeros(self.count)
        self.sizes = np.zeros(self.count)
        for step, at in self.step_at.items():
            self.cost[at] = costs.flops(program.steps[step].equation)
        for value, at in self.value_at.items():
            self.sizes[at] = program.nbytes(value)
        self.rows = self._rows(split, wanted)

    def _rows(
        self, split: Linearized, wanted: frozenset[int]
    ) -> list[tuple[dict[int, float], float]]:
        """Each a sum of variables, by place, that is at least a number."""
        rows = [(self._there(value), 1.0) for value in wanted if self._made(value)]
        for step, at in self.step_at.items():
            made = split.program.steps[step]
            inputs = [value for value in sorted(set(made.inputs)) if self._made(value)]
            rows += [(self._there(value) | {at: -1.0}, 0.0) for value in inputs]
            if made.kind == "kernel":
                # As `choosing` does: all that the backward pass reads of it, or none.
                read = [value for value in made.outputs if value in wanted]
                places = [
                    self.value_at[value] for value in read if value in self.value_at
                ]
                for one, two in itertools.permutations(places, 2):
                    rows.append(({one: 1.0, two: -1.0}, 0.0))
        return rows

    def _made(self, value: int) -> bool:
        return value in self.producers

    def _there(self, value: int) -> dict[int, float]:
        """Kept, or made again."""
        found = {self.step_at[self.producers[value]]: 1.0}
        if value in self.value_at:
            found[self.value_at[value]] = 1.0
        return found

    def solve(self, budget: int, seconds: float) -> tuple[set[int], float]:
        """Numbers of the values to keep, and by what share they could be better."""
        if not self.values or not self.rows:
            return set(), 0.0
        cells = [
            (row, at, factor)
            for row, (sums, _) in enumerate(self.rows)
            for at, factor in sums.items()
        ]
        places, columns, factors = zip(*cells, strict=True)
        sums = sparse.csr_array(
            (factors, (places, columns)), shape=(len(self.rows), self.count)
        )
        scale = self.cost.max() or 1.0
        size = max(float(budget), 1.0)
        # Of plans that cost the same, the one that keeps least: less than any equation.
        spare = 1e-9 * self.sizes / max(self.sizes.sum(), 1.0)
        found = optimize.milp(
            self.cost / scale + spare,
            constraints=[
                optimize.LinearConstraint(sums, [least for _, least in self.rows]),
                optimize.LinearConstraint(
                    sparse.csr_array(self.sizes[None] / size), -np.inf, budget / size
                ),
            ],
            integrality=np.arange(self.count) >= len(self.steps),
            bounds=optimize.Bounds(0, 1),
            options={"time_limit": seconds, "mip_rel_gap": _EXACT},
        )
        if found.x is None:
            return set(), 1.0
        kept = {value for value, at in self.value_at.items() if found.x[at] > 0.5}
        return kept, float(found.mip_gap or 0.0)


def _behind(split: Linearized, wanted: frozenset[int]) -> list[int]:
    """The steps that the backward pass would run again if nothing were kept."""
    return list(schedule(split, (), wanted).rerun)


def _names(split: Linearized) -> dict[int, str]:
    """A name that means each value alone: the block's own where it gives one."""
    given: dict[str, list[int]] = {}
    for value, own in split.program.names.items():
        for name in own:
            given.setdefault(name, []).append(value)
    alone = {values[0]: name for name, values in given.items() if len(values) == 1}
    return automatic_names(split.program) | alone
