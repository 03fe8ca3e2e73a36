"""Lives of this process: what an earlier one left behind is known to be of the dead.

Pins and condemned marks name their owner, and nobody may touch those of a process that
may still run. A test that crashes a save and goes on in the same process has to become
another process, as far as `owners` can tell. Does not belong here: the crash itself.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator

from orbax_delta import owners

_NUMBERS = itertools.count(1)


@contextlib.contextmanager
def new_life() -> Iterator[str]:
    """In the block this process is one that has only just started.

    Owners from before it are known to be dead; they are not after it, when the block
    around this one, or the real process, goes on. Gives the life's start time.
    """
    before = owners._start_time
    this, start = os.getpid(), f"life {next(_NUMBERS)}"

    def start_time(pid: int) -> str:
        return start if pid == this else before(pid)

    owners._start_time = start_time
    try:
        yield start
    finally:
        owners._start_time = before
