"""What of a folder's files is in memory, and how to get it out. Linux alone."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

_MEMORY_ONLY = ("tmpfs", "ramfs")
_PAGES_APART = 1 << 20
_TRIES = 5


def in_memory(folder: pathlib.Path) -> bool:
    """Whether a folder lies in a file system without a disk."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[2] == wanted:
            return line.partition(" - ")[2].split()[0] in _MEMORY_ONLY
    return False


def drop(folder: pathlib.Path) -> bool:
    """Drops the files of a folder from the page cache; returns whether that worked."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for _ in range(_TRIES):
        for path in files:
            with _opened(path) as file:
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_share(files) < 0.05:
            return True
    return False


def cached_share(files: list[pathlib.Path]) -> float:
    """Returns the share of pages that are in memory, by looking at one in a MiB."""
    found = []
    for path in files:
        with _opened(path) as file:
            places = range(0, os.fstat(file).st_size, _PAGES_APART)
            found += [_is_cached(file, place) for place in places]
    return sum(found) / max(len(found), 1)


def _is_cached(file: int, place: int) -> bool:
    try:
        os.preadv(file, [bytearray(1)], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)
