"""Rows and the part file that holds them (FORMAT.md section 7).

A row says of one chunk which content it has and which records make it, full record
first. Columns instead of row structs, so that zstd finds the regularities. Pure bytes.
"""

import dataclasses
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from orbax_delta.chunks import MAX_DIMENSIONS, Box
from orbax_delta.codecs import FORM_NUMBERS, Form
from orbax_delta.dtypes import CAST_WORD_BYTES, RULE_NUMBERS, Rule, source_bytes
from orbax_delta.errors import CorruptionError, FormatError
from orbax_delta.frames import compress_text, decompress_text
from orbax_delta.options import MAX_CHAIN_LIMIT
from orbax_delta.records import DIGEST_BYTES, FORMAT_VERSION, check_magic

PART_MAGIC = b"ODPART\r\n"
_HEAD = struct.Struct("<8sHHIIIQ16s")
_INLINE = 0xFFFFFFFF
_MAX_ROWS = 1 << 26
_ZSTD_LEVEL = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """Where one record of a chunk lies, or the word of a constant one.

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


def encode_part(attempt: bytes, rows: Sequence[Row], packs: Sequence[str]) -> bytes:
    """The bytes of a part; `packs` is the MANIFEST's list that refs index into."""
    pack_index = {name: index for index, name in enumerate(packs)}
    refs = [ref for row in rows for ref in row.refs]
    bounds = [edge for row in rows for pair in row.box for edge in pair]
    inline = [_inline_word(ref) for ref in refs]
    columns = (
        np.array([row.leaf for row in rows], "<u4"),
        np.array([len(row.box) for row in rows], "u1"),
        np.array([row.rule for row in rows], "u1"),
        np.array([row.since for row in rows], "<i2"),
        np.array([row.age for row in rows], "<i2"),
        np.array([len(row.refs) for row in rows], "u1"),
        np.frombuffer(b"".join(row.digest for row in rows), "u1"),
        np.array(bounds, "<u8"),
        np.array([ref.form for ref in refs], "u1"),
        np.array(
            [pack_index[ref.pack] if ref.pack else _INLINE for ref in refs], "<u4"
        ),
        np.array([ref.offset or low for ref, (low, _) in zip(refs, inline)], "<u4"),
        np.array([ref.length or high for ref, (_, high) in zip(refs, inline)], "<u4"),
    )
    body = b"".join(column.tobytes() for column in columns)
    head = _HEAD.pack(
        PART_MAGIC,
        FORMAT_VERSION,
        0,
        len(rows),
        len(refs),
        len(bounds),
        len(body),
        attempt,
    )
    return head + compress_text(body, _ZSTD_LEVEL)


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
) -> Iterator[Row]:
    """Rows of a part whose digest the caller has checked.

    Args:
        data: The whole part.
        attempt: The attempt that the MANIFEST names for it.
        rows: Number of rows that the MANIFEST gives.
        packs: The MANIFEST's pack names.
        words: Word size of each leaf of the MANIFEST, in bytes; 0 for no array.

    Raises:
        UnsupportedVersionError: A newer format wrote it.
        FormatError: It is not a part of this attempt.
        CorruptionError: A count, index or value is out of range.
    """
    check_magic(data, PART_MAGIC, "part")
    if len(data) < _HEAD.size:
        raise CorruptionError(f"a part of {len(data)} bytes has no header")
    _, _, flags, row_count, ref_count, bound_count, body_bytes, owner = (
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
    if flags or not fits:
        raise CorruptionError(
            f"a part has flags {flags}, {bound_count} bounds and {ref_count} records "
            f"for {row_count} rows; no such part in this format version"
        )
    expected = row_count * (11 + DIGEST_BYTES) + bound_count * 8 + ref_count * 13
    if body_bytes != expected or max(row_count, ref_count) > _MAX_ROWS:
        raise CorruptionError(
            f"a part announces {body_bytes} bytes for {row_count} rows and "
            f"{ref_count} records; expected {expected}"
        )
    body = memoryview(decompress_text(memoryview(data)[_HEAD.size :], body_bytes))
    columns = _Columns.split(body, row_count, ref_count, bound_count)
    return columns.rows(packs, words)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    leaf: list[int]
    ndim: list[int]
    rule: list[int]
    since: list[int]
    age: list[int]
    ref_counts: list[int]
    digests: bytes
    bounds: list[int]
    form: list[int]
    pack: list[int]
    offset: list[int]
    length: list[int]

    @classmethod
    def split(
        cls, body: memoryview, row_count: int, ref_count: int, bound_count: int
    ) -> "_Columns":
        position = 0

        def take(dtype: str, count: int) -> np.ndarray:
            nonlocal position
            column = np.frombuffer(body, dtype, count, position)
            position += column.nbytes
            return column

        columns = cls(
            leaf=take("<u4", row_count).tolist(),
            ndim=take("u1", row_count).tolist(),
            rule=take("u1", row_count).tolist(),
            since=take("<i2", row_count).tolist(),
            age=take("<i2", row_count).tolist(),
            ref_counts=take("u1", row_count).tolist(),
            digests=take("u1", row_count * DIGEST_BYTES).tobytes(),
            bounds=take("<u8", bound_count).tolist(),
            form=take("u1", ref_count).tolist(),
            pack=take("<u4", ref_count).tolist(),
            offset=take("<u4", ref_count).tolist(),
            length=take("<u4", ref_count).tolist(),
        )
        if sum(columns.ref_counts) != ref_count or 2 * sum(columns.ndim) != bound_count:
            raise CorruptionError("a part's counts of records or bounds do not add up")
        return columns

    def rows(self, packs: Sequence[str], words: Sequence[int]) -> Iterator[Row]:
        ref = bound = 0
        for index, leaf in enumerate(self.leaf):
            known = leaf < len(words) and words[leaf] > 0
            if not known or self.rule[index] not in RULE_NUMBERS:
                raise CorruptionError(
                    f"row {index} of a part names leaf {leaf} and rule "
                    f"{self.rule[index]}; there is no such leaf or rule"
                )
            rule = Rule(self.rule[index])
            if rule is not Rule.NONE and words[leaf] != CAST_WORD_BYTES:
                raise CorruptionError(
                    f"row {index} of a part follows by rule {rule.name}, but leaf "
                    f"{leaf} has {words[leaf]}-byte words, not {CAST_WORD_BYTES}"
                )
            width = source_bytes(rule, words[leaf])
            ref_stop = ref + self.ref_counts[index]
            refs = tuple(self._ref(i, packs, width) for i in range(ref, ref_stop))
            ref = ref_stop
            _check_list(index, refs)
            edges = self.bounds[bound : bound + 2 * self.ndim[index]]
            bound += len(edges)
            yield Row(
                leaf=leaf,
                box=tuple(zip(edges[::2], edges[1::2], strict=True)),
                digest=self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES],
                rule=rule,
                refs=refs,
                since=self.since[index],
                age=self.age[index],
            )

    def _ref(self, index: int, packs: Sequence[str], width: int) -> Ref:
        form, pack = self.form[index], self.pack[index]
        offset, length = self.offset[index], self.length[index]
        if form not in FORM_NUMBERS or (pack == _INLINE) != (form == Form.CONSTANT):
            raise CorruptionError(f"record {index} of a part has form {form}")
        if pack == _INLINE:
            word = struct.pack("<II", offset, length)
            if any(word[width:]):
                raise CorruptionError(
                    f"record {index} of a part repeats the word {word.hex()}, which is "
                    f"longer than {width} bytes"
                )
            return Ref(form=Form(form), word=word[:width])
        if pack >= len(packs):
            raise CorruptionError(
                f"record {index} of a part names pack {pack} of {len(packs)}"
            )
        return Ref(form=Form(form), pack=packs[pack], offset=offset, length=length)


def _check_list(index: int, refs: tuple[Ref, ...]) -> None:
    if not 1 <= len(refs) <= MAX_CHAIN_LIMIT:
        raise CorruptionError(f"row {index} of a part lists {len(refs)} records")
    if not refs[0].form.is_full or any(ref.form.is_full for ref in refs[1:]):
        raise CorruptionError(
            f"row {index} of a part must list one full record and then deltas; it "
            "lists " + ", ".join(ref.form.name for ref in refs)
        )
