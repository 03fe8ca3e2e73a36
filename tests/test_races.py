"""Prunes, saves, deletions, scripts side by side: an error at worst, never a loss."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import children
import numpy as np
import orbax.checkpoint as ocp
import pytest
import second_reader
import strategies
from etils import epath
from strategies import STORE, assert_same_tree, open_run

import orbax_delta
from orbax_delta import owners, prune
from orbax_delta.errors import (
    ConflictError,
    CorruptionError,
    DeltaError,
    NotFoundError,
    StorageError,
)
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.store import DeltaStore, Folder
from orbax_delta.testing import Done, Failed, Match, Rule, faults

TINY = {
    "chunk_bytes": 64,
    "pack_bytes": 1024,
    "full_every": 2,
    "threads": 1,
    "keep_bases": 0,
}
"""Options under which a tiny state still has packs of several saves."""

NEVER = 10_000
ELSEWHERE = owners.Owner(host="elsewhere", pid=1, start="1")
HANGS_AFTER_SECONDS = 60


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def state(step):
    """A state with a frozen, a sparse and a dense part."""
    sparse = np.arange(40.0)
    sparse[: step % 40] += 1
    return {"frozen": np.arange(30.0), "sparse": sparse, "step": step}


def handler_for(**options):
    """A handler, as a job has one."""
    return orbax_delta.DeltaCheckpointHandler(
        orbax_delta.DeltaOptions(**{**TINY, **options})
    )


def put(handler, root, step, tree=None):
    """Save a step without a manager around it."""
    path = epath.Path(root / str(step) / "default")
    handler.save(path, orbax_delta.DeltaSave(state(step) if tree is None else tree))


def get(root, step):
    """Restore a step with a handler that has no memory."""
    path = epath.Path(root / str(step) / "default")
    return orbax_delta.DeltaCheckpointHandler().restore(path)


def prune_now(root, **named):
    """What `orbax-delta prune` does."""
    store = DeltaStore.open(Folder(str(root)))
    return prune.execute(store, prune.plan(store, **named))


def steps_of(root):
    """Steps that a MANIFEST makes."""
    return sorted(
        int(path.parent.parent.name)
        for path in root.glob(f"*/default/{MANIFEST_NAME}")
        if path.parent.parent.name.isdigit()
    )


def assert_intact(root, steps, saved=state, *, missing_ok=frozenset()):
    """Exactly these steps are there; each is what was saved; no pack is missing."""
    assert set(steps_of(root)) - missing_ok == set(steps)
    named = set()
    for step in steps:
        assert_same_tree(get(root, step), saved(step))
        assert second_reader.read_step(root / str(step) / "default")
        named.update(strategies.read_step(root, step).manifest.packs)
    assert named <= strategies.packs_on_disk(root)


# --- interleavings of one save and one prune ----------------------------------------


class Stop:
    """Holds an actor just before its `number`-th operation of the store.

    Attributes:
        number: From 1; beyond its last operation the actor is not held at all.
    """

    def __init__(self, number):
        self.number = number
        self.count = 0
        self.there = threading.Event()
        self.go_on = threading.Event()

    def operation(self):
        """Count one operation; wait at the right one."""
        self.count += 1
        if self.count == self.number:
            self.there.set()
            assert self.go_on.wait(HANGS_AFTER_SECONDS)


class Actors:
    """Two actors in threads of their own that run to given operations in turn.

    The first runs to its stop, then the second to its own, then the first to its end,
    then the second to its end.

    Attributes:
        elsewhere: Actor that is taken to be on another host; None: neither.
    """

    def __init__(self, first, second, helpers):
        self._acts = (first, second)
        self._stops = ()
        self._helpers = helpers  # who has threads of its own
        self.elsewhere = None
        self._who = threading.local()

    def current(self):
        """Number of the actor that calls."""
        return getattr(self._who, "number", self._helpers)

    def run(self, *numbers):
        """One schedule; what each actor raised, or None, and how far each got."""
        self._stops = tuple(map(Stop, numbers))
        rule = Rule(Match(), lambda: self._hold)
        with (
            faults(rule),
            pytest.MonkeyPatch.context() as patch,
            ThreadPoolExecutor(2) as threads,
        ):
            patch.setattr(owners, "this_process", self._owner(owners.this_process))
            futures = []
            for number, stop in enumerate(self._stops):
                future = threads.submit(self._act, number)
                future.add_done_callback(lambda _, stop=stop: stop.there.set())
                futures.append(future)
                assert stop.there.wait(HANGS_AFTER_SECONDS)
            for stop, future in zip(self._stops, futures):
                stop.go_on.set()
                future.exception(HANGS_AFTER_SECONDS)
        return [future.exception() for future in futures]

    @property
    def counts(self):
        """Operations of each actor in the last schedule."""
        return [stop.count for stop in self._stops]

    def _act(self, number):
        self._who.number = number
        self._acts[number]()

    def _owner(self, this_process):
        def owner():
            there = self.current() == self.elsewhere
            return ELSEWHERE if there else this_process()

        return owner

    def _hold(self, call, proceed):
        self._stops[self.current()].operation()
        return proceed(call)


@pytest.fixture
def history(tmp_path):
    """Five steps of which two are gone, and then the one that a job restored."""
    root = tmp_path / "history"
    writer = handler_for(auto_prune=False)
    for step in range(5):
        put(writer, root, step)
    writer.close()
    for step in (0, 2):
        shutil.rmtree(root / str(step))
    return root


class Race:
    """A save of step 5 and a prune on a copy of a history, in one schedule.

    The save builds on step 4, which was deleted after it was restored: unless the
    save's pin holds them, its packs are as dead as those of steps 0 and 2.
    """

    def __init__(self, history, folder, *, break_pins=False):
        self.history, self.root = history, folder / "race"
        self.break_pins = break_pins
        self.handler = None

    def set_up(self):
        """A fresh copy, and a job that restored step 4."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.history, self.root)
        self.handler = handler_for(auto_prune=False)
        self.handler.restore(epath.Path(self.root / "4" / "default"))
        shutil.rmtree(self.root / "4")

    def save(self):
        """What the job does next."""
        put(self.handler, self.root, 5)

    def prune(self):
        """What somebody else does meanwhile."""
        prune_now(self.root, break_pins=self.break_pins)

    def judge(self, raised, schedule):
        """Nothing named is gone; the save is right, or has said that it is not."""
        steps = [1, 3, 5]
        if raised is not None:
            assert self.break_pins, (schedule, raised)
            assert isinstance(raised, ConflictError), (schedule, raised)
            steps = [1, 3]
        assert_intact(self.root, steps)
        # Whatever was left over goes, and the next save of the same job is right.
        put(self.handler, self.root, 6)
        self.handler.close()
        prune_now(self.root, break_pins=True)
        assert_intact(self.root, [*steps, 6])
        assert strategies.packs_on_disk(self.root) == strategies.packs_named(self.root)


def schedules(actors, set_up, stride):
    """Pairs of stops, all of them or every `stride`-th, and how many there are."""
    set_up()
    raised = actors.run(0, 0)
    assert raised == [None, None]
    first, second = actors.counts
    pairs = [(i, j) for i in range(1, first + 2) for j in range(1, second + 2)]
    return pairs[::stride]


ORDERS = ("save first", "prune first")


def race_in_all_orders(race, order, stride):
    """Run the schedules of one order; returns how many, and what the saves raised."""
    saver = ORDERS.index(order)
    acts = [race.save, race.prune] if saver == 0 else [race.prune, race.save]
    actors = Actors(*acts, helpers=saver)
    if race.break_pins:
        actors.elsewhere = saver
    tried, conflicts = schedules(actors, race.set_up, stride), 0
    for schedule in tried:
        race.set_up()
        raised = actors.run(*schedule)
        assert raised[1 - saver] is None, (schedule, raised)
        race.judge(raised[saver], schedule)
        conflicts += raised[saver] is not None
    return len(tried), conflicts


@pytest.mark.parametrize("order", ORDERS)
def test_a_save_and_a_prune(history, tmp_path, order, record_property):
    """At pairs of operations: one goes there, then the other, then both end."""
    tried, _ = race_in_all_orders(Race(history, tmp_path), order, stride=11)
    record_property("races", tried)


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("break_pins", [False, True])
def test_all_of_a_save_and_a_prune(
    history, tmp_path, order, break_pins, record_property
):
    """The same at every pair of operations."""
    race = Race(history, tmp_path, break_pins=break_pins)
    tried, conflicts = race_in_all_orders(race, order, stride=1)
    assert bool(conflicts) == break_pins
    record_property("races", tried)


@pytest.mark.parametrize("order", ORDERS)
def test_a_save_and_a_prune_that_breaks_its_pin(
    history, tmp_path, order, record_property
):
    """A prune with `--break-pins` makes a save of another host fail, no more."""
    race = Race(history, tmp_path, break_pins=True)
    tried, conflicts = race_in_all_orders(race, order, stride=7)
    assert 0 < conflicts < tried
    record_property("races", tried)


# --- a job that was given up for dead and is not ------------------------------------


def reached(point, operations):
    """Whether a job that has begun these operations is at a point.

    A point is the number of an operation, or `part`, `MANIFEST`, `after MANIFEST`.
    """
    if isinstance(point, int):
        return len(operations) == point
    name = point.removeprefix("after ")
    last = operations[-2:-1] if name != point else operations[-1:]
    return any(
        operation.kind == "write"
        and operation.url.rpartition("/")[2].startswith(name)
        and "/bases/" not in operation.url
        for operation in last
    )


class Zombie:
    """An old job held in its save of step 100, and a new one that saves 95 and 100.

    The old job goes on when the new one has come to a given operation of its own save
    of step 100, or when that has ended.
    """

    def __init__(self, root, stop_old, stop_new):
        self.root = root
        self._points = {"old": stop_old, "new": stop_new}
        self._begun = {"old": [], "new": []}
        self._held, self._go_on = threading.Event(), threading.Event()
        self._who = threading.local()
        self.told = {}

    def _named(self, run, name):
        """Let the background work of a handler be known by a name."""
        save = run.handler._run

        def named(request):
            self._who.name = name if request.place.step == 100 else None
            try:
                save(request)
            finally:
                self._who.name = None

        run.handler._run = named

    def _hold(self, call, proceed):
        name = getattr(self._who, "name", None)
        if name is not None:
            self._begun[name].append(call.operation)
            if reached(self._points[name], self._begun[name]):
                if name == "old":
                    self._held.set()
                    assert self._go_on.wait(HANGS_AFTER_SECONDS)
                else:
                    self._release()
        return proceed(call)

    def _release(self):
        """The old job wakes up and ends; it is told how its save went."""
        if "old" not in self.told:
            self._go_on.set()
            self.told["old"] = told(self._old.manager.wait_until_finished)

    def run(self):
        """Both jobs to their ends; returns who was told what of step 100."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(faults(Rule(Match(), lambda: self._hold)))
            self._old = stack.enter_context(self._opened())
            self._named(self._old, "old")
            for step in (80, 90):
                self._old.save(step, state(step))
            self._old.manager.save(100, args=ocp.args.StandardSave(self.tree("old")))
            assert self._held.wait(HANGS_AFTER_SECONDS)
            new = stack.enter_context(self._opened())
            self._named(new, "new")
            assert_same_tree(new.restore(90), state(90))
            new.save(95, state(95))
            self.told["new"] = told(self._save, new)
            self._release()
        return self.told

    @contextlib.contextmanager
    def _opened(self):
        """A job; whose error it is told of once more as it ends does not matter."""
        context = open_run(self.root, **TINY)
        yield context.__enter__()
        told(context.__exit__, None, None, None)

    def _save(self, new):
        new.manager.save(100, args=ocp.args.StandardSave(self.tree("new")))
        new.manager.wait_until_finished()

    @staticmethod
    def tree(name):
        """What a job saves as step 100."""
        return {**state(100), "who": name}


def told(call, *arguments):
    """What a job is told: None if all went well, or the error."""
    try:
        call(*arguments)
    except (DeltaError, OSError, ValueError) as error:
        return error
    return None


def zombies(root, pairs):
    """Races of an old and a new job; returns who came through how often."""
    winners = []
    for stop_old, stop_new in pairs:
        zombie = Zombie(root / f"{stop_old}-{stop_new}", stop_old, stop_new)
        outcome = zombie.run()
        case = (stop_old, stop_new, outcome)
        for step in (80, 90, 95):
            assert_same_tree(get(zombie.root, step), state(step))
        happy = [name for name, error in outcome.items() if error is None]
        # Both would mean that one of them was told of a step that is not its own.
        assert len(happy) <= 1, case
        if happy:
            assert_same_tree(get(zombie.root, 100), zombie.tree(happy[0]))
        winners += happy
        prune_now(zombie.root)
        assert_intact(zombie.root, [80, 90, 95], missing_ok={100})
    return winners


def test_a_zombie_beside_its_successor(root, record_property):
    """Two jobs save one step: it is that of a job that was told so, and whole."""
    points = (2, "part", "MANIFEST", "after MANIFEST")
    pairs = [(old, new) for old in points for new in (*points, NEVER)]
    winners = zombies(root, pairs)
    assert set(winners) == {"old", "new"}
    record_property("races", len(pairs))


@pytest.mark.long
def test_all_of_a_zombie_beside_its_successor(root, record_property):
    """The same at every pair of operations."""
    pairs = [(old, new) for old in range(1, 13) for new in (*range(1, 15), NEVER)]
    zombies(root, pairs)
    record_property("races", len(pairs))


# --- prunes and deletions beside saves ----------------------------------------------


@contextlib.contextmanager
def pruner(root, said):
    """Another process that prunes without end; it is killed in whatever it does."""
    command = [sys.executable, children.__file__, "prune", str(root)]
    with (
        said.open("w") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_prunes_of_another_process(root, tmp_path, record_property):
    """Another process prunes without end while steps come and go."""
    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    said, step = tmp_path / "said", 0
    with (
        pruner(root, said) as process,
        open_run(root, manager_options=keep, **TINY) as run,
    ):
        # As many saves as it takes for it to get started, and then some.
        while step < 40 or said.read_text().count("\n") < 20:
            assert process.poll() is None
            assert step < 2000
            run.manager.save(step, args=ocp.args.StandardSave(state(step)))
            if step % 10 == 0:
                run.manager.wait_until_finished()
                assert_same_tree(run.restore(step), state(step))
            step += 1
    lines = said.read_text().splitlines()
    assert not [line for line in lines if "error" in line]
    prune_now(root)
    assert_intact(root, [step - 2, step - 1])
    assert strategies.packs_on_disk(root) == strategies.packs_named(root)
    record_property("races", len(lines))


@pytest.mark.parametrize("half", [False, True])
def test_a_deletion_that_outlasts_the_next_saves(root, monkeypatch, half):
    """Orbax deletes in the background, slowly; the saves meanwhile are right."""
    may_delete, begun = threading.Event(), threading.Event()
    rmtree = shutil.rmtree

    def slow(path, *arguments, **named):
        if os.path.basename(path).isdigit() and not begun.is_set():
            begun.set()
            if half:
                (epath.Path(path) / "default" / MANIFEST_NAME).unlink()
            assert may_delete.wait(HANGS_AFTER_SECONDS)
        rmtree(path, *arguments, **named)

    monkeypatch.setattr(shutil, "rmtree", slow)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_background_delete=True)
    with open_run(root, manager_options=options, **TINY) as run:
        for step in range(6):
            run.save(step, state(step))
        assert begun.wait(HANGS_AFTER_SECONDS)
        assert (root / "0").exists()
        for step in (4, 5):
            assert_same_tree(run.restore(step), state(step))
        may_delete.set()
    prune_now(root)
    assert_intact(root, [4, 5])


# --- two managers on one root -------------------------------------------------------


@contextlib.contextmanager
def item_manager(root, item):
    """A manager of a job that saves one item."""
    registry = orbax_delta.handler_registry(item=item, **TINY)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        yield manager


def item_args(item, step):
    """What it saves."""
    tree = {**state(step), "item": item}
    return ocp.args.Composite(**{item: ocp.args.StandardSave(tree)})


ITEMS = pytest.mark.parametrize("items", ["aa", "ab"], ids=["one item", "two items"])


@ITEMS
def test_two_managers_in_turn(root, items, record_property):
    """Two jobs save and delete in one root, one after the other; all is right."""
    with item_manager(root, items[0]) as first, item_manager(root, items[1]) as second:
        managers = first, second
        for step in range(16):
            manager = managers[step % 2]
            manager.save(step, args=item_args(items[step % 2], step), force=True)
            manager.wait_until_finished()
            if step in (10, 11):
                manager.delete(step - 10)
    prune_now(root)
    for step in range(2, 16):
        item = items[step % 2]
        path = epath.Path(root / str(step) / item)
        tree = orbax_delta.DeltaCheckpointHandler().restore(path)
        assert_same_tree(tree, {**state(step), "item": item})
    assert sorted(path.name for path in root.glob("[0-9]*")) == sorted(
        map(str, range(2, 16))
    )
    assert strategies.packs_on_disk(root) == strategies.packs_named(root)
    record_property("races", 16)


@ITEMS
def test_two_jobs_at_once(root, items, record_property):
    """Two processes save and delete in one root at once; all is right."""
    root.mkdir()
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, children.__file__, "job", root, item, str(number)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for number, item in enumerate(items)
        ]
        for job in jobs:
            stack.callback(job.kill)
            assert job.stdout.readline() == '{"ready": true}\n'
        for job in jobs:
            job.stdin.write("go\n")
            job.stdin.flush()
        for job in jobs:
            assert job.stdout.read() == '{"closed": true}\n'
            assert job.wait(HANGS_AFTER_SECONDS) == 0
    prune_now(root)
    kept = {n for n in range(40) if n % 10 not in (0, 1)}
    assert {int(path.name) for path in root.glob("[0-9]*")} == kept
    for step in kept:
        path = epath.Path(root / str(step) / items[step % 2])
        tree = orbax_delta.DeltaCheckpointHandler().restore(path)
        assert_same_tree(tree, children.state(step))
    assert strategies.packs_on_disk(root) == strategies.packs_named(root)
    record_property("races", 40)


# --- what a failed save may still do ------------------------------------------------


class Straggler:
    """Fails the `number`-th write of a save, and lands it later all the same."""

    def __init__(self, number):
        self.late = None
        self.rule = Rule(
            Match(kind="write", first=number, times=1), lambda: self._hold_back
        )

    def _hold_back(self, call, proceed):
        folder, key = call.folder, call.operation.url.removeprefix(call.folder.url)
        self.late = (folder, key, call.data)
        return Failed(call.operation.error("timed out"))

    def land_after(self, call, proceed):
        """Do something else, then let the write arrive."""
        proceed(call).result()
        self.land()
        return Done()

    def land(self):
        """The write arrives."""
        folder, key, data = self.late
        folder.write(key, data)


@pytest.mark.parametrize("when", ["before the next save", "in it", "after it"])
@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_a_write_that_lands_after_its_save_has_failed(
    root, when, again, record_property
):
    """Whichever write it is, and whenever it lands: no step is harmed."""
    number, raised, conflicts = 0, True, 0
    while raised:
        number += 1
        folder = root / str(number)
        straggler = Straggler(number)
        with open_run(folder, **TINY) as run:
            for step in (1, 2):
                run.save(step, state(step))
            with faults(straggler.rule):
                raised = told(run.save, 3, {**state(3), "failed": 1}) is not None
                if not raised:
                    continue  # what tidies up may fail, or there are no more writes
            run.manager.reload()
            if when == "before the next save":
                straggler.land()
            step = 3 if again else 4
            in_it = Rule(
                Match(kind="write", url="*/MANIFEST", first=1, times=1),
                lambda straggler=straggler: straggler.land_after,
            )
            with faults(*([in_it] if when == "in it" else [])):
                error = told(run.save, step, state(step))
            if when == "after it":
                straggler.land()
            run.manager.reload()
            kept = [1, 2, 5]
            if error is None:
                kept.append(step)
            else:
                # Its MANIFEST landed over that of the new save: not its step.
                assert isinstance(error, ConflictError), (number, error)
                conflicts += 1
            run.save(5, state(5))
        assert_intact(folder, kept)
        shutil.rmtree(folder / "3.orbax-checkpoint-tmp", ignore_errors=True)
        prune_now(folder)
        assert_intact(folder, kept)
        assert strategies.packs_on_disk(folder) == strategies.packs_named(folder)
    assert number > 4
    assert conflicts == (again and when == "in it")
    record_property("races", number - 1)


def test_the_same_step_after_a_failure(root):
    """A failed save, `reload()`, and the same number with another state."""
    failures = 0
    for number in range(1, 9):
        straggler = Straggler(number)
        with open_run(root, **TINY) as run:
            with faults(straggler.rule):
                error = told(run.save, number, {"other": np.arange(50.0)})
            if error is None:
                # It was one of the writes that only tidy up; the step is there.
                run.manager.delete(number)
            else:
                assert isinstance(error, StorageError), error
                failures += 1
            run.manager.reload()
            assert number not in run.manager.all_steps()
            run.save(number, state(number), force=True)
            assert_same_tree(run.restore(number), state(number))
    assert failures >= 4
    assert_intact(root, range(1, 9))


# --- scripts that delete files ------------------------------------------------------


@pytest.fixture
def old_root(root):
    """A root whose steps 0 to 3 and their packs are old, and 4 and 5 are new."""
    with open_run(root, **TINY) as run:
        for step in range(6):
            run.save(step, state(step))
            if step == 3:
                for path in root.rglob("*"):
                    os.utime(path, (0, 0))
    return root


def delete_old_files(root, *, spare=None):
    """`find ROOT -type f -mtime +1 -delete`, with or without a folder to spare."""
    spared = ["-path", str(root / spare), "-prune", "-o"] if spare else []
    command = ["find", str(root), *spared, "-type", "f", "-mtime", "+1"]
    subprocess.run([*command, "-exec", "rm", "{}", "+"], check=True)


def restored_or_error(root, step):
    """What a step restores to: its state, or an error of this package."""
    error = told(lambda: assert_same_tree(get(root, step), state(step)))
    assert error is None or isinstance(error, DeltaError), error
    return error


def test_an_age_rule_that_spares_the_store(old_root):
    """Old steps are gone with an error; new ones, and the packs they need, stay."""
    delete_old_files(old_root, spare=STORE)
    for step in range(4):
        assert isinstance(restored_or_error(old_root, step), NotFoundError)
    assert_intact(old_root, [4, 5])
    with open_run(old_root, **TINY) as run:
        assert_same_tree(run.restore(5), state(5))
        run.save(6, state(6))
    assert_intact(old_root, [4, 5, 6])


def test_an_age_rule_that_does_not_spare_the_store(old_root):
    """Steps that lost packs raise; never a wrong value, and the next save is whole."""
    with open_run(old_root, **TINY) as running:
        assert_same_tree(running.restore(5), state(5))
        delete_old_files(old_root)
        # The fixed files are rewritten by every save, so the store keeps its name.
        assert (old_root / STORE / "STORE.json").exists()
        errors = [restored_or_error(old_root, step) for step in range(6)]
        assert all(errors[:4])
        assert isinstance(errors[5], CorruptionError)
        assert "packs/" in str(errors[5])
        # The job itself goes on, in full where its base is gone.
        running.save(6, state(6))
        assert_same_tree(running.restore(6), state(6))
    with open_run(old_root, **TINY) as fresh:
        fresh.save(7, state(7))
    for step in (6, 7):
        assert restored_or_error(old_root, step) is None


KEEP_FIVE = {
    "newest by time": "ls -dt */ | tail -n +6",
    "last by name": "ls -d */ | LC_ALL=C sort | head -n -5",
    "last by number": "ls -d */ | LC_ALL=C sort -n | head -n -5",
    "digits only": "ls -d [0-9]*/ | sort -n | head -n -5",
}
"""Ways to list what is not among the newest five folders."""


def sees(root, script):
    """Folders that a script would delete."""
    listed = subprocess.run(
        ["sh", "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    return [name.rstrip("/") for name in listed.stdout.split()]


def ten_steps(root):
    """Ten steps, with times in their order, as after ten saves of a real run."""
    with open_run(root, **TINY) as run:
        for step in range(10):
            run.save(step, state(step))
            os.utime(root / str(step), (step, step))
    # The fixed files were rewritten after the last step's MANIFEST.
    os.utime(root / STORE, (9, 9))


@pytest.mark.parametrize("script", KEEP_FIVE)
def test_scripts_that_keep_five_folders(root, script):
    """Most scripts count the store as one of the five; one way deletes it first."""
    ten_steps(root)
    doomed = sees(root, KEEP_FIVE[script])
    for name in doomed:
        shutil.rmtree(root / name)
    steps = steps_of(root)
    if script == "last by number":
        assert STORE in doomed
        for step in steps:
            error = restored_or_error(root, step)
            assert isinstance(error, NotFoundError)
            assert "needs store" in str(error)
    else:
        assert STORE not in doomed
        assert steps == ([5, 6, 7, 8, 9] if script == "digits only" else [6, 7, 8, 9])
        assert_intact(root, steps)
    # Whatever the script did, the run goes on.
    with open_run(root, **TINY) as run:
        run.save(10, state(10))
        assert_same_tree(run.restore(10), state(10))


def test_the_store_is_as_new_as_the_newest_step(root):
    """Each save touches the store's folder after it has made the step's."""
    with open_run(root, **TINY) as run:
        for step in range(3):
            run.save(step, state(step))
            newest = (root / str(step) / "default" / MANIFEST_NAME).stat().st_mtime_ns
            assert (root / STORE).stat().st_mtime_ns >= newest


def test_a_store_deleted_under_a_running_job(root):
    """Its steps are lost with an error; its next save makes a new store, in full."""
    with open_run(root, **TINY) as run:
        for step in range(3):
            run.save(step, state(step))
        shutil.rmtree(root / STORE)
        for step in range(3):
            assert isinstance(restored_or_error(root, step), NotFoundError)
        run.save(3, state(3))
        run.save(4, state(4))
        for step in (3, 4):
            assert_same_tree(run.restore(step), state(step))
        for step in range(3):
            assert isinstance(restored_or_error(root, step), NotFoundError)
