"""zstd frames that bound their reader's memory (FORMAT.md sections 4.3 and 13.2).

What a frame is to hold is known before it is unpacked, and compared with its size. Does
not belong here: what is in a frame, with which parameters planes are coded.
"""

import struct
import threading
from collections.abc import Sequence
from typing import Any

import zstandard

from orbax_delta.errors import CorruptionError

# A block of a zstd frame takes 4 bytes or more and yields at most 128 KiB.
_MAX_EXPANSION = 1 << 15
# What the frame of a MANIFEST or a part may hold: this much, and this much a byte.
FREE_TEXT_BYTES = 1 << 20
MAX_TEXT_RATIO = 1 << 10
_FRAME_HEAD = struct.Struct("<IBQ")
_FRAME_MAGIC = 0xFD2FB528
_FRAME_MAGIC_BYTES = _FRAME_MAGIC.to_bytes(4, "little")
_EMPTY_FRAME_BYTES = 32
_SINGLE_SEGMENT_SIZE_IN_8_BYTES = 0xE0
_MAX_BLOCK_BYTES = 128 << 10
_FEATURES = zstandard.backend_features
# Fewer frames take less by themselves.
_MANY = 4


class _Decoders(threading.local):
    """zstd contexts are not safe to share between threads."""

    def __init__(self) -> None:
        self.decoder = zstandard.ZstdDecompressor()


_decoders = _Decoders()


def most_text(frame_bytes: int) -> int:
    """The most bytes that a frame of a MANIFEST or a part may hold."""
    return FREE_TEXT_BYTES + MAX_TEXT_RATIO * frame_bytes


def compress_text(text: bytes, level: int) -> bytes:
    """A frame of `text` that holds no more than `most_text` allows.

    A reader must be able to bound its memory by the size of the file, so what zstd
    would shrink further than that is stored as it is.
    """
    frame = zstandard.ZstdCompressor(level=level).compress(text)
    return frame if len(text) <= most_text(len(frame)) else _stored_frame(text)


def _stored_frame(text: bytes) -> bytes:
    """A zstd frame of raw blocks (RFC 8878, sections 3.1.1.1 and 3.1.1.2)."""
    parts = [_FRAME_HEAD.pack(_FRAME_MAGIC, _SINGLE_SEGMENT_SIZE_IN_8_BYTES, len(text))]
    for start in range(0, len(text), _MAX_BLOCK_BYTES):
        block = text[start : start + _MAX_BLOCK_BYTES]
        last = start + len(block) == len(text)
        parts += ((len(block) << 3 | last).to_bytes(3, "little"), block)
    return b"".join(parts)


def decompress_text(data: bytes | memoryview, expected_bytes: int) -> bytes:
    """zstd-decode a MANIFEST's or part's frame of exactly `expected_bytes`.

    Raises:
        CorruptionError: As `decompress`, or it holds more than `most_text` allows.
    """
    if expected_bytes > most_text(len(data)):
        raise CorruptionError(
            f"a zstd frame of {len(data)} bytes is said to hold {expected_bytes}; "
            f"expected at most {most_text(len(data))}"
        )
    return decompress(data, expected_bytes)


def decompress(data: bytes | memoryview, expected_bytes: int) -> bytes:
    """zstd-decode exactly `expected_bytes`; the frame must announce that size.

    The announced size is checked before anything is allocated, so a small file cannot
    ask for much memory.

    Raises:
        CorruptionError: The frame is damaged, announces another size or more than it
            can hold, or bytes follow it.
    """
    if expected_bytes == 0:
        # zstandard looks at nothing but the header of a frame that holds nothing.
        _require_empty_frame(data)
        return b""
    try:
        announced = zstandard.frame_content_size(data)
        if announced != expected_bytes:
            raise CorruptionError(
                f"a zstd frame announces {announced} bytes; expected {expected_bytes}"
            )
        if expected_bytes > len(data) * _MAX_EXPANSION:
            raise CorruptionError(
                f"a zstd frame of {len(data)} bytes announces {announced}; no frame "
                f"holds more than {_MAX_EXPANSION} times its size"
            )
        content = _decoders.decoder.decompress(
            data, max_output_size=expected_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a zstd frame does not decode: {error}") from error
    if len(content) != expected_bytes:
        raise CorruptionError(
            f"a zstd frame decodes to {len(content)} bytes; expected {expected_bytes}"
        )
    return bytes(content)


def decompress_all(
    parts: Sequence[tuple[memoryview, int]],
) -> Sequence[Any]:
    """What `decompress` gives for each frame and its expected size.

    Small ones, of which there may be hundreds, take one call together: each call lets
    go of the interpreter's lock, and to get it back costs more than such a frame.

    Raises:
        CorruptionError: As `decompress`, of any of them.
    """
    together = len(parts) >= _MANY and "multi_decompress_to_buffer" in _FEATURES
    if not together or not all(_is_plain(data, size) for data, size in parts):
        return [decompress(data, size) for data, size in parts]
    sizes = struct.pack(f"={len(parts)}Q", *(size for _, size in parts))
    try:
        found: Any = _decoders.decoder.multi_decompress_to_buffer(
            [data for data, _ in parts], decompressed_sizes=sizes
        )
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a zstd frame does not decode: {error}") from error
    return list(found)


def _is_plain(data: memoryview, expected_bytes: int) -> bool:
    """Whether `data` is a frame of one block and nothing else (RFC 8878, 3.1.1).

    Decoding many at once looks neither at what a frame announces nor at what follows.
    """
    try:
        start = zstandard.frame_header_size(data)
        announced = zstandard.frame_content_size(data)
    except zstandard.ZstdError:
        return False
    block = int.from_bytes(data[start : start + 3], "little")
    last, raw_or_compressed = block & 1, not block >> 1 & 1
    fills = start + 3 + (block >> 3) == len(data)
    return (
        bool(last and raw_or_compressed and fills)
        and 0 < expected_bytes == announced
        and expected_bytes <= _MAX_BLOCK_BYTES
    )


def _require_empty_frame(data: bytes | memoryview) -> None:
    """Raise unless `data` is one whole frame that holds nothing.

    A longer one could hold much more than it announces before it is found out.
    """
    if len(data) > _EMPTY_FRAME_BYTES or not bytes(data).startswith(_FRAME_MAGIC_BYTES):
        raise CorruptionError(
            f"{len(data)} bytes are no zstd frame that holds nothing, as expected here"
        )
    try:
        decoder = zstandard.ZstdDecompressor().decompressobj()
        content = decoder.decompress(data)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a zstd frame does not decode: {error}") from error
    if content or not decoder.eof or decoder.unused_data:
        raise CorruptionError(
            f"a zstd frame of {len(data)} bytes is not one whole frame that holds "
            "nothing"
        )
