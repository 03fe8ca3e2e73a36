"""Arrays that a thread uses again and again, so that passes over a chunk stay in cache.

Fresh memory of a chunk's size costs as much as a pass over it. Does not belong here:
anything that is handed on; who keeps an array makes one.
"""

import threading

import numpy as np

KEPT_BYTES = 4 << 20
"""Larger arrays are made for their one use, and go with it."""


class _Held(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}


_held = _Held()


def array(purpose: str, count: int, word_bytes: int) -> np.ndarray:
    """An array of `count` unsigned words, with any content.

    It is the caller's until this thread asks for one of the same purpose again.

    Args:
        purpose: What for; different names never share memory.
        count: Number of words.
        word_bytes: Size of a word, 1, 2, 4 or 8.
    """
    dtype = np.dtype(f"<u{word_bytes}")
    needed = count * word_bytes
    if needed > KEPT_BYTES:
        return np.empty(count, dtype)
    found = _held.arrays.get(purpose)
    if found is None or found.nbytes < needed:
        # By powers of two, so that chunks of all sizes soon fit.
        found = np.empty(1 << max(needed - 1, 4095).bit_length(), np.uint8)
        _held.arrays[purpose] = found
    return found[:needed].view(dtype)
