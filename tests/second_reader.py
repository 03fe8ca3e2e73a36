"""A second reader of the format, written from FORMAT.md alone, to test that document.

It shares no code with the package and knows arrays only as bytes. Numbers in comments
are sections of FORMAT.md. What the rows stand for is decoded by `second_decoder`.
"""

import dataclasses
import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from second_decoder import (
    CONSTANT,
    FULL,
    NO_PACK,
    RELATIVE,
    DamagedError,
    Packs,
    Row,
    UnknownVersionError,
    check,
    content,
    derived,
    sizes,
    unseal,
    unzstd,
)

HEX = re.compile(r"[0-9a-f]{32}")
PACK = re.compile(r"([0-9a-f]{32})-p\d{1,9}-(\d{1,9})", re.ASCII)
PART = re.compile(r"part-([0-9a-f]{32})-p\d{1,9}", re.ASCII)
MOST_ROWS, LONGEST_LIST, MOST_LEVELS = 1 << 26, 200, 100
FIELDS = {  # 8.2
    **dict.fromkeys(("attempt", "item", "store_uuid", "store_url", "root_uuid"), str),
    **dict.fromkeys(("options", "versions", "tree", "report"), dict),
    **dict.fromkeys(("leaves", "shardings", "packs", "parts"), list),
    **{"step": int | None, "wall_time": int | float, "save_index": int},
    **{"predecessor": dict | None, "custom_metadata": object},
    "required_features": list,
}
ADDED = {"lossy": "lossy", "encrypted": "encryption"}  # 14


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """An array, a scalar or a key: `data` in C order, packed types a byte each."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    key_type: str | None = None


def read_step(
    item_folder: str | Path, secret: bytes | None = None
) -> dict[tuple[str, ...], Any]:
    """Every leaf of one item of one step, by its path.

    An encrypted one is opened with the user's key, 32 secret bytes.

    Raises:
        DamagedError: Something is damaged or missing.
        UnknownVersionError: Something is newer.
    """
    folder = Path(item_folder).absolute()
    try:
        return _read_step(folder, secret)
    except (*_PARSING, OSError) as error:
        raise DamagedError(f"{folder}: {error!r}") from error


_PARSING = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError)
_PARSING += (struct.error, zstandard.ZstdError)


def _read_step(folder: Path, secret: bytes | None) -> dict[tuple[str, ...], Any]:
    folder, manifest = _manifest(folder)
    packs = folder / "packs"
    if manifest["store_uuid"]:
        packs = find_store(folder, manifest["store_uuid"]) / "packs"
    secret = _secret(manifest, secret)
    leaves = manifest["leaves"]
    rows = [
        row
        for entry in manifest["parts"]
        for row in _part(folder, entry, manifest, secret)
    ]
    by_leaf: dict[int, list[Row]] = {number: [] for number in range(len(leaves))}
    for row in rows:
        by_leaf[row.leaf].append(row)
    for number, leaf in enumerate(leaves):
        _check_cover(leaf, by_leaf[number])
    return {
        tuple(leaf["path"]): _value(
            leaf, by_leaf[number], Packs(packs, manifest["packs"], secret)
        )
        for number, leaf in enumerate(leaves)
    }


# --- MANIFEST and store -------------------------------------------------------------


def parse_json(data: bytes) -> Any:
    """JSON of numbers that a double holds and without a name twice (1.4)."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check(len(dict(pairs)) == len(pairs), "a name stands twice in one object")
        return dict(pairs)

    def constant(name: str) -> None:
        raise DamagedError(f"{name} is not JSON")

    def double(text: str) -> float:
        check(math.isfinite(float(text)), f"{text} is no double")
        return float(text)

    return json.loads(
        data.decode(),
        object_pairs_hook=members,
        parse_constant=constant,
        parse_float=double,
    )


def read_manifest(data: bytes) -> dict[str, Any]:
    """The document of a MANIFEST, every field checked (8)."""
    line, _, frame = data.partition(b"\n")
    version = re.match(rb"ORBAX-DELTA-MANIFEST (\d{1,9})(?![^ ])", line)
    check(version, "no MANIFEST")
    if int(version[1]) != 1:
        raise UnknownVersionError(f"MANIFEST of version {int(version[1])}")
    rest = re.fullmatch(rb" ([0-9a-f]{32}) (\d{1,12})", line[version.end() :])
    check(rest, "header line of the MANIFEST")
    check(
        xxhash.xxh3_128_hexdigest(frame).encode() == rest[1], "digest of the MANIFEST"
    )
    document = parse_json(unzstd(frame, int(rest[2])))
    if not {*document["required_features"]} <= {*ADDED}:
        raise UnknownVersionError(f"features {document['required_features']}")
    added = {ADDED[feature]: dict for feature in document["required_features"]}
    check(document.keys() == {**FIELDS, **added}.keys(), "fields of the MANIFEST")
    for name, kind in {**FIELDS, **added}.items():
        fits = isinstance(document[name], kind) and not (
            isinstance(document[name], bool) and kind is not object
        )
        check(fits, f"field {name}")
    check(HEX.fullmatch(document["attempt"]), "attempt")
    for name in ("store_uuid", "root_uuid"):
        check(HEX.fullmatch(document[name] or "0" * 32), name)
    check(document["shardings"][:1] == [None], "the first sharding is null")
    packs = document["packs"]
    check(all(map(PACK.fullmatch, packs)), "names of packs")
    check(len(set(packs)) == len(packs), "a pack stands twice")
    for leaf in document["leaves"]:
        _check_leaf(leaf, len(document["shardings"]))
    paths = [tuple(leaf["path"]) for leaf in document["leaves"]]
    check(len(set(paths)) == len(paths), "a path stands twice")
    found = list(_leaves_of(document["tree"], ()))
    check([leaf for _, leaf in found] == list(range(len(paths))), "leaves of the tree")
    for (keys, _), path in zip(found, paths):
        check(len(keys) == len(path), f"path {path}")
        check(all(key in (None, text) for key, text in zip(keys, path)), f"path {path}")
    return document


def _leaves_of(node: Any, path: tuple) -> Iterator[tuple[tuple, int]]:
    """Paths and numbers of the leaves of a tree (8.6)."""
    check(len(path) <= MOST_LEVELS, "levels of the tree")
    (kind,) = node.keys() - {"type"}
    check(("type" in node) == (kind == "node"), "type of a node")
    content = node[kind]
    if kind == "leaf":
        check(type(content) is int, "number of a leaf")
        yield path, content
    elif kind == "none":
        check(content is True, "a None")
    else:
        check(kind in ("list", "tuple", "dict", "node"), f"node {kind}")
        if kind in ("list", "tuple"):
            content = [(str(number), node) for number, node in enumerate(content)]
        for key, child in content:
            yield from _leaves_of(child, (*path, _key_text(key)))


def _key_text(key: Any) -> str | None:
    if isinstance(key, str):
        return key
    kind, value = key
    check(kind in ("int", "bool", "float", "bytes", "tuple", "text"), f"key {key}")
    known = {"int": lambda: str(_hexadecimal(value)), "text": lambda: value}
    return known[kind]() if kind in known else None


def _check_leaf(leaf: dict[str, Any], shardings: int) -> None:
    """Fields of a leaf against its kind (8.3, 8.4)."""
    check(
        leaf.keys() == {"path", "kind", "dtype", "shape", "sharding", "value"}, "leaf"
    )
    path, kind, dtype = leaf["path"], leaf["kind"], leaf["dtype"]
    shape, sharding = leaf["shape"], leaf["sharding"]
    check(type(path) is list and all(type(key) is str for key in path), "path")
    check(all(type(size) is int and size >= 0 for size in shape), f"shape of {path}")
    check(type(sharding) is int and 0 <= sharding < shardings, f"sharding of {path}")
    check(not sharding or kind in ("jax", "key"), f"sharding of {path}")
    if kind in ("jax", "numpy", "numpy_scalar", "key", "str", "bytes"):
        check(kind != "numpy_scalar" or not shape, f"shape of {path}")
        check(type(leaf["value"]) is (str if kind == "key" else type(None)), f"{path}")
        check(len(shape) <= 64 and sizes(dtype), f"type of {path}")
        text = kind in ("str", "bytes")
        check(not text or (dtype == "uint8" and len(shape) == 1), f"type of {path}")
    else:
        check(kind in ("int", "float", "bool", "complex"), f"kind of {path}")
        check(dtype == "" and shape == [], f"type of {path}")


def _manifest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The MANIFEST of an item and its folder, here or in an archive (9.6)."""
    for _ in range(4):
        link = folder / "ARCHIVED"
        if (folder / "MANIFEST").is_file() or not link.is_file():
            return folder, read_manifest((folder / "MANIFEST").read_bytes())
        found = _sealed(link, "orbax-delta-archived")
        names = found["path"].split("/")
        check(len(names) <= 2 and not {"", ".", ".."} & {*names}, f"path of {link}")
        check(found["archive"].startswith("/"), f"archive of {link}")
        folder = Path(found["archive"], *names)
    raise DamagedError(f"{folder} leads to yet another archive")


def find_store(folder: Path, uuid: str) -> Path:
    """The store of a step (2.3)."""
    stores = [_store_of_root(above) for above in list(folder.parents)[:5]]
    if folder.parent.name == "bases":
        stores.append(folder.parents[1])
    for store in stores:
        if store is not None and (store / "STORE.json").is_file():
            found = _sealed(store / "STORE.json", "orbax-delta-store")
            check(HEX.fullmatch(found["uuid"]), f"uuid of {store}")
            check(type(found["shared"]) is bool, f"shared of {store}")
            if found["uuid"] == uuid:
                return store
    raise DamagedError(f"no store {uuid} above {folder}")


def _store_of_root(root: Path) -> Path | None:
    """Where a root has its store: below it, or where its ROOT.json says (9.4)."""
    below = root / "_delta_store"
    if (below / "STORE.json").is_file() or not (below / "ROOT.json").is_file():
        return below
    found = _sealed(below / "ROOT.json", "orbax-delta-root")
    for name in ("root_uuid", "store_uuid"):
        check(HEX.fullmatch(found[name]), f"{name} of {below}")
    # This reader opens local files alone.
    return Path(found["store"]) if isinstance(found["store"], str) else None


def _sealed(path: Path, magic: str) -> dict[str, Any]:
    """A small file of a store, its digest checked (9)."""
    document = parse_json(path.read_bytes())
    check(document["magic"] == magic, f"{path} is no such file")
    if document["format_version"] != 1:
        raise UnknownVersionError(f"{path} of version {document['format_version']}")
    # Sorted names, no white space, ASCII only; then its `digest` is right.
    rest = {name: document[name] for name in document.keys() - {"digest"}}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    digest = xxhash.xxh3_128_hexdigest(text)
    check(digest == document["digest"], f"digest of {path} is {digest}")
    return document


# --- parts --------------------------------------------------------------------------


def _secret(manifest: dict[str, Any], secret: bytes | None) -> bytes | None:
    """The user's key if the step is sealed with it (8.10)."""
    if "encryption" not in manifest:
        return None
    check(manifest["encryption"].keys() == {"key_id", "check"}, "encryption")
    attempt, expected = manifest["attempt"], manifest["encryption"]["check"]
    found = secret and derived(secret, attempt, "orbax_delta check", 16).hex()
    check(found == expected, "the key")
    return secret


def _part(
    folder: Path, entry: dict[str, Any], manifest: dict[str, Any], secret: bytes | None
) -> list[Row]:
    """The rows of a part (7.2 to 7.4)."""
    check(
        entry.keys() == {"name", "length", "digest", "rows", "packs"},
        "fields of a part",
    )
    name = PART.fullmatch(entry["name"])
    check(name and name[1] == manifest["attempt"], f"name {entry['name']}")
    data = (folder / entry["name"]).read_bytes()
    check(len(data) == entry["length"], f"length of {entry['name']}")
    check(
        xxhash.xxh3_128_hexdigest(data) == entry["digest"], f"digest of {entry['name']}"
    )
    magic, version, flags, rows, records, bounds, size, attempt = struct.unpack(
        "<8sHHIIIQ16s", data[:48]
    )
    check(magic == b"ODPART\r\n", "magic of a part")
    if version != 1:
        raise UnknownVersionError(f"part of version {version}")
    check(flags == (secret is not None), "flags of a part")
    check(attempt.hex() == name[1], "attempt of a part")
    check(rows == entry["rows"], "rows of a part")
    check(max(rows, records) <= MOST_ROWS, "size of a part")
    check(size == 27 * rows + 8 * bounds + 13 * records, "body of a part")
    frame = data[48:]
    if secret is not None:
        place = int(entry["name"].rpartition("-p")[2]), 0xFFFFFFFF, 0
        frame = unseal(secret, name[1], place, frame, data[:48])
    column = _columns(unzstd(frame, size), rows, bounds, records)
    check(column["dimensions"].sum(dtype=int) * 2 == bounds, "bounds of a part")
    check(column["records"].sum(dtype=int) == records, "records of a part")
    own, listed = entry["packs"], range(len(manifest["packs"]))
    check(all(type(i) is int and i in listed for i in own), "packs of a part")
    found, bound, record = [], 0, 0
    for number in range(rows):
        ends = bound + 2 * int(column["dimensions"][number])
        last = record + int(column["records"][number])
        edges = [int(edge) for edge in column["bounds"][bound:ends]]
        refs = []
        for i in range(record, last):
            pack = int(column["pack"][i])
            if pack != NO_PACK:
                check(pack < len(own), "pack of a record")
                pack = own[pack]
            place = int(column["offset"][i]), int(column["length"][i])
            refs.append((int(column["form"][i]), pack, *place))
        row = Row(
            leaf=int(column["leaf"][number]),
            box=tuple(map(slice, edges[::2], edges[1::2])),
            rule=int(column["rule"][number]),
            digest=column["digest"][number].tobytes(),
            refs=refs,
        )
        _check_row(row, manifest)
        found.append(row)
        bound, record = ends, last
    return found


def _columns(
    body: bytes, rows: int, bounds: int, records: int
) -> dict[str, np.ndarray]:
    columns, start = {}, 0
    for name, kind, count in (
        *(("leaf", "<u4", rows), ("dimensions", "u1", rows), ("rule", "u1", rows)),
        *(("since", "<i2", rows), ("age", "<i2", rows), ("records", "u1", rows)),
        *(("digest", "V16", rows), ("bounds", "<u8", bounds), ("form", "u1", records)),
        *((name, "<u4", records) for name in ("pack", "offset", "length")),
    ):
        columns[name] = np.frombuffer(body, kind, count, start)
        start += columns[name].nbytes
    return columns


def _check_row(row: Row, manifest: dict[str, Any]) -> None:
    check(row.leaf < len(manifest["leaves"]), "leaf of a row")
    leaf = manifest["leaves"][row.leaf]
    check(leaf["dtype"], "a row for a leaf without chunks")
    check(len(row.box) == len(leaf["shape"]), f"box of {leaf['path']}")
    inside = (0 <= b.start < b.stop <= n for b, n in zip(row.box, leaf["shape"]))
    check(all(inside), f"box of {leaf['path']}")
    check(row.rule in (0, 1, 2), "rule")
    check(not row.rule or sizes(leaf["dtype"])[1] == 2, "rule of other words")
    check(1 <= len(row.refs) <= LONGEST_LIST, "length of a list")
    for place, (form, pack, *_) in enumerate(row.refs):
        check(
            1 <= form <= RELATIVE and (form in FULL) == (place == 0), "order of forms"
        )
        check((pack == NO_PACK) == (form == CONSTANT), "pack of a record")


def _check_cover(leaf: dict[str, Any], rows: list[Row]) -> None:
    """The boxes of a leaf cover it exactly once (3.3)."""
    if not leaf["dtype"]:
        return
    boxes = [math.prod(b.stop - b.start for b in row.box) for row in rows]
    # Before room is made for the leaf; the mask then shows what overlaps.
    check(sum(boxes) == math.prod(leaf["shape"]), f"boxes of {leaf['path']}")
    seen = np.zeros(leaf["shape"], bool)
    for row in rows:
        seen[row.box] = True
    check(seen.all(), f"boxes of {leaf['path']} overlap")


# --- values ------------------------------------------------------------------------


def _value(leaf: dict[str, Any], rows: list[Row], packs: Packs) -> Any:
    kind, dtype, value = leaf["kind"], leaf["dtype"], leaf["value"]
    if kind == "bool":
        check(type(value) is bool, "bool")
        return value
    if not dtype:
        simple = {"int": _hexadecimal, "float": _double, "complex": _complex}
        return simple[kind](value)
    size, word = sizes(dtype)
    whole = np.zeros(leaf["shape"], f"V{size}")
    for row in rows:
        shape = [b.stop - b.start for b in row.box]
        chunk = content(row, math.prod(shape), dtype, word, packs)
        whole[row.box] = np.frombuffer(chunk, f"V{size}").reshape(shape)
    data = whole.tobytes()
    if kind == "bytes":
        return data
    if kind == "str":
        return data.decode("utf-8", "surrogatepass")
    return Array(
        kind=kind, dtype=dtype, shape=tuple(leaf["shape"]), data=data, key_type=value
    )


def _hexadecimal(text: str) -> int:
    check(re.fullmatch(r"-?0x[0-9a-f]+", text), f"int {text!r}")
    return int(text, 16)


def _double(text: str) -> float:
    check(re.fullmatch(r"[0-9a-f]{16}", text), f"float {text!r}")
    return struct.unpack(">d", bytes.fromhex(text))[0]


def _complex(pair: list[str]) -> complex:
    real, imaginary = map(_double, pair)
    return complex(real, imaginary)
