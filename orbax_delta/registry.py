"""The roots of a shared store: how a root joins one, and how a prune finds them all.

A root says in ROOT.json which store it uses; the store's registry says which roots do.
ROOT.json comes first, the entry of the registry before any pack, and whoever prunes
must find every root of the registry again. Does not belong here: what roots hold.
"""

import contextlib
import logging
import os
import secrets
from collections.abc import Iterable, Sequence

from orbax_delta import storefiles
from orbax_delta.errors import (
    ConflictError,
    CorruptionError,
    DeltaError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from orbax_delta.manifests import MANIFEST_NAME, Manifest, parse_manifest
from orbax_delta.options import StoreLocation
from orbax_delta.places import MAX_MANIFEST_DEPTH
from orbax_delta.store import COMMIT_MARKER, STORE_NAME, DeltaStore, Folder
from orbax_delta.storefiles import ROOT_FILE, STORE_FILE, Link, Registered

_logger = logging.getLogger("orbax_delta")


# --- joining --------------------------------------------------------------------------


def open_store(root: Folder, wanted: StoreLocation | None) -> DeltaStore:
    """The store that a save to `root` uses, made if need be.

    Args:
        root: Folder of the manager.
        wanted: Location of a shared store; None: whatever the root uses, and a store
            of its own if that is none yet.

    Raises:
        InvalidInputError: The root cannot use that store; nothing was written.
        NotFoundError: The store that the root uses is not there.
        ConflictError: Another job gave the root another store just now.
        CorruptionError: A file that says which store it is is damaged or gone.
        FormatError: The same.
    """
    if wanted is not None:
        store = _open_shared(root, wanted)
    else:
        found = DeltaStore.open(root)
        if found is None:
            _refuse_orphans(root)
        store = found or DeltaStore.open_or_create(root)
    if store.link is not None:
        register(store)
    elif store.shared:
        raise InvalidInputError(
            f"{store.url} is a shared store, but lies where the own store of "
            f"{root.url} would. Move it out of the root and name it by store=..."
        )
    return store


def _open_shared(root: Folder, wanted: StoreLocation) -> DeltaStore:
    folder = Folder(wanted)
    _require_apart(root, folder)
    own = root.child(STORE_NAME)
    if own.read(STORE_FILE) is not None or own.child("packs").names():
        raise InvalidInputError(
            f"{root.url} has a store of its own, {own.url}, which its steps need; it "
            f"cannot change to {folder.url}. Save to it without store=..., or save to "
            "a new root"
        )
    link = DeltaStore.read_link(root)
    found = DeltaStore.of_folder(root, folder, link=link)
    if found is not None and not found.shared:
        raise InvalidInputError(
            f"{folder.url} is the store of one root and cannot be shared; name a "
            "folder that is new or holds a shared store"
        )
    if link is not None:
        return _linked(root, link, folder, found, wanted)
    _refuse_orphans(root)
    if found is None:
        _refuse_misplaced(folder, wanted)
        found = _made(root, folder)
    if found is None:
        raise StorageError(f"{folder.url}{STORE_FILE} appeared and vanished")
    return _join(root, found, wanted)


def _made(root: Folder, folder: Folder) -> DeltaStore | None:
    """A new shared store, or that of another job which was quicker."""
    if not folder.child("packs").names() and not folder.child("roots").names():
        DeltaStore.create(folder, shared=True)
    elif folder.read(STORE_FILE) is None:
        # A new identity would make the steps of all its roots unreadable.
        raise CorruptionError(
            f"{folder.url} holds packs or a registry but no {STORE_FILE}; nothing was "
            "written. `orbax-delta repair` of a root that uses it writes it anew, or "
            "restore it from a copy"
        )
    return DeltaStore.of_folder(root, folder)


def _linked(
    root: Folder,
    link: Link,
    folder: Folder,
    found: DeltaStore | None,
    wanted: StoreLocation,
) -> DeltaStore:
    """The store of a root that has one, if that is the wanted one."""
    if found is None or found.uuid != link.store_uuid:
        what = f"is store {found.uuid}" if found else "holds none"
        raise InvalidInputError(
            f"{root.url} uses the shared store {link.store_uuid} in "
            f"{Folder(link.store).url}, but store=... names {folder.url}, which "
            f"{what}. Save without store=..., or to a new root"
        )
    with contextlib.suppress(NotFoundError):
        same = DeltaStore.open(root)
        if same is not None:
            return same
    # It has moved: only whoever names its new place can know.
    moved = Link(root_uuid=link.root_uuid, store=wanted, store_uuid=link.store_uuid)
    root.child(STORE_NAME).replace(ROOT_FILE, storefiles.root_document(moved))
    found.link = moved
    return found


def _join(root: Folder, store: DeltaStore, wanted: StoreLocation) -> DeltaStore:
    """Make a root one of a shared store."""
    below = root.child(STORE_NAME)
    below.write(COMMIT_MARKER, b"")
    link = Link(root_uuid=secrets.token_hex(16), store=wanted, store_uuid=store.uuid)
    below.create(ROOT_FILE, storefiles.root_document(link))
    # Another manager may have been quicker: then its identity is the root's.
    joined = DeltaStore.open(root)
    if joined is None or joined.uuid != store.uuid:
        raise ConflictError(
            f"another job gave {root.url} another store than {store.url} just now. "
            "End one of the two jobs, or give both the same store"
        )
    return joined


def register(store: DeltaStore) -> None:
    """See to it that the registry counts with the root, before it has any pack.

    Raises:
        InvalidInputError: It counts with another folder as this root.
    """
    here = location(store.root)
    entry = storefiles.entry_document(Registered(root=here, root_uuid=store.root_uuid))
    known = entry_of(store)
    if known is None:
        store.roots.replace(store.root_uuid, entry)
    elif not is_same_place(known.root, here):
        raise InvalidInputError(
            f"{here} is root {store.root_uuid} of the shared store {store.url}, which "
            f"is registered as {known.root}; nothing was written. If this is a copy of "
            "it, save to a new root: what the two have in common is stored once. If "
            f"it has moved, `orbax-delta moved {here}` tells the store so"
        )


def entry_of(store: DeltaStore) -> Registered | None:
    """What the registry says of the root; None too where that cannot be read.

    Raises:
        UnsupportedVersionError: A newer format wrote it.
    """
    data = store.roots.read(store.root_uuid)
    try:
        where = store.roots.url + store.root_uuid
        return None if data is None else storefiles.parse_entry(data, where)
    except UnsupportedVersionError:
        raise
    except (CorruptionError, FormatError) as error:
        _logger.warning("%s", error)
        return None


def renew(store: DeltaStore) -> None:
    """Rewrite the fixed files, so that age rules on the bucket spare them.

    Raises:
        NotFoundError: The shared store or the root has been moved; files written in its
            old place would pass for it.
    """
    if store.shared:
        _require_unmoved(store)
    store.folder.write(COMMIT_MARKER, b"")
    document = storefiles.store_document(store.uuid, shared=store.shared)
    store.folder.write(STORE_FILE, document)
    if store.link is not None:
        below = store.root.child(STORE_NAME)
        below.write(COMMIT_MARKER, b"")
        below.write(ROOT_FILE, storefiles.root_document(store.link))
        entry = store.roots.read(store.root_uuid)
        if entry is not None:
            store.roots.write(store.root_uuid, entry)


def _require_unmoved(store: DeltaStore) -> None:
    there = DeltaStore.of_folder(store.root, store.folder)
    if there is None or there.uuid != store.uuid:
        raise NotFoundError(
            f"{store.url} is no longer store {store.uuid}: it was deleted or moved"
        )
    link = DeltaStore.read_link(store.root)
    if store.link is not None and (link is None or link.root_uuid != store.root_uuid):
        raise NotFoundError(
            f"{store.root.url} is no longer root {store.root_uuid} of {store.url}: it "
            "was deleted or moved"
        )


def location(root: Folder) -> str:
    """A root as the registry names it."""
    url = root.url.rstrip("/") or "/"
    return url if "://" in url else os.path.abspath(url)


def is_same_place(one: str, other: str) -> bool:
    """Whether two locations are one folder, as far as this host can tell."""
    if one == other:
        return True
    with contextlib.suppress(OSError):
        return os.path.samefile(one, other)
    return False


# --- what must not be -----------------------------------------------------------------


def _require_apart(root: Folder, folder: Folder) -> None:
    """A store in its root would be one of Orbax's folders, a root in it one of ours."""
    outer, inner = real_url(root), real_url(folder)
    if outer.startswith(inner) or inner.startswith(outer):
        raise InvalidInputError(
            f"the shared store {folder.url} and the root {root.url} must lie apart, "
            "not one inside the other; name another folder by store=..."
        )


def real_url(folder: Folder) -> str:
    """A folder's URL, without links on a local disk."""
    url = folder.url
    return url if "://" in url else f"{os.path.realpath(url).rstrip('/')}/"


def _refuse_misplaced(folder: Folder, wanted: StoreLocation) -> None:
    """A new store does not come to lie where something else is."""
    if folder.url.rstrip("/").rpartition("/")[2] == STORE_NAME:
        raise InvalidInputError(
            f"{folder.url} is named like the own store of a root; choose another name "
            "for a shared one"
        )
    if not isinstance(wanted, str) and not folder.is_local:
        return  # what is above it cannot be named
    url = folder.url.rstrip("/")
    for above in range(MAX_MANIFEST_DEPTH + 1):
        if above and Folder(url).read(STORE_FILE) is not None:
            raise InvalidInputError(
                f"{folder.url} lies in the store {url}, where every file has a "
                "meaning; name a folder outside of it for the shared store"
            )
        own = Folder(url).child(STORE_NAME)
        if own.read(STORE_FILE) is not None or own.read(ROOT_FILE) is not None:
            where = "lies in" if above else "is"
            raise InvalidInputError(
                f"{folder.url} {where} {url}, to which a manager saves; name a folder "
                "outside of it for the shared store"
            )
        url = url.rpartition("/")[0]
        if not url or url.endswith(":/"):
            break


def _refuse_orphans(root: Folder) -> None:
    """A root that has lost its ROOT.json does not become another root."""
    for manifest in _manifests(root):
        if manifest.root_uuid:
            raise CorruptionError(
                f"{root.url} holds steps of root {manifest.root_uuid} of the shared "
                f"store {manifest.store_uuid} ({manifest.store_url}), but no "
                f"{STORE_NAME}/{ROOT_FILE}; nothing was written. `orbax-delta repair "
                f"{root.url}` writes it anew, if the store knows this root; otherwise "
                "put it back from a copy, or save to a new root"
            )


def lost_link(root: Folder, manifests: Iterable[Manifest]) -> Link | None:
    """What ROOT.json of a root must hold, if its steps and the registry agree.

    Args:
        root: The root; it has no readable ROOT.json and no store of its own.
        manifests: MANIFESTs of its steps.
    """
    said = {
        Link(
            root_uuid=one.root_uuid,
            store=one.store_url.rstrip("/"),
            store_uuid=one.store_uuid,
        )
        for one in manifests
        if one.root_uuid
    }
    agreed = []
    for link in said if len({link.root_uuid for link in said}) == 1 else ():
        with contextlib.suppress(DeltaError):
            folder = Folder(link.store)
            store = DeltaStore.of_folder(root, folder, link=link)
            known = entry_of(store) if store and store.shared else None
            here = known is not None and is_same_place(known.root, location(root))
            if store is not None and store.uuid == link.store_uuid and here:
                agreed.append(link)
    # The store may have had two names; either will do.
    return min(agreed, key=lambda link: str(link.store), default=None)


def _manifests(root: Folder) -> list[Manifest]:
    """MANIFESTs of a root that has no store, as far as they can be read."""
    found = []
    # A step that vanishes meanwhile is one that nobody needs.
    with contextlib.suppress(FileNotFoundError):
        keys = root.find(MANIFEST_NAME, max_depth=MAX_MANIFEST_DEPTH, skip=STORE_NAME)
        for key in keys:
            with contextlib.suppress(CorruptionError, FormatError):
                data = root.read(key)
                if data is not None:
                    found.append(parse_manifest(data, where=root.url + key))
    return found


# --- the registry ---------------------------------------------------------------------


def entries(store: DeltaStore) -> list[Registered]:
    """The roots that use a shared store.

    Raises:
        FormatError: An entry is none.
        CorruptionError: The digest of one does not match.
        UnsupportedVersionError: A newer format wrote one.
    """
    names = [name for name in store.roots.names() if name[0] != "."]
    found = ((name, store.roots.read(name)) for name in names)
    return [
        storefiles.parse_entry(data, store.roots.url + name)
        for name, data in found
        if data is not None
    ]


def reach(store: DeltaStore, entry: Registered) -> Folder:
    """The folder of a root, if what is there is that root.

    Raises:
        NotFoundError: It is not there, or something else is.
        StorageError: It cannot be read.
        CorruptionError: Its ROOT.json is damaged.
        FormatError: The same.
    """
    folder = Folder(entry.root)
    # Another root may lie there by now, which must not be forgotten along with it.
    forget = f"`orbax-delta forget {entry.root_uuid} --store {store.url.rstrip('/')}`"
    try:
        link = DeltaStore.read_link(folder)
    except (CorruptionError, FormatError, StorageError) as error:
        raise type(error)(
            f"{error}. The shared store {store.url} serves this root, so no prune "
            f"deletes anything; if it is gone for good, {forget} removes it from the "
            "registry"
        ) from error
    if link is not None and link.root_uuid == entry.root_uuid:
        return folder
    what = f"holds root {link.root_uuid}" if link else f"has no {ROOT_FILE}"
    raise NotFoundError(
        f"the shared store {store.url} serves root {entry.root_uuid} in {entry.root}, "
        f"but {entry.root} {what}: it was deleted or moved, or it is another folder on "
        "this host. No prune deletes anything until it can be reached. If it has "
        "moved, `orbax-delta moved` of its new place tells the store so; if it is gone "
        f"for good, {forget} removes it from the registry"
    )


def others(store: DeltaStore) -> Sequence[Folder]:
    """The roots of a shared store but for the one that it was opened for.

    That one must be there as well: a job goes on when the folder has been moved, or
    its disk is gone, and what is there then holds nothing.

    Raises:
        NotFoundError: One of them cannot be reached.
        StorageError: The same.
        CorruptionError: An entry or a ROOT.json is damaged.
        FormatError: The same.
    """
    if not store.shared:
        return ()
    if store.link is not None:
        reach(store, Registered(root=location(store.root), root_uuid=store.root_uuid))
    return [
        reach(store, entry)
        for entry in entries(store)
        if entry.root_uuid != store.root_uuid
    ]


def reachable(store: DeltaStore) -> Sequence[Folder]:
    """As `others`, but one that cannot be reached is logged and left out."""
    found = []
    try:
        known = entries(store) if store.shared else []
    except DeltaError as error:
        _logger.warning("which other roots there are is not known: %s", error)
        return ()
    for entry in known:
        if entry.root_uuid == store.root_uuid:
            continue
        try:
            found.append(reach(store, entry))
        except DeltaError as error:
            _logger.warning("what another root holds is not known: %s", error)
    return found


def open_shared(where: StoreLocation) -> DeltaStore:
    """A shared store by itself, for those who look after it; it has no root.

    Raises:
        NotFoundError: There is none.
    """
    folder = Folder(where)
    store = DeltaStore.of_folder(folder, folder)
    if store is None or not store.shared:
        raise NotFoundError(
            f"{folder.url} holds no shared store; expected the folder that was given "
            "as store=..."
        )
    return store


def forget(store: DeltaStore, entry: Registered) -> None:
    """Remove a root from the registry: from now on no prune counts with it."""
    store.roots.delete(entry.root_uuid)


def find(store: DeltaStore, name: str) -> list[Registered]:
    """Entries of a root by its location or identity; of an unreadable one by that.

    Raises:
        NotFoundError: There is none.
    """
    found = []
    for uuid in store.roots.names():
        try:
            (data, where) = (store.roots.read(uuid), store.roots.url + uuid)
            entry = storefiles.parse_entry(data or b"", where)
        except (CorruptionError, FormatError):
            entry = Registered(root="", root_uuid=uuid)
        if name.rstrip("/") in (entry.root, uuid):
            found.append(entry)
    if not found:
        known = ", ".join(sorted(entry.root for entry in entries(store)))
        raise NotFoundError(
            f"no root {name} is registered with {store.url}; there are: "
            f"{known or 'none'}"
        )
    return found
