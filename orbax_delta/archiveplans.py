"""What there is to copy of the steps for an archive; a plan changes nothing.

All that is wrong with the request itself is found here, before anything is written.
Does not belong here: which steps (`archivechoices`), copying (`archives`).
"""

import dataclasses
from collections.abc import Sequence

from orbax_delta import archived, filesizes, listing, registry, steps
from orbax_delta.archivechoices import Choice, by_step, choose
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    InvalidInputError,
    NotFoundError,
)
from orbax_delta.listing import Item, Progress, Root
from orbax_delta.manifests import Manifest
from orbax_delta.places import SELF_CONTAINED_PACKS
from orbax_delta.store import COMMIT_MARKER, STORE_NAME, DeltaStore, Folder
from orbax_delta.storefiles import STORE_FILE, Archived


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlan:
    """One item of a step.

    Attributes:
        source: Where it lies.
        path: Its folder in that of the step; empty where that is the item's.
        manifest: Its MANIFEST; None if it was moved already.
        link: Where it was moved to, if it was.
        there: Its MANIFEST in the archive, if it is there.
        linked_there: Whether the archive has a link to where it was moved from there.
    """

    source: Folder
    path: str
    manifest: Manifest | None
    link: Archived | None
    there: Manifest | None
    linked_there: bool

    @property
    def in_force(self) -> Manifest:
        """What a reader of the archive finds, now or when it is copied."""
        found = self.there or self.manifest
        assert found is not None
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What there is to do for one step.

    Attributes:
        name: Its folder, in the root and in the archive.
        number: Its number; None where its name has none.
        items: Its items.
        missing: Packs of the store that the archive does not have.
        copies: How many of those no step before it brings.
        copied_bytes: Their size, and that of packs which self-contained items have.
        there: How many packs of the store it has.
        unmarked: Whether it lacks the marker that Orbax looks for in a bucket.
        error: Why it cannot be archived.
    """

    name: str
    number: int | None
    items: Sequence[ItemPlan] = ()
    missing: Sequence[str] = ()
    copies: int = 0
    copied_bytes: int = 0
    there: int = 0
    unmarked: bool = False
    error: DeltaError | None = None

    @property
    def is_there(self) -> bool:
        """Whether the archive has the step and its packs."""
        there = all(item.there for item in self.items) and not self.missing
        return there and not self.unmarked and not self.error

    @property
    def is_moved(self) -> bool:
        """Whether nothing but links is left of it."""
        return all(item.manifest is None for item in self.items)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePlan:
    """What there is to do.

    Attributes:
        root: The root.
        target: The folder of the archive.
        store: Store of the archive; None if it is yet to be made, or none is needed.
        needs_store: Whether a step that is to be copied needs one.
        steps: The steps, oldest first.
    """

    root: Root
    target: Folder
    store: DeltaStore | None
    needs_store: bool
    steps: Sequence[StepPlan]


def plan(
    url: str, target_url: str, choice: Choice, progress: Progress = listing.no_progress
) -> ArchivePlan:
    """Find out what there is to do; changes nothing.

    Raises:
        InvalidInputError: The choice says nothing; or the archive lies in the root, is
            that of another store, or has another step of a name that was given.
        NotFoundError: There is no such root or step, or it is of another handler.
        CorruptionError: A file of the archive is damaged, or the root does not tell
            which store it has.
        FormatError: The same.
        StorageError: The storage failed.
    """
    choice.check()
    root = listing.read_root(url, progress)
    target = Folder(target_url)
    _require_apart(root, target)
    store = _store_of_archive(target, root)
    by_name = by_step(root)
    chosen = choose(root, by_name, choice)
    named = bool(choice.steps)
    known = _Packs(root.store.packs, store.packs if store else None)
    found = [
        _step_plan(root, target, name, by_name[name], known, named=named)
        for name in chosen
    ]
    planned = [one for one in found if one]
    needs_store = any(map(_needs_store, planned))
    if needs_store and root.store_error is not None:
        raise root.store_error
    return ArchivePlan(
        root=root,
        target=target,
        store=store,
        needs_store=needs_store,
        steps=planned,
    )


def _needs_store(step: StepPlan) -> bool:
    return any(
        item.manifest is not None and not item.manifest.self_contained
        for item in step.items
    )


def _require_apart(root: Root, target: Folder) -> None:
    folders = {root.folder.url: root.folder}
    if root.store.shared:
        folders[root.store.url] = root.store.folder
    inner = registry.real_url(target)
    for folder in folders.values():
        outer = registry.real_url(folder)
        if outer.startswith(inner) or inner.startswith(outer):
            raise InvalidInputError(
                f"the archive {target.url} and {folder.url} must lie apart, not one "
                "inside the other; choose another folder for the archive"
            )


def _store_of_archive(target: Folder, root: Root) -> DeltaStore | None:
    """The store of an archive, if it has one; that of no other run."""
    if target.read(STORE_FILE) is not None:
        raise InvalidInputError(
            f"{target.url} is a shared store, not a folder of steps; choose another"
        )
    store = DeltaStore.open(target)
    if store is None:
        below = target.child(STORE_NAME)
        if below.child("packs").names():
            raise CorruptionError(
                f"{below.url} holds packs but no {STORE_FILE}; nothing was written. "
                f"`orbax-delta repair {target.url}` writes it anew"
            )
        return None
    if root.store_error is not None:
        raise root.store_error
    if store.uuid != root.store.uuid:
        raise InvalidInputError(
            f"{target.url} has store {store.uuid}, but the steps of {root.folder.url} "
            f"are of store {root.store.uuid or 'none'}: it is the archive of another "
            "run, or a run of its own. Choose another folder for the archive"
        )
    return store


# --- what there is to do --------------------------------------------------------------


class _Packs:
    """Packs that the archive has, and those that planned steps bring to it."""

    def __init__(self, source: Folder, target: Folder | None) -> None:
        self._source = source
        self._there = set(target.names()) if target else set()
        self._coming: set[str] = set()

    def is_there(self, pack: str) -> bool:
        return pack in self._there

    def bring(self, missing: Sequence[str]) -> tuple[int, int]:
        """How many of these no step before brings, and their bytes."""
        new = [pack for pack in missing if pack not in self._coming]
        self._coming.update(new)
        return len(new), sum(filesizes.pack_sizes(self._source, new).values())


def _step_plan(
    root: Root,
    target: Folder,
    name: str,
    items: Sequence[Item],
    known: _Packs,
    *,
    named: bool,
) -> StepPlan | None:
    """What there is to do for a step; None for one that a policy leaves alone."""
    number = items[0].place.step
    try:
        planned = [_item_plan(target, name, item) for item in items]
        _require_free(root, target, name, planned)
        _require_own_store(root, planned)
    except (CorruptionError, FormatError) as error:
        return StepPlan(name=name, number=number, error=error)
    except InvalidInputError as error:
        if named:
            raise
        # What was saved again after a rollback must not keep all others from going.
        return StepPlan(name=name, number=number, error=error)
    for one in planned:
        if one.manifest is None and one.there is None and one.link is not None:
            if not named:
                return None
            gone = _elsewhere(target, name, one.link)
            return StepPlan(name=name, number=number, error=gone)
    packs = sorted(
        {
            pack
            for one in planned
            for pack in one.in_force.packs
            if not one.in_force.self_contained
        }
    )
    missing = [pack for pack in packs if not known.is_there(pack)]
    copies, copied_bytes = known.bring(missing)
    return StepPlan(
        name=name,
        number=number,
        items=planned,
        missing=missing,
        copies=copies,
        copied_bytes=copied_bytes + sum(map(_own_bytes, planned)),
        there=len(packs) - len(missing),
        unmarked=not target.is_local and target.child(name).read(COMMIT_MARKER) is None,
    )


def _own_bytes(item: ItemPlan) -> int:
    """Of the packs that a self-contained item has beside it, if they are to go."""
    if item.manifest is None or item.there or not item.manifest.self_contained:
        return 0
    own = item.source.child(SELF_CONTAINED_PACKS)
    return sum(filesizes.pack_sizes(own, item.manifest.packs).values())


def _item_plan(target: Folder, name: str, item: Item) -> ItemPlan:
    if item.manifest is None and item.error is not None:
        raise item.error
    path = item.key.rpartition("/")[0].removeprefix(name).removeprefix("/")
    there = target.child(f"{name}/{path}".rstrip("/"))
    manifest = steps.read_manifest(there)
    link = archived.read(there) if item.archived is None else None
    same = manifest is None or _is_same(item, manifest)
    known = (
        link is None
        or item.manifest is None
        or (archived.leads_to(link, item.manifest))
    )
    if not (same and known):
        raise InvalidInputError(
            f"{there.url} holds another save than step {name} of the root; nothing was "
            "written. Delete it there, or choose another folder for the archive"
        )
    return ItemPlan(
        source=item.place.folder,
        path=path,
        manifest=item.manifest,
        link=item.archived,
        there=manifest,
        linked_there=link is not None,
    )


def _is_same(item: Item, there: Manifest) -> bool:
    if item.manifest is not None:
        return archived.is_same_save(item.manifest, there)
    return item.archived is not None and archived.leads_to(item.archived, there)


def _require_free(
    root: Root, target: Folder, name: str, items: Sequence[ItemPlan]
) -> None:
    """Nothing else lies where the step is to go; half a copy of it may.

    Raises:
        InvalidInputError: Something does.
    """
    if any(item.there or item.linked_there for item in items):
        return
    found = set(target.child(name).names())
    if found and not (target.is_local or found - set(root.folder.child(name).names())):
        return
    if found:
        raise InvalidInputError(
            f"{target.url}{name} holds another step than that of {root.folder.url}, or "
            "none of this package; nothing was written. Delete it, or choose another "
            "folder for the archive"
        )


def _require_own_store(root: Root, items: Sequence[ItemPlan]) -> None:
    """The archive has the identity of the root's store, and no other.

    Raises:
        FormatError: An item is of another store.
    """
    for item in items:
        manifest = item.manifest
        if manifest is None or manifest.self_contained:
            continue
        if root.store_error is None and manifest.store_uuid != root.store.uuid:
            raise FormatError(
                f"{item.source.url} is of store {manifest.store_uuid}, but that of "
                f"{root.folder.url} is {root.store.uuid or 'missing'}: the step was "
                "copied from another root, which can be archived by itself; or "
                "STORE.json was lost"
            )


def _elsewhere(target: Folder, name: str, link: Archived) -> NotFoundError:
    if registry.is_same_place(link.archive, registry.location(target)):
        return NotFoundError(
            f"step {name} was moved to this archive, {link.archive}, which does not "
            "hold it any more: put it back there, or delete its folder in the root"
        )
    return NotFoundError(
        f"step {name} was moved to the archive {link.archive} and is not in this one; "
        f"`orbax-delta archive {link.archive} ARCHIVE --steps {name}` copies it there"
    )
