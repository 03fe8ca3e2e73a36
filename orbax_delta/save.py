"""Saving: from a snapshot to a committed MANIFEST, top to bottom.

Order of writes: pin, packs, part, MANIFEST. Every process of the job writes the first
three and votes; the primary publishes the MANIFEST, which makes the step. If a pin is
gone by then, a prune may have missed this save and the MANIFEST is withdrawn. What is
remembered of the stored state moves on only after the verdict.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping, Sequence, Set

from orbax_delta import agreement, lossy, memory, owners, registry, upkeep
from orbax_delta.agreement import Announcement, Ballot
from orbax_delta.background import Stopwatch
from orbax_delta.base import Base
from orbax_delta.bases import BasePlan, Kept
from orbax_delta.blocking import SaveRequest
from orbax_delta.errors import (
    ConflictError,
    DeltaError,
    DisagreementError,
    StorageError,
)
from orbax_delta.history import SaveCost
from orbax_delta.kin import Kin
from orbax_delta.leaves import Snapshot
from orbax_delta.manifests import (
    ENCRYPTED,
    LOSSY,
    MANIFEST_NAME,
    Manifest,
    PartEntry,
    encode_manifest,
)
from orbax_delta.places import SELF_CONTAINED_PACKS
from orbax_delta.ranges import Packs
from orbax_delta.reports import SaveReport
from orbax_delta.sealing import fingerprint
from orbax_delta.selection import Digests
from orbax_delta.share import ShareWriter
from orbax_delta.store import DeltaStore, Folder
from orbax_delta.upkeep import ItemState

_logger = logging.getLogger("orbax_delta")

_VERSIONED = ("orbax-delta", "orbax-checkpoint", "jax", "tensorstore", "numpy")


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
    watch = Stopwatch()
    # Until Orbax has made the step's folder, and the save before this one is done.
    watch.seconds["wait"] = request.waited_seconds()
    try:
        with request.round.spread_errors():
            if isinstance(request.taken, Exception):
                raise request.taken
            if request.place.root_url is None:
                # Nothing outside the step may be needed to read it: no store, all full.
                alone = _attempt(request, request.taken, ItemState(), None, watch)
                return alone.run()
            with state.lock:
                watch.seconds["wait"] = request.waited_seconds()
                return _run(request, request.taken, state, watch)
    finally:
        request.round.leave()


def _run(
    request: SaveRequest, taken: Snapshot, state: ItemState, watch: Stopwatch
) -> SaveReport:
    with watch.stage("begin"):
        store = _own_store(request, state) if request.round.job.primary else None
        attempt = _attempt(request, taken, state, store, watch)
    seen, state.seen = state.seen, None
    report = attempt.run()
    store, manifest = attempt.store, attempt.manifest
    if store is None or manifest is None:
        return report  # the primary does the rest
    state.history.saved(
        SaveCost.of(
            report,
            attempt=manifest.attempt,
            started=request.wall_time,
            host=owners.this_process().host_name,
            processes=len(request.round.job.processes),
        )
    )
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
    key = fingerprint(request.key)
    if (state.base.store_uuid, state.base.key) != (store.uuid, key):
        # What another key opens no step with this one can refer to.
        state.base = Base(store_uuid=store.uuid, key=key)
    if state.seen is None and not request.hurried:
        # The save before this one failed, perhaps for want of room.
        upkeep.tidy(store, state, request.options, saved=None)
    return store


def _attempt(
    request: SaveRequest,
    taken: Snapshot,
    state: ItemState,
    store: DeltaStore | None,
    watch: Stopwatch,
) -> "_Attempt":
    """An attempt that all processes begin alike, from the same stored state.

    Raises:
        DisagreementError: They do not save the same to the same place.
    """
    place, options, agreed = request.place, request.options, request.round
    if agreed.job.alone:
        bits, _ = agreed.attempt({})
        state.store = store
        return _Attempt(request, taken, state, store, bits, watch)
    key = fingerprint(request.key)
    own = Announcement.of(place, store, state.base, options, taken, key)
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
            state.base = Base(store_uuid=primary.store_uuid, key=key)
    state.store = store
    return _Attempt(request, taken, state, store, bits, watch)


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
        watch: Stopwatch,
    ) -> None:
        self.id = bits
        self.round = request.round
        self.pin = f"{self.id.hex()}-p{request.round.job.process}"
        self.request = request
        self.taken = taken
        self.state = state
        self.base = state.base
        self.store = store
        self.item = Folder(request.place.item_url)
        self.packs = Packs(
            folder=store.packs if store else self.item.child(SELF_CONTAINED_PACKS),
            key=request.key,
        )
        self.watch = watch
        self.let_go: set[str] = set()
        self.kin = Kin(self.packs, ())
        self.manifest: Manifest | None = None
        self.base_plan = BasePlan(take=False, release=(), copies=1)

    def run(self) -> SaveReport:
        """The whole save."""
        with contextlib.ExitStack() as around:
            with self.watch.stage("begin"):
                around.enter_context(self._pinned())
            around.enter_context(self._undone_on_failure())
            share = ShareWriter(
                request=self.request,
                taken=self.taken,
                attempt=self.id,
                base=self.base,
                kin=self.kin,
                elsewhere=self.state.elsewhere or frozenset(),
                packs=self.packs,
                item=self.item,
                watch=self.watch,
            ).write()
            self.let_go = self.let_go.difference(share.ballot.packs)
            report = self._agree(share.ballot)
        self.base.commit(
            share.stored,
            layouts=share.layouts,
            pack_sizes=share.pack_sizes,
            store_uuid=self.store.uuid if self.store else "",
            predecessor={
                "step": self.request.place.step_name,
                "attempt": self.id.hex(),
            },
        )
        held, self.state.held = self.state.held, share.ballot.report.held_bytes
        if max(held - self.state.held, share.coded_bytes) >= memory.WORTH_BYTES:
            memory.give_back()
        self.state.digests = Digests(
            attempt=self.id.hex(), leaves=self.request.selection.proved_digests()
        )
        _logger.info("%s", report.line())
        return report

    def _pinned(self) -> contextlib.AbstractContextManager[None]:
        if self.store is None:
            return contextlib.nullcontext()
        self.let_go = self.base.packs()
        if self.base.predecessor is None:
            self.kin = Kin.of(self.store, self.request.place, self.request.key)
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

    def _agree(self, ballot: Ballot) -> SaveReport:
        """Vote; the primary publishes what all have voted for. Returns the report."""
        document = ballot.to_document()
        if not self.round.job.primary:
            verdict = self.round.vote(document)
            return SaveReport.from_document(verdict, where="the primary's verdict")
        ballots = [Ballot.from_document(cast) for cast in self.round.collect(document)]
        leaves = [leaf.entry for leaf in self.taken.leaves]
        entries, packs = agreement.count(ballots, leaves)
        self._require_parts(entries)
        self._plan_base(packs)
        features = {feature for ballot in ballots for feature in ballot.features}
        report = dataclasses.replace(
            SaveReport.merged([ballot.report for ballot in ballots]),
            copies=self.base_plan.copies,
        )
        self._publish(report, entries, packs, features)
        return report

    def _require_parts(self, entries: Sequence[PartEntry]) -> None:
        """See the parts of the other processes, not only hear of them."""
        if self.round.job.alone:
            return
        missing = upkeep.absent(self.item, {entry.name for entry in entries})
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
        self,
        report: SaveReport,
        entries: Sequence[PartEntry],
        packs: Sequence[str],
        features: Set[str],
    ) -> None:
        """Publish the MANIFEST, unless a prune no longer counts with this save."""
        place, taken = self.request.place, self.taken
        rounded = lossy.documents(self.request.lossy, [x.entry for x in taken.leaves])
        required = {
            *features,
            *([LOSSY] if rounded else []),
            *([ENCRYPTED] if self.request.key else []),
        }
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
            required_features=sorted(required),
            lossy=rounded,
            encryption=self._encryption(),
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

    def _encryption(self) -> dict[str, str]:
        key = self.request.key
        return {"key_id": key.id, "check": key.check(self.id)} if key else {}

    def _require_pins(self) -> None:
        if self.store is None:
            return
        wanted = {f"{self.id.hex()}-p{process}" for process in self.round.job.processes}
        if self.round.job.alone:
            missing = self.store.pins.read(self.pin) is None
        else:
            missing = bool(upkeep.absent(self.store.pins, wanted))
        if missing:
            self.round.look(at_once=True)  # who gives up takes its pin along
            raise ConflictError(
                f"{self.request.place.label}: its pin was removed by a prune while it "
                "was saving; nothing of it was kept. Save again"
            )


@functools.cache
def _versions() -> Mapping[str, str]:
    found = {}
    for name in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
