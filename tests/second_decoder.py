"""What the rows of a step stand for: the decoding half of the second reader.

Like `second_reader`, written from FORMAT.md alone; numbers in comments are sections.
"""

import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

FULL, CONSTANT, PLANES, DIFFERENCE, BLOCKS, SPARSE = (1, 2), 1, 2, 3, 4, 5
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


def content(
    row: Row, elements: int, dtype: str, word: int, folder: Path, packs: list[str]
) -> bytes:
    """Content of a chunk, its digest checked; packed types one byte an element."""
    bits = PACKED.get(dtype, 8 * sizes(dtype)[0])
    size = -(-elements * bits // 8)
    if row.rule:
        words = _list(row, 2 * size, 4, folder, packs)
        content = (_bfloat16 if row.rule == 1 else _float16)(words).tobytes()
    else:
        content = _list(row, size, word, folder, packs).tobytes()
    check(xxhash.xxh3_128_digest(content) == row.digest, "digest of a chunk")
    if dtype not in PACKED:
        return content
    spread = np.frombuffer(content, np.uint8)[:, None] >> np.arange(0, 8, bits)
    spread = (spread & ((1 << bits) - 1)).astype(np.uint8).reshape(-1)
    check(not spread[elements:].any(), "bits after the last element")
    return spread[:elements].tobytes()


def _list(row: Row, size: int, word: int, folder: Path, packs: list[str]) -> np.ndarray:
    """What the records of a list yield, as words (7.4)."""
    words = np.zeros(0, f"<u{word}")
    check(size <= NO_PACK, "content of a record")
    for form, pack, offset, length in row.refs:
        if form == CONSTANT:
            stored = struct.pack("<II", offset, length)
            check(not any(stored[word:]), "word of a constant")
            words = np.full(size // word, np.frombuffer(stored[:word], words.dtype)[0])
            continue
        data = _slice(folder / packs[pack], offset, length)
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


_DECODERS = {
    PLANES: lambda payload, base: payload.last(payload.count),
    DIFFERENCE: _difference,
    BLOCKS: _blocks,
    SPARSE: _sparse,
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
