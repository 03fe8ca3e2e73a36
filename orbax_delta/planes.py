"""Byte planes: a sequence of words coded plane by plane (FORMAT.md section 4.2).

Mantissa bytes are noise, exponent bytes are not. Planes tell them apart, and each is
kept, filled or entropy coded as fits it. Does not belong here: what the words mean.
"""

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from orbax_delta import differences, entropy, kernels, scratch
from orbax_delta.differences import Bytes
from orbax_delta.errors import CorruptionError
from orbax_delta.frames import decompress, decompress_all

_RAW, _ZSTD, _FILL = 0, 1, 2
_HEAD = struct.Struct("<BI")

Plane = tuple[int, memoryview]
"""A plane as it is stored: how, and its bytes."""

_PROBE_PIECES = 4
_PROBE_BYTES = 2048
_PROBE_KEEP = 0.98
# Smaller planes are coded without asking whether it pays.
_SMALL_PLANE_BYTES = 2 * _PROBE_PIECES * _PROBE_BYTES
# A byte of literals takes a bit at least.
_SURELY_MATCHES = 0.125

# Words at a time, where a pass needs room for an intermediate result.
_PIECE = 1 << 16
# Smaller contents are taken apart by strides: calls cost more than passes there.
_SMALL_BYTES = 16 << 10


def encode(content: Bytes, word_bytes: int) -> bytes | memoryview:
    """All planes of `content`: raw, filled or entropy coded."""
    if word_bytes == 1 or content.size < _SMALL_BYTES:
        return _encoded(np.ascontiguousarray(content.reshape(-1, word_bytes).T))
    planes = _scratch_planes(content.size, word_bytes)
    words = differences.as_words(content, word_bytes)
    if kernels.pay(content.size):
        kernels.of(word_bytes).split(words, planes)
    else:
        _split(words, planes)
    return _encoded(planes)


def encode_change(content: Bytes, base: Bytes, word_bytes: int) -> bytes | memoryview:
    """All planes of the difference of two contents of one size."""
    if kernels.pay(content.size):
        planes = _scratch_planes(content.size, word_bytes)
        new, old = (differences.as_words(part, word_bytes) for part in (content, base))
        kernels.of(word_bytes).subtract(new, old, planes)
        return _encoded(planes)
    change = scratch.array("difference", content.size, 1)
    differences.subtract(content, base, word_bytes, change)
    return encode(change, word_bytes)


def _scratch_planes(content_bytes: int, word_bytes: int) -> np.ndarray:
    return scratch.array("planes", content_bytes, 1).reshape(word_bytes, -1)


def _encoded(planes: np.ndarray) -> bytes | memoryview:
    return _joined(_flat(_coded(list(planes), [_is_of_one_value(p) for p in planes])))


def _is_of_one_value(plane: Bytes) -> bool:
    ends_alike = plane.size == 0 or plane[0] == plane[-1]
    return bool(ends_alike and not (plane != plane[:1]).any())


def encode_all(
    several: Sequence[tuple[np.ndarray, Sequence[bool]]], heads: Sequence[bytes]
) -> list[bytes | memoryview]:
    """Coded planes of several contents.

    Args:
        several: `uint8[planes, words]` of each, and which planes are of one value.
        heads: What each begins with.
    """
    coded = iter(
        _coded(
            [plane for planes, _ in several for plane in planes],
            [alone for _, same in several for alone in same],
        )
    )
    return [
        _joined([head, *_flat(itertools.islice(coded, len(same)))])
        for head, (_, same) in zip(heads, several, strict=True)
    ]


_Coded = tuple[bytes, bytes | memoryview]


def _coded(planes: Sequence[Bytes], same: Sequence[bool]) -> list[_Coded]:
    """Header and data of each plane.

    Small planes, and pieces of others that tell how to code them, take one call: each
    lets go of the interpreter's lock, and to get it back costs more.
    """
    tried = {
        index: plane.data if plane.size <= _SMALL_PLANE_BYTES else _probe(plane)
        for index, plane in enumerate(planes)
        if not same[index]
    }
    frames = dict(zip(tried, entropy.all_by_matches(list(tried.values())), strict=True))
    coded: list[_Coded] = []
    for index, plane in enumerate(planes):
        method, data = _RAW, plane.data
        if index not in tried:
            if plane.size:  # else of nothing in particular
                method, data = _FILL, plane[:1].data
        else:
            frame = frames[index]
            if plane.size > _SMALL_PLANE_BYTES:
                code = _suitable(tried[index], len(frame))
                frame = code(plane.data) if code else plane.data
            if len(frame) < plane.size:
                method, data = _ZSTD, frame
        coded.append((_HEAD.pack(method, len(data)), data))
    return coded


def _flat(coded: Iterable[_Coded]) -> list[bytes | memoryview]:
    return list(itertools.chain.from_iterable(coded))


def _joined(parts: Sequence[bytes | memoryview]) -> bytes | memoryview:
    """Parts after one another; many bytes without the interpreter's lock.

    `join` keeps it, and for a payload takes as long as all else that needs it.
    """
    total = sum(map(len, parts))
    if total < _SMALL_BYTES:
        return b"".join(parts)
    out = np.empty(total, np.uint8)
    start = 0
    for part in parts:
        out[start : start + len(part)] = np.frombuffer(part, np.uint8)
        start += len(part)
    return out.data


def _probe(plane: Bytes) -> memoryview:
    """A few pieces of a plane: they tell noise from structure at 1 % of the cost."""
    starts = _spread(plane.size, _PROBE_BYTES)
    return memoryview(b"".join(plane[s : s + _PROBE_BYTES].data for s in starts))


def _suitable(probe: memoryview, least: int) -> entropy.Coder | None:
    """The coder that makes the least of some pieces; None if they hardly shrink.

    Args:
        probe: The pieces.
        least: What `by_matches` makes of them, in bytes.
    """
    if least >= _PROBE_KEEP * len(probe):
        return None
    if least < _SURELY_MATCHES * len(probe):
        return entropy.by_matches
    literals = len(entropy.by_literals(probe))
    return entropy.by_literals if literals <= least else entropy.by_matches


def estimate_bytes(content: Bytes, word_bytes: int) -> int:
    """About how many bytes `encode` would give, from a few pieces of the content."""
    piece = _PROBE_BYTES * word_bytes
    if content.size <= 2 * _PROBE_PIECES * piece:
        return len(encode(content, word_bytes))
    sample = np.concatenate(
        [content[start : start + piece] for start in _spread(content.size, piece)]
    )
    return len(encode(sample, word_bytes)) * content.size // sample.size


def _spread(size: int, piece: int) -> Iterator[int]:
    """Where a few pieces of `piece` bytes begin, first and last one at the ends.

    All are multiples of 8, so that no word is cut.
    """
    last = size - piece
    for number in range(_PROBE_PIECES - 1):
        yield last * number // (_PROBE_PIECES - 1) // 8 * 8
    yield last


def _split(content: np.ndarray, planes: np.ndarray) -> None:
    """Put byte k of every word into plane k."""
    for start in range(0, content.size, _PIECE):
        stop = start + _PIECE
        _halve(content[start:stop], planes[:, start:stop])


def _halve(content: np.ndarray, planes: np.ndarray) -> None:
    """Low and high halves of words by casts, which are faster than strided copies."""
    half_bytes = content.itemsize // 2
    high = scratch.array(f"high{half_bytes}", content.size, content.itemsize)
    np.right_shift(content, 8 * half_bytes, out=high)
    for number, part in enumerate((content, high)):
        into = planes[number * half_bytes : (number + 1) * half_bytes]
        if half_bytes == 1:
            np.copyto(into[0], part, casting="unsafe")
            continue
        half = scratch.array(f"half{half_bytes}", content.size, half_bytes)
        np.copyto(half, part, casting="unsafe")
        _halve(half, into)


def decode_exactly(
    view: memoryview, content_bytes: int, word_bytes: int, out: Bytes | None = None
) -> Bytes:
    """The content of `content_bytes` bytes whose planes fill `view`.

    Raises:
        CorruptionError: They do not, or something follows the last plane.
    """
    content, rest = decode(view, content_bytes, word_bytes, out)
    require_end(rest)
    return content


def require_end(rest: memoryview) -> None:
    """Raise CorruptionError if something follows the last plane."""
    if len(rest):
        raise CorruptionError(f"{len(rest)} bytes follow the last plane of a record")


def decode(
    view: memoryview, content_bytes: int, word_bytes: int, out: Bytes | None = None
) -> tuple[Bytes, memoryview]:
    """The content whose planes `view` begins with, in `out` or a fresh array; the rest.

    Raises:
        CorruptionError: A plane is cut off, or is not what it should be.
    """
    planes, rest = _decoded(view, content_bytes, word_bytes)
    content = np.empty(content_bytes, np.uint8) if out is None else out
    if content_bytes < _SMALL_BYTES:
        spread = content.reshape(-1, word_bytes)
        for index, plane in enumerate(planes):
            spread[:, index] = plane
    elif word_bytes > 1 and kernels.pay(content_bytes):
        words = differences.as_words(content, word_bytes)
        kernels.of(word_bytes).join(_arrays(planes, words.size), words)
    else:
        _join(planes, differences.as_words(content, word_bytes))
    return content, rest


def decode_change(
    view: memoryview, base: Bytes, word_bytes: int, out: Bytes | None = None
) -> Bytes:
    """The content whose difference from `base` has the planes that fill `view`.

    Args:
        view: Planes of a difference.
        base: What it applies to.
        word_bytes: Size of an element, 1, 2, 4 or 8.
        out: Where the content goes; it may be `base`. None: to a fresh array.

    Raises:
        CorruptionError: They do not fill it.
    """
    content = np.empty(base.size, np.uint8) if out is None else out
    if kernels.pay(base.size):
        planes, rest = _decoded(view, base.size, word_bytes)
        require_end(rest)
        old, new = (differences.as_words(part, word_bytes) for part in (base, content))
        kernels.of(word_bytes).add(_arrays(planes, old.size), old, new)
        return content
    change = scratch.array("change", base.size, 1)
    decode_exactly(view, base.size, word_bytes, change)
    differences.add(change, base, word_bytes, content)
    return content


def _arrays(planes: Sequence[Bytes | int], plane_bytes: int) -> tuple[Bytes, ...]:
    """Planes as arrays of one type, for compiled passes; one of one value is filled."""
    filled = (
        bytes((plane,)) * plane_bytes if isinstance(plane, int) else plane
        for plane in planes
    )
    arrays = tuple(np.frombuffer(plane, np.uint8) for plane in filled)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def parse(
    view: memoryview, count: int, plane_bytes: int
) -> tuple[list[Plane], memoryview]:
    """The first `count` planes of `view` as they are stored; what follows them.

    Raises:
        CorruptionError: One is cut off, or has not the length that its method asks for.
    """
    planes = []
    for _ in range(count):
        if len(view) < _HEAD.size:
            raise CorruptionError("a record ends before the header of a plane")
        method, length = _HEAD.unpack_from(view)
        data = view[_HEAD.size : _HEAD.size + length]
        if len(data) != length:
            raise CorruptionError(
                f"a plane of {length} bytes is cut off after {len(data)}"
            )
        if method != _ZSTD and length != {_FILL: 1, _RAW: plane_bytes}.get(method):
            raise CorruptionError(
                f"a plane of method {method} holds {length} bytes for {plane_bytes}"
            )
        planes.append((method, data))
        view = view[_HEAD.size + length :]
    return planes, view


def _decoded(
    view: memoryview, content_bytes: int, word_bytes: int
) -> tuple[list[Bytes | int], memoryview]:
    plane_bytes = content_bytes // word_bytes
    planes, rest = parse(view, word_bytes, plane_bytes)
    return [_decode_plane(*plane, plane_bytes) for plane in planes], rest


def flatten(
    several: Sequence[tuple[Sequence[Plane], int]],
) -> list[bytes | memoryview]:
    """Planes after one another, of several contents.

    Args:
        several: Parsed planes of each content, and how many bytes each of them has.

    Raises:
        CorruptionError: A frame is damaged, or holds something else.
    """
    frames = [
        (data, size)
        for planes, size in several
        for method, data in planes
        if method == _ZSTD
    ]
    unpacked = iter(decompress_all(frames))
    joined = []
    for planes, size in several:
        pieces: list[bytes | memoryview] = []
        for method, data in planes:
            filled = bytes(data) * size if method == _FILL else data
            pieces.append(next(unpacked) if method == _ZSTD else filled)
        joined.append(_joined(pieces))
    return joined


def _decode_plane(method: int, data: memoryview, plane_bytes: int) -> Bytes | int:
    if method == _FILL:
        return data[0]
    if method == _RAW:
        return np.frombuffer(data, np.uint8)
    return np.frombuffer(decompress(data, plane_bytes), np.uint8)


def _join(planes: Sequence[Bytes | int], out: np.ndarray) -> None:
    """Put word i together from byte i of every plane; a plane of one byte is that."""
    for start in range(0, out.size, _PIECE):
        stop = start + _PIECE
        pieces = [p if isinstance(p, int) else p[start:stop] for p in planes]
        _double(pieces, out[start:stop])


def _double(planes: Sequence[Bytes | int], out: np.ndarray) -> None:
    """Words from planes by way of their halves, high one first."""
    middle = len(planes) // 2
    if not middle:
        out[:] = planes[0]
        return
    np.copyto(out, _half(planes[middle:], out.size))
    np.left_shift(out, 8 * middle, out=out)
    np.bitwise_or(out, _half(planes[:middle], out.size), out=out)


def _half(planes: Sequence[Bytes | int], count: int) -> Bytes | np.ndarray | int:
    if len(planes) == 1:
        return planes[0]
    half = scratch.array(f"half{len(planes)}", count, len(planes))
    _double(planes, half)
    return half
