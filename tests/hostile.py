"""Files as a hostile writer makes them: anything inside, every digest right.

One small root is saved, taken apart, changed in a few places and put together again
with the lengths, digests and checksums that belong to it (`mutations` says how).
"""

import contextlib
import dataclasses
import io
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
import xxhash
import zstandard

from orbax_delta import (
    check,
    cli,
    delegation,
    documents,
    handler,
    listing,
    parts,
    prune,
    records,
    restore,
)
from orbax_delta.errors import DeltaError
from orbax_delta.manifests import MANIFEST_NAME, PART_NAME, parse_manifest
from orbax_delta.options import DeltaOptions
from orbax_delta.places import locate
from orbax_delta.store import DeltaStore, Folder

STEPS = (1, 2, 3)
ITEM = "default"
_OPTIONS = DeltaOptions(threads=1)
PART_COLUMNS = (
    *(("leaf", "<u4"), ("dimensions", "u1"), ("rule", "u1"), ("since", "<i2")),
    *(("age", "<i2"), ("records", "u1"), ("digest", "V16"), ("bounds", "<u8")),
    *(("form", "u1"), ("pack", "<u4"), ("offset", "<u4"), ("length", "<u4")),
)
PART_HEAD = struct.Struct("<8sHHIIIQ16s")
RECORD_HEAD = struct.Struct("<4sBBHII16s")
PACK_HEAD = struct.Struct("<8sHHI16s")
_PACK_TAIL = struct.Struct("<II16s8s")


# --- a root -------------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    """Every kind of leaf, node, key and chunk, a few bytes of each."""
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((24, 8)).astype(np.float32)
    for earlier in range(step):
        weights[earlier, :2] += 1
    return {
        "w": strategies.sharded(weights, (2,), "x", "x"),
        "half": jnp.asarray(weights).astype(jnp.bfloat16),
        "copy": weights.copy(),
        "zeros": np.zeros((40, 4), np.int16),
        "small": strategies.random_array(rng, "int4", (5,)),
        "noise": np.random.default_rng(step).standard_normal(70),
        "key": jax.random.key(step),
        "values": (step, -0.5, True, 2j, "text\ud800", b"\xffraw", None, np.int8(3)),
        "by number": {1: np.ones(3), 20: np.empty((0, 2))},
    }


def make(folder: Path) -> Path:
    """Save `STEPS` with small chunks and packs."""
    with pytest.MonkeyPatch.context() as patch:
        strategies.skip_disk_sync(patch)
        with strategies.open_run(
            folder, chunk_bytes=256, pack_bytes=2048, full_every=5, threads=1
        ) as run:
            for step in STEPS:
                run.save(step, state(step))
    return folder


def item_folder(root: Path, step: int) -> Path:
    """Where MANIFEST and part of a step lie."""
    return root / str(step) / ITEM


def part_file(root: Path, step: int) -> Path:
    """The part of a step."""
    (found,) = (p for p in item_folder(root, step).iterdir() if p.name[:5] == "part-")
    assert PART_NAME.fullmatch(found.name)
    return found


# --- bytes from values --------------------------------------------------------------


def digest(data: bytes) -> bytes:
    """XXH3, 128 bits."""
    return xxhash.xxh3_128_digest(data)


def manifest_bytes(document: Any, *, version: str = "1") -> bytes:
    """A MANIFEST of any document, or of any text."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    frame = zstandard.ZstdCompressor(level=1).compress(text)
    line = f"ORBAX-DELTA-MANIFEST {version} {digest(frame).hex()} {len(text)}\n"
    return line.encode() + frame


def manifest_document(data: bytes) -> Any:
    """The document of a MANIFEST, not looked at."""
    frame = data.split(b"\n", 1)[1]
    return json.loads(zstandard.ZstdDecompressor().decompress(frame))


def part_document(data: bytes) -> dict[str, Any]:
    """Header fields and columns of a part, as lists of numbers."""
    names = ("magic", "version", "flags", "rows", "refs", "edges", "body", "attempt")
    head = dict(zip(names, PART_HEAD.unpack_from(data), strict=True))
    body = zstandard.ZstdDecompressor().decompress(data[PART_HEAD.size :])
    found: dict[str, Any] = {"version": head["version"], "flags": head["flags"]}
    position = 0
    counts = {"bounds": head["edges"]}
    counts |= dict.fromkeys(("form", "pack", "offset", "length"), head["refs"])
    for name, kind in PART_COLUMNS:
        count = counts.get(name, head["rows"])
        column = np.frombuffer(body, kind, count, position)
        position += column.nbytes
        if name == "digest":
            found[name] = [bytes(one).hex() for one in column]
        else:
            found[name] = column.tolist()
    return found | {"attempt": head["attempt"].hex()}


def part_bytes(document: dict[str, Any]) -> bytes:
    """The part of any header and columns; what does not fit a column is cut off."""
    columns = []
    for name, kind in PART_COLUMNS:
        values = document[name]
        if name == "digest":
            columns.append(b"".join(as_bytes(value, 16) for value in values))
            continue
        width = np.dtype(kind).itemsize
        columns.append(b"".join(as_bytes(value, width) for value in values))
    body = b"".join(columns)
    counts = [len(document[name]) for name in ("leaf", "form", "bounds")]
    head = PART_HEAD.pack(
        b"ODPART\r\n",
        as_int(document["version"], 2),
        as_int(document["flags"], 2),
        *counts,
        as_int(document.get("body", len(body)), 8),
        as_bytes(document["attempt"], 16),
    )
    return head + zstandard.ZstdCompressor(level=1).compress(body)


def as_int(value: Any, width: int) -> int:
    """Any value as an unsigned number of `width` bytes."""
    return int.from_bytes(as_bytes(value, width), "little")


def as_bytes(value: Any, width: int) -> bytes:
    """Any value as `width` bytes: hexadecimal text, or a little-endian number."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return bytes.fromhex(value)[:width].ljust(width, b"\0")
    number = int(value) if type(value) in (int, bool) else len(str(value))
    return (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def record_bytes(head: Sequence[Any], payload: bytes) -> bytes:
    """A record with any header and the checksum that belongs to it."""
    body = RECORD_HEAD.pack(*head) + payload
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def with_payload(record: bytes, payload: bytes) -> bytes:
    """The record with another payload, and length and checksum of that."""
    head = list(RECORD_HEAD.unpack_from(record))
    head[5] = len(payload)
    return record_bytes(head, payload)


def pack_records(data: bytes) -> list[bytes]:
    """The records of a pack."""
    index = records.parse_pack(memoryview(data))
    return [data[offset : offset + length] for offset, length in index.spans]


def pack_bytes(head: bytes, found: Sequence[bytes]) -> bytes:
    """A pack of any records, with the index and the digest that belong to it."""
    spans, position = [], len(head)
    for record in found:
        spans.append(struct.pack("<II", position, len(record)))
        position += len(record)
    index = b"".join(spans)
    tail = _PACK_TAIL.pack(len(spans), len(index), digest(head + index), b"ODPKEND\n")
    return head + b"".join(found) + index + tail


def part_head(*, path: Path, rows: int) -> bytes:
    """The header of a part of that many rows of one constant and no dimension each."""
    attempt = bytes.fromhex(path.name[5:37])
    return PART_HEAD.pack(b"ODPART\r\n", 1, 0, rows, rows, 0, 40 * rows, attempt)


def manifest_of_part(manifest: bytes, part: bytes) -> bytes:
    """A MANIFEST that says of its part what the bytes `part` are."""
    document = manifest_document(manifest)
    document["parts"][0] |= {
        "length": len(part),
        "digest": digest(part).hex(),
        "rows": int.from_bytes(part[12:16], "little"),
    }
    return manifest_bytes(document)


def put_part(root: Path, step: int, data: bytes) -> None:
    """Write a part, and a MANIFEST that says what it is."""
    part_file(root, step).write_bytes(data)
    path = item_folder(root, step) / MANIFEST_NAME
    path.write_bytes(manifest_of_part(path.read_bytes(), data))


def bomb(piece: bytes, count: int) -> bytes:
    """A zstd frame of `count` times `piece`, made in little memory."""
    encoder = zstandard.ZstdCompressor(level=1).compressobj(size=count * len(piece))
    parts_of_it = [encoder.compress(piece) for _ in range(count)]
    return b"".join(parts_of_it) + encoder.flush()


def replace_records(root: Path, step: int, payload: bytes) -> None:
    """Give every record that a step needs another payload; rows follow them."""
    folder = root / strategies.STORE / "packs"
    opened = strategies.read_step(root, step)
    moved: dict[tuple[str, int], tuple[int, int]] = {}
    for name in opened.manifest.packs:
        data = (folder / name).read_bytes()
        changed = [with_payload(one, payload) for one in pack_records(data)]
        changed_data = pack_bytes(data[: PACK_HEAD.size], changed)
        (folder / name).write_bytes(changed_data)
        old = records.parse_pack(memoryview(data)).spans
        new = records.parse_pack(memoryview(changed_data)).spans
        moved |= {(name, a): b for (a, _), b in zip(old, new, strict=True)}
    rows = [
        dataclasses.replace(row, refs=tuple(_moved(ref, moved) for ref in row.refs))
        for row in opened.rows
    ]
    attempt = bytes.fromhex(opened.manifest.attempt)
    put_part(root, step, parts.encode_part(attempt, rows, opened.manifest.packs))


def _moved(ref: parts.Ref, moved: dict[tuple[str, int], tuple[int, int]]) -> parts.Ref:
    if not ref.pack:
        return ref
    offset, length = moved[ref.pack, ref.offset]
    return ref._replace(offset=offset, length=length)


def restored(root: Path, step: int) -> Any:
    """A step without a target."""
    return restore.run(locate(str(item_folder(root, step))), None, _OPTIONS).tree


def rewritten(root: Path, step: int, change: Callable[[Any], None]) -> Any:
    """Change the document of a MANIFEST in place; its digest is made anew."""
    path = item_folder(root, step) / MANIFEST_NAME
    document = manifest_document(path.read_bytes())
    change(document)
    path.write_bytes(manifest_bytes(document))
    return document


def leaf(document: Any, *path: str) -> Any:
    """A leaf of a MANIFEST by its path."""
    (found,) = (one for one in document["leaves"] if one["path"] == list(path))
    return found


# --- judging ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Judge:
    """A healthy root and what it restores to.

    Attributes:
        root: The root.
        expected: What each of its steps restores to.
        packs: Packs that each of its steps names.
    """

    root: Path
    expected: dict[int, Any]
    packs: dict[int, set[str]]

    @classmethod
    def of(cls, root: Path) -> "Judge":
        """Remember a healthy root."""
        return cls(
            root,
            {step: state(step) for step in STEPS},
            {
                step: set(strategies.read_step(root, step).manifest.packs)
                for step in STEPS
            },
        )

    @contextlib.contextmanager
    def changed(self, files: dict[Path, bytes]) -> Iterator[None]:
        """The root with other files, put right afterwards."""
        before = {path: path.read_bytes() if path.exists() else None for path in files}
        try:
            for path, data in files.items():
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
            yield
        finally:
            for path, old in before.items():
                if old is None:
                    path.unlink()
                else:
                    path.write_bytes(old)

    def look(self, mutated_step: int | None, *, shared: bool = False) -> int:
        """Read the root in every way; anything but a DeltaError is a finding.

        Args:
            mutated_step: The step whose own files were changed, if any.
            shared: Whether a file was changed that other steps need, too.

        Returns:
            How many of the ways ended in an error.
        """
        refused = 0
        for step in STEPS:
            own = step == mutated_step
            refused += self._restore(step, exact=not own, whole=not (own or shared))
        refused += _refuses(self._list)
        refused += _refuses(self._prune, mutated_step)
        for words in (["ls"], ["verify"], ["show", str(mutated_step or STEPS[0])]):
            refused += _command(words[0], str(self.root), *words[1:]) != 0
        return refused

    def _restore(self, step: int, *, exact: bool, whole: bool) -> int:
        place = locate(str(item_folder(self.root, step)))
        try:
            tree = restore.run(place, None, _OPTIONS).tree
            data = (item_folder(self.root, step) / MANIFEST_NAME).read_bytes()
            manifest = parse_manifest(data, where="MANIFEST")
            delegation.tree_metadata(manifest, place.item_url)
            if not exact:
                target = delegation.target(handler.DeltaRestore(self.expected[step]))
                restore.run(place, target, _OPTIONS)
        except DeltaError as error:
            require_words(error)
            if whole:
                raise AssertionError(f"healthy step {step} does not restore") from error
            return 1
        if exact:
            strategies.assert_same_tree(tree, self.expected[step])
        return 0

    def _list(self) -> None:
        root = listing.read_root(str(self.root))
        documents.of_root(root, {}, [])
        check.verify(str(self.root), threads=1)

    def _prune(self, mutated_step: int | None) -> None:
        store = DeltaStore.open(Folder(str(self.root)))
        assert store is not None
        dead = set(prune.plan(store).dead)
        for step in STEPS:
            if step != mutated_step:
                assert not dead & self.packs[step], f"a prune would harm step {step}"


def require_words(error: DeltaError, *names: str) -> None:
    """Assert that an error says something, and names the file."""
    assert str(error)
    assert not names or any(name in str(error) for name in names), error


def _refuses(action: Callable[..., None], *arguments: Any) -> int:
    try:
        action(*arguments)
    except DeltaError as error:
        require_words(error)
        return 1
    return 0


def _command(*arguments: str) -> int:
    """The exit code of a command; what it prints must be printable."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main([*arguments, "--json"]) + cli.main(arguments)
    assert "Traceback" not in out.getvalue()
    return code
