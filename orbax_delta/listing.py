"""What lies below a root: its store and the items of its steps, from MANIFESTs only.

What cannot be read is listed with its error, so that one damaged file never hides the
rest. Does not belong here: rows, chunks, how a list is shown.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence

from orbax_delta import prune, steps
from orbax_delta.errors import DeltaError, NotFoundError, StorageError
from orbax_delta.manifests import MANIFEST_NAME, Manifest
from orbax_delta.places import TEMPORARY_SUFFIX, Place, locate
from orbax_delta.reports import SaveReport
from orbax_delta.store import STORE_FILE, STORE_NAME, DeltaStore, Folder

Progress = Callable[[str, int, int], None]
"""Told of progress as (what is counted, how many are done, how many there are)."""

_ORBAX_METADATA = "_CHECKPOINT_METADATA"
_MAX_TRIES = 50
_MAX_NAMED = 12


def no_progress(what: str, done: int, total: int) -> None:
    """For callers that show none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One MANIFEST below a root.

    Attributes:
        key: Key of the MANIFEST, relative to the root.
        step: Folder of its step, relative to the root.
        place: Where it lies.
        manifest: What it says; None if it cannot be read.
        report: The report kept in it; None if that cannot be read.
        error: Why one of them cannot be read.
    """

    key: str
    step: str
    place: Place
    manifest: Manifest | None
    report: SaveReport | None
    error: DeltaError | None

    @property
    def finished(self) -> bool:
        """Whether Orbax has given the step its final name."""
        return TEMPORARY_SUFFIX not in self.key

    def answers_to(self, wanted: str) -> bool:
        """Whether a user who writes `wanted` means this step."""
        return wanted in (self.step, self.place.step_name) or (
            wanted.isdecimal() and self.place.step == int(wanted)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A folder with checkpoints.

    Attributes:
        folder: The folder.
        store: Its store; without identity where STORE.json is missing or damaged.
        store_error: Why the identity is not known; None too where there is no store.
        items: Items saved by this package, in order of their steps.
        others: Steps saved by other handlers, as their folders.
    """

    folder: Folder
    store: DeltaStore
    store_error: DeltaError | None
    items: Sequence[Item]
    others: Sequence[str]

    def select(self, wanted: Sequence[str]) -> list[Item]:
        """The items of the named steps; all of them where none is named.

        Raises:
            NotFoundError: There is no such step.
        """
        for name in wanted:
            if not any(item.answers_to(name) for item in self.items):
                raise NotFoundError(
                    f"{self.folder.url} holds no step {name!r} saved by orbax_delta; "
                    + _there_are(list(dict.fromkeys(item.step for item in self.items)))
                )
        return [
            item
            for item in self.items
            if not wanted or any(item.answers_to(name) for name in wanted)
        ]


def read_root(url: str, progress: Progress = no_progress) -> Root:
    """Read every MANIFEST below a folder.

    Args:
        url: A manager's root, a step's or an item's folder in it, or a folder with
            self-contained checkpoints.
        progress: Told of every MANIFEST read.

    Raises:
        NotFoundError: The folder does not exist, or holds nothing of this package and
            no step of another handler.
        StorageError: The storage failed, or folders kept appearing and vanishing.
    """
    if "://" not in url and not os.path.isdir(url):
        raise NotFoundError(
            f"there is no folder {url}; expected the folder that was given to "
            "CheckpointManager, which holds one folder a step"
        )
    folder = Folder(url)
    store, store_error = _open_store(folder)
    keys = sorted(prune.manifest_keys(store))
    items = []
    for done, key in enumerate(keys):
        item = _read_item(folder, key)
        if item is not None:
            items.append(item)
        progress("MANIFESTs", done + 1, len(keys))
    items.sort(key=lambda item: (item.place.step is None, item.place.step, item.key))
    root = Root(
        folder=folder,
        store=store,
        store_error=store_error,
        items=items,
        others=_steps_of_others(folder, items),
    )
    if not (items or root.others or store.uuid or store.packs.names()):
        raise NotFoundError(_nothing_here(folder))
    return root


def _open_store(folder: Folder) -> tuple[DeltaStore, DeltaError | None]:
    try:
        store = DeltaStore.open(folder)
    except DeltaError as error:
        return DeltaStore(folder, ""), error
    return store or DeltaStore(folder, ""), None


def _read_item(folder: Folder, key: str) -> Item | None:
    """The item of a MANIFEST; None if it has vanished since it was found."""
    path = key.removesuffix(MANIFEST_NAME).rstrip("/")
    place = locate(folder.url + path)
    manifest, report, error = None, None, None
    try:
        manifest = steps.read_manifest(Folder(place.item_url))
        if manifest is None:
            return None
        report = SaveReport.from_document(manifest.report)
    except DeltaError as found:
        error = found
    if manifest is not None and manifest.self_contained:
        # Only a MANIFEST can tell: the folder's name may look like a manager's.
        name = place.item_url.rstrip("/").rpartition("/")[2]
        place = Place(item_url=place.item_url, step_name=name, item="", root_url=None)
    inside = path if place.root_url is None else path.rpartition("/")[0]
    return Item(
        key=key,
        step=inside or place.step_name,
        place=place,
        manifest=manifest,
        report=report,
        error=error,
    )


def _steps_of_others(folder: Folder, items: Sequence[Item]) -> list[str]:
    """Folders that Orbax calls a checkpoint and that hold no MANIFEST of ours."""
    ours = {item.key.partition("/")[0] for item in items}
    for _ in range(_MAX_TRIES):
        try:
            found = folder.find(_ORBAX_METADATA, max_depth=1, skip=STORE_NAME)
        except FileNotFoundError:
            continue  # a step was renamed or deleted while it was read
        names = {key.rpartition("/")[0] for key in found} - {""}
        return sorted(names - ours, key=lambda name: (len(name), name))
    raise StorageError(
        f"the folders below {folder.url} kept changing while they were listed. Try "
        "again when fewer steps come and go"
    )


def _nothing_here(folder: Folder) -> str:
    message = (
        f"{folder.url} holds no {STORE_NAME} and no {MANIFEST_NAME}; expected the "
        "folder that was given to CheckpointManager, which holds one folder a step, or "
        "a checkpoint saved by orbax_delta"
    )
    url = folder.url.rstrip("/")
    for _ in range(3):
        url = url.rpartition("/")[0]
        if not url or url.endswith(":/"):
            break
        if Folder(url).child(STORE_NAME).read(STORE_FILE) is not None:
            return f"{message}. A store lies in {url}; name that folder"
    return message


def _there_are(names: Sequence[str]) -> str:
    if not names:
        return "there is none"
    more = f" and {len(names) - _MAX_NAMED} older" if len(names) > _MAX_NAMED else ""
    return f"there are {', '.join(names[-_MAX_NAMED:])}{more}"
