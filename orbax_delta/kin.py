"""Kin: what other runs and items already have in the same store, found by content.

An item without a base (the first save of a run) refers to chunks that another root, or
another item of its root, has stored: its newest step, or the one of the same number,
with which a branch begins. Their packs are pinned before they are looked at, and bytes
are compared before a chunk is shared: a digest only says where to look. Does not belong
here: copies within one save (`changes`).
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence, Set

import numpy as np

from orbax_delta import chunks, keys, prune, reader, registry, steps
from orbax_delta.background import Pool
from orbax_delta.changes import ContentKey, Finding, Status, content_key
from orbax_delta.dtypes import Rule
from orbax_delta.errors import DeltaError
from orbax_delta.manifests import Manifest
from orbax_delta.options import DeltaOptions
from orbax_delta.parts import Ref, Row
from orbax_delta.places import TEMPORARY_SUFFIX, Place, locate
from orbax_delta.ranges import Packs
from orbax_delta.sealing import Key
from orbax_delta.store import DeltaStore, Folder

_logger = logging.getLogger("orbax_delta")

MAX_CANDIDATES = 1_000_000
"""Most contents that are looked for: what a save may keep in memory for this."""

_STEP_KEY_PARTS = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Relative:
    """A step of another root or item."""

    place: Place
    manifest: Manifest

    def is_sealed_with(self, key: Key | None) -> bool:
        return keys.is_of(key, self.manifest.encryption, self.manifest.attempt)


class Kin:
    """Steps of other roots and items that use a store.

    Args:
        packs: Where the records lie.
        relatives: Those steps, newest first.
    """

    def __init__(self, packs: Packs, relatives: Sequence[_Relative]) -> None:
        self._packs = packs
        self._relatives = relatives
        self._gone: Set[str] = frozenset()

    @classmethod
    def of(cls, store: DeltaStore, place: Place, key: Key | None) -> "Kin":
        """Look for them; what cannot be read is logged and left out.

        Args:
            store: The store.
            place: What is to be saved.
            key: What it is sealed with; what is sealed otherwise is left out.
        """
        found: list[_Relative] = []
        try:
            found += _relatives(store.root, store.uuid, place.step, but=place.item)
            for root in registry.reachable(store):
                found += _relatives(root, store.uuid, place.step)
        except DeltaError as error:
            _logger.warning("chunks of other runs are not looked for: %s", error)
        found = [one for one in found if one.is_sealed_with(key)]
        found.sort(key=lambda one: one.manifest.wall_time, reverse=True)
        return cls(Packs(folder=store.packs, key=key), found)

    def packs(self) -> set[str]:
        """What the steps found need: to be pinned before `share` relies on it."""
        return {pack for one in self._relatives for pack in one.manifest.packs}

    def forget_packs(self, gone: Set[str]) -> None:
        """Rely on none of these."""
        self._gone = gone

    def share(
        self, findings: Sequence[Finding], options: DeltaOptions, executor: Pool
    ) -> tuple[list[Finding], int]:
        """Mark as shared what is stored already.

        Returns:
            The findings in order, and the bytes read to compare.
        """
        if not self._relatives:
            return list(findings), 0
        wanted: dict[ContentKey, Finding] = {}
        for finding in findings:
            if finding.status is Status.CHANGED and finding.chunk.stored is None:
                wanted.setdefault(content_key(finding), finding)
        lists = self._lists(wanted.keys(), options)
        requests = {
            _place(wanted[key]): _request(wanted[key], lists[key]) for key in lists
        }
        found = {_place(finding): finding for finding in wanted.values()}
        count = reader.ReadCount()
        shared: dict[tuple[int, chunks.Box], Finding] = {}
        for got in reader.fetch(
            self._packs, requests.values(), executor=executor, count=count
        ):
            row = got.request.row
            finding = found[row.leaf, row.box]
            if got.content is None:
                _logger.warning("%s; writing the chunk in full", got.error)
            elif np.array_equal(got.content, finding.chunk.content()):
                shared[row.leaf, row.box] = dataclasses.replace(
                    finding, status=Status.SHARED, refs=row.refs
                )
        marked = [shared.get(_place(finding), finding) for finding in findings]
        return marked, count.bytes

    def _lists(
        self, wanted: Set[ContentKey], options: DeltaOptions
    ) -> dict[ContentKey, tuple[Ref, ...]]:
        """A list of records for each wanted content that one of the steps has."""
        found: dict[ContentKey, tuple[Ref, ...]] = {}
        for one in self._relatives if wanted else ():
            try:
                rows = steps.read_rows(one.place.folder, one.manifest)
            except DeltaError as error:
                _logger.warning("what %s has is not shared: %s", one.place.label, error)
                continue
            for row in rows:
                key = _key_of(row, one.manifest)
                # One record less than allowed: another chunk may build on it.
                room = len(row.refs) <= max(1, options.max_chain - 1)
                usable = row.rule is Rule.NONE and room
                whole = usable and not any(ref.pack in self._gone for ref in row.refs)
                if whole and key in wanted and len(found) < MAX_CANDIDATES:
                    found.setdefault(key, row.refs)
        return found


def _relatives(
    root: Folder, store_uuid: str, step: int | None, but: str | None = None
) -> list[_Relative]:
    """Of each item of a root the newest step, and the one of a certain number.

    Args:
        root: The root.
        store_uuid: Identity of the store; steps that have their packs elsewhere are
            left out.
        step: That number; None: there is none.
        but: Item that is left out.
    """
    newest: dict[str, Place] = {}
    namesakes: list[Place] = []
    for place in _places(root):
        if place.item == but:
            continue
        known = newest.get(place.item)
        if known is None or _number(place) > _number(known):
            newest[place.item] = place
        if step is not None and place.step == step:
            namesakes.append(place)
    older = [place for place in namesakes if place != newest[place.item]]
    found = []
    for place in (*newest.values(), *older):
        try:
            manifest = steps.read_manifest(place.folder)
        except DeltaError as error:
            _logger.warning("what %s has is not shared: %s", place.label, error)
            continue
        if manifest is not None and manifest.store_uuid == store_uuid:
            found.append(_Relative(place=place, manifest=manifest))
    return found


def _places(root: Folder) -> Iterator[Place]:
    """Finished steps; others may go at any time, and those in a trash will."""
    for key in prune.step_keys(root):
        path, _, _ = key.rpartition("/")
        place = locate(root.url + path)
        finished = TEMPORARY_SUFFIX not in key
        if finished and len(key.split("/")) == _STEP_KEY_PARTS and place.root_url:
            yield place


def _number(place: Place) -> int:
    return -1 if place.step is None else place.step


def _key_of(row: Row, manifest: Manifest) -> ContentKey:
    element = manifest.leaves[row.leaf].element
    size = element.content_bytes(chunks.element_count(row.box))
    return row.digest, size, element.word_bytes


def _place(finding: Finding) -> tuple[int, chunks.Box]:
    return finding.chunk.leaf_index, finding.chunk.box


def _request(finding: Finding, refs: tuple[Ref, ...]) -> reader.Request:
    """How to read what is stored, as if it were this chunk."""
    leaf_index, box = _place(finding)
    row = Row(
        leaf=leaf_index,
        box=box,
        digest=finding.digest,
        rule=Rule.NONE,
        refs=refs,
        since=0,
        age=0,
    )
    return reader.Request(leaf=finding.chunk.leaf, row=row)
