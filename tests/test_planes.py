"""Fast passes over planes and differences give what the obvious slow ones give."""

import struct

import hypothesis
import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import numpy as np
import pytest
import zstandard

from orbax_delta import differences, planes, scratch

WORDS = (1, 2, 4, 8)
# Below and above what is taken apart by strides, and more than one piece.
COUNTS = (0, 1, 7, 2_047, 16_384, 65_536, 70_001)


def _content(count, word_bytes, kind, seed=0):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 256, (count, word_bytes), dtype=np.uint8)
    if kind == "filled planes":
        words[:, ::2] = 7
    elif kind == "few values":
        words[:, -1] = rng.binomial(9, 0.4, count)
    elif kind == "runs":
        words[:, -1] = np.arange(count) // 90
    return words.reshape(-1)


def _slow_planes(payload, count, word_bytes):
    """Planes of a payload by the document alone; zstd frames by another decoder."""
    found = []
    for _ in range(word_bytes):
        method, length = struct.unpack_from("<BI", payload)
        data, payload = payload[5 : 5 + length], payload[5 + length :]
        found.append(
            data
            if method == 0
            else data * count
            if method == 2
            else zstandard.ZstdDecompressor().decompressobj().decompress(data)
        )
    assert not payload
    return np.array([np.frombuffer(plane, np.uint8) for plane in found])


@pytest.mark.parametrize("kind", ["noise", "filled planes", "few values", "runs"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("word_bytes", WORDS)
def test_planes_hold_byte_k_of_every_word(word_bytes, count, kind):
    """What is coded are the columns of the content; decoding puts them back."""
    content = _content(count, word_bytes, kind)
    payload = bytes(planes.encode(content, word_bytes))
    columns = content.reshape(-1, word_bytes).T
    assert np.array_equal(_slow_planes(payload, count, word_bytes), columns)
    decoded = planes.decode_exactly(memoryview(payload), content.size, word_bytes)
    assert decoded.tobytes() == content.tobytes()


@hypothesis.given(st.sampled_from(WORDS), st.integers(0, 300), st.data())
def test_split_and_join_are_columns_of_bytes(word_bytes, count, data):
    """Casts and shifts give what strided copies give, at any length."""
    content = data.draw(npst.arrays(np.uint8, count * word_bytes))
    columns = content.reshape(-1, word_bytes).T
    joined = np.empty(content.size, np.uint8)
    planes._join(list(columns), differences.as_words(joined, word_bytes))
    assert joined.tobytes() == content.tobytes()
    if word_bytes > 1:
        split = np.empty((word_bytes, count), np.uint8)
        planes._split(differences.as_words(content, word_bytes), split)
        assert np.array_equal(split, columns)


@hypothesis.given(st.sampled_from(WORDS), st.integers(1, 200), st.data())
def test_differences_are_those_of_the_document(word_bytes, count, data):
    """Whole passes give the zigzag numbers of section 4.5, and undo them."""
    dtype = np.dtype(f"<u{word_bytes}")
    new, old = (data.draw(npst.arrays(dtype, count)) for _ in range(2))
    top = 1 << (8 * word_bytes)
    wanted = []
    for b, c in zip(old.tolist(), new.tolist(), strict=True):
        d = (c - b) % top
        wanted.append((2 * d) % top ^ (0 if d < top // 2 else top - 1))
    out = np.empty(new.nbytes, np.uint8)
    differences.subtract(new.view(np.uint8), old.view(np.uint8), word_bytes, out)
    assert out.view(dtype).tolist() == wanted
    differences.add(out, old.view(np.uint8), word_bytes)
    assert out.view(dtype).tolist() == new.tolist()


@pytest.mark.parametrize("word_bytes", WORDS)
def test_differences_of_several_pieces_are_those_of_one(word_bytes):
    """Where a piece ends nothing is left out or done twice."""
    count = 2 * differences._PIECE + 3
    new, old = (_content(count, word_bytes, "noise", seed) for seed in (1, 2))
    out = np.empty(new.size, np.uint8)
    differences.subtract(new, old, word_bytes, out)
    changed = differences.as_words(new, word_bytes) != differences.as_words(
        old, word_bytes
    )
    assert np.array_equal(differences.as_words(out, word_bytes) != 0, changed)
    differences.add(out, old, word_bytes)
    assert out.tobytes() == new.tobytes()


@hypothesis.given(st.integers(1, 5000), st.lists(st.integers(0, 4999), max_size=9))
def test_changed_blocks_are_those_with_a_changed_word(count, places):
    """At any length, also of less than a block."""
    changed = np.zeros(count, bool)
    changed[[place for place in places if place < count]] = True
    found = differences.changed_blocks(changed, 4)
    wanted = [bool(changed[i : i + 1024].any()) for i in range(0, count, 1024)]
    assert found.tolist() == wanted


def test_the_estimate_is_near_what_encoding_gives():
    """A few pieces tell the size of a chunk of one kind within 3 %."""
    for kind in ("noise", "few values", "filled planes"):
        content = _content(262_144, 4, kind)
        expected = len(planes.encode(content, 4))
        assert planes.estimate_bytes(content, 4) == pytest.approx(expected, rel=0.03)


def test_scratch_is_used_again_by_its_thread_for_the_same_purpose():
    """Same purpose, same memory; another purpose never; what is large is not kept."""
    first = scratch.array("test a", 100, 4)
    assert (first.size, first.dtype) == (100, np.dtype("<u4"))
    assert np.shares_memory(first, scratch.array("test a", 50, 8))
    assert not np.shares_memory(first, scratch.array("test b", 100, 4))
    grown = scratch.array("test a", 100_000, 1)
    assert grown.size == 100_000
    assert np.shares_memory(grown, scratch.array("test a", 1, 1))
    large = scratch.array("test a", scratch.KEPT_BYTES + 1, 1)
    assert large.size == scratch.KEPT_BYTES + 1
    assert not np.shares_memory(large, scratch.array("test a", 10, 1))
