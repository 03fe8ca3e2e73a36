"""A crash at every operation of the store: committed steps stay, the rest is garbage.

A script of saves, deletions and prunes is run up to each of its operations, crashes
there, and a new process goes on from what is on disk.
"""

import dataclasses
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
import strategies
from strategies import assert_same_tree, labelled, little_state

import orbax_delta
from orbax_delta import check, prune, testing
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.places import TEMPORARY_SUFFIX
from orbax_delta.store import DeltaStore, Folder

OPTIONS = orbax_delta.DeltaOptions(**strategies.LITTLE_OPTIONS)
NEXT_STEP = 90
CHANGES = ("write", "create", "delete", "clear")


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


# --- the script ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """A run of a training job, with Orbax's part of a save done by hand.

    Attributes:
        root: Folder of the manager.
        committed: Steps whose folders have their final names, with what they hold.
        begun: What the save under way is to hold, by step.
        events: Names of what happened to folders so far.
        last_event: Event at which the process dies; None: at none.
    """

    root: Path
    committed: dict[int, Any]
    begun: dict[int, Any]
    events: list[str]
    last_event: int | None = None

    @classmethod
    def of(cls, root, last_event=None):
        """A job on a new root."""
        root.mkdir()
        return cls(root, {}, {}, [], last_event)

    def run(self):
        """Everything that a store goes through, in little."""
        handler = orbax_delta.DeltaCheckpointHandler(OPTIONS)
        for step, version in enumerate([0, 1, 1, 3]):
            self.save(handler, step, version)
        self.delete(0)
        self.delete(1)
        self.save(handler, 4, 3)
        self.delete(4)
        self.save(handler, 4, 5)
        self.delete(2)
        self.delete(3)
        self.save(handler, 5, 6)
        self.delete(4)
        prune_now(self.root)
        handler.close()

    def save(self, handler, step, version):
        """The handler writes, then the item and the step get their names."""
        self.begun[step] = little_state(version)
        temporary = self.root / f"{step}{TEMPORARY_SUFFIX}"
        item = temporary / f"default{TEMPORARY_SUFFIX}"
        item.mkdir(parents=True)
        handler.save(item, orbax_delta.DeltaSave(self.begun[step]))
        handler.finalize(item)
        self.event("before the item is renamed")
        item.rename(temporary / "default")
        self.event("before the step is renamed")
        temporary.rename(self.root / str(step))
        self.committed[step] = self.begun.pop(step)
        self.event("after the step was renamed")

    def delete(self, step):
        """As Orbax or anybody else deletes a step."""
        self.event("before a deletion")
        del self.committed[step]
        (self.root / str(step) / "default" / MANIFEST_NAME).unlink()
        self.event("in a deletion")
        shutil.rmtree(self.root / str(step))
        self.event("after a deletion")

    def event(self, name):
        """One of the places at which the process can die without the store."""
        self.events.append(name)
        if len(self.events) == self.last_event:
            raise testing.SimulatedCrash(f"event {self.last_event}: {name}")


# --- the life after -----------------------------------------------------------------


def check_life_after(script, *, restores):
    """A new process finds every committed step, goes on, and leaves no garbage.

    Args:
        script: The crashed one.
        restores: Whether the process begins with a restore, as after a preemption.
    """
    root = script.root
    handler = orbax_delta.DeltaCheckpointHandler(OPTIONS)
    check_steps(script, handler if restores else reader())
    prune_now(root)
    check_crashed_saves(script)
    half = {path.name for path in root.glob("[0-9]")} - set(map(str, script.committed))
    if script.committed:
        problems = check.verify(str(root)).problems
        assert half >= {step for problem in problems for step in problem.steps or "?"}
    # As Orbax does when it opens a root, and as whoever was deleting a step does.
    for left in (*root.glob(f"*{TEMPORARY_SUFFIX}"), *map(root.joinpath, half)):
        shutil.rmtree(left)
    after = Script(root, dict(script.committed), {}, [])
    after.save(handler, NEXT_STEP, 8)
    assert len(list((root / strategies.STORE / "pins").glob("*-p0"))) == 1
    handler.close()
    check_steps(after, reader())
    strategies.check_clean(root, after.committed)


def prune_now(root):
    """What `orbax-delta prune` does; the packs of a crashed save's MANIFEST stay."""
    store = DeltaStore.open(Folder(str(root)))
    if store is not None:
        prune.execute(store, prune.plan(store))


def reader():
    """A handler that has seen nothing."""
    return orbax_delta.DeltaCheckpointHandler(OPTIONS)


def check_steps(script, handler):
    """Every committed step restores, bit for bit."""
    for step, tree in sorted(script.committed.items()):
        with labelled(f"step {step}"):
            got = handler.restore(script.root / str(step) / "default")
            assert_same_tree(got, tree)


def check_crashed_saves(script):
    """A save that was not committed is there as a whole or not at all."""
    for left in script.root.glob(f"*{TEMPORARY_SUFFIX}/*"):
        step = int(left.parent.name.removesuffix(TEMPORARY_SUFFIX))
        if (left / MANIFEST_NAME).exists():
            assert_same_tree(reader().restore(left), script.begun[step])
        else:
            with pytest.raises(orbax_delta.NotFoundError, match="holds no MANIFEST"):
                reader().restore(left)


# --- every crash --------------------------------------------------------------------


def operations_of(root):
    """The operations of the whole script, in order."""
    with testing.new_life(), testing.faults() as log:
        Script.of(root).run()
    return log.operations


def crash_points(operations, when):
    """Operations at which a crash leaves something new.

    An operation that only reads changes nothing: a crash there is a crash after the
    change before it; and just before a change is just after the one before. The long
    profile tries them all the same.
    """
    if os.environ.get("HYPOTHESIS_PROFILE") == "long":
        return operations
    return [
        operation
        for before, operation in zip([None, *operations], operations, strict=False)
        if operation.kind in CHANGES
        and not (when == "before" and before and before.kind in CHANGES)
    ]


def crash_and_go_on(root, rules, *, restores, last_event=None):
    """Run the script on a new root until it dies, then check what comes after."""
    script = Script.of(root, last_event)
    with (
        testing.new_life(),
        testing.faults(*rules),
        pytest.raises(testing.SimulatedCrash, match=r"died at operation|event"),
    ):
        script.run()
    with testing.new_life():
        check_life_after(script, restores=restores)
    shutil.rmtree(root)


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_crash_at_every_operation(tmp_path, record_property, when):
    """Whatever the script was doing, the next process goes on as if nothing was."""
    operations = operations_of(tmp_path / "whole")
    tried = crash_points(operations, when)
    for operation in tried:
        with labelled(f"died {when} {operation.number}/{len(operations)} {operation}"):
            rule = testing.crash_at(operation.number, when)
            restores = operation.number % 2 == 0
            crash_and_go_on(tmp_path / "root", [rule], restores=restores)
    record_property("crash_points", len(tried))


def test_the_script_does_everything(tmp_path):
    """Every kind of write and deletion happens in it, and two packs at once."""
    operations = operations_of(tmp_path / "root")
    done = {
        (op.kind, word)
        for op in operations
        for word in ("packs/", "pins/", "condemned/", "bases/", "part-", "MANIFEST")
        if word in op.url
    }
    written = {(op.kind, op.url.rpartition("/")[2]) for op in operations}
    assert done >= {
        *(("write", name) for name in ("packs/", "pins/", "condemned/", "part-")),
        *(("delete", name) for name in ("packs/", "pins/", "condemned/")),
    }
    assert written >= {("write", "MANIFEST"), ("create", "STORE.json")}
    assert any(
        one.kind == two.kind == "write" and "packs/" in one.url and "packs/" in two.url
        for one, two in itertools.pairwise(operations)
    )


def test_crash_with_packs_in_flight(tmp_path, record_property):
    """Of packs begun and not waited for the later one is there, or neither is.

    So nothing may be written that relies on packs which nobody has waited for.
    """
    operations = operations_of(tmp_path / "whole")
    tried = [
        after.number
        for before, after in itertools.pairwise(operations)
        if before.kind == "write"
        and any(word in before.url for word in ("packs/", "tmp/part-", "tmp/MANIFEST"))
    ]
    for number in tried:
        with labelled(f"died before {number}/{len(operations)}, out of order"):
            rules = [testing.crash_at(number), testing.out_of_order()]
            crash_and_go_on(tmp_path / "root", rules, restores=number % 2 == 0)
    record_property("crash_points", len(tried))


def test_crash_at_every_rename_and_deletion_of_a_folder(tmp_path, record_property):
    """What Orbax does to folders can be cut off too."""
    whole = Script.of(tmp_path / "whole")
    whole.run()
    for number, name in enumerate(whole.events, 1):
        with labelled(f"died at event {number}: {name}"):
            crash_and_go_on(
                tmp_path / "root", [], restores=number % 2 == 0, last_event=number
            )
    record_property("crash_points", len(whole.events))


# --- the same with a manager --------------------------------------------------------


def managed_save(root, *rules):
    """A new process restores, saves step 3 in the background, and ends or dies."""
    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    with (
        testing.new_life(),
        strategies.open_run(
            root, manager_options=keep, **strategies.LITTLE_OPTIONS
        ) as run,
    ):
        run.restore(2)
        with testing.faults(*rules) as log:
            try:
                run.save(3, little_state(3))
                run.handler.close()
            except testing.SimulatedCrash:
                # A dead process closes nothing; only Orbax's threads have to end here.
                run.handler.close = lambda: None
    return log


def check_managed_life_after(root):
    """A new manager finds the old steps or the new ones, and saves."""
    cleaning = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with (
        testing.new_life(),
        strategies.open_run(
            root, manager_options=cleaning, **strategies.LITTLE_OPTIONS
        ) as run,
    ):
        steps = run.manager.all_steps()
        assert sorted(steps) in ([0, 1, 2], [0, 1, 2, 3], [1, 2, 3], [2, 3])
        for step in steps:
            assert_same_tree(run.restore(step), little_state(step))
        run.save(4, little_state(4))
        assert_same_tree(run.restore(4), little_state(4))
    strategies.check_clean(root, [*steps, 4])


def test_crash_of_a_manager(tmp_path, record_property):
    """A manager that saves in the background dies at every operation of one save."""
    with (
        testing.new_life(),
        strategies.open_run(tmp_path / "made", **strategies.LITTLE_OPTIONS) as run,
    ):
        for step in range(3):
            run.save(step, little_state(step))
    shutil.copytree(tmp_path / "made", tmp_path / "whole")
    operations = managed_save(tmp_path / "whole").operations
    tried = [
        (operation, when)
        for when in ("before", "after")
        for operation in crash_points(operations, when)
    ]
    for operation, when in tried:
        with labelled(f"died {when} {operation.number}/{len(operations)} {operation}"):
            root = tmp_path / "root"
            shutil.copytree(tmp_path / "made", root)
            log = managed_save(root, testing.crash_at(operation.number, when))
            assert log.crashed
            check_managed_life_after(root)
            shutil.rmtree(root)
    record_property("crash_points", len(tried))
