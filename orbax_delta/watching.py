"""Following the saves of a run from outside of it: a root is read again and again.

Does not belong here: how what was read is shown.
"""

import time
from collections.abc import Callable, Iterator

from orbax_delta import costs
from orbax_delta.costs import Costs
from orbax_delta.errors import DeltaError, NotFoundError


def follow(
    url: str, *, seconds: float, wait: Callable[[float], None] = time.sleep
) -> Iterator[Costs | DeltaError | None]:
    """What is known of a root's saves, time after time, without end.

    Args:
        url: The root; it need not be there yet.
        seconds: Time between two readings. It is longer where reading takes longer, so
            that a watcher spends at most half of its time on the storage.
        wait: Waits for so many seconds.

    Yields:
        What was read; None where nothing has been saved yet; an error that the next
        reading may not have.

    Example:
        >>> for known in follow("/checkpoints/run", seconds=5):  # doctest: +SKIP
        ...     print(known)
    """
    while True:
        began = time.monotonic()
        try:
            yield costs.read(url)
        except NotFoundError:
            yield None
        except DeltaError as error:
            yield error
        wait(max(seconds, time.monotonic() - began))
