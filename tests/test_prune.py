"""Prune deletes what nothing names and nothing else; what it cannot read stops it."""

import dataclasses
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from etils import epath
from strategies import STORE, assert_same_tree, open_run, packs_named, packs_on_disk

import orbax_delta
from orbax_delta import owners, prune
from orbax_delta.errors import (
    ConflictError,
    CorruptionError,
    FormatError,
    StorageError,
    UnsupportedVersionError,
)
from orbax_delta.manifests import MANIFEST_NAME, encode_manifest
from orbax_delta.marks import Mark, parse_mark
from orbax_delta.store import DeltaStore, Folder

ELSEWHERE = owners.Owner(host="elsewhere", pid=1, start="1")

PIN = """
import sys
from orbax_delta import marks, owners, store
mark = marks.Mark(owner=owners.this_process(), packs=sys.argv[3:])
opened = store.DeltaStore.open(store.Folder(sys.argv[1]))
opened.pins.write(sys.argv[2], mark.encode())
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """A real MANIFEST, to be given other packs."""
    root = tmp_path_factory.mktemp("real") / "run"
    with open_run(root) as run:
        run.save(0, {"w": np.arange(10.0)})
    return strategies.read_manifest(root / "0/default" / MANIFEST_NAME)


@pytest.fixture
def store(root):
    """An empty store."""
    return DeltaStore.open_or_create(Folder(str(root)))


def pack_name(number, attempt=0):
    """Name of a pack; attempts are told apart by a small number."""
    return f"{attempt:032x}-p0-{number}"


def put_packs(store, *names):
    """Packs are opaque to prune: any bytes do."""
    for name in names:
        store.packs.write(name, b"pack")


def put_step(store, manifest, folder, *packs):
    """A MANIFEST in `folder` that names `packs`."""
    named = dataclasses.replace(
        manifest, packs=sorted(packs), parts=(), store_uuid=store.uuid
    )
    store.root.child(folder).write(MANIFEST_NAME, encode_manifest(named))


def put_pin(store, name, *packs, owner=None):
    """A pin; of this process unless said otherwise."""
    mark = Mark(owner=owner or owners.this_process(), packs=packs)
    store.pins.write(name, mark.encode())


@pytest.fixture
def other_process(store):
    """Starts processes that write a pin and wait; they end with the test."""
    started = []

    def start(name, *packs):
        process = subprocess.Popen(
            [sys.executable, "-c", PIN, store.root.url, name, *packs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout.readline() == b"written\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_plan_changes_nothing(store, manifest, root):
    """Planning only reads, whatever it finds."""
    put_packs(store, pack_name(0), pack_name(1))
    put_step(store, manifest, "0/default", pack_name(0))
    put_pin(store, "other", owner=ELSEWHERE)
    before = strategies.listing(root)
    plan = prune.plan(store, break_pins=True)
    assert list(plan.dead) == [pack_name(1)]
    assert list(plan.live) == [pack_name(0)]
    assert list(plan.manifests) == ["0/default/MANIFEST"]
    assert list(plan.stale) == ["pins/other"]
    assert strategies.listing(root) == before


def test_dead_packs_go(store, manifest, root):
    """What was planned is deleted and nothing else; a second prune finds nothing."""
    put_packs(store, *(pack_name(n) for n in range(4)))
    put_step(store, manifest, "0/default", pack_name(0), pack_name(2))
    assert list(prune.execute(store, prune.plan(store))) == [pack_name(1), pack_name(3)]
    assert packs_on_disk(root) == {pack_name(0), pack_name(2)}
    assert store.condemned.names() == []
    plan = prune.plan(store)
    assert list(plan.dead) == []
    assert list(prune.execute(store, plan)) == []


def test_packs_of_deleted_steps_go(root):
    """After real saves and deletions the packs left are those the steps name."""
    rng = np.random.default_rng(0)
    trees = {n: {"w": rng.standard_normal(300), "n": n} for n in range(6)}
    with open_run(root, chunk_bytes=512, pack_bytes=1024, auto_prune=False) as run:
        for step, tree in trees.items():
            run.save(step, tree)
    for step in (0, 2, 3, 5):
        shutil.rmtree(root / str(step))
    assert packs_on_disk(root) > packs_named(root)
    store = DeltaStore.open(Folder(str(root)))
    prune.execute(store, prune.plan(store))
    assert packs_on_disk(root) == packs_named(root)
    with open_run(root) as run:
        for step in (1, 4):
            assert_same_tree(run.restore(step), trees[step])


@pytest.mark.parametrize(
    "folder",
    [
        "7/default",
        "step_0000007/params",
        "7.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp",
        "7.orbax-checkpoint-tmp/default",
        "7.orbax-checkpoint-tmp-1700000000/default",
        "trash/7/default",
        "trash/2026-01-01/7/default",
        "a/b/c/7/default",
        "7",
    ],
)
def test_steps_in_any_folder_are_alive(store, manifest, root, folder):
    """Final and temporary names, object-store style, trash folders of any depth."""
    put_packs(store, pack_name(0), pack_name(1))
    put_step(store, manifest, folder, pack_name(0))
    assert list(prune.execute(store, prune.plan(store))) == [pack_name(1)]
    assert packs_on_disk(root) == {pack_name(0)}


def test_a_linked_step_is_alive(store, manifest, root, tmp_path):
    """A step that was moved to another disk and linked keeps its packs."""
    put_packs(store, pack_name(0))
    put_step(store, manifest, "7/default", pack_name(0))
    shutil.move(root / "7", tmp_path / "seven")
    (root / "7").symlink_to(tmp_path / "seven")
    assert list(prune.plan(store).dead) == []


def test_steps_of_another_identity_are_alive(store, manifest, root):
    """If the store's file was lost and made anew, the older steps keep their packs."""
    put_packs(store, pack_name(0))
    put_step(store, manifest, "7/default", pack_name(0))
    other = DeltaStore(Folder(str(root)), "f" * 32)
    assert list(prune.plan(other).dead) == []


def test_the_trash_of_a_manager(root):
    """Steps that a manager moved to its trash restore there after a prune."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1, todelete_subdir="trash")
    trees = {n: {"w": np.random.default_rng(n).standard_normal(50)} for n in range(3)}
    with open_run(root, manager_options=options) as run:
        for step, tree in trees.items():
            run.save(step, tree)
    store = DeltaStore.open(Folder(str(root)))
    assert list(prune.execute(store, prune.plan(store))) == []
    handler = orbax_delta.DeltaCheckpointHandler()
    for step in (0, 1):
        tree = handler.restore(epath.Path(root / "trash" / str(step) / "default"))
        assert_same_tree(tree, trees[step])


def test_what_a_pin_names_is_alive(store, root):
    """A pin spares the packs it names and all packs of its own attempt."""
    own, named, free = pack_name(0, attempt=5), pack_name(0), pack_name(1)
    put_packs(store, own, named, free)
    put_pin(store, f"{5:032x}-p0", named)
    plan = prune.plan(store)
    assert list(plan.pins) == [f"{5:032x}-p0"]
    assert list(prune.execute(store, plan)) == [free]
    assert packs_on_disk(root) == {own, named}
    assert store.pins.names() == [f"{5:032x}-p0"]


def damaged(data):
    """A file whose content is not what it was."""
    return bytes(byte ^ 0x20 for byte in data)


def newer_manifest(data):
    """A MANIFEST of format version 8."""
    return data.replace(b"MANIFEST 1 ", b"MANIFEST 8 ", 1)


def newer_mark(data):
    """A pin or mark of format version 8."""
    return json.dumps(json.loads(data) | {"format_version": 8}).encode()


@pytest.mark.parametrize(
    ("key", "change", "error", "message"),
    [
        ("1/default/MANIFEST", damaged, FormatError, "does not begin with"),
        ("1/default/MANIFEST", lambda data: b"", FormatError, "does not begin with"),
        (
            "1/default/MANIFEST",
            lambda data: data[:-1],
            CorruptionError,
            "digest of",
        ),
        ("1/default/MANIFEST", newer_manifest, UnsupportedVersionError, "version 8"),
        (f"{STORE}/pins/live", damaged, FormatError, "is damaged"),
        (f"{STORE}/pins/live", lambda data: b"{}", FormatError, "is damaged"),
        (f"{STORE}/pins/live", newer_mark, UnsupportedVersionError, "version 8"),
        (f"{STORE}/condemned/live", damaged, FormatError, "is damaged"),
        (f"{STORE}/condemned/live", newer_mark, UnsupportedVersionError, "version 8"),
    ],
)
def test_what_cannot_be_read_stops_it(
    store, manifest, root, key, change, error, message
):
    """Anything that may name packs must be readable; else nothing is deleted."""
    put_packs(store, pack_name(0), pack_name(1))
    put_step(store, manifest, "0/default", pack_name(0))
    put_step(store, manifest, "1/default", pack_name(0))
    put_pin(store, "live")
    store.condemned.write("live", store.pins.read("live"))
    planned = prune.plan(store)
    path = root / key
    path.write_bytes(change(path.read_bytes()))
    before = strategies.listing(root)
    with pytest.raises(error, match=message):
        prune.plan(store)
    assert strategies.listing(root) == before
    with pytest.raises(error, match=message):
        prune.execute(store, planned)
    assert strategies.listing(root) == before


def test_unknown_features_stop_it(store, manifest, root):
    """A MANIFEST that needs an unknown feature may name packs in unknown ways."""
    put_packs(store, pack_name(0))
    newer = dataclasses.replace(manifest, required_features=["splines"])
    store.root.child("0/default").write(MANIFEST_NAME, encode_manifest(newer))
    with pytest.raises(UnsupportedVersionError, match="'splines'"):
        prune.plan(store)
    assert packs_on_disk(root) == {pack_name(0)}


@pytest.mark.parametrize("name", ["notes.txt", "sub/" + pack_name(0), "0-p0-0"])
def test_foreign_files_stop_it(store, root, name):
    """Something else among the packs: it is not deleted, and nor is anything."""
    put_packs(store, pack_name(0))
    store.packs.write(name, b"mine")
    before = strategies.listing(root)
    with pytest.raises(FormatError, match=f"{name} is not named like a pack"):
        prune.plan(store)
    assert strategies.listing(root) == before


def test_pin_of_a_process_that_was_killed(store, other_process, root):
    """The pin of a live process holds; once that is killed both it and packs go."""
    put_packs(store, pack_name(0))
    process = other_process("saver", pack_name(0))
    plan = prune.plan(store)
    assert (list(plan.pins), list(plan.dead)) == (["saver"], [])
    process.send_signal(signal.SIGKILL)
    process.wait()
    plan = prune.plan(store)
    assert list(plan.pins) == []
    assert list(plan.stale) == ["pins/saver"]
    assert list(prune.execute(store, plan)) == [pack_name(0)]
    assert store.pins.names() == []
    assert packs_on_disk(root) == set()


def test_unfinished_packs_of_a_save_that_was_killed(store, other_process, root):
    """What a kill left of a pack goes; what a running save is writing stays."""
    packs = root / STORE / "packs"
    packs.mkdir(exist_ok=True)
    killed, running = pack_name(0, attempt=1), pack_name(0, attempt=2)
    for name in (killed, running):
        (packs / f"{name}.__lock").write_bytes(b"half a pack")
    put_pin(store, f"{2:032x}-p0")
    process = other_process(f"{1:032x}-p0")
    assert list(prune.plan(store).dead) == []
    process.kill()
    process.wait()
    assert list(prune.execute(store, prune.plan(store))) == [killed]
    assert packs_on_disk(root) == {f"{running}.__lock"}


def test_mark_of_a_pruner_that_was_killed(store, other_process, root):
    """A mark left behind by a killed prune goes; what it condemned is judged anew."""
    put_packs(store, pack_name(0))
    process = other_process("pruner", pack_name(0))
    store.condemned.write("pruner", store.pins.read("pruner"))
    process.kill()
    process.wait()
    plan = prune.plan(store)
    assert list(plan.stale) == ["pins/pruner", "condemned/pruner"]
    prune.execute(store, plan)
    assert store.condemned.names() == []


def test_pins_of_other_hosts(store, root):
    """They hold, for nobody here can know, until a person says otherwise."""
    put_packs(store, pack_name(0), pack_name(1))
    put_pin(store, "there", pack_name(0), owner=ELSEWHERE)
    put_pin(store, "here", pack_name(1))
    assert list(prune.execute(store, prune.plan(store))) == []
    plan = prune.plan(store, break_pins=True)
    assert (list(plan.pins), list(plan.stale)) == (["here"], ["pins/there"])
    assert list(prune.execute(store, plan)) == [pack_name(0)]
    assert store.pins.names() == ["here"]
    assert packs_on_disk(root) == {pack_name(1)}


@pytest.mark.parametrize("how", ["pin", "MANIFEST"])
def test_a_save_between_plan_and_execution(store, manifest, root, how):
    """What is named since the plan was made is not deleted any more."""
    put_packs(store, pack_name(0), pack_name(1))
    planned = prune.plan(store)
    assert list(planned.dead) == [pack_name(0), pack_name(1)]
    if how == "pin":
        put_pin(store, "saver", pack_name(0))
    else:
        put_step(store, manifest, "9/default", pack_name(0))
    assert list(prune.execute(store, planned)) == [pack_name(1)]
    assert packs_on_disk(root) == {pack_name(0)}


def test_a_pin_right_after_the_mark(store, root, monkeypatch):
    """A saver that pins after it could see the mark is still seen by the pruner."""
    put_packs(store, pack_name(0))
    write = Folder.write

    def write_then_pin(self, key, data):
        write(self, key, data)
        if self.url == store.condemned.url:
            monkeypatch.undo()
            put_pin(store, "saver", pack_name(0))

    monkeypatch.setattr(Folder, "write", write_then_pin)
    assert list(prune.execute(store, prune.plan(store))) == []
    assert packs_on_disk(root) == {pack_name(0)}
    assert store.condemned.names() == []


def test_a_failing_prune_takes_its_mark_back(store, root, monkeypatch):
    """If the second look fails nothing is deleted and no mark stays behind."""
    put_packs(store, pack_name(0))
    planned = prune.plan(store)
    (root / "5/default").mkdir(parents=True)
    (root / "5/default" / MANIFEST_NAME).write_bytes(b"?")
    with pytest.raises(FormatError, match="does not begin with"):
        prune.execute(store, planned)
    assert store.condemned.names() == []
    assert packs_on_disk(root) == {pack_name(0)}


def test_a_condemned_pack_is_not_built_upon(root, caplog):
    """A saver writes in full what lies in packs that a prune is about to delete."""
    tree = {"w": np.random.default_rng(0).standard_normal(500)}
    with open_run(root, auto_prune=False, keep_bases=0) as run:
        run.save(0, tree)
        store = DeltaStore.open(Folder(str(root)))
        old = packs_on_disk(root)
        mark = Mark(owner=owners.this_process(), packs=sorted(old))
        store.condemned.write("prune", mark.encode())
        shutil.rmtree(root / "0")
        run.save(1, tree)
        assert "1 stored chunks are gone" in caplog.text
        for name in old:
            store.packs.delete(name)
        store.condemned.delete("prune")
        assert_same_tree(run.restore(1), tree)
    assert packs_named(root) == packs_on_disk(root)


def test_a_save_whose_pin_is_broken_fails(root, monkeypatch):
    """If a person breaks its pin, a save says so and leaves no step behind."""
    with open_run(root) as run:
        run.save(0, {"w": np.arange(100.0)})
        store = DeltaStore.open(Folder(str(root)))
        write = Folder.write

        def break_pins(self, key, data):
            write(self, key, data)
            if key == MANIFEST_NAME:
                for name in store.pins.names():
                    store.pins.delete(name)

        monkeypatch.setattr(Folder, "write", break_pins)
        run.manager.save(1, args=ocp.args.StandardSave({"w": np.arange(100.0) + 1}))
        with pytest.raises(ConflictError, match="its pin was removed by a prune"):
            run.manager.wait_until_finished()
        monkeypatch.undo()
        run.save(2, {"w": np.arange(100.0) + 2})
        assert_same_tree(run.restore(0), {"w": np.arange(100.0)})
        assert_same_tree(run.restore(2), {"w": np.arange(100.0) + 2})
    assert sorted(packs_named(root)) == sorted(packs_on_disk(root))


def test_folders_that_keep_vanishing(store, root, monkeypatch):
    """A root that cannot be listed in peace stops the prune."""
    put_packs(store, pack_name(0))

    def find(self, name, **named):
        raise FileNotFoundError(name)

    monkeypatch.setattr(Folder, "find", find)
    with pytest.raises(StorageError, match="kept changing while they were listed"):
        prune.plan(store)
    assert packs_on_disk(root) == {pack_name(0)}


@pytest.mark.parametrize("what", ["MANIFESTs vanish", "listings differ"])
def test_steps_that_keep_changing(store, manifest, root, monkeypatch, what):
    """A root whose steps are never the same twice stops the prune."""
    put_packs(store, pack_name(0))
    put_step(store, manifest, "0/default", pack_name(0))
    read, find = Folder.read, Folder.find
    looks = []

    def never_there(self, key):
        return None if key.endswith(MANIFEST_NAME) else read(self, key)

    def never_twice(self, name, **named):
        looks.append(name)
        return [*find(self, name, **named), f"{len(looks)}/default/MANIFEST"]

    if what == "MANIFESTs vanish":
        monkeypatch.setattr(Folder, "read", never_there)
    else:
        monkeypatch.setattr(Folder, "find", never_twice)
    with pytest.raises(StorageError, match="kept changing while they were read"):
        prune.plan(store)
    assert packs_on_disk(root) == {pack_name(0)}


def test_a_step_renamed_between_two_listings(store, manifest, root, monkeypatch):
    """A rename that hides a step from the first listing does not hide its packs."""
    put_packs(store, pack_name(0), pack_name(1))
    put_step(store, manifest, "0.orbax-checkpoint-tmp/default", pack_name(0))
    put_step(store, manifest, "1/default", pack_name(1))
    find = Folder.find
    hidden = []

    def hides_first(self, name, **named):
        found = find(self, name, **named)
        if not hidden:
            hidden.append(True)
            (root / "0.orbax-checkpoint-tmp").rename(root / "0")
            return [key for key in found if not key.startswith("0.")]
        return found

    monkeypatch.setattr(Folder, "find", hides_first)
    plan = prune.plan(store)
    assert list(plan.dead) == []
    assert list(plan.manifests) == ["0/default/MANIFEST", "1/default/MANIFEST"]


def test_an_empty_root(store, root):
    """A store without steps: every pack is dead."""
    put_packs(store, pack_name(0))
    assert list(prune.execute(store, prune.plan(store))) == [pack_name(0)]
    assert DeltaStore.open(Folder(str(root))).uuid == store.uuid


@hypothesis.given(
    st.lists(st.sets(st.integers(0, 7), max_size=4), max_size=4),
    st.lists(st.sets(st.integers(0, 7), max_size=3), max_size=3),
    st.sets(st.integers(0, 7)),
)
def test_what_is_alive(tmp_path_factory, manifest, steps, pins, on_disk):
    """Deleted is exactly what neither steps nor pins name, for any sets of them."""
    root = tmp_path_factory.mktemp("any")
    store = DeltaStore.open_or_create(Folder(str(root)))
    put_packs(store, *map(pack_name, on_disk))
    for number, packs in enumerate(steps):
        put_step(store, manifest, f"{number}/default", *map(pack_name, packs))
    for number, packs in enumerate(pins):
        put_pin(store, f"{number + 1:032x}-p0", *map(pack_name, packs))
    named = set().union(*steps, *pins)
    deleted = prune.execute(store, prune.plan(store))
    assert set(deleted) == {pack_name(n) for n in on_disk - named}
    assert packs_on_disk(root) == {pack_name(n) for n in on_disk & named}


def test_marks_survive_their_bytes():
    """A mark read back is the mark that was written."""
    mark = Mark(owner=owners.this_process(), packs=(pack_name(0), pack_name(1)))
    assert parse_mark(mark.encode(), where="x") == mark


# --- what a plan remembers ----------------------------------------------------------


def test_no_manifest_is_parsed_twice(root, monkeypatch):
    """A job reads each MANIFEST at every prune, and parses it once."""
    parsed = []
    parse_manifest = prune.parse_manifest

    def counting(data, *, where):
        parsed.append(data)
        return parse_manifest(data, where=where)

    monkeypatch.setattr(prune, "parse_manifest", counting)
    keep = ocp.CheckpointManagerOptions(max_to_keep=4)
    with open_run(root, manager_options=keep, keep_bases=1, full_every=2) as run:
        for step in range(12):
            run.save(step, {"w": np.arange(300) * step})
    assert len(parsed) == len(set(parsed)) >= 12


@hypothesis.given(
    changes=st.lists(strategies.edits(), min_size=3, max_size=6), data=st.data()
)
@hypothesis.settings(max_examples=10)
def test_what_is_remembered_changes_no_plan(changes, data):
    """A plan that knows MANIFESTs from before finds what one finds that knows none."""
    known = {}
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        tempfile.TemporaryDirectory(prefix="orbax-delta-prune-") as name,
    ):
        strategies.skip_disk_sync(monkeypatch)
        root = pathlib.Path(name) / "run"
        tree = {"w": np.arange(500.0), "v": np.zeros(300, np.int16)}
        with open_run(root, auto_prune=False, full_every=1, chunk_bytes=256) as run:
            for step, edits in enumerate(changes):
                tree = strategies.edited(tree, edits) or {"never empty": step}
                run.save(step, tree)
                for doomed in data.draw(st.sets(st.integers(0, step))):
                    shutil.rmtree(root / str(doomed), ignore_errors=True)
                run.manager.reload()
                store = DeltaStore.open(Folder(str(root)))
                assert prune.plan(store, known=known) == prune.plan(store)
