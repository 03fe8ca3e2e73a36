"""Disk and memory keep what the format asks of storage; broken stores are found out."""

import dataclasses
import errno
import os
import secrets
import threading

import pytest
import strategies

from orbax_delta import testing
from orbax_delta.store import Folder
from orbax_delta.testing import Match, contract

WRITTEN = Match(kind=("write", "create"))


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@pytest.fixture(params=["disk", "memory"])
def url(request, tmp_path):
    """A new place of each kind."""
    if request.param == "disk":
        return str(tmp_path / "store")
    return f"memory://{secrets.token_hex(8)}/run"


@pytest.mark.parametrize("name", testing.CONTRACT)
def test_requirement(url, name):
    """Each requirement by itself, on an empty folder."""
    testing.CONTRACT[name](Folder(url))


def test_check_store(url, tmp_path):
    """All of them at once; what was there stays, nothing is left over."""
    Folder(url).write("mine", b"1")
    testing.check_store(url)
    assert Folder(url).names() == ["mine"]
    if "://" not in url:
        assert os.listdir(url) == ["mine"]


def test_check_store_with_synced_writes(tmp_path, monkeypatch):
    """The same as users run it, with every write forced to the disk."""
    monkeypatch.undo()
    for name in ("write, then read", "exclusive create", "delete", "whole writes"):
        testing.CONTRACT[name](Folder(str(tmp_path)).child(name.replace(" ", "")))


BROKEN = {
    "lost writes": (testing.lose_write(), "write, then read: .*lacks what was just"),
    "one lost write": (
        testing.lose_write(Match(kind="write", url="*/k07")),
        "writes begun together: k07 is not there",
    ),
    "lost create": (
        testing.lose_write(Match(kind="create")),
        "exclusive create: a key that exists was created again",
    ),
    "lost deletes": (
        testing.lose_write(Match(kind="delete")),
        "delete: a deleted key still has a value",
    ),
    "cut writes": (testing.truncate(1000, WRITTEN), "large values: .*not read back"),
    "cut reads": (
        testing.truncate(70, Match(kind="range")),
        "ranges: bytes 0 to 100 of 100 are others",
    ),
    "a flipped bit in a write": (
        testing.flip_bit(-5, WRITTEN),
        "write, then read: a key lacks what was just written",
    ),
    "a flipped bit in a large read": (
        testing.flip_bit(1 << 26, Match(kind="read", url="*/large")),
        "large values: .*not read back",
    ),
    "a flipped bit in a range": (
        testing.flip_bit(3, Match(kind="range")),
        "ranges: bytes .* are others",
    ),
    "stale listings": (testing.stale_listing(0), "complete listing: .* not listed"),
    "refused writes": (
        testing.fail(errno.EDQUOT, Match(kind="write", first=2)),
        "write, then read: could not write .*: Disk quota exceeded",
    ),
    "lost acknowledgements": (
        testing.lose_acknowledgement(errno.EIO, Match(kind="create")),
        "exclusive create: could not create .*: Input/output error",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_store_is_found_out(url, fault, monkeypatch):
    """A store with that fault is refused, and the requirement is named."""
    rule, message = BROKEN[fault]
    only(monkeypatch, message)
    with (
        testing.faults(rule),
        pytest.raises(AssertionError, match=f"cannot hold checkpoints; {message}"),
    ):
        testing.check_store(url)


def only(monkeypatch, message):
    """Try only the requirement that `message` begins with, to save time."""
    name = message.partition(":")[0]
    requirement = {name: testing.CONTRACT[name]}
    monkeypatch.setattr(contract, "CONTRACT", requirement)


def _rival(call, proceed):
    """A store whose create looks and then writes: the rivals all win."""
    with call.log.unseen():
        key = call.operation.url.removeprefix(call.folder.url)
        if call.folder.read(key) is not None and not key.startswith("race"):
            return testing.Done(False)
        call.folder.write(key, call.data)
    return testing.Done(True)


def _neighbour(call, proceed):
    """A store that lists by prefix of the url, so that `3` takes in `33`."""
    names = proceed(call).result()
    with call.log.unseen():
        near = Folder(call.folder.url.rstrip("/") + "3").names()
    return testing.Done(sorted([*names, *near]))


def _lazy(call, proceed):
    """A store that lists no more than the first thousand keys."""
    return testing.Done(proceed(call).result()[:1000])


def _short(call, proceed):
    """A store that answers a range past the end with what there is."""
    with call.log.unseen():
        whole = call.folder.read(call.operation.url.removeprefix(call.folder.url))
    if whole is None:
        return proceed(call)
    start, size = call.operation.offset, call.operation.size

    class Short:
        state = "value"
        value = whole[start : start + size]

    return testing.Done(Short())


def _eager_find(call, proceed):
    """A store that looks at every depth and into what is to be skipped."""
    with call.log.unseen():
        return testing.Done(
            [key for key in call.folder.names() if key.endswith(call.sought)]
        )


OWN = {
    "create without a condition": (
        "create",
        _rival,
        "exclusive create: . of 8 created one key at once",
    ),
    "a listing by prefix": (
        "list",
        _neighbour,
        "complete listing: a folder lists keys of its neighbour",
    ),
    "the first page only": ("list", _lazy, "complete listing: 1100 keys are not"),
    "short ranges": ("range", _short, "ranges: 5 bytes at 98 of 100 came back as 2"),
    "a find that finds all": ("find", _eager_find, "find: to depth 0 were found"),
}


def test_every_broken_requirement_is_named(url):
    """One fault can break several; all are told."""
    with (
        testing.faults(testing.lose_write(Match(kind="write"))),
        pytest.raises(
            AssertionError, match=r"write, then read: .*; delete: .*; find: "
        ),
    ):
        testing.check_store(url)


@pytest.mark.parametrize("fault", OWN)
def test_a_store_of_another_kind_is_found_out(url, fault, monkeypatch):
    """Stores as they might be built, each wrong in one way."""
    kind, act, message = OWN[fault]
    only(monkeypatch, message)
    with (
        testing.faults(testing.Rule(Match(kind=kind), lambda: act)),
        pytest.raises(AssertionError, match=f"cannot hold checkpoints; {message}"),
    ):
        testing.check_store(url)


def test_a_store_that_writes_in_two_steps_is_found_out(url):
    """Half of a value is there for a moment, and somebody looks in that moment."""
    seen = threading.Event()

    def write(call, proceed):
        half = call.data[: len(call.data) // 2]
        proceed(dataclasses.replace(call, data=half)).result()
        assert seen.wait(timeout=60)
        return proceed(call)

    def read(call, proceed):
        value = proceed(call).result()
        if len(value) in (1 << 19, 3 << 19):
            seen.set()
        return testing.Done(value)

    with (
        testing.faults(
            testing.Rule(Match(kind="write", first=2), lambda: write),
            testing.Rule(Match(kind="read"), lambda: read),
        ),
        pytest.raises(AssertionError, match="a reader saw a value that nobody wrote"),
    ):
        testing.CONTRACT["whole writes"](Folder(url))
