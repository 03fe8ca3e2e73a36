"""Where the bytes of a root are: every one counted once, by step, leaf and fate.

`test_state_machine` holds the same sum against the disk after saves, deletions and
prunes in any order.
"""

import collections
import functools
import os
import shutil

import buckets
import numpy as np
import orbax.checkpoint as ocp
import pytest
import roots
import strategies
from strategies import STORE, disk_bytes, open_run, read_step

import orbax_delta
from orbax_delta import (
    costs,
    exports,
    filesizes,
    listing,
    prune,
    records,
    steps,
    testing,
    usage,
)
from orbax_delta.errors import NotFoundError
from orbax_delta.marks import Mark
from orbax_delta.owners import this_process
from orbax_delta.store import DeltaStore, Folder


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def measure(root):
    """Where the bytes of a root are."""
    return usage.measure(listing.read_root(str(root)))


def check_sums(root, used):
    """What must hold of any root without a shared store."""
    assert used.total_bytes == disk_bytes(root)
    live = used.alone_bytes + used.shared_bytes
    assert live == sum(leaf.stored_bytes for leaf in used.leaves)
    assert used.alone_bytes == sum(owner.alone_bytes for owner in used.owners)
    assert used.step_file_bytes == sum(owner.file_bytes for owner in used.owners)
    assert used.rest_bytes >= 0
    assert all(owner.shared_bytes >= 0 for owner in used.owners)


def refs_of(root, step):
    """Records that a step needs, by the rows that it has."""
    rows = read_step(root, step).rows
    return {(r.pack, r.offset, r.length) for row in rows for r in row.refs if r.pack}


def test_a_healthy_root(tmp_path):
    """By hand: which records of which step no other step and no base needs."""
    root = roots.make(tmp_path / "run")
    used = measure(root)
    check_sums(root, used)
    needed = {step: refs_of(root, step) for step in roots.STEPS}
    (base,) = (owner for owner in used.owners if owner.is_base)
    store = DeltaStore.open(Folder(str(root)))
    rows = listing.steps.open_step(
        next(item.place for item in listing.read_root(str(root)).bases)
    ).rows
    needed["base"] = {
        (r.pack, r.offset, r.length) for row in rows for r in row.refs if r.pack
    }
    users = collections.Counter(ref for refs in needed.values() for ref in refs)
    figures = {o.number if not o.is_base else "base": o for o in used.owners}
    for name, refs in needed.items():
        alone = sum(ref[2] for ref in refs if users[ref] == 1)
        assert figures[name].alone_bytes == alone
        assert figures[name].shared_bytes == sum(ref[2] for ref in refs) - alone
    assert used.shared_bytes == sum(ref[2] for ref in users if users[ref] > 1)
    assert base.number == 1
    assert (used.dead_bytes, used.pinned_bytes, used.exit_code) == (0, 0, 0)
    assert used.store_file_bytes == sum(
        os.path.getsize(root / STORE / name)
        for name in filesizes.file_sizes(store.folder)
        if not name.startswith(("packs/", "bases/"))
    )


def test_leaves(tmp_path):
    """Dearest first; a copy is its source's, what a step needs now stands apart."""
    root = tmp_path / "run"
    rng = np.random.default_rng(0)
    with open_run(root, keep_bases=0) as run:
        for step in range(3):
            big = rng.standard_normal(5000)
            small = np.arange(200.0) + step
            run.save(step, {"big": big, "copy": big, "small": small, "n": step})
    used = measure(root)
    check_sums(root, used)
    assert [leaf.path for leaf in used.leaves] == ["big", "small"]
    big, small = used.leaves
    assert big.stored_bytes > 2 * big.newest_bytes > small.stored_bytes
    newest = sum(ref[2] for ref in refs_of(root, 2))
    assert sum(leaf.newest_bytes for leaf in used.leaves) == newest


def test_what_a_deletion_frees(tmp_path):
    """As much as it says goes when a step is deleted and pruned."""
    root = roots.make(tmp_path / "run")
    for step in (3, 5):
        used = measure(root)
        (owner,) = (o for o in used.owners if o.number == step and not o.is_base)
        shutil.rmtree(root / str(step))
        after = measure(root)
        check_sums(root, after)
        packs = owner.freed_bytes - owner.file_bytes
        assert after.dead_bytes == packs > 0
        store = DeltaStore.open(Folder(str(root)))
        prune.execute(store, prune.plan(store))
        freed = used.total_bytes - measure(root).total_bytes
        assert freed == owner.freed_bytes


def test_pins_and_what_nobody_needs(tmp_path):
    """Packs of a save under way are not dead, nor part of any step."""
    root = tmp_path / "run"
    with open_run(root) as run:
        run.save(0, {"w": np.arange(900.0)})
        attempt = "ab" * 16
        store = DeltaStore.open(Folder(str(root)))
        store.packs.write(f"{attempt}-p0-0", b"x" * 1000)
        store.packs.write(f"{'cd' * 16}-p0-0", b"x" * 300)
        assert measure(root).dead_bytes == 1300
        mark = Mark(owner=this_process(), packs=[])
        store.pins.write(f"{attempt}-p0", mark.encode())
        used = measure(root)
        check_sums(root, used)
        assert (used.pinned_bytes, used.dead_bytes) == (1000, 300)
        store.pins.write("garbled", b"x")
        used = measure(root)
        check_sums(root, used)
        assert used.exit_code == 20
        assert "pins/garbled is damaged" in used.problems[0]


def test_files_of_others(tmp_path):
    """Steps of Orbax's own handler, notes in the root, what a killed write left."""
    root = tmp_path / "run"
    with ocp.CheckpointManager(root) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.arange(900.0)}))
    with open_run(root) as run:
        run.save(1, {"w": np.arange(900.0)})
    (root / "notes.txt").write_bytes(b"x" * 77)
    (root / "1" / "notes.txt").write_bytes(b"x" * 5)
    (root / STORE / "packs" / "some.__lock").write_bytes(b"x" * 11)
    used = measure(root)
    check_sums(root, used)
    assert used.other_bytes == 77 + disk_bytes(root / "0")


def test_self_contained_checkpoints(tmp_path):
    """Their packs lie beside their MANIFESTs; copies of a folder are two."""
    for name in ("final", "best"):
        with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
            save = orbax_delta.DeltaSave({"w": np.random.default_rng(0).random(900)})
            checkpointer.save(tmp_path / name, args=save)
    shutil.copytree(tmp_path / "final", tmp_path / "again")
    used = measure(tmp_path)
    check_sums(tmp_path, used)
    assert [owner.name for owner in used.owners] == ["again", "best", "final"]
    assert used.shared_bytes == 0
    assert all(o.freed_bytes == disk_bytes(tmp_path / o.name) for o in used.owners)
    alone = measure(tmp_path / "final")
    check_sums(tmp_path / "final", alone)
    assert len(alone.owners) == 1


def test_damage_is_named_and_the_rest_counted(tmp_path):
    """A lost pack, a garbled part, a garbled MANIFEST: no crash, sums still right."""
    root = roots.make(tmp_path / "run")
    (root / "3/default/MANIFEST").write_bytes(b"garbled")
    (part,) = (root / "4/default").glob("part-*")
    part.write_bytes(b"garbled")
    pack = max((root / STORE / "packs").iterdir(), key=os.path.getsize)
    pack.unlink()
    used = measure(root)
    check_sums(root, used)
    assert used.exit_code == 20
    problems = "\n".join(used.problems)
    for text in (
        "3/default/MANIFEST does not begin",
        f"the part {part}",
        f"{pack.name} is mis",
    ):
        assert text in problems


def test_a_step_that_goes_away_while_it_is_read(tmp_path):
    """A live run deletes and prunes: what is left is measured."""
    root = roots.make(tmp_path / "run")
    found = listing.read_root(str(root))
    store = DeltaStore.open(Folder(str(root)))

    def go(operation):
        if (root / "2").exists() and "/2/" in operation.url:
            shutil.rmtree(root / "2")
            prune.execute(store, prune.plan(store))

    with testing.faults(testing.delay(go, testing.Match(url="*/2/default/part-*"))):
        used = usage.measure(found)
    check_sums(root, used)
    assert not used.problems
    assert [o.number for o in used.owners if not o.is_base] == [3, 4, 5]


@pytest.mark.parametrize("first", ["MANIFEST", "part-*"])
def test_half_of_a_deletion_is_no_damage(tmp_path, monkeypatch, first):
    """One file of a step is gone, the others go a moment later: nothing is wrong."""
    root = roots.make(tmp_path / "run")
    (file,) = (root / "2" / "default").glob(first)
    file.unlink()
    # As long as it stays so, it is what it looks like.
    assert measure(root).problems
    end = functools.partial(shutil.rmtree, root / "2", ignore_errors=True)
    monkeypatch.setattr(steps, "let_deletions_end", end)
    known = costs.read(str(root))
    used = usage.measure(known.root)
    assert (known.damaged, used.problems, used.exit_code) == ([], [], 0)
    check_sums(root, used)


def test_a_step_that_is_half_deleted_is_not_exported(tmp_path, monkeypatch):
    """It went away; who says that it is damaged sends people to look for the reason."""
    root = roots.make(tmp_path / "run")
    (part,) = (root / "2" / "default").glob("part-*")
    part.unlink()
    end = functools.partial(shutil.rmtree, root / "2", ignore_errors=True)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "let_deletions_end", end)
        with pytest.raises(NotFoundError, match=r"step 2, .* went away while it was"):
            exports.export_delta(root, 2, tmp_path / "out")
    store = DeltaStore.open(Folder(str(root)))

    def go(_):
        if (root / "3").exists():
            shutil.rmtree(root / "3")
            prune.execute(store, prune.plan(store))

    late = testing.Match(kind=("read", "range"), url="*/packs/*")
    with (
        testing.faults(testing.delay(go, late)),
        pytest.raises(NotFoundError, match=r"step 3, .* went away while it was read"),
    ):
        exports.export_delta(root, 3, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_shared_store(tmp_path):
    """Records of two runs that have a model in common; others' packs are not ours."""
    model = np.random.default_rng(0).standard_normal(5000)
    where = str(tmp_path / "store")
    for number, name in enumerate(("a", "b")):
        with open_run(tmp_path / name, store=where, keep_bases=0) as run:
            own = np.random.default_rng(number + 1).standard_normal(3000)
            run.save(0, {"model": model, "own": own})
    used = measure(tmp_path / "a")
    (owner,) = used.owners
    assert owner.shared_bytes > 35_000
    assert 20_000 < owner.alone_bytes < 25_000
    assert owner.freed_bytes < 60_000
    packs = disk_bytes(tmp_path / "store" / "packs")
    needed = used.alone_bytes + used.shared_bytes + used.rest_bytes
    assert needed + used.elsewhere_bytes == packs
    assert used.elsewhere_bytes > 20_000
    in_root = disk_bytes(tmp_path / "a")
    assert used.total_bytes == in_root + needed
    assert usage.held_bytes(listing.read_root(str(tmp_path / "a"))) > needed


def test_in_a_bucket(s3, tmp_path):
    """The same figures as of a copy on a disk, packs by their last bytes alone."""
    url = buckets.new_url()
    folder = Folder(url)
    disk = roots.make(tmp_path / "run")
    for path in disk.rglob("*"):
        if path.is_file():
            folder.write(str(path.relative_to(disk)), path.read_bytes())
    with s3.watched() as sent:
        used = usage.measure(listing.read_root(url))
    of_packs = [request for request in sent if "/packs/" in request.key]
    assert len(of_packs) == len(strategies.packs_on_disk(disk))
    assert {request.returned for request in of_packs} == {records.PACK_END_BYTES}
    local = measure(disk)
    for name in ("alone_bytes", "shared_bytes", "rest_bytes", "store_file_bytes"):
        assert getattr(used, name) == getattr(local, name)
    assert used.leaves == local.leaves
    assert used.other_bytes is None
    assert not used.problems


def test_a_pack_without_its_end(s3):
    """It has no size; a verification tells what is wrong."""
    folder = Folder(buckets.new_url())
    name = f"packs/{'ab' * 16}-p0-0"
    folder.write(name, b"x" * 100)
    folder.write("packs/short", b"")
    assert filesizes.file_sizes(folder) == {}
