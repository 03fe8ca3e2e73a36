"""What FORMAT.md, section 1.3, asks of storage, as functions that try it.

`check_store` is for whoever wants to keep checkpoints on a file system or bucket that
this package was not tested with. Each requirement works on an empty folder of its own
and says in words what was broken. What cannot be tried from one process is not: power
cuts, and other hosts.
"""

import concurrent.futures
import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbax_delta.errors import DeltaError, StorageError
from orbax_delta.store import Folder

_LARGE = 17 << 20
_MANY = 1100  # more than a bucket lists at once
_AT_ONCE = 50

ODD_KEYS = (
    *("x y", "ü", "a#b", "a?b", "100%", "%41", "q[1]*", "-", "~1", "+", "=", "a.b"),
    *("日本", "a/b c/d", ".hidden", "x" * 200),
)
"""Keys that a step or an item of a user may lead to."""


def _demand(holds: bool, found: str) -> None:
    # Not `assert`: this has to work under `python -O` too.
    if not holds:
        raise AssertionError(found)


def written_is_read(folder: Folder) -> None:
    """What was written is read back at once, also through another folder."""
    for data in (b"", b"\0\xff", bytes(range(256)) * 300):
        folder.write("deep/er/key", data)
        _demand(folder.read("deep/er/key") == data, "a key lacks what was just written")
        again = Folder(folder.url).child("deep").child("er").read("key")
        _demand(again == data, "another folder does not see what was just written")
    folder.write("deep/er/other", b"1")
    folder.write("deep/er/other", b"12")
    _demand(folder.read("deep/er/other") == b"12", "a key holds not what came last")
    _demand(folder.read("deep/er/key") != b"12", "writing one key changed another")
    _demand(folder.read("none") is None, "a key that was never written has a value")
    _demand(folder.read("deep") is None, "a part of a key is a key")


def started_writes_are_there(folder: Folder) -> None:
    """Of writes begun together each is there once it has been waited for."""
    values = {f"k{number:02}": secrets.token_bytes(4000) for number in range(20)}
    begun = {key: folder.start_write(key, data) for key, data in values.items()}
    for key, pending in begun.items():
        pending.result()
        _demand(folder.read(key) == values[key], f"{key} is not there when waited for")


def large_values(folder: Folder) -> None:
    """A value larger than a pack is whole, and has its ranges."""
    data = secrets.token_bytes(1 << 20) * (_LARGE >> 20)
    folder.write("large", data)
    _demand(folder.read("large") == data, f"{len(data)} bytes are not read back")
    _ranges_agree(folder, "large", data, [(0, 1), (_LARGE // 3, 1 << 20)])


def _ranges_agree(
    folder: Folder, key: str, data: bytes, ranges: Sequence[tuple[int, int]]
) -> None:
    for offset, length in ranges:
        got = folder.start_read(key, offset, length).result()
        _demand(
            got.state == "value" and bytes(got.value) == data[offset : offset + length],
            f"bytes {offset} to {offset + length} of {len(data)} are others",
        )


def ranges(folder: Folder) -> None:
    """A range is exactly its bytes; one past the end is an error, never short."""
    data = bytes(range(100))
    folder.write("key", data)
    _ranges_agree(folder, "key", data, [(0, 100), (10, 5), (99, 1), (0, 1)])
    for offset, length in ((98, 5), (200, 5), (0, 101)):
        try:
            got = folder.start_read("key", offset, length).result()
        except StorageError:
            continue
        raise AssertionError(
            f"{length} bytes at {offset} of 100 came back as {len(bytes(got.value))}"
        )
    missing = folder.start_read("none", 3, 5).result()
    _demand(missing.state == "missing", "a range of no key is not told apart")


def writes_are_whole(folder: Folder) -> None:
    """Who reads while a key is written sees a whole value, never a mixture."""
    values = [secrets.token_bytes(1) * size for size in (1 << 20, 3 << 20)]
    folder.write("key", values[0])
    ended = threading.Event()
    seen: list[bytes | None] = []

    def look() -> None:
        while not ended.is_set():
            value = folder.read("key")
            if value not in values:
                seen.append(value)
                return

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(look) for _ in range(2)]
        try:
            for number in range(12):
                folder.write("key", values[(number + 1) % 2])
        finally:
            ended.set()
        for reader in readers:
            reader.result()
    sizes = [None if value is None else len(value) for value in seen]
    _demand(not seen, f"a reader saw a value that nobody wrote, of size {sizes}")


def create_is_exclusive(folder: Folder) -> None:
    """Of those who create a key at once exactly one succeeds; its value stays."""
    _demand(folder.create("alone", b"1"), "a new key cannot be created")
    _demand(not folder.create("alone", b"2"), "a key that exists was created again")
    _demand(folder.read("alone") == b"1", "who lost has changed the key")
    folder.write("written", b"1")
    _demand(not folder.create("written", b"2"), "a written key was created again")
    rivals = 8
    with concurrent.futures.ThreadPoolExecutor(rivals) as pool:
        for round_ in range(5):
            key, barrier = f"race{round_}", threading.Barrier(rivals)

            def create(number: int, key: str = key, at: Any = barrier) -> bool:
                at.wait()
                return folder.create(key, b"%d" % number)

            won = [n for n, mine in enumerate(pool.map(create, range(rivals))) if mine]
            _demand(len(won) == 1, f"{len(won)} of {rivals} created one key at once")
            _demand(
                folder.read(key) == b"%d" % won[0], "the winner's value is not there"
            )


def listing_is_complete(folder: Folder) -> None:
    """Every key whose write has returned is listed, sorted, and no other."""
    _demand(folder.names() == [], "a folder in which nothing was written has keys")
    keys = [f"{number % 7}/{number:05}" for number in range(_MANY)]
    for start in range(0, _MANY, _AT_ONCE):
        begun = [folder.start_write(key, b"") for key in keys[start : start + _AT_ONCE]]
        for pending in begun:
            pending.result()
    _demand(folder.names() == sorted(keys), f"{_MANY} keys are not listed in order")
    for key in keys[::100]:
        folder.delete(key)
        _demand(key not in folder.names(), "a deleted key is listed")
        folder.write(key, b"again")
        _demand(key in folder.names(), "a key that was just written is not listed")
    below = [key.removeprefix("3/") for key in sorted(keys) if key.startswith("3/")]
    _demand(folder.child("3").names() == below, "a folder inside lists other keys")
    folder.write("33/key", b"")
    _demand(folder.child("3").names() == below, "a folder lists keys of its neighbour")
    _demand(folder.unfinished() == [], "a finished write has left something")


def deleting(folder: Folder) -> None:
    """A deleted key is gone at once; deleting none is no error; others stay."""
    for key in ("a", "ab", "b/a"):
        folder.write(key, b"1")
    for _ in range(2):
        folder.delete("a")
        _demand(folder.read("a") is None, "a deleted key still has a value")
        _demand(folder.names() == ["ab", "b/a"], "a deletion took or left others")
    folder.delete("never/there")
    folder.write("a", b"2")
    _demand(folder.read("a") == b"2", "a deleted key cannot be written again")


def odd_keys(folder: Folder) -> None:
    """Any character is allowed in a key."""
    for key in ODD_KEYS:
        folder.write(f"odd/{key}", key.encode())
    for key in ODD_KEYS:
        found = folder.read(f"odd/{key}")
        _demand(found == key.encode(), f"the key {key!r} is not kept apart")
    names = folder.names()
    _demand(names == sorted(f"odd/{key}" for key in ODD_KEYS), f"listed: {names}")
    for key in ODD_KEYS:
        folder.delete(f"odd/{key}")
    _demand(folder.names() == [], "a key cannot be deleted")


def finding(folder: Folder) -> None:
    """Keys are found by their last name: as deep as asked, not in what is skipped."""
    for key in ("M", "1/M", "1/a/M", "1/a/b/M", "no/M", "1/no/M", "1/M2", "1/xM"):
        folder.write(key, b"")
    for depth, expected in ((0, 1), (1, 2), (2, 3), (5, 4)):
        found = sorted(folder.find("M", max_depth=depth, skip="no"))
        wanted = sorted(["M", "1/M", "1/a/M", "1/a/b/M"][:expected])
        _demand(found == wanted, f"to depth {depth} were found {found}, not {wanted}")
    _demand(
        not folder.find("none", max_depth=5, skip="no"), "what is not there is found"
    )


CONTRACT: Mapping[str, Callable[[Folder], None]] = {
    "write, then read": written_is_read,
    "writes begun together": started_writes_are_there,
    "large values": large_values,
    "ranges": ranges,
    "whole writes": writes_are_whole,
    "exclusive create": create_is_exclusive,
    "complete listing": listing_is_complete,
    "delete": deleting,
    "odd keys": odd_keys,
    "find": finding,
}
"""Requirements by name; each is tried on an empty folder."""


def check_store(url: str) -> None:
    """Try every requirement in a new folder below `url`, which is emptied again.

    Args:
        url: A path, or a TensorStore URL such as `gs://bucket/folder`.

    Raises:
        AssertionError: The storage breaks requirements; names each with what was found.
        StorageError: There is no such storage, or it cannot be opened.
    """
    base = Folder(url).child(f"orbax_delta_check_{secrets.token_hex(8)}")
    broken = []
    for number, (name, requirement) in enumerate(CONTRACT.items()):
        folder = base.child(str(number))
        try:
            requirement(folder)
        except (AssertionError, DeltaError, OSError) as error:
            broken.append(f"{name}: {error}")
        finally:
            with contextlib.suppress(StorageError):
                folder.clear()
    with contextlib.suppress(StorageError):
        base.clear()
    if broken:
        raise AssertionError(f"{url} cannot hold checkpoints; " + "; ".join(broken))
