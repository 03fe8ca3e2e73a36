"""Parts that lie in a folder without their MANIFEST, and are not being saved.

A step is there when its MANIFEST is, so such a folder is none to a reader or a prune;
but a step that has lost its MANIFEST must not look as if it had never been.
"""

from collections.abc import Collection, Iterable

from orbax_delta.errors import CorruptionError, DeltaError
from orbax_delta.manifests import MANIFEST_NAME, PART_NAME
from orbax_delta.marks import copying_pin, parse_mark
from orbax_delta.places import TEMPORARY_SUFFIX, Place
from orbax_delta.store import COMMIT_MARKER, DeltaStore


def lost_manifests(
    store: DeltaStore, parts: Iterable[str], known: Collection[str]
) -> dict[str, str]:
    """Keys of MANIFESTs that are gone, each with a part that lies where it was.

    Args:
        store: The store of the root that all keys are relative to.
        parts: Keys of files that are named as parts are.
        known: Keys of the MANIFESTs that are there.
    """
    lost: dict[str, str] = {}
    for part in parts:
        path, _, name = part.rpartition("/")
        key = f"{path}/{MANIFEST_NAME}".removeprefix("/")
        unfinished = TEMPORARY_SUFFIX in part
        if PART_NAME.fullmatch(name) and not unfinished and key not in known:
            lost.setdefault(key, part)
    return {
        key: part
        for key, part in lost.items()
        # In this order: a save writes its MANIFEST before its pin may go.
        if (_is_committed(store, key) or not _is_being_saved(store, part))
        and store.root.read(key) is None
    }


def _is_committed(store: DeltaStore, key: str) -> bool:
    """Whether Orbax has marked the item as saved; its pin stays until the next save."""
    marker = key.removesuffix(MANIFEST_NAME) + COMMIT_MARKER
    return store.root.read(marker) is not None


def _is_being_saved(store: DeltaStore, part: str) -> bool:
    """Whether a process that may run pins the attempt of a part.

    Or whether the part is of a copy that was not finished, by a process dead or alive.
    """
    name = part.rpartition("/")[2].removeprefix("part-")
    if store.pins.read(copying_pin(name.partition("-")[0])) is not None:
        return True
    data = store.pins.read(name)
    try:
        return data is not None and not parse_mark(data, where=name).owner.known_dead
    except DeltaError:
        return False  # a damaged pin is reported as such


def loss(place: Place, part: str) -> CorruptionError:
    """What to tell of a step that has lost its MANIFEST."""
    return CorruptionError(
        f"{place.label} holds no {MANIFEST_NAME}, beside {part.rpartition('/')[2]}: it "
        "was lost, or a save or a deletion of the step was interrupted. Put the "
        f"{MANIFEST_NAME} back from a copy, or delete the folder"
    )
