"""Each fault does to the files and tells the caller what it says, and nothing else."""

import doctest
import errno
import os
import secrets
import subprocess
import sys
import threading

import pytest
import strategies

from orbax_delta import errors, owners, testing
from orbax_delta.store import DeltaStore, Folder
from orbax_delta.testing import Match, injection

FULL = r"could not write .*/key: No space left on device \[os_error_code='28'\]"


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    """An empty folder on disk."""
    return Folder(str(tmp_path))


# --- what is seen -------------------------------------------------------------------


def test_every_operation_is_seen(folder, tmp_path):
    """Every method that touches the storage is one operation, with its url and size."""
    with testing.faults() as log:
        folder.write("key", b"12345")
        folder.start_write("a/b", b"1").result()
        assert folder.create("new", b"12")
        assert folder.read("key") == b"12345"
        assert bytes(folder.start_read("key", 1, 3).result().value) == b"234"
        assert folder.names() == ["a/b", "key", "new"]
        assert folder.find("b", max_depth=2, skip="") == ["a/b"]
        assert folder.unfinished() == []
        folder.delete("key")
        folder.child("a").clear()
    url = f"{tmp_path}/"
    assert [(op.kind, op.url, op.size, op.offset) for op in log.operations] == [
        ("write", f"{url}key", 5, 0),
        ("write", f"{url}a/b", 1, 0),
        ("create", f"{url}new", 2, 0),
        ("read", f"{url}key", 0, 0),
        ("range", f"{url}key", 3, 1),
        ("list", url, 0, 0),
        ("find", url, 0, 0),
        ("unfinished", url, 0, 0),
        ("delete", f"{url}key", 0, 0),
        ("clear", f"{url}a/", 0, 0),
    ]
    assert [op.number for op in log.operations] == list(range(1, 11))
    assert str(log.operations[4]) == f"read 3 bytes at 1 of {url}key"
    assert not log.crashed


def test_no_way_around():
    """Every public method that touches the storage is one that `faults` knows.

    `write` and `replace` are not: they are made of others, and would count twice. An
    empty folder is nothing to any reader, so removing it does not count either.
    """
    methods = {
        name
        for name, value in vars(Folder).items()
        if callable(value) and not name.startswith("_")
    }
    uncounted = {"child", "write", "replace", "remove_if_empty"}
    assert methods - uncounted == set(injection._KINDS)


def test_operations_inside_another_count_once():
    """A find in memory lists; that is one operation, not two."""
    folder = Folder(f"memory://{secrets.token_hex(8)}")
    with testing.faults() as log:
        folder.write("a/M", b"")
        assert folder.find("M", max_depth=1, skip="") == ["a/M"]
    assert [op.kind for op in log.operations] == ["write", "find"]


def test_nothing_is_left_behind(folder):
    """After the block, also after one that raised, the store is as before."""
    before = dict(vars(Folder))
    with pytest.raises(KeyError, match="mine"), testing.faults(testing.crash_at(1)):
        raise KeyError("mine")
    with testing.faults(testing.fail(errno.EIO)), testing.faults():
        pass
    assert dict(vars(Folder)) == before
    folder.write("key", b"1")
    assert folder.read("key") == b"1"


def test_nested_faults_see_the_same_operations(folder):
    """The inner block comes first; what it breaks the outer one does not see."""
    with (
        testing.faults() as outer,
        testing.faults(testing.fail(errno.EIO)) as inner,
        pytest.raises(errors.StorageError, match="Input/output error"),
    ):
        folder.read("key")
    assert [op.kind for op in inner.operations] == ["read"]
    assert outer.operations == []


def test_threads_share_the_numbers(folder):
    """Operations of all threads are counted, each number once."""
    with testing.faults() as log:
        threads = [
            threading.Thread(target=lambda n=n: folder.write(f"k{n}", b"1"))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(op.number for op in log.operations) == list(range(1, 9))
    assert len({op.url for op in log.operations}) == 8


def test_matching(folder, tmp_path):
    """Kind, glob, first and times; what does not fit is not counted."""
    rule = testing.fail(
        errno.ENOSPC, Match(kind=("write", "create"), url="*/packs/*", first=2, times=2)
    )
    packs = folder.child("packs")
    failed = []
    with testing.faults(rule):
        for number in range(5):
            folder.write(f"k{number}", b"1")
            packs.names()
            try:
                packs.write(f"k{number}", b"1")
            except errors.StorageError:
                failed.append(number)
    assert failed == [1, 2]
    assert sorted(os.listdir(tmp_path / "packs")) == ["k0", "k3", "k4"]
    assert len(os.listdir(tmp_path)) == 6


# --- crashes ------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_crash_in_a_write(folder, tmp_path, when):
    """Not there, there, or half there beside the key; nothing can be done after it."""
    folder.write("old", b"1")
    with testing.faults(testing.crash_at(2, when)) as log:
        folder.write("first", b"1")
        with pytest.raises(testing.SimulatedCrash, match=rf"operation 2 .*{when}"):
            folder.write("a/key", b"123456")
        for helpless in (
            lambda: folder.delete("old"),
            lambda: folder.write("late", b""),
            lambda: folder.create("late", b""),
            lambda: folder.read("old"),
            lambda: folder.start_read("old", 0, 1),
            folder.names,
            folder.unfinished,
            folder.clear,
            lambda: folder.find("old", max_depth=1, skip=""),
        ):
            with pytest.raises(testing.SimulatedCrash, match=rf"operation 2 .*{when}"):
                helpless()
    assert log.crashed
    assert len(log.operations) == 2
    files = {
        str(path.relative_to(tmp_path)): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    left = {
        "before": {},
        "after": {"a/key": b"123456"},
        "torn": {"a/key.__lock": b"123"},
    }
    assert files == {"old": b"1", "first": b"1", **left[when]}


def test_crash_in_a_deletion(folder, tmp_path):
    """A killed deletion leaves its empty lock file, as TensorStore's would."""
    for when, left in (
        ("before", ["key"]),
        ("after", []),
        ("torn", ["key.__lock"]),
    ):
        folder.write("key", b"1")
        with (
            testing.faults(testing.crash_at(1, when)),
            pytest.raises(testing.SimulatedCrash, match=r"delete .*key"),
        ):
            folder.delete("key")
        assert os.listdir(tmp_path) == left
    assert (tmp_path / "key.__lock").read_bytes() == b""


def test_crash_while_a_folder_is_cleared(folder, tmp_path):
    """Half of the keys are gone."""
    for key in "abcd":
        folder.write(f"x/{key}", b"1")
    with (
        testing.faults(testing.crash_at(1, "torn")),
        pytest.raises(testing.SimulatedCrash, match=r"empty .*x/"),
    ):
        folder.child("x").clear()
    assert sorted(os.listdir(tmp_path / "x")) == ["b", "d"]


def test_a_torn_write_is_what_a_killed_tensorstore_leaves(tmp_path):
    """A process is killed in the middle of a large write: the same files result."""
    script = f"""
import os, signal, resource
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
from orbax_delta.store import Folder
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
Folder({str(tmp_path / "killed")!r}).write("key", bytes(1 << 20))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert done.returncode < 0
    with (
        testing.faults(testing.crash_at(1, "torn")),
        pytest.raises(testing.SimulatedCrash, match="torn"),
    ):
        Folder(str(tmp_path / "simulated")).write("key", bytes(1 << 20))
    for name in ("killed", "simulated"):
        assert os.listdir(tmp_path / name) == ["key.__lock"]
        assert 0 < (tmp_path / name / "key.__lock").stat().st_size < 1 << 20


def test_crash_with_writes_in_flight(folder, tmp_path):
    """What had begun is there when the crash is raised, and its waiter learns of it."""
    with testing.faults(testing.crash_at(2)):
        pending = folder.start_write("begun", bytes(1 << 20))
        with pytest.raises(testing.SimulatedCrash, match="operation 2"):
            folder.start_write("never", b"")
        assert (tmp_path / "begun").stat().st_size == 1 << 20
        with pytest.raises(testing.SimulatedCrash, match="operation 2"):
            pending.result()
    assert os.listdir(tmp_path) == ["begun"]


def test_crash_cannot_be_caught_as_an_error():
    """No `except Exception` of the program hides it."""
    assert not issubclass(testing.SimulatedCrash, Exception)


# --- refusals, lost and damaged data ------------------------------------------------


def test_failing_once(folder, tmp_path):
    """A full disk, once: the caller sees the store's own error, no file appears."""
    rule = testing.fail(errno.ENOSPC, Match(kind="write", times=1))
    with testing.faults(rule):
        pending = folder.start_write("key", b"1")
        with pytest.raises(errors.StorageError, match=FULL):
            pending.result()
        assert os.listdir(tmp_path) == []
        folder.write("key", b"2")
    assert (tmp_path / "key").read_bytes() == b"2"


def test_errors_read_as_the_store_words_them(folder):
    """Each kind fails with the sentence that the store itself begins."""
    url = folder.url
    with testing.faults(testing.fail(errno.EIO)):
        for attempt, sentence in (
            (lambda: folder.write("k", b""), f"could not write {url}k: Input"),
            (lambda: folder.create("k", b""), f"could not create {url}k: Input"),
            (lambda: folder.read("k"), f"could not read {url}k: Input"),
            (
                lambda: folder.start_read("k", 3, 5).result(),
                f"could not read 5 bytes at 3 of {url}k: Input",
            ),
            (folder.names, f"could not list {url}: Input"),
            (folder.unfinished, f"could not list {url}: Input"),
            (
                lambda: folder.find("k", max_depth=1, skip=""),
                f"could not list {url}: Input",
            ),
            (lambda: folder.delete("k"), f"could not delete {url}k: Input"),
            (folder.clear, f"could not empty {url}: Input"),
        ):
            with pytest.raises(errors.StorageError, match="^" + sentence):
                attempt()


def test_lost_acknowledgement(folder, tmp_path):
    """It is on disk, and the caller is told that it failed."""
    with (
        testing.faults(testing.lose_acknowledgement(errno.ENOSPC)),
        pytest.raises(errors.StorageError, match=FULL),
    ):
        folder.write("key", b"1")
    assert (tmp_path / "key").read_bytes() == b"1"


def test_lost_writes(folder, tmp_path):
    """The caller is told that all is well, and nothing is on disk."""
    folder.write("old", b"1")
    lossy = testing.lose_write(Match(kind=("write", "create", "delete", "read")))
    with testing.faults(lossy):
        folder.write("key", b"1")
        assert folder.create("new", b"1")
        folder.delete("old")
        assert folder.read("old") == b"1"
    assert os.listdir(tmp_path) == ["old"]


def test_damage_to_what_is_written(folder, tmp_path):
    """One bit, or the end, differs on disk."""
    with testing.faults(testing.flip_bit(-1, Match(kind="write", times=1))):
        folder.write("key", b"\0\0")
        folder.write("whole", b"\0\0")
    assert (tmp_path / "key").read_bytes() == b"\0\x80"
    assert (tmp_path / "whole").read_bytes() == b"\0\0"
    with testing.faults(testing.flip_bit(17, Match(kind="write"))):
        folder.write("key", b"\0\0")
        folder.write("empty", b"")
    assert (tmp_path / "key").read_bytes() == b"\x02\0"
    assert (tmp_path / "empty").read_bytes() == b""
    with testing.faults(testing.truncate(0, Match(kind=("write", "create")))):
        folder.write("key", b"123")
        folder.create("new", b"123")
    assert (tmp_path / "key").read_bytes() == b""
    assert (tmp_path / "new").read_bytes() == b""


def test_damage_to_what_is_read(folder, tmp_path):
    """The file is right, what the caller gets is not."""
    folder.write("key", b"\0\0\0")
    with testing.faults(testing.flip_bit(9, Match(kind=("read", "range")))):
        assert folder.read("key") == b"\0\x02\0"
        assert folder.start_read("key", 1, 1).result().value == b"\x02"
        assert folder.start_read("none", 1, 1).result().state == "missing"
        assert folder.read("none") is None
    with testing.faults(testing.truncate(1, Match())):
        assert folder.read("key") == b"\0"
        assert folder.start_read("key", 1, 2).result().value == b"\0"
        assert folder.names() == ["key"]
    assert (tmp_path / "key").read_bytes() == b"\0\0\0"


# --- time and order -----------------------------------------------------------------


def test_delay(folder, tmp_path):
    """The function is called before the operation takes effect."""
    seen = []

    def look(operation):
        seen.append((operation.kind, os.listdir(tmp_path)))

    with testing.faults(testing.delay(look, Match(kind="write"))):
        folder.write("key", b"1")
        folder.read("key")
    assert seen == [("write", [])]
    assert os.listdir(tmp_path) == ["key"]


def test_out_of_order(folder, tmp_path):
    """A started write is there when later ones are, or when somebody waits for it."""
    with testing.faults(testing.out_of_order()):
        first, second, third = (folder.start_write(key, b"1") for key in "abc")
        assert os.listdir(tmp_path) == []
        second.result()
        assert sorted(os.listdir(tmp_path)) == ["b", "c"]
        folder.write("d", b"1")
        assert sorted(os.listdir(tmp_path)) == ["b", "c", "d"]
        first.result()
        third.result()
        assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "d"]
        folder.start_write("e", b"1")
    assert len(os.listdir(tmp_path)) == 5


def test_crash_out_of_order(folder, tmp_path):
    """Who dies has lost what nobody waited for."""
    with testing.faults(testing.crash_at(3), testing.out_of_order()):
        folder.start_write("begun", b"1")
        folder.write("whole", b"1")
        with pytest.raises(testing.SimulatedCrash, match="operation 3"):
            folder.names()
    assert os.listdir(tmp_path) == ["whole"]


def test_stale_listing(folder, tmp_path):
    """Listings know nothing of what came after; reads do."""
    for key in ("gone", "x/M", "x/N"):
        folder.write(key, b"1")
    with testing.faults(testing.stale_listing(1)):
        folder.write("early/M", b"1")
        folder.write("late/M", b"1")
        folder.create("created", b"1")
        folder.delete("gone")
        folder.child("x").clear()
        assert folder.names() == ["early/M", "gone", "x/M", "x/N"]
        assert folder.find("M", max_depth=1, skip="") == ["early/M", "x/M"]
        assert folder.child("x").names() == ["M", "N"]
        assert folder.read("late/M") == b"1"
        assert folder.read("gone") is None
    assert folder.names() == ["created", "early/M", "late/M"]


def test_stale_listing_of_some_folders(folder):
    """Folders that do not fit are listed as they are."""
    with testing.faults(testing.stale_listing(0, "*/old/")):
        for name in ("old", "new"):
            folder.child(name).write("key", b"1")
        assert folder.child("old").names() == []
        assert folder.child("new").names() == ["key"]


def test_a_rule_of_ones_own(folder):
    """Any function of a call and the way on is a rule."""

    def act(call, proceed):
        proceed(call).result()
        return testing.Done(b"mine")

    with testing.faults(testing.Rule(Match(kind="read"), lambda: act)):
        assert folder.read("none") == b"mine"
    assert folder.read("none") is None


def test_rules_are_nested_in_order(folder, tmp_path):
    """What the first one does not let through the second one does not see."""
    full = testing.fail(errno.ENOSPC, Match(kind="write", times=1))
    with testing.faults(full, testing.lose_write()):
        with pytest.raises(errors.StorageError, match=FULL):
            folder.write("key", b"1")
        folder.write("key", b"1")
    assert os.listdir(tmp_path) == []


def test_a_rule_begins_anew_in_each_block(folder):
    """The count of one block is not carried into the next."""
    rule = testing.fail(errno.ENOSPC, Match(times=1))
    for _ in range(2):
        with testing.faults(rule):
            with pytest.raises(errors.StorageError, match=FULL):
                folder.write("key", b"1")
            folder.write("key", b"1")


# --- lives --------------------------------------------------------------------------


def test_a_new_life_knows_the_one_before_to_be_dead():
    """Who was before is dead, who is now lives, others are what they are."""
    real = owners.this_process()
    other = owners.Owner(host=real.host, pid=os.getppid(), start="never")
    foreign = owners.Owner(host="elsewhere", pid=os.getpid(), start="")
    with testing.new_life() as start:
        first = owners.this_process()
        assert first.start == start
        assert (first.host, first.pid) == (real.host, real.pid)
        assert not first.known_dead
        assert real.known_dead
        with testing.new_life():
            assert first.known_dead
            assert not owners.this_process().known_dead
        assert not first.known_dead
        assert other.known_dead
        assert not foreign.known_dead
    with testing.new_life():
        assert first.known_dead
    assert not real.known_dead
    assert first.known_dead
    assert owners.this_process() == real


def test_a_crashed_store_is_found_again(tmp_path):
    """The example of the documentation in small: crash everywhere, then go on."""
    with testing.faults() as log:
        DeltaStore.open_or_create(Folder(str(tmp_path / "0")))
    count = len(log.operations)
    for number in range(1, count + 1):
        root = Folder(str(tmp_path / str(number)))
        with (
            testing.new_life(),
            testing.faults(testing.crash_at(number)),
            pytest.raises(testing.SimulatedCrash, match=f"operation {number} "),
        ):
            DeltaStore.open_or_create(root)
        with testing.new_life():
            uuid = DeltaStore.open_or_create(root).uuid
            assert DeltaStore.open(root).uuid == uuid


def test_documentation_runs():
    """The examples in the docstrings are true."""
    assert doctest.testmod(injection).failed == 0


def test_nothing_but_the_strategies_needs_hypothesis():
    """Faults, lives and the contract start without Hypothesis, pytest and jax."""
    script = (
        "import sys, orbax_delta.testing; "
        "print([m for m in ('hypothesis', 'pytest', 'jax') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"
