"""What is wanted of the figures, and whether it is met."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from contenders import DELTA, ORBAX
from disk import DiskResult
from measure import TARGETS, LiveResult
from memory import MemoryResult
from sidebyside import Pair, median

LITTLE, FEW = 0.01, 0.05
"""Shares of changed elements up to which a save changes little, or a restore few."""

DENSE_TIME, LITTLE_TIME, BLOCKING = 0.5, 0.15, 1.0
BYTES_TO_TIME = 1.1
RESTORE, WARM_RESTORE = 0.6, 0.15
MEMORY, LITTLE_MEMORY = 1.0, 0.8
LIVE_SMALLER: Mapping[str, float] = {"rl_bf16": 60.0, "embedding": 60.0}
DISK = 1.3
COMPARABLE = "medium"
"""The scale whose ratios of bytes are those that figures are wanted for."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One figure that is wanted.

    Attributes:
        what: What was measured, in words.
        where: Workload, scale and place.
        found: The figure.
        wanted: Where it has to lie.
        at_least: Whether more is better.
    """

    what: str
    where: str
    found: float
    wanted: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it is as wanted; what was not measured is not."""
        if self.at_least:
            return self.found >= self.wanted
        return self.found <= self.wanted


def of_pair(pair: Pair) -> Iterator[Verdict]:
    """Yields what is wanted of a pair: bytes, and times against Orbax's default."""
    where = pair.title
    wanted = TARGETS.get(pair.workload)
    if wanted is not None and pair.scale == COMPARABLE:
        yield Verdict(
            what="times smaller than the raw state, second save",
            where=where,
            found=pair.raw_bytes / pair.added_bytes(DELTA),
            wanted=wanted,
            at_least=True,
        )
    for what, found, limit in _times(pair):
        if found == found:  # not-a-number where it was not measured
            yield Verdict(what=what, where=where, found=found, wanted=limit)
    for peer in pair.peers:
        if peer.save_seconds:
            yield Verdict(
                what=f"better than {peer.name} in bytes or in time (times, the better)",
                where=where,
                found=max(
                    peer.added_bytes / pair.added_bytes(DELTA),
                    median(peer.save_seconds) / median(pair.total_seconds(DELTA)),
                ),
                wanted=1.0,
                at_least=True,
            )


def _times(pair: Pair) -> Iterator[tuple[str, float, float]]:
    save = ratio(pair.total_seconds(DELTA), pair.total_seconds(ORBAX))
    later = ratio(pair.later_seconds(DELTA), pair.later_seconds(ORBAX))
    limit = None
    if pair.changed <= LITTLE:
        limit = LITTLE_TIME
    elif pair.workload == "dense":
        by_bytes = pair.added_bytes(DELTA) / pair.added_bytes(ORBAX)
        limit = DENSE_TIME if pair.in_memory else BYTES_TO_TIME * by_bytes
    if limit is not None:
        yield "second save, of Orbax's time", save, limit
        yield "later saves, of Orbax's time", later, limit
    blocking = ratio(pair.blocking_seconds(DELTA), pair.blocking_seconds(ORBAX))
    yield "blocking, of Orbax's time", blocking, BLOCKING
    restore = ratio(pair.restore_seconds(DELTA), pair.restore_seconds(ORBAX))
    yield "restore, of Orbax's time", restore, RESTORE
    cold = ratio(pair.cold_seconds(DELTA), pair.cold_seconds(ORBAX))
    yield "restore from a cold disk, of Orbax's time", cold, RESTORE
    if pair.changed <= FEW:
        warm = ratio(pair.warm_seconds(DELTA), pair.restore_seconds(ORBAX))
        yield "warm restore, of Orbax's time", warm, WARM_RESTORE


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the ratio of two medians; not-a-number where one is of nothing."""
    return median(ours) / median(theirs)


def of_memory(result: MemoryResult) -> Verdict:
    """Returns what is wanted of the peaks of memory of a workload."""
    peaks = result.peaks
    return Verdict(
        what="peak of memory of a saving loop, of Orbax's",
        where=result.where,
        found=peaks[DELTA].peak_bytes / peaks[ORBAX].peak_bytes,
        wanted=LITTLE_MEMORY if result.changed <= FEW else MEMORY,
    )


def of_live(result: LiveResult) -> Iterator[Verdict]:
    """Yields what is wanted of the mean save of a live run."""
    wanted = LIVE_SMALLER.get(result.workload)
    if wanted is not None:
        yield Verdict(
            what=f"times smaller, mean of {len(result.delta_bytes)} saves",
            where=result.workload,
            found=result.raw_bytes / float(np.mean(result.delta_bytes)),
            wanted=wanted,
            at_least=True,
        )


def of_disk(result: DiskResult) -> Verdict:
    """Returns what is wanted of the disk after a long run."""
    return Verdict(
        what=f"bytes on disk after {result.saves} saves, of live records",
        where=f"{result.workload}, {result.scale}",
        found=result.ratio,
        wanted=DISK,
    )
