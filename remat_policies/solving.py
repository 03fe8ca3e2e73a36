"""The values to keep so that least is run again: a mixed-integer linear program.

Over the block's own graph: a step that runs again needs each of its inputs kept or made
again, and so does the backward pass. HiGHS (scipy) solves it. Without a budget, at a
price for each byte, it is a minimum cut, which plain linear programming solves; that
gives the choices on the convex hull, for mixtures and for when time is up. Does not
belong here: where budgets come from, and policies.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from scipy import optimize, sparse

from remat_policies import costs
from remat_policies.blocknames import LAYER_INPUT
from remat_policies.choosing import layer_input, own_names
from remat_policies.errors import OverBudgetError
from remat_policies.linearized import Linearized
from remat_policies.policies import AUTO
from remat_policies.program import automatic_names
from remat_policies.schedule import schedule

_EXACT = 1e-5
"""A share of the best cost; solutions closer than this are as good."""

LEAST_OFFLOADED = 1 << 20
"""Bytes of the smallest value that is worth a copy of its own to the host."""


_CORRECTIONS = 3
"""How often limits are tightened for a solver that overstepped them."""

_PRICING_SECONDS = 20.0
"""For one choice at a price; only with offloading does it take more than moments."""

_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
"""Primitives that move nothing: the same elements in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a layer may take.

    Attributes:
        device_bytes: Of the device besides its arguments.
        host_bytes: Of the host: no more than is copied while a layer computes.
    """

    device_bytes: float
    host_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A choice of values, and what it takes.

    Attributes:
        save: Numbers of the values kept on the device.
        offload: Numbers of those kept on the host.
        device_bytes: More (or, if an input is offloaded, fewer) than the arguments.
        host_bytes: On the host.
        flops: What is run again.
    """

    save: frozenset[int]
    offload: frozenset[int]
    device_bytes: int
    host_bytes: int
    flops: float


class Problem:
    """The linear program of one block; budgets and prices change, it stays.

    Variables, by column: for each step whether it runs again, in [0, 1]; for each
    candidate whether it is saved and, if anything may go to the host, whether it is
    offloaded, 0 or 1.
    """

    def __init__(
        self,
        split: Linearized,
        wanted: frozenset[int],
        *,
        least_bytes: int,
        worth: float,
        named_only: bool,
        offload: bool,
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        """Lay the rows out.

        Args:
            split: The block.
            wanted: Numbers of the values that its backward pass reads.
            least_bytes: Smaller values are candidates only where a name or their
                making says that they are worth it.
            worth: FLOPs that each byte kept has to save.
            named_only: Only values that the block names are candidates.
            offload: Some may be kept on the host.
            sizes: Bytes of values on each device, where they are not whole there.
        """
        self.split, self.wanted = split, wanted
        self._worth = worth
        self._own = own_names(split)
        self._sizes = sizes or {}
        self._producers = split.program.producers()
        self._steps = schedule(split, (), wanted).rerun
        saved = self._candidates(least_bytes, named_only)
        moved = [one for one in saved if self._may_move(one)] if offload else []
        inputs = self._inputs() if offload else []
        count = len(self._steps)
        self._run = {step: at for at, step in enumerate(self._steps)}
        self._save = {value: count + at for at, value in enumerate(saved)}
        count += len(saved)
        self._move = {value: count + at for at, value in enumerate(moved + inputs)}
        self._count = count + len(self._move)
        self.names = _names(split, self._own) | dict.fromkeys(inputs, LAYER_INPUT)
        self._whole = np.arange(self._count) >= len(self._run)
        self._priced_exactly = True
        self._price()
        self._rows()

    @property
    def made(self) -> frozenset[int]:
        """What the backward pass reads that is not there anyway."""
        return self.wanted & set(self._producers)

    def nbytes(self, value: int) -> int:
        """Bytes of a value on a device."""
        return self._sizes.get(value, self.split.program.nbytes(value))

    def kept(self, save: Collection[int], offload: Collection[int] = ()) -> Kept:
        """What a choice takes; what it keeps for nothing is left out.

        A solver is not believed: bytes and work are counted again, as jax would.
        """
        program = self.split.program
        found = schedule(self.split, {*save, *offload}, self.wanted)
        used = found.used | (found.arguments & set(offload))
        saved = frozenset(used & set(save))
        moved = frozenset(used & set(offload)) - saved
        inputs = sum(self.nbytes(one) for one in moved if one in program.arguments)
        return Kept(
            save=saved,
            offload=moved,
            device_bytes=sum(map(self.nbytes, saved)) - inputs,
            host_bytes=sum(map(self.nbytes, moved)),
            flops=found.flops,
        )

    def best(self, limits: Limits, seconds: float) -> tuple[Kept, float]:
        """The choice that runs least again, and by what share it could be better.

        Raises:
            OverBudgetError: No choice is within the limits.
        """
        least = self.smallest(limits)
        if not _within(least, limits):  # not even that
            raise OverBudgetError(
                f"the least that the block can keep is {least.device_bytes} bytes more"
                f" than its arguments; the budget is {limits.device_bytes:.0f}",
                required_bytes=least.device_bytes,
                available_bytes=int(limits.device_bytes),
            )
        choices, bound = self._solved(limits, seconds)
        if not choices or bound < self._cost(choices[0]) * (1 - _EXACT):
            line, below, above = self.hull(limits)
            bound = max(bound, line)
            choices += [least, below, self._filled(below, above, limits)]
        fitting = [one for one in choices if _within(one, limits)]
        best = min(fitting, key=lambda one: (self._cost(one), one.device_bytes))
        best = self.unshaped(best)
        cost = self._cost(best)
        gap = 1 - bound / cost if cost else 0.0
        return best, gap if gap > _EXACT else 0.0

    def _solved(self, limits: Limits, seconds: float) -> tuple[list[Kept], float]:
        """The solver's choice, if it has one within the limits, and its bound."""
        asked, least = limits, 0.0
        for _ in range(_CORRECTIONS):
            found = self._milp(asked, seconds)
            if found is None:
                break
            save, offload, bound = found
            least = bound if asked is limits else least
            kept = self.kept(save, offload)
            if _within(kept, limits):
                return [kept], least
            # It keeps limits to a millionth: of a gigabyte that is a value of 1 kB.
            asked = Limits(
                device_bytes=asked.device_bytes
                - 2 * max(kept.device_bytes - limits.device_bytes, 0),
                host_bytes=asked.host_bytes
                - 2 * max(kept.host_bytes - limits.host_bytes, 0),
            )
        return [], least

    def _cost(self, kept: Kept) -> float:
        """What is run again, and what the bytes should have been worth."""
        taken = kept.host_bytes + sum(map(self.nbytes, kept.save))
        return kept.flops + self._worth * taken

    def smallest(self, limits: Limits) -> Kept:
        """The choice that keeps least on the device."""
        nothing = self.kept(())
        if _within(nothing, limits) or not self._move:
            return nothing
        return self.at_price(math.inf, limits)

    def hull(self, limits: Limits) -> tuple[float, Kept, Kept]:
        """The choices on the convex hull next to a budget, one below and one above.

        No mixture of layers of any kinds runs less again than the line between them.

        Returns:
            Cost of that line at the budget, and the two choices; twice the same one
            if none is better without any budget.
        """
        below, above = self.smallest(limits), self.at_price(0.0, limits)
        while above.device_bytes > limits.device_bytes:
            span = above.device_bytes - below.device_bytes
            price = (self._cost(below) - self._cost(above)) / span
            one = self.at_price(price, limits)
            if not self._priced_exactly:
                return 0.0, below, above
            line = self._cost(below) + price * below.device_bytes
            if self._cost(one) + price * one.device_bytes >= line * (1 - _EXACT):
                rest = limits.device_bytes - below.device_bytes
                return self._cost(below) - price * rest, below, above
            if one.device_bytes <= limits.device_bytes:
                below = one
            else:
                above = one
        return self._cost(above) if self._priced_exactly else 0.0, above, above

    def unshaped(self, kept: Kept) -> Kept:
        """The same choice with values as they were before they were reshaped.

        A loop stacks a query of [.., groups, heads, width] in a layout that its reader
        has to undo, at the price of a second stack; of [.., heads, width] it does not
        (measured: 0.3 GB less for 16 layers on h100).
        """
        for value in sorted(kept.save):
            source = self._before_reshape(value)
            if source == value or source in kept.save:
                continue
            other = self.kept((kept.save - {value}) | {source}, kept.offload)
            if (
                self._cost(other) <= self._cost(kept)
                and other.device_bytes <= kept.device_bytes
            ):
                kept = other
        return kept

    def _candidates(self, least_bytes: int, named_only: bool) -> list[int]:
        named = {value for values in self._own.values() for value in values}
        steps = self.split.program.steps

        def worth_it(value: int, step: int) -> bool:
            # A small result of large inputs is dear to make again and cheap to keep.
            largest = max(map(self.nbytes, (value, *steps[step].inputs)))
            return steps[step].kind == "kernel" or largest >= least_bytes

        return [
            value
            for step in self._steps
            for value in steps[step].outputs
            if _may_be_named(self.split.program.avals[value].dtype)
            and (value in named or (not named_only and worth_it(value, step)))
        ]

    def _inputs(self) -> list[int]:
        """The layer's input, if it can be meant by name."""
        inputs = layer_input(self.split)
        return inputs if self._own.get(LAYER_INPUT, inputs) == inputs else []

    def _may_move(self, value: int) -> bool:
        kernel = self.split.program.steps[self._producers[value]].kind == "kernel"
        return kernel or self.nbytes(value) >= LEAST_OFFLOADED

    def _price(self) -> None:
        """FLOPs, device bytes and host bytes of each column."""
        program = self.split.program
        self._flops, self._device, self._host = np.zeros((3, self._count))
        for step, at in self._run.items():
            self._flops[at] = costs.step_flops(program, program.steps[step])
        for value, at in self._save.items():
            self._device[at] = self.nbytes(value)
        for value, at in self._move.items():
            self._host[at] = self.nbytes(value)
            if value in program.arguments:
                self._device[at] = -self.nbytes(value)

    def _objective(self) -> tuple[float, np.ndarray]:
        """FLOPs of a unit, and what each column costs in such units."""
        scale = self._flops.max() or 1.0
        taken = self._device.clip(0) + self._host
        # Of choices that cost the same, the one that keeps least, on the device rather
        # than on the host: differences that are smaller than any step.
        spare = (taken + self._host) / max(2 * taken.sum(), 1.0)
        return scale, (self._flops + self._worth * taken) / scale + 1e-9 * spare

    def _rows(self) -> None:
        """Each a sum of columns that is at least a number."""
        rows = [(self._there(one), 1.0) for one in self.made]
        for step, at in self._run.items():
            inputs = set(self.split.program.steps[step].inputs) & set(self._producers)
            rows += [(self._there(one) | {at: -1.0}, 0.0) for one in sorted(inputs)]
            rows += [(row, 0.0) for row in self._together(step)]
        cells = [
            (row, at, factor)
            for row, (sums, _) in enumerate(rows)
            for at, factor in sums.items()
        ]
        places, columns, factors = zip(*cells, strict=True) if cells else ((), (), ())
        self._sums = sparse.csr_array(
            (factors, (places, columns)), shape=(len(rows), self._count)
        )
        self._least = [least for _, least in rows]

    def _there(self, value: int) -> dict[int, float]:
        """Made again, or kept."""
        columns = [
            self._run[self._producers[value]],
            *(which[value] for which in (self._save, self._move) if value in which),
        ]
        return dict.fromkeys(columns, 1.0)

    def _together(self, step: int) -> list[dict[int, float]]:
        """What the backward pass reads of a kernel is kept in one place, or not at all.

        As `choosing` does it.
        """
        made = self.split.program.steps[step]
        if made.kind != "kernel":
            return []
        read = [value for value in made.outputs if value in self.wanted]
        return [
            {which[one]: 1.0, which[two]: -1.0}
            for which in (self._save, self._move)
            for one, two in itertools.permutations(read, 2)
            if one in which and two in which
        ]

    def _milp(
        self, limits: Limits, seconds: float
    ) -> tuple[Collection[int], Collection[int], float] | None:
        """What is saved, what is offloaded, and a bound; None if time was too short."""
        if not self._least:
            return (), (), 0.0
        scale, columns = self._objective()
        found = optimize.milp(
            columns,
            constraints=[
                optimize.LinearConstraint(self._sums, self._least),
                _at_most(self._device, limits.device_bytes),
                _at_most(self._host, limits.host_bytes),
            ],
            integrality=self._whole,
            bounds=optimize.Bounds(0, 1),
            options={"time_limit": seconds, "mip_rel_gap": _EXACT},
        )
        if found.x is None:
            return None
        bound = found.mip_dual_bound
        return *self._chosen(found.x), 0.0 if bound is None else float(bound) * scale

    def at_price(self, price: float, limits: Limits) -> Kept:
        """The best choice if each byte of the device costs so many FLOPs more.

        A minimum cut, so that the relaxation has a whole solution; with the host's
        limit it is none, and is solved in whole numbers.
        """
        if not self._least:
            return self.kept(())
        scale, columns = self._objective()
        if math.isinf(price):
            columns = self._device / max(self._device.max(), 1.0) + 1e-6 * columns
        else:
            columns = columns + (price / scale) * self._device
        found = optimize.milp(
            columns,
            constraints=[
                optimize.LinearConstraint(self._sums, self._least),
                _at_most(self._host, limits.host_bytes * (1 - 2e-6)),
            ],
            integrality=self._whole if self._move else None,
            bounds=optimize.Bounds(0, 1),
            options={"time_limit": _PRICING_SECONDS, "mip_rel_gap": _EXACT},
        )
        self._priced_exactly = found.status == 0
        return self.kept(()) if found.x is None else self.kept(*self._chosen(found.x))

    def _chosen(self, columns: Sequence[float]) -> tuple[list[int], list[int]]:
        save, offload = (
            [value for value, at in which.items() if columns[at] > 0.5]
            for which in (self._save, self._move)
        )
        return save, [one for one in offload if one not in save]

    def _filled(self, below: Kept, above: Kept, limits: Limits) -> Kept:
        """A choice and as much of a better one as fits: the largest values first."""
        for value in sorted(above.save - below.save, key=lambda one: -self.nbytes(one)):
            tried = self.kept({*below.save, value}, below.offload - {value})
            if _within(tried, limits) and tried.flops < below.flops:
                below = tried
        return below

    def _before_reshape(self, value: int) -> int:
        steps = self.split.program.steps
        made = self._producers.get(value)
        if made is None or steps[made].kind not in _RESHAPES:
            return value
        source = self._before_reshape(steps[made].inputs[0])
        return source if source in self._save else value


def _within(kept: Kept, limits: Limits) -> bool:
    return (
        kept.device_bytes <= limits.device_bytes
        and kept.host_bytes <= limits.host_bytes
    )


def _at_most(factors: np.ndarray, most: float) -> optimize.LinearConstraint:
    size = max(abs(most), 1.0) if math.isfinite(most) else 1.0
    return optimize.LinearConstraint(
        sparse.csr_array(factors[None] / size), -np.inf, most / size
    )


def _may_be_named(dtype: np.dtype) -> bool:
    """Whether jax can keep a value of this type by its name, and keep it as it is.

    It rounds what is kept by `reduce_precision`, which takes no complex numbers and
    makes NaN of numbers that 8-bit types without infinities can hold.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    return not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 1


def _names(split: Linearized, own: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """A name that means each value alone: the block's own where it gives one.

    One like an automatic name could mean another value as well.
    """
    alone = {
        values[0]: name
        for name, values in own.items()
        if len(values) == 1 and name and not name.startswith(AUTO)
    }
    return automatic_names(split.program) | alone
