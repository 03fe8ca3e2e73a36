"""A disk without room: prune is what makes some, so it must not need any to begin."""

import errno

import pytest
import strategies
from strategies import STORE, packs_on_disk

from orbax_delta import cli, owners, prune
from orbax_delta.errors import StorageError
from orbax_delta.marks import Mark
from orbax_delta.store import DeltaStore, Folder

DEAD = [f"{number:032x}-p0-0" for number in range(3)]


class Full:
    """Lets nothing be written into a folder until something has been deleted."""

    def __init__(self, monkeypatch, url, needed):
        self._needed = needed
        start_write, delete = Folder.start_write, Folder.delete

        def refusing(folder, key, data):
            if folder.url == url and self._needed:
                raise StorageError(
                    f"could not write {folder.url}{key}: [Errno {errno.ENOSPC}] "
                    "No space left on device"
                )
            return start_write(folder, key, data)

        def freeing(folder, key):
            there = folder.read(key) is not None
            delete(folder, key)
            self._needed = max(0, self._needed - there)

        monkeypatch.setattr(Folder, "start_write", refusing)
        monkeypatch.setattr(Folder, "delete", freeing)


@pytest.fixture
def store(root, monkeypatch):
    """A store with three dead packs."""
    strategies.skip_disk_sync(monkeypatch)
    store = DeltaStore.open_or_create(Folder(str(root)))
    for name in DEAD:
        store.packs.write(name, b"dead")
    return store


def put_stale(store, folder, name):
    """A pin or mark of a process that runs no more."""
    me = owners.this_process()
    dead = owners.Owner(host=me.host, pid=(1 << 31) - 1, start=me.start)
    folder.write(name, Mark(owner=dead, packs=[]).encode())


def test_no_room_for_a_condemned_mark(store, root, monkeypatch):
    """Nothing is deleted, no half mark stays, and the error says how to make room."""
    Full(monkeypatch, store.condemned.url, needed=1)
    with pytest.raises(
        StorageError,
        match=r"could not write .*condemned/\w+: .*No space left.*none of 3 dead ones "
        r"was deleted\. .*make a little room .*\*\.orbax-checkpoint-tmp\) and prune",
    ):
        prune.execute(store, prune.plan(store))
    assert packs_on_disk(root) == set(DEAD)
    assert store.condemned.names() == []
    monkeypatch.undo()
    assert list(prune.execute(store, prune.plan(store))) == DEAD


@pytest.mark.parametrize("folder", ["pins", "condemned"])
def test_room_that_stale_files_give(store, root, monkeypatch, folder):
    """What dead processes left is deleted first: that alone may be room enough."""
    ending = {"pins": "-p0", "condemned": ""}[folder]
    for number in range(2):
        put_stale(store, getattr(store, folder), f"{number:032x}{ending}")
    planned = prune.plan(store)
    assert len(planned.stale) == 2
    Full(monkeypatch, store.condemned.url, needed=2)
    assert list(prune.execute(store, planned)) == DEAD
    assert packs_on_disk(root) == set()
    assert store.condemned.names() == store.pins.names() == []


def test_no_room_on_the_command_line(store, root, monkeypatch, capsys):
    """The error and its exit code are the storage's; a dry run needs no room."""
    Full(monkeypatch, store.condemned.url, needed=1)
    assert cli.main(["prune", str(root), "--dry-run"]) == 0
    assert cli.main(["prune", str(root)]) == StorageError.exit_code
    assert "make a little room" in capsys.readouterr().err
    assert packs_on_disk(root) == set(DEAD)


def test_a_mark_that_was_written_although_it_failed(store, root, monkeypatch):
    """A write that fails late leaves no mark that holds savers up for ever."""
    start_write = Folder.start_write

    def late(folder, key, data):
        pending = start_write(folder, key, data)
        if folder.url == store.condemned.url:
            pending.result()
            raise StorageError(f"could not write {folder.url}{key}: timed out")
        return pending

    monkeypatch.setattr(Folder, "start_write", late)
    with pytest.raises(StorageError, match="timed out"):
        prune.execute(store, prune.plan(store))
    assert list((root / STORE / "condemned").iterdir()) == []
