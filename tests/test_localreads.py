"""Ranges of local files: what TensorStore gives, byte for byte, without it."""

import os

import hypothesis.strategies as st
import pytest
from hypothesis import given

from orbax_delta import localreads
from orbax_delta.errors import StorageError
from orbax_delta.store import Folder

SIZE = 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one file of `SIZE` bytes and one that is empty."""
    made = Folder(str(tmp_path_factory.mktemp("local")))
    made.write("a", os.urandom(SIZE))
    made.write("none", b"")
    return made


def outcome(folder, key, offset, length):
    """What a read gives, or how it fails."""
    try:
        got = folder.start_read(key, offset, length).result()
    except StorageError as error:
        return "OUT_OF_RANGE" in str(error), f"{length} bytes at {offset}" in str(error)
    return got.state, bytes(got.value)


@given(
    key=st.sampled_from(["a", "a", "none", "absent", "sub/absent", "../a", "..", ""]),
    offset=st.integers(0, SIZE + 10),
    length=st.integers(0, SIZE + 10),
)
def test_the_same_as_through_tensorstore(folder, key, offset, length):
    """Any range of any key: state, bytes, and how it fails."""
    own = outcome(folder, key, offset, length)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(localreads, "SUPPORTED", False)
        assert own == outcome(folder, key, offset, length)


def test_short_reads_are_continued(folder, monkeypatch):
    """A system that gives less than it was asked for is asked again."""
    whole = folder.read("a")
    pread = os.pread

    def little(file, count, offset):
        return pread(file, min(count, 7), offset)

    monkeypatch.setattr(os, "pread", little)
    assert folder.start_read("a", 5, 100).result().value == whole[5:105]
    with pytest.raises(StorageError, match=r"OUT_OF_RANGE: the file ends at 3000 or"):
        folder.start_read("a", SIZE - 10, 20).result()


def test_what_the_system_refuses(folder, tmp_path):
    """A folder in a file's place: the operation, the file and the reason are named."""
    (tmp_path / "sub").mkdir()
    read = Folder(str(tmp_path)).start_read("sub", 0, 4)
    with pytest.raises(StorageError, match=r"read 4 bytes at 0 of .*/sub: .*irectory"):
        read.result()


def test_no_file_stays_open(folder, monkeypatch):
    """However many ranges are under way, read or failed."""
    opened = []
    real_open, real_close = os.open, os.close

    def counted_open(*arguments):
        opened.append(real_open(*arguments))
        return opened[-1]

    def counted_close(file):
        opened.remove(file)
        real_close(file)

    monkeypatch.setattr(os, "open", counted_open)
    monkeypatch.setattr(os, "close", counted_close)
    under_way = [folder.start_read("a", n, 9) for n in range(100)]
    under_way += [folder.start_read("absent", 0, 1)]
    assert not opened
    for read in under_way:
        read.result()
    with pytest.raises(StorageError, match="OUT_OF_RANGE"):
        folder.start_read("none", 0, 1).result()
    assert not opened
