"""Block digests: literal vectors, and what a change of one bit does."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from orbax_delta import digests, dtypes

VECTORS = {
    "int32 0-d": (np.int32(42), 1, "ed3fa4ee 4d0031f9 a323823f da78d7f8", None),
    "zeros": (
        np.zeros(1024, np.float32),
        1,
        "dacde54b 89f53958 9aa7ad56 4ac0286a",
        None,
    ),
    "-0.0": (
        np.full(1024, -0.0, np.float32),
        1,
        "bdd463b5 e13a7e28 56514619 9e80d096",
        None,
    ),
    "uint8": (
        np.arange(15, dtype=np.uint8).reshape(3, 5),
        1,
        "221e7ea9 1f4f9710 8a18f244 83f9f4b5",
        None,
    ),
    "float64": (
        np.arange(32, dtype=np.float64).reshape(8, 4),
        1,
        "58a4bdd7 82d782bb 994a8607 9c6906a2",
        None,
    ),
    "matrix": (
        np.arange(38400, dtype=np.uint32).reshape(100, 384),
        100,
        "0a7ccead 8d446611 b3d5ad8c 3f9dcf88",
        "07de8f63 82e9fd69 05de5dd1 3bdbfdaa",
    ),
    "short rows": (
        np.arange(4096 * 24).astype(np.uint16).reshape(4096, 24),
        98,
        "824e6f00 21280f9e ad04d4a7 787ec87f",
        "01479390 c0e77005 b16d6c86 1a26a901",
    ),
    "row in pieces": (
        np.arange(262145, dtype=np.uint32),
        257,
        "78699939 c205d86e 31fae842 5adda12d",
        "f7635ca9 06b14b76 7aea04b7 af92e380",
    ),
}
"""Array, number of blocks, digest of the first and of the last one."""


def digests_of(array):
    """Digests of an array."""
    array = np.asarray(array)
    return digests.block_digests(array, dtypes.element_type(array.dtype))


def as_text(digest):
    """Four words as the vectors have them."""
    return " ".join(f"{word:08x}" for word in digest)


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name):
    """Of every kind of geometry; whoever writes these digests again needs them."""
    array, blocks, first, last = VECTORS[name]
    found = digests_of(array)
    assert len(found) == blocks
    assert as_text(found[0]) == first
    assert as_text(found[-1]) == (last or first)


def test_keys():
    """The first and the last ones, as the specification has them."""
    segment, block = digests.segment_keys(1 << 18), digests.block_keys(1024)
    assert as_text(segment[0, :3]) == "191b44f5 a9fd4ee3 fbbbef51"
    assert as_text([segment[7, -1]]) == "5de67cd0"
    assert as_text([block[0, 0, 0], block[7, -1, -1]]) == "4c91f970 28d4b79d"
    assert np.array_equal(digests.segment_keys(1000), segment[:, :1000])


SHAPES = [(), (1,), (127,), (4096,), (262144,), (262272,), (300, 7), (3, 5, 11)]


@given(
    st.sampled_from(SHAPES), st.sampled_from(["u1", "u2", "u4", "u8", "c16"]), st.data()
)
def test_one_bit_changes_its_block_alone(shape, dtype, data):
    """Wherever it is; other blocks keep their digests."""
    size = int(np.prod(shape))
    width = np.dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 256, size * width, np.uint8)
    bit = data.draw(st.integers(0, 8 * raw.size - 1))
    before = digests_of(raw.view(dtype).reshape(shape))
    raw[bit // 8] ^= 1 << (bit % 8)
    after = digests_of(raw.view(dtype).reshape(shape))
    (changed,) = np.nonzero((before != after).any(axis=1))
    words = -(-width // 4)
    plan = digests.geometry(shape, words)
    assert len(before) == plan.blocks
    assert list(changed) == [bit // 8 // width // plan.block_elements]


def test_packed_elements_count_by_their_bits():
    """What numpy keeps in the high bits of an int4 is no part of it."""
    low = np.arange(16, dtype=np.uint8)
    a, b = low.view(ml_dtypes.int4), (low | 0x50).view(ml_dtypes.int4)
    assert np.array_equal(digests_of(a), digests_of(b))


def test_nothing_has_no_blocks():
    """Arrays without elements."""
    for shape in ((0,), (3, 0), (0, 300_000)):
        assert digests_of(np.zeros(shape, np.float32)).shape == (0, 4)
        assert digests.geometry(shape).blocks == 0
