"""Memory that was freed goes back to the system.

The C library keeps what is freed in pieces of the size of a chunk; after a save that
drops the copies of a frozen model that would be most of them, for good.
"""

import ctypes
import functools
from collections.abc import Callable

WORTH_BYTES = 64 << 20
"""Less than this is not worth walking through the heap."""


def give_back() -> None:
    """Hand free pages to the system where the C library can (glibc; else nothing)."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None  # another C library, another system
    return found
