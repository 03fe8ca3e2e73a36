"""The folder of a step copied: whatever lies in it, its MANIFESTs last.

On a local disk the copy has a temporary name until it is whole. In a bucket, and where
a step comes back to a folder that is there, the MANIFESTs make it a step, and Orbax's
markers come after them. Does not belong here: packs of a store, pins.
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from orbax_delta import archived, records, steps
from orbax_delta.errors import (
    ConflictError,
    CorruptionError,
    DeltaError,
    StorageError,
)
from orbax_delta.manifests import MANIFEST_NAME, PART_NAME, Manifest, parse_manifest
from orbax_delta.packcopies import PackCopier, Span, records_of
from orbax_delta.places import SELF_CONTAINED_PACKS, TEMPORARY_SUFFIX
from orbax_delta.store import COMMIT_MARKER, Folder
from orbax_delta.storefiles import ARCHIVED_FILE

_logger = logging.getLogger("orbax_delta")

_PIECE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """The folder of a step.

    Attributes:
        name: The folder, in its root.
        items: MANIFESTs of its items, by their folder in that of the step; empty where
            that is the item's.
        others: Files of the folder that are none of these items'.
    """

    name: str
    items: Mapping[str, Manifest]
    others: Sequence[str]

    @classmethod
    def of(cls, root: Folder, name: str, items: Mapping[str, Manifest]) -> "StepFiles":
        """What there is to copy besides what MANIFESTs name.

        Raises:
            StorageError: The folder cannot be listed.
        """
        own = [f"{item}/".removeprefix("/") for item in items]
        others = [
            key
            for key in root.child(name).names()
            if not any(_is_of_item(key, item) for item in own)
        ]
        return cls(name=name, items=items, others=others)

    @property
    def contents(self) -> Sequence[str]:
        """Other files that are no markers."""
        return [key for key in self.others if not _is_marker(key)]

    @property
    def markers(self) -> Sequence[str]:
        """Markers, that of the step last."""
        found = [key for key in self.others if _is_marker(key)]
        return sorted(found, key=lambda key: (-key.count("/"), key))


def _is_marker(key: str) -> bool:
    return key.rpartition("/")[2] == COMMIT_MARKER


def _is_of_item(key: str, item: str) -> bool:
    """Whether a file is one of an item's own, which MANIFEST and rows tell of."""
    name = key.removeprefix(item)
    if not key.startswith(item):
        return False
    own = name in (MANIFEST_NAME, ARCHIVED_FILE) or PART_NAME.fullmatch(name)
    return bool(own) or name.startswith(f"{SELF_CONTAINED_PACKS}/")


def copy(
    source: Folder,
    target: Folder,
    files: StepFiles,
    *,
    confirm: Callable[[], None],
) -> int:
    """Copy the folder of a step between two roots; returns the bytes written.

    Args:
        source: The root that it is in.
        target: The root that it goes to.
        files: What there is of it.
        confirm: Called when all is there but a name, or a marker; if it raises, the
            step is taken back.

    Raises:
        ConflictError: Another step has that name, or the step is not there any more.
        CorruptionError: A file is not what its MANIFEST says.
        StorageError: The storage refused something.
    """
    with _translated(files.name):
        if target.is_local and not os.path.lexists(target.url + files.name):
            return _copy_aside(source, target, files, confirm)
        return _copy_in_place(source, target, files, confirm)


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except DeltaError:
        raise
    except FileNotFoundError as error:
        raise ConflictError(f"a file was deleted meanwhile: {error}") from error
    except OSError as error:
        raise StorageError(f"could not copy the files of step {name}: {error}") from (
            error
        )


def _copy_aside(
    source: Folder, target: Folder, files: StepFiles, confirm: Callable[[], None]
) -> int:
    """Under a temporary name, which counts as a step to a prune and to nobody else."""
    temporary = Path(target.url, f"{files.name}{TEMPORARY_SUFFIX}")
    origin, copied = source.child(files.name), Folder(str(temporary))
    with _emptied(temporary):
        written = _copy_contents(origin, copied, [*files.contents, *files.markers])
        written += _copy_items(origin, copied, files.items)
        for folder, _, _ in os.walk(temporary, topdown=False):
            _sync_folder(Path(folder))
        confirm()
        _rename(temporary, Path(target.url, files.name))
    return written


@contextlib.contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """A folder without what a killed run has left in it, which is gone after a failure.

    Self-contained steps have no store whose pin could tell of another process. A lock
    does, and goes with whoever has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(folder, descriptor)
        for name in os.listdir(folder):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield
        except (DeltaError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _lock(folder: Path, descriptor: int) -> None:
    """Have a folder alone.

    Raises:
        ConflictError: Another process has it, or had it and has renamed it.
    """
    alone = False
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            _logger.warning("%s knows no locks: %s", folder, error)
        alone = os.path.samestat(os.fstat(descriptor), os.stat(folder))
    if not alone:
        raise ConflictError(f"another process is copying the step to {folder} too")


def _rename(temporary: Path, final: Path) -> None:
    try:
        temporary.rename(final)
    except OSError as error:
        raise ConflictError(
            f"another process has written {final} meanwhile, which was left as it is "
            f"({error})"
        ) from error
    _sync_folder(final.parent)


def _copy_in_place(
    source: Folder, target: Folder, files: StepFiles, confirm: Callable[[], None]
) -> int:
    origin, copied = source.child(files.name), target.child(files.name)
    written = _copy_contents(origin, copied, files.contents)
    written += _copy_items(origin, copied, files.items)
    try:
        confirm()
    except ConflictError:
        for item in files.items:
            _item(copied, item).delete(MANIFEST_NAME)
        raise
    return written + _mark(origin, copied, files)


def mark(source: Folder, target: Folder, files: StepFiles) -> None:
    """Write the markers of a step whose copy was broken off just before them."""
    _mark(source.child(files.name), target.child(files.name), files)


def _mark(origin: Folder, copied: Folder, files: StepFiles) -> int:
    """Markers, that of the step last.

    A bucket has no renames, so that Orbax asks for a marker there: in the folder of the
    step, and in that of each item.
    """
    written = _copy_contents(origin, copied, files.markers)
    if not copied.is_local and COMMIT_MARKER not in files.markers:
        folders = {key.partition("/")[0] for key in files.others if "/" in key}
        for folder in sorted({*files.items, *folders} - {""}):
            if f"{folder}/{COMMIT_MARKER}" not in files.markers:
                copied.write(f"{folder}/{COMMIT_MARKER}", b"")
        copied.write(COMMIT_MARKER, b"")
    return written


def _item(step: Folder, item: str) -> Folder:
    return step.child(item) if item else step


def _copy_items(origin: Folder, copied: Folder, items: Mapping[str, Manifest]) -> int:
    """Parts of all items, then their MANIFESTs."""
    written = 0
    for item, manifest in items.items():
        here, there = _item(origin, item), _item(copied, item)
        if manifest.self_contained:
            needed = needed_records(manifest, here)
            written += copy_own_packs(here, there, needed, strict=False)
        for part in manifest.parts:
            data = here.read(part.name)
            if data is None or records.digest(data).hex() != part.digest:
                what = "is missing" if data is None else "has another digest"
                raise CorruptionError(f"the part {here.url}{part.name} {what}")
            written += _put(there, part.name, data)
    for item, manifest in items.items():
        here, there = _item(origin, item), _item(copied, item)
        data = here.read(MANIFEST_NAME)
        where = here.url + MANIFEST_NAME
        if data is None or parse_manifest(data, where=where).attempt != (
            manifest.attempt
        ):
            raise ConflictError(f"{where} was deleted or replaced meanwhile")
        written += _put_manifest(there, manifest, data)
    return written


def needed_records(manifest: Manifest, item: Folder) -> dict[str, set[Span]]:
    """Every pack that a MANIFEST names, with the records that its rows need.

    Raises:
        CorruptionError: A part is missing or damaged.
        FormatError: A part is none.
    """
    found = records_of(steps.read_rows(item, manifest))
    return {pack: found.get(pack, set()) for pack in manifest.packs}


def copy_own_packs(
    here: Folder, there: Folder, needed: Mapping[str, set[Span]], *, strict: bool
) -> int:
    """Copy the packs of a self-contained item; returns the bytes written."""
    copier = PackCopier(
        here.child(SELF_CONTAINED_PACKS), there.child(SELF_CONTAINED_PACKS)
    )
    return sum(copier.bring(needed, strict=strict))


def _put(folder: Folder, key: str, data: bytes) -> int:
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


def _put_manifest(folder: Folder, manifest: Manifest, data: bytes) -> int:
    if folder.create(MANIFEST_NAME, data):
        if folder.read(MANIFEST_NAME) != data:
            raise StorageError(f"{folder.url}{MANIFEST_NAME} does not read back")
        return len(data)
    there = steps.read_manifest(folder)
    if there is None or not archived.is_same_save(there, manifest):
        raise ConflictError(f"{folder.url} holds another step, which was left as it is")
    return 0


# --- files of others ------------------------------------------------------------------


def _copy_contents(origin: Folder, copied: Folder, keys: Sequence[str]) -> int:
    return sum(_copy_file(origin, copied, key) for key in keys)


def _copy_file(origin: Folder, copied: Folder, key: str) -> int:
    above, _, name = key.rpartition("/")
    here, there = (_item(folder, above) for folder in (origin, copied))
    fresh = there.is_local and not os.path.lexists(there.url + name)
    if here.is_local and fresh:
        return _stream(Path(here.url, name), Path(there.url, name))
    data = here.read(name)
    if data is None:
        raise ConflictError(f"{here.url}{name} was deleted meanwhile")
    return _put(there, name, data)


def _stream(source: Path, target: Path) -> int:
    """Copy a file of any size, durably, and read it back."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}{TEMPORARY_SUFFIX}")
    with source.open("rb") as read, partial.open("wb") as write:
        shutil.copyfileobj(read, write, _PIECE_BYTES)
        write.flush()
        os.fsync(write.fileno())
    partial.replace(target)
    _sync_folder(target.parent)
    if not _are_equal(source, target):
        raise StorageError(f"{target} does not read back as it was written")
    return target.stat().st_size


def _are_equal(one: Path, other: Path) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        while piece := left.read(_PIECE_BYTES):
            if right.read(_PIECE_BYTES) != piece:
                return False
        return not right.read(1)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
