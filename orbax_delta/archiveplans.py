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
        missing_bytes: Their size.
        there: How many packs of the store it has.
        unmarked: Whether it lacks the marker that Orbax looks for in a bucket.
        error: Why it cannot be archived.
    """

    name: str
    number: int | None
    items: Sequence[ItemPlan] = ()
    missing: Sequence[str] = ()
    missing_bytes: int = 0
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
        steps: The steps, oldest first.
    """

    root: Root
    target: Folder
    store: DeltaStore | None
    steps: Sequence[StepPlan]


def plan(
    url: str, target_url: str, choice: Choice, progress: Progress = listing.no_progress
) -> ArchivePlan:
    """Find out what there is to do; changes nothing.

    Raises:
        InvalidInputError: The choice says nothing; or the archive lies in the root, is
            that of another store, or has another step of a name.
        NotFoundError: There is no such root or step, or it is of another handler.
        CorruptionError: A file of the archive is damaged.
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
    sizes = _Sizes(root.store.packs, store.packs if store else None)
    found = (
        _step_plan(root, target, name, by_name[name], sizes, named=named)
        for name in chosen
    )
    return ArchivePlan(
        root=root, target=target, store=store, steps=[one for one in found if one]
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


class _Sizes:
    """Packs of the two stores, each asked for once."""

    def __init__(self, source: Folder, target: Folder | None) -> None:
        self._source = source
        self._there = set(target.names()) if target else set()
        self._sizes: dict[str, int] = {}

    def is_there(self, pack: str) -> bool:
        return pack in self._there

    def total(self, packs: Sequence[str]) -> int:
        unknown = [pack for pack in packs if pack not in self._sizes]
        self._sizes |= filesizes.pack_sizes(self._source, unknown)
        return sum(self._sizes.get(pack, 0) for pack in packs)


def _step_plan(
    root: Root,
    target: Folder,
    name: str,
    items: Sequence[Item],
    sizes: _Sizes,
    *,
    named: bool,
) -> StepPlan | None:
    """What there is to do for a step; None for one that a policy leaves alone."""
    number = items[0].place.step
    errors = [item.error for item in items if item.manifest is None and item.error]
    if errors:
        return StepPlan(name=name, number=number, error=errors[0])
    planned = [_item_plan(target, name, item) for item in items]
    _require_free(root, target, name, planned)
    for one in planned:
        if one.manifest is None and one.there is None and one.link is not None:
            if not named:
                return None
            return StepPlan(name=name, number=number, error=_elsewhere(name, one.link))
    packs = sorted(
        {
            pack
            for one in planned
            for pack in one.in_force.packs
            if not one.in_force.self_contained
        }
    )
    missing = [pack for pack in packs if not sizes.is_there(pack)]
    return StepPlan(
        name=name,
        number=number,
        items=planned,
        missing=missing,
        missing_bytes=sizes.total(missing),
        there=len(packs) - len(missing),
        unmarked=not target.is_local and target.child(name).read(COMMIT_MARKER) is None,
    )


def _item_plan(target: Folder, name: str, item: Item) -> ItemPlan:
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


def _elsewhere(name: str, link: Archived) -> NotFoundError:
    return NotFoundError(
        f"step {name} was moved to the archive {link.archive} and is not in this one; "
        f"`orbax-delta archive {link.archive} ARCHIVE --steps {name}` copies it there"
    )


def wanted_uuid(found: ArchivePlan) -> str:
    """Identity of the store that the archive needs; empty where it needs none.

    Raises:
        CorruptionError: The root does not tell.
        FormatError: The same.
    """
    needed = any(
        item.manifest and not item.manifest.self_contained
        for step in found.steps
        for item in step.items
    )
    if not needed:
        return ""
    if found.root.store_error is not None:
        raise found.root.store_error
    uuids = {
        item.manifest.store_uuid
        for step in found.steps
        for item in step.items
        if item.manifest and not item.manifest.self_contained
    }
    if uuids != {found.root.store.uuid}:
        raise FormatError(
            f"steps of {found.root.folder.url} need the stores {sorted(uuids)}, but "
            f"its own is {found.root.store.uuid or 'missing'}. `orbax-delta repair` "
            "writes a lost STORE.json anew"
        )
    return found.root.store.uuid
