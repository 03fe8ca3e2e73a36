"""A bucket that fails: requests refused, lost, late, or done and the reply is lost."""

import concurrent.futures
import json
import random
import threading

import buckets
import children
import pytest
from bucket_runs import Run
from strategies import assert_same_tree, little_state
from test_kills import run as run_child

from orbax_delta import check, prune
from orbax_delta.errors import StorageError
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.store import STORE_FILE, DeltaStore, Folder

KINDS = ("GET", "PUT", "CREATE", "HEAD", "LIST", "DELETE")
OUTCOMES = ("slow down", "lost request", "lost reply", "late")
LATE = 5
"""Requests that are answered late, in a run."""


@pytest.fixture
def url(s3):
    """A new folder in the bucket."""
    return buckets.new_url()


@pytest.fixture
def run(url):
    """A run in it."""
    return Run(url)


def once(kind, outcome):
    """Every request of a kind has this outcome when it is sent first."""
    known = set()

    def fault(asked, key):
        new = asked == kind and key not in known
        known.add(key) if asked == kind else None
        late = outcome == "late" and len(known) > LATE
        return outcome if new and not late else "pass"

    return fault


def live(run):
    """A run with all that it does: save, delete, sweep, restart, restore, verify."""
    saver = run.handler()
    for step in range(4):
        run.save(saver, step)
        if step >= 2:
            run.remove(step - 2)
    saver.close()
    again = run.handler()
    assert_same_tree(again.restore(run.item(3)), little_state(3))
    run.save(again, 4)
    again.close()
    assert check.verify(run.url).ok


def assert_clean(run):
    """One store, all steps whole, nothing left of what was tried twice."""
    run.assert_restores([2, 3, 4])
    store = DeltaStore.open(Folder(run.url))
    assert store.pins.names() == store.condemned.names() == []
    assert list(prune.plan(store).dead) == []
    keys = Folder(run.url).find(MANIFEST_NAME, max_depth=2, skip="_delta_store")
    assert keys == [f"{step}/default/{MANIFEST_NAME}" for step in (2, 3, 4)]


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_of_a_kind_fails_once(s3, run, kind, outcome, record_property):
    """Saves and restores go on as if nothing had been."""
    with s3.watched(once(kind, outcome)):
        live(run)
        broken = s3.broken
    assert broken > 0
    assert_clean(run)
    record_property("bucket_faults", broken)


@pytest.mark.parametrize("seed", range(3))
def test_requests_fail_at_random(s3, run, seed, record_property):
    """One in five, in every way; the same request may fail more than once."""
    chance, lock = random.Random(seed), threading.Lock()

    def fault(kind, key):
        with lock:
            return chance.choice(OUTCOMES) if chance.random() < 0.2 else "pass"

    with s3.watched(fault):
        live(run)
        broken = s3.broken
    assert broken > 20
    assert_clean(run)
    record_property("bucket_faults", broken)


@pytest.mark.parametrize("outcome", ["lost reply", "slow down"])
def test_a_store_is_made_once(s3, url, outcome):
    """Who made it and was not told so finds its own; rivals all find the same one."""
    with s3.watched(once("CREATE", outcome)):
        store = DeltaStore.open_or_create(Folder(url))
        assert s3.broken == 1
    assert DeltaStore.open(Folder(url)).uuid == store.uuid
    rivals, barrier = 4, threading.Barrier(4)

    def make(number):
        barrier.wait()
        return DeltaStore.open_or_create(Folder(f"{url}/inner")).uuid

    lost = once("CREATE", outcome)
    with s3.watched(lost), concurrent.futures.ThreadPoolExecutor(rivals) as pool:
        made = {*pool.map(make, range(rivals))}
    assert made == {DeltaStore.open(Folder(f"{url}/inner")).uuid}


def test_a_creation_whose_reply_is_lost_counts(s3, url):
    """It is told as done, a replacement too; what another wrote is not taken for it."""
    folder = Folder(url)
    with s3.watched(once("CREATE", "lost reply")):
        assert folder.create("key", b"mine")
        assert s3.broken == 1
    with s3.watched(once("CREATE", "lost reply")):
        assert folder.create("key", b"new", instead_of=b"mine")
        assert s3.broken == 1
    assert folder.read("key") == b"new"
    assert not folder.create("key", b"new")
    assert not folder.create("key", b"other", instead_of=b"mine")


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("PUT", "/packs/"),
        ("PUT", "/pins/"),
        ("PUT", "/part-"),
        ("PUT", f"/{MANIFEST_NAME}"),
        ("LIST", "/packs/"),
        ("GET", STORE_FILE),
    ],
)
@pytest.mark.parametrize("outcome", ["slow down", "lost request", "lost reply"])
def test_an_outage_costs_one_save(s3, run, kind, part, outcome, record_property):
    """What fails for good is an error that names it; the save after it is right."""
    saver = run.handler()
    run.save(saver, 0)

    def fault(asked, key):
        return outcome if asked == kind and part in f"/{key}" else "pass"

    with (
        s3.watched(fault),
        pytest.raises(StorageError, match=r"could not .*All 6 retry attempts failed"),
    ):
        run.save(saver, 1)
    record_property("bucket_faults", s3.broken)
    assert Folder(f"{run.url}/1").child("default").read(MANIFEST_NAME) is None
    run.assert_restores([0])
    run.save(saver, 2)
    saver.close()
    run.assert_restores([0, 2])
    store = DeltaStore.open(Folder(run.url))
    assert store.pins.names() == []
    assert list(prune.plan(store).dead) == []


@pytest.mark.parametrize("part", ["/packs/", "/part-", f"/{MANIFEST_NAME}"])
def test_an_outage_in_a_restore(s3, run, part):
    """An error of the storage, not damage; nothing else is restored instead."""
    saver = run.handler()
    run.save(saver, 0)
    saver.close()

    def fault(kind, key):
        return "slow down" if kind == "GET" and part in f"/{key}" else "pass"

    with (
        s3.watched(fault),
        pytest.raises(StorageError, match=r"could not read .*All 6 retry attempts"),
    ):
        run.restored(0)
    run.assert_restores([0])


# --- processes that are killed ------------------------------------------------------

FUSES = {"before": 120, "within": 120, "bytes": 60_000, "wall": 300}
"""Kinds of fuses, and the longest of each: some saves."""


@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))],
)
def test_kills_of_clients(s3, run, seed, record_property):
    """Four lives that end anywhere in a save; what they committed restores."""
    chance = random.Random(seed)
    latest = -1
    for number in range(4):
        kind = chance.choice(sorted(FUSES))
        left = chance.randrange(1, FUSES[kind])
        latest = life(run, latest, -9, kind=kind, left=left, saves=100, number=number)
    latest = life(run, latest, 0, kind="none", left=0, saves=3, number="last")
    store = DeltaStore.open(Folder(run.url))
    prune.execute(store, prune.plan(store))
    assert store.pins.names() == store.condemned.names() == []
    assert list(prune.plan(store).dead) == []
    report = check.verify(run.url)
    kept = range(latest - children.KEPT_STEPS + 1, latest + 1)
    # Of an older one, whose deletion was cut off by a kill, verify rightly says so.
    assert not [f for f in report.problems if set(f.steps) & set(map(str, kept))]
    for step in kept:
        assert str(step) in report.whole_steps
        restored = run.restored(step)
        assert children.same_state(restored, step)
    record_property("kills", 4)


def life(run, latest, ending, **settings):
    """One life; returns the newest step that is there after it."""
    number = settings.pop("number")
    words, code, errors = run_child("bucket", run.url, json.dumps(settings))
    where = f"life {number}: {settings}: {words[-1:]} {errors}"
    assert code == ending, where
    assert not any("wrong" in word for word in words), where
    committed = [word["committed"] for word in words if "committed" in word]
    keys = Folder(run.url).find(MANIFEST_NAME, max_depth=2, skip="_delta_store")
    steps = [int(key.partition("/")[0]) for key in keys]
    assert max(steps, default=-1) >= max([latest, *committed]), where
    for step in steps:
        restored = run.restored(step)
        assert children.same_state(restored, step), where
    return max(steps, default=-1)
