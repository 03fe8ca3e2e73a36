"""Rows and the part file that holds them (FORMAT.md section 7).

A row says of one chunk which content it has and which records make it, full record
first. Columns instead of row structs, so that zstd finds the regularities; a host may
have millions of them. Pure bytes.
"""

import dataclasses
import functools
import itertools
import operator
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_delta.chunks import MAX_DIMENSIONS, Box
from orbax_delta.codecs import Form
from orbax_delta.columns import INLINE, WORD_BYTES, Columns, body_bytes
from orbax_delta.dtypes import Rule, source_bytes
from orbax_delta.errors import CorruptionError, FormatError
from orbax_delta.frames import compress_text, decompress_text
from orbax_delta.options import MAX_CHAIN_LIMIT
from orbax_delta.records import DIGEST_BYTES, FORMAT_VERSION, check_magic
from orbax_delta.sealing import Key

PART_MAGIC = b"ODPART\r\n"
_HEAD = struct.Struct("<8sHHIIIQ16s")
# Of the flags: the columns are sealed.
_SEALED = 1
_MAX_ROWS = 1 << 26
_ZSTD_LEVEL = 3
# What a reader holds besides its rows: those made at a time, what it knows by heart.
_BLOCK_ROWS = 4096
_MOST_BOXES = 1 << 16

_FORMS = {int(form): form for form in Form}
_RULES = {int(rule): rule for rule in Rule}
_BOUND_BYTES = 8


class Ref(NamedTuple):
    """Where one record of a chunk lies, or the word of a constant one.

    A tuple, because there are several to a row: it is made, compared and hashed five
    times as fast as a frozen dataclass.

    Attributes:
        form: The record's form.
        pack: Name of its pack; empty for a constant, which needs no record.
        offset: First byte in the pack.
        length: Bytes of the record.
        word: The repeated element of a constant.
    """

    form: Form
    pack: str = ""
    offset: int = 0
    length: int = 0
    word: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One chunk of one leaf.

    Attributes:
        leaf: Index of the leaf in the MANIFEST.
        box: Its place in the leaf.
        digest: 128-bit digest of its content.
        rule: How the content follows from what `refs` decode to; NONE: it is that.
        refs: Records that make it (of a derived chunk: its source), full one first.
        since: Deltas since the last full record, plus a stagger.
        age: Saves since the last full record, minus a stagger.
    """

    leaf: int
    box: Box
    digest: bytes
    rule: Rule
    refs: tuple[Ref, ...]
    since: int
    age: int

    @property
    def stored_bytes(self) -> int:
        """Bytes to read for this chunk."""
        return sum(ref.length for ref in self.refs)


def encode_part(
    attempt: bytes,
    rows: Sequence[Row],
    packs: Sequence[str],
    *,
    process: int = 0,
    key: Key | None = None,
) -> bytes:
    """The bytes of a part; `packs` is the MANIFEST's list that refs index into.

    With a key its columns are sealed.
    """
    pack_index = {name: index for index, name in enumerate(packs)} | {"": INLINE}
    refs = [ref for row in rows for ref in row.refs]
    bounds = [edge for row in rows for pair in row.box for edge in pair]

    def of_rows(name: str, dtype: str) -> np.ndarray:
        return np.fromiter(map(operator.attrgetter(name), rows), dtype, len(rows))

    def of_refs(name: str, dtype: str) -> np.ndarray:
        return np.fromiter(map(operator.attrgetter(name), refs), dtype, len(refs))

    offset, length = of_refs("offset", "<u4"), of_refs("length", "<u4")
    for index, ref in enumerate(refs):
        if not ref.pack:
            offset[index], length[index] = _inline_word(ref)
    packs_of_refs = map(operator.attrgetter("pack"), refs)
    columns = (
        of_rows("leaf", "<u4"),
        np.fromiter((len(row.box) for row in rows), "u1", len(rows)),
        of_rows("rule", "u1"),
        of_rows("since", "<i2"),
        of_rows("age", "<i2"),
        np.fromiter((len(row.refs) for row in rows), "u1", len(rows)),
        np.frombuffer(b"".join(row.digest for row in rows), "u1"),
        np.fromiter(bounds, "<u8", len(bounds)),
        of_refs("form", "u1"),
        np.fromiter(map(pack_index.__getitem__, packs_of_refs), "<u4", len(refs)),
        offset,
        length,
    )
    body = b"".join(column.tobytes() for column in columns)
    head = _HEAD.pack(
        PART_MAGIC,
        FORMAT_VERSION,
        0 if key is None else _SEALED,
        len(rows),
        len(refs),
        len(bounds),
        len(body),
        attempt,
    )
    frame = compress_text(body, _ZSTD_LEVEL)
    return head + (
        frame if key is None else key.seal_part(attempt, process, head, frame)
    )


def _inline_word(ref: Ref) -> tuple[int, int]:
    low, high = struct.unpack("<II", ref.word.ljust(8, b"\0"))
    return low, high


def parse_part(
    data: bytes,
    *,
    attempt: bytes,
    rows: int,
    packs: Sequence[str],
    words: Sequence[int],
    process: int = 0,
    key: Key | None = None,
) -> Iterator[Row]:
    """Rows of a part whose digest the caller has checked.

    Args:
        data: The whole part.
        attempt: The attempt that the MANIFEST names for it.
        rows: Number of rows that the MANIFEST gives.
        packs: The MANIFEST's pack names.
        words: Word size of each leaf of the MANIFEST, in bytes; 0 for no array.
        process: The process that its name gives.
        key: Key of the step; None: it is not encrypted.

    Raises:
        UnsupportedVersionError: A newer format wrote it.
        FormatError: It is not a part of this attempt.
        CorruptionError: A count, index or value is out of range.
    """
    check_magic(data, PART_MAGIC, "part")
    if len(data) < _HEAD.size:
        raise CorruptionError(f"a part of {len(data)} bytes has no header")
    _, _, flags, row_count, ref_count, bound_count, announced, owner = (
        _HEAD.unpack_from(data)
    )
    if owner != attempt:
        raise FormatError(
            f"a part was written by attempt {owner.hex()}; expected {attempt.hex()}"
        )
    # Counts of lists and boxes follow from that of the rows, which the MANIFEST knows.
    if row_count != rows:
        raise CorruptionError(f"a part holds {row_count} rows, not {rows}")
    fits = (
        bound_count <= 2 * MAX_DIMENSIONS * row_count
        and row_count <= ref_count <= MAX_CHAIN_LIMIT * row_count
    )
    if flags != (0 if key is None else _SEALED) or not fits:
        raise CorruptionError(
            f"a part has flags {flags}, {bound_count} bounds and {ref_count} records "
            f"for {row_count} rows; no such part in this format version"
        )
    expected = body_bytes(row_count, ref_count, bound_count)
    if announced != expected or max(row_count, ref_count) > _MAX_ROWS:
        raise CorruptionError(
            f"a part announces {announced} bytes for {row_count} rows and "
            f"{ref_count} records; expected {expected}"
        )
    frame = memoryview(data)[_HEAD.size :]
    if key is not None:
        frame = memoryview(key.open_part(attempt, process, data[: _HEAD.size], frame))
    body = memoryview(decompress_text(frame, announced))
    columns = Columns.split(body, row_count, ref_count, bound_count)
    columns.check(len(packs), words)
    return _RowMaker(columns, packs, words).rows()


class _RowMaker:
    """Rows of checked columns, some thousand at a time.

    Leaves of one shape have the same boxes, and a derived chunk has the list of its
    source. Those are made once, which halves the memory that rows take.
    """

    def __init__(
        self, columns: Columns, packs: Sequence[str], words: Sequence[int]
    ) -> None:
        self._columns = columns
        self._packs = [*packs, ""]
        self._words = words
        self._list_edges = columns.list_edges()
        self._bound_edges = columns.bound_edges()
        self._places = _repeated_places(columns, self._list_edges)
        self._lists: dict[int, tuple[Ref, ...]] = {}
        self._boxes: dict[bytes, Box] = {}

    def rows(self) -> Iterator[Row]:
        """All rows."""
        for first in range(0, len(self._columns.leaf), _BLOCK_ROWS):
            yield from self._block(first, first + _BLOCK_ROWS)

    def _block(self, first: int, stop: int) -> Iterator[Row]:
        columns = self._columns
        numbers = (columns.leaf, columns.since, columns.age, columns.rule, self._places)
        digests = columns.digests[first * DIGEST_BYTES : stop * DIGEST_BYTES].tobytes()
        each = zip(
            *(column[first:stop].tolist() for column in numbers),
            self._block_boxes(first, stop),
            self._block_lists(first, stop),
            strict=True,
        )
        for index, (leaf, since, age, rule, place, box, refs) in enumerate(each):
            if place:
                known = self._lists.setdefault(place, refs)
                refs = known if known == refs else refs
            yield Row(
                leaf=leaf,
                box=box,
                digest=digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES],
                rule=_RULES[rule],
                refs=refs,
                since=since,
                age=age,
            )

    def _block_boxes(self, first: int, stop: int) -> Iterator[Box]:
        edges = self._bound_edges[first : stop + 1]
        data = self._columns.bounds[edges[0] : edges[-1]].tobytes()
        edges = ((edges - edges[0]) * _BOUND_BYTES).tolist()
        if len(self._boxes) > _MOST_BOXES:
            self._boxes.clear()
        for start, end in itertools.pairwise(edges):
            key = data[start:end]
            box = self._boxes.get(key)
            if box is None:
                bounds = np.frombuffer(key, "<u8").reshape(-1, 2).tolist()
                box = self._boxes[key] = tuple((low, high) for low, high in bounds)
            yield box

    def _block_lists(self, first: int, stop: int) -> Iterator[tuple[Ref, ...]]:
        edges = self._list_edges[first : stop + 1]
        refs = self._refs(slice(edges[0], edges[-1]), first)
        for start, end in itertools.pairwise((edges - edges[0]).tolist()):
            yield tuple(refs[start:end])

    def _refs(self, span: slice, row: int) -> list[Ref]:
        """The records of rows from `row` on."""
        columns = self._columns
        pack = columns.pack[span]
        inline = pack == INLINE
        words = [b""] * len(pack)
        found = np.flatnonzero(inline)
        rows = np.searchsorted(self._list_edges, found + span.start, "right") - 1
        for index, number, owner in zip(
            found.tolist(), columns.words(span)[found].tolist(), rows.tolist()
        ):
            width = source_bytes(
                _RULES[int(columns.rule[owner])], self._words[columns.leaf[owner]]
            )
            words[index] = number.to_bytes(WORD_BYTES, "little")[:width]
        values = zip(
            map(_FORMS.__getitem__, columns.form[span].tolist()),
            map(
                self._packs.__getitem__,
                np.where(inline, len(self._packs) - 1, pack).tolist(),
            ),
            np.where(inline, 0, columns.offset[span]).tolist(),
            np.where(inline, 0, columns.length[span]).tolist(),
            words,
        )
        # What `Ref._make` does, without a call of Python code for each.
        return list(map(functools.partial(tuple.__new__, Ref), values))


def _repeated_places(columns: Columns, edges: np.ndarray) -> np.ndarray:
    """Of each row a number for its list if another row may have it too, or else 0.

    Lists that end in the same record are the same, unless somebody made them up.
    """
    last = edges[1:] - 1
    place = (columns.pack[last].astype(np.uint64) << np.uint64(32)) + columns.offset[
        last
    ]
    _, inverse, counts = np.unique(place, return_inverse=True, return_counts=True)
    return np.where(counts[inverse] > 1, inverse + 1, 0)
