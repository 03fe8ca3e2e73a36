"""Compiled passes over words, where numba is installed (the extra `fast`).

What numpy does in a dozen passes is one pass here, without the interpreter's lock, so
that it is several times as fast and threads do not wait for each other. The bytes are
the same; `tests/test_kernels.py` compares them. Does not belong here: coding.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

AVAILABLE = importlib.util.find_spec("numba") is not None
_LEAST_BYTES = 128 << 10


def pay(content_bytes: int) -> bool:
    """Whether content of this size is worth a call, and the import behind it."""
    return AVAILABLE and content_bytes >= _LEAST_BYTES


class Kernels(NamedTuple):
    """Functions for words of one width; `planes` are `uint8[width, words]`.

    Attributes:
        split: `(words, planes)`: put byte k of every word into plane k.
        join: `(planes, out)`: the reverse.
        subtract: `(new, old, planes)`: split zigzag differences, as
            `differences.subtract` makes them.
        add: `(planes, old, out)`: the reverse; `out` may be `old`.
    """

    split: Callable[[np.ndarray, np.ndarray], None]
    join: Callable[[np.ndarray, np.ndarray], None]
    subtract: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    add: Callable[[np.ndarray, np.ndarray, np.ndarray], None]


@functools.cache
def of(word_bytes: int) -> Kernels:
    """The functions for one width, compiled when they are first called.

    Args:
        word_bytes: 1, 2, 4 or 8.
    """
    # Imported where it is used: it takes a quarter of a second and 60 MB of memory.
    numba: Any = importlib.import_module("numba")

    def compiled(function: Callable[..., None]) -> Callable[..., None]:
        try:
            made: Callable[..., None] = numba.njit(nogil=True, cache=True)(function)
        except RuntimeError:  # there is no folder to keep compiled code in
            made = numba.njit(nogil=True)(function)
        return made

    word: Any = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[word_bytes]
    width, zero, one = word_bytes, word(0), word(1)
    top, byte = word(8 * word_bytes - 1), word(255)
    shifts = np.arange(0, 8 * word_bytes, 8).astype(word)

    def split(words: np.ndarray, planes: np.ndarray) -> None:
        for i in range(words.size):
            for k in range(width):
                planes[k, i] = (words[i] >> shifts[k]) & byte

    def join(planes: np.ndarray, out: np.ndarray) -> None:
        for i in range(out.size):
            value = zero
            for k in range(width):
                value = word(value | word(word(planes[k, i]) << shifts[k]))
            out[i] = value

    def subtract(new: np.ndarray, old: np.ndarray, planes: np.ndarray) -> None:
        for i in range(new.size):
            change = word(new[i] - old[i])
            value = word(word(change << one) ^ word(zero - word(change >> top)))
            for k in range(width):
                planes[k, i] = (value >> shifts[k]) & byte

    def add(planes: np.ndarray, old: np.ndarray, out: np.ndarray) -> None:
        for i in range(out.size):
            value = zero
            for k in range(width):
                value = word(value | word(word(planes[k, i]) << shifts[k]))
            change = word(word(value >> one) ^ word(zero - word(value & one)))
            out[i] = word(change + old[i])

    return Kernels(
        split=compiled(split),
        join=compiled(join),
        subtract=compiled(subtract),
        add=compiled(add),
    )
