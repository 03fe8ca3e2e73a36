"""Files copied from one folder to another, durably, and read back.

Of any size between local disks; to and from a bucket one at a time as a whole. Does not
belong here: which files a step has.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from orbax_delta import localwrites
from orbax_delta.errors import ConflictError, StorageError
from orbax_delta.places import TEMPORARY_SUFFIX
from orbax_delta.store import Folder

_PIECE_BYTES = 1 << 20


def inner(folder: Folder, path: str) -> Folder:
    """The folder of a path inside another one; itself where that is empty."""
    return folder.child(path) if path else folder


def copy_files(origin: Folder, copied: Folder, keys: Sequence[str]) -> int:
    """Copy files that nobody else writes; returns the bytes written.

    Raises:
        ConflictError: One was deleted meanwhile, or is there with other content.
        StorageError: One does not read back as it was written.
        OSError: A local disk refused something.
    """
    return sum(_copy_file(origin, copied, key) for key in keys)


def put(folder: Folder, key: str, data: bytes) -> int:
    """Write a file that nobody else writes; what is there already must be the same."""
    found = folder.read(key)
    if found is not None and found != data:
        raise ConflictError(
            f"{folder.url}{key} is there with other content and was left as it is. "
            "Another step lies there, or a file was changed: delete it, or choose "
            "another folder"
        )
    if found is None:
        folder.replace(key, data)
    return 0 if found is not None else len(data)


def _copy_file(origin: Folder, copied: Folder, key: str) -> int:
    above, _, name = key.rpartition("/")
    here, there = (inner(folder, above) for folder in (origin, copied))
    fresh = there.is_local and not os.path.lexists(there.url + name)
    if here.is_local and fresh:
        return _stream(Path(here.url, name), Path(there.url, name))
    data = here.read(name)
    if data is None:
        raise ConflictError(f"{here.url}{name} was deleted meanwhile")
    return put(there, name, data)


def _stream(source: Path, target: Path) -> int:
    """Copy a file of any size, durably, and read it back."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}{TEMPORARY_SUFFIX}")
    with source.open("rb") as read, partial.open("wb") as write:
        shutil.copyfileobj(read, write, _PIECE_BYTES)
        write.flush()
        os.fsync(write.fileno())
    partial.replace(target)
    localwrites.sync_folder(target.parent)
    if not _are_equal(source, target):
        raise StorageError(f"{target} does not read back as it was written")
    return target.stat().st_size


def _are_equal(one: Path, other: Path) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        while piece := left.read(_PIECE_BYTES):
            if right.read(_PIECE_BYTES) != piece:
                return False
        return not right.read(1)
