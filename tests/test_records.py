"""Bytes of records and packs: literal, exact, and typed errors on any damage."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from orbax_delta import codecs, records, sparse
from orbax_delta.codecs import Form
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    UnsupportedVersionError,
)

# [1.0, 1.5, 2.0] as float32, in full.
GOLDEN_FULL = bytes.fromhex(
    "4f445230"  # magic ODR0
    "02 04 0000"  # form PLANES, 4-byte words, no flags
    "0c000000 1c000000"  # 12 bytes of content, 28 of payload
    "99ee3fb95b4c5fc8fba12d5d8f160e82"  # digest of the content
    "02 01000000 00"  # plane 0: filled with 00
    "02 01000000 00"  # plane 1: filled with 00
    "00 03000000 80c000"  # plane 2: raw
    "00 03000000 3f3f40"  # plane 3: raw
    "52044aa129e401cb"  # checksum
)
# The float32 below 1.5 in its place, as a sparse change.
GOLDEN_SPARSE = bytes.fromhex(
    "4f445230"
    "05 04 0000"  # form SPARSE
    "0c000000 23000000"
    "eef6be7d9b4abcd511b9b08e93a67c74"
    "01 01000000"  # gaps of 1 byte, one change
    "02 01000000 01"  # one element is skipped
    "02 01000000 01"  # the zigzag number of -1
    "02 01000000 00"
    "02 01000000 00"
    "02 01000000 00"
    "75f6fd88c8a201a3"
)
ATTEMPT = bytes(range(16))
GOLDEN_PACK = (
    bytes.fromhex(
        "4f445041434b0d0a"  # magic ODPACK
        "0100 0000 03000000"  # version 1, no flags, pack number 3
        "000102030405060708090a0b0c0d0e0f"  # attempt
    )
    + GOLDEN_FULL
    + GOLDEN_SPARSE
    + bytes.fromhex(
        "20000000 44000000"  # record 0: offset 32, 68 bytes
        "64000000 4b000000"  # record 1: offset 100, 75 bytes
        "02000000 10000000"  # two records, 16 bytes of index
        "6dadd6980b45aa78d86445481f88cf5b"  # digest of header and index
        "4f44504b454e440a"  # magic ODPKEND
    )
)
"""A pack of both, by hand from sections 5 and 6 of FORMAT.md."""

OLD = np.array([1.0, 1.5, 2.0], np.float32).view(np.uint8)
NEW = np.array([0x3F800000, 0x3FBFFFFF, 0x40000000], np.uint32).view(np.uint8)


def _record(content=OLD, **changes):
    fields = {
        "form": Form.PLANES,
        "word_bytes": 4,
        "content_bytes": content.size,
        "content_digest": records.digest(content),
        "payload": codecs.encode_full(content, 4),
    }
    return records.Record(**{**fields, **changes})


def _read_pack(data):
    """Every record of a pack, as a verifier reads it."""
    view = memoryview(data)
    index = records.parse_pack(view)
    return index, [
        records.parse_record(view[offset : offset + length])
        for offset, length in index.spans
    ]


def test_a_record_is_these_bytes():
    """A full record of three floats, byte by byte."""
    assert _record().encode() == GOLDEN_FULL


def test_a_sparse_record_is_these_bytes():
    """The same chunk with one float a step smaller."""
    (payload,) = sparse.encode(sparse.find([sparse.Pair(NEW, OLD, 4, most=3)]))
    assert _record(NEW, form=Form.SPARSE, payload=payload).encode() == GOLDEN_SPARSE


def test_these_bytes_are_those_floats():
    """Literal records decode to what they were written for."""
    full = records.parse_record(memoryview(GOLDEN_FULL))
    content = codecs.decode(full.form, full.payload, None, 12, full.word_bytes)
    assert content.tobytes() == OLD.tobytes()
    assert full.content_digest == records.digest(OLD)
    sparse = records.parse_record(memoryview(GOLDEN_SPARSE))
    content = codecs.decode(sparse.form, sparse.payload, content, 12, 4)
    assert content.tobytes() == NEW.tobytes()


def test_a_pack_is_these_bytes():
    """Header, two records, index and tail, byte by byte, and read back."""
    builder = records.PackBuilder(ATTEMPT, 3)
    assert builder.add((GOLDEN_FULL,)) == (32, 68)
    assert builder.add((GOLDEN_SPARSE,)) == (100, 75)
    assert (builder.record_count, builder.size_bytes) == (2, 175)
    assert b"".join(builder.finish()) == GOLDEN_PACK
    index, found = _read_pack(GOLDEN_PACK)
    assert (index.attempt, index.number) == (ATTEMPT, 3)
    assert index.spans == ((32, 68), (100, 75))
    assert [record.encode() for record in found] == [GOLDEN_FULL, GOLDEN_SPARSE]


def test_digests_are_xxh3_as_published():
    """XXH3 of nothing, seed 0, most significant byte first."""
    assert records.digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert records.checksum(b"") == 0x2D06800538D394C2


@hypothesis.given(
    st.sampled_from([form for form in Form if form is not Form.CONSTANT]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 1000),
    st.binary(min_size=16, max_size=16),
    st.binary(max_size=200),
)
def test_any_record_comes_back(form, word_bytes, words, content_digest, payload):
    """All fields survive, whatever the payload holds."""
    record = records.Record(
        form=form,
        word_bytes=word_bytes,
        content_bytes=words * word_bytes,
        content_digest=content_digest,
        payload=payload,
    )
    data = record.encode()
    assert len(data) == len(payload) + records.RECORD_OVERHEAD_BYTES
    back = records.parse_record(memoryview(data))
    assert back == record
    assert bytes(back.payload) == payload


@pytest.mark.parametrize("golden", [GOLDEN_FULL, GOLDEN_SPARSE], ids=("full", "sparse"))
def test_every_change_of_a_byte_of_a_record_is_noticed(golden):
    """All 255 other values at each of its bytes: 36,000 damaged records."""
    for position in range(len(golden)):
        damaged = bytearray(golden)
        for mask in range(1, 256):
            damaged[position] = golden[position] ^ mask
            with pytest.raises(DeltaError, match="record"):
                records.parse_record(memoryview(damaged))


@pytest.mark.parametrize("golden", [GOLDEN_FULL, GOLDEN_SPARSE], ids=("full", "sparse"))
def test_every_wrong_length_of_a_record_is_noticed(golden):
    """Cut off anywhere, or with bytes added."""
    for length in range(len(golden)):
        with pytest.raises(CorruptionError, match="record"):
            records.parse_record(memoryview(golden[:length]))
    with pytest.raises(CorruptionError, match=r"announces (28|35) payload"):
        records.parse_record(memoryview(golden + b"\0"))


def test_every_change_of_a_byte_of_a_pack_is_noticed():
    """Eight values at each byte: header, records, index and tail are all covered."""
    for position in range(len(GOLDEN_PACK)):
        damaged = bytearray(GOLDEN_PACK)
        for mask in (1, 2, 4, 8, 16, 32, 64, 255):
            damaged[position] = GOLDEN_PACK[position] ^ mask
            with pytest.raises(DeltaError, match=r"pack|record"):
                _read_pack(damaged)


def test_every_wrong_length_of_a_pack_is_noticed():
    """Cut off anywhere, or with bytes added at either end."""
    for length in range(len(GOLDEN_PACK)):
        with pytest.raises(CorruptionError, match="pack"):
            records.parse_pack(memoryview(GOLDEN_PACK[:length]))
    with pytest.raises(CorruptionError, match="damaged or cut off"):
        records.parse_pack(memoryview(GOLDEN_PACK + b"\0"))
    with pytest.raises(FormatError, match="a pack begins with"):
        records.parse_pack(memoryview(b"\0" + GOLDEN_PACK))


@hypothesis.given(st.binary(max_size=300))
def test_noise_is_no_record_and_no_pack(data):
    """Bytes that nobody wrote are refused in words."""
    with pytest.raises(DeltaError, match="record"):
        records.parse_record(memoryview(data))
    with pytest.raises(DeltaError, match="pack"):
        records.parse_pack(memoryview(data))


def _signed_record(data, position, value):
    """A record with one header byte set and a checksum that says it is right."""
    damaged = bytearray(data)
    damaged[position] = value
    body = bytes(damaged[:-8])
    return memoryview(body + records.checksum(body).to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (4, 0, "form 0"),
        (4, 99, "form 99"),
        (5, 3, "word size 3"),
        (5, 0, "word size 0"),
        (6, 1, "flags 1"),
        (7, 1, "flags 256"),
        (8, 13, "13 bytes is not made of whole words of 4"),
    ],
)
def test_a_record_that_no_writer_makes_is_refused(position, value, message):
    """Also where its checksum is right: what is not known is not guessed at."""
    with pytest.raises(CorruptionError, match=message):
        records.parse_record(_signed_record(GOLDEN_FULL, position, value))


def _signed_pack(head, spans, body):
    index = b"".join(records._INDEX_ENTRY.pack(*span) for span in spans)
    tail = records._PACK_TAIL.pack(
        len(spans), len(index), records.digest(head + index), records.PACK_END_MAGIC
    )
    return memoryview(head + body + index + tail)


def _head(**changes):
    fields = {"magic": records.PACK_MAGIC, "version": 1, "flags": 0, "number": 0}
    fields |= changes
    return records._PACK_HEAD.pack(*fields.values(), ATTEMPT)


@pytest.mark.parametrize(
    ("head", "spans", "error", "message"),
    [
        (_head(magic=b"ODPACK\n\n"), [(32, 68)], FormatError, "begins with"),
        (_head(version=2), [(32, 68)], UnsupportedVersionError, "format version 2"),
        (_head(flags=1), [(32, 68)], CorruptionError, "has flags 1"),
        (_head(), [(33, 67)], CorruptionError, "leave a hole"),
        (_head(), [(32, 60)], CorruptionError, "do not reach its index"),
        (_head(), [(32, 68), (32, 68)], CorruptionError, "leave a hole"),
        (_head(), [(32, 68), (100, 8)], CorruptionError, "do not reach its index"),
        (_head(), [], CorruptionError, "no pack is empty"),
    ],
)
def test_a_pack_that_no_writer_makes_is_refused(head, spans, error, message):
    """Holes, overlaps and unknown versions, under an index digest that is right."""
    with pytest.raises(error, match=message):
        records.parse_pack(_signed_pack(head, spans, GOLDEN_FULL))


def test_an_index_larger_than_its_pack_is_refused():
    """Counts are compared with the file's size before the index is read."""
    tail = records._PACK_TAIL.pack(1000, 8000, bytes(16), records.PACK_END_MAGIC)
    with pytest.raises(CorruptionError, match="larger than the pack"):
        records.parse_pack(memoryview(_head() + tail))


def test_a_pack_is_not_finished_with_a_record_that_does_not_read():
    """What is about to be stored is parsed once before it is."""
    builder = records.PackBuilder(ATTEMPT, 0)
    builder.add((GOLDEN_FULL[:-1] + b"\0",))
    with pytest.raises(CorruptionError, match="checksum"):
        builder.finish()


@hypothesis.given(st.lists(st.binary(max_size=50), min_size=1, max_size=20))
def test_any_records_fill_a_pack_without_holes(payloads):
    """Spans found in the index are those that `add` returned, in order."""
    builder = records.PackBuilder(ATTEMPT, 9)
    encoded = [_record(payload=payload).encode() for payload in payloads]
    spans = [builder.add((record,)) for record in encoded]
    index, found = _read_pack(b"".join(builder.finish()))
    assert list(index.spans) == spans
    assert [record.encode() for record in found] == encoded


def test_a_constant_has_no_record():
    """Its word stands in the row; a record of it is refused."""
    constant = records.Record(
        form=Form.CONSTANT,
        word_bytes=1,
        content_bytes=8,
        content_digest=records.digest(bytes(8)),
        payload=b"\0",
    )
    with pytest.raises(CorruptionError, match="form 1"):
        records.parse_record(memoryview(constant.encode()))
