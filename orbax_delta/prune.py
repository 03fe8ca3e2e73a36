"""Removing packs that nothing names any more: plan, then execute. No clocks.

What a MANIFEST anywhere below the root or a pin names is alive. A prune first writes
what it is about to delete, then looks again: either it sees the pin of a save that
builds on it, or that save sees the mark. Anything unreadable stops it.
"""

import dataclasses
import logging
import secrets
from collections.abc import Mapping, Sequence

from orbax_delta import owners
from orbax_delta.errors import FormatError, StorageError
from orbax_delta.manifests import MANIFEST_NAME, PACK_NAME, parse_manifest
from orbax_delta.marks import Mark, read_marks
from orbax_delta.places import MAX_MANIFEST_DEPTH
from orbax_delta.store import STORE_NAME, DeltaStore

_logger = logging.getLogger("orbax_delta")

_MAX_TRIES = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What a prune would do.

    Attributes:
        dead: Packs that nothing names.
        live: Packs that something names.
        manifests: MANIFESTs found, relative to the root.
        pins: Pins of processes that run, or ran elsewhere.
        stale: Pins and condemned marks of processes known to be dead, as
            `pins/<name>` and `condemned/<name>`.
    """

    dead: Sequence[str]
    live: Sequence[str]
    manifests: Sequence[str]
    pins: Sequence[str]
    stale: Sequence[str]


def manifest_keys(store: DeltaStore) -> frozenset[str]:
    """Where the MANIFESTs of a root lie, whatever folders Orbax has made.

    Raises:
        StorageError: Folders kept appearing and vanishing.
    """
    for _ in range(_MAX_TRIES):
        try:
            return frozenset(
                store.root.find(
                    MANIFEST_NAME, max_depth=MAX_MANIFEST_DEPTH, skip=STORE_NAME
                )
            )
        except FileNotFoundError:
            continue  # a step was renamed or deleted while it was read
    raise StorageError(
        f"the folders below {store.root.url} kept changing while they were listed; "
        "nothing was deleted. Prune again when fewer steps come and go"
    )


def plan(store: DeltaStore, *, break_pins: bool = False) -> PrunePlan:
    """Find out what is dead; changes nothing.

    Args:
        store: The store.
        break_pins: Count pins of other hosts as stale. A save that still runs there
            will fail; nothing that it committed is lost.

    Raises:
        FormatError: Something that may name packs cannot be read.
        UnsupportedVersionError: Something was written by a newer format.
        CorruptionError: A MANIFEST is damaged.
    """
    pins = read_marks(store.pins)
    condemned = read_marks(store.condemned)
    stale_pins = _stale(pins, break_pins)
    manifests, named = _mark(store)
    alive = {name: pin for name, pin in pins.items() if name not in stale_pins}
    # A killed save leaves unfinished packs too; those of a running one are pinned.
    # Dot files are the file system's own (.nfs..., .DS_Store).
    there = {*store.packs.names(), *store.packs.unfinished()}
    everything = sorted(name for name in there if name[0] != ".")
    _refuse_foreign(store, everything)
    dead = [pack for pack in everything if not _is_live(pack, named, alive)]
    return PrunePlan(
        dead=dead,
        live=sorted(set(everything) - set(dead)),
        manifests=sorted(manifests),
        pins=sorted(alive),
        stale=[f"pins/{name}" for name in stale_pins]
        + [f"condemned/{name}" for name in _stale(condemned, break_pins)],
    )


def _stale(marks: Mapping[str, Mark], break_all: bool) -> list[str]:
    this = owners.this_process()
    return sorted(
        name
        for name, mark in marks.items()
        if mark.owner.known_dead or (break_all and mark.owner.host != this.host)
    )


def _refuse_foreign(store: DeltaStore, packs: Sequence[str]) -> None:
    for name in packs:
        if not PACK_NAME.fullmatch(name):
            raise FormatError(
                f"{store.packs.url}{name} is not named like a pack; nothing was "
                "deleted. Move it away, or upgrade orbax_delta if a newer one wrote it"
            )


def _is_live(pack: str, named: frozenset[str], pins: Mapping[str, Mark]) -> bool:
    if pack in named:
        return True
    attempt = pack.partition("-")[0]
    return any(
        name.partition("-")[0] == attempt or pack in pin.packs
        for name, pin in pins.items()
    )


def _mark(store: DeltaStore) -> tuple[frozenset[str], frozenset[str]]:
    """MANIFESTs and the packs they name, from a root that held still meanwhile.

    A rename can hide a step from one listing, never from two that agree.
    """
    for _ in range(_MAX_TRIES):
        keys = manifest_keys(store)
        contents = {key: store.root.read(key) for key in keys}
        if None in contents.values() or manifest_keys(store) != keys:
            continue
        named: set[str] = set()
        for key, data in contents.items():
            manifest = parse_manifest(data or b"", where=store.root.url + key)
            # Whatever store it names: pack names are unique, and STORE.json can be
            # lost and made anew.
            named.update(manifest.packs)
        return keys, frozenset(named)
    raise StorageError(
        f"the steps below {store.root.url} kept changing while they were read; nothing "
        "was deleted. Prune again when fewer steps come and go"
    )


def execute(store: DeltaStore, planned: PrunePlan) -> Sequence[str]:
    """Delete what a plan found dead and what is dead still; returns those packs."""
    for key in planned.stale:
        folder, _, name = key.partition("/")
        (store.pins if folder == "pins" else store.condemned).delete(name)
    if not planned.dead:
        return ()
    name = secrets.token_hex(16)
    mark = Mark(owner=owners.this_process(), packs=planned.dead)
    store.condemned.write(name, mark.encode())
    try:
        again = plan(store)
        doomed = sorted(set(planned.dead) & set(again.dead))
        for pack in doomed:
            store.packs.delete(pack)
    finally:
        store.condemned.delete(name)
    _logger.info("pruned %d dead packs from %s", len(doomed), store.url)
    return doomed
