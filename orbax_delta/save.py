"""Saving: from a snapshot to a committed MANIFEST, top to bottom.

Order of writes: pin, packs, part, MANIFEST. Every process of the job writes the first
three and votes; the primary publishes the MANIFEST, which makes the step. If a pin is
gone by then, a prune may have missed this save and the MANIFEST is withdrawn. What is
remembered of the stored state moves on only after the verdict.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orbax_delta import (
    agreement,
    changes,
    chunks,
    codecs,
    coding,
    fields,
    parts,
    records,
    registry,
    upkeep,
)
from orbax_delta.agreement import Announcement, Ballot
from orbax_delta.background import Pool, Stopwatch, ordered_map, pool
from orbax_delta.base import Base
from orbax_delta.bases import BasePlan, Kept
from orbax_delta.changes import Cut, Finding, Status
from orbax_delta.errors import (
    ConflictError,
    DeltaError,
    DisagreementError,
    InvalidInputError,
    StorageError,
)
from orbax_delta.hosts import Job, Round
from orbax_delta.kin import Kin
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

_BLOCK_BYTES = codecs.BLOCK_BYTES
_VERSIONED = ("orbax-delta", "orbax-checkpoint", "jax", "tensorstore", "numpy")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One save, as fixed in the blocking phase.

    Attributes:
        taken: The state; or why this process could not take it though others could.
        custom_metadata: JSON to keep with the step.
        round: Where the processes agree on this save.
        hurried: The machine is about to be taken away: only what must be done.
        place: Where the step goes.
        options: Options in force.
        started: `time.perf_counter()` at the call.
        wall_time: Seconds since 1970 at the call.
        blocking_seconds: How long the caller was kept.
    """

    taken: Snapshot | Exception
    custom_metadata: Json
    round: Round
    hurried: bool
    place: Place
    options: DeltaOptions
    started: float
    wall_time: float
    blocking_seconds: float


ALONE = Job()
"""A process that saves for itself."""


def prepare(
    tree: Any,
    place: Place,
    options: DeltaOptions,
    *,
    custom_metadata: Json = None,
    job: Job = ALONE,
    hurried: bool = False,
) -> SaveRequest:
    """The blocking phase: everything comes to the host, nothing touches a file.

    Args:
        tree: The state.
        place: Where it goes.
        options: Options in force.
        custom_metadata: JSON to keep with the step.
        job: The processes that save it together; all of them come by here.
        hurried: Whether to leave out what can wait for the next save.

    Raises:
        InvalidInputError: A leaf or the metadata cannot be stored, on any process.
    """
    started, wall_time = time.perf_counter(), time.time()
    name = f"{place.step_name}/{place.item}"
    agreed = Round(job, name, timeout=options.vote_timeout)
    taken: Snapshot | Exception
    try:
        metadata = _metadata(custom_metadata)
        taken = snapshot(tree, job)
    except Exception as error:  # noqa: BLE001 # raised by every process, here or later
        # One process alone must not raise here: the others wait in Orbax's barriers.
        agreed.declare(error)
        metadata, taken = None, error
    else:
        agreed.declare(None)
    return SaveRequest(
        taken=taken,
        custom_metadata=metadata,
        round=agreed,
        hurried=hurried,
        place=place,
        options=options,
        started=started,
        wall_time=wall_time,
        blocking_seconds=time.perf_counter() - started,
    )


def _metadata(custom_metadata: Json) -> Json:
    """A copy: the caller may change the object as soon as save returns."""
    try:
        text = json.dumps(custom_metadata, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"custom_metadata is not JSON: {error}") from error
    if not fields.is_shallow(metadata := json.loads(text)):
        raise InvalidInputError(
            "custom_metadata is not JSON that a MANIFEST holds: it is nested more than "
            f"{fields.MAX_METADATA_DEPTH} deep; flatten it"
        )
    return metadata


def run(request: SaveRequest, state: ItemState) -> SaveReport:
    """Write one step; on return it is durable and committed.

    Returns:
        The report of the whole save, on every process.

    Raises:
        StorageError: The storage refused something; nothing of this save counts.
        ConflictError: A prune took this save for dead; nothing of it counts.
        PeerError: Another process did not answer; nothing of this save counts.
        DisagreementError: The processes do not save the same; nothing of it counts.
        DeltaError: What another process failed with, of the class that it had there.
    """
    if request.round.job.primary:
        state.rounds.append(request.round)
    with request.round.spread_errors():
        if isinstance(request.taken, Exception):
            raise request.taken
        if request.place.root_url is None:
            # Nothing outside the step may be needed to read it: no store, all full.
            alone = ItemState(rounds=state.rounds)
            return _attempt(request, request.taken, alone, None).run()
        with state.lock:
            return _run(request, request.taken, state)


def _run(request: SaveRequest, taken: Snapshot, state: ItemState) -> SaveReport:
    store = _own_store(request, state) if request.round.job.primary else None
    attempt = _attempt(request, taken, state, store)
    seen, state.seen = state.seen, None
    report = attempt.run()
    store, manifest = attempt.store, attempt.manifest
    if store is None or manifest is None:
        return report  # the primary does the rest
    if not request.hurried:
        upkeep.keep_base(store, state, attempt.base_plan, manifest, attempt.item)
        state.seen = seen
        upkeep.tidy(store, state, request.options, saved=request.place)
    if attempt.let_go:
        # Its own pin still holds these; they can only go after the next save.
        state.seen = None
    return report


def _own_store(request: SaveRequest, state: ItemState) -> DeltaStore:
    """The store, for the primary; swept first if the last save failed."""
    root = Folder(str(request.place.root_url))
    store = registry.open_store(root, request.options.store)
    if state.base.store_uuid != store.uuid:
        state.base = Base(store_uuid=store.uuid)
    if state.seen is None and not request.hurried:
        # The save before this one failed, perhaps for want of room.
        upkeep.tidy(store, state, request.options, saved=None)
    return store


def _attempt(
    request: SaveRequest, taken: Snapshot, state: ItemState, store: DeltaStore | None
) -> "_Attempt":
    """An attempt that all processes begin alike, from the same stored state.

    Raises:
        DisagreementError: They do not save the same to the same place.
    """
    place, options, agreed = request.place, request.options, request.round
    if agreed.job.alone:
        bits, _ = agreed.attempt({})
        state.store = store
        return _Attempt(request, taken, state, store, bits)
    own = Announcement.of(place, store, state.base, options, taken)
    bits, announced = agreed.attempt(dataclasses.asdict(own))
    if not agreed.job.primary:
        primary = Announcement(**announced)
        own.require_same(primary, taken)
        store = agreement.shared_store(place, primary.store_uuid)
        if store is not None and state.store is None:
            upkeep.drop_dead_pins(store)
            upkeep.look_elsewhere(store, state)
        if own.base != primary.base or state.base.store_uuid != primary.store_uuid:
            # Leaves must be cut alike; without earlier rows all cut afresh.
            state.base = Base(store_uuid=primary.store_uuid)
    state.store = store
    return _Attempt(request, taken, state, store, bits)


class _Attempt:
    """One try of one save; its names are used by no other.

    Attributes:
        let_go: Packs that its pin names and its rows no longer need.
        manifest: What it published; None before that, and on other processes.
        base_plan: What then becomes of the store's bases.
    """

    def __init__(
        self,
        request: SaveRequest,
        taken: Snapshot,
        state: ItemState,
        store: DeltaStore | None,
        bits: bytes,
    ) -> None:
        self.id = bits
        self.round = request.round
        self.process = request.round.job.process
        self.pin = f"{self.id.hex()}-p{self.process}"
        self.request = request
        self.taken = taken
        self.state = state
        self.base = state.base
        self.store = store
        self.item = Folder(request.place.item_url)
        self.packs = store.packs if store else self.item.child(SELF_CONTAINED_PACKS)
        self.watch = Stopwatch()
        self.let_go: set[str] = set()
        self.kin = Kin(self.packs, ())
        self.manifest: Manifest | None = None
        self.base_plan = BasePlan(take=False, release=(), copies=1)

    def run(self) -> SaveReport:
        """The whole save."""
        with self._pinned(), self._undone_on_failure():
            with pool(self.request.options.worker_count) as executor:
                cut, stored, written = self._store_chunks(executor)
            rows = [entry.row for entry in stored.entries]
            with self.watch.stage("part"):
                part, packs = self._put_part(rows)
            ballot = Ballot(
                part=part,
                packs=packs,
                report=self._report(stored, rows, written + part.length),
                cover=chunks.cover((row.leaf, row.box) for row in rows),
            )
            with self.watch.stage("manifest"):
                report = self._agree(ballot)
        known = [
            (finding.chunk.leaf, finding.chunk.box, entry)
            for finding, entry in zip(stored.findings, stored.entries, strict=True)
        ]
        self.base.commit(
            [*known, *((leaf, box, None) for leaf, box in cut.others)],
            layouts={leaf.entry.name: leaf.layout.name for leaf in self.taken.leaves},
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
        self.let_go = self.base.packs()
        if self.base.predecessor is None:
            self.kin = Kin.of(self.store, self.request.place)
        return upkeep.pinned(self.store, self.state, self.pin, self.kin)

    @contextlib.contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        try:
            yield
        except DisagreementError:
            self.base.clear()
            raise
        except BaseException:
            self.base.abort()
            raise

    def _store_chunks(self, executor: Pool) -> tuple[Cut, SaveRows, int]:
        """Compare, code and put every chunk that is this process's."""
        options = self.request.options
        refresh_every = None if self.request.hurried else options.refresh_every
        with self.watch.stage("compare"):
            cut = changes.cut(
                self.taken.leaves, self.base, options, process=self.process
            )
            elsewhere = self.state.elsewhere or frozenset()
            compared = changes.compare(
                cut.own, refresh_every, executor, elsewhere=elsewhere
            )
            findings, read_bytes = self.kin.share(compared, options, executor)
        changed = [f for f in findings if f.status in (Status.CHANGED, Status.REFRESH)]
        for finding in changed:
            self.base.touch(finding.chunk.leaf, finding.chunk.box)
        writer = PackWriter(
            self.packs,
            attempt=self.id,
            process=self.process,
            pack_bytes=options.pack_size(local=self.packs.is_local),
        )
        stored = SaveRows(findings)
        stored.read_bytes = read_bytes
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
        return cut, stored, writer.written_bytes

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
            fills_packs = writer.pack_bytes <= max(new_bytes[leaf], new_bytes[previous])
            if leaf != previous and fills_packs:
                writer.cut()
            previous = leaf
            self.round.look()
            stored.add(result, *writer.add(result.record))

    def _put_part(self, rows: Sequence[Row]) -> tuple[PartEntry, list[str]]:
        packs = sorted({ref.pack for row in rows for ref in row.refs if ref.pack})
        self.let_go = self.let_go - set(packs)
        data = parts.encode_part(self.id, rows, packs)
        entry = PartEntry(
            name=f"part-{self.id.hex()}-p{self.process}",
            length=len(data),
            digest=records.digest(data).hex(),
            rows=len(rows),
            packs=(),
        )
        self.item.write(entry.name, data)
        return entry, packs

    def _agree(self, ballot: Ballot) -> SaveReport:
        """Vote; the primary publishes what all have voted for. Returns the report."""
        document = ballot.to_document()
        if not self.round.job.primary:
            verdict = self.round.vote(document)
            return SaveReport.from_document(verdict, where="the primary's verdict")
        ballots = [Ballot.from_document(cast) for cast in self.round.collect(document)]
        # Whoever has voted is past the saves before this one.
        self.state.clear_rounds(but=self.round)
        leaves = [leaf.entry for leaf in self.taken.leaves]
        entries, packs = agreement.count(ballots, leaves)
        self._require_parts(entries)
        self._plan_base(packs)
        report = dataclasses.replace(
            SaveReport.merged([ballot.report for ballot in ballots]),
            copies=self.base_plan.copies,
        )
        self._publish(report, entries, packs)
        return report

    def _require_parts(self, entries: Sequence[PartEntry]) -> None:
        """See the parts of the other processes, not only hear of them."""
        if self.round.job.alone:
            return
        missing = {entry.name for entry in entries} - set(self.item.names())
        if missing:
            raise DisagreementError(
                f"{self.item.url} lacks {', '.join(sorted(missing))}, which other "
                "processes have written: the directory is not shared between the hosts"
            )

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
            root_uuid=self.store.root_uuid,
        )
        options = self.request.options
        self.base_plan = upkeep.plan_base(self.store, self.state, new, options)

    def _publish(
        self, report: SaveReport, entries: Sequence[PartEntry], packs: Sequence[str]
    ) -> None:
        """Publish the MANIFEST, unless a prune no longer counts with this save."""
        place, taken = self.request.place, self.taken
        manifest = Manifest(
            attempt=self.id.hex(),
            step=place.step,
            item=place.item,
            wall_time=self.request.wall_time,
            save_index=self.base.save_index + 1,
            predecessor=self.base.predecessor,
            store_uuid=self.store.uuid if self.store else "",
            store_url=self.store.url if self.store else "",
            root_uuid=self.store.root_uuid if self.store else "",
            options=self.request.options.recorded(),
            versions=_versions(),
            tree=taken.structure,
            leaves=[leaf.entry for leaf in taken.leaves],
            packs=packs,
            parts=entries,
            report=report.to_document(),
            custom_metadata=self.request.custom_metadata,
        )
        try:
            self.item.write(MANIFEST_NAME, encode_manifest(manifest))
            # A pin that is still there now was there when the MANIFEST appeared, so
            # every later prune sees this step. Otherwise one may already have removed
            # its packs.
            self._require_pins()
            self.round.settle(report.to_document())
        except DeltaError:
            # It may be there although its write failed, and must not count.
            with contextlib.suppress(StorageError):
                self.item.delete(MANIFEST_NAME)
            raise
        self.manifest = manifest

    def _require_pins(self) -> None:
        if self.store is None:
            return
        wanted = {f"{self.id.hex()}-p{process}" for process in self.round.job.processes}
        if self.round.job.alone:
            missing = self.store.pins.read(self.pin) is None
        else:
            missing = not wanted <= set(self.store.pins.names())
        if missing:
            raise ConflictError(
                f"{self.request.place.label}: its pin was removed by a prune while it "
                "was saving; nothing of it was kept. Save again"
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
            copies=1,  # known once all have voted
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
