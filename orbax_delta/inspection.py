"""The files of a store one by one: STORE.json, markers, names, each pack's records.

Says what is wrong with a file and goes on. Does not belong here: which step needs it,
what chunks decode to.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence

from orbax_delta import marks, records
from orbax_delta.errors import CorruptionError, DeltaError, FormatError, StorageError
from orbax_delta.manifests import PACK_NAME
from orbax_delta.store import COMMIT_MARKER, STORE_NAME, DeltaStore, Folder
from orbax_delta.storefiles import (
    ROOT_FILE,
    STORE_FILE,
    Link,
    parse_entry,
    store_document,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong, and the file to blame."""

    what: str
    file: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackState:
    """One pack, read whole.

    Attributes:
        size_bytes: Its size.
        readable: Whether records can be read from it, one by one if not all at once.
        faults: What is wrong with it, in words.
    """

    size_bytes: int = 0
    readable: bool = True
    faults: Sequence[str] = ()


def store_faults(
    store: DeltaStore, error: DeltaError | None, wanted_uuids: Collection[str]
) -> Iterator[Fault]:
    """What is wrong with a store's small files and the names of its packs.

    Args:
        store: The store; without identity where that cannot be read.
        error: Why it cannot.
        wanted_uuids: Identities that the MANIFESTs of the root name.
    """
    packs = store.packs.names()
    hint = _store_hint(wanted_uuids, shared=store.shared)
    if error is not None:
        file = identity_file(store)
        # MANIFESTs alone do not tell what a ROOT.json must hold.
        own = file == store.url + STORE_FILE
        yield Fault(what=f"{error}{hint if own else ''}", file=file)
    elif packs and not store.uuid:
        what = f"it is missing, beside {len(packs)} packs{hint}"
        yield Fault(what=what, file=store.url + STORE_FILE)
    if store.link is not None and error is None:
        yield from _registry_faults(store, store.link)
    if packs:
        yield from _marker_faults(store)
    yield from _mark_faults(store.pins, marks.PIN_NAME, "a pin")
    yield from _mark_faults(store.condemned, marks.CONDEMNED_NAME, "a condemned mark")
    for pack in packs:
        # Dot files are the file system's own (.nfs..., .DS_Store).
        if not PACK_NAME.fullmatch(pack) and pack[0] != ".":
            what = "it is not named like a pack, so prune refuses to run; move it away"
            yield Fault(what=what, file=store.packs.url + pack)


def identity_file(store: DeltaStore, *, linked: bool = False) -> str:
    """The file that does not tell the identity of a store.

    Args:
        store: The store of a root.
        linked: The root has steps that need a shared one, so it had a ROOT.json.
    """
    below = store.root.child(STORE_NAME)
    unlinked = store.link is None and below.read(STORE_FILE) is None
    if unlinked and (linked or below.read(ROOT_FILE) is not None):
        return below.url + ROOT_FILE
    return store.url + STORE_FILE


def _registry_faults(store: DeltaStore, link: Link) -> Iterator[Fault]:
    """Whether a prune of a shared store counts with this root."""
    file = store.roots.url + link.root_uuid
    try:
        data = store.roots.read(link.root_uuid)
        if data is None:
            what = (
                "it is missing, so no prune counts with this root: packs that its "
                "steps need may go. The next save to it writes it anew"
            )
            yield Fault(what=what, file=file)
        else:
            parse_entry(data, file)
    except (CorruptionError, FormatError) as error:
        yield Fault(what=f"{error}. Until then prune refuses to run", file=file)
    below = store.root.child(STORE_NAME)
    if below.read(COMMIT_MARKER) is None:
        what = (
            "it is missing; without it Orbax may take the folder for a leftover and "
            "delete it. The next save writes it anew"
        )
        yield Fault(what=what, file=below.url + COMMIT_MARKER)


def _store_hint(wanted_uuids: Collection[str], *, shared: bool) -> str:
    """What STORE.json must hold, if the MANIFESTs agree."""
    if len(wanted_uuids) != 1:
        return ""
    (uuid,) = wanted_uuids
    document = store_document(uuid, shared=shared).decode().strip()
    return f". By the MANIFESTs of this root it must hold {document}"


def _marker_faults(store: DeltaStore) -> Iterator[Fault]:
    data = store.folder.read(COMMIT_MARKER)
    if data is None:
        what = (
            "it is missing; without it Orbax may take the store for a leftover and "
            "delete it. The next save writes it anew"
        )
        yield Fault(what=what, file=store.url + COMMIT_MARKER)
    elif data:
        what = f"it holds {len(data)} bytes, not none. The next save writes it anew"
        yield Fault(what=what, file=store.url + COMMIT_MARKER)


def _mark_faults(
    folder: Folder, pattern: re.Pattern[str], kind: str
) -> Iterator[Fault]:
    for name in folder.names():
        data = None if name[0] == "." else folder.read(name)
        if data is None:
            continue
        try:
            marks.parse_mark(data, where=folder.url + name)
        except (CorruptionError, FormatError) as error:
            what = f"{error}. Until then prune refuses to run"
            yield Fault(what=what, file=folder.url + name)
            continue
        if not pattern.fullmatch(name):
            what = f"it is not named like {kind}, yet a prune goes by it; move it away"
            yield Fault(what=what, file=folder.url + name)


def inspect_pack(folder: Folder, name: str) -> PackState:
    """Read a pack whole and look at its header, its index and every record."""
    try:
        data = folder.read(name)
    except StorageError as error:
        # A bad sector of a local disk spoils the records in it, no others.
        return PackState(readable="://" not in folder.url, faults=[str(error)])
    if data is None:
        return PackState(readable=False, faults=["the pack is missing"])
    return PackState(size_bytes=len(data), faults=list(_pack_faults(name, data)))


def _pack_faults(name: str, data: bytes) -> Iterator[str]:
    pack = memoryview(data)
    try:
        index = records.parse_pack(pack)
    except (CorruptionError, FormatError) as error:
        yield str(error)
        return
    attempt, _, number = name.split("-")
    if (index.attempt.hex(), str(index.number)) != (attempt, number):
        yield (
            f"by its header it is pack {index.number} of attempt "
            f"{index.attempt.hex()}, not what its name says"
        )
    for position, (offset, length) in enumerate(index.spans):
        try:
            records.check_record(pack[offset : offset + length])
        except CorruptionError as error:
            yield f"record {position + 1} of {len(index.spans)} at {offset}: {error}"
