"""Saving: from a snapshot to a committed MANIFEST, top to bottom.

Order of writes: pin, packs, part, MANIFEST. The MANIFEST makes the step; if the pin is
gone by then, a prune may have missed this save and the MANIFEST is withdrawn. What is
remembered of the stored state moves on only after that.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orbax_delta import changes, codecs, coding, fields, parts, records, upkeep
from orbax_delta.background import Pool, Stopwatch, ordered_map, pool
from orbax_delta.base import Base
from orbax_delta.bases import BasePlan, Kept
from orbax_delta.changes import Finding, Status
from orbax_delta.errors import (
    ConflictError,
    DeltaError,
    InvalidInputError,
    StorageError,
)
from orbax_delta.leaves import Snapshot, snapshot
from orbax_delta.manifests import (
    MANIFEST_NAME,
    Json,
    Manifest,
    PartEntry,
    encode_manifest,
)
from orbax_delta.options import DeltaOptions
from orbax_delta.packs import PackWriter
from orbax_delta.parts import Row
from orbax_delta.places import SELF_CONTAINED_PACKS, Place
from orbax_delta.reports import SaveReport, chain_lengths
from orbax_delta.rows import SaveRows
from orbax_delta.store import DeltaStore, Folder
from orbax_delta.upkeep import ItemState

_logger = logging.getLogger("orbax_delta")

_PROCESS = 0
_BLOCK_BYTES = codecs.BLOCK_BYTES
_VERSIONED = ("orbax-delta", "orbax-checkpoint", "jax", "tensorstore", "numpy")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One save, as fixed in the blocking phase."""

    snapshot: Snapshot
    custom_metadata: Json
    place: Place
    options: DeltaOptions
    started: float
    wall_time: float
    blocking_seconds: float


def prepare(
    tree: Any, place: Place, options: DeltaOptions, *, custom_metadata: Json = None
) -> SaveRequest:
    """The blocking phase: everything comes to the host, nothing touches a file.

    Raises:
        InvalidInputError: A leaf or the metadata cannot be stored.
    """
    started = time.perf_counter()
    try:
        text = json.dumps(custom_metadata, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"custom_metadata is not JSON: {error}") from error
    if not fields.is_shallow(metadata := json.loads(text)):
        raise InvalidInputError(
            "custom_metadata is not JSON that a MANIFEST holds: it is nested more than "
            f"{fields.MAX_METADATA_DEPTH} deep; flatten it"
        )
    taken = snapshot(tree)
    return SaveRequest(
        snapshot=taken,
        # Not the object itself: the caller may change it as soon as save returns.
        custom_metadata=metadata,
        place=place,
        options=options,
        started=started,
        wall_time=time.time(),
        blocking_seconds=time.perf_counter() - started,
    )


def run(request: SaveRequest, state: ItemState) -> SaveReport:
    """Write one step; on return it is durable and committed.

    Raises:
        StorageError: The storage refused something; nothing of this save counts.
        ConflictError: A prune took this save for dead; nothing of it counts.
    """
    if request.place.root_url is None:
        # Nothing outside the step may be needed to read it: no store, all full.
        packs = Folder(request.place.item_url).child(SELF_CONTAINED_PACKS)
        return _Attempt(request, ItemState(), None, packs).run()
    with state.lock:
        store = DeltaStore.open_or_create(Folder(request.place.root_url))
        if state.base.store_uuid != store.uuid:
            state.base = Base(store_uuid=store.uuid)
        state.store = store
        if state.seen is None:
            # The save before this one failed, perhaps for want of room.
            upkeep.tidy(store, state, request.options, saved=None)
        seen, state.seen = state.seen, None
        attempt = _Attempt(request, state, store, store.packs)
        report = attempt.run()
        if attempt.manifest is not None:
            upkeep.keep_base(
                store, state, attempt.base_plan, attempt.manifest, attempt.item
            )
        state.seen = seen
        upkeep.tidy(store, state, request.options, saved=request.place)
        if attempt.let_go:
            # Its own pin still holds these; they can only go after the next save.
            state.seen = None
    return report


class _Attempt:
    """One try of one save; its names are used by no other.

    Attributes:
        let_go: Packs that its pin names and its rows no longer need.
        manifest: What it published; None before that.
        base_plan: What then becomes of the store's bases.
    """

    def __init__(
        self,
        request: SaveRequest,
        state: ItemState,
        store: DeltaStore | None,
        packs: Folder,
    ) -> None:
        self.id = secrets.token_bytes(16)
        self.pin = f"{self.id.hex()}-p{_PROCESS}"
        self.request = request
        self.state = state
        self.base = state.base
        self.store = store
        self.packs = packs
        self.item = Folder(request.place.item_url)
        self.watch = Stopwatch()
        self.let_go: set[str] = set()
        self.manifest: Manifest | None = None
        self.base_plan = BasePlan(take=False, release=(), copies=1)

    def run(self) -> SaveReport:
        """The whole save."""
        with self._pinned(), self._undone_on_failure():
            with pool(self.request.options.worker_count) as executor:
                stored, written = self._store_chunks(executor)
            rows = [entry.row for entry in stored.entries]
            with self.watch.stage("part"):
                part, packs = self._put_part(rows)
            self._plan_base(packs)
            report = self._report(stored, rows, written + part.length)
            with self.watch.stage("manifest"):
                self._commit(report, part, packs)
        self.base.commit(
            zip(
                (finding.chunk.leaf for finding in stored.findings),
                stored.entries,
                strict=True,
            ),
            store_uuid=self.store.uuid if self.store else "",
            predecessor={
                "step": self.request.place.step_name,
                "attempt": self.id.hex(),
            },
        )
        _logger.info("%s", report.line())
        return report

    def _pinned(self) -> contextlib.AbstractContextManager[None]:
        if self.store is None:
            return contextlib.nullcontext()
        needed = self.let_go = self.base.packs()
        return upkeep.pinned(self.store, self.state, self.pin, needed)

    @contextlib.contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.base.abort()
            raise

    def _store_chunks(self, executor: Pool) -> tuple[SaveRows, int]:
        """Compare, code and put every chunk."""
        options = self.request.options
        with self.watch.stage("compare"):
            cut = list(changes.cut(self.request.snapshot.leaves, self.base, options))
            findings = changes.compare(cut, options, executor)
        changed = [f for f in findings if f.status in (Status.CHANGED, Status.REFRESH)]
        for finding in changed:
            self.base.touch(finding.chunk.leaf, finding.chunk.box)
        writer = PackWriter(
            self.packs,
            attempt=self.id,
            process=_PROCESS,
            pack_bytes=options.pack_bytes,
        )
        stored = SaveRows(findings)
        try:
            with self.watch.stage("code"):
                self._put_records(changed, writer, stored, executor)
            with self.watch.stage("write"):
                writer.finish()
        except BaseException:
            # Wait for our own writes: nothing may land after the error is known.
            with contextlib.suppress(DeltaError):
                writer.drain()
            raise
        stored.fill_in(options)
        return stored, writer.written_bytes

    def _put_records(
        self,
        changed: Sequence[Finding],
        writer: PackWriter,
        stored: SaveRows,
        executor: Pool,
    ) -> None:
        options = self.request.options
        new_bytes: collections.Counter[int] = collections.Counter()
        for finding in changed:
            new_bytes[finding.chunk.leaf_index] += finding.chunk.content_bytes
        coded = ordered_map(
            executor,
            lambda finding: coding.code(finding, options=options, packs=self.packs),
            changed,
            window=4 * options.worker_count,
        )
        previous = -1
        for result in coded:
            leaf = result.finding.chunk.leaf_index
            fills_packs = options.pack_bytes <= max(
                new_bytes[leaf], new_bytes[previous]
            )
            if leaf != previous and fills_packs:
                writer.cut()
            previous = leaf
            stored.add(result, *writer.add(result.record))

    def _put_part(self, rows: Sequence[Row]) -> tuple[PartEntry, list[str]]:
        packs = sorted({ref.pack for row in rows for ref in row.refs if ref.pack})
        self.let_go = self.let_go - set(packs)
        data = parts.encode_part(self.id, rows, packs)
        entry = PartEntry(
            name=f"part-{self.id.hex()}-p{_PROCESS}",
            length=len(data),
            digest=records.digest(data).hex(),
            rows=len(rows),
        )
        self.item.write(entry.name, data)
        return entry, packs

    def _plan_base(self, packs: Sequence[str]) -> None:
        """Find out whether this state becomes a base."""
        if self.store is None:
            return
        new = Kept(
            attempt=self.id.hex(),
            item=self.request.place.item,
            save_index=self.base.save_index + 1,
            wall_time=self.request.wall_time,
            packs=frozenset(packs),
        )
        options = self.request.options
        self.base_plan = upkeep.plan_base(self.store, self.state, new, options)

    def _commit(
        self, report: SaveReport, part: PartEntry, packs: Sequence[str]
    ) -> None:
        """Publish the MANIFEST, unless a prune no longer counts with this save."""
        place, taken = self.request.place, self.request.snapshot
        manifest = Manifest(
            attempt=self.id.hex(),
            step=place.step,
            item=place.item,
            wall_time=self.request.wall_time,
            save_index=self.base.save_index + 1,
            predecessor=self.base.predecessor,
            store_uuid=self.store.uuid if self.store else "",
            store_url=self.store.url if self.store else "",
            options=dataclasses.asdict(self.request.options),
            versions=_versions(),
            tree=taken.structure,
            leaves=[leaf.entry for leaf in taken.leaves],
            packs=packs,
            parts=[part],
            report=report.to_document(),
            custom_metadata=self.request.custom_metadata,
        )
        try:
            self.item.write(MANIFEST_NAME, encode_manifest(manifest))
            # A pin that is still there now was there when the MANIFEST appeared, so
            # every later prune sees this step. Otherwise one may already have removed
            # its packs.
            pinned = self.store is None or (self.store.pins.read(self.pin) is not None)
        except StorageError:
            # It may be there although its write failed, and must not count.
            with contextlib.suppress(StorageError):
                self.item.delete(MANIFEST_NAME)
            raise
        self.manifest = manifest
        if not pinned:
            self.item.delete(MANIFEST_NAME)
            raise ConflictError(
                f"{place.label}: its pin was removed by a prune while it was saving; "
                "nothing of it was kept. Save again"
            )

    def _report(
        self, stored: SaveRows, rows: Sequence[Row], written_bytes: int
    ) -> SaveReport:
        request = self.request
        cut = [finding.chunk for finding in stored.findings]
        mean, longest = chain_lengths([len(row.refs) for row in rows])
        return SaveReport(
            step=request.place.step_name,
            item=request.place.item,
            full_bytes=sum(chunk.content_bytes for chunk in cut),
            written_bytes=written_bytes,
            read_bytes=stored.read_bytes,
            chunks=len(cut),
            chunks_by_form=dict(sorted(stored.chunks_by_form.items())),
            bytes_by_form=dict(sorted(stored.bytes_by_form.items())),
            elements=sum(chunk.word_count for chunk in cut),
            elements_changed=stored.elements_changed,
            blocks=sum(-(-chunk.content_bytes // _BLOCK_BYTES) for chunk in cut),
            blocks_changed=stored.blocks_changed,
            records_per_chunk_mean=mean,
            records_per_chunk_max=longest,
            copies=self.base_plan.copies,
            copies_wanted=request.options.keep_bases if self.store else 1,
            stage_seconds=dict(self.watch.seconds),
            blocking_seconds=request.blocking_seconds,
            total_seconds=time.perf_counter() - request.started,
        )


@functools.cache
def _versions() -> Mapping[str, str]:
    found = {}
    for name in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
