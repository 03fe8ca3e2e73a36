"""Compiled passes over words, where numba is installed (the extra `fast`).

What numpy does in a dozen passes is one pass here, several times as fast. Long ones let
go of the interpreter's lock and short ones keep it, so that threads rarely wait for
each other (DESIGN.md, decision 84). The bytes are the same; `tests/test_kernels.py`
compares them. Does not belong here: coding.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

AVAILABLE = importlib.util.find_spec("numba") is not None
_LEAST_BYTES = 128 << 10
_MOST_BYTES = 4 << 20

BLOCK_BYTES = 4096
"""Size of a block of the bitmap form, in bytes (1,024 fp32 elements)."""

_RUN_BYTES = 8
# Runs that are compared at once.
_RUNS = 32

FIND_ROOM = _RUNS * _RUN_BYTES
"""Words that arrays need room for beyond those that are wanted of what is found."""

TOGETHER = 8
"""Contents that one call of `find` takes, of which some may be empty."""


def pay(content_bytes: int) -> bool:
    """Whether content of this size is worth a call, and the import behind it."""
    return AVAILABLE and content_bytes >= _LEAST_BYTES


def pay_briefly(content_bytes: int) -> bool:
    """The same of what keeps the interpreter's lock, which nobody may miss for long."""
    return pay(content_bytes) and content_bytes <= _MOST_BYTES


Planes = tuple[np.ndarray, ...]


class Kernels(NamedTuple):
    """Functions for words of one width; `planes` are `uint8[width, words]`.

    Attributes:
        split: `(words, planes)`: put byte k of every word into plane k.
        join: `(planes, out)`: the reverse, of planes that may lie apart.
        subtract: `(new, old, planes)`: split zigzag differences, as
            `differences.subtract` makes them.
        add: `(planes, old, out)`: the reverse, as `join`; `out` may be `old`.
        find: `(new, old, most, positions, values, blocks, counts)`, of several contents
            in bytes: count the words that differ, and mark their blocks of 4 KiB; while
            they are no more than `most`, also where they are and their zigzag
            differences, in rows of `most + FIND_ROOM`.
        change: `(planes, gap_bytes, words, undo)`: add differences to some words, or
            take them away, see `sparse.Unpacked`. Returns the last of them; where that
            is none of `words`, they are as they were. Keeps the interpreter's lock, as
            those below, see `pay_briefly`.
        pack: `(positions, values, planes, same)`: planes of the gaps between positions,
            then those of the values, after one another in `planes`; whether each is of
            one value into `same`. Returns how many there are of gaps.
        carry: `(positions, new, old)`: copy some words from `new` to `old`, at
            positions that `find` has found in them.
    """

    split: Callable[[np.ndarray, np.ndarray], None]
    join: Callable[[Planes, np.ndarray], None]
    subtract: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    add: Callable[[Planes, np.ndarray, np.ndarray], None]
    find: Callable[..., None]
    change: Callable[[np.ndarray, int, np.ndarray, bool], int]
    pack: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], int]
    carry: Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def compiler(
    *, nogil: bool = True, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles a function when it is first called.

    Args:
        nogil: Whether it lets go of the interpreter's lock. What takes microseconds
            should not: to get the lock back costs more than it does.
        **options: For numba.
    """
    # Imported where it is used: it takes a quarter of a second and 60 MB of memory.
    numba: Any = importlib.import_module("numba")

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(nogil=nogil, cache=True, **options)(function)
        except RuntimeError:  # there is no folder to keep compiled code in
            return numba.njit(nogil=nogil, **options)(function)

    return compiled


_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@functools.cache
def of(word_bytes: int) -> Kernels:
    """The functions for one width, compiled when they are first called.

    Args:
        word_bytes: 1, 2, 4 or 8.
    """
    compiled = compiler()
    word = _WORDS[word_bytes]
    width, zero, unit = word_bytes, word(0), word(1)
    top, byte = word(8 * word_bytes - 1), word(255)
    shifts = np.arange(0, 8 * word_bytes, 8).astype(word)

    def split(words: np.ndarray, planes: np.ndarray) -> None:
        for i in range(words.size):
            for k in range(width):
                planes[k, i] = (words[i] >> shifts[k]) & byte

    def join(planes: Planes, out: np.ndarray) -> None:
        for i in range(out.size):
            value = zero
            for k in range(width):
                value = word(value | word(word(planes[k][i]) << shifts[k]))
            out[i] = value

    def subtract(new: np.ndarray, old: np.ndarray, planes: np.ndarray) -> None:
        for i in range(new.size):
            change = word(new[i] - old[i])
            value = word(word(change << unit) ^ word(zero - word(change >> top)))
            for k in range(width):
                planes[k, i] = (value >> shifts[k]) & byte

    def add(planes: Planes, old: np.ndarray, out: np.ndarray) -> None:
        for i in range(out.size):
            value = zero
            for k in range(width):
                value = word(value | word(word(planes[k][i]) << shifts[k]))
            change = word(word(value >> unit) ^ word(zero - word(value & unit)))
            out[i] = word(change + old[i])

    change, pack, carry = map(compiler(nogil=False), _brief(word_bytes))
    return Kernels(
        split=compiled(split),
        join=compiled(join),
        subtract=compiled(subtract),
        add=compiled(add),
        find=compiled(_finder(word_bytes)),
        change=change,
        pack=pack,
        carry=carry,
    )


def _brief(word_bytes: int) -> tuple[Callable[..., Any], ...]:
    """`change`, `pack` and `carry` of `Kernels`, not yet compiled."""
    word = _WORDS[word_bytes]
    width, zero, unit, byte = word_bytes, word(0), word(1), word(255)
    shifts = np.arange(0, 8 * word_bytes, 8).astype(word)

    def change(
        planes: np.ndarray, gap_bytes: int, words: np.ndarray, undo: bool
    ) -> int:
        count = planes.size // (gap_bytes + width)
        last = count - 1
        for k in range(gap_bytes):
            total = 0
            for i in range(k * count, (k + 1) * count):
                total += planes[i]
            last += total << (8 * k)
        if last >= words.size:
            return last
        place, values = -1, gap_bytes * count
        for i in range(count):
            place += 1
            for k in range(gap_bytes):
                place += int(planes[k * count + i]) << (8 * k)
            value = zero
            for k in range(width):
                part = word(planes[values + k * count + i])
                value = word(value | word(part << shifts[k]))
            delta = word(word(value >> unit) ^ word(zero - word(value & unit)))
            words[place] = word(words[place] + word(zero - delta if undo else delta))
        return last

    def pack(
        positions: np.ndarray, values: np.ndarray, planes: np.ndarray, same: np.ndarray
    ) -> int:
        count = positions.size
        widest, place = 0, -1
        for i in range(count):
            widest = max(widest, int(positions[i]) - place - 1)
            place = int(positions[i])
        gap_bytes = 1 if widest < 1 << 8 else 2 if widest < 1 << 16 else 4
        place = -1
        for i in range(count):
            gap = int(positions[i]) - place - 1
            place = int(positions[i])
            for k in range(gap_bytes):
                planes[k * count + i] = (gap >> (8 * k)) & 255
        start = gap_bytes * count
        for k in range(width):
            for i in range(count):
                planes[start + k * count + i] = (values[i] >> shifts[k]) & byte
        for k in range(gap_bytes + width):
            differ = np.uint8(0)
            for i in range(k * count, (k + 1) * count):
                differ |= planes[i] ^ planes[k * count]
            same[k] = differ == np.uint8(0)
        return gap_bytes

    def carry(positions: np.ndarray, new: np.ndarray, old: np.ndarray) -> None:
        for i in range(positions.size):
            old[positions[i]] = new[positions[i]]

    return change, pack, carry


@functools.cache
def to_bf16() -> Callable[[np.ndarray, np.ndarray], int]:
    """`(words, halves)`: the cast of float32 as bits; returns how many were NaNs."""
    unit, half, top = np.uint32(1), np.uint32(0x7FFF), np.uint32(16)
    magnitude, infinity = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)

    def run(words: np.ndarray, halves: np.ndarray) -> int:
        nans = np.uint32(0)
        for i in range(words.size):
            word = words[i]
            nans += np.uint32((word & magnitude) > infinity)
            odd = np.uint32(np.uint32(word >> top) & unit)
            halves[i] = np.uint16(np.uint32(np.uint32(word + half) + odd) >> top)
        return int(nans)

    found: Callable[[np.ndarray, np.ndarray], int] = compiler()(run)
    return found


def _finder(word_bytes: int) -> Callable[..., None]:
    """The function `find` of `Kernels`, not yet compiled.

    In one piece: what calls another compiled function is compiled in every process.
    """
    word, run = _WORDS[word_bytes], _WORDS[_RUN_BYTES]
    zero, unit, top = word(0), word(1), word(8 * word_bytes - 1)
    run_words = _RUN_BYTES // word_bytes
    block_words = BLOCK_BYTES // word_bytes
    none = np.uint64(0)

    def find(
        news: tuple[np.ndarray, ...],
        olds: tuple[np.ndarray, ...],
        most: np.ndarray,
        positions: np.ndarray,
        values: np.ndarray,
        blocks: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        for k in range(counts.size):
            # Contents may begin at any address, of which processors do not mind.
            new, old = news[k].view(word), olds[k].view(word)
            groups = news[k].size // (_RUNS * _RUN_BYTES)
            whole = groups * _RUNS * _RUN_BYTES
            new_runs, old_runs = news[k][:whole].view(run), olds[k][:whole].view(run)
            count = 0
            for group in range(groups):
                start = group * _RUNS
                one = new_runs[start : start + _RUNS]
                other = old_runs[start : start + _RUNS]
                differ = none
                for j in range(_RUNS):  # as many as one instruction takes
                    differ |= one[j] ^ other[j]
                if differ == none:
                    continue
                first = start * run_words
                blocks[k, first // block_words] = True
                if count > most[k]:
                    for i in range(first, first + _RUNS * run_words):
                        count += int(new[i] != old[i])
                    continue
                for j in range(_RUNS):
                    if one[j] == other[j]:
                        continue
                    for i in range(first + j * run_words, first + (j + 1) * run_words):
                        # Written always, kept if it is one: jumps would cost more.
                        change = word(new[i] - old[i])
                        sign = word(zero - word(change >> top))
                        positions[k, count] = i
                        values[k, count] = word(word(change << unit) ^ sign)
                        count += int(change != zero)
            for i in range(whole // word_bytes, new.size):
                change = word(new[i] - old[i])
                if change != zero:
                    blocks[k, i // block_words] = True
                    if count <= most[k]:
                        sign = word(zero - word(change >> top))
                        positions[k, count] = i
                        values[k, count] = word(word(change << unit) ^ sign)
                    count += 1
            counts[k] = count

    return find
