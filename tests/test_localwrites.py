"""Large local files: whole or not there, like what TensorStore writes."""

import itertools
import os

import hypothesis.strategies as st
import pytest
from hypothesis import given

from orbax_delta import localwrites
from orbax_delta.errors import StorageError
from orbax_delta.store import Folder

LARGE = os.urandom(localwrites.LEAST_BYTES)


@pytest.fixture
def folder(tmp_path):
    """One that is not there yet."""
    return Folder(str(tmp_path / "made" / "by writing"))


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("data", [LARGE, LARGE[1:], b""], ids=["large", "less", "none"])
def test_the_same_as_through_tensorstore(folder, monkeypatch, supported, data):
    """Folders are made, the key reads back, nothing else is left."""
    monkeypatch.setattr(localwrites, "SUPPORTED", supported)
    folder.write("key", data)
    assert folder.read("key") == data
    assert folder.names() == ["key"]
    assert folder.unfinished() == []
    path = os.path.join(folder.url, "key")
    assert os.stat(path).st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_several_at_once(folder):
    """Each comes about for itself; results may be waited for in any order."""
    begun = [folder.start_write(str(i), LARGE + bytes([i])) for i in range(4)]
    for pending in reversed(begun):
        pending.result()
    for i in range(4):
        assert folder.read(str(i)) == LARGE + bytes([i])


def test_pieces(folder):
    """Many small ones, large ones, none that is empty is missed."""
    pieces = [LARGE, b"", *(bytes([i]) for i in range(200)), memoryview(LARGE)[5:9]]
    for large in (pieces, pieces[1:]):
        folder.start_write("key", large).result()
        assert folder.read("key") == b"".join(large)


@given(
    sizes=st.lists(st.integers(0, 40), max_size=30),
    most=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    together=st.integers(1, 9),
)
def test_a_system_that_writes_less_than_it_is_given(sizes, most, together):
    """It may at any time; what is left follows, and nothing comes twice."""
    pieces = [bytes([i]) * size for i, size in enumerate(sizes)]
    written, turns = bytearray(), itertools.cycle(most)

    def writev(_, given):
        some = b"".join(given)[: next(turns)]
        written.extend(some)
        return len(some)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", writev)
        patch.setattr(localwrites, "_MOST_PIECES", together)
        localwrites._write_all(0, pieces)
    assert bytes(written) == b"".join(pieces)


def test_a_refusal_leaves_nothing_behind(folder, monkeypatch):
    """As a full disk: the error says what was written where."""

    def refusing(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.raises(StorageError, match=r"could not write /.*key: .*No space left"):
        folder.write("key", LARGE)
    assert os.listdir(folder.url) == []


def test_what_a_killed_writer_left_is_no_part_of_the_next(folder):
    """A longer rest of an earlier attempt at the same key."""
    os.makedirs(folder.url)
    with open(f"{folder.url}key{localwrites.UNFINISHED}", "wb") as rest:
        rest.write(LARGE * 2)
    assert folder.unfinished() == ["key"]
    folder.write("key", LARGE)
    assert folder.read("key") == LARGE
    assert folder.unfinished() == []
