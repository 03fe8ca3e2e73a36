"""What the saves and restores of a root have cost: its history and its MANIFESTs.

The two tell of the same saves; steps that an earlier version saved, or whose line was
lost with its process, are known from their MANIFESTs as long as they are there. Does
not belong here: files of the history (`history`), what follows from it (`advice`).
"""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from orbax_delta import history, listing
from orbax_delta.history import RestoreCost, SaveCost
from orbax_delta.listing import Item, Progress, Root

RECENT_SAVES = 20
"""Saves that a forecast goes by: older ones may be of another stage of the training."""

_DAY_SECONDS = 24 * 3600


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What is known of a root's saves and restores.

    Attributes:
        root: The root, as its MANIFESTs tell of it.
        saves: Saves, in order of their beginning.
        restores: Restores of processes that saved afterwards.
        damaged: What cannot be read, as sentences; the first error's exit code counts.
        exit_code: Of the first MANIFEST that cannot be read; 0: there is none.
    """

    root: Root
    saves: Sequence[SaveCost]
    restores: Sequence[RestoreCost]
    damaged: Sequence[str]
    exit_code: int


def read(url: str, progress: Progress = listing.no_progress) -> Costs:
    """What is known of the saves of a root.

    Args:
        url: The root.
        progress: Told of every MANIFEST read.

    Raises:
        NotFoundError: There is no such root.
        StorageError: The storage failed.

    Example:
        >>> read("/checkpoints/run").saves[-1].blocking_seconds  # doctest: +SKIP
        0.021
    """
    root = listing.read_root(url, progress)
    kept = history.read(root.folder)
    errors = [item.error for item in root.everything if item.error is not None]
    told = [cost for item in root.everything if (cost := _of_manifest(item))]
    # The history last: it also knows the host.
    saves = {cost.identity: cost for cost in (*told, *kept.saves)}
    return Costs(
        root=root,
        saves=sorted(saves.values(), key=lambda cost: (cost.started, cost.attempt)),
        restores=list(dict.fromkeys(kept.restores)),
        damaged=[*kept.damaged, *map(str, errors)],
        exit_code=errors[0].exit_code if errors else 0,
    )


def _of_manifest(item: Item) -> SaveCost | None:
    manifest, report = item.manifest, item.report
    if manifest is None or report is None:
        return None
    return SaveCost.of(report, attempt=manifest.attempt, started=manifest.wall_time)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step cost, all its items together.

    Attributes:
        step: Its name.
        started: When its first item was saved, in seconds since 1970.
        blocking_seconds: Time that the caller was kept, by all items in turn.
        total_seconds: From the first call until the last item was done.
        written_bytes: What all items wrote.
        full_bytes: Raw size of all items.
        is_full: Whether none of them built on anything stored before.
    """

    step: str
    started: float
    blocking_seconds: float
    total_seconds: float
    written_bytes: int
    full_bytes: int
    is_full: bool

    @classmethod
    def of(cls, saves: Sequence[SaveCost]) -> "StepCost":
        """The saves of its items, in order."""
        started = saves[0].started
        return cls(
            step=saves[0].step,
            started=started,
            blocking_seconds=sum(save.blocking_seconds for save in saves),
            total_seconds=max(s.total_seconds + (s.started - started) for s in saves),
            written_bytes=sum(save.written_bytes for save in saves),
            full_bytes=sum(save.full_bytes for save in saves),
            is_full=all(save.is_full for save in saves),
        )


def by_step(saves: Sequence[SaveCost]) -> list[StepCost]:
    """Saves of the items of one step together; a step saved again is another one."""
    groups: list[list[SaveCost]] = []
    for save in saves:
        last = groups[-1] if groups else []
        known = {other.item for other in last}
        if last and last[0].step == save.step and save.item not in known:
            last.append(save)
        else:
            groups.append([save])
    return [StepCost.of(group) for group in groups]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What storage the next saves will take, by those of late and what is kept now.

    While nothing is deleted each save adds what it writes. Where old steps go, what a
    save writes and what becomes free with a step are equal in the long run: every
    record that is written dies some day. So the store stays about as large as it is.

    Attributes:
        saves: Saved steps that it goes by, at most `RECENT_SAVES`.
        bytes_per_save: Mean of what they wrote, all items together.
        seconds_between: Median time from one to the next; None for fewer than two.
        steps: Steps that are there.
        deleting: Whether steps of this run have gone, so that a retention is in force.
        copies_bytes: What comes on top once the store has as many separate copies as
            `keep_bases` asks for: a full save for each that is still missing.
    """

    saves: int
    bytes_per_save: float
    seconds_between: float | None
    steps: int
    deleting: bool
    copies_bytes: float = 0.0

    def growth_bytes(self, saves: float, *, keep: int | None = None) -> float:
        """How much larger the store is after so many saves, but for `copies_bytes`.

        Args:
            saves: Saves from now.
            keep: Steps that are kept; None: as many as now if steps have gone, else
                all.

        Example:
            >>> forecast = Forecast(
            ...     saves=9,
            ...     bytes_per_save=5.0,
            ...     seconds_between=60.0,
            ...     steps=3,
            ...     deleting=True,
            ... )
            >>> forecast.growth_bytes(100), forecast.growth_bytes(100, keep=5)
            (0.0, 10.0)
        """
        if keep is None:
            keep = self.steps if self.deleting else None
        more = saves if keep is None else min(saves, max(keep - self.steps, 0))
        return more * self.bytes_per_save

    @property
    def bytes_per_day(self) -> float | None:
        """What is written in a day, if saves go on as they do."""
        if not self.seconds_between:
            return None
        return self.bytes_per_save * _DAY_SECONDS / self.seconds_between


def forecast(costs: Costs) -> Forecast | None:
    """What follows from the last saves of a root; None where there was none."""
    recent = by_step(costs.saves)[-RECENT_SAVES:]
    if not recent:
        return None
    there = {item.place.step_name for item in costs.root.items}
    return Forecast(
        saves=len(recent),
        bytes_per_save=sum(step.written_bytes for step in recent) / len(recent),
        seconds_between=seconds_between(recent),
        steps=len(there),
        deleting=bool({save.step for save in costs.saves} - there),
        copies_bytes=_copies_bytes(costs),
    )


def _copies_bytes(costs: Costs) -> float:
    """A full save of each item for each separate copy that it does not have yet."""
    newest = {i.place.item: i.report for i in costs.root.items if i.report is not None}
    full = {save.item: save.written_bytes for save in costs.saves if save.is_full}
    return sum(
        max(report.copies_wanted - report.copies, 0) * full.get(item, report.full_bytes)
        for item, report in newest.items()
    )


def seconds_between(saves: Sequence[StepCost]) -> float | None:
    """Median time from one save to the next; None for fewer than two."""
    pairs = itertools.pairwise(saves)
    gaps = [later.started - earlier.started for earlier, later in pairs]
    return statistics.median(gaps) if gaps else None
