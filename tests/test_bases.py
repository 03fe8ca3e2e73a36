"""Kept bases: which states the store keeps, that they restore, and when they go."""

import dataclasses
import errno
import json
import logging
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from strategies import STORE, assert_same_tree, open_run, packs_named, packs_on_disk

import orbax_delta
from orbax_delta import bases, check, cli, listing, prune, restore_base, testing
from orbax_delta.bases import Kept
from orbax_delta.errors import CorruptionError, StorageError
from orbax_delta.manifests import encode_manifest
from orbax_delta.store import DeltaStore, Folder

SMALL = {"chunk_bytes": 4096, "full_every": 2, "refresh_every": 3}


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def state(step):
    """A leaf that never changes and one that does."""
    frozen = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    return {"frozen": frozen, "step": step, "w": np.full(3000, step, np.int64) * 7}


def noise(step):
    """A state without anything in common with another step's."""
    return {"w": np.random.default_rng(step).standard_normal(3000)}


def kept_steps(root):
    """Steps whose states the store keeps, oldest first."""
    return [base.place.step for base in listing.read_root(str(root)).bases]


# --- which ones ---------------------------------------------------------------------


def kept(number, packs, item="default"):
    """A state as the plan sees it."""
    return Kept(
        attempt=f"{number:032x}",
        item=item,
        save_index=number,
        wall_time=float(number),
        packs=frozenset(packs),
    )


def play(saves, options):
    """Plan save after save; yields the plan, the saved state and what is then kept."""
    there = {}
    for new in saves:
        plan = bases.plan(there, new, options)
        if plan.take:
            there[new.attempt] = new
        for attempt in plan.release:
            del there[attempt]
        yield plan, new, list(there.values())


@given(
    count=st.integers(1, 4),
    every=st.integers(1, 12),
    lifetimes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_the_newest_and_separate_ones_are_kept(count, every, lifetimes):
    """Whatever changes how often: recent, as many separate ones as there can be, few.

    `lifetimes` are saves after which each of some leaves gets new records.
    """
    options = orbax_delta.DeltaOptions(keep_bases=count, full_every=every)
    saves = [
        kept(n, [f"{i} {n // life}" for i, life in enumerate(lifetimes)])
        for n in range(40 * count + 80)
    ]
    slowest = max(lifetimes)
    for plan, new, there in play(saves, options):
        newest = max(base.save_index for base in there)
        assert new.save_index - newest < every
        assert len(there) <= count + 1
        # A base can be one interval short of the next renewal.
        if new.save_index >= 2 * (count + 1) * (slowest + every):
            assert plan.copies >= count


@given(
    lifetimes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
)
def test_no_more_are_kept_than_asked_for_if_all_are_separate(lifetimes):
    """A state that is renewed faster than bases are taken has no one waiting."""
    options = orbax_delta.DeltaOptions(keep_bases=3, full_every=10)
    saves = [
        kept(n, [f"{i} {n // life}" for i, life in enumerate(lifetimes)])
        for n in range(100)
    ]
    (*_, (plan, _, there)) = play(saves, options)
    assert [base.save_index for base in there] == [70, 80, 90]
    assert plan.copies >= 3


def test_other_items_are_left_alone():
    """Each item has bases of its own."""
    other = kept(5, ["p"], item="other")
    plan = bases.plan(
        {other.attempt: other}, kept(6, ["q"]), orbax_delta.DeltaOptions(keep_bases=1)
    )
    assert plan.take
    assert plan.release == []
    assert plan.copies == 1


def test_after_a_return_to_an_older_step():
    """The count of saves goes back; a base is taken once it is far enough away."""
    there = {base.attempt: base for base in [kept(50, ["old"])]}
    options = orbax_delta.DeltaOptions(keep_bases=1, full_every=10)
    assert not bases.plan(there, kept(45, ["new"]), options).take
    taken = bases.plan(there, kept(40, ["new"]), options)
    assert taken.take
    # By the clock of the saves, not by their count, the older one goes.
    assert len(taken.release) == 1


def test_after_the_clock_was_set_back():
    """A base from the future is no newer than what is saved after it."""
    options = orbax_delta.DeltaOptions(keep_bases=2, full_every=5)
    saves = [
        dataclasses.replace(kept(n, [f"{n}"]), wall_time=n + (100.0 if n < 6 else 0))
        for n in range(30)
    ]
    taken = [new.save_index for plan, new, _ in play(saves, options) if plan.take]
    assert taken == [0, 5, 10, 15, 20, 25]


# --- on disk ------------------------------------------------------------------------


def test_a_base_is_a_copy_of_the_step(root):
    """MANIFEST and parts, byte for byte, under the attempt's name."""
    with open_run(root, **SMALL) as run:
        run.save(0, state(0))
    (folder,) = (root / STORE / "bases").iterdir()
    copied = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(copied) == {"MANIFEST", f"part-{folder.name}-p0"}
    item = root / "0" / "default"
    assert copied == {name: (item / name).read_bytes() for name in copied}


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_states_survive_every_deletion(root, wanted):
    """Only the newest step is left by Orbax, then none: the bases restore."""
    only_one = ocp.CheckpointManagerOptions(max_to_keep=1)
    with open_run(root, manager_options=only_one, **SMALL, keep_bases=wanted) as run:
        for step in range(14):
            run.save(step, noise(step))
        report = run.handler.last_save_report
        assert report.copies_wanted == wanted
        assert report.copies >= wanted
        assert "separate copies" not in report.line()
        run.manager.delete(13)
    steps = kept_steps(root)
    assert len(steps) == wanted
    assert check.verify(str(root)).ok
    for step in steps:
        assert_same_tree(restore_base(root, noise(0), step=step), (step, noise(step)))
    if steps:
        assert restore_base(root)[0] == steps[-1]
    with open_run(root) as run:
        if steps:
            step, tree = orbax_delta.restore_latest_good(run.manager)
            assert_same_tree((step, tree), (steps[-1], noise(steps[-1])))
        else:
            with pytest.raises(orbax_delta.NotFoundError, match="holds no step"):
                orbax_delta.restore_latest_good(run.manager)
    assert packs_on_disk(root) == packs_named(root)


def test_fewer_copies_than_asked_are_said(root):
    """Until what never changes has been written anew, and no longer."""
    said = []
    with open_run(root, **SMALL, keep_bases=2) as run:
        for step in range(12):
            run.save(step, state(step))
            report = run.handler.last_save_report
            text = f"{report.copies} of 2 separate copies so far"
            assert (text in report.line()) == (report.copies < 2)
            said.append(report.copies)
    assert said[0] == 1
    assert said[-1] == 2
    assert orbax_delta.save_report(root / "0").copies == 1


def test_copies_are_separate(root):
    """Bases that count as separate share no pack: losing one file harms one of them."""
    with open_run(root, **SMALL, keep_bases=2) as run:
        for step in range(12):
            run.save(step, state(step))
        copies = run.handler.last_save_report.copies
    assert copies == 2
    last = strategies.read_manifest(root / "11" / "default" / "MANIFEST")
    found = listing.read_root(str(root)).bases
    oldest = found[0].manifest
    assert not set(oldest.packs) & set(last.packs)
    for pack in last.packs:
        (root / STORE / "packs" / pack).unlink()
    step, tree = restore_base(root, step=oldest.step)
    assert_same_tree(tree, state(step))


def test_keep_none_releases_all(root):
    """With `keep_bases=0` what was kept before goes with the next save."""
    with open_run(root, **SMALL) as run:
        for step in range(6):
            run.save(step, noise(step))
    assert kept_steps(root)
    with open_run(root, **SMALL, keep_bases=0) as run:
        run.save(6, noise(6))
    assert kept_steps(root) == []
    assert list((root / STORE / "bases").iterdir()) == []
    assert packs_on_disk(root) == packs_named(root)


def test_several_items(root):
    """Each item keeps its own."""
    registry = orbax_delta.handler_registry(
        item=("params", "opt"), **SMALL, keep_bases=1
    )
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in range(5):
            args = {
                name: ocp.args.StandardSave({"w": noise(step)["w"] + len(name)})
                for name in ("params", "opt")
            }
            manager.save(step, args=ocp.args.Composite(**args))
        manager.wait_until_finished()
    found = listing.read_root(str(root)).bases
    assert sorted(base.place.item for base in found) == ["opt", "params"]
    step, tree = restore_base(root, item="opt")
    assert_same_tree(tree, {"w": noise(step)["w"] + 3})


def test_a_self_contained_checkpoint_has_no_bases(tmp_path):
    """There is no store to keep them in."""
    path = tmp_path / "model"
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        checkpointer.save(path, orbax_delta.DeltaSave(state(0)))
    report = orbax_delta.save_report(path)
    assert report.copies == report.copies_wanted == 1
    assert not list(path.rglob("bases"))


def test_going_on_after_a_restart(root):
    """The next process counts from what the store keeps."""
    for step in range(7):
        with open_run(root, **SMALL, keep_bases=1) as run:
            if step:
                run.restore(step - 1)
            run.save(step, noise(step))
    assert kept_steps(root) == [6]


# --- failures -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["part-", "MANIFEST"])
def test_a_base_that_cannot_be_kept_fails_no_save(root, name, monkeypatch, caplog):
    """The step is committed; the half copy is swept, and the next save tries again."""
    start_write = Folder.start_write

    def refusing(self, key, data):
        if f"/{STORE}/bases/" in self.url and key.startswith(name):
            raise StorageError(f"no space left for {key}")
        return start_write(self, key, data)

    with open_run(root, **SMALL, keep_bases=1) as run:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(Folder, "start_write", refusing)
            run.save(0, noise(0))
        assert "could not keep this step as a base: no space left" in caplog.text
        assert_same_tree(run.restore(0), noise(0))
        run.save(1, noise(1))
        assert kept_steps(root) == [1]
        run.save(2, noise(2))
    store = DeltaStore.open(Folder(str(root)))
    prune.execute(store, prune.plan(store))
    assert len(list((root / STORE / "bases").iterdir())) == 1
    assert check.verify(str(root)).ok


def test_no_base_is_made_of_two_saves(root):
    """Another job has saved the step into the same folder: its MANIFEST is no base."""
    with open_run(root, keep_bases=0) as run:
        run.save(0, state(0))
    mine = strategies.read_step(root, 0).manifest
    attempt = "0f" * 16
    part = dataclasses.replace(mine.parts[0], name=f"part-{attempt}-p0")
    other = dataclasses.replace(mine, attempt=attempt, parts=(part,))
    folder = Folder(str(root / "0" / "default"))
    folder.replace("MANIFEST", encode_manifest(other))
    store = DeltaStore.open(Folder(str(root)))
    with pytest.raises(CorruptionError, match="is that of attempt 0f0f"):
        bases.keep(store, mine, folder)
    assert listing.read_root(str(root)).bases == []


def test_pins_that_cannot_be_deleted_fail_no_close(root, caplog):
    """They go with the process at the latest."""
    stuck = testing.fail(errno.EIO, testing.Match(kind="delete", url="*/pins/*"))
    with testing.faults(stuck), open_run(root) as run:
        run.save(0, state(0))
    assert check.verify(str(root)).ok


def test_a_prune_leaves_a_base_alone_that_is_being_copied(root, monkeypatch):
    """A half copied base of a save whose pin is there is no leftover."""
    plans = []
    start_write = Folder.start_write

    def pruning(self, key, data):
        if f"/{STORE}/bases/" in self.url and key == "MANIFEST":
            store = DeltaStore.open(Folder(str(root)))
            plans.append(prune.plan(store))
            prune.execute(store, plans[-1])
        return start_write(self, key, data)

    monkeypatch.setattr(Folder, "start_write", pruning)
    with open_run(root, **SMALL, keep_bases=1) as run:
        run.save(0, noise(0))
    assert [plan.stale for plan in plans] == [[]]
    assert_same_tree(restore_base(root), (0, noise(0)))


def test_a_damaged_base_stops_no_save(root, caplog):
    """It is said, and left to `verify` and `repair`."""
    with open_run(root, **SMALL, keep_bases=1) as run:
        run.save(0, noise(0))
    (path,) = (root / STORE / "bases").glob("*/MANIFEST")
    path.write_bytes(b"garbled")
    with caplog.at_level(logging.WARNING), open_run(root, **SMALL, keep_bases=1) as run:
        run.save(1, noise(1))
        assert_same_tree(run.restore(1), noise(1))
    assert "a kept base cannot be read" in caplog.text
    report = check.verify(str(root))
    assert [problem.file for problem in report.problems] == [
        str(path.relative_to(root))
    ]


# --- command line -------------------------------------------------------------------


def test_ls_bases(root, capsys):
    """`ls` says which states are kept, `ls --bases` lists them."""
    with open_run(root, **SMALL, keep_bases=2) as run:
        for step in range(6):
            run.save(step, noise(step))
    steps = kept_steps(root)
    assert cli.main(["ls", str(root)]) == 0
    numbers = ", ".join(map(str, steps))
    assert f"the states of steps {numbers}" in capsys.readouterr().out
    assert cli.main(["ls", "--bases", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for step in steps:
        assert any(
            line.startswith(f"{step} ") and f"{STORE}/bases/" in line for line in lines
        )
    assert cli.main(["ls", str(root), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["number"] for entry in document["bases"]] == steps
    folder = document["bases"][-1]["step"]
    assert cli.main(["show", str(root), folder]) == 0
    assert f"{steps[-1]}" in capsys.readouterr().out


def test_a_base_can_be_made_a_step_again(root):
    """Copy its files into a folder of the root: what the README says."""
    with open_run(root, **SMALL, keep_bases=1) as run:
        for step in range(4):
            run.save(step, noise(step))
    (kept_base,) = listing.read_root(str(root)).bases
    for path in root.glob("[0-9]*"):
        shutil.rmtree(path)
    step = kept_base.place.step
    shutil.copytree(root / kept_base.step, root / str(step) / "default")
    with open_run(root, **SMALL, keep_bases=1) as run:
        assert_same_tree(run.restore(step), noise(step))
