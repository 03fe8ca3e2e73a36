"""What the fuzzer calls: one function a parser, each fed with any bytes.

The bytes are choices (`mutations.Choices`) that change a valid file or the body of one;
digests and checksums are computed afterwards, so that no input dies on those. A
function returns if the parser gave a value that holds together or a DeltaError, and
raises for anything else.
"""

import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hostile
import mutations
import numpy as np
import zstandard
from mutations import Choices

from orbax_delta import (
    assemble,
    codecs,
    delegation,
    jsontext,
    marks,
    records,
    steps,
    storefiles,
)
from orbax_delta.codecs import Form
from orbax_delta.errors import DeltaError
from orbax_delta.manifests import (
    MANIFEST_NAME,
    Manifest,
    PartEntry,
    encode_manifest,
    parse_manifest,
)
from orbax_delta.reports import SaveReport
from orbax_delta.targets import AS_SAVED

_MAX_CONTENT_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Seeds:
    """Valid files to start from."""

    manifest: bytes
    part: bytes
    packs: Sequence[bytes]
    records: Sequence[bytes]
    mark: bytes
    store: bytes

    @classmethod
    def of(cls, root: Path) -> "Seeds":
        """The files of a healthy root."""
        folder = root / "_delta_store"
        packs = [path.read_bytes() for path in sorted((folder / "packs").iterdir())]
        owner = {"host": "h", "pid": 1, "start": "2"}
        names = sorted(path.name for path in (folder / "packs").iterdir())
        document = {"format_version": 1, "owner": owner, "packs": names[:3]}
        return cls(
            manifest=(hostile.item_folder(root, 2) / MANIFEST_NAME).read_bytes(),
            part=hostile.part_file(root, 2).read_bytes(),
            packs=packs,
            records=[one for pack in packs for one in hostile.pack_records(pack)],
            mark=jsontext.sealed(document),
            store=(folder / "STORE.json").read_bytes(),
        )


@functools.cache
def seeds() -> Seeds:
    """The files of a small root, saved once in a process."""
    with tempfile.TemporaryDirectory() as folder:
        return Seeds.of(hostile.make(Path(folder) / "run"))


@functools.cache
def _manifest_document() -> Any:
    return hostile.manifest_document(seeds().manifest)


@functools.cache
def _manifest() -> Manifest:
    return parse_manifest(seeds().manifest, where="MANIFEST")


def manifest(data: bytes) -> None:
    """A MANIFEST: any text, a changed document, or a file with changed bytes."""
    choices = Choices(data)
    match choices.below(4):
        case 0:
            file = hostile.manifest_bytes(choices.rest())
        case 1:
            file = mutations.mutated_bytes(seeds().manifest, choices)
        case _:
            file = hostile.manifest_bytes(
                mutations.mutated(_manifest_document(), choices)
            )
    try:
        found = parse_manifest(file, where="a/MANIFEST")
    except DeltaError as error:
        hostile.require_words(error, "a/MANIFEST")
        return
    assert parse_manifest(encode_manifest(found), where="again") == found
    assert found.full_bytes < 1 << 63
    for entry in found.leaves:
        _or_delta_error(assemble.plan_leaf, entry, AS_SAVED, moved=[])
    _or_delta_error(delegation.tree_metadata, found, "a")
    _or_delta_error(SaveReport.from_document, found.report)


def part(data: bytes) -> None:
    """A part: any columns, changed columns, or a file with changed bytes."""
    choices = Choices(data)
    match choices.below(4):
        case 0:
            file = _part_of_columns(choices)
        case 1:
            file = mutations.mutated_bytes(seeds().part, choices)
        case _:
            file = mutations.mutated_part(seeds().part, choices)
    manifest = _manifest()
    entry = PartEntry(
        name=f"part-{manifest.attempt}-p0",
        length=len(file),
        digest=hostile.digest(file).hex(),
        rows=int.from_bytes(file[12:16], "little"),
        packs=range(len(manifest.packs)),
    )
    named = dataclasses.replace(manifest, parts=(entry,))
    try:
        rows = steps.read_rows(_OneFile(file), named)
    except DeltaError as error:
        hostile.require_words(error, "a/part", "a/:")
        return
    covered = sum(
        int(np.prod([stop - start for start, stop in row.box], dtype=object))
        for row in rows
    )
    arrays = [leaf.shape for leaf in manifest.leaves if leaf.dtype]
    assert covered == sum(int(np.prod(shape, dtype=object)) for shape in arrays)


def _part_of_columns(choices: Choices) -> bytes:
    counts = [choices.below(6) for _ in range(3)]
    body = choices.rest()
    if choices.below(2) == 0:
        size = counts[0] * 27 + counts[1] * 13 + counts[2] * 8
        body = body.ljust(size, b"\0")[:size]
    head = hostile.PART_HEAD.pack(
        b"ODPART\r\n", 0, 0, *counts, len(body), bytes.fromhex(_manifest().attempt)
    )
    return head + zstandard.compress(body)


class _OneFile:
    """A folder that holds one file's bytes."""

    url = "a/"

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, name: str) -> bytes:
        """The file, whatever it is called."""
        return self._data


def pack(data: bytes) -> None:
    """A pack: changed records, or a file with changed bytes."""
    choices = Choices(data)
    file = choices.of(seeds().packs)
    if choices.below(2):
        file = mutations.mutated_pack(file, choices)
    else:
        file = mutations.mutated_bytes(file, choices)
    try:
        index = records.parse_pack(memoryview(file))
    except DeltaError:
        return
    for offset, length in index.spans:
        _or_delta_error(records.parse_record, memoryview(file)[offset:][:length])


def record(data: bytes) -> None:
    """A record and what it decodes to on a base of its size."""
    choices = Choices(data)
    file = choices.of(seeds().records)
    if choices.below(4):
        file = mutations.mutated_record(file, choices)
    else:
        file = mutations.mutated_bytes(file, choices)
    try:
        found = records.parse_record(memoryview(file))
    except DeltaError:
        return
    if found.content_bytes <= _MAX_CONTENT_BYTES:
        _decode(found.form, found.payload, found.content_bytes, found.word_bytes)


def codec(data: bytes) -> None:
    """Any payload, or a changed one, for content of any size."""
    choices = Choices(data)
    form = choices.of(sorted(codecs.FORM_NUMBERS))
    word_bytes = choices.of((1, 2, 4, 8))
    content_bytes = word_bytes * choices.below(1 << 13)
    if choices.below(2):
        payload = choices.of(seeds().records)[hostile.RECORD_HEAD.size : -8]
        payload = mutations.mutated_bytes(payload, choices)
    else:
        payload = choices.rest()
    _decode(Form(form), payload, content_bytes, word_bytes)


def _decode(form: Form, payload: Any, content_bytes: int, word_bytes: int) -> None:
    base = np.arange(content_bytes, dtype=np.uint32).astype(np.uint8)
    kept = base.copy()
    found = _or_delta_error(
        codecs.decode, form, payload, base, content_bytes, word_bytes
    )
    assert found is None or (found.dtype, found.size) == (np.uint8, content_bytes)
    assert (base == kept).all()


def mark(data: bytes) -> None:
    """A pin or a condemned mark."""
    choices = Choices(data)
    file = _json_file(seeds().mark, choices)
    found = _or_delta_error(marks.parse_mark, file, where="a/pin")
    if found is not None:
        assert marks.parse_mark(found.encode(), where="again") == found
        assert found.owner.known_dead in (True, False)


def store_file(data: bytes) -> None:
    """STORE.json."""
    file = _json_file(seeds().store, Choices(data))
    found = _or_delta_error(storefiles.parse_store, file, "a/STORE.json")
    if found is not None:
        again = storefiles.store_document(found.uuid, shared=found.shared)
        assert storefiles.parse_store(again, "again") == found


def _json_file(seed: bytes, choices: Choices) -> bytes:
    match choices.below(3):
        case 0:
            return choices.rest()
        case 1:
            return mutations.mutated_bytes(seed, choices)
    return mutations.mutated_json(seed, choices)


def _or_delta_error(action: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return action(*arguments, **named)
    except DeltaError as error:
        hostile.require_words(error)
        return None


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "manifest": manifest,
    "part": part,
    "pack": pack,
    "record": record,
    "codec": codec,
    "mark": mark,
    "store": store_file,
}


def corpus() -> Mapping[str, Sequence[bytes]]:
    """Inputs to start from: the bodies of real files, and choices of every kind."""
    seed = seeds()
    text = json.dumps(_manifest_document()).encode()
    bodies = {
        "manifest": [b"\0" + text],
        "codec": [
            bytes((form, word, 64, 0, 0)) + one[32:-8]
            for one in seed.records[:20]
            for form, word in ((one[4] - 1, one[5].bit_length() - 1),)
        ],
        "mark": [b"\0" + seed.mark],
        "store": [b"\0" + seed.store],
    }
    drawn = [os.urandom(120) for _ in range(50)]
    return {name: [*bodies.get(name, ()), *drawn] for name in TARGETS}
