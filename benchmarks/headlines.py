"""The four figures that incremental checkpoints are advertised with, looked for here.

A save 92 % smaller and 93 % faster, a month of rolling saves in 88 % less storage, the
latest state restored 86 % faster. Each holds under conditions, so each is computed for
every workload, and where it does not hold the reason stands beside it.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from contenders import DELTA, ORBAX
from measure import LiveResult
from sidebyside import Pair
from verdicts import ratio

SIZE, SAVE_TIME, STORAGE, RESTORE_TIME = 0.92, 0.93, 0.88, 0.86

SAVE_FLOOR, RESTORE_FLOOR = 0.008, 0.002
"""Seconds of a manager's save and restore of next to nothing, by floors.py."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """One advertised saving under the conditions of one workload.

    Attributes:
        claim: What is to become less.
        conditions: Workload, and what is compared with what.
        wanted: Share that is to be saved.
        found: Share that is saved here.
        reason: Why it is not reached; empty where it is.
    """

    claim: str
    conditions: str
    wanted: float
    found: float
    reason: str

    @property
    def verdict(self) -> str:
        """Reached, or how far from it and why."""
        if self.found >= self.wanted:
            return "reached"
        return f"not reached: {100 * self.found:.1f} %. {self.reason}"


def headlines(pairs: Sequence[Pair], live: Sequence[LiveResult]) -> list[Headline]:
    """Returns every claim for every workload that says something about it."""
    found = [*_sizes(pairs), *_save_times(pairs), *_storage(live), *_restores(pairs)]
    order = {SIZE: 0, SAVE_TIME: 1, STORAGE: 2, RESTORE_TIME: 3}
    return sorted(found, key=lambda one: (order[one.wanted], -one.found))


def _sizes(pairs: Sequence[Pair]) -> Iterator[Headline]:
    seen = set()
    for pair in pairs:
        if (pair.workload, pair.scale) in seen:
            continue
        seen.add((pair.workload, pair.scale))
        yield Headline(
            claim="size of a save",
            conditions=f"{pair.workload}, {pair.scale}: second save against raw state",
            wanted=SIZE,
            found=1 - pair.added_bytes(DELTA) / pair.raw_bytes,
            reason=_why_size(pair),
        )


def _save_times(pairs: Sequence[Pair]) -> Iterator[Headline]:
    for pair in pairs:
        ours, theirs = pair.total_seconds(DELTA), pair.total_seconds(ORBAX)
        share = ratio(ours, theirs)
        yield Headline(
            claim="time of a save",
            conditions=f"{pair.title}: second save against Orbax's",
            wanted=SAVE_TIME,
            found=1 - share,
            reason=_why_time(pair, min(theirs), floor=SAVE_FLOOR, wanted=SAVE_TIME),
        )


def _storage(live: Sequence[LiveResult]) -> Iterator[Headline]:
    for run in live:
        count = len(run.delta_bytes)
        share = sum(run.delta_bytes) / (count * run.raw_bytes)
        yield Headline(
            claim="storage of rolling saves",
            conditions=(
                f"{run.workload}: all that {count} saves wrote, one a step, against "
                f"{count} raw states"
            ),
            wanted=STORAGE,
            found=1 - share,
            reason=(
                "A chunk is written whole now and then, and in between a save costs "
                "what its bits hold"
            ),
        )


def _restores(pairs: Sequence[Pair]) -> Iterator[Headline]:
    for pair in pairs:
        if not pair.warm_seconds(DELTA):
            continue
        share = ratio(pair.warm_seconds(DELTA), pair.restore_seconds(ORBAX))
        yield Headline(
            claim="time of a restore",
            conditions=(
                f"{pair.title}: by a follower that has the state before, against "
                "Orbax's restore"
            ),
            wanted=RESTORE_TIME,
            found=1 - share,
            reason=_why_time(
                pair,
                min(pair.restore_seconds(ORBAX)),
                floor=RESTORE_FLOOR,
                wanted=RESTORE_TIME,
            ),
        )


def _why_size(pair: Pair) -> str:
    if pair.changed > 0.5:
        return (
            f"{100 * pair.changed:.0f} % of the elements changed, and the low bits of "
            "what changed are noise that no lossless code shortens"
        )
    return (
        f"{100 * pair.changed:.1f} % of the elements changed, in fp32, whose low bits "
        "no lossless code shortens"
    )


def _why_time(pair: Pair, theirs: float, *, floor: float, wanted: float) -> str:
    if theirs * (1 - wanted) < floor:
        return (
            f"Orbax itself takes {theirs:.2f} s for a state of "
            f"{pair.raw_bytes / 1e6:.0f} MB; a manager's own share is about "
            f"{100 * floor / theirs:.0f} % of that"
        )
    if pair.changed > 0.5:
        return f"{100 * pair.changed:.0f} % of the elements have to be coded anew"
    return "Every byte has to be read and digested to know what has changed"
