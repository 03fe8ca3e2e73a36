"""The bounded pool: work on many threads, results in order, little in flight."""

import collections
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Pool = concurrent.futures.ThreadPoolExecutor


@contextlib.contextmanager
def pool(threads: int) -> Iterator[Pool]:
    """A thread pool; work not yet begun is dropped when the block raises.

    Leaving the block waits for work under way, so that no straggler of a failed save
    touches anything after its error is known.
    """
    executor = Pool(threads, thread_name_prefix="orbax_delta")
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def batches(
    items: Iterable[_Item], weigh: Callable[[_Item], int], *, least: int
) -> Iterator[list[_Item]]:
    """Neighbouring items together, each batch but the last of weight `least` or more.

    A task costs as much as coding a few kilobytes; thousands of small items would spend
    more time on being handed over than on being worked on.
    """
    batch: list[_Item] = []
    weight = 0
    for item in items:
        batch.append(item)
        weight += weigh(item)
        if weight >= least:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def each(
    function: Callable[[_Item], _Result],
) -> Callable[[list[_Item]], list[_Result]]:
    """`function` of an item as one of a batch."""
    return lambda batch: [function(item) for item in batch]


def ordered_map(
    executor: Pool,
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    window: int,
) -> Iterator[_Result]:
    """`map` on the pool with at most `window` results waiting, in the items' order."""
    waiting: collections.deque[concurrent.futures.Future[_Result]] = collections.deque()
    for item in items:
        waiting.append(executor.submit(function, item))
        if len(waiting) >= window:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class Stopwatch:
    """Wall seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def move(self, seconds: float, *, of: str, to: str) -> None:
        """Count time that was spent within stage `of` as that of stage `to`."""
        self.seconds[of] = self.seconds.get(of, 0.0) - seconds
        self.seconds[to] = self.seconds.get(to, 0.0) + seconds

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to stage `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
