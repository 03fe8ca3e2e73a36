"""Folders on a local disk and in memory keep one contract; failures say what failed."""

import json
import os
import secrets

import pytest

from orbax_delta import errors, registry, testing
from orbax_delta.errors import (
    CorruptionError,
    FormatError,
    InvalidInputError,
    StorageError,
    UnsupportedVersionError,
)
from orbax_delta.store import (
    COMMIT_MARKER,
    STORE_FILE,
    STORE_NAME,
    DeltaStore,
    Folder,
    store_document,
)


@pytest.fixture(params=["disk", "disk by spec", "memory"])
def folder(request, tmp_path):
    """An empty folder of each kind."""
    if request.param == "disk":
        return Folder(str(tmp_path))
    if request.param == "disk by spec":
        return Folder({"driver": "file", "path": str(tmp_path)})
    return Folder(f"memory://{secrets.token_hex(8)}/run")


def test_what_is_written_is_read(folder):
    """A key holds what was written last, whole; other keys are not touched."""
    folder.write("a", b"first")
    folder.write("b/c", b"\0\xff")
    folder.write("a", b"second")
    folder.write("empty", b"")
    assert folder.read("a") == b"second"
    assert folder.read("b/c") == b"\0\xff"
    assert folder.read("empty") == b""
    assert folder.names() == ["a", "b/c", "empty"]


def test_another_folder_of_the_same_place(folder):
    """A child, or a folder opened anew, sees the same keys."""
    folder.child("b").write("c", b"1")
    assert folder.read("b/c") == b"1"
    assert Folder(folder.url).names() == ["b/c"]
    assert Folder(folder.url.rstrip("/")).child("b").read("c") == b"1"


def test_missing_keys(folder):
    """What is not there reads as None, is not listed and can be deleted."""
    assert folder.read("none") is None
    assert folder.start_read("none", 3, 5).result().state == "missing"
    assert folder.child("none").names() == []
    folder.delete("none")
    assert folder.names() == []


def test_delete(folder):
    """A deleted key is gone; what begins with its name stays."""
    folder.write("a", b"1")
    folder.write("ab", b"2")
    folder.delete("a")
    assert folder.names() == ["ab"]


def test_unfinished_writes(tmp_path):
    """What a killed write leaves on a local disk is found, and goes with its key."""
    folder = Folder(str(tmp_path))
    folder.write("whole", b"1")
    with pytest.raises(StorageError, match="Invalid key"):
        folder.write("a.__lock", b"")  # no key: so TensorStore calls it while it writes
    (tmp_path / "a.__lock").write_bytes(b"half")
    (tmp_path / "whole.__lock").write_bytes(b"half")
    assert folder.names() == ["whole"]
    assert folder.unfinished() == ["a", "whole"]
    folder.delete("a")
    assert folder.unfinished() == ["whole"]
    assert folder.read("whole") == b"1"
    folder.delete("whole")
    assert list(tmp_path.iterdir()) == []
    assert folder.child("none").unfinished() == []


def test_unfinished_writes_elsewhere():
    """Other storage has no such files."""
    assert Folder(f"memory://{secrets.token_hex(8)}").unfinished() == []


def test_create_only(folder):
    """The first to create a key wins; the loser changes nothing."""
    assert folder.create("a", b"first")
    assert not folder.create("a", b"second")
    assert folder.read("a") == b"first"


def test_create_loses_a_race(folder, monkeypatch):
    """A key that appears between look and write is not overwritten."""
    real = folder._kvstore

    class Racing:
        def read(self, key):
            looked = real.read(key)
            looked.result()
            real.write(key, b"the other's").result()
            return looked

        def write(self, *arguments, **named):
            return real.write(*arguments, **named)

    monkeypatch.setattr(folder, "_kvstore", Racing())
    assert not folder.create("a", b"mine")
    assert folder.read("a") == b"the other's"


def test_ranged_reads(folder):
    """A range is exactly its bytes; one past the end is an error, never short."""
    folder.write("a", bytes(range(100)))
    assert bytes(folder.start_read("a", 10, 5).result().value) == bytes(range(10, 15))
    assert bytes(folder.start_read("a", 99, 1).result().value) == b"\x63"
    with pytest.raises(StorageError, match=r"read 5 bytes at 98 of .*a: OUT_OF_RANGE"):
        folder.start_read("a", 98, 5).result()
    with pytest.raises(StorageError, match="OUT_OF_RANGE"):
        folder.start_read("a", 200, 5).result()


def test_writes_under_way(folder):
    """Writes begun together are all there once each has been waited for."""
    pending = [folder.start_write(f"k{n}", bytes([n]) * 1000) for n in range(20)]
    for write in pending:
        write.result()
    assert [folder.read(f"k{n}") for n in range(20)] == [
        bytes([n]) * 1000 for n in range(20)
    ]


@pytest.mark.parametrize(
    "name",
    ["x y", "ü", "a#b", "a?b", "100%", "q[1]*", "-", "new\nline", "~1", "+", "="],
)
def test_names_with_odd_characters(tmp_path, name):
    """On disk any name is a name, of a key and of a folder."""
    folder = Folder(str(tmp_path / name))
    folder.write(name, b"1")
    folder.child(name + name).write("k", b"2")
    assert (tmp_path / name / name).read_bytes() == b"1"
    assert (tmp_path / name / (name + name) / "k").read_bytes() == b"2"
    assert folder.names() == sorted([name, f"{name}{name}/k"])
    assert folder.find("k", max_depth=1, skip="") == [f"{name}{name}/k"]


def test_find(folder):
    """Keys by their last name: as deep as asked, never in the skipped folders."""
    for key in ("M", "1/M", "1/a/M", "1/a/b/M", "skip/M", "1/skip/M", "1/M2", "1/xM"):
        folder.write(key, b"")
    found = folder.find("M", max_depth=2, skip="skip")
    assert sorted(found) == ["1/M", "1/a/M", "M"]
    assert folder.find("M", max_depth=0, skip="skip") == ["M"]
    assert len(folder.find("M", max_depth=3, skip="skip")) == 4
    assert folder.find("none", max_depth=3, skip="skip") == []
    assert folder.find("M?", max_depth=3, skip="skip") == ["1/M2"]
    assert folder.find("*M*", max_depth=1, skip="skip") == ["1/M", "1/M2", "1/xM", "M"]


def test_find_goes_through_links(tmp_path):
    """A linked folder is looked into, as Orbax does; links in a circle end."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "default").mkdir(parents=True)
    (elsewhere / "default" / "M").touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / "7").symlink_to(elsewhere)
    (root / "circle").symlink_to(root)
    (root / "broken").symlink_to(tmp_path / "none")
    found = Folder(str(root)).find("M", max_depth=3, skip="skip")
    assert found == ["7/default/M", "circle/7/default/M"]


def test_find_in_a_folder_that_vanishes(tmp_path):
    """A folder that is not there is reported as such, so that a caller looks again."""
    with pytest.raises(FileNotFoundError, match="none"):
        Folder(str(tmp_path / "none")).find("M", max_depth=1, skip="")


def test_find_in_what_cannot_be_listed(tmp_path, monkeypatch):
    """A folder that cannot be listed is the storage's failure, with its reason."""
    (tmp_path / "lost+found").mkdir()
    real = os.scandir

    def scandir(path):
        if str(path).rstrip("/").endswith("lost+found"):
            raise PermissionError("permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StorageError, match=r"could not list .*permission denied"):
        Folder(str(tmp_path)).find("M", max_depth=1, skip="")


def test_failures_name_operation_and_file(tmp_path):
    """A file where a folder is expected: each operation says what it could not do."""
    (tmp_path / "file").write_bytes(b"")
    folder = Folder(str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"could not write .*file/k: .*directory"):
        folder.write("k", b"1")
    with pytest.raises(StorageError, match=r"could not create .*file/k: .*directory"):
        folder.create("k", b"1")
    with pytest.raises(StorageError, match=r"could not list .*file/: .*directory"):
        folder.names()
    with pytest.raises(StorageError, match=r"could not list .*file/: .*irectory"):
        folder.find("k", max_depth=1, skip="")
    with pytest.raises(StorageError, match=r"could not list .*file/: .*irectory"):
        folder.unfinished()
    with pytest.raises(StorageError, match=r"could not read .*: "):
        Folder(str(tmp_path)).start_read("../up", 0, 1).result()


def test_no_such_storage():
    """A URL of no known storage is an error that names it."""
    with pytest.raises(InvalidInputError, match=r"could not open floppy://a: .* s3://"):
        Folder("floppy://a")
    # TensorStore would ask again and again, for a quarter of an hour.
    with pytest.raises(InvalidInputError, match="could not open http://127"):
        Folder("http://127.0.0.1:1/run")


def test_errors_are_storage_and_operating_system_errors():
    """Who catches OSError catches a failure of the storage; its text is the message."""
    error = errors.StorageError("could not write x: full")
    assert isinstance(error, OSError)
    assert str(error) == "could not write x: full"


def test_a_store_is_made_once(folder):
    """The first save makes the store; later ones and other processes find it."""
    assert DeltaStore.open(folder) is None
    store = DeltaStore.open_or_create(folder)
    again = DeltaStore.open_or_create(folder)
    opened = DeltaStore.open(Folder(folder.url))
    assert store.uuid == again.uuid == opened.uuid
    assert len(store.uuid) == 32
    assert store.url == f"{folder.url}{STORE_NAME}/"
    assert folder.names() == [
        f"{STORE_NAME}/{STORE_FILE}",
        f"{STORE_NAME}/{COMMIT_MARKER}",
    ]


def test_two_managers_make_one_store(folder, monkeypatch):
    """Who comes second in making a store takes the first one's."""
    real = Folder.create
    made = []

    def beaten(self, key, data):
        if not made:
            made.append(True)
            real(self, key, store_document("a" * 32))
        return real(self, key, data)

    monkeypatch.setattr(Folder, "create", beaten)
    assert DeltaStore.open_or_create(folder).uuid == "a" * 32


def test_packs_without_their_store_file(folder):
    """No second identity for packs that have one: every older step would be lost."""
    store = DeltaStore.open_or_create(folder)
    store.packs.write("some", b"1")
    folder.child(STORE_NAME).delete(STORE_FILE)
    before = folder.names()
    with pytest.raises(CorruptionError, match=r"holds packs but no STORE\.json"):
        DeltaStore.open_or_create(folder)
    assert folder.names() == before


def test_packs_that_appear_with_their_store(folder, monkeypatch):
    """A store that another manager makes and fills meanwhile is taken over."""
    real = DeltaStore.open
    looks = []

    def late(root):
        looks.append(root)
        if len(looks) == 1:
            DeltaStore(root, "").packs.write("some", b"1")
            root.child(STORE_NAME).write(STORE_FILE, store_document("b" * 32))
            return None
        return real(root)

    monkeypatch.setattr(DeltaStore, "open", late)
    assert DeltaStore.open_or_create(folder).uuid == "b" * 32


def test_markers_are_renewed(folder):
    """Both fixed files come back, the identity unchanged."""
    store = DeltaStore.open_or_create(folder)
    folder.child(STORE_NAME).delete(COMMIT_MARKER)
    folder.child(STORE_NAME).delete(STORE_FILE)
    registry.renew(store)
    assert folder.child(STORE_NAME).read(COMMIT_MARKER) == b""
    assert DeltaStore.open(folder).uuid == store.uuid


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        (b"", FormatError, r"STORE\.json is not JSON"),
        (b"\xff", FormatError, "is not JSON"),
        (b"3", FormatError, "is not the file of a delta store"),
        ({"magic": "other"}, FormatError, "is not the file of a delta store"),
        ({"format_version": 9}, UnsupportedVersionError, "format version 9.*Upgrade"),
        ({"format_version": None}, FormatError, "None, which is no whole number"),
        ({"uuid": ""}, CorruptionError, "is damaged .its digest is"),
        ({"digest": None}, CorruptionError, "is damaged .its digest is"),
    ],
)
def test_damaged_store_files(folder, document, error, message):
    """A STORE.json that is not one is refused for reading and for saving."""
    if isinstance(document, dict):
        document = json.dumps(json.loads(store_document("c" * 32)) | document).encode()
    folder.child(STORE_NAME).write(STORE_FILE, document)
    for open_store in (DeltaStore.open, DeltaStore.open_or_create):
        with pytest.raises(error, match=message):
            open_store(folder)
    assert folder.names() == [f"{STORE_NAME}/{STORE_FILE}"]


def test_tensorstore_keeps_the_tail_of_a_stale_lock_file(tmp_path):
    """TensorStore 0.1.86 does not truncate what a killed writer of this key left.

    So no key is ever written twice with fewer bytes: names are used once, the two fixed
    files of a store have a fixed size, and what replaces a file looks for such a lock
    file first. When this fails the fault is gone.
    """
    (tmp_path / "a.__lock").write_bytes(b"junk")
    Folder(str(tmp_path)).write("a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1unk"


@pytest.mark.parametrize("there", [True, False])
def test_replacing_what_a_killed_writer_left(tmp_path, there):
    """Not even for a moment does a file hold the new bytes and the tail of others."""
    folder = Folder(str(tmp_path))
    if there:
        folder.write("a", b"old")
    (tmp_path / "a.__lock").write_bytes(b"left by a killed writer")
    first = testing.crash_at(1, "after", testing.Match(kind="write"))
    with pytest.raises(testing.SimulatedCrash), testing.faults(first):
        folder.replace("a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"
    (tmp_path / "a.__lock").write_bytes(b"left by a killed writer")
    assert folder.create("a", b"2", instead_of=b"1")
    assert not folder.create("a", b"3", instead_of=b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"2"
