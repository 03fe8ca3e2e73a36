"""Forms of a chunk: exact for every word size, smallest first, typed on damage."""

import struct

import hypothesis
import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import numpy as np
import pytest

from orbax_delta import codecs, differences, planes, sparse
from orbax_delta.codecs import BLOCK_BYTES, Form
from orbax_delta.errors import CorruptionError, DeltaError

WORDS = (1, 2, 4, 8)
FORMS = tuple(form for form in Form if form not in codecs.GRID_FORMS)
"""Those of any content; the others are in `test_grids`."""
ODD_COUNTS = (1, 2, 3, 7, 255, 1023, 1024, 1025, 4095, 4096, 4097, 20_001)
# Signalling and quiet NaNs with payloads, -0.0, subnormals, infinities.
AWKWARD_FLOATS = np.array(
    [0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x80000000, 0x00000001, 0xFF800000, 0],
    np.uint32,
)


def _as_bytes(words):
    return np.ascontiguousarray(words).view(np.uint8)


def _noise(count, word_bytes, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, count * word_bytes, dtype=np.uint8)


def _edited(base, word_bytes, positions, seed=1):
    """A copy of `base` with other bits at `positions` (words)."""
    content = base.copy()
    words = content.view(f"<u{word_bytes}")
    rng = np.random.default_rng(seed)
    top = (1 << (8 * word_bytes)) - 1
    words[positions] ^= rng.integers(1, top, len(positions), np.uint64, True).astype(
        words.dtype
    )
    return content


def _difference(content, base, word_bytes):
    out = np.empty(content.size, np.uint8)
    differences.subtract(content, base, word_bytes, out)
    return out


def _payload(form, content, base, word_bytes):
    """`content` coded in one given form, whatever an encoder would prefer."""
    if form is Form.CONSTANT:
        return content[:word_bytes].tobytes()
    if form is Form.PLANES:
        return codecs.encode_full(content, word_bytes)
    difference = _difference(content, base, word_bytes)
    if form is Form.DIFFERENCE:
        return planes.encode(difference, word_bytes)
    if form is Form.BLOCKS:
        changed = difference.view(f"<u{word_bytes}") != 0
        blocks = differences.changed_blocks(changed, word_bytes)
        picked = codecs._marked_blocks(difference, blocks)
        return codecs._encode_blocks(blocks, picked, word_bytes)
    pair = sparse.Pair(content, base, word_bytes, most=content.size)
    return sparse.encode(sparse.find([pair]))[0]


@st.composite
def _pairs(draw):
    """Word size, a base and a content that differs in few, some or all words."""
    word_bytes = draw(st.sampled_from(WORDS))
    count = draw(st.one_of(st.integers(1, 70), st.sampled_from(ODD_COUNTS)))
    base = _noise(count, word_bytes, draw(st.integers(0, 99)))
    if draw(st.booleans()):
        base = codecs.fill(base[:word_bytes].tobytes(), base.size)
    share = draw(st.sampled_from([0.0, 0.01, 0.1, 0.2, 0.6, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    first = draw(st.integers(0, count - 1))
    picked = np.arange(first, count)[rng.random(count - first) < share]
    return word_bytes, base, _edited(base, word_bytes, picked)


@pytest.mark.parametrize("count", ODD_COUNTS)
@pytest.mark.parametrize("word_bytes", WORDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_exact_at_every_word_size_and_odd_length(form, word_bytes, count):
    """What is coded comes back bit for bit, into a buffer of its own."""
    base = _noise(count, word_bytes)
    content = _edited(base, word_bytes, np.arange(0, count, 3))
    if form is Form.CONSTANT:
        content = codecs.fill(
            b"\x07\x00\xff\x80\x01\x02\x03\x04"[:word_bytes], base.size
        )
    payload = _payload(form, content, base, word_bytes)
    before = base.tobytes()
    decoded = codecs.decode(form, payload, base, content.size, word_bytes)
    assert decoded.tobytes() == content.tobytes()
    assert base.tobytes() == before
    assert decoded.flags.writeable
    assert not np.shares_memory(decoded, base)


@hypothesis.given(_pairs())
def test_a_delta_is_exact_and_counts_what_changed(pair):
    """The chosen delta rebuilds the content and its counts are true ones."""
    word_bytes, base, content = pair
    before = base.tobytes()
    delta = codecs.encode_delta(content, base, word_bytes)
    decoded = codecs.decode(delta.form, delta.payload, base, content.size, word_bytes)
    assert decoded.tobytes() == content.tobytes()
    assert base.tobytes() == before
    changed = content.view(f"<u{word_bytes}") != base.view(f"<u{word_bytes}")
    assert delta.changed_words == int(changed.sum())
    touched = np.flatnonzero(content != base) // BLOCK_BYTES
    assert delta.changed_blocks == len(set(touched.tolist()))
    codecs.carry_over(content, base, delta, word_bytes)
    assert base.tobytes() == content.tobytes()


@hypothesis.given(_pairs())
def test_the_chosen_delta_is_the_smallest_of_those_tried(pair):
    """Within the published limits of each form no smaller payload was passed over."""
    word_bytes, base, content = pair
    delta = codecs.encode_delta(content, base, word_bytes)
    words = content.size // word_bytes
    blocks = -(-content.size // BLOCK_BYTES)
    tried = {}
    if delta.changed_words <= codecs.SPARSE_MAX_DENSITY * words:
        tried[Form.SPARSE] = _payload(Form.SPARSE, content, base, word_bytes)
    inside = max(delta.changed_blocks * BLOCK_BYTES // word_bytes, 1)
    dense = delta.changed_words > codecs.SPARSE_MAX_DENSITY * inside
    if dense and delta.changed_blocks <= codecs.BLOCKS_MAX_SHARE * blocks:
        tried[Form.BLOCKS] = _payload(Form.BLOCKS, content, base, word_bytes)
    if delta.changed_words > codecs.SPARSE_MAX_DENSITY / 4 * words or not tried:
        tried[Form.DIFFERENCE] = _payload(Form.DIFFERENCE, content, base, word_bytes)
    assert tried[delta.form] == delta.payload
    assert len(delta.payload) == min(map(len, tried.values()))


@hypothesis.given(
    npst.arrays(np.uint32, st.integers(1, 600)),
    npst.arrays(np.uint32, st.integers(1, 600)),
)
def test_any_float_bits_follow_from_any_others(old, new):
    """NaN payloads, -0.0, subnormals and infinities survive every delta form."""
    size = min(old.size, new.size)
    old, new = old[:size].copy(), new[:size].copy()
    spots = min(size, AWKWARD_FLOATS.size)
    new[:spots], old[-spots:] = AWKWARD_FLOATS[:spots], AWKWARD_FLOATS[:spots]
    base, content = _as_bytes(old), _as_bytes(new)
    for form in (Form.PLANES, Form.DIFFERENCE, Form.BLOCKS, Form.SPARSE):
        payload = _payload(form, content, base, 4)
        decoded = codecs.decode(form, payload, base, content.size, 4)
        assert decoded.tobytes() == content.tobytes()


@pytest.mark.parametrize("word_bytes", WORDS)
def test_differences_wrap_at_the_ends_of_the_range(word_bytes):
    """Smallest to largest word and back, and every step between, are exact."""
    top = (1 << (8 * word_bytes)) - 1
    half = 1 << (8 * word_bytes - 1)
    edge = np.array([0, 1, half - 1, half, half + 1, top - 1, top], f"<u{word_bytes}")
    base, content = (_as_bytes(part.ravel()) for part in np.meshgrid(edge, edge))
    for form in (Form.DIFFERENCE, Form.BLOCKS, Form.SPARSE):
        payload = _payload(form, content, base, word_bytes)
        decoded = codecs.decode(form, payload, base, content.size, word_bytes)
        assert decoded.tobytes() == content.tobytes()


def test_differences_are_zigzag_numbers():
    """The stored word is 2d for a step d up and 2|d| - 1 for one down (section 4.5)."""
    base = _as_bytes(np.array([5, 5, 5, 5, 0], "<u2"))
    content = _as_bytes(np.array([5, 6, 4, 7, 0xFFFF], "<u2"))
    stored = _difference(content, base, 2).view("<u2")
    assert stored.tolist() == [0, 2, 1, 4, 1]


@pytest.mark.parametrize("word_bytes", WORDS)
def test_a_constant_is_seen_only_when_every_word_is_equal(word_bytes):
    """One other word anywhere, first, middle or last, makes it no constant."""
    word = bytes(range(1, word_bytes + 1))
    content = codecs.fill(word, 9 * word_bytes)
    assert content.tobytes() == word * 9
    assert codecs.constant_word(content, word_bytes) == word
    for position in range(9):
        other = content.copy()
        other[position * word_bytes] ^= 1
        assert codecs.constant_word(other, word_bytes) is None


def test_a_constant_is_told_by_its_bits():
    """0.0 and -0.0 are two words, one NaN payload repeated is one."""
    zeros = np.array([0.0, -0.0, 0.0], np.float32)
    assert codecs.constant_word(_as_bytes(zeros), 4) is None
    nans = np.full(5, 0x7FC01234, np.uint32)
    assert codecs.constant_word(_as_bytes(nans), 4) == nans[:1].tobytes()


@pytest.mark.parametrize("size", [1, 100, 16_384, 16_385, 200_000])
def test_planes_are_filled_coded_or_raw_as_fits(size):
    """A constant plane takes one byte, noise its own size, anything else is coded."""
    rng = np.random.default_rng(3)
    planes = np.zeros((size, 4), np.uint8)
    planes[:, 1] = rng.integers(0, 256, size, dtype=np.uint8)
    planes[:, 2] = np.arange(size) // 50
    methods = []
    view = memoryview(codecs.encode_full(planes.reshape(-1), 4))
    while view:
        method, length = struct.unpack_from("<BI", view)
        methods.append((method, length))
        view = view[5 + length :]
    fill, raw = (2, 1), (0, size)
    assert methods[0] == methods[3] == fill
    assert methods[1] in ((fill,) if size == 1 else (raw,))
    assert methods[2][1] <= size
    if size > 16_384:
        assert methods[2][0] == 1
        assert methods[2][1] < size / 8


def test_a_sparse_delta_takes_the_narrowest_gaps_that_fit():
    """Gaps of 1, 2 or 4 bytes by the widest one, counted from element -1."""
    for last, width in ((255, 1), (256, 2), (65_535, 2), (65_536, 4)):
        base = np.zeros(70_000, np.uint8)
        content = base.copy()
        content[last] = 9
        payload = _payload(Form.SPARSE, content, base, 1)
        assert struct.unpack_from("<BI", payload) == (width, 1)
        decoded = codecs.decode(Form.SPARSE, payload, base, base.size, 1)
        assert decoded.tobytes() == content.tobytes()


@hypothesis.given(_pairs(), st.sampled_from(FORMS), st.data())
def test_a_damaged_payload_gives_content_or_a_typed_error(pair, form, data):
    """Whatever a payload holds, decoding ends in content of that size or DeltaError."""
    word_bytes, base, content = pair
    payload = bytearray(_payload(form, content, base, word_bytes))
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "noise"]))
    if kind == "flip" and payload:
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(
            st.integers(1, 255)
        )
    elif kind == "cut":
        del payload[data.draw(st.integers(0, len(payload))) :]
    elif kind == "grow":
        payload += data.draw(st.binary(min_size=1, max_size=20))
    else:
        payload = bytearray(data.draw(st.binary(max_size=60)))
    try:
        decoded = codecs.decode(form, bytes(payload), base, content.size, word_bytes)
    except DeltaError:
        return
    assert decoded.size == content.size


@pytest.mark.parametrize(
    ("form", "payload", "message"),
    [
        (Form.CONSTANT, b"abc", "a constant record holds 3 bytes; expected 4"),
        (Form.PLANES, b"", "before the header of a plane"),
        (Form.PLANES, struct.pack("<BI", 0, 9) + b"x", "of 9 bytes is cut off after 1"),
        (Form.PLANES, struct.pack("<BI", 0, 1) + b"x", "method 0 holds 1 bytes for 2"),
        (Form.PLANES, struct.pack("<BI", 7, 2) + b"xx", "method 7 holds 2 bytes for 2"),
        (Form.PLANES, (b"\x02\x01\0\0\0x") * 5, "6 bytes follow the last plane"),
        (Form.PLANES, b"\x01\x03\0\0\0xyz" * 4, "a zstd frame does not decode"),
        (Form.BLOCKS, b"", "shorter than its bitmap of 1"),
        (Form.BLOCKS, b"\x03", "marks blocks past the chunk's end"),
        (Form.SPARSE, b"\x01\0", "of 2 bytes has no header"),
        (Form.SPARSE, struct.pack("<BI", 3, 1), "1 changes with 3-byte gaps"),
        (Form.SPARSE, struct.pack("<BI", 1, 3), "3 changes with 1-byte gaps"),
        (
            Form.SPARSE,
            struct.pack("<BI", 1, 1)
            + b"\x02\x01\0\0\0\x02"
            + b"\x02\x01\0\0\0\x01" * 4,
            "changes element 2 of 2",
        ),
    ],
)
def test_damage_is_named(form, payload, message):
    """Each way in which a payload can be wrong has its own words."""
    base = np.zeros(8, np.uint8)
    with pytest.raises(CorruptionError, match=message):
        codecs.decode(form, payload, base, 8, 4)


@pytest.mark.parametrize("form", [Form.DIFFERENCE, Form.BLOCKS, Form.SPARSE])
@pytest.mark.parametrize("base", [None, np.zeros(4, np.uint8)])
def test_a_delta_needs_a_base_of_its_size(form, base):
    """Without one, or with one of another size, nothing is guessed."""
    with pytest.raises(CorruptionError, match="needs 8 bytes of base content"):
        codecs.decode(form, b"", base, 8, 4)


@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(WORDS),
            st.sampled_from([1, 7, 300, 9001, 70_000]),
            st.sampled_from([0.0, 0.001, 0.01, 0.12, 1.0]),
        ),
        max_size=9,
    ),
    st.integers(0, 99),
)
def test_many_sparse_changes_are_unpacked_as_one_by_one(changes, seed):
    """Of any widths and sizes, and applied to what they apply to."""
    payloads, pairs = [], []
    for number, (word_bytes, count, share) in enumerate(changes):
        rng = np.random.default_rng([seed, number])
        base = _noise(count, word_bytes, seed)
        positions = np.flatnonzero(rng.random(count) < share)
        content = _edited(base, word_bytes, positions, seed)
        payload = _payload(Form.SPARSE, content, base, word_bytes)
        payloads.append((memoryview(payload), content.size, word_bytes))
        pairs.append((base, content))
    for unpacked, payload, (base, content) in zip(
        codecs.unpack(payloads), payloads, pairs, strict=True
    ):
        decoded = codecs.decode(
            Form.SPARSE, payload[0], base, *payload[1:], unpacked=unpacked
        )
        alone = codecs.decode(Form.SPARSE, payload[0], base, *payload[1:])
        assert (decoded == content).all()
        assert (alone == content).all()
        unpacked.apply(alone, payload[2], undo=True)
        assert (alone == base).all()


def test_what_claims_much_is_not_unpacked_along():
    """Memory stays in proportion to what is there; each can be had by itself."""
    base, content = np.zeros(1 << 20, np.uint8), np.ones(1 << 20, np.uint8)
    payload = _payload(Form.SPARSE, content, base, 1)
    assert len(payload) < 100
    several = [(memoryview(payload), base.size, 1)] * 9
    found = codecs.unpack_small(several)
    assert [one is None for one in found] == [False] * 2 + [True] * 7
