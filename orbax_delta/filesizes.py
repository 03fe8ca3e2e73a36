"""How large the files of a folder are: a disk tells, of a bucket our own are asked.

TensorStore lists names without sizes. Packs are written once and say how large they are
at their end; everything else of ours is small. Does not belong here: what they are for.
"""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator

from orbax_delta import records
from orbax_delta.errors import CorruptionError
from orbax_delta.manifests import MANIFEST_NAME, PACK_NAME, PART_NAME
from orbax_delta.store import STORE_NAME, Folder
from orbax_delta.storefiles import ARCHIVED_FILE

_READS_AT_ONCE = 32


def file_sizes(folder: Folder) -> dict[str, int]:
    """Bytes of the files below a folder, by their path in it.

    Of a bucket only those of this package; what vanishes meanwhile is left out.

    Raises:
        StorageError: The storage failed.
    """
    if folder.is_local:
        return dict(_on_disk(folder.url.rstrip("/") or "/"))
    keys = folder.names()
    packs = [key for key in keys if _is_pack(key)]
    small = [key for key in keys if not _is_pack(key) and _is_own(key)]
    read = ((key, folder.read(key)) for key in small)
    sizes = {key: len(data) for key, data in read if data is not None}
    return sizes | dict(_of_packs(folder, packs))


def pack_sizes(packs: Folder, names: Iterable[str]) -> dict[str, int]:
    """Bytes of those packs of a folder that are there, by name.

    One of a bucket that does not end like a pack is taken for one that is not there.

    Raises:
        StorageError: The storage failed.
    """
    if not packs.is_local:
        return dict(_of_packs(packs, names))
    sizes = {}
    for name in names:
        with contextlib.suppress(OSError):
            sizes[name] = os.stat(packs.url + name).st_size
    return sizes


def _on_disk(top: str) -> Iterator[tuple[str, int]]:
    for where, _, names in os.walk(top):
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(OSError):  # a live run deletes and renames
                yield os.path.relpath(path, top), os.lstat(path).st_size


def _is_pack(key: str) -> bool:
    above, _, name = key.rpartition("/")
    return above.rpartition("/")[2] == "packs" and bool(PACK_NAME.fullmatch(name))


def _is_own(key: str) -> bool:
    name = key.rpartition("/")[2]
    ours = name in (MANIFEST_NAME, ARCHIVED_FILE) or PART_NAME.fullmatch(name)
    return bool(ours) or key.startswith(f"{STORE_NAME}/")


def _of_packs(folder: Folder, keys: Iterable[str]) -> Iterator[tuple[str, int]]:
    length = records.PACK_END_BYTES
    rest = iter(keys)
    while batch := list(itertools.islice(rest, _READS_AT_ONCE)):
        reads = [folder.start_read(key, -length, length) for key in batch]
        for key, read in zip(batch, reads):
            got = read.result()
            # What is no pack any more has no size; a verification tells of it.
            with contextlib.suppress(CorruptionError):
                if got.state == "value":
                    yield key, records.pack_bytes(bytes(got.value))
