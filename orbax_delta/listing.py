"""What lies below a root: its store and the items of its steps, from MANIFESTs only.

What cannot be read is listed with its error, so that one damaged file never hides the
rest. Does not belong here: rows, chunks, how a list is shown.
"""

import contextlib
import dataclasses
import os
import urllib.parse
from collections.abc import Callable, Collection, Sequence

from orbax_delta import archived, bases, lost, prune, steps
from orbax_delta.errors import (
    DeltaError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from orbax_delta.manifests import MANIFEST_NAME, Manifest
from orbax_delta.places import (
    MAX_MANIFEST_DEPTH,
    SELF_CONTAINED_PACKS,
    TEMPORARY_SUFFIX,
    Place,
    locate,
)
from orbax_delta.reports import SaveReport
from orbax_delta.store import STORE_NAME, DeltaStore, Folder
from orbax_delta.storefiles import ARCHIVED_FILE, STORE_FILE, Archived

Progress = Callable[[str, int, int], None]
"""Told of progress as (what is counted, how many are done, how many there are)."""

_ORBAX_METADATA = "_CHECKPOINT_METADATA"
_MAX_TRIES = 50
_MAX_NAMED = 12


def url_of(root: str | os.PathLike[str]) -> str:
    """A root as it is wherever the process was started.

    >>> url_of("file:///data/my%20run")
    '/data/my run'

    Raises:
        InvalidInputError: It is an empty text, as of a shell's variable that is not
            set, or no UTF-8, which TensorStore insists on.
    """
    text = os.fspath(root)
    if text.startswith("file://"):
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    if not text:
        raise InvalidInputError(
            "the path is an empty text; name a folder, or . for the one you are in"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"the path {text!r:.300} cannot be written in UTF-8; give the folder "
            "another name, or go into it and name it ."
        ) from error
    return text if "://" in text else os.path.abspath(text)


def is_base(key: str) -> bool:
    """Whether a key of a root lies in its store: it is of a kept base."""
    return key.startswith(f"{STORE_NAME}/")


def no_progress(what: str, done: int, total: int) -> None:
    """For callers that show none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One MANIFEST below a root, or a part that has lost its MANIFEST.

    Attributes:
        key: Key of the MANIFEST, relative to the root.
        step: Folder of its step, or of the kept base, relative to the root.
        place: Where it lies.
        manifest: What it says; None if it cannot be read.
        report: The report kept in it; None if that cannot be read.
        error: Why one of them cannot be read.
        lost_part: Key of a part, or of a damaged link, that lies there, if the MANIFEST
            does not.
        archived: Where the item is, if it was moved to an archive; then `manifest` is
            None, and `key` says where it was.
    """

    key: str
    step: str
    place: Place
    manifest: Manifest | None
    report: SaveReport | None
    error: DeltaError | None
    lost_part: str = ""
    archived: Archived | None = None

    @property
    def is_base(self) -> bool:
        """Whether it is a copy that the store keeps."""
        return is_base(self.key)

    @property
    def finished(self) -> bool:
        """Whether Orbax has given the step its final name."""
        return TEMPORARY_SUFFIX not in self.key

    def answers_to(self, wanted: str) -> bool:
        """Whether a user who writes `wanted` means this step."""
        if self.is_base:
            return wanted == self.step
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
        bases: States that the store keeps, oldest first.
        others: Steps saved by other handlers, as their folders.
    """

    folder: Folder
    store: DeltaStore
    store_error: DeltaError | None
    items: Sequence[Item]
    bases: Sequence[Item]
    others: Sequence[str]

    @property
    def everything(self) -> Sequence[Item]:
        """Items of steps, then kept bases."""
        return (*self.items, *self.bases)

    def select(self, wanted: Sequence[str]) -> list[Item]:
        """The items of the named steps; where none is named all, with kept bases.

        Raises:
            NotFoundError: There is no such step.
        """
        for name in wanted:
            if not any(item.answers_to(name) for item in self.everything):
                raise NotFoundError(
                    f"{self.folder.url} holds no step {name!r} saved by orbax_delta; "
                    + _there_are(list(dict.fromkeys(item.step for item in self.items)))
                )
        return [
            item
            for item in self.everything
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
        item = _read_item(folder, key, store)
        if item is not None:
            items.append(item)
        progress("MANIFESTs", done + 1, len(keys))
    kept = [item for item in items if item.is_base and _is_own(item, store)]
    kept.sort(key=lambda item: item.manifest.wall_time if item.manifest else 0.0)
    items = [item for item in items if not item.is_base]
    items += _without_manifest(store, {item.key for item in items})
    items = _without_deleted(items)
    items.sort(key=lambda item: (item.place.step is None, item.place.step, item.key))
    root = Root(
        folder=folder,
        store=store,
        store_error=store_error,
        items=items,
        bases=kept,
        others=_steps_of_others(folder, items),
    )
    if not (root.everything or root.others or store.uuid or store.packs.names()):
        raise NotFoundError(_nothing_here(folder))
    return root


def _open_store(folder: Folder) -> tuple[DeltaStore, DeltaError | None]:
    try:
        store = DeltaStore.open(folder)
    except DeltaError as error:
        return DeltaStore.unidentified(folder), error
    return store or DeltaStore(folder, ""), None


def _is_own(base: Item, store: DeltaStore) -> bool:
    """Whether a base may be of this root, of all that use the store."""
    return base.manifest is None or base.manifest.root_uuid == store.root_uuid


def _read_item(folder: Folder, key: str, store: DeltaStore) -> Item | None:
    """The item of a MANIFEST; None if it has vanished since it was found."""
    path = key.removesuffix(MANIFEST_NAME).rstrip("/")
    place = locate(store.url_of(path))
    if is_base(key):
        # The folder is named by its attempt, which says no step, whatever it ends in.
        opened = store.bases.child(path.rpartition("/")[2])
        place = dataclasses.replace(place, step_name="", opened=opened)
    manifest, report, error = None, None, None
    try:
        found = steps.read_manifest(place.folder)
        if found is None:
            return None
        if is_base(key):
            bases.check_attempt(found, place.item_url)
        manifest = found
        report = SaveReport.from_document(manifest.report, where=folder.url + key)
    except DeltaError as caught:
        error = caught
    if manifest is not None and manifest.self_contained:
        # Only a MANIFEST can tell: the folder's name may look like a manager's.
        place = _self_contained(place)
    step = _step_folder(path, place)
    if is_base(key):
        step = path
        place = bases.place_of(store, manifest) if manifest else place
    return Item(
        key=key,
        step=step,
        place=place,
        manifest=manifest,
        report=report,
        error=error,
    )


def _step_folder(path: str, place: Place) -> str:
    """Folder of the step that an item's folder `path` belongs to, or is."""
    inside = path if place.root_url is None else path.rpartition("/")[0]
    return inside or place.step_name


def _self_contained(place: Place) -> Place:
    name = place.item_url.rstrip("/").rpartition("/")[2]
    return Place(item_url=place.item_url, step_name=name, item="", root_url=None)


def _without_manifest(store: DeltaStore, known: Collection[str]) -> list[Item]:
    """Steps that were moved to an archive, and those that have lost their MANIFEST."""
    found = _find(store.root, ("part-*", ARCHIVED_FILE), MAX_MANIFEST_DEPTH)
    links = [key for key in found if key.rpartition("/")[2] == ARCHIVED_FILE]
    moved = [
        item
        for link in links
        if (item := _archived_item(store.root, link)) and item.key not in known
    ]
    parts = [key for key in found if key not in links]
    there = {*known, *(item.key for item in moved)}
    lost_keys = lost.lost_manifests(store, parts, there)
    return [*moved, *(_lost_item(store.root, *found) for found in lost_keys.items())]


def _archived_item(folder: Folder, link: str) -> Item | None:
    """The item that a link stands for; None if it has vanished since it was found."""
    path = link.rpartition("/")[0]
    place = locate((folder.url + path).rstrip("/"))
    found, error = None, None
    try:
        found = archived.read(place.folder)
        if found is None:
            return None
        if not found.store_uuid:
            place = _self_contained(place)
    except DeltaError as caught:
        error = caught
    return Item(
        key=f"{path}/{MANIFEST_NAME}".removeprefix("/"),
        step=_step_folder(path, place),
        place=place,
        manifest=None,
        report=None,
        error=error,
        lost_part=link if error else "",
        archived=found,
    )


def _without_deleted(items: Sequence[Item]) -> list[Item]:
    """The same without what is just being deleted, which reads as damage."""
    if any(item.error is not None for item in items):
        steps.let_deletions_end()
    return [item for item in items if item.error is None or not _is_deleted(item)]


def _is_deleted(item: Item) -> bool:
    try:
        gone = steps.is_gone(item.place.folder)
    except DeltaError:
        return False  # it is there, and damaged
    return gone and (
        not item.lost_part
        or item.place.folder.read(item.lost_part.rpartition("/")[2]) is None
    )


def _lost_item(folder: Folder, key: str, part: str) -> Item:
    path = key.removesuffix(MANIFEST_NAME).rstrip("/")
    place = locate(folder.url + path)
    if Folder(place.item_url).child(SELF_CONTAINED_PACKS).names():
        place = _self_contained(place)
    return Item(
        key=key,
        step=_step_folder(path, place),
        place=place,
        manifest=None,
        report=None,
        error=lost.loss(place, part),
        lost_part=part,
    )


def _steps_of_others(folder: Folder, items: Sequence[Item]) -> list[str]:
    """Folders that Orbax calls a checkpoint and that hold no MANIFEST of ours."""
    ours = {item.key.partition("/")[0] for item in items}
    found = _find(folder, _ORBAX_METADATA, 1)
    names = {key.rpartition("/")[0] for key in found} - {""}
    return sorted(names - ours, key=lambda name: (len(name), name))


def _find(folder: Folder, name: str | tuple[str, ...], max_depth: int) -> list[str]:
    for _ in range(_MAX_TRIES):
        # Not found is a step that was renamed or deleted while it was read.
        with contextlib.suppress(FileNotFoundError):
            return folder.find(name, max_depth=max_depth, skip=STORE_NAME)
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
