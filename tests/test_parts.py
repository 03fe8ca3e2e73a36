"""Rows and part files: literal bytes, exact, and typed errors on any damage."""

import dataclasses
import gc
import struct
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import pytest
import zstandard

from orbax_delta import frames, parts, records, steps
from orbax_delta.codecs import Form
from orbax_delta.dtypes import Rule
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    UnsupportedVersionError,
)
from orbax_delta.manifests import LeafEntry, Manifest, PartEntry
from orbax_delta.options import MAX_CHAIN_LIMIT
from orbax_delta.parts import Ref, Row

ATTEMPT = bytes(range(16))
PACKS = ("00" * 16 + "-p0-0", "11" * 16 + "-p0-2")
WORDS = (4, 8, 2)
_CHAIN = (
    Ref(form=Form.PLANES, pack=PACKS[0], offset=32, length=68),
    Ref(form=Form.SPARSE, pack=PACKS[1], offset=100, length=75),
)
ROWS = (
    Row(
        leaf=0,
        box=((0, 2), (0, 3)),
        digest=b"\xaa" * 16,
        rule=Rule.NONE,
        refs=_CHAIN,
        since=7,
        age=-2,
    ),
    Row(
        leaf=1,
        box=(),
        digest=b"\xbb" * 16,
        rule=Rule.NONE,
        refs=(Ref(form=Form.CONSTANT, word=b"\1\2\3\4\5\6\7\x08"),),
        since=0,
        age=0,
    ),
    Row(
        leaf=2,
        box=((0, 2), (0, 3)),
        digest=b"\xcc" * 16,
        rule=Rule.F32_TO_BF16,
        refs=_CHAIN,
        since=1,
        age=5,
    ),
)
"""A float32 leaf in two records, a constant float64 scalar, and a bf16 copy."""

GOLDEN_HEAD = bytes.fromhex(
    "4f44504152540d0a"  # magic ODPART
    "0100 0000"  # version 1, no flags
    "03000000 05000000 08000000"  # 3 rows, 5 records, 8 bounds
    "d200000000000000"  # 210 bytes of columns
    "000102030405060708090a0b0c0d0e0f"  # attempt
)
GOLDEN_COLUMNS = bytes.fromhex(
    "00000000 01000000 02000000"  # leaf
    "02 00 02"  # dimensions
    "00 00 01"  # rule
    "0700 0000 0100"  # since
    "feff 0000 0500"  # age
    "02 01 02"  # records
    + "aa" * 16  # digests
    + "bb" * 16
    + "cc" * 16
    + ("0000000000000000 0200000000000000" + "0000000000000000 0300000000000000") * 2
    + "02 05 01 02 05"  # form of each record
    "00000000 01000000 ffffffff 00000000 01000000"  # pack, or none
    "20000000 64000000 01020304 20000000 64000000"  # offset, or word
    "44000000 4b000000 05060708 44000000 4b000000"  # length, or word
)
GOLDEN_PART = GOLDEN_HEAD + bytes.fromhex(
    "28b52ffd20d20d0300b4030000000001000000020200000107feff0000050002"
    "0102aabbcc000203000205010205ffffffff2000000064020304440000004b00"
    "00000506070810008024400304fd22ca98003e031d0a0c402270c1f20eb80c74"
    "02ba8b6b54b3e9057704"
)
"""The columns as one zstd frame; other releases may pack them into other frames."""


def _parse(data, *, attempt=ATTEMPT, packs=PACKS, words=WORDS, rows=None):
    if rows is None:  # as many as it says itself
        rows = struct.unpack_from("<I", data.ljust(16, b"\0"), 12)[0]
    return list(
        parts.parse_part(data, attempt=attempt, rows=rows, packs=packs, words=words)
    )


def _part(columns, *, counts=(3, 5, 8), size=None, **changes):
    """A part of given columns, its header as asked for."""
    fields = {"magic": parts.PART_MAGIC, "version": 1, "flags": 0} | changes
    size = len(columns) if size is None else size
    head = parts._HEAD.pack(*fields.values(), *counts, size, ATTEMPT)
    return head + zstandard.compress(columns)


def test_a_part_is_these_bytes():
    """Header and columns byte by byte; the frame around the columns may vary."""
    data = parts.encode_part(ATTEMPT, ROWS, PACKS)
    assert data[:48] == GOLDEN_HEAD
    assert zstandard.decompress(data[48:]) == GOLDEN_COLUMNS


def test_these_bytes_are_those_rows():
    """The literal part reads as what it was written for."""
    assert zstandard.decompress(GOLDEN_PART[48:]) == GOLDEN_COLUMNS
    assert _parse(GOLDEN_PART) == list(ROWS)


@st.composite
def _rows(draw):
    """Any rows that a save may write."""
    count = draw(st.integers(0, 6))
    return [draw(_row()) for _ in range(count)]


@st.composite
def _row(draw):
    leaf = draw(st.integers(0, len(WORDS) - 1))
    word_bytes = WORDS[leaf]
    cast = draw(st.booleans()) and word_bytes == 2
    width = word_bytes * (2 if cast else 1)
    constant = st.binary(min_size=width, max_size=width).map(
        lambda word: Ref(form=Form.CONSTANT, word=word)
    )
    first = draw(st.one_of(constant, _refs(st.just(Form.PLANES))))
    deltas = st.sampled_from([Form.DIFFERENCE, Form.BLOCKS, Form.SPARSE])
    bounds = st.tuples(st.integers(0, 1 << 40), st.integers(0, (1 << 64) - 1))
    return Row(
        leaf=leaf,
        box=tuple(draw(st.lists(bounds, max_size=4))),
        digest=draw(st.binary(min_size=16, max_size=16)),
        rule=draw(st.sampled_from(list(Rule)[1:])) if cast else Rule.NONE,
        refs=(first, *draw(st.lists(_refs(deltas), max_size=5))),
        since=draw(st.integers(-(1 << 15), (1 << 15) - 1)),
        age=draw(st.integers(-(1 << 15), (1 << 15) - 1)),
    )


def _refs(forms):
    return st.builds(
        Ref,
        form=forms,
        pack=st.sampled_from(PACKS),
        offset=st.integers(32, (1 << 32) - 1),
        length=st.integers(40, (1 << 32) - 1),
        word=st.just(b""),
    )


@pytest.fixture
def _little_blocks(monkeypatch):
    """Rows are made two at a time, and few boxes are remembered."""
    monkeypatch.setattr(parts, "_BLOCK_ROWS", 2)
    monkeypatch.setattr(parts, "_MOST_BOXES", 1)


_one_fixture_for_all = hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


@pytest.mark.usefixtures("_little_blocks")
@_one_fixture_for_all
@hypothesis.given(_rows())
def test_any_rows_come_back(rows):
    """Rows read back are equal to those written, words of constants included."""
    assert _parse(parts.encode_part(ATTEMPT, rows, PACKS)) == rows


def test_equal_boxes_and_lists_are_made_once():
    """However many rows have them: a host may have millions of rows."""
    rows = [dataclasses.replace(row, since=n) for n in range(50) for row in ROWS]
    read = _parse(parts.encode_part(ATTEMPT, rows, PACKS))
    assert read == rows
    assert len({id(row.box) for row in read}) == 2
    assert len({id(row.refs) for row in read}) == 2


def _read_one_by_one(columns, counts, packs, words):
    """The rows of columns, read as FORMAT.md says and no faster; None: there are none.

    Columns are read at once by the package, and here row after row.
    """
    row_count, ref_count, bound_count = counts
    column, start = {}, 0
    for name, kind, count in (
        *(("leaf", "<I", row_count), ("ndim", "<B", row_count)),
        *(("rule", "<B", row_count), ("since", "<h", row_count)),
        *(("age", "<h", row_count), ("refs", "<B", row_count)),
        *(("digest", "<16s", row_count), ("bound", "<Q", bound_count)),
        *(("form", "<B", ref_count), ("pack", "<I", ref_count)),
        *(("offset", "<I", ref_count), ("length", "<I", ref_count)),
    ):
        size = struct.calcsize(kind) * count
        found = struct.iter_unpack(kind, columns[start : start + size])
        column[name] = [value for (value,) in found]
        start += size
    if sum(column["refs"]) != ref_count or 2 * sum(column["ndim"]) != bound_count:
        return None
    rows, ref, bound = [], 0, 0
    for n in range(row_count):
        leaf, rule, listed = column["leaf"][n], column["rule"][n], column["refs"][n]
        if leaf >= len(words) or not words[leaf] or rule > 2 or not 1 <= listed <= 200:
            return None
        if rule and words[leaf] != 2:
            return None
        refs = []
        for i in range(ref, ref + listed):
            form, pack = column["form"][i], column["pack"][i]
            offset, length = column["offset"][i], column["length"][i]
            width = 4 if rule else words[leaf]
            word = struct.pack("<II", offset, length)
            if not 1 <= form <= 8 or (form in (1, 2, 6)) != (i == ref):
                return None
            if form == 1 and (pack != 0xFFFFFFFF or any(word[width:])):
                return None
            if form != 1 and pack >= len(packs):
                return None
            if form == 1:
                refs.append(Ref(form=Form.CONSTANT, word=word[:width]))
            else:
                record = {"pack": packs[pack], "offset": offset, "length": length}
                refs.append(Ref(form=Form(form), **record))
        edges = column["bound"][bound : bound + 2 * column["ndim"][n]]
        ref, bound = ref + listed, bound + len(edges)
        rows.append(
            Row(
                leaf=leaf,
                box=tuple(zip(edges[::2], edges[1::2])),
                digest=column["digest"][n],
                rule=Rule(rule),
                refs=tuple(refs),
                since=column["since"][n],
                age=column["age"][n],
            )
        )
    return rows


def _assert_read_alike(columns, counts, words=WORDS):
    """Both readers give the same rows, or neither gives any."""
    wanted = _read_one_by_one(columns, counts, PACKS, words)
    data = _part(columns, counts=counts)
    if wanted is not None and counts[0] <= counts[1]:
        assert _parse(data, words=words) == wanted
        return
    with pytest.raises(CorruptionError, match="part"):
        _parse(data, words=words)


@pytest.mark.usefixtures("_little_blocks")
@_one_fixture_for_all
@hypothesis.given(
    _rows(), st.integers(0), st.binary(min_size=1, max_size=5), st.sampled_from([0, 3])
)
def test_changed_columns_are_read_alike_one_by_one(rows, at, new, end):
    """What is read at once, and what refused, is what reading row by row would."""
    data = parts.encode_part(ATTEMPT, rows, PACKS)
    head = parts._HEAD.unpack_from(data)
    columns = bytearray(frames.decompress(data[parts._HEAD.size :], head[6]))
    if columns:
        at %= len(columns)
        columns[at : at + len(new)] = new[: len(columns) - at]
    _assert_read_alike(bytes(columns), head[3:6], WORDS[: len(WORDS) - end])


def test_every_changed_byte_of_columns_is_read_alike_one_by_one():
    """The same for each byte of the literal part."""
    for position in range(len(GOLDEN_COLUMNS)):
        damaged = bytearray(GOLDEN_COLUMNS)
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged[position] = GOLDEN_COLUMNS[position] ^ mask
            _assert_read_alike(bytes(damaged), (3, 5, 8))


def test_a_list_may_be_as_long_as_the_limit():
    """The longest list that options allow is written and read; one more is not."""
    delta = Ref(form=Form.SPARSE, pack=PACKS[1], offset=100, length=75)
    longest = (_CHAIN[0], *[delta] * (MAX_CHAIN_LIMIT - 1))
    row = dataclasses.replace(ROWS[0], refs=longest)
    assert _parse(parts.encode_part(ATTEMPT, [row], PACKS)) == [row]
    row = dataclasses.replace(ROWS[0], refs=(*longest, delta))
    with pytest.raises(CorruptionError, match=f"lists {MAX_CHAIN_LIMIT + 1} records"):
        _parse(parts.encode_part(ATTEMPT, [row, *ROWS], PACKS))


class _OneFile:
    """A folder that holds one file's bytes."""

    url = "folder/"

    def __init__(self, data):
        self._data = data

    def read(self, name):
        return self._data


def _read_as_a_step_does(data):
    entry = PartEntry(
        name="part",
        length=len(GOLDEN_PART),
        digest=records.digest(GOLDEN_PART).hex(),
        rows=3,
        packs=(0, 1),
    )
    return _parse(steps._read_part(_OneFile(data), entry))


def test_every_change_of_a_byte_of_a_part_is_noticed():
    """All 255 other values at each of its bytes; the MANIFEST's digest sees them."""
    assert _read_as_a_step_does(GOLDEN_PART) == list(ROWS)
    for position in range(len(GOLDEN_PART)):
        damaged = bytearray(GOLDEN_PART)
        for mask in range(1, 256):
            damaged[position] = GOLDEN_PART[position] ^ mask
            with pytest.raises(CorruptionError, match="with digest"):
                _read_as_a_step_does(bytes(damaged))


def test_every_wrong_length_of_a_part_is_noticed():
    """Cut off anywhere, or with a byte added, or gone."""
    for data in (
        *(GOLDEN_PART[:n] for n in range(len(GOLDEN_PART))),
        GOLDEN_PART + b"\0",
    ):
        with pytest.raises(CorruptionError, match=f"holds {len(data)} bytes"):
            _read_as_a_step_does(data)
        # Without the digest a shorter part is an error of its own, in words.
        with pytest.raises(CorruptionError, match=r"part|zstd"):
            _parse(data)
    with pytest.raises(CorruptionError, match="is missing"):
        _read_as_a_step_does(None)


def _rows_or_typed_error(data, **expected):
    try:
        rows = _parse(data, **expected)
    except DeltaError:
        return
    assert all(isinstance(row, Row) for row in rows)


def test_a_changed_byte_that_nothing_checks_is_rows_or_a_typed_error():
    """The parser alone, without the digest, on every byte of header and frame."""
    for position in range(len(GOLDEN_PART)):
        damaged = bytearray(GOLDEN_PART)
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged[position] = GOLDEN_PART[position] ^ mask
            _rows_or_typed_error(bytes(damaged))


@hypothesis.given(
    st.binary(max_size=400),
    st.tuples(*[st.integers(0, 12)] * 3),
    st.lists(st.sampled_from([0, 1, 2, 4, 8]), max_size=3),
)
def test_columns_of_noise_are_rows_or_a_typed_error(columns, counts, words):
    """Counts and columns that nobody wrote."""
    row_count, ref_count, bound_count = counts
    size = row_count * 27 + bound_count * 8 + ref_count * 13
    columns = columns.ljust(size, b"\0")[:size]
    data = _part(columns, counts=counts)
    _rows_or_typed_error(data, words=words)


def _changed(start, values):
    """The golden columns with some bytes set."""
    changed = bytearray(GOLDEN_COLUMNS)
    changed[start : start + len(values)] = values
    return bytes(changed)


_RULE, _REFS, _FORM, _PACK, _OFFSET, _LENGTH = 15, 30, 145, 150, 170, 190


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", CorruptionError, "is cut off"),
        (_part(GOLDEN_COLUMNS)[:47], CorruptionError, "has no header"),
        (_part(GOLDEN_COLUMNS, version=2)[:10], UnsupportedVersionError, "version 2"),
        (_part(GOLDEN_COLUMNS, counts=(3, 2, 8)), CorruptionError, "and 2 records"),
        (_part(GOLDEN_COLUMNS, counts=(3, 601, 8)), CorruptionError, "and 601 records"),
        (_part(GOLDEN_COLUMNS, magic=b"ODPART\n\n"), FormatError, "begins with"),
        (_part(GOLDEN_COLUMNS, version=2), UnsupportedVersionError, "version 2"),
        (_part(GOLDEN_COLUMNS, flags=1), CorruptionError, "sealed, and its MANIFEST"),
        (_part(GOLDEN_COLUMNS, flags=2), CorruptionError, "flags 2"),
        (_part(GOLDEN_COLUMNS, size=209), CorruptionError, "expected 210"),
        (_part(GOLDEN_COLUMNS, counts=(3, 5, 9)), CorruptionError, "expected 218"),
        (_part(GOLDEN_COLUMNS + b"\0", size=210), CorruptionError, "announces 211"),
        (_part(_changed(0, b"\3")), CorruptionError, "names leaf 3"),
        (_part(_changed(_RULE, b"\3")), CorruptionError, "rule 3"),
        (_part(_changed(_RULE, b"\1")), CorruptionError, "leaf 0 has 4-byte words"),
        (_part(_changed(_REFS, b"\1")), CorruptionError, "do not add up"),
        (_part(_changed(12, b"\1")), CorruptionError, "do not add up"),
        (_part(_changed(_REFS, b"\0\3")), CorruptionError, "lists 0 records"),
        (_part(_changed(_REFS, b"\1\2")), CorruptionError, "it lists SPARSE, CONSTANT"),
        (_part(_changed(_FORM, b"\3")), CorruptionError, "it lists DIFFERENCE, SPARSE"),
        (_part(_changed(_FORM, b"\2\2")), CorruptionError, "it lists PLANES, PLANES"),
        (_part(_changed(_FORM, b"\x09")), CorruptionError, "has form 9"),
        (_part(_changed(_FORM, b"\1")), CorruptionError, "has form 1"),
        (_part(_changed(_PACK + 8, b"\0\0\0\0")), CorruptionError, "has form 1"),
        (_part(_changed(_PACK, b"\2")), CorruptionError, "names pack 2 of 2"),
    ],
)
def test_a_part_that_no_writer_makes_is_refused(data, error, message):
    """Each count, index and number outside its range, in a frame that is right."""
    with pytest.raises(error, match=message):
        _parse(data)


def test_a_word_longer_than_its_leafs_elements_is_refused():
    """What pads the word of a constant is zero: there is one way to write it."""
    with pytest.raises(CorruptionError, match="longer than 4 bytes"):
        _parse(GOLDEN_PART, words=(4, 4, 2))


def test_a_part_of_another_attempt_is_refused():
    """A straggler's part never becomes part of the next attempt."""
    with pytest.raises(FormatError, match=f"by attempt {ATTEMPT.hex()}"):
        _parse(GOLDEN_PART, attempt=bytes(16))


@pytest.mark.parametrize(
    "counts",
    [
        ((1 << 26) + 1, 0, 0),
        (1, (1 << 26) + 1, 0),
        (1, 1, 129),
        (0, 0, 1),
        (1, 1, (1 << 32) - 1),
        (1 << 26, 1 << 26, 1 << 31),
    ],
)
def test_counts_out_of_range_are_refused_before_memory_is_taken(counts):
    """A header of 48 bytes cannot ask for gigabytes: the peak stays below 100 kB."""
    size = counts[0] * 27 + counts[1] * 13 + counts[2] * 8
    # Of the content that is announced nothing is there but one empty block.
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + b"\x01\0\0"
    head = parts._HEAD.pack(parts.PART_MAGIC, 1, 0, *counts, size, ATTEMPT)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match=r"no such part|expected"):
            _parse(head + frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


_LEAVES = (
    LeafEntry(path=("master",), kind="jax", dtype="float32", shape=(2, 3)),
    LeafEntry(path=("scale",), kind="numpy_scalar", dtype="float64"),
    LeafEntry(path=("compute",), kind="jax", dtype="bfloat16", shape=(2, 3)),
)


def _step(data, *, rows=3, leaves=_LEAVES):
    """The rows of a step of one part, as opening the step reads and checks them."""
    name = f"part-{ATTEMPT.hex()}-p0"
    entry = PartEntry(
        name=name,
        length=len(data),
        digest=records.digest(data).hex(),
        rows=rows,
        packs=range(len(PACKS)),
    )
    manifest = Manifest(
        attempt=ATTEMPT.hex(),
        step=0,
        item="default",
        wall_time=0.0,
        save_index=0,
        predecessor=None,
        store_uuid="",
        store_url="",
        options={},
        versions={},
        tree={},
        leaves=leaves,
        packs=PACKS,
        parts=(entry,),
        report={},
    )
    return steps.read_rows(_OneFile(data), manifest)


def test_a_step_reads_the_rows_of_its_parts():
    """The literal part, under a MANIFEST that names it."""
    assert _step(GOLDEN_PART) == list(ROWS)


@pytest.mark.parametrize("enabled", [True, False])
def test_reading_leaves_the_garbage_collector_as_it_was(enabled):
    """It rests while rows are made, and afterwards does as the program wants."""
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        _step(GOLDEN_PART)
        assert gc.isenabled() == enabled
        with pytest.raises(CorruptionError, match="3 rows, not 4"):
            _step(GOLDEN_PART, rows=4)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_part_with_other_rows_than_its_manifest_says_is_refused():
    """The number of rows stands in both."""
    with pytest.raises(CorruptionError, match=r"-p0: a part holds 3 rows, not 4"):
        _step(GOLDEN_PART, rows=4)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 1), (0, 3))], "cover 3 of 6 elements"),
        ([((0, 2), (0, 3)), ((0, 1), (0, 3))], "cover 9 of 6 elements"),
        ([((0, 1), (0, 3))] * 2, "cover 6 of 6 elements, or some of them twice"),
        ([((0, 1), (0, 3)), ((0, 2), (0, 1)), ((1, 2), (2, 3))], "some of them twice"),
        ([((0, 2), (0, 4))], "places a chunk at"),
        ([((1, 1), (0, 3)), ((0, 2), (0, 3))], "places a chunk at"),
        ([((0, 6),)], "places a chunk at"),
    ],
)
def test_rows_that_do_not_cover_their_leaf_once_are_refused(boxes, message):
    """Also where holes and overlaps add up to the right number of elements."""
    rows = [dataclasses.replace(ROWS[0], box=box) for box in boxes]
    data = parts.encode_part(ATTEMPT, [*rows, *ROWS[1:]], PACKS)
    with pytest.raises(CorruptionError, match=message):
        _step(data, rows=len(rows) + 2)


def _twin(row, **changes):
    return dataclasses.replace(row, leaf=3, **changes)


_HALVES = (((0, 1), (0, 3)), ((1, 2), (0, 3)))


@pytest.mark.parametrize(
    ("twins", "message"),
    [
        ([ROWS[0].box], None),
        (_HALVES, None),
        (_HALVES[:1], "leaf twin cover 3 of 6 elements"),
        ([ROWS[0].box] * 2, "leaf twin cover 12 of 6 elements"),
        ([], "leaf twin cover 0 of 6 elements"),
        ([((0, 3), (0, 2))], r"places a chunk at .* of leaf twin"),
    ],
)
def test_a_leaf_like_another_is_checked_for_itself(twins, message):
    """Leaves of one shape and type: boxes of the first say nothing of the second."""
    leaves = (*_LEAVES, dataclasses.replace(_LEAVES[0], path=("twin",)))
    rows = [*ROWS, *(_twin(ROWS[0], box=box) for box in twins)]
    data = parts.encode_part(ATTEMPT, rows, PACKS)
    if message is None:
        assert _step(data, rows=len(rows), leaves=leaves) == rows
        return
    with pytest.raises(CorruptionError, match=message):
        _step(data, rows=len(rows), leaves=leaves)
