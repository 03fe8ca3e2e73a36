"""Static grids: floats as whole numbers and back, the same on every machine.

A value's code depends on the value, the grid and its place in the chunk alone, never on
what was stored before, so that errors do not add up (DESIGN.md, decision 74). Coding
and decoding take integers, + - * / and square roots, which IEEE 754 rounds alike
everywhere. FORMAT.md section 4.9 is the contract. Does not belong here: how large an
error may be, payloads.
"""

import dataclasses
import enum
import functools
import math
import struct

import numpy as np

from orbax_delta import gridkernels, kernels, scratch
from orbax_delta.differences import Bytes
from orbax_delta.errors import CorruptionError

_HEAD = struct.Struct("<BBHIIff")
HEAD_BYTES = _HEAD.size

DITHER_PLACES = 1 << 18
"""After so many elements the dither begins anew."""

_MOST_CODE = np.float32(1 << 23)
_MOST_WORD = 0x7F7FFFFF
_INFINITY_WORD = 0x7F800000
_MOST_SHIFT = 24
_LEAST_SHIFT = 8

WORD_BYTES = 4
"""Grids are of float32."""

NOTHING = np.empty(0, np.float32)
"""In the place of a source, where there is none."""


class Kind(enum.IntEnum):
    """What is spaced evenly; the numbers are on disk."""

    LINEAR = 1
    LOG = 2
    RELATIVE = 3
    BITS = 4


_SHIFTED = (Kind.LOG, Kind.BITS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where the values of a chunk may lie.

    Attributes:
        kind: LINEAR: multiples of `step`. LOG: bit patterns 2^`shift` apart, zero, and
            nothing negative. RELATIVE: multiples of `step * (sqrt(v) + floor)`, v the
            element of another chunk. BITS: bit patterns that end in `shift` zeros.
        step: Distance, a positive normal float32; of LOG and BITS 0.
        shift: 8 to 24, of LOG, where 23 is an octave, and BITS; otherwise 0.
        floor: At least 0, of RELATIVE; otherwise 0.
        seed: Of the dither that moves the grid at each element by up to half a step;
            0: none. RELATIVE and BITS have none.
        start: Place in the dither of the chunk's first element.
    """

    kind: Kind
    step: float = 0.0
    shift: int = 0
    floor: float = 0.0
    seed: int = 0
    start: int = 0

    def head(self) -> bytes:
        """The bytes that a payload begins with."""
        return _HEAD.pack(
            self.kind, self.shift, 0, self.seed, self.start, self.step, self.floor
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A content that lies on a grid, as whole numbers.

    Attributes:
        grid: The grid.
        numbers: int32[n], the grid point of each element.
    """

    grid: Grid
    numbers: np.ndarray

    @property
    def alone(self) -> bool:
        """Whether they are worth a payload that stands for itself."""
        return self.grid.kind is not Kind.BITS


def parse(view: memoryview) -> tuple[Grid, memoryview]:
    """The grid that a payload begins with, and what follows.

    Raises:
        CorruptionError: It is cut off, or no grid.
    """
    if len(view) < HEAD_BYTES:
        raise CorruptionError(f"a payload of {len(view)} bytes has no grid")
    kind, shift, reserved, seed, start, step, floor = _HEAD.unpack_from(view)
    scaled, shifted = kind in (Kind.LINEAR, Kind.RELATIVE), kind in _SHIFTED
    good = (
        reserved == 0
        and start < DITHER_PLACES
        and (scaled or shifted)
        and (_LEAST_SHIFT <= shift <= _MOST_SHIFT if shifted else shift == 0)
        and (2.0**-126 <= step < math.inf if scaled else step == 0)
        and (0 <= floor < math.inf if kind == Kind.RELATIVE else floor == 0)
        and (kind in (Kind.LINEAR, Kind.LOG) or seed == 0)
    )
    if not good:
        raise CorruptionError(
            f"a payload's grid has kind {kind}, shift {shift}, step {step}, floor "
            f"{floor}, seed {seed}, start {start}; no such grid in this format version"
        )
    grid = Grid(
        kind=Kind(kind), step=step, shift=shift, floor=floor, seed=seed, start=start
    )
    return grid, view[HEAD_BYTES:]


def codes(
    content: Bytes,
    grid: Grid,
    source: Bytes | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """int32[n]: the code of the nearest grid point of each value.

    What has none (NaN, infinities, on LOG negative ones, more than 2^23 steps) gets
    code 0. On BITS it is the grid point whose pattern is at or below.

    Args:
        content: float32 values as bytes.
        grid: The grid.
        source: The other chunk of a RELATIVE grid, of the same size.
        out: Where the codes go. None: they are good until this thread calls again.
    """
    made = out
    if made is None:
        made = scratch.array("codes", content.size // WORD_BYTES, 4).view(np.int32)
    if _compiled(grid, content.size):
        run = gridkernels.codes(int(grid.kind), dithered=bool(grid.seed))
        run(content.view(_word(grid)), *_arguments(grid, source, made.size), made)
    else:
        np.copyto(made, _codes(content, grid, source))
    return made


def values(found: np.ndarray, grid: Grid, source: Bytes | None, out: Bytes) -> None:
    """Put the float32 values, as bytes, that stand at these grid points into `out`.

    Args:
        found: int32[n], as `codes` gives them; any other numbers give some value.
        grid: The grid.
        source: As `codes` had it.
        out: Where they go; it may be `source`.
    """
    if _compiled(grid, out.size):
        run = gridkernels.points(int(grid.kind), dithered=bool(grid.seed))
        run(found, *_arguments(grid, source, found.size), out.view(_word(grid)))
    else:
        np.copyto(out, _values(found, grid, source))


def rounded(content: Bytes, grid: Grid, source: Bytes | None, out: Bytes) -> None:
    """Put the values that stand at the codes of `content` into `out`.

    Args:
        content: float32 values as bytes.
        grid: The grid.
        source: As `codes` has it.
        out: Where they go.
    """
    if _compiled(grid, out.size):
        run = gridkernels.rounded(int(grid.kind), dithered=bool(grid.seed))
        arguments = _arguments(grid, source, content.size // WORD_BYTES)
        run(content.view(_word(grid)), *arguments, out.view(_word(grid)))
    else:
        np.copyto(out, _values(_codes(content, grid, source), grid, source))


def _compiled(grid: Grid, content_bytes: int) -> bool:
    # Of bit patterns a pass of numpy is one already.
    return grid.kind is not Kind.BITS and kernels.pay(content_bytes)


def _arguments(grid: Grid, source: Bytes | None, count: int) -> tuple[object, ...]:
    """What compiled passes want to know of a grid."""
    if source is None and grid.kind is Kind.RELATIVE:
        raise AssertionError("a relative grid needs what it is relative to")
    return (
        NOTHING if source is None else source.view(np.float32),
        np.float32(grid.step),
        np.float32(grid.floor),
        grid.shift,
        _dither_bytes(grid, count) if grid.seed else _dither(0),
    )


def _word(grid: Grid) -> type[np.generic]:
    """As what compiled passes see values."""
    return np.uint32 if grid.kind is Kind.LOG else np.float32


def _codes(content: Bytes, grid: Grid, source: Bytes | None) -> np.ndarray:
    values = content.view(np.float32)
    if grid.kind is Kind.BITS:
        return content.view(np.int32) >> np.int32(grid.shift)
    if grid.kind is Kind.LOG:
        words = content.view(np.uint32)
        moved = words + _word_offsets(grid, words.size)
        found: np.ndarray = (moved >> np.uint32(grid.shift)).astype(np.int32)
        found += 1
        found[(words == 0) | (words >= _INFINITY_WORD)] = 0
        return found
    with np.errstate(all="ignore"):
        if grid.kind is Kind.RELATIVE:
            places = values / _scales(source, grid)
        else:
            places = values / np.float32(grid.step)
            if grid.seed:
                places += _fractions(grid, values.size)
        np.rint(places, out=places)
        places[~(np.abs(places) < _MOST_CODE)] = 0
    codes: np.ndarray = places.astype(np.int32)
    return codes


def _values(found: np.ndarray, grid: Grid, source: Bytes | None) -> Bytes:
    if grid.kind is Kind.BITS:
        return (found.view(np.uint32) << np.uint32(grid.shift)).view(np.uint8)
    if grid.kind is Kind.LOG:
        words = (found.astype(np.int64) - 1) << grid.shift
        words += 1 << (grid.shift - 1)
        words -= _word_offsets(grid, found.size)
        np.clip(words, 1, _MOST_WORD, out=words)
        words[found == 0] = 0
        return words.astype(np.uint32).view(np.uint8)
    made = found.astype(np.float32)
    with np.errstate(all="ignore"):
        if grid.kind is Kind.RELATIVE:
            made *= _scales(source, grid)
        else:
            if grid.seed:
                made -= _fractions(grid, found.size)
            made *= np.float32(grid.step)
    return made.view(np.uint8)


def _scales(source: Bytes | None, grid: Grid) -> np.ndarray:
    """float32[n]: distances of the points of a RELATIVE grid at each element."""
    if source is None:
        raise AssertionError("a relative grid needs what it is relative to")
    made = np.sqrt(source.view(np.float32))
    made += np.float32(grid.floor)
    made *= np.float32(grid.step)
    return made


@functools.lru_cache(maxsize=4)
def _dither(seed: int) -> Bytes:
    """A byte for each place: murmur3's finalizer of place and seed, its top byte."""
    with np.errstate(over="ignore"):
        mixed = np.arange(DITHER_PLACES, dtype=np.uint32)
        mixed += np.uint32(seed) * np.uint32(0x9E3779B1)
        mixed ^= mixed >> np.uint32(16)
        mixed *= np.uint32(0x85EBCA6B)
        mixed ^= mixed >> np.uint32(13)
        mixed *= np.uint32(0xC2B2AE35)
        mixed ^= mixed >> np.uint32(16)
    table = (mixed >> np.uint32(24)).astype(np.uint8)
    table.flags.writeable = False
    return table


@functools.lru_cache(maxsize=4)
def _dither_twice(seed: int) -> Bytes:
    """So that what begins anywhere in it is one slice."""
    return np.concatenate([_dither(seed), _dither(seed)])


def _dither_bytes(grid: Grid, count: int) -> Bytes:
    if count <= DITHER_PLACES:
        return _dither_twice(grid.seed)[grid.start : grid.start + count]
    return np.resize(np.roll(_dither(grid.seed), -grid.start), count)


def _fractions(grid: Grid, count: int) -> np.ndarray:
    """By what part of a step each element's grid is moved: -255/512 to 255/512."""
    moved = _dither_bytes(grid, count).astype(np.float32)
    moved -= np.float32(127.5)
    moved *= np.float32(1 / 256)
    return moved


def _word_offsets(grid: Grid, count: int) -> np.ndarray:
    """By how much each element's cells of bit patterns are moved: below 2^shift."""
    if not grid.seed:
        return np.zeros(count, np.uint32)
    return _dither_bytes(grid, count).astype(np.uint32) << np.uint32(grid.shift - 8)
