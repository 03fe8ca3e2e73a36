"""Archives: what is copied, what is left, what is refused, how readers get there."""

import doctest
import json
import logging
import os
import shutil
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import roots
import second_reader
import strategies
from etils import epath
from orbax.checkpoint import v1
from strategies import STORE, assert_same_tree, open_run, packs_named, packs_on_disk

import orbax_delta
from orbax_delta import (
    archivechoices,
    archiveplans,
    archives,
    check,
    jsontext,
    marks,
    owners,
    prune,
    repair,
    terminal,
)
from orbax_delta.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
)
from orbax_delta.store import DeltaStore, Folder
from orbax_delta.storefiles import Archived, archived_document, parse_archived

OLD = (2, 3)


@pytest.fixture
def cold(tmp_path):
    """Where the archive is to be."""
    return tmp_path / "cold"


def assert_restores(root, steps=roots.STEPS):
    """A manager lists these steps and restores each bit for bit."""
    with open_run(root) as run:
        assert set(run.manager.all_steps()) == set(steps)
        for step in steps:
            assert_same_tree(run.restore(step, roots.state(step)), roots.state(step))


def outcomes(report):
    """What became of each step."""
    return {int(step.step): (step.outcome, step.moved) for step in report.steps}


def prune_now(root):
    """What `orbax-delta prune` does."""
    store = DeltaStore.open(Folder(str(root)))
    return prune.execute(store, prune.plan(store))


# --- copying --------------------------------------------------------------------------


def test_an_archive_is_a_root(run, cold, command):
    """A manager opens it, commands work on it, and the root is as it was."""
    before = strategies.listing(run)
    seen = []
    report = orbax_delta.archive(
        run, cold, steps=OLD, progress=lambda *told: seen.append(told)
    )
    assert outcomes(report) == {2: ("copied", False), 3: ("copied", False)}
    assert seen[-1] == ("packs", len(seen), len(seen))
    after = strategies.listing(run)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() <= {f"{STORE}/pins"}
    assert_restores(cold, OLD)
    assert packs_on_disk(cold) == packs_named(cold) < packs_on_disk(run)
    for pack in packs_on_disk(cold):
        name = f"{STORE}/packs/{pack}"
        assert (cold / name).read_bytes() == (run / name).read_bytes()
    assert DeltaStore.open(Folder(str(cold))).uuid == (
        DeltaStore.open(Folder(str(run))).uuid
    )
    for words in ("ls", "verify", "prune", "du", "history"):
        assert command(words, cold)[0] == 0
    target = cold.parent / "alone"
    assert command("export", cold, 3, target, "--to", "delta")[0] == 0
    strategies.check_clean(cold, OLD)
    with open_run(cold) as archive:
        archive.save(9, roots.state(9))
        assert_same_tree(archive.restore(9, roots.state(9)), roots.state(9))


def test_packs_that_steps_share_are_copied_once(run, cold):
    """Also by another run; a step that is there costs nothing but a look."""
    first = orbax_delta.archive(run, cold, steps=[2])
    second = orbax_delta.archive(run, cold, steps=[2, 3])
    assert outcomes(second) == {2: ("there", False), 3: ("copied", False)}
    assert second.steps[0].written_bytes == 0
    assert second.steps[1].packs_there > 0
    copied = first.steps[0].packs_copied + second.steps[1].packs_copied
    assert copied == len(packs_on_disk(cold))
    again = orbax_delta.archive(run, cold, steps=[2, 3])
    assert again.ok
    assert again.written_bytes == 0
    # A pack that was lost since is copied again.
    lost = min(packs_on_disk(cold))
    (cold / STORE / "packs" / lost).unlink()
    assert orbax_delta.archive(run, cold, steps=[2, 3]).ok
    assert_restores(cold, OLD)


def composite(step):
    """Two of our items, one of Orbax's own, one of JSON."""
    return {
        "params": {"w": np.arange(3000.0) * step},
        "opt": {"mu": jnp.full(2000, step)},
        "plain": {"b": np.arange(5) + step},
        "info": {"note": f"step {step}"},
    }


def save_composite(root, steps):
    """A run with several items, by several handlers."""
    registry = orbax_delta.handler_registry(item=("params", "opt"), chunk_bytes=2048)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in steps:
            state = composite(step)
            manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state["params"]),
                    opt=ocp.args.StandardSave(state["opt"]),
                    plain=ocp.args.PyTreeSave(state["plain"]),
                    info=ocp.args.JsonSave(state["info"]),
                ),
                metrics={"loss": 1.0 / step},
            )
            manager.wait_until_finished()


def assert_composite(root, steps):
    """Every item of every step comes back."""
    registry = orbax_delta.handler_registry(item=("params", "opt"))
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        assert manager.all_steps() == list(steps)
        for step in steps:
            got = manager.restore(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(),
                    opt=ocp.args.StandardRestore(),
                    plain=ocp.args.PyTreeRestore(),
                    info=ocp.args.JsonRestore(),
                ),
            )
            assert_same_tree(dict(got.items()), composite(step))


@pytest.mark.parametrize("move", [False, True])
def test_composite_steps(root, cold, move):
    """All items go along; after a move all restore from the root, too."""
    save_composite(root, (1, 2, 3))
    assert orbax_delta.archive(root, cold, steps=[1, 2], move=move).ok
    assert_composite(cold, (1, 2))
    assert_composite(root, (1, 2, 3))
    assert orbax_delta.archive(cold, root, steps=[1, 2]).ok
    assert_composite(root, (1, 2, 3))
    assert check.verify(str(root)).ok


def test_half_moved_composite_steps_are_finished(root, cold):
    """One item left already, the other not: a process died in between."""
    save_composite(root, (1, 2))
    whole = strategies.listing(root)
    shutil.copytree(root / "1" / "opt", cold.parent / "opt")
    assert orbax_delta.archive(root, cold, steps=[1], move=True).ok
    shutil.rmtree(root / "1" / "opt")
    shutil.copytree(cold.parent / "opt", root / "1" / "opt")
    assert_composite(root, (1, 2))
    assert orbax_delta.archive(root, cold, steps=[1], move=True).ok
    assert not list((root / "1").rglob("MANIFEST"))
    assert_composite(root, (1, 2))
    assert orbax_delta.archive(cold, root, steps=[1]).ok
    assert strategies.listing(root).items() >= {
        (name, value) for name, value in whole.items() if name.startswith("1/")
    }


@pytest.mark.parametrize("move", [False, True])
def test_self_contained_steps(tmp_path, cold, move):
    """Their packs lie beside the MANIFEST, and go along; there is no store."""
    folder = tmp_path / "alone"
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        for name in ("final", "best"):
            checkpointer.save(folder / name, orbax_delta.DeltaSave(roots.state(1)))
        for _ in range(2):
            report = orbax_delta.archive(folder, cold, steps=["final"], move=move)
            assert report.ok, report
        assert {path.name for path in cold.iterdir()} == {"final"}
        for where in (folder, cold):
            args = orbax_delta.DeltaRestore(roots.state(1))
            got = checkpointer.restore(where / "final", args=args)
            assert_same_tree(got, roots.state(1))
        left = {path.name for path in (folder / "final").iterdir()}
        assert ("ARCHIVED" in left, "packs" in left) == (move, not move)
        assert check.verify(str(folder)).ok
        assert orbax_delta.archive(cold, folder, steps=["final"]).ok
        assert check.verify(str(folder)).archived == {}
    assert check.verify(str(cold)).ok


@pytest.mark.parametrize("move", [False, True])
def test_roots_with_a_shared_store(tmp_path, cold, move):
    """The archive has a store of its own, with that identity; the way back works."""
    shared = {"store": str(tmp_path / "store")}
    run = roots.make(tmp_path / "run", **shared)
    other = roots.make(tmp_path / "other", **shared)
    assert orbax_delta.archive(run, cold, steps=OLD, move=move).ok
    assert (cold / STORE / "STORE.json").exists()
    assert_restores(cold, OLD)
    assert_restores(run)
    prune_now(other)
    assert_restores(run)
    strategies.check_clean(cold, OLD)
    # Steps of both roots are of one store, so that one archive can hold both.
    assert orbax_delta.archive(other, cold, steps=[5]).ok
    assert_restores(cold, (*OLD, 5))
    # Brought back to a root that the store has forgotten, it is known there again.
    for entry in (tmp_path / "store" / "roots").iterdir():
        entry.unlink()
    assert orbax_delta.archive(cold, run, steps=OLD).ok
    assert len(list((tmp_path / "store" / "roots").iterdir())) == 1
    assert orbax_delta.archive(cold, other, steps=[5]).ok
    prune_now(other)
    assert_restores(run)
    assert check.verify(str(run)).archived == {}


def test_lossy_steps_stay_as_they_are(root, cold):
    """Nothing is decoded: what is restored from the archive has the same bits."""
    policy = orbax_delta.policies.Grid(bound=0.01)
    noise = np.random.default_rng(0).standard_normal((200, 200)).astype(np.float32)
    with open_run(root, lossy={"w": policy}) as run:
        for step in range(3):
            run.save(step, {"w": noise * (1 + step / 1000)})
        wanted = run.restore(1)
    assert orbax_delta.archive(root, cold, steps=[1], move=True).ok
    for where in (root, cold):
        with open_run(where) as run:
            assert_same_tree(run.restore(1), wanted)


# --- moving ---------------------------------------------------------------------------


def test_moved_steps_are_steps_like_others(run, cold, document, command):
    """Listed, restored, described, exported; their packs can go."""
    names = {step: packs_in(run, step) for step in roots.STEPS}
    report = orbax_delta.archive(run, cold, steps=OLD, move=True)
    assert outcomes(report) == {2: ("copied", True), 3: ("copied", True)}
    assert {p.name for p in (run / "2" / "default").iterdir()} == {
        "ARCHIVED",
        "commit_success.txt",
    }
    deleted = set(prune_now(run))
    only_old = set().union(*(names[s] for s in OLD)) - names[4] - names[5]
    assert deleted
    assert deleted <= only_old
    assert_restores(run)
    code, listed = document("ls", run)
    assert code == 0
    assert [s.get("archive") for s in listed["steps"]] == [str(cold)] * 2 + [None] * 2
    assert f"Moved to {cold}: 2, 3." in command("ls", run)[1]
    code, verified = document("verify", run)
    assert code == 0
    assert verified["archived"] == dict.fromkeys("23", str(cold))
    assert verified["whole_steps"] == ["4", "5"]
    assert f"Moved to {cold}: 2, 3." in command("verify", run, 2, 3)[1]
    shown = document("show", run, 2)[1]["items"][0]
    assert shown["archive"] == str(cold)
    assert second_reader.read_step(run / "2" / "default")[("step",)] == 2
    assert command("du", run)[0] == command("history", run)[0] == 0
    assert command("diff", run, 2, 5)[0] == 0
    assert document("repair", run)[1]["mended"] == []
    assert orbax_delta.export_delta(run, 2, cold.parent / "out").leaves > 5
    assert orbax_delta.save_report(run / "2").step == "2"
    with open_run(run) as again:
        assert again.manager.item_metadata(2)["params"]["w"].shape == (64, 64)
        assert orbax_delta.restore_latest_good(again.manager)[0] == 5
        # A run that goes on from a moved step writes what is gone here.
        again.restore(2)
        again.save(6, roots.state(6))
        assert_same_tree(again.restore(6, roots.state(6)), roots.state(6))
    assert check.verify(str(run)).ok


def packs_in(root, step):
    """Packs that a step names."""
    return set(strategies.read_step(root, step).manifest.packs)


def test_v1_follows_too(root, cold):
    """Its free functions, its Checkpointer and its metadata."""
    state = {"w": jnp.arange(2000.0), "step": 1}
    with v1.training.Checkpointer(root, context=orbax_delta.v1_context()) as writer:
        for step in range(3):
            writer.save(step, {**state, "step": step})
    assert orbax_delta.archive(root, cold, steps=[1], move=True).ok
    for where in (root, cold):
        with v1.training.Checkpointer(
            where, context=orbax_delta.v1_context()
        ) as reader:
            assert_same_tree(reader.load(1), state)
            found = reader.checkpointables_metadata(1).metadata["state"]
            assert found["step"] == 0


def test_latest_good_and_fallback_count_with_moved_steps(run, cold, caplog):
    """The newest whole step is one that was moved; a lost one is passed over."""
    assert orbax_delta.archive(run, cold, steps=[2, 3, 4], move=True).ok
    (run / "5" / "default" / "MANIFEST").write_bytes(b"")
    shutil.rmtree(cold / "4")
    with caplog.at_level(logging.ERROR, "orbax_delta"), open_run(run) as again:
        step, got = orbax_delta.restore_latest_good(again.manager, roots.state(3))
        assert step == 3
        assert_same_tree(got, roots.state(3))
        args = orbax_delta.DeltaRestore(roots.state(3), on_corruption="fallback")
        assert_same_tree(again.manager.restore(5, args=args), roots.state(3))
    assert "was moved to the archive" in caplog.text


def test_an_archive_that_is_not_there(run, cold):
    """The error names both places and what to do; so does that of a step gone there."""
    assert orbax_delta.archive(run, cold, steps=OLD, move=True).ok
    elsewhere = cold.rename(cold.parent / "moved")
    item = epath.Path(run / "2" / "default")
    said = rf"step 2.*{run}/2/default.*moved to the archive {cold} \(2/default\)"
    handler = orbax_delta.DeltaCheckpointHandler()
    with pytest.raises(NotFoundError, match=rf"{said}.*archive {run} ELSEWHERE"):
        handler.restore(item)
    with pytest.raises(NotFoundError, match=said):
        handler.metadata(item)
    # Told where it is now, and without --move nothing changes.
    assert orbax_delta.archive(run, elsewhere, steps=[2]).ok
    with pytest.raises(NotFoundError, match=said):
        handler.restore(item)
    report = orbax_delta.archive(run, elsewhere, steps=OLD, move=True)
    assert outcomes(report) == {2: ("there", True), 3: ("there", True)}
    assert_restores(run)
    shutil.rmtree(elsewhere / "2")
    with pytest.raises(NotFoundError, match=r"holds no MANIFEST there"):
        handler.restore(item)
    report = orbax_delta.archive(run, cold, steps=[3])
    assert isinstance(report.steps[0].error, NotFoundError)
    assert f"archive {elsewhere} ARCHIVE --steps 3" in str(report.steps[0].error)
    # A policy leaves alone what went elsewhere.
    policy = orbax_delta.archive(run, cold, older_than=0)
    assert list(outcomes(policy)) == [4]


def test_an_archive_of_an_archive(run, cold):
    """Moved twice: readers follow both links; back in one go."""
    frozen = cold.parent / "frozen"
    assert orbax_delta.archive(run, cold, steps=OLD, move=True).ok
    assert orbax_delta.archive(cold, frozen, steps=OLD, move=True).ok
    assert_restores(run)
    assert_restores(frozen, OLD)
    assert orbax_delta.archive(frozen, run, steps=OLD, move=True).ok
    assert_restores(run)
    assert_restores(cold, OLD)
    assert not list(run.rglob("ARCHIVED"))
    # A circle, made by hand, ends.
    (run / "2" / "default" / "MANIFEST").unlink()
    link = archived_document(
        Archived(
            archive=str(frozen),
            path="2/default",
            store_uuid=DeltaStore.open(Folder(str(run))).uuid,
            attempt="0" * 32,
            saved_us=0,
        )
    )
    (run / "2" / "default" / "ARCHIVED").write_bytes(link)
    with pytest.raises(NotFoundError, match="leads to yet another archive"):
        orbax_delta.DeltaCheckpointHandler().restore(epath.Path(run / "2" / "default"))


def test_leftovers_beside_a_link_go(run, cold):
    """A process died between the link and the last deletion."""
    parts = [*(run / "2" / "default").glob("part-*")]
    kept = {path: path.read_bytes() for path in parts}
    assert orbax_delta.archive(run, cold, steps=[2], move=True).ok
    for path, data in kept.items():
        path.write_bytes(data)
    assert check.verify(str(run)).ok
    assert orbax_delta.archive(run, cold, steps=[2], move=True).ok
    assert not any(path.exists() for path in kept)


def test_a_repaired_archive_is_the_same_save(root, cold):
    """A repair gives the step another attempt; links and further runs know it."""
    with open_run(root, **strategies.LITTLE_OPTIONS) as run:
        for step in range(6):
            run.save(step, strategies.little_state(step))
    assert orbax_delta.archive(root, cold, steps=range(6)).ok
    assert orbax_delta.archive(root, cold, steps=[1], move=True).ok
    step = strategies.read_step(cold, 1)
    (frozen,) = [
        n for n, leaf in enumerate(step.manifest.leaves) if "frozen" in leaf.path
    ]
    ref = next(row.refs[0] for row in step.rows if row.leaf == frozen)
    flip(cold / STORE / "packs" / ref.pack, ref.offset + 50)
    repair.repair(str(cold))
    assert strategies.read_step(cold, 1).manifest.attempt != step.manifest.attempt
    with open_run(root) as run:
        assert_same_tree(run.restore(1), strategies.little_state(1))
    again = orbax_delta.archive(root, cold, steps=range(6), move=True)
    assert set(outcomes(again).values()) == {("there", True)}
    with open_run(root) as run:
        assert_same_tree(run.restore(0), strategies.little_state(0))


# --- choosing -------------------------------------------------------------------------


def test_policies(made, cold, monkeypatch):
    """By age and by number; never the newest."""
    saved = {s: strategies.read_step(made, s).manifest.wall_time for s in roots.STEPS}

    def chosen(**policy):
        choice = archivechoices.Choice(**policy)
        planned = archiveplans.plan(str(made), str(cold), choice)
        return [step.number for step in planned.steps]

    assert chosen(older_than=0) == [2, 3, 4]
    assert chosen(keep_every=1) == [2, 3, 4]
    assert chosen(keep_every=2) == [2, 4]
    assert chosen(keep_every=5) == []
    monkeypatch.setattr(time, "time", lambda: saved[3] + 10)
    assert chosen(older_than=10 + (saved[3] - saved[2]) / 2) == [2]
    assert chosen(older_than=5, keep_every=3) == [3]
    assert chosen(steps=["5", 2]) == [2, 5]
    assert not cold.exists()


def test_the_newest_step_may_be_another_handlers(run, cold):
    """Then all of ours may go."""
    with ocp.CheckpointManager(run) as manager:
        manager.save(7, args=ocp.args.StandardSave({"a": np.arange(3)}))
    assert list(outcomes(orbax_delta.archive(run, cold, older_than=0))) == [2, 3, 4, 5]
    with pytest.raises(NotFoundError, match=r"step 7 .* holds no orbax_delta item"):
        orbax_delta.archive(run, cold, steps=[7])


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({}, "needs to know which steps"),
        ({"steps": [2], "older_than": 0}, "needs to know which steps"),
        ({"older_than": -1}, "older_than is -1"),
        ({"older_than": float("nan")}, "older_than is nan"),
        ({"keep_every": 0}, "keep_every is 0"),
        ({"keep_every": 1.5}, r"keep_every is 1\.5"),
        ({"older_than": "7d"}, "older_than is '7d'"),
        ({"steps": "23"}, "steps is the text '23'"),
    ],
)
def test_a_choice_that_says_nothing(run, cold, choice, words):
    """Nothing is written."""
    with pytest.raises(InvalidInputError, match=words):
        orbax_delta.archive(run, cold, **choice)
    assert not cold.exists()


# --- refused --------------------------------------------------------------------------


def test_places_that_are_refused(run, cold, tmp_path):
    """Inside the root, around it, the root itself, another store, another step."""
    whole = strategies.listing(run)
    for place in (run, run / "cold", tmp_path):
        with pytest.raises(InvalidInputError, match="must lie apart"):
            orbax_delta.archive(run, place, steps=[2])
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(InvalidInputError, match="must lie apart"):
        orbax_delta.archive(run, tmp_path / "link", steps=[2])
    other = roots.make(tmp_path / "other")
    with pytest.raises(InvalidInputError, match="the archive of another run"):
        orbax_delta.archive(run, other, steps=[2])
    with pytest.raises(NotFoundError, match="holds no step '8'"):
        orbax_delta.archive(run, cold, steps=[2, 8])
    with pytest.raises(NotFoundError, match="there is no folder"):
        orbax_delta.archive(tmp_path / "nothing", cold, steps=[2])
    assert not cold.exists()
    (cold / "2").mkdir(parents=True)
    (cold / "2" / "notes").write_text("mine")
    with pytest.raises(InvalidInputError, match="holds another step"):
        orbax_delta.archive(run, cold, steps=[2])
    assert strategies.listing(cold).keys() == {"2", "2/notes"}
    assert strategies.listing(run) == whole


def test_another_save_of_the_name_is_refused(run, cold):
    """A step that was saved again is not the one in the archive."""
    assert orbax_delta.archive(run, cold, steps=[5]).ok
    shutil.rmtree(run / "5")
    with open_run(run) as again:
        again.save(5, roots.state(6))
    before = strategies.listing(cold)
    with pytest.raises(InvalidInputError, match="holds another save than step 5"):
        orbax_delta.archive(run, cold, steps=[5, 4])
    assert strategies.listing(cold) == before


def test_files_that_were_changed_are_left(root, cold):
    """A step comes back to a folder in which a file is another one by now."""
    save_composite(root, (1, 2))
    assert orbax_delta.archive(root, cold, steps=[1], move=True).ok
    note = root / "1" / "info" / "metadata"
    kept = note.read_bytes()
    note.write_text("mine")
    report = orbax_delta.archive(cold, root, steps=[1])
    assert isinstance(report.steps[0].error, ConflictError)
    assert "is there with other content" in str(report.steps[0].error)
    assert note.read_text() == "mine"
    assert not list((root / "1").rglob("MANIFEST"))
    note.write_bytes(kept)
    assert orbax_delta.archive(cold, root, steps=[1]).ok
    assert_composite(root, (1, 2))


def test_another_process_that_is_quicker(run, cold, monkeypatch):
    """Between plan and copy the archive becomes that of another run, or gets a step."""
    plan = archiveplans.plan
    other = roots.make(cold.parent / "other")
    choice = archivechoices.Choice(steps=[2])
    planned = plan(str(run), str(cold), choice)
    assert orbax_delta.archive(other, cold, steps=[3]).ok
    with pytest.raises(ConflictError, match="another store just now"):
        archives.execute(planned, move=True)
    shutil.rmtree(cold)
    assert orbax_delta.archive(run, cold, steps=[3]).ok
    planned = plan(str(run), str(cold), choice)
    (cold / "2").mkdir()
    shutil.copytree(cold / "3" / "default", cold / "2" / "default")
    (failed,) = archives.execute(planned, move=True).steps
    assert isinstance(failed.error, ConflictError)
    assert "holds another step, which was left as it is" in str(failed.error)
    # The same step, by another process: nothing is left to do but to leave it.
    shutil.rmtree(cold / "2")
    planned = plan(str(run), str(cold), choice)
    assert orbax_delta.archive(run, cold, steps=[2]).ok
    assert archives.execute(planned, move=True).ok
    assert_restores(run)


def test_an_archive_inside_a_shared_store_is_refused(tmp_path):
    """Every file there has a meaning."""
    store = tmp_path / "store"
    run = roots.make(tmp_path / "run", store=str(store))
    with pytest.raises(InvalidInputError, match="must lie apart"):
        orbax_delta.archive(run, store / "cold", steps=[2])
    other = roots.make(tmp_path / "other")
    with pytest.raises(InvalidInputError, match="is a shared store"):
        orbax_delta.archive(other, store, steps=[2])


def test_packs_without_identity_are_refused(run, cold):
    """An archive that has lost its STORE.json, and a root that has."""
    assert orbax_delta.archive(run, cold, steps=[2]).ok
    (cold / STORE / "STORE.json").unlink()
    with pytest.raises(CorruptionError, match=r"holds packs but no STORE\.json"):
        orbax_delta.archive(run, cold, steps=[3])
    (run / STORE / "STORE.json").write_bytes(b"{}")
    with pytest.raises(orbax_delta.FormatError, match="not the file of a delta store"):
        orbax_delta.archive(run, cold.parent / "new", steps=[3])
    assert not (cold.parent / "new").exists()


# --- damage ---------------------------------------------------------------------------


def flip(path, position):
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["record", "missing", "index", "part", "MANIFEST"])
def test_a_damaged_step_is_not_archived(run, cold, what):
    """The error says step, file and remedy; the others go on; none of it is there."""
    own = sorted(packs_in(run, 3) - packs_in(run, 2) - packs_in(run, 4))
    pack = run / STORE / "packs" / own[0]
    item = run / "3" / "default"
    match what:
        case "record":
            flip(pack, 70)
        case "missing":
            pack.unlink()
        case "index":
            flip(pack, -20)
        case "part":
            flip(next(item.glob("part-*")), 50)
        case _:
            flip(item / "MANIFEST", 70)
    report = orbax_delta.archive(run, cold, steps=[2, 3, 4], move=True)
    assert {s: o for s, (o, _) in outcomes(report).items()} == {
        2: "copied",
        3: "failed",
        4: "copied",
    }
    error = report.steps[1].error
    assert isinstance(error, CorruptionError | orbax_delta.FormatError)
    assert str(error).startswith("step 3 was not archived: ")
    assert f"`orbax-delta repair {run}/`" in str(error)
    assert not (cold / "3").exists()
    assert (item / "MANIFEST").exists()
    assert check.verify(str(cold)).ok


def test_damage_that_no_archived_step_needs(root, cold, caplog):
    """Is told, and no reason to leave a step; the step that needs it is left."""
    noise = [np.random.default_rng(n).standard_normal(500) for n in range(3)]
    with open_run(root) as run:
        run.save(1, {"kept": noise[0], "changed": noise[1]})
        run.save(2, {"kept": noise[0], "changed": noise[2]})
    (row,) = [row for row in strategies.read_step(root, 1).rows if row.leaf == 0]
    (ref,) = row.refs
    assert ref.pack in packs_in(root, 2)
    flip(root / STORE / "packs" / ref.pack, ref.offset + 40)
    assert orbax_delta.archive(root, cold, steps=[2]).ok
    assert "which the step does not need" in caplog.text
    # Its pack is in the archive now, but not what this step needs of it.
    report = orbax_delta.archive(root, cold, steps=[1, 2])
    assert outcomes(report) == {1: ("failed", False), 2: ("there", False)}
    assert f"the record of {ref.length} bytes at {ref.offset}" in (
        str(report.steps[0].error)
    )


def test_damage_in_the_archive_is_mended(run, cold, caplog):
    """A move looks at what is there before it deletes, and copies anew."""
    assert orbax_delta.archive(run, cold, steps=[2]).ok
    pack = cold / STORE / "packs" / min(packs_in(cold, 2))
    flip(pack, 70)
    assert orbax_delta.archive(run, cold, steps=[2]).ok  # a cheap look
    report = orbax_delta.archive(run, cold, steps=[2], move=True)
    assert report.ok
    assert report.steps[0].packs_copied == 1
    assert "copied anew" in caplog.text
    assert check.verify(str(cold)).ok
    # What cannot be copied again is not relied on.
    flip(pack, 70)
    report = orbax_delta.archive(cold, run, steps=[2])
    assert report.ok or "repair" in str(report.steps[0].error)


def test_a_damaged_link(run, cold, document):
    """An error of the step that says what to do; nothing else is harmed."""
    assert orbax_delta.archive(run, cold, steps=OLD, move=True).ok
    link = run / "2" / "default" / "ARCHIVED"
    flip(link, 60)
    with pytest.raises(
        (CorruptionError, orbax_delta.FormatError), match="delete the step's folder"
    ):
        orbax_delta.DeltaCheckpointHandler().restore(epath.Path(link.parent))
    code, listed = document("ls", run)
    assert code in (20, 22)
    assert "error" in listed["steps"][0]
    assert not check.verify(str(run)).ok
    shutil.rmtree(run / "2")
    assert orbax_delta.archive(cold, run, steps=[2]).ok
    assert_restores(run)


@pytest.mark.parametrize(
    "change",
    [
        {"archive": "relative"},
        {"archive": 5},
        {"archive": "http://127.0.0.1:1/run"},
        {"archive": "floppy://a"},
        {"path": "../x"},
        {"path": "a/b/c"},
        {"path": ""},
        {"store_uuid": "x"},
        {"attempt": "x"},
        {"saved_us": -1},
        {"saved_us": 1.5},
        {"saved_us": 1 << 62},
    ],
)
def test_links_of_nonsense(change):
    """Every field is checked, though its digest is right."""
    good = Archived(
        archive="/cold",
        path="2/default",
        store_uuid="a" * 32,
        attempt="b" * 32,
        saved_us=5,
    )
    data = archived_document(good)
    assert parse_archived(data, "here") == good
    document = json.loads(data) | change
    with pytest.raises(orbax_delta.FormatError, match="does not say which step"):
        parse_archived(jsontext.sealed(document), "here")


def test_every_flipped_bit_of_a_link_is_noticed(record_property):
    """Or it changes nothing: white space is not in the digest."""
    good = Archived(
        archive="s3://bucket/cold",
        path="100/default",
        store_uuid="a" * 32,
        attempt="b" * 32,
        saved_us=1_700_000_000_000_000,
    )
    data = archived_document(good)
    for position in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        said = "delete the step's folder"
        try:
            assert parse_archived(bytes(damaged), "here") == good
        except orbax_delta.DeltaError as error:
            said = str(error)
        assert "delete the step's folder" in said or "Upgrade" in said
    record_property("damage_cases", 8 * len(data))


# --- others at work -------------------------------------------------------------------


def test_two_who_archive_one_step(run, cold, monkeypatch):
    """One of them is told; the pin of a dead one is taken over."""
    assert orbax_delta.archive(run, cold, steps=[3]).ok
    store = DeltaStore.open(Folder(str(cold)))
    pin = marks.copying_pin(strategies.read_step(run, 2).manifest.attempt)
    for owner, done in ((os.getppid(), False), (None, True)):
        mark = marks.Mark(owner=alive(owner) if owner else dead(), packs=[])
        store.pins.write(pin, mark.encode())
        report = orbax_delta.archive(run, cold, steps=[2])
        assert report.ok == done
        if not done:
            assert isinstance(report.steps[0].error, ConflictError)
            assert "is copying the step to" in str(report.steps[0].error)
    assert store.pins.names() == []
    assert DeltaStore.open(Folder(str(run))).pins.names() == []


def alive(pid):
    """The owner that is another process of this machine."""
    this = owners.this_process()
    return owners.Owner(host=this.host, pid=pid, start=owners._start_time(pid))


def dead():
    """An owner that runs no more."""
    this = owners.this_process()
    return owners.Owner(host=this.host, pid=this.pid, start="earlier")


@pytest.mark.parametrize("kind", ["running", "dead", "nobody"])
def test_a_prune_at_work_in_the_archive(run, cold, kind):
    """What a running one names cannot be counted on; a dead one deletes nothing."""
    assert orbax_delta.archive(run, cold, steps=[2]).ok
    store = DeltaStore.open(Folder(str(cold)))
    shared = packs_in(run, 2) & packs_in(run, 3)
    owner = {"running": alive(os.getppid()), "dead": dead(), "nobody": owners.NOBODY}
    mark = marks.Mark(owner=owner[kind], packs=sorted(shared))
    store.condemned.write("0" * 32, mark.encode())
    report = orbax_delta.archive(run, cold, steps=[3])
    (step,) = report.steps
    if kind == "running":
        assert isinstance(step.error, ConflictError)
        assert "a prune of" in str(step.error)
        assert not (cold / "3").exists()
        return
    assert report.ok
    # What a repair has warned of is not counted on, but copied anew.
    assert (step.packs_there == 0) == (kind == "nobody")
    assert_restores(cold, OLD)


def test_a_step_that_goes_meanwhile(run, cold, monkeypatch):
    """The error names the step; the others are archived."""
    real = archives.needed_records

    def deleting(manifest, folder):
        if folder.url.endswith("/3/default/"):
            shutil.rmtree(run / "3")
        return real(manifest, folder)

    monkeypatch.setattr(archives, "needed_records", deleting)
    report = orbax_delta.archive(run, cold, steps=[2, 3, 4])
    assert [step.outcome for step in report.steps] == ["copied", "failed", "copied"]
    error = report.steps[1].error
    assert isinstance(error, ConflictError)
    assert "step 3 was not archived" in str(error)
    assert "was deleted meanwhile" in str(error)
    assert check.verify(str(cold)).ok


# --- the command ----------------------------------------------------------------------


def test_the_command(run, cold, command, document):
    """A plan, a table, JSON, exit codes."""
    code, out, _ = command("archive", run, cold, "--steps", "2,3", "--dry-run")
    assert code == 0
    assert "Nothing was done." in out
    assert not cold.exists()
    code, out, _ = command("archive", run, cold, "--steps", "2", "--steps", "3")
    assert code == 0
    first, two, three, total = roots.lines_of(out)
    assert first[1:4] == ["packs copied", "packs there", "bytes"]
    assert [two[:2], three[:2]] == [["2", "copied"], ["3", "copied"]]
    assert f"written to {cold}/." in total[0]
    code, told = document("archive", run, cold, "--keep-every", "2", "--move")
    assert code == 0
    assert [(s["step"], s["outcome"], s["moved"]) for s in told["steps"]] == [
        ("2", "there", True),
        ("4", "copied", True),
    ]
    code, out, _ = command("archive", run, cold, "--older-than", "7d")
    assert (code, out) == (0, f"No step of {run}/ fits; nothing was copied.\n")
    assert command("archive", run, cold, "--older-than", "7 days")[0] == 2
    assert command("archive", run, cold)[0] == 2
    assert command("archive", run, cold, "--steps", "77")[0] == 10
    flip(run / STORE / "packs" / min(packs_in(run, 5) - packs_in(run, 4)), 70)
    code, told = document("archive", run, cold, "--steps", "5,3")
    assert code == 22
    assert [s["outcome"] for s in told["steps"]] == ["there", "failed"]
    assert not told["ok"]
    assert told["steps"][1]["error"]["kind"] == "corruption"
    code, told = document("archive", run, cold, "--steps", "5", "--dry-run")
    assert told["steps"][0]["outcome"] == "copy"


def test_times():
    """Of options; the doctest beside it has more."""
    assert terminal.seconds("7d") == 7 * 86400


def test_examples(run, tmp_path):
    """Those in the docstrings."""
    names = {"root": run, "exports": tmp_path}
    failed, tried = doctest.testmod(archives, extraglobs=names)
    assert (failed, tried) == (0, 3)
    for module in (marks, terminal):
        failed, tried = doctest.testmod(module)
        assert failed == 0
        assert tried
