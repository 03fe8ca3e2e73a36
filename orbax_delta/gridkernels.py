"""Compiled passes of `grids` and `lanes`, where numba is installed.

They give what the numpy code there gives, bit for bit; `tests/test_grids.py` compares
them. Does not belong here: what a grid is, payloads.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from orbax_delta.kernels import compiler

_MOST_CODE = np.float32(1 << 23)
_INFINITY_WORD = np.uint32(0x7F800000)
_MOST_WORD = np.uint32(0x7F7FFFFF)
_LEAST_NORMAL = 2.0**-126
_ZERO, _UNIT = np.uint32(0), np.uint32(1)
_LOG, _RELATIVE, _BITS = 2, 3, 4
_BLOCK = 1024
_LANES = 256
_MIDDLE, _PART = np.float32(127.5), np.float32(1 / 256)

Pass = Callable[..., None]
"""`(given, source, step, floor, shift, dither, made)`: one of `codes`, `points` and
`rounded` for the elements of a chunk. All are arrays of one size, values of float32, on
LOG grids of uint32; `source` is empty where there is none; of the dither one byte is
enough where there is none."""


@functools.cache
def codes(kind: int, *, dithered: bool) -> Pass:
    """From values to the codes of the grid points that are nearest.

    Args:
        kind: Number of a `grids.Kind`.
        dithered: Whether the grid is moved.
    """
    logarithmic, relative = kind == _LOG, kind == _RELATIVE

    def run(
        given: Any,
        source: Any,
        step: Any,
        floor: Any,
        shift: Any,
        dither: Any,
        made: Any,
    ) -> None:
        by, less = np.uint32(shift), np.uint32(shift - 8)
        for i in range(given.size):
            if logarithmic:
                word = np.uint32(given[i])
                moved = np.uint32(np.uint32(dither[i]) << less) if dithered else _ZERO
                cell = np.uint32(np.uint32(word + moved) >> by)
                kept = (word != _ZERO) & (word < _INFINITY_WORD)
                made[i] = np.int32(np.uint32(cell + _UNIT) if kept else _ZERO)
            else:
                scale = step
                if relative:
                    scale = np.float32(np.float32(np.sqrt(source[i])) + floor)
                    scale = np.float32(scale * step)
                at = np.float32(np.float32(given[i]) / scale)
                if dithered:
                    byte = np.float32(dither[i])
                    at += np.float32(np.float32(byte - _MIDDLE) * _PART)
                at = np.float32(np.rint(at))
                made[i] = np.int32(at if abs(at) < _MOST_CODE else np.float32(0))

    found: Pass = compiler(error_model="numpy")(run)
    return found


@functools.cache
def points(kind: int, *, dithered: bool) -> Pass:
    """From codes, and any other numbers, to values; arguments as of `codes`."""
    logarithmic, relative = kind == _LOG, kind == _RELATIVE

    def run(
        given: Any,
        source: Any,
        step: Any,
        floor: Any,
        shift: Any,
        dither: Any,
        made: Any,
    ) -> None:
        half, less = np.int64(1 << (shift - 1 if logarithmic else 0)), shift - 8
        for i in range(given.size):
            if logarithmic:
                at = np.int64((np.int64(given[i]) - 1) << shift) + half
                if dithered:
                    at -= np.int64(dither[i]) << less
                at = min(max(at, np.int64(1)), np.int64(_MOST_WORD))
                made[i] = np.uint32(at) if given[i] != 0 else _ZERO
            elif relative:
                scale = np.float32(np.float32(np.sqrt(source[i])) + floor)
                made[i] = np.float32(np.float32(given[i]) * np.float32(scale * step))
            else:
                place = np.float32(given[i])
                if dithered:
                    byte = np.float32(dither[i])
                    place -= np.float32(np.float32(byte - _MIDDLE) * _PART)
                made[i] = np.float32(np.float32(place) * step)

    found: Pass = compiler()(run)
    return found


@functools.cache
def rounded(kind: int, *, dithered: bool) -> Pass:
    """From values to those of the grid points that are nearest, in one pass."""
    logarithmic, relative = kind == _LOG, kind == _RELATIVE

    def run(
        given: Any,
        source: Any,
        step: Any,
        floor: Any,
        shift: Any,
        dither: Any,
        made: Any,
    ) -> None:
        half = np.uint32(1 << (shift - 1 if logarithmic else 0))
        by, less = np.uint32(shift), np.uint32(shift - 8)
        for i in range(given.size):
            if logarithmic:
                word = np.uint32(given[i])
                moved = np.uint32(np.uint32(dither[i]) << less) if dithered else _ZERO
                cell = np.uint32(np.uint32(word + moved) >> by)
                # Of words below infinity no sum reaches 2^32.
                least = np.uint32(moved + _UNIT)
                at = max(np.uint32(np.uint32(cell << by) + half), least)
                at = min(np.uint32(at - moved), _MOST_WORD)
                kept = (word != _ZERO) & (word < _INFINITY_WORD)
                made[i] = np.uint32(at) if kept else _ZERO
            else:
                scale, part = step, np.float32(0)
                if relative:
                    scale = np.float32(np.float32(np.sqrt(source[i])) + floor)
                    scale = np.float32(scale * step)
                place = np.float32(np.float32(given[i]) / scale)
                if dithered:
                    byte = np.float32(dither[i])
                    part = np.float32(np.float32(byte - _MIDDLE) * _PART)
                    place = np.float32(place + part)
                place = np.float32(np.rint(place))
                place = place if abs(place) < _MOST_CODE else np.float32(0)
                # Of a code there is no -0.
                place = np.float32(np.float32(place + np.float32(0)) - part)
                made[i] = np.float32(place * scale)

    found: Pass = compiler(error_model="numpy")(run)
    return found


Pack = Callable[[np.ndarray, np.int32, np.ndarray, np.ndarray], int]
"""`(codes, centre, packed, apart)`: zigzag numbers of codes less the centre in lanes,
and by how much those that do not fit exceed the largest; returns how many these are."""


@functools.cache
def pack(lane_bits: int) -> Pack:
    """See `Pack`."""
    per_byte = 8 // lane_bits
    escape = np.uint32((1 << lane_bits) - 1)

    def run(codes: Any, centre: Any, packed: Any, apart: Any) -> int:
        numbers = np.zeros(_BLOCK, np.uint32)
        count = 0
        for first in range(0, codes.size, _BLOCK):
            some = codes[first : first + _BLOCK]
            largest = np.uint32(0)
            for i in range(some.size):
                code = np.int32(some[i] - centre)
                number = np.uint32(np.int32(code << 1) ^ np.int32(code >> 31))
                numbers[i] = number
                largest = max(largest, number)
            if largest >= escape:
                for i in range(some.size):
                    # Written always, kept if it is one: jumps would cost more.
                    apart[count] = numbers[i] - escape
                    count += int(numbers[i] >= escape)
            for i in range(some.size, _BLOCK):
                numbers[i] = 0
            into = packed[first // per_byte : (first + _BLOCK) // per_byte]
            for place in range(into.size):
                byte = np.uint32(0)
                for lane in range(per_byte):
                    low = min(numbers[place * per_byte + lane], escape)
                    byte |= np.uint32(low << np.uint32(lane * lane_bits))
                into[place] = np.uint8(byte)
        return count

    found: Pack = compiler()(run)
    return found


Unpack = Callable[[np.ndarray, np.ndarray, np.int32, np.ndarray], int]
"""`(packed, apart, centre, codes)`: the reverse of `Pack`; returns how many numbers
have to stand apart, which may be more than are there."""


@functools.cache
def unpack(lane_bits: int) -> Unpack:
    """See `Unpack`."""
    per_byte = 8 // lane_bits
    escape = np.uint32((1 << lane_bits) - 1)

    def run(packed: Any, apart: Any, centre: Any, codes: Any) -> int:
        numbers = np.zeros(_BLOCK, np.uint32)
        count = 0
        for first in range(0, codes.size, _BLOCK):
            some = packed[first // per_byte : (first + _BLOCK) // per_byte]
            into = codes[first : first + _BLOCK]
            largest = np.uint32(0)
            for place in range(some.size):
                byte = np.uint32(some[place])
                for lane in range(per_byte):
                    low = np.uint32(byte >> np.uint32(lane * lane_bits)) & escape
                    numbers[place * per_byte + lane] = low
                    largest = max(largest, np.uint32(low))
            if largest == escape:
                for i in range(into.size):
                    if numbers[i] == escape:
                        numbers[i] += apart[count] if count < apart.size else 0
                        count += 1
            for i in range(into.size):
                sign = np.int32(0) - np.int32(numbers[i] & np.uint32(1))
                code = np.int32(numbers[i] >> np.uint32(1)) ^ np.int32(sign)
                into[i] = np.int32(code + centre)
        return count

    found: Unpack = compiler()(run)
    return found


Errors = Callable[[np.ndarray, np.ndarray, np.ndarray, np.float32], tuple[float, float]]
"""`(true, found, source, floor)`: the largest error in the unit of a grid of that kind,
and the sum of squares; no number where one is none, or a true value is negative on a
LOG grid. On BITS it is relative to the value, or to the floor where that is more."""


@functools.cache
def errors(kind: int) -> Errors:
    """See `Errors`; `kind` is the number of a `grids.Kind`."""
    logarithmic, relative = kind == _LOG, kind == _RELATIVE
    patterned = kind == _BITS

    def run(true: Any, found: Any, source: Any, floor: Any) -> tuple[float, float]:
        # One of each for every place in a block: none waits for the one before it.
        largest, sums = np.zeros(_LANES), np.zeros(_LANES)
        for first in range(0, true.size, _LANES):
            one, other = true[first : first + _LANES], found[first : first + _LANES]
            base = source[first : first + _LANES]
            for i in range(one.size):
                value = np.float64(one[i])
                moved: Any = abs(np.float64(other[i]) - value)
                if logarithmic:
                    moved /= max(value, _LEAST_NORMAL)
                    moved = np.nan if value < 0 else moved
                if relative:
                    root = np.float32(np.float32(np.sqrt(base[i])) + floor)
                    scale = np.float64(root)
                    moved = moved / scale if (scale != 0) | (moved != 0) else 0.0
                if patterned:
                    moved /= max(abs(value), np.float64(floor))
                    # The same infinity is the same; one of a finite number is not.
                    moved = 0.0 if other[i] == one[i] else moved
                largest[i] = moved if moved > largest[i] else largest[i]
                sums[i] += moved * moved
        square_sum = sums.sum()
        # What is no number is not greater than another, but no sum with it is one.
        return (np.nan if np.isnan(square_sum) else largest.max()), square_sum

    made: Errors = compiler(error_model="numpy")(run)
    return made
