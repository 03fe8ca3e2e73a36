"""Removing packs that nothing names any more: plan, then execute. No clocks.

What a MANIFEST anywhere below the root, a kept base or a pin names is alive. A prune
first writes what it is about to delete, then looks again: either it sees the pin of a
save that builds on it, or that save sees the mark. Anything unreadable stops it.
"""

import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence

from orbax_delta import bases, owners, records, registry
from orbax_delta.errors import (
    CorruptionError,
    FormatError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from orbax_delta.manifests import MANIFEST_NAME, PACK_NAME, Manifest, parse_manifest
from orbax_delta.marks import Mark, read_marks
from orbax_delta.places import MAX_MANIFEST_DEPTH
from orbax_delta.store import STORE_NAME, DeltaStore, Folder

_logger = logging.getLogger("orbax_delta")

_MAX_TRIES = 50

# Marks of prunes of this process that ended, but the storage would not delete the mark.
_abandoned: set[str] = set()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What a prune would do.

    Attributes:
        dead: Packs that nothing names.
        live: Packs that something names.
        manifests: MANIFESTs found, those of kept bases too, relative to the root;
            those of other roots of a shared store in full.
        pins: Pins of processes that run, or ran elsewhere.
        hosts: The other hosts that some of these pins are of, by name.
        stale: Pins and condemned marks of processes known to be dead, and bases
            half copied by them, as `pins/<name>`, `condemned/<name>`, `bases/<name>`.
        elsewhere: Packs that steps of other roots of a shared store name.
    """

    dead: Sequence[str]
    live: Sequence[str]
    manifests: Sequence[str]
    pins: Sequence[str]
    hosts: Sequence[str]
    stale: Sequence[str]
    elsewhere: frozenset[str] = frozenset()


def manifest_keys(store: DeltaStore) -> frozenset[str]:
    """Where the MANIFESTs of a root lie: in folders of any name, and of kept bases.

    Raises:
        StorageError: Folders kept appearing and vanishing.
    """
    # A shared store that was opened by itself has no root.
    steps = step_keys(store.root) if store.root.url != store.url else ()
    return frozenset(steps).union(bases.manifest_keys(store))


def step_keys(root: Folder) -> Sequence[str]:
    """Where the MANIFESTs of a root lie that are not in its store.

    Raises:
        StorageError: Folders kept appearing and vanishing.
    """
    for _ in range(_MAX_TRIES):
        try:
            return root.find(
                MANIFEST_NAME, max_depth=MAX_MANIFEST_DEPTH, skip=STORE_NAME
            )
        except FileNotFoundError:
            continue  # a step was renamed or deleted while it was read
    raise StorageError(
        f"the folders below {root.url} kept changing while they were listed; "
        "nothing was deleted. Prune again when fewer steps come and go"
    )


Known = dict[bytes, frozenset[str]]
"""Packs that MANIFESTs name, by the digest of the whole file."""


def plan(
    store: DeltaStore, *, break_pins: bool = False, known: Known | None = None
) -> PrunePlan:
    """Find out what is dead; changes nothing.

    Args:
        store: The store.
        break_pins: Count pins of other hosts as stale. A save that still runs there
            will fail; nothing that it committed is lost.
        known: What the plan before found, so that no MANIFEST is parsed twice; it is
            brought up to date.

    Raises:
        FormatError: Something that may name packs cannot be read.
        UnsupportedVersionError: Something was written by a newer format.
        CorruptionError: A MANIFEST is damaged.
        NotFoundError: A root that uses the store cannot be reached, or has lost its
            entry in the registry.
    """
    _refuse_unregistered(store)
    # Before the pins: who is still copying a base now has its pin until that is done.
    halves = bases.leftovers(store)
    pins = read_marks(store.pins)
    condemned = read_marks(store.condemned)
    stale_pins = _stale(pins, break_pins)
    # After the pins: who has joined the store and let go of a pin has its step there.
    manifests, named, elsewhere = _mark(store, {} if known is None else known)
    alive = {name: pin for name, pin in pins.items() if name not in stale_pins}
    attempts = {name.partition("-")[0] for name in alive}
    named = named.union(*(pin.packs for pin in alive.values()))
    # A killed save leaves unfinished packs too; those of a running one are pinned.
    # Dot files are the file system's own (.nfs..., .DS_Store).
    there = {*store.packs.names(), *store.packs.unfinished()}
    everything = sorted(name for name in there if name[0] != ".")
    _refuse_foreign(store, everything)
    dead = [
        pack
        for pack in everything
        if pack not in named and pack.partition("-")[0] not in attempts
    ]
    return PrunePlan(
        dead=dead,
        live=sorted(set(everything) - set(dead)),
        manifests=sorted(manifests),
        pins=sorted(alive),
        hosts=_other_hosts(alive.values()),
        stale=[
            *(f"pins/{name}" for name in stale_pins),
            *(f"condemned/{name}" for name in _stale(condemned, break_pins)),
            *(f"condemned/{name}" for name in _void(condemned, there)),
            *(f"bases/{name}" for name in halves if name not in attempts),
        ],
        elsewhere=elsewhere,
    )


def _refuse_unregistered(store: DeltaStore) -> None:
    """A root whose entry is lost would lose its steps; a base tells of it."""
    if not store.shared:
        return
    kept = bases.read_bases(store, {})
    known = {entry.root_uuid for entry in registry.entries(store)}
    for base in kept.values():
        if base.root_uuid not in {*known, store.root_uuid}:
            raise NotFoundError(
                f"the shared store {store.url} keeps a base of root {base.root_uuid}, "
                "which its registry does not know: the file in `roots` was lost. "
                "Nothing was deleted. The next save to that root writes it anew, and "
                "so does `orbax-delta repair` of it; if it is gone for good, "
                f"`orbax-delta forget {base.root_uuid} --store "
                f"{store.url.rstrip('/')}` says so"
            )


def _stale(marks: Mapping[str, Mark], break_all: bool) -> list[str]:
    this = owners.this_process()
    return sorted(
        name
        for name, mark in marks.items()
        if mark.owner != owners.NOBODY
        and (
            mark.owner.known_dead
            or name in _abandoned
            or (break_all and mark.owner.host != this.host)
        )
    )


def _other_hosts(marks: Iterable[Mark]) -> list[str]:
    here = owners.this_process().host
    return sorted({m.owner.host_name for m in marks if m.owner.host != here})


def _void(marks: Mapping[str, Mark], packs: Collection[str]) -> list[str]:
    """Marks of a repair whose packs are all gone."""
    return sorted(
        name
        for name, mark in marks.items()
        if mark.owner == owners.NOBODY and not any(pack in packs for pack in mark.packs)
    )


def _refuse_foreign(store: DeltaStore, packs: Sequence[str]) -> None:
    for name in packs:
        if not PACK_NAME.fullmatch(name):
            raise FormatError(
                f"{store.packs.url}{name} is not named like a pack; nothing was "
                "deleted. Move it away, or upgrade orbax_delta if a newer one wrote it"
            )


_Found = tuple[frozenset[str], frozenset[str], frozenset[str]]


def _mark(store: DeltaStore, known: Known) -> _Found:
    """MANIFESTs, the packs they name, and those that other roots name.

    From roots that held still meanwhile: a rename can hide a step from one listing,
    never from two that agree.
    """
    for _ in range(_MAX_TRIES):
        places = _places(store)
        contents = {place: _read(store, place) for place in places}
        if None in contents.values() or _places(store) != places:
            continue
        found: Known = {}
        elsewhere: set[str] = set()
        for (root, key), data in contents.items():
            digest = records.digest(data or b"")
            # Whatever store it names: pack names are unique, and STORE.json can be
            # lost and made anew.
            if digest not in known:
                where = root + key if root else store.url_of(key)
                known[digest] = frozenset(_parse_manifest(data or b"", where).packs)
            found[digest] = known[digest]
            if root:
                elsewhere |= found[digest]
        known.clear()
        known.update(found)
        names = frozenset(root + key for root, key in places)
        return names, frozenset().union(*found.values()), frozenset(elsewhere)
    raise StorageError(
        f"the steps below {store.root.url} kept changing while they were read; nothing "
        "was deleted. Prune again when fewer steps come and go"
    )


_Place = tuple[str, str]
"""URL of another root, empty for this one and its bases; key of a MANIFEST."""


def _places(store: DeltaStore) -> frozenset[_Place]:
    """Where the MANIFESTs lie that a store serves, in all roots that use it."""
    return frozenset(("", key) for key in manifest_keys(store)).union(
        (root.url, key) for root in registry.others(store) for key in step_keys(root)
    )


def _read(store: DeltaStore, place: _Place) -> bytes | None:
    root, key = place
    return Folder(root).read(key) if root else store.read(key)


def named_packs(
    store: DeltaStore, *, known: Known | None = None
) -> tuple[frozenset[str], frozenset[str]]:
    """Packs that any MANIFEST names, and those that other roots' steps name.

    Raises:
        NotFoundError: A root that uses the store cannot be reached.
        CorruptionError: A MANIFEST is damaged.
        FormatError: The same.
    """
    _, named, elsewhere = _mark(store, {} if known is None else known)
    return named, elsewhere


def _parse_manifest(data: bytes, where: str) -> Manifest:
    try:
        return parse_manifest(data, where=where)
    except UnsupportedVersionError:
        raise
    except (CorruptionError, FormatError) as error:
        # Nobody knows which packs such a step needs.
        raise type(error)(
            f"{error}; nothing was deleted. Put it back from a copy, or delete the "
            "step's folder; if it is no file of a step, move it out of this root"
        ) from error


def execute(
    store: DeltaStore, planned: PrunePlan, *, known: Known | None = None
) -> Sequence[str]:
    """Delete what a plan found dead and what is dead still; returns those packs.

    Args:
        store: The store.
        planned: The plan.
        known: As for `plan`.

    Raises:
        StorageError: The storage refused something, as a full disk does.
        FormatError: As for `plan`; no pack was deleted.
    """
    for key in planned.stale:
        folder, _, name = key.partition("/")
        match folder:
            case "pins":
                store.pins.delete(name)
            case "condemned":
                store.condemned.delete(name)
            case _:
                bases.release(store, name)
    if not planned.dead:
        return ()
    name = secrets.token_hex(16)
    mark = Mark(owner=owners.this_process(), packs=planned.dead)
    _condemn(store, name, mark)
    try:
        again = plan(store, known=known)
        doomed = sorted(set(planned.dead) & set(again.dead))
        for pack in doomed:
            store.packs.delete(pack)
    finally:
        _abandoned.add(name)
        store.condemned.delete(name)
        _abandoned.discard(name)
    _logger.info("pruned %d dead packs from %s", len(doomed), store.url)
    return doomed


def _condemn(store: DeltaStore, name: str, mark: Mark) -> None:
    try:
        store.condemned.write(name, mark.encode())
    except StorageError as error:
        _abandoned.add(name)
        with contextlib.suppress(StorageError):
            store.condemned.delete(name)  # what there is of it
            _abandoned.discard(name)
        raise StorageError(
            f"{error}. A prune writes a small file before it deletes packs: none of "
            f"{len(mark.packs)} dead ones was deleted. If the disk is full, make a "
            "little room (delete the folder of a step that you do not need, or of an "
            "unfinished one, *.orbax-checkpoint-tmp) and prune again"
        ) from error
