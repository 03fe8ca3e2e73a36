"""What a handler keeps up between and around saves: pins, bases, markers, sweeping.

A save asks for a pin before it builds on anything, and for a sweep when it has
committed. Nothing here can fail a committed save. Does not belong here: content.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator, Set

from orbax_delta import bases, owners, prune, registry, steps
from orbax_delta.base import Base
from orbax_delta.bases import BasePlan, Kept
from orbax_delta.errors import (
    ConflictError,
    DeltaError,
    NotFoundError,
    StorageError,
)
from orbax_delta.history import HistoryLog
from orbax_delta.kin import Kin
from orbax_delta.manifests import MANIFEST_NAME, Manifest
from orbax_delta.marks import Mark, read_marks, usable_packs
from orbax_delta.options import DeltaOptions
from orbax_delta.places import Place, without_suffix
from orbax_delta.selection import Digests, Stored
from orbax_delta.store import STORE_NAME, DeltaStore, Folder

_logger = logging.getLogger("orbax_delta")


@dataclasses.dataclass(slots=True, kw_only=True)
class ItemState:
    """What a handler remembers of one item of one root between saves.

    Attributes:
        base: Rows and content of the last committed save or restored step.
        digests: What is kept on devices of the last committed save.
        store: The store of the last save; None before the first.
        pin: Pin of the last save; kept until the next one, because the step's folder
            is still renamed after the save is done.
        seen: MANIFESTs found after the last save, by their names once Orbax has renamed
            their folders; None before the first save and after one that failed.
        kept: The store's bases, as far as they were read.
        named: What MANIFESTs name, as far as they were read.
        elsewhere: Packs that other roots of a shared store name, as of the last prune;
            None before that.
        held: Bytes of the contents that the last save left in memory.
        loose: Pins to delete that the store would not delete; tried again with the
            next save.
        history: What saves and restores have cost.
        lock: One save at a time, whatever calls.
    """

    base: Base = dataclasses.field(default_factory=Base)
    digests: Digests | None = None
    store: DeltaStore | None = None
    pin: str | None = None
    seen: frozenset[str] | None = None
    kept: dict[str, Kept] = dataclasses.field(default_factory=dict)
    named: prune.Known = dataclasses.field(default_factory=dict)
    elsewhere: frozenset[str] | None = None
    held: int = 0
    loose: set[str] = dataclasses.field(default_factory=set)
    history: HistoryLog = dataclasses.field(default_factory=HistoryLog)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def stored(self) -> Stored:
        """What the next save may rely on while it takes its state."""
        elsewhere = self.elsewhere or frozenset()
        return Stored(base=self.base, digests=self.digests, elsewhere=elsewhere)


@contextlib.contextmanager
def pinned(store: DeltaStore, state: ItemState, name: str, kin: Kin) -> Iterator[None]:
    """Name the packs that a save builds on, before it relies on them.

    Args:
        store: The store.
        state: State of the item; what is gone of its base is dropped.
        name: Name of the pin.
        kin: What else it may refer to; what is gone of that is left alone.

    Raises:
        StorageError: The storage refused it.
    """
    needed = state.base.packs() | kin.packs()
    mark = Mark(owner=owners.this_process(), packs=sorted(needed))
    try:
        store.pins.write(name, mark.encode())
        gone = needed - usable_packs(store)
        kin.forget_packs(gone)
        dropped = state.base.forget_packs(gone)
        if dropped:
            _logger.warning(
                "%d stored chunks are gone from %s; writing them in full",
                dropped,
                store.url,
            )
        yield
    except BaseException:
        _let_go(store, state, name)
        raise
    # Only now may the previous pin go: this one names what that one did. The step is
    # committed, so a store that fails here costs no more than a late clean-up.
    previous, state.pin = state.pin, name
    if previous is not None:
        _let_go(store, state, previous)


def drop_dead_pins(store: DeltaStore) -> None:
    """Remove pins of dead processes of this host, whose death no other host sees."""
    try:
        for name, pin in read_marks(store.pins).items():
            if pin.owner.known_dead:
                store.pins.delete(name)
    except DeltaError as error:
        _logger.warning("while looking for pins of dead processes: %s", error)


def _let_go(store: DeltaStore, state: ItemState, *pins: str) -> None:
    """Delete pins; one that the store will not delete now is tried again later."""
    state.loose.update(pins)
    for pin in sorted(state.loose):
        with contextlib.suppress(StorageError):
            store.pins.delete(pin)
            state.loose.discard(pin)


def plan_base(
    store: DeltaStore, state: ItemState, new: Kept, options: DeltaOptions
) -> BasePlan:
    """Whether a state becomes a base, and which ones it replaces."""
    try:
        state.kept = bases.read_bases(store, state.kept)
    except StorageError as error:
        # Not worth a failed save: the next one looks again.
        _logger.warning("no base is kept with this save: %s", error)
        return BasePlan(take=False, release=(), copies=1)
    return bases.plan(state.kept, new, options)


def keep_base(
    store: DeltaStore,
    state: ItemState,
    plan: BasePlan,
    manifest: Manifest,
    item: Folder,
) -> None:
    """Carry out such a plan, once the step is committed."""
    try:
        if plan.take:
            bases.keep(store, manifest, item)
            state.kept[manifest.attempt] = Kept.of(manifest)
        # Only now: what they are replaced by is there.
        for attempt in plan.release:
            bases.release(store, attempt)
    except DeltaError as error:
        _logger.warning("could not keep this step as a base: %s", error)


def tidy(
    store: DeltaStore, state: ItemState, options: DeltaOptions, *, saved: Place | None
) -> None:
    """Prune when steps have gone or one was saved again; refresh markers, history."""
    try:
        if state.loose:
            _let_go(store, state)
            state.seen = None  # they may have held packs back
        if options.auto_prune:
            found = _manifest_keys(store, state)
            again = saved is not None and f"{saved.step_name}/{saved.item}" in {
                key.rpartition("/")[0] for key in state.seen or ()
            }
            if state.seen is None or again or not state.seen <= found:
                planned = prune.plan(store, known=state.named)
                state.elsewhere = planned.elsewhere
                prune.execute(store, planned, known=state.named)
            state.seen = found
        else:
            look_elsewhere(store, state)
    except DeltaError as error:
        # Whatever became of the save: what could not be tidied is garbage, not harm.
        _logger.warning("while tidying up: %s", error)
    try:
        registry.renew(store)  # refuses where the root has been moved
        state.history.write(store.root)
    except DeltaError as error:
        _logger.warning("what saves cost could not be noted: %s", error)


def look_elsewhere(store: DeltaStore, state: ItemState) -> None:
    """Find out, once, what other roots need, for a process that does not prune."""
    try:
        if store.shared and state.elsewhere is None:
            _, state.elsewhere = prune.named_packs(store, known=state.named)
    except DeltaError as error:
        _logger.warning("what other roots need is not known: %s", error)


def _manifest_keys(store: DeltaStore, state: ItemState) -> frozenset[str]:
    """MANIFESTs of this root and its bases; what other roots do is their affair."""
    of_others = {
        f"{STORE_NAME}/bases/{attempt}/{MANIFEST_NAME}"
        for attempt, kept in state.kept.items()
        if kept.root_uuid != store.root_uuid
    }
    return frozenset(map(without_suffix, prune.manifest_keys(store) - of_others))


def absent(folder: Folder, names: Set[str]) -> set[str]:
    """Which of these are not in a folder.

    A listing of a network file system can be older than what others have just written;
    whoever asks for a name for the first time is told the truth.
    """
    unlisted = names - set(folder.names())
    return {name for name in unlisted if folder.read(name) is None}


def confirm(place: Place, state: ItemState | None) -> None:
    """Check a saved step once more before Orbax makes its folder the step's.

    A job that was given up for dead may save the same step into the same folder.

    Raises:
        NotFoundError: There is no MANIFEST.
        ConflictError: It is that of another save, or parts of this one are gone.
    """
    item = Folder(place.item_url)
    manifest = steps.read_manifest(item)
    if manifest is None:
        raise NotFoundError(
            f"{place.item_url} has no {MANIFEST_NAME} although its save ended well; "
            "something removed it"
        )
    last = (state.base.predecessor if state else None) or {}
    own = last.get("step") != place.step_name or last["attempt"] == manifest.attempt
    if own and not absent(item, {part.name for part in manifest.parts}):
        return
    raise ConflictError(
        f"{place.label}: another job saved this step into the same folder meanwhile, "
        "and what is there is not what this one wrote. End one of the two jobs"
    )


def release(state: ItemState) -> None:
    """Let go of the last save's pin; may be called twice."""
    if state.store is not None and state.pin is not None:
        _let_go(state.store, state, state.pin)
        state.pin = None


def close(state: ItemState, options: DeltaOptions) -> None:
    """Let go of the last save's pin and sweep once more; may be called twice."""
    with state.lock:
        if state.store is None:
            return
        release(state)
        state.seen = None  # that pin may have held packs back
        tidy(state.store, state, options, saved=None)
        state.store = None
