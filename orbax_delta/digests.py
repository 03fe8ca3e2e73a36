"""Block digests: 128 bits for each few kilobytes, alike on every processor.

Sums of products of 32-bit words and position keys, so that XLA makes one pass of them
on any device and numpy comes to the same bits. Two blocks that differ share a digest
with a chance of at most 2^-84 over the keys; the keys are fixed, so this guards against
accidents, not against who looks for collisions. These digests are never stored.

    words    an element of up to 4 bytes is one word, its bits; 8 and 16 bytes are 2 and
             4 words, the least significant first
    segment  the trailing axes, merged while they have at most 4,096 words; of rows of
             over 2^18 words, pieces of 128 elements
    lanes    L_j = sum of (v + a) * ((v >> 16) + b), j = 0..3, modulo 2^32: v is the
             word in lanes 0 and 2, the word rotated left by 8 in lanes 1 and 3; a and b
             are the keys 2j and 2j + 1 of the word's position
    block    R segments: their four lanes, for R > 1 hashed again the same way
    digest   the block's four words, mixed by four rounds that can be undone

Does not belong here: programs for devices (`device`), and what is done about a digest.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np

from orbax_delta.dtypes import ElementType

SEGMENT_WORDS = 4096
ROW_WORDS = 1 << 18
PIECE_ELEMENTS = 128
LANES = 4
_PIECES_IN_BLOCK = 8
_SMALL_SEGMENT_WORDS = 128
_SMALL_BLOCK_WORDS = 1024
_MOST_SEGMENTS = 1024
_TILE_WORDS = 1 << 15

Words = np.ndarray
"""Of `uint32`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How an array is divided.

    Attributes:
        segment: Trailing axes that make up a segment; (128,) where rows are cut.
        segments: Number of segments.
        group: Segments in a block.
        pieces: Into how many pieces each row is cut; 0: rows are not cut.
    """

    segment: tuple[int, ...]
    segments: int
    group: int
    pieces: int

    @property
    def elements(self) -> int:
        """Elements in a segment."""
        return math.prod(self.segment)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.segments // self.group)

    @property
    def block_elements(self) -> int:
        """Elements in a block, which are consecutive in C order; the last has fewer.

        Of rows cut in pieces only where those are all of one length.
        """
        return self.elements * self.group


def geometry(shape: Sequence[int], words: int = 1) -> Geometry:
    """How an array of `shape` with `words` words to an element is divided.

    >>> geometry((100, 384)).blocks, geometry((8, 16, 128)).segment
    (100, (16, 128))
    """
    shape = tuple(shape) or (1,)
    size, row = math.prod(shape), shape[-1]
    if row * words > ROW_WORDS:
        pieces = -(-row // PIECE_ELEMENTS)
        return Geometry(
            segment=(PIECE_ELEMENTS,),
            segments=math.prod(shape[:-1]) * pieces,
            group=_PIECES_IN_BLOCK,
            pieces=pieces,
        )
    first = len(shape) - 1
    while first > 0 and math.prod(shape[first - 1 :]) * words <= SEGMENT_WORDS:
        first -= 1
    segment = shape[first:]
    elements = math.prod(segment)
    segments = size // elements if size else 0
    group = 1
    if elements * words < _SMALL_SEGMENT_WORDS and segments:
        fitting = _SMALL_BLOCK_WORDS // (elements * words)
        group = max(1, min(_MOST_SEGMENTS, fitting, segments))
    return Geometry(segment=segment, segments=segments, group=group, pieces=0)


@functools.cache
def _key_table(level: str, count: int) -> Words:
    name = f"orbax_delta block digest v1 {level}".encode()
    data = hashlib.shake_256(name).digest(4 * 2 * LANES * count)
    table = np.frombuffer(data, "<u4").astype(np.uint32).reshape(count, 2 * LANES).T
    return np.ascontiguousarray(table)


def segment_keys(count: int) -> Words:
    """`uint32[8, count]`: keys of the words of a segment."""
    # Powers of two, so that few tables are kept: a shorter one is a prefix.
    return _key_table("segment", 1 << (count - 1).bit_length())[:, :count]


def block_keys(segments: int) -> Words:
    """`uint32[8, segments, 4]`: keys of the lanes of a block's segments."""
    table = _key_table("block", LANES * _MOST_SEGMENTS)
    return table[:, : LANES * segments].reshape(2 * LANES, segments, LANES)


def block_digests(array: np.ndarray, element: ElementType) -> Words:
    """`uint32[blocks, 4]`: the digest of each block of an array on the host.

    The definition; programs on devices are compared with it.
    """
    words = _words(np.ascontiguousarray(array), element)
    plan = geometry(array.shape, words.shape[1])
    if not array.size:
        return np.zeros((0, LANES), np.uint32)
    sums = _segment_sums(words, plan, row=array.shape[-1] if array.ndim else 1)
    if plan.group > 1:
        padded = np.zeros((plan.blocks * plan.group, LANES), np.uint32)
        padded[: plan.segments] = sums
        keys = block_keys(plan.group).reshape(2 * LANES, -1)
        sums = _lanes(padded.reshape(plan.blocks, -1), keys)
    return _finalised(sums)


def _words(array: np.ndarray, element: ElementType) -> Words:
    """`[elements, words]`, unsigned, of up to 32 bits; a view where it can be."""
    flat = array.reshape(-1)
    if flat.dtype.itemsize <= np.dtype(np.uint32).itemsize:
        words = flat.view(f"<u{flat.dtype.itemsize}")[:, None]
        packed = element.bits < 8 * flat.dtype.itemsize
        return words & words.dtype.type((1 << element.bits) - 1) if packed else words
    return flat.view("<u4").reshape(flat.size, -1)


def _segment_sums(words: Words, plan: Geometry, *, row: int) -> Words:
    """`uint32[segments, 4]`; the word `p` of element `e` has position `p * P + e`."""
    count = words.shape[1]
    keys = segment_keys(count * plan.elements).reshape(2 * LANES, count, -1)
    rows = words.reshape(-1, row, count)
    if not plan.pieces:
        rows = words.reshape(plan.segments, plan.elements, count)
    whole = rows.shape[1] // plan.elements * plan.elements
    parts = rows[:, :whole].reshape(-1, plan.elements, count).transpose(0, 2, 1)
    sums = _lanes(parts.reshape(len(parts), -1), keys.reshape(2 * LANES, -1))
    rest = rows[:, whole:].transpose(0, 2, 1)
    if not rest.size:
        return sums
    shorter = keys[:, :, : rest.shape[2]].reshape(2 * LANES, -1)
    tails = _lanes(rest.reshape(len(rest), -1), shorter)
    by_row = sums.reshape(len(rows), -1, LANES)
    return np.concatenate([by_row, tails[:, None]], axis=1).reshape(-1, LANES)


def _lanes(words: Words, keys: Words) -> Words:
    """The lanes of each row of words: `uint32[rows, 4]`."""
    result = np.empty((len(words), LANES), np.uint32)
    step = max(1, _TILE_WORDS // max(1, words.shape[1]))  # of what caches hold
    for start in range(0, len(words), step):
        tile = words[start : start + step].astype(np.uint32, copy=False)
        values = tile, _rotated(tile, 8)
        for lane in range(LANES):
            value = values[lane % 2]
            terms = value + keys[2 * lane]
            terms *= (value >> np.uint32(16)) + keys[2 * lane + 1]
            terms.sum(axis=1, dtype=np.uint32, out=result[start : start + step, lane])
    return result


def _rotated(words: Words, by: int) -> Words:
    return (words << np.uint32(by)) | (words >> np.uint32(32 - by))


def _finalised(sums: Words) -> Words:
    a, b, c, d = sums.T.copy()
    for _ in range(4):
        a += b
        d = _rotated(d ^ a, 16)
        c += d
        b = _rotated(b ^ c, 12)
        a += b
        d = _rotated(d ^ a, 8)
        c += d
        b = _rotated(b ^ c, 7)
    return np.stack([a, b, c, d], axis=1)
