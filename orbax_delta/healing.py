"""Healing: the content of a damaged chunk from another list of records.

A chunk that was written anew (a refresh, a full record, a kept base) has lists in
several packs, and every row says by its digest what its list yields. So where one list
is damaged, any other row of the root with that digest will do. Does not belong here:
writing anything back.
"""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from orbax_delta import listing, reader, registry, steps
from orbax_delta.codecs import Bytes
from orbax_delta.errors import CorruptionError, DeltaError, StorageError
from orbax_delta.listing import Item, Root
from orbax_delta.parts import Row
from orbax_delta.ranges import Packs
from orbax_delta.reader import Fetched, Request
from orbax_delta.steps import Step

_logger = logging.getLogger("orbax_delta")

Wanted = tuple[bytes, int]
"""Digest and size of a content."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Another list of records that yields a content, as was just seen.

    Attributes:
        step: Folder of the step or base whose row names that list.
        packs: Where the records lie.
        request: A chunk with that list.
    """

    step: str
    packs: Packs
    request: Request

    def read(self) -> Bytes:
        """The content, checked against the digest; not kept, it can be much.

        Raises:
            CorruptionError: It was damaged or deleted since.
            StorageError: The storage failed.
        """
        return reader.read_one(self.packs, self.request)


def wanted(request: Request) -> Wanted:
    """What a chunk's content is known by."""
    return request.row.digest, request.content_bytes


def find(root: Root, damaged: Iterable[Request]) -> dict[Wanted, Found]:
    """Look through all steps and kept bases of a root, newest first.

    Then through those of the other roots that use its store and can be reached.

    Args:
        root: The root.
        damaged: Chunks whose own list does not yield what their row says.

    Returns:
        What was found; nothing for chunks that no other list yields.
    """
    tried: dict[Wanted, set[object]] = {}
    for request in damaged:
        tried.setdefault(wanted(request), set()).add(_list_of(request.row))
    found: dict[Wanted, Found] = {}
    for name, item in _everywhere(root):
        step = _open(item)
        if step is None:
            continue
        for row in step.rows:
            request = Request(leaf=step.manifest.leaves[row.leaf], row=row)
            key = wanted(request)
            if key not in tried or key in found or _list_of(row) in tried[key]:
                continue
            tried[key].add(_list_of(row))
            if _decodes(step, request):
                found[key] = Found(step=name, packs=step.packs, request=request)
        if len(found) == len(tried):
            break
    return found


def _everywhere(root: Root) -> Iterator[tuple[str, Item]]:
    """Steps and bases with their names; other roots are read only if need be."""
    yield from ((item.step, item) for item in reversed(root.everything))
    for folder in registry.reachable(root.store):
        try:
            found = listing.read_root(folder.url.rstrip("/"))
        except DeltaError as error:
            _logger.warning("could not look for records in another root: %s", error)
            continue
        for item in reversed(found.everything):
            yield folder.url + item.step, item


def _list_of(row: Row) -> object:
    return row.refs, row.rule


def _open(item: Item) -> Step | None:
    if item.manifest is None:
        return None
    try:
        return steps.open_step(item.place)
    except DeltaError:
        return None  # damaged too, or it has just been deleted: it cannot help


def _decodes(step: Step, request: Request) -> bool:
    try:
        reader.read_one(step.packs, request)
    except (CorruptionError, StorageError):
        return False  # the next list may be better
    return True


def _find_in_root(step: Step, damaged: Sequence[Request]) -> Mapping[Wanted, Found]:
    if step.root_url is None:
        return {}
    try:
        return find(listing.read_root(step.root_url), damaged)
    except DeltaError as error:
        # It must not hide the damage that was found first.
        _logger.error("could not look for other records: %s", error)
        return {}


def heal(step: Step, failing: Sequence[Fetched]) -> Mapping[Wanted, Found]:
    """Content for every chunk that failed, from other lists of the same root.

    Raises:
        CorruptionError: A chunk is damaged and no other list yields its content.
        StorageError: The same, where the storage did not give the records.
    """
    found = _find_in_root(step, [got.request for got in failing])
    lost = [got for got in failing if wanted(got.request) not in found]
    if lost:
        first = lost[0].error
        kind = StorageError if isinstance(first, StorageError) else CorruptionError
        more = f" (and {len(lost) - 1} more chunks)" if len(lost) > 1 else ""
        raise kind(
            f"{step.place.label}: {first}{more}; no other record of the root holds "
            "that content. `orbax-delta verify` tells what else is damaged"
        ) from first
    sources = sorted({one.step for one in found.values()})
    _logger.error(
        "%s: %d chunks are damaged (first: %s); their content was found in the "
        "records of %s. `orbax-delta repair %s` writes it back",
        step.place.label,
        len(failing),
        failing[0].error,
        ", ".join(sources),
        step.root_url,
    )
    return found
