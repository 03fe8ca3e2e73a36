"""MANIFEST: the small file that makes a step (FORMAT.md section 8).

One header line with magic, version, digest and length, then JSON under zstd: the tree,
what each leaf is, which packs the step needs and which parts hold its rows. Reading
checks the version before anything else, then digest, then each field. Pure bytes.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import zstandard

from orbax_delta import dtypes
from orbax_delta.codecs import decompress
from orbax_delta.errors import (
    CorruptionError,
    FormatError,
    InvalidInputError,
    UnsupportedVersionError,
)
from orbax_delta.records import FORMAT_VERSION, digest

MANIFEST_NAME = "MANIFEST"
_MAGIC = "ORBAX-DELTA-MANIFEST"
_HEADER = re.compile(rb"ORBAX-DELTA-MANIFEST (\d{1,9}) ([0-9a-f]{32}) (\d{1,12})\n")
_MAX_HEADER_BYTES = 80
_ZSTD_LEVEL = 9

KNOWN_FEATURES: frozenset[str] = frozenset()

_ATTEMPT = re.compile(r"[0-9a-f]{32}")
PACK_NAME = re.compile(r"([0-9a-f]{32})-p\d{1,9}-\d{1,9}")
PART_NAME = re.compile(r"part-([0-9a-f]{32})-p\d{1,9}")

ARRAY_KINDS = frozenset({"jax", "numpy", "numpy_scalar", "key", "str", "bytes"})
"""Leaf kinds whose content lies in chunks."""
VALUE_KINDS = frozenset({"int", "float", "bool", "complex"})
"""Leaf kinds whose value lies in the MANIFEST."""

Json = Any
"""A value made of dict, list, str, int, float, bool and None."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_INT = re.compile(r"-?0x[0-9a-f]+")
_FLOAT = re.compile(r"[0-9a-f]{16}")

_NONE = type(None)
_Types = tuple[type, ...]
_MANIFEST_FIELDS: Mapping[str, _Types] = {
    "attempt": (str,),
    "step": (int, _NONE),
    "item": (str,),
    "wall_time": (float, int),
    "save_index": (int,),
    "predecessor": (dict, _NONE),
    "store_uuid": (str,),
    "store_url": (str,),
    "options": (dict,),
    "versions": (dict,),
    "tree": (dict,),
    "leaves": (list,),
    "shardings": (list,),
    "packs": (list,),
    "parts": (list,),
    "report": (dict,),
    "custom_metadata": (dict, list, str, int, float, bool, _NONE),
    "required_features": (list,),
}
_LEAF_FIELDS: Mapping[str, _Types] = {
    "path": (list,),
    "kind": (str,),
    "dtype": (str,),
    "shape": (list,),
    "sharding": (int,),
    "value": (str, bool, list, _NONE),
}
_PART_FIELDS: Mapping[str, _Types] = {
    "name": (str,),
    "length": (int,),
    "digest": (str,),
    "rows": (int,),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafEntry:
    """What the MANIFEST says of one leaf.

    Attributes:
        path: Keys from the root of the tree, as strings.
        kind: One of ARRAY_KINDS or VALUE_KINDS.
        dtype: Name of the stored element type; empty for VALUE_KINDS.
        shape: Shape of the stored array; of a key leaf that of its key data.
        sharding: Document of the sharding at the time of saving, or None.
        value: The value of a VALUE_KINDS leaf, the implementation name of a key.
    """

    path: tuple[str, ...]
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    sharding: Json = None
    value: Json = None

    @property
    def element(self) -> dtypes.ElementType:
        """Layout of the stored elements; only for ARRAY_KINDS."""
        return dtypes.element_type_of(self.dtype)

    @property
    def name(self) -> str:
        """The path as one readable string."""
        return path_name(self.path)


def path_name(path: Sequence[str]) -> str:
    """`a/b/0`; a slash in a key is written `~1`, a tilde `~0` (RFC 6901).

    >>> path_name(("params", "w/b"))
    'params/w~1b'
    """
    if not path:
        return "(root)"
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry:
    """A part file: name, length in bytes, digest of all of it, number of rows."""

    name: str
    length: int
    digest: str
    rows: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that `ls`, `show`, prune and the start of a restore need.

    Attributes:
        attempt: 32 hexadecimal digits, unique for each try of each save.
        step: Step number, or None where the directory's name has none.
        item: Name of the item.
        wall_time: Seconds since 1970 at the start of the save.
        save_index: Saves of this item before this one, in a row.
        predecessor: `{"step", "attempt"}` of the save whose rows were the base.
        store_uuid: Store that holds the packs; empty: they lie beside the MANIFEST.
        store_url: Where that store was, for the message when it is gone.
        options: Options in force.
        versions: Library versions that wrote it.
        tree: Structure document (leaves.py).
        leaves: Leaves in order of the tree.
        packs: Names of all packs that the rows refer to.
        parts: Part files.
        report: The SaveReport.
        custom_metadata: What the caller gave along, as JSON.
        required_features: Features a reader must know.
    """

    attempt: str
    step: int | None
    item: str
    wall_time: float
    save_index: int
    predecessor: Mapping[str, Json] | None
    store_uuid: str
    store_url: str
    options: Mapping[str, Json]
    versions: Mapping[str, str]
    tree: Json
    leaves: Sequence[LeafEntry]
    packs: Sequence[str]
    parts: Sequence[PartEntry]
    report: Mapping[str, Json]
    custom_metadata: Json = None
    required_features: Sequence[str] = ()

    @property
    def self_contained(self) -> bool:
        """Whether the packs lie beside the MANIFEST."""
        return not self.store_uuid

    @property
    def full_bytes(self) -> int:
        """Raw bytes of the step's arrays."""
        return sum(
            entry.element.content_bytes(_product(entry.shape))
            for entry in self.leaves
            if entry.kind in ARRAY_KINDS
        )

    def word_sizes(self) -> list[int]:
        """Word size of each leaf, 0 for leaves without chunks."""
        return [
            entry.element.word_bytes if entry.kind in ARRAY_KINDS else 0
            for entry in self.leaves
        ]


def encode_manifest(manifest: Manifest) -> bytes:
    """Header line and compressed JSON; equal manifests give equal bytes."""
    document = dataclasses.asdict(manifest)
    # Most leaves share one of a few shardings: a table keeps the file small.
    table: list[Json] = [None]
    for leaf in document["leaves"]:
        if leaf["sharding"] not in table:
            table.append(leaf["sharding"])
        leaf["sharding"] = table.index(leaf["sharding"])
    document["shardings"] = table
    text = json.dumps(
        document, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()
    body = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(text)
    header = f"{_MAGIC} {FORMAT_VERSION} {digest(body).hex()} {len(text)}\n"
    return header.encode() + body


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Read a MANIFEST.

    Args:
        data: The whole file.
        where: Its path, for messages.

    Raises:
        FormatError: It is not a MANIFEST of this package, or a field is wrong.
        UnsupportedVersionError: A newer format or an unknown required feature.
        CorruptionError: Its digest or length does not match.
    """
    match = _HEADER.match(data[:_MAX_HEADER_BYTES])
    if match is None:
        raise FormatError(
            f"{where} does not begin with a {_MAGIC} line; it is damaged or not "
            "written by orbax_delta"
        )
    version = int(match[1])
    if version != FORMAT_VERSION:
        raise UnsupportedVersionError(
            f"{where} has format version {version}; this package reads "
            f"{FORMAT_VERSION}. Upgrade orbax_delta"
        )
    body = data[match.end() :]
    if digest(body).hex() != match[2].decode():
        raise CorruptionError(f"the digest of {where} does not match its header")
    try:
        text = decompress(body, int(match[3]))
    except CorruptionError as error:
        raise CorruptionError(f"{where} does not unpack: {error}") from error
    try:
        document = json.loads(text)
        unknown = set(map(str, document["required_features"])) - KNOWN_FEATURES
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{where} is not the document of a step: {error}") from error
    if unknown:
        raise UnsupportedVersionError(
            f"{where} needs the features {sorted(unknown)}, which this package does "
            "not know. Upgrade orbax_delta"
        )
    return _from_document(document, where)


def _from_document(document: dict[str, Json], where: str) -> Manifest:
    try:
        _check_fields(document, _MANIFEST_FIELDS)
        table = document.pop("shardings")
        leaves = tuple(_leaf(entry, table) for entry in document["leaves"])
        parts = tuple(_part(entry) for entry in document["parts"])
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(
            f"{where} describes the step, a leaf or a part wrongly: {error}"
        ) from error
    packs = document["packs"]
    paths = {leaf.path for leaf in leaves}
    named = [PART_NAME.fullmatch(part.name) for part in parts]
    _require(where, "attempt", _ATTEMPT.fullmatch(document["attempt"]))
    _require(where, "packs", all(type(pack) is str for pack in packs))
    _require(where, "packs", all(map(PACK_NAME.fullmatch, packs)))
    _require(where, "packs", len(set(packs)) == len(packs))
    _require(where, "leaves", len(paths) == len(leaves))
    for match in named:
        _require(where, "parts", match and match[1] == document["attempt"])
    return Manifest(**{**document, "leaves": leaves, "parts": parts})


def _require(where: str, field: str, good: object) -> None:
    if not good:
        raise FormatError(f"{where} has a field {field!r} that breaks the format")


def _check_fields(document: Json, fields: Mapping[str, _Types]) -> None:
    if type(document) is not dict or set(document) != set(fields):
        found = sorted(document) if type(document) is dict else document
        raise InvalidInputError(f"found the fields {found}; expected {sorted(fields)}")
    for name, types in fields.items():
        if type(document[name]) not in types:
            raise InvalidInputError(f"the field {name!r} is {document[name]!r:.80}")


def _part(document: Json) -> PartEntry:
    _check_fields(document, _PART_FIELDS)
    part = PartEntry(**document)
    if min(part.length, part.rows) < 0 or not _DIGEST.fullmatch(part.digest):
        raise InvalidInputError(f"there can be no part like {part}")
    return part


def _leaf(document: Json, shardings: Sequence[Json]) -> LeafEntry:
    _check_fields(document, _LEAF_FIELDS)
    if document["sharding"] not in range(len(shardings)):
        raise InvalidInputError(f"there is no sharding {document['sharding']!r}")
    if not all(type(key) is str for key in document["path"]):
        raise InvalidInputError(f"a leaf has the path {document['path']!r}")
    entry = LeafEntry(
        **{
            **document,
            "path": tuple(document["path"]),
            "shape": tuple(document["shape"]),
            "sharding": shardings[document["sharding"]],
        }
    )
    if entry.kind not in ARRAY_KINDS | VALUE_KINDS:
        raise InvalidInputError(
            f"leaf {entry.name} has the unknown kind {entry.kind!r}"
        )
    if any(type(size) is not int or size < 0 for size in entry.shape):
        raise InvalidInputError(f"leaf {entry.name} has the shape {entry.shape}")
    if entry.kind in ARRAY_KINDS:
        _ = entry.element
    elif entry.dtype or entry.shape:
        raise InvalidInputError(f"leaf {entry.name} is no array but has a dtype")
    if not _is_value(entry.kind, entry.value):
        raise InvalidInputError(f"leaf {entry.name} has the value {entry.value!r:.80}")
    return entry


def _is_value(kind: str, value: Json) -> bool:
    """Whether `value` is written as leaves of `kind` are."""
    match kind:
        case "bool":
            return type(value) is bool
        case "int":
            return type(value) is str and bool(_INT.fullmatch(value))
        case "float":
            return type(value) is str and bool(_FLOAT.fullmatch(value))
        case "complex":
            halves = value if type(value) is list else ()
            return len(halves) == 2 and all(_is_value("float", v) for v in halves)
        case "key":
            return type(value) is str
    return value is None


def _product(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
