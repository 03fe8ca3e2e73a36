"""Kept bases: committed steps whose MANIFEST and parts are copied into the store.

Their packs stay alive whatever is deleted outside the store, so they restore when no
step does. The newest stays, and older ones that share no pack with it: physically
separate copies. Does not belong here: when a save does it.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from orbax_delta import records
from orbax_delta.errors import CorruptionError, FormatError, StorageError
from orbax_delta.manifests import MANIFEST_NAME, Manifest, parse_manifest
from orbax_delta.options import DeltaOptions
from orbax_delta.places import Place
from orbax_delta.store import STORE_NAME, DeltaStore, Folder

_logger = logging.getLogger("orbax_delta")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is to be known of a state in order to keep or release it.

    Attributes:
        attempt: Attempt of its save, and name of its folder in the store.
        item: Its item.
        save_index: Saves before it, in a row.
        wall_time: When it was saved, in seconds since 1970.
        packs: Packs that it needs.
        root_uuid: Its root, where several use the store.
    """

    attempt: str
    item: str
    save_index: int
    wall_time: float
    packs: frozenset[str]
    root_uuid: str = ""

    @classmethod
    def of(cls, manifest: Manifest) -> "Kept":
        """What the MANIFEST of a base says."""
        return cls(
            attempt=manifest.attempt,
            item=manifest.item,
            save_index=manifest.save_index,
            wall_time=manifest.wall_time,
            packs=frozenset(manifest.packs),
            root_uuid=manifest.root_uuid,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BasePlan:
    """What becomes of the bases of an item with a save.

    Attributes:
        take: Whether the state that is saved becomes a base.
        release: Attempts of bases that are no longer needed.
        copies: Of the state itself and the bases kept, how many share no pack.
    """

    take: bool
    release: Sequence[str]
    copies: int


def read_bases(store: DeltaStore, known: Mapping[str, Kept]) -> dict[str, Kept]:
    """The bases of a store by attempt; what is in `known` is not read again.

    One that cannot be read is logged and left out: it must not stop a save.

    Raises:
        StorageError: The storage failed.
    """
    found = {}
    for attempt in _attempts(store):
        try:
            found[attempt] = known.get(attempt) or _read(store, attempt)
        except (CorruptionError, FormatError, StorageError) as error:
            _logger.warning("a kept base cannot be read: %s", error)
    return {attempt: kept for attempt, kept in found.items() if kept is not None}


def manifest_keys(store: DeltaStore) -> list[str]:
    """Keys of the MANIFESTs of all bases, of all roots that use the store."""
    return [
        f"{STORE_NAME}/bases/{attempt}/{MANIFEST_NAME}" for attempt in _attempts(store)
    ]


def _attempts(store: DeltaStore) -> list[str]:
    return _whole(store.bases.names())


def _whole(keys: Sequence[str]) -> list[str]:
    names = (key.split("/") for key in keys)
    return [parts[0] for parts in names if parts[1:] == [MANIFEST_NAME]]


def _read(store: DeltaStore, attempt: str) -> Kept | None:
    folder = store.bases.child(attempt)
    data = folder.read(MANIFEST_NAME)
    if data is None:
        return None  # released meanwhile
    manifest = parse_manifest(data, where=folder.url + MANIFEST_NAME)
    check_attempt(manifest, folder.url)
    return Kept.of(manifest)


def check_attempt(manifest: Manifest, url: str) -> None:
    """Whether a MANIFEST is that of the base in whose folder it lies.

    Raises:
        CorruptionError: It is another one's.
    """
    if manifest.attempt != url.rstrip("/").rpartition("/")[2]:
        raise CorruptionError(
            f"{url.rstrip('/')}/{MANIFEST_NAME} is that of attempt {manifest.attempt}, "
            "but a kept base lies in a folder named after its attempt. Put the right "
            "one back from a copy, or delete the folder: no step needs it"
        )


def plan(kept: Mapping[str, Kept], new: Kept, options: DeltaOptions) -> BasePlan:
    """What to keep once `new` is committed; changes nothing."""
    older = sorted(
        (
            base
            for base in kept.values()
            if (base.root_uuid, base.item) == (new.root_uuid, new.item)
        ),
        # One from the future is older: the clock has been set back since.
        key=lambda base: (
            base.wall_time <= new.wall_time,
            base.wall_time,
            base.save_index,
        ),
        reverse=True,
    )
    # After a return to an older step the count goes on from there: only how far apart.
    take = options.keep_bases > 0 and all(
        abs(new.save_index - base.save_index) >= max(1, options.full_every)
        for base in older[:1]
    )
    there = [new, *older] if take else older
    stay = _worth_keeping(there, options.keep_bases)
    return BasePlan(
        take=take,
        release=[base.attempt for base in there if base not in stay],
        copies=len(_separate([new, *stay])),
    )


def _worth_keeping(bases: Sequence[Kept], count: int) -> list[Kept]:
    """The newest base, and older ones that share no pack with it and each other.

    What never changes is written anew only once in many saves, so the next separate
    one has to wait for that: the oldest in between that can become it is kept too.
    """
    chosen = _separate(bases)[:count]
    last = chosen[1:2]
    between = bases[: bases.index(last[0])] if last else bases
    waiting = [
        base
        for base in between
        if base not in chosen and not any(base.packs & other.packs for other in last)
    ]
    keep = [*chosen, *waiting[-1:]] if count > 1 else chosen
    return [base for base in bases if base in keep]


def _separate(states: Sequence[Kept]) -> list[Kept]:
    """States, newest first, that share no pack with a newer one of the result."""
    used: set[str] = set()
    found = []
    for state in states:
        if not state.packs & used:
            used |= state.packs
            found.append(state)
    return found


def keep(store: DeltaStore, manifest: Manifest, source: Folder) -> None:
    """Copy a committed step's files into the store: parts, then MANIFEST.

    Args:
        store: The store.
        manifest: MANIFEST of the step; its packs are pinned by the caller.
        source: Folder of the step's item.

    Raises:
        CorruptionError: A file does not read back as it was written.
        StorageError: The storage failed.
    """
    base = store.bases.child(manifest.attempt)
    for part in manifest.parts:
        data = source.read(part.name)
        if data is None or records.digest(data).hex() != part.digest:
            raise CorruptionError(
                f"{source.url}{part.name} does not read back as it was written"
            )
        base.write(part.name, data)
    data = source.read(MANIFEST_NAME)
    if data is None:
        raise CorruptionError(f"{source.url}{MANIFEST_NAME} is gone")
    check_attempt(parse_manifest(data, where=source.url + MANIFEST_NAME), base.url)
    base.write(MANIFEST_NAME, data)


def release(store: DeltaStore, attempt: str) -> None:
    """Let go of a base: its MANIFEST first, so that a half is never taken for one."""
    base = store.bases.child(attempt)
    base.delete(MANIFEST_NAME)
    base.clear()


def leftovers(store: DeltaStore) -> list[str]:
    """Attempts with files but no MANIFEST: bases half copied or half released."""
    listed = store.bases.names()
    # A process killed in its first write has left nothing that is listed.
    there = (*listed, *store.bases.unfinished())
    return sorted({key.split("/")[0] for key in there} - {*_whole(listed)})


def place_of(store: DeltaStore, manifest: Manifest) -> Place:
    """Where a base lies, under the name of the step that it was."""
    folder = store.bases.child(manifest.attempt)
    return Place(
        item_url=folder.url.rstrip("/"),
        step_name=str(manifest.report.get("step", manifest.step)),
        item=manifest.item,
        root_url=store.root.url.rstrip("/"),
        opened=folder,
    )
