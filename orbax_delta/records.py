"""The bytes of a record and of a pack (FORMAT.md sections 5 and 6).

A record says what it is, how large its content is, which content it yields and carries
a checksum over all of that. A pack is a header, records and a footer index with its
own checksum. Pure bytes: no I/O, no jax.
"""

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from orbax_delta.codecs import FORM_NUMBERS, Bytes, Form, Payload
from orbax_delta.errors import CorruptionError, FormatError, UnsupportedVersionError
from orbax_delta.options import MAX_CHUNK_BYTES
from orbax_delta.sealing import Key, RecordPlace, check_sealed, is_sealed

FORMAT_VERSION = 1

RECORD_MAGIC = b"ODR0"
PACK_MAGIC = b"ODPACK\r\n"
PACK_END_MAGIC = b"ODPKEND\n"

_RECORD_HEAD = struct.Struct("<4sBBHII16s")
_CHECKSUM = struct.Struct("<Q")
_PACK_HEAD = struct.Struct("<8sHHI16s")
_VERSION_HEAD = struct.Struct("<8sH")
_INDEX_ENTRY = struct.Struct("<II")
_PACK_TAIL = struct.Struct("<II16s8s")

RECORD_HEAD_BYTES = _RECORD_HEAD.size
RECORD_OVERHEAD_BYTES = _RECORD_HEAD.size + _CHECKSUM.size

DIGEST_BYTES = 16

Pieces = tuple[bytes | memoryview, ...]
"""An encoded record, to be joined once: in its pack."""


def digest(content: Bytes | bytes | memoryview) -> bytes:
    """128-bit xxh3 of `content`, 16 bytes, big-endian as xxhash prints it."""
    data = content.data if isinstance(content, np.ndarray) else content
    return xxhash.xxh3_128_digest(data)


def checksum(data: bytes | memoryview) -> int:
    """64-bit xxh3 of stored bytes."""
    return xxhash.xxh3_64_intdigest(data)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One coded piece of a chunk.

    Attributes:
        form: What `payload` means.
        word_bytes: Element size that the coder used.
        content_bytes: Size of the decoded content.
        content_digest: `digest` of the decoded content.
        payload: Coded bytes.
    """

    form: Form
    word_bytes: int
    content_bytes: int
    content_digest: bytes
    payload: bytes | memoryview

    @property
    def sparse(self) -> Payload:
        """What `codecs.unpack` wants of a record of form SPARSE."""
        return memoryview(self.payload), self.content_bytes, self.word_bytes

    def encode(self) -> bytes:
        """Header, payload and checksum."""
        return b"".join(self.pieces())

    def pieces(self) -> Pieces:
        """What `encode` gives, with the payload as it is and not copied."""
        head = _RECORD_HEAD.pack(
            RECORD_MAGIC,
            self.form,
            self.word_bytes,
            0,
            self.content_bytes,
            len(self.payload),
            self.content_digest,
        )
        total = xxhash.xxh3_64(head)
        total.update(self.payload)
        return head, self.payload, _CHECKSUM.pack(total.intdigest())


def parse_record(data: memoryview) -> Record:
    """Read one record that fills `data` exactly.

    Raises:
        CorruptionError: Magic, lengths or checksum are wrong, or the form is unknown.
    """
    if len(data) < RECORD_OVERHEAD_BYTES:
        raise CorruptionError(f"a record of {len(data)} bytes has no room for a header")
    magic, form, word_bytes, flags, content_bytes, payload_bytes, content_digest = (
        _RECORD_HEAD.unpack_from(data)
    )
    body, stored = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    if magic != RECORD_MAGIC:
        raise CorruptionError(
            f"a record begins with {magic!r}; expected {RECORD_MAGIC!r}"
        )
    if payload_bytes != len(data) - RECORD_OVERHEAD_BYTES:
        raise CorruptionError(
            f"a record announces {payload_bytes} payload bytes; "
            f"{len(data) - RECORD_OVERHEAD_BYTES} are there"
        )
    if checksum(body) != _CHECKSUM.unpack(stored)[0]:
        raise CorruptionError("the checksum of a record's stored bytes does not match")
    # A constant stands in its row; a record of it is never written.
    known = form in FORM_NUMBERS and form != Form.CONSTANT
    if not known or word_bytes not in (1, 2, 4, 8) or flags:
        raise CorruptionError(
            f"a record has form {form}, word size {word_bytes}, flags {flags}; "
            "no such record in this format version"
        )
    if content_bytes % word_bytes or content_bytes > MAX_CHUNK_BYTES:
        raise CorruptionError(
            f"a record's content of {content_bytes} bytes is not made of whole words "
            f"of {word_bytes}, or is larger than {MAX_CHUNK_BYTES}"
        )
    return Record(
        form=Form(form),
        word_bytes=word_bytes,
        content_bytes=content_bytes,
        content_digest=content_digest,
        payload=body[_RECORD_HEAD.size :],
    )


def check_record(data: memoryview) -> None:
    """Look at a record as it lies in a pack; of a sealed one, at what needs no key.

    Raises:
        CorruptionError: It is damaged.
    """
    if is_sealed(data):
        check_sealed(data)
    else:
        parse_record(data)


def content_digest(head: memoryview) -> bytes:
    """Digest of the content that a record yields, by its header alone.

    No checksum covers a header by itself, so it is good for comparing with content and
    for nothing else.

    Raises:
        CorruptionError: It is not the header of a record.
    """
    if len(head) < _RECORD_HEAD.size or bytes(head[:4]) != RECORD_MAGIC:
        raise CorruptionError(
            f"a record begins with {bytes(head[:4])!r}, {len(head)} bytes are there; "
            f"expected {RECORD_MAGIC!r} and {_RECORD_HEAD.size}"
        )
    found: bytes = _RECORD_HEAD.unpack_from(head)[-1]
    return found


class PackBuilder:
    """Collects records into the bytes of one pack."""

    def __init__(
        self, attempt: bytes, number: int, *, process: int = 0, key: Key | None = None
    ) -> None:
        self.number = number
        self._attempt = attempt
        self._process = process
        self._key = key
        head = _PACK_HEAD.pack(PACK_MAGIC, FORMAT_VERSION, 0, number, attempt)
        self._pieces: list[bytes | memoryview] = [head]
        self._last: Pieces = ()
        self._spans: list[tuple[int, int]] = []
        self._size = _PACK_HEAD.size

    @property
    def size_bytes(self) -> int:
        """Bytes so far, without the footer."""
        return self._size

    @property
    def record_count(self) -> int:
        """Records so far."""
        return len(self._spans)

    def add(self, record: Pieces) -> tuple[int, int]:
        """Append an encoded record; returns its offset and its length there."""
        if self._key is not None:
            record = self._key.seal_record(self._place(self._size), record)
        span = (self._size, sum(map(len, record)))
        self._pieces += record
        self._spans.append(span)
        self._size += span[1]
        self._last = record
        return span

    def _place(self, offset: int) -> RecordPlace:
        return RecordPlace(self._attempt, self._process, self.number, offset)

    def finish(self) -> Pieces:
        """The whole pack; its last record has been parsed back from these bytes."""
        index = b"".join(_INDEX_ENTRY.pack(*span) for span in self._spans)
        signed = digest(b"".join((self._pieces[0], index)))
        tail = _PACK_TAIL.pack(len(self._spans), len(index), signed, PACK_END_MAGIC)
        last = memoryview(b"".join(self._last))
        if self._key is not None:
            last = self._key.open_record(self._place(self._spans[-1][0]), last)
        parse_record(last)
        return (*self._pieces, index, tail)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackIndex:
    """What a pack says about itself: its writer and where its records lie."""

    attempt: bytes
    number: int
    spans: Sequence[tuple[int, int]]


def parse_pack(pack: memoryview) -> PackIndex:
    """Read header and footer of a whole pack and check that they describe it.

    Raises:
        UnsupportedVersionError: A newer format wrote it.
        FormatError: It is not a pack.
        CorruptionError: Footer, index or spans are wrong.
    """
    check_magic(pack, PACK_MAGIC, "pack")
    if len(pack) < _PACK_HEAD.size + _PACK_TAIL.size:
        raise CorruptionError(f"a pack of {len(pack)} bytes is cut off")
    _, _, flags, number, attempt = _PACK_HEAD.unpack_from(pack)
    count, index_bytes, index_digest, end = _PACK_TAIL.unpack(pack[-_PACK_TAIL.size :])
    if end != PACK_END_MAGIC or index_bytes != count * _INDEX_ENTRY.size:
        raise CorruptionError("a pack's footer is damaged or cut off")
    index_start = len(pack) - _PACK_TAIL.size - index_bytes
    if index_start < _PACK_HEAD.size:
        raise CorruptionError("a pack's index is larger than the pack")
    index = pack[index_start : index_start + index_bytes]
    if digest(bytes(pack[: _PACK_HEAD.size]) + bytes(index)) != index_digest:
        raise CorruptionError("the digest of a pack's header and index does not match")
    if flags or not count:
        raise CorruptionError(
            f"a pack has flags {flags} and {count} records; this format version has no "
            "flags, and no pack is empty"
        )
    spans = tuple(_INDEX_ENTRY.iter_unpack(index))
    expected = _PACK_HEAD.size
    for offset, length in spans:
        if offset != expected:
            raise CorruptionError(
                f"a pack's records leave a hole: one begins at {offset}, "
                f"expected {expected}"
            )
        expected += length
    if expected != index_start:
        raise CorruptionError("a pack's records do not reach its index")
    return PackIndex(attempt=attempt, number=number, spans=spans)


PACK_END_BYTES = _INDEX_ENTRY.size + _PACK_TAIL.size
"""Of a pack's end: the last entry of its index and the tail tell the pack's size."""


def pack_bytes(end: bytes) -> int:
    """Size of a pack of which `end` is the last `PACK_END_BYTES`.

    Raises:
        CorruptionError: It is no end of a pack.
    """
    if len(end) != PACK_END_BYTES or not end.endswith(PACK_END_MAGIC):
        raise CorruptionError("a pack's footer is damaged or cut off")
    offset, length = _INDEX_ENTRY.unpack_from(end)
    _, index_bytes, _, _ = _PACK_TAIL.unpack_from(end, _INDEX_ENTRY.size)
    return int(offset + length + index_bytes + _PACK_TAIL.size)


def check_magic(data: bytes | memoryview, magic: bytes, what: str) -> None:
    """Magic and version of a pack or part, before anything that another one changes.

    Args:
        data: The file.
        magic: What it must begin with.
        what: What it is, for messages.

    Raises:
        CorruptionError: It is too short.
        FormatError: It begins with something else.
        UnsupportedVersionError: A newer format wrote it.
    """
    if len(data) < _VERSION_HEAD.size:
        raise CorruptionError(f"a {what} of {len(data)} bytes is cut off")
    found, version = _VERSION_HEAD.unpack_from(data)
    if found != magic:
        raise FormatError(f"a {what} begins with {found!r}; expected {magic!r}")
    if version != FORMAT_VERSION:
        raise UnsupportedVersionError(
            f"a {what} has format version {version}; this package reads "
            f"{FORMAT_VERSION}. Upgrade orbax_delta"
        )
