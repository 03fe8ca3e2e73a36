"""What the rows of a step stand for: the decoding half of the second reader.

Like `second_reader`, written from FORMAT.md alone; numbers in comments are sections.
"""

import dataclasses
import hmac
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

FULL, CONSTANT, PLANES, DIFFERENCE, BLOCKS, SPARSE = (1, 2, 6), 1, 2, 3, 4, 5
GRID, GRID_CHANGE, RELATIVE = 6, 7, 8
NO_PACK, BLOCK = 2**32 - 1, 4096
PACKED = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4}
PACKED |= {"int2": 2, "uint2": 2, "int1": 1, "uint1": 1}
WORDS = dict.fromkeys(("bool", "int8", "uint8", *PACKED), 1)
WORDS |= dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2)
WORDS |= dict.fromkeys(("int32", "uint32", "float32", "complex64"), 4)
WORDS |= dict.fromkeys(("int64", "uint64", "float64", "complex128"), 8)
WORDS |= {
    f"float{kind}": 1
    for kind in (
        *("6_e2m3fn", "6_e3m2fn", "8_e3m4", "8_e4m3", "8_e4m3b11fnuz", "8_e4m3fn"),
        *("8_e4m3fnuz", "8_e5m2", "8_e5m2fnuz", "8_e8m0fnu"),
    )
}
CODED = re.compile(r"([<>])([iufcmM])([248]|16)(\[\w+\])?", re.ASCII)


class DamagedError(Exception):
    """What is stored breaks a rule of the format."""


class UnknownVersionError(DamagedError):
    """Another version, or a feature, that this reader does not know."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a part (7.1), `refs` as form, pack, offset and length."""

    leaf: int
    box: tuple[slice, ...]
    rule: int
    digest: bytes
    refs: list[tuple[int, int, int, int]]


def check(holds: Any, message: str) -> None:
    """Raise `DamagedError` unless something holds."""
    if not holds:
        raise DamagedError(message)


def sizes(dtype: str) -> tuple[int, int]:
    """Bytes of an element and of its word (3.1)."""
    if dtype in WORDS:
        return WORDS[dtype] * (2 if dtype.startswith("complex") else 1), WORDS[dtype]
    match = CODED.fullmatch(dtype)
    check(match and np.dtype(dtype).str == dtype, f"type {dtype!r}")
    order, kind, size = match[1], match[2], int(match[3])
    check(order == ">" or kind in "mM", f"type {dtype!r}")
    check(size >= 8 if kind in "mMc" else size <= 8, f"type {dtype!r}")
    return size, size // 2 if kind == "c" else size


def content(row: Row, elements: int, dtype: str, word: int, packs: "Packs") -> bytes:
    """Content of a chunk, its digest checked; packed types one byte an element."""
    bits = PACKED.get(dtype, 8 * sizes(dtype)[0])
    size = -(-elements * bits // 8)
    if row.rule:
        words = _list(row, 2 * size, 4, packs)
        content = (_bfloat16 if row.rule == 1 else _float16)(words).tobytes()
    else:
        content = _list(row, size, word, packs).tobytes()
    check(xxhash.xxh3_128_digest(content) == row.digest, "digest of a chunk")
    if dtype not in PACKED:
        return content
    spread = np.frombuffer(content, np.uint8)[:, None] >> np.arange(0, 8, bits)
    spread = (spread & ((1 << bits) - 1)).astype(np.uint8).reshape(-1)
    check(not spread[elements:].any(), "bits after the last element")
    return spread[:elements].tobytes()


def _list(row: Row, size: int, word: int, packs: "Packs") -> np.ndarray:
    """What the records of a list yield, as words (7.4)."""
    words = np.zeros(0, f"<u{word}")
    check(size <= NO_PACK, "content of a record")
    for form, pack, offset, length in row.refs:
        if form == CONSTANT:
            stored = struct.pack("<II", offset, length)
            check(not any(stored[word:]), "word of a constant")
            words = np.full(size // word, np.frombuffer(stored[:word], words.dtype)[0])
            continue
        data = packs.record(pack, offset, length)
        magic, number, width, flags, content, payload, digest = struct.unpack(
            "<4sBBHII16s", data[:32]
        )
        check(magic == b"ODR0" and flags == 0, "magic of a record")
        check((number, width, content) == (form, word, size), "numbers of a record")
        check(payload == len(data) - 40 and size % word == 0, "lengths of a record")
        (checksum,) = struct.unpack("<Q", data[-8:])
        check(xxhash.xxh3_64_intdigest(data[:-8]) == checksum, "checksum of a record")
        words = _DECODERS[form](_Payload(data[32:-8], size // word, word), words)
        check(xxhash.xxh3_128_digest(words.tobytes()) == digest, "digest of a record")
    return words


@dataclasses.dataclass(frozen=True, slots=True)
class Packs:
    """Where records lie, and the user's key if they are sealed."""

    folder: Path
    names: list[str]
    secret: bytes | None

    def record(self, pack: int, offset: int, length: int) -> bytes:
        name = self.names[pack]
        data = _slice(self.folder / name, offset, length)
        if self.secret is None:
            return data
        check(data[:4] == b"ODRS", "magic of a sealed record")
        (checksum,) = struct.unpack("<Q", data[-8:])
        check(xxhash.xxh3_64_intdigest(data[:-8]) == checksum, "sealed record")
        attempt, process, number = name.split("-")
        place = int(process[1:]), int(number), offset
        return unseal(self.secret, attempt, place, data[4:-8], None)


def derived(secret: bytes, attempt: str, info: str, size: int) -> bytes:
    """What a user's key is used for (8.10), by RFC 5869 itself."""
    pseudo = hmac.digest(bytes.fromhex(attempt) or bytes(32), secret, "sha256")
    return hmac.digest(pseudo, info.encode() + b"\1", "sha256")[:size]


def unseal(
    secret: bytes,
    attempt: str,
    place: tuple[int, int, int],
    sealed: bytes,
    header: bytes | None,
) -> bytes:
    """What was sealed in a place (5.2)."""
    key = AESGCM(derived(secret, attempt, "orbax_delta seal", 32))
    try:
        return key.decrypt(struct.pack("<III", *place), sealed, header)
    except InvalidTag as error:
        raise DamagedError(f"tag at {place}") from error


def _slice(path: Path, offset: int, length: int) -> bytes:
    check(length >= 40 and offset + length <= path.stat().st_size, f"range of {path}")
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def unzstd(frame: bytes, size: int) -> bytes:
    """One frame of a known size (4.3)."""
    check(frame[:4] == b"\x28\xb5\x2f\xfd", "magic of a zstd frame")
    check(zstandard.frame_content_size(frame) == size, "size of a zstd frame")
    check(size <= 32768 * len(frame), "a zstd frame that announces too much")
    check(zstandard.get_frame_parameters(frame).dict_id == 0, "a zstd dictionary")
    stream = zstandard.ZstdDecompressor().decompressobj()
    data = stream.decompress(frame)
    check(stream.eof and not stream.unused_data, "end of a zstd frame")
    check(len(data) == size, "size of a zstd frame")
    return data


class _Payload:
    """A payload, read from front to end (4.2)."""

    def __init__(self, data: bytes, count: int, word: int) -> None:
        self.data, self.count, self.word = data, count, word

    def take(self, size: int) -> bytes:
        check(size <= len(self.data), "a payload ends too early")
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def planes(self, count: int, word: int) -> np.ndarray:
        planes = np.zeros((count, word), np.uint8)
        for number in range(word):
            method, length = struct.unpack("<BI", self.take(5))
            data = self.take(length)
            check(method in (0, 1, 2), "method of a plane")
            check(length == (count, length, 1)[method], "length of a plane")
            if method == 1:
                data = unzstd(data, count)
            planes[:, number] = np.frombuffer(data, np.uint8)
        return planes.reshape(-1).view(f"<u{word}")

    def last(self, count: int) -> np.ndarray:
        words = self.planes(count, self.word)
        check(not self.data, "something follows the last plane")
        return words


def _added(base: np.ndarray, z: np.ndarray) -> np.ndarray:
    """`base` after the differences of which z are the zigzag numbers (4.5)."""
    return base + ((z >> 1) ^ (0 - (z & 1)))


def _difference(payload: _Payload, base: np.ndarray) -> np.ndarray:
    return _added(base, payload.last(payload.count))


def _blocks(payload: _Payload, base: np.ndarray) -> np.ndarray:
    count = -(-base.nbytes // BLOCK)
    bitmap = np.frombuffer(payload.take(-(-count // 8)), np.uint8)
    stored = np.unpackbits(bitmap, bitorder="little").astype(bool)
    check(not stored[count:].any(), "bits past the last block")
    changed = np.repeat(stored[:count], BLOCK // payload.word)[: payload.count]
    new = base.copy()
    new[changed] = _added(base[changed], payload.last(int(changed.sum())))
    return new


def _sparse(payload: _Payload, base: np.ndarray) -> np.ndarray:
    width, count = struct.unpack("<BI", payload.take(5))
    check(width in (1, 2, 4) and count <= payload.count, "header of a sparse record")
    gaps = payload.planes(count, width).astype(np.uint64)
    where = np.cumsum(gaps + np.uint64(1)) - np.uint64(1)
    check(not count or where[-1] < payload.count, "an index past the end")
    new = base.copy()
    new[where] = _added(base[where], payload.last(count))
    return new


# --- grids (4.8 to 4.10) --------------------------------------------------------------


def _packed(payload: _Payload, count: int) -> np.ndarray:
    lane, width, apart = struct.unpack("<BBI", payload.take(6))
    check(lane in (1, 2, 4, 8) and width in (1, 2, 4), "header of packed numbers")
    packed = payload.planes(-(-count * lane // 8), 1)
    shifts = np.arange(0, 8, lane, dtype=np.uint8)
    lanes = ((packed[:, None] >> shifts) & (2**lane - 1)).reshape(-1)
    z = lanes[:count].astype(np.uint64)
    check(not lanes[count:].any(), "lanes past the last number")
    check((z == 2**lane - 1).sum() == apart, "numbers that stand apart")
    z[z == 2**lane - 1] += payload.planes(apart, width).astype(np.uint64)
    check(not (z >= 2**32).any(), "a number that is too large")
    check(not payload.data, "something follows the numbers")
    return np.array([n >> 1 if n % 2 == 0 else ~(n >> 1) for n in z.tolist()], np.int64)


def _grid(payload: _Payload) -> tuple[int, int, np.ndarray, np.float32, np.float32]:
    kind, shift, reserved, seed, start = struct.unpack("<BBHII", payload.take(12))
    step, floor = np.frombuffer(payload.take(8), "<f4")
    check(kind in (1, 2, 3, 4) and not reserved and start < 2**18, "kind of a grid")
    check(8 <= shift <= 24 if kind in (2, 4) else not shift, "shift of a grid")
    check(step == 0 if kind in (2, 4) else 2.0**-126 <= step < np.inf, "step of a grid")
    check(0 <= floor < np.inf if kind == 3 else floor == 0, "floor of a grid")
    check(kind in (1, 2) or not seed, "dither of a grid")
    m = (np.arange(payload.count, dtype=np.uint64) + np.uint64(start)) % 2**18
    m = (m + np.uint64(seed * 0x9E3779B1 % 2**32)) % 2**32
    m = (m ^ (m >> 16)) * 0x85EBCA6B % 2**32
    m = (m ^ (m >> 13)) * 0xC2B2AE35 % 2**32
    h = (m ^ (m >> 16)) >> 24
    return kind, shift, h.astype(np.int64) if seed else None, step, floor


def _codes(x: np.ndarray, grid: Any) -> np.ndarray:
    kind, shift, h, step, _ = grid
    if kind == 4:
        return x.view("<i4").astype(np.int64) >> shift
    if kind == 2:
        o = 0 if h is None else h << (shift - 8)
        c = ((x.astype(np.int64) + o) >> shift) + 1
        return np.where((x == 0) | (x >= 0x7F800000), 0, c)
    c = x.view("<f4") / step
    if h is not None:
        c = c + (h.astype(np.float32) - np.float32(127.5)) / np.float32(256)
    c = np.rint(c)
    return np.where(np.abs(c) < 2**23, c, 0).astype(np.int64)


def _values(c: np.ndarray, grid: Any, base: np.ndarray) -> np.ndarray:
    kind, shift, h, step, floor = grid
    if kind == 4:
        return (c << shift).astype("<u4")
    if kind == 2:
        o = 0 if h is None else h << (shift - 8)
        w = ((c - 1) << shift) + 2 ** (shift - 1) - o
        return np.where(c == 0, 0, np.clip(w, 1, 0x7F7FFFFF)).astype("<u4")
    f = c.astype(np.float32)
    if kind == 3:
        return (f * ((np.sqrt(base.view("<f4")) + floor) * step)).view("<u4")
    if h is not None:
        f = f - (h.astype(np.float32) - np.float32(127.5)) / np.float32(256)
    return (f * step).view("<u4")


def _on_grid(form: int) -> Any:
    def decode(payload: _Payload, base: np.ndarray) -> np.ndarray:
        check(payload.word == 4, "words of a grid")
        with np.errstate(all="ignore"):
            grid = _grid(payload)
            check((grid[0] == 3) == (form == RELATIVE), "kind of a grid")
            (centre,) = struct.unpack("<i", payload.take(4))
            c = _packed(payload, payload.count) + centre
            if form == GRID_CHANGE:
                c += _codes(base, grid)
            c = (c + 2**31) % 2**32 - 2**31
            return _values(c, grid, base)

    return decode


_DECODERS = {
    PLANES: lambda payload, base: payload.last(payload.count),
    DIFFERENCE: _difference,
    BLOCKS: _blocks,
    SPARSE: _sparse,
    **{form: _on_grid(form) for form in (GRID, GRID_CHANGE, RELATIVE)},
}


# --- casts (3.4) --------------------------------------------------------------------


def _bfloat16(w: np.ndarray) -> np.ndarray:
    check(not ((w & 0x7FFFFFFF) > 0x7F800000).any(), "a cast of NaN")
    return ((w.astype(np.uint64) + 0x7FFF + ((w >> 16) & 1)) >> 16).astype("<u2")


def _float16(w: np.ndarray) -> np.ndarray:
    check(not ((w & 0x7FFFFFFF) > 0x7F800000).any(), "a cast of NaN")
    return np.array([_half(int(word)) for word in w], "<u2")


def _half(w: int) -> int:
    s, a = (w >> 16) & 0x8000, w & 0x7FFFFFFF
    if a >= 0x477FF000:
        return s | 0x7C00
    if a >= 0x38800000:
        b = a - 0x38000000
        return s | ((b + 0xFFF + ((b >> 13) & 1)) >> 13)
    if a >= 0x33000000:
        m, d = (a & 0x7FFFFF) | 0x800000, 126 - (a >> 23)
        return s | ((m + (1 << (d - 1)) - 1 + ((m >> d) & 1)) >> d)
    return s
