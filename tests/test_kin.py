"""What a first save refers to instead of writing it: chunks of other runs and items."""

import dataclasses
import json
import logging
import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from strategies import (
    STORE,
    assert_same_tree,
    disk_bytes,
    open_run,
    packs_named,
    read_step,
)

import orbax_delta
from orbax_delta import changes, check, following, kin, prune, records, testing
from orbax_delta.background import pool
from orbax_delta.base import Base
from orbax_delta.changes import Status
from orbax_delta.hosts import Job
from orbax_delta.leaves import snapshot
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.marks import Mark, parse_mark
from orbax_delta.owners import NOBODY
from orbax_delta.places import Place
from orbax_delta.store import DeltaStore, Folder

SMALL = {"chunk_bytes": 4096, "pack_bytes": 8 << 10}
FROZEN = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
FROZEN_CHUNKS = 20


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@pytest.fixture
def shared(tmp_path):
    """Options of a run on a shared store."""
    return SMALL | {"store": str(tmp_path / "store")}


def state(seed):
    """A part that all runs have and one of its own."""
    return {"base": FROZEN, "own": np.random.default_rng(seed).standard_normal(1500)}


def save(root, trees, **options):
    """Save trees as steps; the report of the last save."""
    with open_run(root, **options) as run:
        for step, tree in enumerate(trees):
            run.save(step, tree)
        return run.handler.last_save_report


def check_steps(root, trees):
    """Steps restore bit for bit."""
    handler = orbax_delta.DeltaCheckpointHandler()
    for step, tree in enumerate(trees):
        assert_same_tree(handler.restore(root / str(step) / "default"), tree)


def refs_of(root, step, leaf):
    """Records of a leaf of a step, chunk by chunk."""
    found = read_step(root, step)
    (index,) = (i for i, e in enumerate(found.manifest.leaves) if e.path == (leaf,))
    return [row.refs for row in found.rows if row.leaf == index]


# --- what is shared -----------------------------------------------------------------


def test_a_second_fine_tune_of_one_model(tmp_path):
    """Frozen bf16 weights and a small head: its first step costs the head alone."""
    rng = np.random.default_rng(1)
    frozen = {
        f"layer{n}": jnp.asarray(rng.standard_normal((256, 256)), jnp.bfloat16)
        for n in range(8)
    }

    def fine_tune(seed):
        head = np.random.default_rng(seed).standard_normal((256, 16))
        head = head.astype(np.float32)
        zeros = np.zeros_like(head)
        return {"params": frozen, "head": head, "opt": {"mu": zeros, "nu": zeros}}

    options = {"store": str(tmp_path / "store"), "chunk_bytes": 64 << 10}
    first = save(tmp_path / "a", [fine_tune(1)], **options)
    second = save(tmp_path / "b", [fine_tune(2)], **options)
    assert second.chunks_by_form["shared"] == first.chunks_by_form["planes"] - 1
    assert "shared" not in second.bytes_by_form
    assert second.written_bytes < 0.025 * first.written_bytes
    assert second.elements_changed == second.elements
    alone = save(tmp_path / "c", [fine_tune(2)], chunk_bytes=64 << 10)
    assert second.written_bytes < 0.025 * alone.written_bytes
    check_steps(tmp_path / "b", [fine_tune(2)])


def test_sharing_goes_on_in_later_saves(tmp_path, shared):
    """What changes is a delta on another run's records; what does not stays shared."""
    save(tmp_path / "a", [state(1)], **shared)
    changed = FROZEN.copy()
    changed[:2] += 1
    trees = [state(2), state(2) | {"base": changed}, state(3) | {"base": changed}]
    report = save(tmp_path / "b", trees, **shared)
    assert report.chunks_by_form["reference"] == FROZEN_CHUNKS
    of_a = refs_of(tmp_path / "a", 0, "base")
    of_b = refs_of(tmp_path / "b", 2, "base")
    assert of_b[1:] == of_a[1:]
    assert of_b[0][:-1] == of_a[0]
    check_steps(tmp_path / "b", trees)
    shutil.rmtree(tmp_path / "a" / "0")
    store = DeltaStore.open(Folder(str(tmp_path / "b")))
    prune.execute(store, prune.plan(store))
    check_steps(tmp_path / "b", trees)


def test_where_a_chunk_lies_does_not_matter(tmp_path, shared):
    """Content is found under another name, in another type of the same words."""
    save(tmp_path / "a", [state(1)], **shared)
    words = FROZEN.view(np.int32)
    tree = {"x": {"y": words[:4000].copy()}, "z": FROZEN[8000:9000].copy()}
    report = save(tmp_path / "b", [tree], **shared)
    assert report.chunks_by_form == {"shared": 5}
    check_steps(tmp_path / "b", [tree])


def test_words_of_another_size_are_not_shared(tmp_path, shared):
    """A record says how large its words are."""
    save(tmp_path / "a", [state(1)], **shared)
    tree = {"base": FROZEN[:1000].view(np.uint8).copy()}
    report = save(tmp_path / "b", [tree], **shared)
    assert "shared" not in report.chunks_by_form
    check_steps(tmp_path / "b", [tree])


def test_copies_of_what_is_shared(tmp_path, shared):
    """A copy and a cast within the save follow from the shared chunk."""
    save(tmp_path / "a", [state(1)], **shared)
    half = jnp.asarray(FROZEN).astype(jnp.bfloat16)
    tree = {"base": FROZEN, "copy": FROZEN.copy(), "half": half}
    report = save(tmp_path / "b", [tree], **shared)
    assert report.chunks_by_form == {
        "derived": 2 * FROZEN_CHUNKS,
        "shared": FROZEN_CHUNKS,
    }
    check_steps(tmp_path / "b", [tree])


def test_the_newest_step_and_its_namesake_alone(tmp_path, shared):
    """A branch begins with a step of its parent; no other older one is looked into."""
    save(tmp_path / "a", [state(1), {"own": np.arange(500.0)}], **shared)
    with open_run(tmp_path / "b", **shared) as run:
        run.save(7, state(2))
        assert "shared" not in run.handler.last_save_report.chunks_by_form
    report = save(tmp_path / "branch", [state(1)], **shared)
    assert set(report.chunks_by_form) == {"shared"}
    check_steps(tmp_path / "branch", [state(1)])


def test_only_the_first_save(tmp_path, shared):
    """Nothing is looked for once there is a base."""
    save(tmp_path / "c", [state(1)], **shared)
    trees = [{"own": np.arange(700.0)}, state(3)]
    report = save(tmp_path / "d", trees, **shared)
    assert "shared" not in report.chunks_by_form


def test_after_a_restore_the_step_is_the_base(tmp_path, shared):
    """There is nothing to look for."""
    save(tmp_path / "a", [state(1)], **shared)
    with open_run(tmp_path / "b", **shared) as run:
        run.save(0, state(2))
    with open_run(tmp_path / "b", **shared) as run, testing.faults() as log:
        run.restore(0)
        run.save(1, state(2))
        report = run.handler.last_save_report
    assert report.chunks_by_form == {"reference": FROZEN_CHUNKS + 3}
    reads = [str(o) for o in log.operations if f"{tmp_path}/a/0" in o.url]
    assert all(MANIFEST_NAME in read for read in reads)


def test_items_of_one_root_share(tmp_path):
    """In a store of its own, too: the second item refers to the first one's chunks."""
    registry = orbax_delta.handler_registry(item=("model", "ema"), **SMALL)
    handler = registry.get("model", orbax_delta.DeltaSave)
    root = tmp_path / "run"
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step, items in enumerate([{"model": FROZEN}, {"ema": FROZEN}]):
            args = {k: ocp.args.StandardSave({"w": v}) for k, v in items.items()}
            manager.save(step, args=ocp.args.Composite(**args))
            manager.wait_until_finished()
        assert handler.last_save_report.chunks_by_form == {"shared": FROZEN_CHUNKS}
        args = ocp.args.Composite(ema=orbax_delta.DeltaRestore())
        assert_same_tree(manager.restore(1, args=args)["ema"], {"w": FROZEN})
    assert disk_bytes(root / STORE / "packs") < 1.1 * FROZEN.nbytes


def test_a_list_as_long_as_none_of_this_run_may_be(tmp_path, shared):
    """`max_chain` holds for what is shared as well."""
    trees = []
    for step in range(4):
        base = FROZEN.copy()
        base[: 3 * step : 3] += 1
        trees.append({"base": base})
    save(tmp_path / "a", trees, **shared, full_every=100)
    assert len(refs_of(tmp_path / "a", 3, "base")[0]) == 4
    report = save(tmp_path / "b", trees[-1:], **shared, max_chain=3)
    assert report.chunks_by_form == {"planes": 1, "shared": FROZEN_CHUNKS - 1}
    report = save(tmp_path / "c", trees[-1:], **shared, max_chain=4)
    assert report.chunks_by_form == {"shared": FROZEN_CHUNKS}


def test_the_bound_on_what_is_looked_for(tmp_path, shared, monkeypatch):
    """What is past it is written."""
    save(tmp_path / "a", [state(1)], **shared)
    monkeypatch.setattr(kin, "MAX_CANDIDATES", 7)
    report = save(tmp_path / "b", [state(2)], **shared)
    assert report.chunks_by_form["shared"] == 7
    check_steps(tmp_path / "b", [state(2)])


# --- never by digest alone ----------------------------------------------------------


def compared(tree, options, executor):
    """Findings of a first save."""
    leaves = snapshot(tree, Job()).leaves
    cut = changes.cut(leaves, Base(), options, process=0)
    looked = changes.compare(cut.own, options.refresh_every, executor)
    return following.find_sources(looked, executor)


def test_bytes_are_compared(tmp_path, shared):
    """A chunk whose digest says that another run has it, and does not."""
    save(tmp_path / "a", [state(1)], **shared)
    options = orbax_delta.DeltaOptions(**shared)
    store = DeltaStore.open(Folder(str(tmp_path / "a")))
    place = Place(item_url="", step_name="0", item="other", root_url=str(tmp_path))
    found = kin.Kin.of(store, place, None)
    other = FROZEN + np.float32(1)
    with pool(2) as executor:
        seen = compared({"base": other}, options, executor)
        lies = [
            dataclasses.replace(
                finding,
                digest=records.digest(
                    FROZEN[slice(*finding.chunk.box[0])].view(np.uint8)
                ),
            )
            for finding in seen
        ]
        told, read_bytes = found.share(lies, options, executor)
        assert read_bytes > 0
        assert {finding.status for finding in told} == {Status.CHANGED}
        seen = compared({"base": FROZEN}, options, executor)
        told, _ = found.share(seen, options, executor)
        assert {finding.status for finding in told} == {Status.SHARED}


# --- what is in the way -------------------------------------------------------------


def damage_manifest(tmp_path):
    """The newest step cannot be read."""
    path = tmp_path / "a" / "0" / "default" / MANIFEST_NAME
    path.write_bytes(path.read_bytes()[:-9])


def damage_part(tmp_path):
    """Its rows cannot be read."""
    (path,) = (tmp_path / "a" / "0" / "default").glob("part-*")
    path.write_bytes(path.read_bytes()[:-9])


def lose_root(tmp_path):
    """The other root is gone."""
    shutil.rmtree(tmp_path / "a")


def damage_entry(tmp_path):
    """The registry cannot be read."""
    for path in (tmp_path / "store" / "roots").iterdir():
        path.write_bytes(b"rotten")


@pytest.mark.parametrize(
    "harm",
    [damage_manifest, damage_part, lose_root, damage_entry],
    ids=lambda harm: harm.__name__,
)
def test_kin_that_cannot_be_read(tmp_path, shared, harm, caplog):
    """It is logged and passed over; others still help."""
    save(tmp_path / "a", [state(1)], **shared)
    harm(tmp_path)
    with caplog.at_level(logging.WARNING, "orbax_delta"):
        report = save(tmp_path / "b", [state(2)], **shared)
    assert "shared" not in report.chunks_by_form
    assert "not known" in caplog.text or "is not shared" in caplog.text
    check_steps(tmp_path / "b", [state(2)])
    assert check.verify(str(tmp_path / "b")).ok
    if harm is damage_entry:
        return
    report = save(tmp_path / "c", [state(3)], **shared)
    assert report.chunks_by_form["shared"] == FROZEN_CHUNKS


def test_damaged_records_are_not_shared(tmp_path, shared, caplog):
    """The chunk is written in full, and every other one shared."""
    save(tmp_path / "a", [state(1)], **shared)
    ref = refs_of(tmp_path / "a", 0, "base")[3][0]
    path = tmp_path / "store" / "packs" / ref.pack
    data = bytearray(path.read_bytes())
    data[ref.offset + ref.length // 2] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "orbax_delta"):
        report = save(tmp_path / "b", [state(2)], **shared)
    assert report.chunks_by_form["shared"] == FROZEN_CHUNKS - 1
    assert "writing the chunk in full" in caplog.text
    check_steps(tmp_path / "b", [state(2)])
    problems = check.verify(str(tmp_path / "b")).problems
    assert {problem.leaf for problem in problems} == {""}


@pytest.mark.parametrize("condemned", [True, False])
def test_packs_that_are_going_or_gone_are_not_shared(tmp_path, shared, condemned):
    """Which ones can be relied on is asked once they are pinned."""
    save(tmp_path / "a", [state(1)], **shared)
    ref = refs_of(tmp_path / "a", 0, "base")[3][0]
    if condemned:
        mark = Mark(owner=NOBODY, packs=[ref.pack])
        store = DeltaStore.open(Folder(str(tmp_path / "a")))
        store.condemned.write("ab" * 16, mark.encode())
    else:
        (tmp_path / "store" / "packs" / ref.pack).unlink()
    report = save(tmp_path / "b", [state(2)], **shared)
    assert 0 < report.chunks_by_form["shared"] < FROZEN_CHUNKS
    assert ref.pack not in read_step(tmp_path / "b", 0).manifest.packs
    check_steps(tmp_path / "b", [state(2)])


# --- pins and prunes ----------------------------------------------------------------


def other_life_prunes(root):
    """Another process deletes the steps of a run and prunes."""
    for step in root.glob("[0-9]"):
        shutil.rmtree(step)
    store = DeltaStore.open(Folder(str(root)))
    return prune.execute(store, prune.plan(store))


@pytest.mark.parametrize(
    ("match", "pinned"),
    [
        (testing.Match(kind="write", url="*/pins/*"), False),
        (testing.Match(kind="range", url="*/packs/*"), True),
    ],
    ids=["before", "after"],
)
def test_a_prune_around_the_pin(tmp_path, shared, match, pinned):
    """Either the prune sees the pin, or the save sees what is gone."""
    with open_run(tmp_path / "a", **shared, keep_bases=0) as run:
        run.save(0, state(1))
    done = []

    def around(call, proceed):
        if not done:
            done.append(other_life_prunes(tmp_path / "a"))
        return proceed(call)

    rule = testing.Rule(match=match, make=lambda: around)
    with testing.faults(rule):
        report = save(tmp_path / "b", [state(2)], **shared)
    assert done
    assert bool(done[0]) == (not pinned)
    shared_chunks = report.chunks_by_form.get("shared", 0)
    assert shared_chunks == (FROZEN_CHUNKS if pinned else 0)
    check_steps(tmp_path / "b", [state(2)])
    assert check.verify(str(tmp_path / "b")).ok


def test_what_may_be_shared_is_pinned_before_it_is_read(tmp_path, shared):
    """The pin of the save names the packs of the other run's step."""
    save(tmp_path / "a", [state(1)], **shared)
    wanted = set(read_step(tmp_path / "a", 0).manifest.packs)
    pins = []

    def look(call, proceed):
        found = (tmp_path / "store" / "pins").iterdir()
        pins.extend(
            set(parse_mark(path.read_bytes(), where="pin").packs) for path in found
        )
        return proceed(call)

    match = testing.Match(kind="range", url="*/packs/*")
    rule = testing.Rule(match=match, make=lambda: look)
    with testing.faults(rule):
        save(tmp_path / "b", [state(2)], **shared)
    assert pins
    assert all(found >= wanted for found in pins)


# --- age ----------------------------------------------------------------------------


@pytest.mark.parametrize("auto_prune", [True, False])
def test_what_other_runs_need_is_known(tmp_path, shared, auto_prune):
    """Also to a run that does not prune, and after a restart."""
    options = shared | {"refresh_every": 2, "auto_prune": auto_prune}
    save(tmp_path / "a", [state(1)], **options)
    for first in (0, 4):
        with open_run(tmp_path / "b", **options) as run:
            if first:
                run.restore(first - 1)
            for step in range(first, first + 4):
                run.save(step, state(step))
    assert refs_of(tmp_path / "b", 7, "base") == refs_of(tmp_path / "a", 0, "base")


def test_what_is_shared_is_not_written_anew(tmp_path, shared):
    """Not for its age, as long as another run needs it; after that as ever."""
    options = shared | {"refresh_every": 2, "keep_bases": 0}
    save(tmp_path / "a", [state(1)], **options)
    with open_run(tmp_path / "b", **options) as run:
        for step in range(8):
            run.save(step, state(step))
            assert run.handler.last_save_report.chunks_by_form["planes"] == 3
        assert refs_of(tmp_path / "b", 7, "base") == refs_of(tmp_path / "a", 0, "base")
        shutil.rmtree(tmp_path / "a" / "0")
        shutil.rmtree(tmp_path / "b" / "0")  # so that a tidy-up looks
        for step in range(8, 12):
            run.save(step, state(step))
    packs = {ref.pack for refs in refs_of(tmp_path / "b", 11, "base") for ref in refs}
    old = {ref.pack for refs in refs_of(tmp_path / "b", 7, "base") for ref in refs}
    assert not packs & old
    named = packs_named(tmp_path / "b")
    assert packs | old <= named


def test_the_report_that_counts_shared_chunks_comes_back(tmp_path, shared):
    """From the MANIFEST, and in the line that people read."""
    save(tmp_path / "a", [state(1)], **shared)
    save(tmp_path / "b", [state(2)], **shared)
    report = orbax_delta.save_report(tmp_path / "b" / "0")
    assert report.chunks_by_form["shared"] == FROZEN_CHUNKS
    assert f"{FROZEN_CHUNKS} shared" in report.line()
    assert json.dumps(report.to_document())
