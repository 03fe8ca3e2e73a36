"""How often to save: what saves cost against what failures cost.

The model. Failures come at random, one in M seconds on average (a Poisson process, of
mean time between failures M), also while the job starts again. A save is called every C
seconds, keeps the caller for b of them (`blocking`), and is committed T seconds after
the call (`total`), T <= C, because a save waits for the last one. A failure costs R
seconds until training goes on from the newest committed step: the restart of the job
and the restore.

A failure X seconds after a commit throws the job back to what was captured T before
that commit. So the next commit takes C seconds if nothing fails meanwhile, and after a
failure R + (C - b) + T without another one: the restore, the work up to the call, the
save. A stretch of L seconds that begins anew with each failure takes M (exp(L / M) - 1)
on average, so that the mean time from commit to commit is

    M (1 - exp(-C / M)) exp((R + C - b + T) / M)
        = M exp((R + T - b) / M) (exp(C / M) - 1)

in which C - b seconds of work are done. For a synchronous save (T = b) this is the
complete model of Daly, whose C is tau + delta: J. T. Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22 (2006). T and R stand in a factor without C: they make a failure dearer, but do not
move the optimum, which is Daly's for a save that costs b alone, or T where that is
later. To first order it is sqrt(2 b M) and a failure costs C / 2 + T + R, which is
J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17 (1974), with T for what an asynchronous save puts at risk.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from orbax_delta import costs
from orbax_delta.costs import Costs, Forecast, StepCost
from orbax_delta.errors import InvalidInputError, NotFoundError

MONTH_SECONDS = 30 * 24 * 3600

# Beyond this exp() of a double overflows: nothing is ever done.
_HOPELESS = 700.0

_MOST_STEPS = 10**9


def best_interval(*, blocking: float, total: float, mtbf: float) -> float:
    """Seconds from one call of `save()` to the next that waste least time.

    Args:
        blocking: Seconds that a save keeps the caller.
        total: Seconds from the call until it is committed; a shorter interval makes
            saves wait for each other.
        mtbf: Mean seconds between failures of the job.

    Returns:
        The root of exp(x + b / M) (1 - x) = 1, by bisection, in units of M and with b
        added; at least `total`.

    Raises:
        InvalidInputError: A time is negative or no number, or `mtbf` is 0.

    Example:
        >>> round(best_interval(blocking=2.0, total=30.0, mtbf=86400.0))
        589
    """
    _check(blocking=blocking, total=total, mtbf=mtbf)
    share = blocking / mtbf
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        # Falls from b / M at 0 to minus infinity at 1.
        if middle < 1.0 and math.log1p(-middle) + middle + share > 0:
            low = middle
        else:
            high = middle
    return max(low * mtbf + blocking, total)


def overhead(
    interval: float, *, blocking: float, total: float, restore: float, mtbf: float
) -> float:
    """Share of the time in which training does not advance, from 0 to 1.

    Args:
        interval: Seconds from one call of `save()` to the next, at least `total`.
        blocking: Seconds that a save keeps the caller.
        total: Seconds from the call until it is committed.
        restore: Seconds from a failure until training goes on.
        mtbf: Mean seconds between failures of the job.

    Raises:
        InvalidInputError: A time is negative or no number, `mtbf` is 0, or `interval`
            is shorter than `total` or `blocking`.

    Example:
        >>> overhead(589, blocking=2, total=30, restore=120, mtbf=86400)
        0.008...
    """
    _check(
        blocking=blocking, total=total, mtbf=mtbf, restore=restore, interval=interval
    )
    if interval < max(total, blocking):
        raise InvalidInputError(
            f"an interval of {interval:g} s is shorter than a save, of {total:g} s: "
            "saves would wait for each other"
        )
    ahead = (restore + total - blocking) / mtbf
    if ahead + interval / mtbf > _HOPELESS:
        return 1.0
    done = (interval - blocking) / mtbf
    whole = math.expm1(interval / mtbf) * math.exp(ahead)
    return 1.0 - (done / whole if whole else 1.0)


def lost_seconds(interval: float, *, total: float, mtbf: float) -> float:
    """Mean training time that a failure makes undone, while nothing else goes wrong.

    Since the last commit X < `interval` have passed, and `total` before that belong to
    the save: total + M - C / (exp(C / M) - 1), about total + C / 2.

    Args:
        interval: Seconds from one call of `save()` to the next.
        total: Seconds from the call until it is committed.
        mtbf: Mean seconds between failures of the job.

    Raises:
        InvalidInputError: A time is negative or no number, or one of `mtbf` and
            `interval` is 0.

    Example:
        >>> round(lost_seconds(600.0, total=30.0, mtbf=86400.0), 1)
        329.7
    """
    _check(total=total, mtbf=mtbf, interval=interval)
    ratio = interval / mtbf
    if not ratio:
        raise InvalidInputError("the interval is 0 s; expected a longer one")
    if ratio > _HOPELESS:
        return total + mtbf
    # M - C / (exp(C / M) - 1), which loses all digits where C is small beside M.
    since = interval / 2 if ratio < 1e-4 else mtbf - interval / math.expm1(ratio)
    return total + since


def _check(**seconds: float) -> None:
    for name, value in seconds.items():
        if not 0 <= value < math.inf or (name == "mtbf" and not value):
            raise InvalidInputError(
                f"{name} is {value!r} s; expected a time that is finite and "
                + ("above 0" if name == "mtbf" else "not negative")
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What one kind of saves costs at its best interval.

    Attributes:
        kind: `deltas`: as the run saves; `full`: if each save wrote everything, as the
            first one did and others that built on nothing.
        measured: Saves that it goes by.
        blocking_seconds: Median time that a save kept the caller.
        total_seconds: Median time until it was committed.
        save_bytes: Mean of what a save wrote.
        interval_seconds: Best time from one call to the next.
        waits: Whether that is as soon as the last save is done, and no sooner one would
            be better if it could be.
        overhead: Share of the time lost at that interval.
        lost_seconds: Mean training time that a failure makes undone.
        month_saves: Saves in 30 days.
        month_bytes: What they write.
        kept_bytes: What is kept at a time, under the retention; of deltas with the
            states that `keep_bases` keeps.
    """

    kind: str
    measured: int
    blocking_seconds: float
    total_seconds: float
    save_bytes: float
    interval_seconds: float
    waits: bool
    overhead: float
    lost_seconds: float
    month_saves: float
    month_bytes: float
    kept_bytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What follows from the costs of a run.

    Attributes:
        schemes: Deltas, then full saves, as far as such were measured.
        mtbf_seconds: Mean time between failures of the job.
        restore_seconds: From a failure until training goes on.
        restore_from: `measured`, `given`, or `assumed` to take as long as a save.
        keep: Steps that are kept; None: all.
        bases: States that the store keeps besides.
        now_seconds: Median time from one save to the next as the run is now; None for
            fewer than two saves.
        now_overhead: Share of the time lost at that interval; None likewise.
        step_seconds: Median time of a training step, where step names are numbers.
    """

    schemes: Sequence[Scheme]
    mtbf_seconds: float
    restore_seconds: float
    restore_from: str
    keep: int | None
    bases: int
    now_seconds: float | None
    now_overhead: float | None
    step_seconds: float | None


def advise(
    known: Costs,
    *,
    mtbf: float,
    held_bytes: int,
    restart: float = 0.0,
    restore: float | None = None,
    keep: int | None = None,
) -> Advice:
    """How often a run should save, by what its saves and restores have cost.

    Args:
        known: What is known of them.
        mtbf: Mean seconds between failures of the job.
        held_bytes: What steps and kept bases take now (`usage.held_bytes`).
        restart: Seconds from a failure until the restore begins.
        restore: Seconds of a restore; None: as measured, or else as long as the longest
            kind of save.
        keep: Steps that are kept; None: as many as now if steps have gone, else all.

    Raises:
        NotFoundError: No save is known.
        InvalidInputError: A time is negative or no number, `mtbf` is 0, or `keep` is no
            number from 1.

    Example:
        >>> found = advise(costs.read(root), mtbf=86400, held_bytes=0)  # doctest: +SKIP
        >>> found.schemes[0].interval_seconds  # doctest: +SKIP
        142.2
    """
    steps = costs.by_step(known.saves)
    ahead = costs.forecast(known)
    if ahead is None:
        raise NotFoundError(
            f"no save to {known.root.folder.url} is known, so there is nothing to go "
            "by; save a few steps first"
        )
    restore_from = "given"
    if restore is None:
        restore, restore_from = _restore_seconds(known), "measured"
    kinds = {
        # As the run saves: full records come among the deltas, and whole saves of them
        # where states change densely. Only the first save of all is another matter.
        "deltas": steps[1:][-costs.RECENT_SAVES :],
        "full": [step for step in steps if step.is_full][-costs.RECENT_SAVES :],
    }
    if restore is None:
        restore, restore_from = (
            max(map(_total, filter(None, kinds.values()))),
            "assumed",
        )
    if keep is None and ahead.deleting:
        keep = ahead.steps
    if keep is not None and not 1 <= keep <= _MOST_STEPS:
        raise InvalidInputError(
            f"keep is {keep!r:.80} steps; expected 1 to {_MOST_STEPS:,}"
        )
    _check(restart=restart, restore=restore, mtbf=mtbf)
    schemes = [
        _scheme(kind, saves, mtbf, restart + restore, keep, ahead, held_bytes)
        for kind, saves in kinds.items()
        if saves
    ]
    return Advice(
        schemes=schemes,
        mtbf_seconds=mtbf,
        restore_seconds=restart + restore,
        restore_from=restore_from,
        keep=keep,
        bases=len(known.root.bases),
        now_seconds=ahead.seconds_between,
        now_overhead=_now(ahead, schemes[0], mtbf, restart + restore),
        step_seconds=_step_seconds(steps[-costs.RECENT_SAVES :]),
    )


def _restore_seconds(known: Costs) -> float | None:
    """Median of each item, all items in turn; None where no restore is known."""
    by_item: dict[str, list[float]] = {}
    for cost in known.restores:
        by_item.setdefault(cost.item, []).append(cost.total_seconds)
    return sum(map(statistics.median, by_item.values())) if by_item else None


def _total(saves: Sequence[StepCost]) -> float:
    return statistics.median(max(s.total_seconds, s.blocking_seconds) for s in saves)


def _scheme(
    kind: str,
    saves: Sequence[StepCost],
    mtbf: float,
    restore: float,
    keep: int | None,
    ahead: Forecast,
    held_bytes: int,
) -> Scheme:
    blocking = statistics.median(save.blocking_seconds for save in saves)
    total = _total(saves)
    save_bytes = sum(save.written_bytes for save in saves) / len(saves)
    interval = best_interval(blocking=blocking, total=total, mtbf=mtbf)
    month_saves = MONTH_SECONDS / interval
    kept = month_saves if keep is None else float(keep)
    if kind == "full":
        kept_bytes = kept * save_bytes
    else:
        growth = ahead.growth_bytes(month_saves, keep=keep)
        kept_bytes = held_bytes + growth + ahead.copies_bytes
    return Scheme(
        kind=kind,
        measured=len(saves),
        blocking_seconds=blocking,
        total_seconds=total,
        save_bytes=save_bytes,
        interval_seconds=interval,
        waits=interval == total,
        overhead=overhead(
            interval, blocking=blocking, total=total, restore=restore, mtbf=mtbf
        ),
        lost_seconds=lost_seconds(interval, total=total, mtbf=mtbf),
        month_saves=month_saves,
        month_bytes=month_saves * save_bytes,
        kept_bytes=kept_bytes,
    )


def _now(ahead: Forecast, first: Scheme, mtbf: float, restore: float) -> float | None:
    if ahead.seconds_between is None:
        return None
    return overhead(
        max(ahead.seconds_between, first.total_seconds),
        blocking=first.blocking_seconds,
        total=first.total_seconds,
        restore=restore,
        mtbf=mtbf,
    )


def _step_seconds(saves: Sequence[StepCost]) -> float | None:
    numbered = [save for save in saves if save.step.isdecimal()]
    rates = [
        (later.started - earlier.started) / (int(later.step) - int(earlier.step))
        for earlier, later in itertools.pairwise(numbered)
        if int(later.step) > int(earlier.step)
    ]
    return statistics.median(rates) if rates else None
