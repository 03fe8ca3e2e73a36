"""Forms of a chunk: how its bytes, or the change of its bytes, become a payload.

Pure functions over `uint8[n]` arrays and integer views; never a float comparison, so
NaN payloads, -0.0 and sub-byte types survive. FORMAT.md section 4 is the contract.
Does not belong here: record headers, which form a save prefers, anything stored.
"""

import dataclasses
import enum
import struct
import threading

import numpy as np
import zstandard

from orbax_delta.errors import CorruptionError
from orbax_delta.frames import decompress

BLOCK_BYTES = 4096
"""Size of a block of the bitmap form, in bytes (1,024 fp32 elements)."""

_RAW, _ZSTD, _FILL = 0, 1, 2
_PLANE_HEAD = struct.Struct("<BI")
_SPARSE_HEAD = struct.Struct("<BI")

# A tiny hash table and long minimum match make zstd an entropy coder with run removal:
# on byte planes it is both faster and smaller than level 1 (DESIGN.md, decision 4).
_PLANE_PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=1,
    window_log=20,
    hash_log=6,
    chain_log=6,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
)
_PROBE_PIECES = 4
_PROBE_BYTES = 2048
_PROBE_KEEP = 0.98
SPARSE_MAX_DENSITY = 0.125
BLOCKS_MAX_SHARE = 0.75

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Form(enum.IntEnum):
    """What a record's payload means; the numbers are on disk."""

    CONSTANT = 1
    PLANES = 2
    DIFFERENCE = 3
    BLOCKS = 4
    SPARSE = 5

    @property
    def is_full(self) -> bool:
        """Whether the content follows from this record alone."""
        return self in (Form.CONSTANT, Form.PLANES)


FORM_NUMBERS = frozenset(map(int, Form))
"""Numbers that stand for a form (Python 3.11 cannot ask the enum)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The smallest payload found for a change.

    Attributes:
        form: A form that is not full.
        payload: Its bytes.
        changed_words: Elements whose bits differ.
        changed_blocks: 4 KiB blocks with any change.
    """

    form: Form
    payload: bytes
    changed_words: int
    changed_blocks: int


class _Coders(threading.local):
    """zstd contexts are not safe to share between threads."""

    def __init__(self) -> None:
        self.encoder = zstandard.ZstdCompressor(compression_params=_PLANE_PARAMETERS)


_coders = _Coders()


def constant_word(content: Bytes, word_bytes: int) -> bytes | None:
    r"""The one word that fills `content`, or None when it is not constant.

    >>> constant_word(np.zeros(8, np.uint8), 4)
    b'\x00\x00\x00\x00'
    """
    words = _words(content, word_bytes)
    if words[0] != words[-1] or words[0] != words[words.size // 2]:
        return None
    return words[0].tobytes() if bool(np.all(words == words[0])) else None


def fill(word: bytes, content_bytes: int) -> Bytes:
    """`content_bytes` bytes made of repeated `word`."""
    content = np.empty(content_bytes, np.uint8)
    content.reshape(-1, len(word))[:] = np.frombuffer(word, np.uint8)
    return content


def encode_full(content: Bytes, word_bytes: int) -> bytes:
    """Payload of form PLANES: byte planes, each raw, filled or entropy coded."""
    return _encode_planes(content, word_bytes)


def estimate_full_bytes(content: Bytes, word_bytes: int) -> int:
    """About what `encode_full` would give, from a few pieces of the content."""
    piece = _PROBE_BYTES * word_bytes
    if content.size <= 2 * _PROBE_PIECES * piece:
        return len(encode_full(content, word_bytes))
    words = (content.size - piece) // word_bytes
    starts = np.linspace(0, words, _PROBE_PIECES).astype(int) * word_bytes
    sample = np.concatenate([content[start : start + piece] for start in starts])
    return len(encode_full(sample, word_bytes)) * content.size // sample.size


def encode_delta(content: Bytes, base: Bytes, word_bytes: int) -> Delta:
    """The smallest delta payload that turns `base` into `content`.

    Sparse positions are tried below 12.5 % changed elements, blocks while a quarter of
    them is unchanged, planes of the whole difference whenever that is not tiny.
    """
    difference = _difference(content, base, word_bytes)
    changed = _words(difference, word_bytes) != 0
    changed_words = int(np.count_nonzero(changed))
    block_map = _changed_blocks(difference)
    changed_blocks = int(np.count_nonzero(block_map))
    density = changed_words / changed.size
    candidates: list[tuple[int, Form, bytes]] = []
    if density <= SPARSE_MAX_DENSITY:
        payload = _encode_sparse(difference, changed, word_bytes)
        candidates.append((len(payload), Form.SPARSE, payload))
    if changed_blocks <= BLOCKS_MAX_SHARE * block_map.size:
        payload = _encode_blocks(difference, block_map, word_bytes)
        candidates.append((len(payload), Form.BLOCKS, payload))
    if density > SPARSE_MAX_DENSITY / 4 or not candidates:
        payload = _encode_planes(difference, word_bytes)
        candidates.append((len(payload), Form.DIFFERENCE, payload))
    _, form, payload = min(candidates)
    return Delta(
        form=form,
        payload=payload,
        changed_words=changed_words,
        changed_blocks=changed_blocks,
    )


def decode(
    form: Form,
    payload: bytes | memoryview,
    base: Bytes | None,
    content_bytes: int,
    word_bytes: int,
) -> Bytes:
    """The content that `payload` stands for, always in a fresh buffer.

    Args:
        form: How to read `payload`.
        payload: Bytes as written by the matching encoder.
        base: Content that a delta applies to; ignored by full forms.
        content_bytes: Size of the content.
        word_bytes: Size of an element, 1, 2, 4 or 8.

    Raises:
        CorruptionError: The payload does not describe content of this size.
    """
    view = memoryview(payload)
    if form is Form.CONSTANT:
        if len(view) != word_bytes:
            raise CorruptionError(
                f"a constant record holds {len(view)} bytes; expected {word_bytes}"
            )
        return fill(bytes(view), content_bytes)
    if form is Form.PLANES:
        return _decode_planes_exactly(view, content_bytes, word_bytes)
    if base is None or base.size != content_bytes:
        raise CorruptionError(
            f"a {form.name} record needs {content_bytes} bytes of base content; "
            f"found {None if base is None else base.size}"
        )
    if form is Form.DIFFERENCE:
        change = _decode_planes_exactly(view, content_bytes, word_bytes)
        return _add(base, change, word_bytes)
    if form is Form.BLOCKS:
        return _decode_blocks(view, base, word_bytes)
    return _decode_sparse(view, base, word_bytes)


def _words(content: Bytes, word_bytes: int) -> np.ndarray:
    return content.view(np.dtype(f"<u{word_bytes}"))


def _difference(content: Bytes, base: Bytes, word_bytes: int) -> Bytes:
    """`content - base` by words, modulo their range, zigzag: near zero both ways.

    Nearby floats of one sign are nearby integers, so that a small change leaves the
    high planes empty; 5 % smaller than XOR on trained states (DESIGN.md, decision 5).
    """
    change: np.ndarray = _words(content, word_bytes) - _words(base, word_bytes)
    signs = change.view(np.dtype(f"<i{word_bytes}")) >> (8 * word_bytes - 1)
    change <<= 1
    change ^= signs.view(change.dtype)
    return change.view(np.uint8)


def _add(base: Bytes, change: Bytes, word_bytes: int) -> Bytes:
    """The content whose `_difference` from `base` is `change`."""
    words = _words(change, word_bytes)
    odd = -(words & 1)
    total = (words >> 1) ^ odd
    total += _words(base, word_bytes)
    return total.view(np.uint8)


def _changed_blocks(difference: Bytes) -> np.ndarray:
    """bool[blocks]: which 4 KiB blocks hold a non-zero byte; the last may be short."""
    whole = difference.size // BLOCK_BYTES * BLOCK_BYTES
    body = difference[:whole].view(np.uint64).reshape(-1, BLOCK_BYTES // 8)
    block_map: np.ndarray = np.any(body, axis=1)
    if whole < difference.size:
        block_map = np.append(block_map, bool(difference[whole:].any()))
    return block_map


def _block_bytes(block_map: np.ndarray, content_bytes: int) -> np.ndarray:
    """bool[content_bytes]: which bytes lie in a marked block."""
    return np.repeat(block_map, BLOCK_BYTES)[:content_bytes]


def _encode_blocks(difference: Bytes, block_map: np.ndarray, word_bytes: int) -> bytes:
    whole = difference.size // BLOCK_BYTES
    dense = difference[: whole * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
    picked = dense[block_map[:whole]].reshape(-1)
    if block_map.size > whole and block_map[whole]:
        picked = np.concatenate([picked, difference[whole * BLOCK_BYTES :]])
    bitmap = np.packbits(block_map, bitorder="little").tobytes()
    return bitmap + _encode_planes(picked, word_bytes)


def _decode_blocks(view: memoryview, base: Bytes, word_bytes: int) -> Bytes:
    block_count = -(-base.size // BLOCK_BYTES)
    bitmap_bytes = -(-block_count // 8)
    if len(view) < bitmap_bytes:
        raise CorruptionError(
            f"a BLOCKS record of {len(view)} bytes is shorter than its bitmap of "
            f"{bitmap_bytes}"
        )
    bits = np.unpackbits(
        np.frombuffer(view[:bitmap_bytes], np.uint8), bitorder="little"
    )
    if bits[block_count:].any():
        raise CorruptionError("a BLOCKS record marks blocks past the chunk's end")
    inside = _block_bytes(bits[:block_count].astype(bool), base.size)
    picked = _decode_planes_exactly(
        view[bitmap_bytes:], int(np.count_nonzero(inside)), word_bytes
    )
    content = base.copy()
    content[inside] = _add(base[inside], picked, word_bytes)
    return content


def _encode_sparse(difference: Bytes, changed: np.ndarray, word_bytes: int) -> bytes:
    positions = np.flatnonzero(changed)
    gaps = np.diff(positions, prepend=-1) - 1
    widest = int(gaps.max(initial=0))
    gap_bytes = 1 if widest < 1 << 8 else 2 if widest < 1 << 16 else 4
    gap_words = gaps.astype(np.dtype(f"<u{gap_bytes}")).view(np.uint8)
    values = _words(difference, word_bytes)[positions].view(np.uint8)
    return b"".join(
        (
            _SPARSE_HEAD.pack(gap_bytes, positions.size),
            _encode_planes(gap_words, gap_bytes),
            _encode_planes(values, word_bytes),
        )
    )


def _decode_sparse(view: memoryview, base: Bytes, word_bytes: int) -> Bytes:
    if len(view) < _SPARSE_HEAD.size:
        raise CorruptionError(f"a SPARSE record of {len(view)} bytes has no header")
    gap_bytes, count = _SPARSE_HEAD.unpack_from(view)
    if gap_bytes not in (1, 2, 4) or count > base.size // word_bytes:
        raise CorruptionError(
            f"a SPARSE record claims {count} changes with {gap_bytes}-byte gaps in a "
            f"chunk of {base.size // word_bytes} elements"
        )
    gap_words, rest = _decode_planes(
        view[_SPARSE_HEAD.size :], count * gap_bytes, gap_bytes
    )
    values = _decode_planes_exactly(rest, count * word_bytes, word_bytes)
    gaps = _words(gap_words, gap_bytes).astype(np.int64)
    positions = np.cumsum(gaps + 1) - 1
    content = base.copy()
    words = _words(content, word_bytes)
    if count and int(positions[-1]) >= words.size:
        raise CorruptionError(
            f"a SPARSE record changes element {int(positions[-1])} of {words.size}"
        )
    old = words[positions].view(np.uint8)
    words[positions] = _words(_add(old, values, word_bytes), word_bytes)
    return content


def _encode_planes(content: Bytes, word_bytes: int) -> bytes:
    planes = content.reshape(-1, word_bytes)
    parts: list[bytes] = []
    for index in range(word_bytes):
        method, data = _encode_plane(np.ascontiguousarray(planes[:, index]))
        parts += (_PLANE_HEAD.pack(method, len(data)), data)
    return b"".join(parts)


def _encode_plane(plane: Bytes) -> tuple[int, bytes]:
    if plane.size == 0:
        return _RAW, b""
    if plane[0] == plane[-1] and not (plane != plane[0]).any():
        return _FILL, plane[:1].tobytes()
    if _looks_compressible(plane):
        data = _coders.encoder.compress(plane.data)
        if len(data) < plane.size:
            return _ZSTD, data
    return _RAW, plane.tobytes()


def _looks_compressible(plane: Bytes) -> bool:
    """Try a few pieces: mantissa noise is told from structure at 1 % of the cost."""
    if plane.size <= 2 * _PROBE_PIECES * _PROBE_BYTES:
        return True
    starts = np.linspace(0, plane.size - _PROBE_BYTES, _PROBE_PIECES).astype(int)
    probe = b"".join(plane[s : s + _PROBE_BYTES].tobytes() for s in starts)
    return len(_coders.encoder.compress(probe)) < _PROBE_KEEP * len(probe)


def _decode_planes_exactly(
    view: memoryview, content_bytes: int, word_bytes: int
) -> Bytes:
    content, rest = _decode_planes(view, content_bytes, word_bytes)
    if len(rest):
        raise CorruptionError(f"{len(rest)} bytes follow the last plane of a record")
    return content


def _decode_planes(
    view: memoryview, content_bytes: int, word_bytes: int
) -> tuple[Bytes, memoryview]:
    content = np.empty(content_bytes, np.uint8)
    planes = content.reshape(-1, word_bytes)
    for index in range(word_bytes):
        if len(view) < _PLANE_HEAD.size:
            raise CorruptionError("a record ends before the header of a plane")
        method, length = _PLANE_HEAD.unpack_from(view)
        data = view[_PLANE_HEAD.size : _PLANE_HEAD.size + length]
        if len(data) != length:
            raise CorruptionError(
                f"a plane of {length} bytes is cut off after {len(data)}"
            )
        planes[:, index] = _decode_plane(method, data, planes.shape[0])
        view = view[_PLANE_HEAD.size + length :]
    return content, view


def _decode_plane(method: int, data: memoryview, plane_bytes: int) -> Bytes | np.uint8:
    if method == _FILL and len(data) == 1:
        return np.uint8(data[0])
    if method == _RAW and len(data) == plane_bytes:
        return np.frombuffer(data, np.uint8)
    if method == _ZSTD:
        return np.frombuffer(decompress(data, plane_bytes), np.uint8)
    raise CorruptionError(
        f"a plane of method {method} holds {len(data)} bytes for {plane_bytes}"
    )
