"""A step opened for reading: MANIFEST, rows and the folder that holds its packs."""

import collections
import contextlib
import dataclasses
import gc
import logging
import operator
import os
import time
from collections.abc import Iterator, Sequence

from orbax_delta import archived, chunks, dtypes, keys, parts, records
from orbax_delta.base import Base
from orbax_delta.errors import (
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from orbax_delta.manifests import (
    MANIFEST_NAME,
    LeafEntry,
    Manifest,
    PartEntry,
    parse_manifest,
    process_of,
)
from orbax_delta.options import MAX_CHUNK_BYTES
from orbax_delta.parts import Row
from orbax_delta.places import (
    MAX_MANIFEST_DEPTH,
    SELF_CONTAINED_PACKS,
    Place,
    locate,
)
from orbax_delta.ranges import Packs
from orbax_delta.reports import SaveReport
from orbax_delta.sealing import Key, fingerprint
from orbax_delta.store import STORE_NAME, DeltaStore, Folder
from orbax_delta.storefiles import ARCHIVED_FILE, ROOT_FILE, STORE_FILE, Archived

_logger = logging.getLogger("orbax_delta")

_DELETION_SECONDS = 0.1
_RULE_AND_BOX = operator.attrgetter("rule", "box")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One item of one step, with everything needed to read it.

    Attributes:
        place: Where it lies; of a step that was moved to an archive, there.
        manifest: Its MANIFEST.
        rows: All of its rows; every element of every leaf lies in exactly one box.
        packs: Where its records lie.
        root_url: Root of its store, also of a step that was moved to a trash; None for
            a self-contained one.
    """

    place: Place
    manifest: Manifest
    rows: Sequence[Row]
    packs: Packs
    root_url: str | None

    def as_base(self) -> Base:
        """What the next save finds stored after this step."""
        return Base.of_step(
            self.manifest.leaves,
            self.rows,
            store_uuid=self.manifest.store_uuid,
            key=fingerprint(self.packs.key),
            save_index=self.manifest.save_index,
            predecessor={
                "step": self.place.step_name,
                "attempt": self.manifest.attempt,
            },
        )


def open_step(wanted: Place) -> Step:
    """Open an item of a step, which may have been moved to an archive.

    Raises:
        NotFoundError: There is no MANIFEST, or no store above the step is its own.
        FormatError: MANIFEST, part or store is damaged.
        WrongKeyError: It is encrypted, and this process does not know its key.
        UnsupportedVersionError: A newer format wrote something of it.
        CorruptionError: A digest does not match, or the rows do not cover the leaves.
    """
    place, manifest = _require_manifest(wanted)
    if None not in (place.step, manifest.step) and place.step != manifest.step:
        _logger.warning(
            "%s was saved as step %s; its folder was renamed, or another step was "
            "copied over it",
            place.label,
            manifest.step,
        )
    if place.item != manifest.item and not manifest.self_contained:
        _logger.warning(
            "%s was saved as item %r; its folder was renamed, or another item was "
            "copied over it",
            place.label,
            manifest.item,
        )
    store = store_of(manifest, place)
    try:
        rows = read_rows(place.folder, manifest)
    except CorruptionError:
        again = find_manifest(wanted)
        if again is None or again == (place, manifest):
            raise
        # Meanwhile a repair has replaced it, or it was moved; the old part has gone.
        place, manifest = again
        store, rows = store_of(manifest, place), read_rows(place.folder, manifest)
    return Step(
        place=place,
        manifest=manifest,
        rows=rows,
        packs=Packs(
            folder=store.packs if store else place.folder.child(SELF_CONTAINED_PACKS),
            key=key_of(manifest, place.folder),
        ),
        root_url=store.root.url.rstrip("/") if store else None,
    )


def let_deletions_end() -> None:
    """Wait a moment before a step in which something is missing is called damaged.

    A deletion takes one file after the other: half of it reads as damage.
    """
    time.sleep(_DELETION_SECONDS)


def is_gone(item: Folder, attempt: str | None = None) -> bool:
    """Whether a step has been deleted, or saved again.

    Args:
        item: Folder of the item.
        attempt: What its MANIFEST said; None: that does not matter.

    Raises:
        StorageError: The storage failed.
        FormatError: There is a MANIFEST, which cannot be read.
        CorruptionError: The same.
    """
    manifest = read_manifest(item)
    if manifest is None:  # or is it in an archive?
        return item.read(ARCHIVED_FILE) is None
    return attempt is not None and manifest.attempt != attempt


def _require_manifest(place: Place) -> tuple[Place, Manifest]:
    found = find_manifest(place)
    if found is None:
        raise NotFoundError(
            f"{place.label} holds no {MANIFEST_NAME}; it was not saved by orbax_delta, "
            "or its deletion was interrupted"
        )
    return found


def find_manifest(place: Place) -> tuple[Place, Manifest] | None:
    """The MANIFEST of an item and where it is: here, or in an archive.

    None where there is neither a MANIFEST nor a link to an archive.

    Raises:
        NotFoundError: The archive is not there, or the step is not in it.
        FormatError: MANIFEST or link is damaged, or names what can be no place.
        UnsupportedVersionError: A newer format wrote it.
        CorruptionError: Its digest does not match.
        StorageError: The archive cannot be reached.
    """
    manifest = read_manifest(place.folder)
    if manifest is not None:
        return place, manifest
    link = archived.read(place.folder)
    if link is None:
        # It may just have been brought back: that removes the link last.
        manifest = read_manifest(place.folder)
        return None if manifest is None else (place, manifest)
    return _followed(place, link)


def _followed(place: Place, link: Archived) -> tuple[Place, Manifest]:
    """The MANIFEST that a link leads to, in an archive or the archive of that."""
    for _ in range(archived.MOST_MOVES):
        there = archived.place_of(link)
        try:
            manifest = read_manifest(there.folder)
            further = archived.read(there.folder) if manifest is None else None
        except StorageError as error:
            raise archived.unreachable(place, link, error) from error
        except InvalidInputError as error:
            # Nobody has given that place: it is the file that is wrong.
            wrong = FormatError(str(error))
            raise archived.unreachable(place, link, wrong) from error
        if manifest is not None and archived.leads_to(link, manifest):
            return there, manifest
        if manifest is not None:
            raise archived.lost(place, link, "which holds another save of that step")
        if further is None:
            raise archived.lost(place, link, f"which holds no {MANIFEST_NAME} there")
        link = further
    raise archived.lost(place, link, "which leads to yet another archive")


def read_manifest(item: Folder) -> Manifest | None:
    """The MANIFEST of an item's directory, or None where there is none.

    Raises:
        FormatError: It is damaged.
        UnsupportedVersionError: A newer format wrote it.
        CorruptionError: Its digest does not match.
    """
    data = item.read(MANIFEST_NAME)
    if data is None:
        return None
    return parse_manifest(data, where=item.url + MANIFEST_NAME)


def key_of(manifest: Manifest, item: Folder) -> Key | None:
    """The key of a step, if it is encrypted.

    Raises:
        WrongKeyError: This process does not know it.
    """
    return keys.key_of(manifest.encryption, manifest.attempt, item.url.rstrip("/"))


def packs_of(manifest: Manifest, place: Place) -> Folder:
    """The folder that holds the packs of a step.

    Raises:
        NotFoundError: No folder above the step holds or names its store.
        FormatError: The nearest store is damaged.
    """
    store = store_of(manifest, place)
    return store.packs if store else place.folder.child(SELF_CONTAINED_PACKS)


def store_of(manifest: Manifest, place: Place) -> DeltaStore | None:
    """The store of a step; None for a self-contained one.

    A step keeps its store whether it lies in the root, was moved to a trash folder
    below it or is still being written: the nearest store of that identity counts.

    Raises:
        NotFoundError: No folder above the step holds or names its store.
        FormatError: The nearest store is damaged.
    """
    if manifest.self_contained:
        return None
    others = []
    for store in _stores(place):
        if store is not None and store.uuid == manifest.store_uuid:
            return store
        if store is not None:
            others.append(f"{store.url} is store {store.uuid}")
    lost = ROOT_FILE if manifest.root_uuid else STORE_FILE
    raise NotFoundError(
        f"{place.folder.url} needs store {manifest.store_uuid}, which is not above it"
        + (f" ({'; '.join(others)})" if others else "")
        + ". The step was moved or copied without its store; when it was saved the "
        f"store was {manifest.store_url}. Put the step back under the folder that "
        f"holds that {STORE_NAME}, or copy that {STORE_NAME} beside the step. If it is "
        f"there and has lost its {lost}, `orbax-delta repair` writes it anew"
    )


def _stores(place: Place) -> Iterator[DeltaStore | None]:
    """Stores that may be that of a step, nearest first."""
    url = place.item_url.rstrip("/")
    if place.opened is not None and place.root_url is not None:
        # A kept base of a shared store lies in that, wherever the root is.
        yield DeltaStore.open(Folder(place.root_url))
    for _ in range(MAX_MANIFEST_DEPTH):
        url = url.rpartition("/")[0]
        if not url or url.endswith(":/"):
            break
        yield DeltaStore.open(Folder(url))
    above, _, kind = place.item_url.rstrip("/").rpartition("/")[0].rpartition("/")
    if kind == "bases":
        # Such a base, whatever root it is of.
        yield DeltaStore.of_folder(Folder(above), Folder(above))


def _read_part(item: Folder, part: PartEntry) -> bytes:
    data = item.read(part.name)
    if data is None:
        raise CorruptionError(f"the part {item.url}{part.name} is missing")
    if len(data) != part.length or records.digest(data).hex() != part.digest:
        raise CorruptionError(
            f"the part {item.url}{part.name} holds {len(data)} bytes with digest "
            f"{records.digest(data).hex()}; expected {part.length} with {part.digest}"
        )
    return data


def read_rows(item: Folder, manifest: Manifest) -> list[Row]:
    """All rows of a MANIFEST, from the parts beside it; no store is looked for.

    Raises:
        CorruptionError: A part is missing, or is not what the MANIFEST says.
        FormatError: A part is none.
        WrongKeyError: It is encrypted, and this process does not know its key.
        UnsupportedVersionError: A newer format wrote it.
    """
    with _no_cycles():
        return _read_rows(item, manifest)


@contextlib.contextmanager
def _no_cycles() -> Iterator[None]:
    """Let Python not look for cycles: millions of rows hold none.

    It would traverse all of them again and again while they are made, which takes
    longer than to make them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_rows(item: Folder, manifest: Manifest) -> list[Row]:
    words, key = manifest.word_sizes(), key_of(manifest, item)
    rows: list[Row] = []
    for part in manifest.parts:
        data = _read_part(item, part)
        try:
            rows += parts.parse_part(
                data,
                attempt=bytes.fromhex(manifest.attempt),
                rows=part.rows,
                packs=[manifest.packs[index] for index in part.packs],
                words=words,
                process=process_of(part.name),
                key=key,
            )
        except (CorruptionError, FormatError) as error:
            raise type(error)(f"{item.url}{part.name}: {error}") from error
    _check_cover(item, manifest, rows)
    return rows


def _check_cover(item: Folder, manifest: Manifest, rows: Sequence[Row]) -> None:
    """Every element of every leaf lies in a row; a leaf without rows is an error."""
    by_leaf: dict[int, list[Row]] = collections.defaultdict(list)
    for row in rows:
        by_leaf[row.leaf].append(row)
    # Layers are alike: what has been found right once is not computed again.
    right = set()
    for index, leaf in enumerate(manifest.leaves):
        found = by_leaf.get(index, [])
        seen = leaf.shape, leaf.dtype, tuple(map(_RULE_AND_BOX, found))
        if leaf.dtype and seen not in right:
            _check_leaf(item, leaf, found)
            right.add(seen)


def _check_leaf(item: Folder, leaf: LeafEntry, rows: Sequence[Row]) -> None:
    for row in rows:
        inside = len(row.box) == len(leaf.shape) and all(
            0 <= start < stop <= size
            for (start, stop), size in zip(row.box, leaf.shape, strict=True)
        )
        if not inside:
            raise CorruptionError(
                f"{item.url}: a row places a chunk at {row.box} of leaf {leaf.name}, "
                f"whose shape is {leaf.shape}"
            )
        content_bytes = leaf.element.content_bytes(chunks.element_count(row.box))
        if dtypes.source_bytes(row.rule, content_bytes) > MAX_CHUNK_BYTES:
            raise CorruptionError(
                f"{item.url}: a row places a chunk of {content_bytes} bytes at "
                f"{row.box} of leaf {leaf.name}; no record holds more than "
                f"{MAX_CHUNK_BYTES}"
            )
    whole = chunks.whole(leaf.shape)
    boxes = [row.box for row in rows]
    if not chunks.tile(boxes, whole):
        covered = sum(map(chunks.element_count, boxes))
        raise CorruptionError(
            f"{item.url}: the rows of leaf {leaf.name} cover {covered} of "
            f"{chunks.element_count(whole)} elements, or some of them twice"
        )


def save_report(directory: str | os.PathLike[str]) -> SaveReport:
    """The report kept with a step.

    Args:
        directory: A step's directory with one item, or an item's directory.

    Raises:
        NotFoundError: There is no MANIFEST, or there are several; or the step was moved
            to an archive and is not there.
    """
    folder = Folder(os.fspath(directory))
    names = (MANIFEST_NAME, ARCHIVED_FILE)
    try:
        found = folder.find(names, max_depth=1, skip=STORE_NAME)
    except FileNotFoundError as error:
        raise NotFoundError(f"{folder.url} is not there") from error
    items = sorted({key.rpartition("/")[0] for key in found})
    if len(items) != 1:
        raise NotFoundError(
            f"{folder.url} holds {len(items)} items with a {MANIFEST_NAME} {items}; "
            "name the directory of one step and item"
        )
    item_url = f"{folder.url}{items[0]}".rstrip("/")
    place, manifest = _require_manifest(locate(item_url))
    where = f"{place.item_url}/{MANIFEST_NAME}"
    return SaveReport.from_document(manifest.report, where=where)
