"""MANIFEST: the small file that makes a step (FORMAT.md section 8).

One header line with magic, version, digest and length, then JSON under zstd: the tree,
what each leaf is, which packs the step needs and which parts hold its rows. Reading
checks the version before anything else, then digest, then each field. Pure bytes.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from orbax_delta import dtypes, fields, jsontext
from orbax_delta.chunks import MAX_DIMENSIONS
from orbax_delta.errors import (
    CorruptionError,
    FormatError,
    InvalidInputError,
    UnsupportedVersionError,
)
from orbax_delta.fields import Json as Json
from orbax_delta.frames import compress_text, decompress_text
from orbax_delta.keys import MAX_KEY_ID
from orbax_delta.records import FORMAT_VERSION, digest

MANIFEST_NAME = "MANIFEST"
_MAGIC = "ORBAX-DELTA-MANIFEST"
_HEADER = re.compile(rb"ORBAX-DELTA-MANIFEST (\d{1,9}) ([0-9a-f]{32}) (\d{1,12})\n")
_VERSION = re.compile(rb"ORBAX-DELTA-MANIFEST (\d{1,9})(?!\d)")
_MAX_HEADER_BYTES = 80
_ZSTD_LEVEL = 9

LOSSY = "lossy"
"""Feature of steps in which values lie on grids; they have a field of this name."""
ENCRYPTED = "encrypted"
"""Feature of steps whose records and parts are sealed; `encryption` tells the key."""

_ATTEMPT = re.compile(r"[0-9a-f]{32}")
PACK_NAME = re.compile(r"([0-9a-f]{32})-p\d{1,9}-\d{1,9}", re.ASCII)
PART_NAME = re.compile(r"part-([0-9a-f]{32})-p\d{1,9}", re.ASCII)

ARRAY_KINDS = frozenset({"jax", "numpy", "numpy_scalar", "key", "str", "bytes"})
"""Leaf kinds whose content lies in chunks."""
_TEXT_KINDS = frozenset({"str", "bytes"})
_PLACED_KINDS = frozenset({"jax", "key"})
VALUE_KINDS = frozenset({"int", "float", "bool", "complex"})
"""Leaf kinds whose value lies in the MANIFEST."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_STORE_UUID = re.compile(r"([0-9a-f]{32})?")
_INT = re.compile(r"-?0x[0-9a-f]+")
_FLOAT = re.compile(r"[0-9a-f]{16}")

# Whatever type a leaf is cast to, its size is a number of 63 bits.
_LARGEST_ITEM_BYTES = 16

_NONE = type(None)
_MANIFEST_FIELDS: Mapping[str, fields.Types] = {
    "attempt": (str,),
    "step": (int, _NONE),
    "item": (str,),
    "wall_time": (float, int),
    "save_index": (int,),
    "predecessor": (dict, _NONE),
    "store_uuid": (str,),
    "store_url": (str,),
    "root_uuid": (str,),
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
_FEATURE_FIELDS: Mapping[str, str] = {LOSSY: "lossy", ENCRYPTED: "encryption"}
"""Fields, all of them objects, that a MANIFEST has if it requires a feature."""
KNOWN_FEATURES: frozenset[str] = frozenset(_FEATURE_FIELDS)
_LEAF_FIELDS: Mapping[str, fields.Types] = {
    "path": (list,),
    "kind": (str,),
    "dtype": (str,),
    "shape": (list,),
    "sharding": (int,),
    "value": (str, bool, list, _NONE),
}
_PART_FIELDS: Mapping[str, fields.Types] = {
    "name": (str,),
    "length": (int,),
    "digest": (str,),
    "rows": (int,),
    "packs": (list,),
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
    def memory_bytes(self) -> int:
        """Bytes of the array in memory; sizes of 0 count as 1, as they do in numpy."""
        if self.kind not in ARRAY_KINDS:
            return 0
        sizes = (max(size, 1) for size in self.shape)
        return math.prod(sizes) * self.element.dtype.itemsize

    @property
    def name(self) -> str:
        """The path as one readable string."""
        return _known_name(self.path)


def path_name(path: Sequence[str]) -> str:
    """`a/b/0`; a slash in a key is written `~1`, a tilde `~0` (RFC 6901).

    >>> path_name(("params", "w/b"))
    'params/w~1b'
    """
    if not path:
        return "(root)"
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)


# A save asks for each name about ten times.
_known_name = functools.lru_cache(maxsize=1 << 14)(path_name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry:
    """A part file, the rows of one process.

    Attributes:
        name: Its name, beside the MANIFEST.
        length: Its size in bytes.
        digest: Digest of all of it.
        rows: Number of its rows.
        packs: Indices in the MANIFEST's list of the packs that its rows refer to, in
            the order in which they do.
    """

    name: str
    length: int
    digest: str
    rows: int
    packs: Sequence[int]


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
        root_uuid: Identity of its root in a shared store; empty: it is not shared.
        options: Options in force.
        versions: Library versions that wrote it.
        tree: Structure document (leaves.py).
        leaves: Leaves in order of the tree.
        packs: Names of all packs that the rows refer to.
        parts: Part files.
        report: The SaveReport.
        custom_metadata: What the caller gave along, as JSON.
        required_features: Features a reader must know.
        lossy: Policies of leaves that are stored within a bound, by path; only with
            the feature of that name.
        encryption: `{"key_id", "check"}` of the key that records and parts are sealed
            with; only with the feature ENCRYPTED.
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
    root_uuid: str = ""
    custom_metadata: Json = None
    required_features: Sequence[str] = ()
    lossy: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    encryption: Mapping[str, Json] = dataclasses.field(default_factory=dict)

    @property
    def self_contained(self) -> bool:
        """Whether the packs lie beside the MANIFEST."""
        return not self.store_uuid

    @property
    def full_bytes(self) -> int:
        """Raw bytes of the step's arrays."""
        return sum(
            entry.element.content_bytes(math.prod(entry.shape))
            for entry in self.leaves
            if entry.kind in ARRAY_KINDS
        )

    def word_sizes(self) -> list[int]:
        """Word size of each leaf, 0 for leaves without chunks."""
        return [
            entry.element.word_bytes if entry.kind in ARRAY_KINDS else 0
            for entry in self.leaves
        ]


def process_of(part: str) -> int:
    """The process that the name of a part gives."""
    return int(part.rpartition("-p")[2])


def encode_manifest(manifest: Manifest) -> bytes:
    """Header line and compressed JSON; equal manifests give equal bytes."""
    # Not `dataclasses.asdict`, which copies every sharding of every leaf.
    document = _fields_of(manifest, _MANIFEST_FIELDS.keys() - {"shardings"})
    table = _ShardingTable()
    document["leaves"] = [
        _fields_of(leaf, _LEAF_FIELDS) | {"sharding": table.index(leaf.sharding)}
        for leaf in manifest.leaves
    ]
    document["parts"] = [_fields_of(part, _PART_FIELDS) for part in manifest.parts]
    document["shardings"] = table.documents
    for feature, name in _FEATURE_FIELDS.items():
        if feature in manifest.required_features:
            document[name] = getattr(manifest, name)
    text = json.dumps(
        document, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()
    body = compress_text(text, _ZSTD_LEVEL)
    header = f"{_MAGIC} {FORMAT_VERSION} {digest(body).hex()} {len(text)}\n"
    return header.encode() + body


def _fields_of(value: object, names: Iterable[str]) -> dict[str, Json]:
    return {name: getattr(value, name) for name in names}


class _ShardingTable:
    """The distinct shardings of a step: most leaves share one of a few.

    Attributes:
        documents: They, in order of their first leaves; the first is None.
    """

    def __init__(self) -> None:
        self.documents: list[Json] = [None]
        self._by_text = {"null": 0}
        self._by_identity: dict[int, int] = {}

    def index(self, document: Json) -> int:
        """Place of a sharding that is kept alive as long as this table."""
        found = self._by_identity.get(id(document))
        if found is None:
            text = json.dumps(document, sort_keys=True)
            found = self._by_text.setdefault(text, len(self.documents))
            if found == len(self.documents):
                self.documents.append(document)
            self._by_identity[id(document)] = found
        return found


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
    head = data[:_MAX_HEADER_BYTES]
    _check_version(head, where)
    match = _HEADER.match(head)
    if match is None:
        raise FormatError(
            f"{where} does not begin with a {_MAGIC} line; it is damaged or not "
            "written by orbax_delta"
        )
    body = data[match.end() :]
    if digest(body).hex() != match[2].decode():
        raise CorruptionError(f"the digest of {where} does not match its header")
    try:
        text = decompress_text(body, int(match[3]))
    except CorruptionError as error:
        raise CorruptionError(f"{where} does not unpack: {error}") from error
    try:
        document = jsontext.parse(text)
        features = document["required_features"]
        if type(features) is not list or {*map(type, features)} - {str}:
            raise InvalidInputError(f"its features are {fields.short(features)}")
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"{where} is not the document of a step: {error!s:.300}"
        ) from error
    unknown = set(features) - KNOWN_FEATURES
    if unknown:
        raise UnsupportedVersionError(
            f"{where} needs the features {fields.short(sorted(unknown))}, which this "
            "package does not know. Upgrade orbax_delta"
        )
    return _from_document(document, where)


def _check_version(head: bytes, where: str) -> None:
    """Raise for another version, whatever else a newer one has changed."""
    match = _VERSION.match(head)
    if match is not None and int(match[1]) != FORMAT_VERSION:
        raise UnsupportedVersionError(
            f"{where} has format version {int(match[1])}; this package reads "
            f"{FORMAT_VERSION}. Upgrade orbax_delta"
        )


def _from_document(document: dict[str, Json], where: str) -> Manifest:
    try:
        added = {_FEATURE_FIELDS[name] for name in document["required_features"]}
        fields.check(document, {**_MANIFEST_FIELDS, **dict.fromkeys(added, (dict,))})
        table = document.pop("shardings")
        for sharding in table:
            fields.check_sharding(sharding)
        leaves = tuple(_leaf(entry, table) for entry in document["leaves"])
        parts = tuple(_part(entry) for entry in document["parts"])
        for name, good in _rules(document, leaves, parts):
            if not good:
                raise InvalidInputError(
                    f"the field {name!r} breaks the format: "
                    f"{fields.short(document[name])}"
                )
    except InvalidInputError as error:
        raise FormatError(
            f"{where} describes the step, a leaf or a part wrongly: {error}"
        ) from error
    return Manifest(**{**document, "leaves": leaves, "parts": parts})


def _rules(
    document: Mapping[str, Json],
    leaves: Sequence[LeafEntry],
    parts: Sequence[PartEntry],
) -> Iterator[tuple[str, object]]:
    """What a MANIFEST must fulfil beyond the types of its fields, by field."""
    packs = document["packs"]
    yield "attempt", _ATTEMPT.fullmatch(document["attempt"])
    yield "step", fields.is_step(document["step"])
    yield "wall_time", fields.is_time(document["wall_time"])
    yield "save_index", fields.is_count(document["save_index"])
    yield "predecessor", fields.is_predecessor(document["predecessor"])
    yield "store_uuid", _STORE_UUID.fullmatch(document["store_uuid"])
    yield "root_uuid", _STORE_UUID.fullmatch(document["root_uuid"])
    yield "options", fields.holds(document["options"])
    yield "versions", fields.holds(document["versions"], (str,))
    yield "custom_metadata", fields.is_shallow(document["custom_metadata"])
    names = {leaf.name for leaf in leaves}
    for name, policy in document.get(LOSSY, {}).items():
        yield LOSSY, name in names and fields.holds(policy)
    if "encryption" in document:
        yield "encryption", _is_encryption(document["encryption"])
    yield "packs", all(type(pack) is str for pack in packs)
    yield "packs", all(map(PACK_NAME.fullmatch, packs))
    yield "packs", len(set(packs)) == len(packs)
    yield "leaves", len({leaf.path for leaf in leaves}) == len(leaves)
    yield "leaves", sum(leaf.memory_bytes for leaf in leaves) <= fields.MAX_COUNT
    yield "parts", len({part.name for part in parts}) == len(parts)
    for part in parts:
        match = PART_NAME.fullmatch(part.name)
        yield "parts", match and match[1] == document["attempt"]
        yield "parts", all(type(i) is int and 0 <= i < len(packs) for i in part.packs)


def _is_encryption(value: Mapping[str, Json]) -> bool:
    texts = value.keys() == {"key_id", "check"} and fields.holds(value, (str,))
    return (
        texts
        and 0 < len(value["key_id"]) <= MAX_KEY_ID
        and bool(_DIGEST.fullmatch(value["check"]))
    )


def _part(document: Json) -> PartEntry:
    fields.check(document, _PART_FIELDS)
    part = PartEntry(**{**document, "packs": tuple(document["packs"])})
    counts = fields.is_count(part.length) and fields.is_count(part.rows)
    if not counts or not _DIGEST.fullmatch(part.digest):
        raise InvalidInputError(f"there can be no part like {fields.short(document)}")
    return part


def _leaf(document: Json, shardings: Sequence[Json]) -> LeafEntry:
    fields.check(document, _LEAF_FIELDS)
    if document["sharding"] not in range(len(shardings)):
        raise InvalidInputError(f"there is no sharding {document['sharding']!r:.80}")
    if not all(type(key) is str for key in document["path"]):
        raise InvalidInputError(f"a leaf has the path {fields.short(document['path'])}")
    entry = LeafEntry(
        **{
            **document,
            "path": tuple(document["path"]),
            "shape": tuple(document["shape"]),
            "sharding": shardings[document["sharding"]],
        }
    )
    problem = leaf_problem(entry)
    if problem:
        raise InvalidInputError(f"leaf {entry.name:.300} {problem}")
    return entry


def leaf_problem(entry: LeafEntry) -> str | None:
    """What no MANIFEST holds about a leaf whose fields have the right types, in words.

    None: nothing.
    """
    if entry.kind not in ARRAY_KINDS | VALUE_KINDS:
        return f"has the unknown kind {entry.kind!r:.80}"
    if not _is_shape(entry.kind, entry.shape):
        return f"has the shape {fields.short(list(entry.shape))}"
    if entry.kind in ARRAY_KINDS:
        _ = entry.element
    elif entry.dtype or entry.shape:
        return "is no array but has a dtype"
    if entry.kind in _TEXT_KINDS and entry.dtype != "uint8":
        return f"is text in {entry.dtype}, not in uint8"
    if entry.memory_bytes > fields.MAX_COUNT // _LARGEST_ITEM_BYTES:
        return f"of shape {entry.shape} is too large"
    if entry.sharding is not None and entry.kind not in _PLACED_KINDS:
        return "is no jax array but has a sharding"
    if not _is_value(entry.kind, entry.value):
        return f"has the value {fields.short(entry.value)}"
    return None


def _is_shape(kind: str, shape: Sequence[Json]) -> bool:
    """Whether a leaf of this kind may have it, apart from its size in bytes."""
    if len(shape) > MAX_DIMENSIONS or not all(map(fields.is_count, shape)):
        return False
    match kind:
        case "str" | "bytes":
            return len(shape) == 1
        case "numpy_scalar":
            return len(shape) == 0
        case "key":
            return len(shape) >= 1
    return True


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
