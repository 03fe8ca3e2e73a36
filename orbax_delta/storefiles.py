"""Small files that tie places together: STORE.json, ROOT.json, the registry, ARCHIVED.

A store says who it is, a root that uses a shared store says where that lies, the store
lists the roots that use it, and a step that was moved says where it is. Pure bytes.
Does not belong here: reading or writing any of them, what follows from what they say.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from orbax_delta import jsontext, locations
from orbax_delta.errors import CorruptionError, FormatError, UnsupportedVersionError
from orbax_delta.options import StoreLocation
from orbax_delta.records import FORMAT_VERSION

STORE_FILE = "STORE.json"
ROOT_FILE = "ROOT.json"
ARCHIVED_FILE = "ARCHIVED"
UUID = re.compile(r"[0-9a-f]{32}")

_STORE_MAGIC = "orbax-delta-store"
_ROOT_MAGIC = "orbax-delta-root"
_ARCHIVED_MAGIC = "orbax-delta-archived"
_MOST_FOLDERS = 2
_MAX_SAVED_US = 250_000_000_000 * 10**6  # calendars end
_STORE_REMEDY = (
    "`orbax-delta repair` of this root writes it anew, if the steps agree on what it "
    "must hold; otherwise restore it from a copy"
)
_ROOT_REMEDY = (
    "`orbax-delta repair` of this root writes it anew, if its steps and the store's "
    "registry agree on what it must hold; otherwise restore it from a copy"
)
_ENTRY_REMEDY = (
    "the next save to that root, or `orbax-delta repair` of it, writes it anew; if it "
    "is gone for good, `orbax-delta forget` takes this name too"
)
_ARCHIVED_REMEDY = (
    "delete the step's folder and bring the step back from its archive: `orbax-delta "
    "archive ARCHIVE ROOT --steps ...`"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What STORE.json says.

    Attributes:
        uuid: Identity of the store.
        shared: Whether it serves the roots of its registry, not the root around it.
    """

    uuid: str
    shared: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What ROOT.json says: which root this is, and where its store is.

    Attributes:
        root_uuid: Identity of the root.
        store: Location of the store, as `DeltaOptions.store` takes it.
        store_uuid: Identity of the store.
    """

    root_uuid: str
    store: StoreLocation
    store_uuid: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What an entry of the registry says.

    Attributes:
        root: Location of the root.
        root_uuid: Identity of the root, and name of the entry.
    """

    root: str
    root_uuid: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """What ARCHIVED says: where an item of a step lies that was moved from here.

    Attributes:
        archive: Location of the archive.
        path: The item's folder in it.
        store_uuid: Identity of its store; empty for a self-contained one.
        attempt: Of its save, or of a repair since, when it was moved.
        saved_us: When it was saved, in microseconds since 1970; no repair changes that.
    """

    archive: str
    path: str
    store_uuid: str
    attempt: str
    saved_us: int


def store_document(uuid: str, *, shared: bool = False) -> bytes:
    """What STORE.json of the store `uuid` holds."""
    return _sealed(magic=_STORE_MAGIC, shared=shared, uuid=uuid)


def root_document(link: Link) -> bytes:
    """What ROOT.json holds."""
    store = link.store if isinstance(link.store, str) else dict(link.store)
    return _sealed(
        magic=_ROOT_MAGIC,
        root_uuid=link.root_uuid,
        store=store,
        store_uuid=link.store_uuid,
    )


def entry_document(entry: Registered) -> bytes:
    """What an entry of the registry holds."""
    return _sealed(magic=_ROOT_MAGIC, root=entry.root, root_uuid=entry.root_uuid)


def archived_document(link: Archived) -> bytes:
    """What ARCHIVED holds."""
    return _sealed(magic=_ARCHIVED_MAGIC, **dataclasses.asdict(link))


def _sealed(**document: Any) -> bytes:
    return jsontext.sealed({"format_version": FORMAT_VERSION, **document}) + b"\n"


def parse_store(data: bytes, where: str) -> Identity:
    """Read STORE.json.

    Raises:
        FormatError: It is no such file.
        UnsupportedVersionError: A newer format wrote it.
        CorruptionError: Its digest does not match.
    """
    document = _opened(
        data, where, _STORE_MAGIC, "the file of a delta store", _STORE_REMEDY
    )
    if not _is_uuid(document.get("uuid")):
        raise FormatError(
            f"{where} has no uuid of 32 hexadecimal digits; {_STORE_REMEDY}"
        )
    if type(document.get("shared")) is not bool:
        raise FormatError(f"{where} does not say whether it is shared; {_STORE_REMEDY}")
    return Identity(uuid=document["uuid"], shared=document["shared"])


def parse_root(data: bytes, where: str) -> Link:
    """Read ROOT.json.

    Raises:
        FormatError: It is no such file.
        UnsupportedVersionError: A newer format wrote it.
        CorruptionError: Its digest does not match.
    """
    what = "the file of a root with a shared store"
    document = _opened(data, where, _ROOT_MAGIC, what, _ROOT_REMEDY)
    store = document.get("store")
    good = all(map(_is_uuid, (document.get("root_uuid"), document.get("store_uuid"))))
    if not good or not (isinstance(store, dict) or _is_location(store)):
        raise FormatError(f"{where} does not say which store it is; {_ROOT_REMEDY}")
    return Link(
        root_uuid=document["root_uuid"],
        store=store,
        store_uuid=document["store_uuid"],
    )


def parse_entry(data: bytes, where: str) -> Registered:
    """Read an entry of the registry.

    Raises:
        FormatError: It is no such file.
        UnsupportedVersionError: A newer format wrote it.
        CorruptionError: Its digest does not match.
    """
    what = "the entry of a root"
    document = _opened(data, where, _ROOT_MAGIC, what, _ENTRY_REMEDY)
    root, uuid = document.get("root"), document.get("root_uuid")
    if not _is_uuid(uuid) or not _is_location(root):
        raise FormatError(f"{where} does not say which root it is; {_ENTRY_REMEDY}")
    if uuid != where.rpartition("/")[2]:
        raise FormatError(f"{where} is the entry of root {uuid}; {_ENTRY_REMEDY}")
    return Registered(root=root, root_uuid=uuid)


def parse_archived(data: bytes, where: str) -> Archived:
    """Read ARCHIVED.

    Raises:
        FormatError: It is no such file.
        UnsupportedVersionError: A newer format wrote it.
        CorruptionError: Its digest does not match.
    """
    what = "the file of a step that was moved to an archive"
    document = _opened(data, where, _ARCHIVED_MAGIC, what, _ARCHIVED_REMEDY)
    uuid, saved = document.get("store_uuid"), document.get("saved_us")
    good = (
        (uuid == "" or _is_uuid(uuid))
        and _is_uuid(document.get("attempt"))
        and _is_location(document.get("archive"))
        and _is_path(document.get("path"))
        and type(saved) is int
        and 0 <= saved <= _MAX_SAVED_US
    )
    if not good:
        raise FormatError(
            f"{where} does not say which step lies where; {_ARCHIVED_REMEDY}"
        )
    return Archived(**{name: document[name] for name in _ARCHIVED_FIELDS})


_ARCHIVED_FIELDS = [field.name for field in dataclasses.fields(Archived)]


def _is_path(value: object) -> bool:
    """Whether it leads to an item's folder, and nowhere else."""
    names = value.split("/") if isinstance(value, str) else []
    good = not {"", ".", ".."}.intersection(names)
    return 0 < len(names) <= _MOST_FOLDERS and good


def _is_location(value: object) -> TypeGuard[str]:
    """Whether it means the same in any working directory."""
    if not isinstance(value, str):
        return False
    return os.path.isabs(value) or locations.is_known(value)


def _is_uuid(value: object) -> bool:
    return type(value) is str and UUID.fullmatch(value) is not None


def _opened(
    data: bytes, where: str, magic: str, what: str, remedy: str
) -> Mapping[str, Any]:
    """The document of a file: magic, then version, then digest checked."""
    try:
        document = jsontext.parse(data)
    except ValueError as error:
        raise FormatError(f"{where} is not JSON ({error}); {remedy}") from error
    if not isinstance(document, dict) or document.get("magic") != magic:
        raise FormatError(f"{where} is not {what}; {remedy}")
    version = document.get("format_version")
    if type(version) is not int:
        raise FormatError(
            f"{where} has format version {version!r:.80}, which is no whole number; "
            f"{remedy}"
        )
    check_sealed(document, version, where, remedy)
    return document


def check_sealed(
    document: Mapping[str, Any], version: int, where: str, remedy: str
) -> None:
    """Check the version of a JSON file of a store, and only then its digest.

    Raises:
        UnsupportedVersionError: A newer format wrote it.
        CorruptionError: Its digest does not match.
    """
    if version != FORMAT_VERSION:
        raise UnsupportedVersionError(
            f"{where} has format version {version!r:.80}; this package reads "
            f"{FORMAT_VERSION}. Upgrade orbax_delta"
        )
    try:
        jsontext.check_seal(document)
    except ValueError as error:
        raise CorruptionError(f"{where} is damaged ({error}); {remedy}") from error
