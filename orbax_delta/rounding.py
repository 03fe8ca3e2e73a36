"""What a chunk with a policy holds once it is stored: values within its bound.

Every element is checked. A chunk in which one is not within the bound (NaN, infinities,
values of too many steps, negative ones on a LOG grid) is stored bit for bit. Does not
belong here: which leaf has which policy (`lossy`), payloads.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from orbax_delta import dtypes, gridkernels, grids, kernels
from orbax_delta.codecs import Bytes
from orbax_delta.dtypes import Rule
from orbax_delta.grids import Codes, Grid, Kind


class Source(Protocol):
    """Another chunk."""

    def raw(self) -> Bytes:
        """What it is."""

    def content(self) -> Bytes:
        """What is stored of it."""


_LEAST_NORMAL = 2.0**-126

# Elements at a time, so that float64 of them stays in cache.
_PIECE = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far what is stored of a chunk lies from what it was.

    Attributes:
        largest: In the unit of the bound.
        square_sum: Of all elements, in that unit.
        elements: How many.
        exact: Whether it is stored bit for bit, because it could not be rounded.
    """

    largest: float = 0.0
    square_sum: float = 0.0
    elements: int
    exact: bool = False

    @classmethod
    def of(cls, moved: np.ndarray) -> "Errors":
        """Of the error of each element."""
        return cls(
            largest=float(moved.max(initial=0)),
            square_sum=float(np.dot(moved, moved)),
            elements=moved.size,
        )

    @classmethod
    def within(
        cls, bound: float, measured: tuple[float, float], made: Bytes
    ) -> "Errors":
        """Of the largest error and the sum of squares, which may be too much."""
        (largest, square_sum), elements = measured, made.size // grids.WORD_BYTES
        if not largest <= bound:
            return cls(elements=elements, exact=True)
        return cls(largest=largest, square_sum=square_sum, elements=elements)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OnGrid:
    """Values of a grid.

    Attributes:
        grid: The grid.
        bound: What no error exceeds: of LINEAR itself, of LOG relative to the value,
            of RELATIVE to the root of the source and the floor.
        source: The chunk that a RELATIVE grid needs.
        seen: How far the values to store lie from what they were, once that is known.
    """

    grid: Grid
    bound: float
    source: Source | None = None
    seen: list[Errors] = dataclasses.field(default_factory=list, compare=False)

    def apply(self, raw: Bytes) -> tuple[Bytes, Errors]:
        """The values to store, and how far they lie from `raw`."""
        if self.seen and self.seen[0].exact:
            return raw, self.seen[0]
        made = np.empty(raw.size, np.uint8)
        source = self.source.content() if self.source else None
        grids.rounded(raw, self.grid, source, made)
        if not self.seen:
            floor, kind = self.grid.floor, self.grid.kind
            measured = _errors(raw, made, kind, floor=floor, source=source)
            self.seen.append(Errors.within(self.bound, measured, made))
        return raw if self.seen[0].exact else made, self.seen[0]

    def coded(self, raw: Bytes) -> tuple[Bytes, Codes | None]:
        """The values to store, and their codes; None where they are not rounded."""
        if not self.seen:
            self.apply(raw)
        if self.seen[0].exact:
            return raw, None
        made = np.empty(raw.size, np.uint8)
        found = np.empty(raw.size // grids.WORD_BYTES, np.int32)
        source = self.source.content() if self.source else None
        grids.codes(raw, self.grid, source, found)
        grids.values(found, self.grid, source, made)
        return made, Codes(grid=self.grid, numbers=found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lazily:
    """What was stored, but for elements that have moved too far from it.

    Attributes:
        abs: By more than this ...
        rel: ... and by more than this times what they are now.
        before: Gives what is stored, checked; None where that is not at hand.
    """

    abs: float
    rel: float
    before: Callable[[], Bytes | None]

    def apply(self, raw: Bytes) -> tuple[Bytes, Errors]:
        """The values to store, and how far they lie from `raw`."""
        before, elements = self.before(), raw.size // grids.WORD_BYTES
        if before is None:
            return raw, Errors(elements=elements)
        now, kept = raw.view(np.float32), before.view(np.float32)
        with np.errstate(all="ignore"):
            moved = np.abs(np.subtract(now, kept, dtype=np.float64))
            room = np.multiply(np.abs(now), self.rel, dtype=np.float64)
        near = (moved <= np.maximum(room, self.abs)) & np.isfinite(now)
        made = np.where(near, kept, now)
        moved[~near] = 0
        return made.view(np.uint8), Errors.of(moved)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """Values of a narrower type.

    Attributes:
        rule: The cast to it.
        bound: What no error exceeds, relative to the value.
        seen: As of `OnGrid`.
    """

    rule: Rule
    bound: float
    seen: list[Errors] = dataclasses.field(default_factory=list, compare=False)

    def apply(self, raw: Bytes) -> tuple[Bytes, Errors]:
        """The values to store, and how far they lie from `raw`."""
        cast = dtypes.derive(self.rule, raw)
        if cast is None:
            return raw, Errors(elements=raw.size // grids.WORD_BYTES, exact=True)
        made = dtypes.cast_values(self.rule, cast)
        if not self.seen:
            floor = dtypes.least_normal(self.rule)
            measured = _errors(raw, made, Kind.BITS, floor=floor)
            self.seen.append(Errors.within(self.bound, measured, made))
        return raw if self.seen[0].exact else made, self.seen[0]

    def coded(self, raw: Bytes) -> tuple[Bytes, Codes | None]:
        """The values to store, and their codes; None where they are not rounded."""
        made, errors = self.apply(raw)
        if errors.exact:
            return raw, None
        grid = Grid(kind=Kind.BITS, shift=dtypes.cast_shift(self.rule))
        found = np.empty(made.size // grids.WORD_BYTES, np.int32)
        return made, Codes(grid=grid, numbers=grids.codes(made, grid, out=found))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exactly:
    """What it is: the chunk that it refers to is not this process's, or cut otherwise.

    Attributes:
        elements: How many it has.
    """

    elements: int

    def apply(self, raw: Bytes) -> tuple[Bytes, Errors]:
        """The values to store, and how far they lie from `raw`."""
        return raw, Errors(elements=self.elements, exact=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """The cast of what is stored of another chunk, of whose true values it is one.

    Its errors are those of the other chunk, and are not counted again.

    Attributes:
        rule: The cast.
        source: The other chunk.
    """

    rule: Rule
    source: Source

    def apply(self, raw: Bytes) -> tuple[Bytes, Errors]:
        """The values to store, and how far they lie from `raw`."""
        elements = raw.size // dtypes.CAST_WORD_BYTES
        cast = dtypes.derive(self.rule, self.source.raw())
        followed = cast is not None and np.array_equal(cast, raw)
        made = dtypes.derive(self.rule, self.source.content()) if followed else None
        if made is None:
            return raw, Errors(elements=elements, exact=True)
        return made, Errors(elements=elements)


Rounding = OnGrid | Lazily | Narrowing | Following | Exactly


def _errors(
    raw: Bytes, made: Bytes, kind: Kind, *, floor: float, source: Bytes | None = None
) -> tuple[float, float]:
    """The largest error and the sum of squares; no number where there is no bound.

    Args:
        raw: True values.
        made: What they become.
        kind: Of the grid: LINEAR: errors as they are. LOG, BITS: relative to the value.
            RELATIVE: to the root of the source.
        floor: Added to that root; of BITS what an error is relative to at least.
        source: The other chunk of a RELATIVE grid.
    """
    true, found = raw.view(np.float32), made.view(np.float32)
    other = grids.NOTHING if source is None else source.view(np.float32)
    if kernels.pay(raw.size):
        return gridkernels.errors(int(kind))(true, found, other, np.float32(floor))
    largest, square_sum = np.float64(0), 0.0
    for start in range(0, true.size, _PIECE):
        part = slice(start, start + _PIECE)
        moved = _moved(true[part], found[part], kind, floor, other[part])
        largest = np.maximum(largest, moved.max(initial=0))  # no number stays none
        square_sum += float(np.square(moved, out=moved).sum())
    return float(largest), square_sum


def _moved(
    true: np.ndarray, found: np.ndarray, kind: Kind, floor: float, other: np.ndarray
) -> np.ndarray:
    """float64[n]: how far each value has moved, in the unit of the bound."""
    with np.errstate(all="ignore"):
        moved: np.ndarray = np.subtract(found, true, dtype=np.float64)
        np.abs(moved, out=moved)
        if kind is Kind.LOG:
            moved /= np.maximum(true.astype(np.float64), _LEAST_NORMAL)
            moved[true < 0] = np.nan
        elif kind is Kind.RELATIVE:
            moved /= (np.sqrt(other) + np.float32(floor)).astype(np.float64)
            moved[np.isnan(moved) & (found == true)] = 0  # 0 of 0, where nu is 0
        elif kind is Kind.BITS:
            moved /= np.maximum(np.abs(true, dtype=np.float64), floor)
            # The same infinity is the same; one of a finite number is not.
            moved[found == true] = 0
    return moved
