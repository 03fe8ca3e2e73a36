"""The checkpoint interval: formulas against a simulation, and what a run is told."""

import dataclasses
import math

import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from strategies import open_run

from orbax_delta import advice, costs, errors, listing, usage

# Seconds: interval, blocking, total, restore, mean time between failures.
CASES = {
    "rare failures": (600, 2, 30, 120, 20_000),
    "frequent failures": (100, 5, 60, 30, 500),
    "synchronous": (50, 10, 10, 20, 300),
    "as often as it can": (50, 10, 50, 20, 300),
    "nothing blocks": (30, 0, 30, 5, 60),
    "restores that fail too": (200, 20, 150, 100, 400),
}


def simulate(random, case, commits):
    """Event by event: share of the time that was lost, and training undone by failures.

    Knows nothing of the formulas. A failure counts as undoing something if the save
    before it had gone as usual.
    """
    interval, blocking, total, restore, mtbf = case
    now = work = safe = 0.0
    committed = 0
    fails = random.exponential(mtbf)
    save = None  # when it is committed, what it captured
    phase, ends = "train", interval - blocking
    undone, steady, called = [], False, 0.0
    while committed < commits:
        event = min(ends, fails, save[0] if save else math.inf)
        work += event - now if phase == "train" else 0.0
        now = event
        if now == fails:
            if steady:
                undone.append(now - called)
            while (gap := random.exponential(mtbf)) < restore:
                now += gap
            now += restore
            fails = now - restore + gap
            work, save, steady = safe, None, False
            phase, ends = "train", now + interval - blocking
        elif save and now == save[0]:
            safe, save, committed = save[1], None, committed + 1
            steady, called = True, now - total
            ends = now if phase == "wait" else ends
        elif phase == "block":
            phase, ends = "train", now + interval - blocking
        elif save:
            phase, ends = "wait", math.inf
        else:
            save, phase, ends = (now + total, work), "block", now + blocking
    return 1 - safe / now, undone


@pytest.mark.parametrize("name", CASES)
def test_the_formulas_agree_with_a_simulation(name):
    """Overhead and lost work, within four standard errors of many simulated runs."""
    interval, blocking, total, restore, mtbf = case = CASES[name]
    random = np.random.default_rng(list(CASES).index(name))
    runs = [simulate(random, case, 400) for _ in range(60)]
    found = np.array([lost for lost, _ in runs])
    error = found.std(ddof=1) / math.sqrt(len(runs))
    # The first commit of a run takes longer; that is within the error.
    expected = advice.overhead(
        interval, blocking=blocking, total=total, restore=restore, mtbf=mtbf
    )
    assert abs(found.mean() - expected) < 4 * error
    assert error < 0.05 * expected
    undone = np.array([seconds for _, times in runs for seconds in times])
    error = undone.std(ddof=1) / math.sqrt(undone.size)
    expected = advice.lost_seconds(interval, total=total, mtbf=mtbf)
    assert abs(undone.mean() - expected) < 4 * error
    assert error < 0.05 * expected


@pytest.mark.parametrize("blocking", [1e-3, 0.5, 20, 300])
@pytest.mark.parametrize("total", [1, 30, 4000])
@pytest.mark.parametrize("mtbf", [60, 3600, 1e6])
def test_no_other_interval_is_better(blocking, total, mtbf):
    """The optimum against a scan, wherever saves do not wait for each other."""
    total = max(total, blocking)
    best = advice.best_interval(blocking=blocking, total=total, mtbf=mtbf)

    def lost(interval):
        return advice.overhead(
            interval, blocking=blocking, total=total, restore=10, mtbf=mtbf
        )

    others = [total * 1.02**i for i in range(800) if total * 1.02**i < 50 * best]
    assert min(map(lost, others)) >= lost(best) - 1e-12
    assert best >= total


def test_formulas_of_the_papers():
    """Young's root, Daly's higher-order estimate and his complete model."""
    blocking, mtbf = 5.0, 86_400.0
    best = advice.best_interval(blocking=blocking, total=blocking, mtbf=mtbf)
    young = math.sqrt(2 * blocking * mtbf)
    ratio = blocking / (2 * mtbf)
    daly = young * (1 + math.sqrt(ratio) / 3 + ratio / 9)
    assert best == pytest.approx(young, rel=0.01)
    assert best == pytest.approx(daly, rel=1e-5)
    tau, restore = 600.0, 120.0
    whole = mtbf * math.exp(restore / mtbf) * math.expm1((tau + blocking) / mtbf)
    assert advice.overhead(
        tau + blocking, blocking=blocking, total=blocking, restore=restore, mtbf=mtbf
    ) == pytest.approx(1 - tau / whole, rel=1e-9)
    first_order = (tau + blocking) / 2 + 30
    assert advice.lost_seconds(tau + blocking, total=30.0, mtbf=mtbf) == pytest.approx(
        first_order, rel=0.01
    )


def test_ends_of_the_scale():
    """Nothing blocks, failures come all the time, or hardly ever."""
    assert advice.best_interval(blocking=0, total=7, mtbf=1e5) == 7
    assert advice.best_interval(blocking=1e5, total=1, mtbf=1) > 1e5
    nothing = {"blocking": 0, "total": 0, "restore": 0, "mtbf": 1}
    assert advice.overhead(0, **nothing) == 0
    assert advice.overhead(10_000, **nothing) == 1.0
    assert advice.lost_seconds(10_000, total=1, mtbf=1) == 2
    assert advice.lost_seconds(1e-9, total=0, mtbf=1e9) == pytest.approx(5e-10)
    exact, near = (advice.lost_seconds(x, total=0, mtbf=1) for x in (1.01e-4, 0.99e-4))
    assert exact / near == pytest.approx(1.01 / 0.99, rel=1e-4)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: advice.best_interval(blocking=-1, total=1, mtbf=1),
            "blocking is -1 s",
        ),
        (
            lambda: advice.best_interval(blocking=1, total=1, mtbf=0),
            "mtbf is 0 s.*above",
        ),
        (lambda: advice.lost_seconds(0, total=1, mtbf=1), "the interval is 0 s"),
        (
            lambda: advice.overhead(3, blocking=1, total=4, restore=0, mtbf=9),
            "an interval of 3 s is shorter than a save, of 4 s",
        ),
        (
            lambda: advice.overhead(math.nan, blocking=1, total=4, restore=0, mtbf=9),
            "interval is nan s",
        ),
    ],
)
def test_times_that_are_none(call, match):
    """Refused by name."""
    with pytest.raises(errors.InvalidInputError, match=match):
        call()


# --- of a run -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A root with a full save, deltas and two restores."""
    root = tmp_path_factory.mktemp("advice") / "run"
    state = {"w": np.random.default_rng(0).standard_normal(50_000)}
    with pytest.MonkeyPatch.context() as patch:
        strategies.skip_disk_sync(patch)
        for life in range(3):
            with open_run(root) as run:
                if life:
                    run.restore(2 * life - 1)
                for step in (2 * life, 2 * life + 1):
                    state["w"][step] += 1
                    run.save(step, state)
    return root


def timed(known):
    """The same costs, with times that make round figures."""
    saves = [
        dataclasses.replace(
            save,
            started=1e9 + 100.0 * int(save.step),
            blocking_seconds=8.0 if save.is_full else 2.0,
            total_seconds=40.0 if save.is_full else 10.0,
        )
        for save in known.saves
    ]
    restores = [
        dataclasses.replace(restore, total_seconds=20.0 + 2 * number)
        for number, restore in enumerate(known.restores)
    ]
    return dataclasses.replace(known, saves=saves, restores=restores)


def test_what_a_run_is_told(run_folder):
    """From its own saves and restores: deltas, full saves, and how it does now."""
    known = timed(costs.read(str(run_folder)))
    held = usage.held_bytes(known.root)
    found = advice.advise(known, mtbf=3600.0, held_bytes=held, restart=9.0)
    deltas, full = found.schemes
    assert (deltas.kind, deltas.measured, full.kind, full.measured) == (
        *("deltas", 5, "full", 1),
    )
    assert (deltas.blocking_seconds, deltas.total_seconds) == (2.0, 10.0)
    assert (full.blocking_seconds, full.total_seconds) == (8.0, 40.0)
    assert (found.restore_seconds, found.restore_from) == (30.0, "measured")
    assert found.keep is None
    assert (found.now_seconds, found.step_seconds) == (100.0, 100.0)
    for scheme in found.schemes:
        assert scheme.interval_seconds == advice.best_interval(
            blocking=scheme.blocking_seconds, total=scheme.total_seconds, mtbf=3600.0
        )
        assert not scheme.waits
        assert scheme.month_saves * scheme.interval_seconds == advice.MONTH_SECONDS
        assert scheme.month_bytes == scheme.month_saves * scheme.save_bytes
    assert found.now_overhead == advice.overhead(
        100.0, blocking=2.0, total=10.0, restore=30.0, mtbf=3600.0
    )
    assert deltas.overhead < min(full.overhead, found.now_overhead)
    assert deltas.save_bytes < full.save_bytes / 20
    # Nothing is deleted: a month of saves is kept.
    assert full.kept_bytes == full.month_bytes
    forecast = costs.forecast(known)
    growth = deltas.month_saves * forecast.bytes_per_save
    assert deltas.kept_bytes == held + growth + forecast.copies_bytes


def test_retention(run_folder):
    """What is kept at a time with so many steps."""
    known = timed(costs.read(str(run_folder)))
    found = advice.advise(known, mtbf=3600.0, held_bytes=1000, keep=8)
    deltas, full = found.schemes
    assert full.kept_bytes == 8 * full.save_bytes
    forecast = costs.forecast(known)
    copies = forecast.copies_bytes
    # One base so far, of two.
    assert copies == full.save_bytes
    assert deltas.kept_bytes == 1000 + 2 * forecast.bytes_per_save + copies
    fewer = advice.advise(known, mtbf=3600.0, held_bytes=1000, keep=3)
    assert fewer.schemes[0].kept_bytes == 1000 + copies


def test_without_restores(run_folder):
    """As long as the slowest kind of save, unless it is given."""
    known = timed(costs.read(str(run_folder)))
    known = dataclasses.replace(known, restores=[])
    found = advice.advise(known, mtbf=3600.0, held_bytes=0)
    assert (found.restore_seconds, found.restore_from) == (40.0, "assumed")
    found = advice.advise(known, mtbf=3600.0, held_bytes=0, restore=3.0)
    assert (found.restore_seconds, found.restore_from) == (3.0, "given")


def test_of_one_save(run_folder):
    """There is one scheme, and no interval yet."""
    known = timed(costs.read(str(run_folder)))
    known = dataclasses.replace(known, saves=known.saves[:1])
    found = advice.advise(known, mtbf=3600.0, held_bytes=0)
    assert [scheme.kind for scheme in found.schemes] == ["full"]
    assert (found.now_seconds, found.now_overhead) == (None, None)
    assert found.step_seconds is None


def test_full_saves_among_deltas(run_folder):
    """Of a dense state many saves are full: they count for both schemes."""
    known = timed(costs.read(str(run_folder)))
    saves = [
        dataclasses.replace(save, chunks_by_form={"planes": 1}, written_bytes=1000)
        if save.step in ("2", "4")
        else dataclasses.replace(save, written_bytes=100)
        for save in known.saves
    ]
    known = dataclasses.replace(known, saves=saves)
    deltas, full = advice.advise(known, mtbf=3600.0, held_bytes=0).schemes
    assert (deltas.measured, deltas.save_bytes) == (5, 460)
    assert (full.measured, full.save_bytes) == (3, 700)


def test_saves_that_wait(run_folder):
    """Where blocking is short and a save is long, the interval is the save."""
    known = timed(costs.read(str(run_folder)))
    saves = [
        dataclasses.replace(save, blocking_seconds=1e-3, total_seconds=500.0)
        for save in known.saves
    ]
    known = dataclasses.replace(known, saves=saves)
    found = advice.advise(known, mtbf=3600.0, held_bytes=0)
    assert [scheme.waits for scheme in found.schemes] == [True, True]
    assert found.schemes[0].interval_seconds == 500.0
    # It saves every 100 s by the clock, which cannot be: by the time a save takes.
    assert found.now_overhead == found.schemes[0].overhead


def test_of_nothing(run_folder):
    """Without a save there is nothing to go by."""
    known = dataclasses.replace(costs.read(str(run_folder)), saves=[])
    with pytest.raises(errors.NotFoundError, match=r"no save to .* is known"):
        advice.advise(known, mtbf=3600.0, held_bytes=0)


# --- forecasts ------------------------------------------------------------------------


@pytest.mark.parametrize("keep_bases", [0, 2])
def test_a_forecast_comes_true(root, monkeypatch, keep_bases):
    """Of a run with a retention: what the store takes 100 saves later."""
    strategies.skip_disk_sync(monkeypatch)
    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal(20_000), "frozen": rng.standard_normal(20_000)}
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    settings = {"keep_bases": keep_bases, "refresh_every": 20}
    with open_run(root, manager_options=options, **settings) as run:
        for step in range(124):
            state["w"] = state["w"].copy()
            state["w"][rng.integers(0, 20_000, 100)] += 1
            run.save(step, state)
            if step == 2:
                early = costs.forecast(costs.read(str(root)))
            if step == 23:
                known = costs.read(str(root))
                found = costs.forecast(known)
                now_bytes = usage.held_bytes(known.root)
    assert not early.deleting
    assert early.growth_bytes(40) == 40 * early.bytes_per_save
    assert early.growth_bytes(40, keep=5) == 2 * early.bytes_per_save
    assert early.bytes_per_day == early.bytes_per_save * 86400 / early.seconds_between
    assert (early.copies_bytes > 0) == (keep_bases > 0)
    assert found.deleting
    assert found.growth_bytes(100) == 0
    later_bytes = usage.held_bytes(listing.read_root(str(root)))
    expected = now_bytes + found.copies_bytes
    assert 0.6 < later_bytes / expected < 1.6


def test_of_one_save_no_pace_is_known(run_folder):
    """A day's bytes need two saves."""
    known = costs.read(str(run_folder))
    found = costs.forecast(dataclasses.replace(known, saves=known.saves[:1]))
    assert (found.seconds_between, found.bytes_per_day) == (None, None)
