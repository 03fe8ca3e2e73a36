"""Encryption of records and parts: AES-256-GCM (FORMAT.md sections 5.2, 7.2 and 8.10).

Every attempt has keys of its own, made of the user's key and the attempt's random bits,
and what is sealed with them is numbered by its place. So no number is used twice with a
key, none has to be stored, and nothing opens in a place that is not its own. Pure
bytes. Does not belong here: where a user's key comes from (`keys`).
"""

import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from orbax_delta.errors import CorruptionError, InvalidInputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
SEALED_MAGIC = b"ODRS"
TAG_BYTES = 16
_CHECKSUM = struct.Struct("<Q")
SEALED_OVERHEAD_BYTES = len(SEALED_MAGIC) + TAG_BYTES + _CHECKSUM.size

_PLACE = struct.Struct("<III")
# No pack has this number (FORMAT.md, section 2.1).
_PART_NUMBER = 0xFFFFFFFF

_FOR_SEALING = b"orbax_delta seal"
_FOR_CHECK = b"orbax_delta check"
_FOR_PRINT = b"orbax_delta print"
_CHECK_BYTES = 16
_PRINT_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A user's key.

    Attributes:
        id: By which a MANIFEST names it.
        secret: Its 32 bytes.
    """

    id: str
    secret: bytes = dataclasses.field(repr=False)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits by which keys are told apart, and nothing more."""
        return _derived(self.secret, b"", _FOR_PRINT, _PRINT_BYTES).hex()

    def check(self, attempt: bytes) -> str:
        """What the MANIFEST of an attempt says to know its key by."""
        return _derived(self.secret, attempt, _FOR_CHECK, _CHECK_BYTES).hex()

    def seal_record(
        self, place: "RecordPlace", record: Sequence[bytes | memoryview]
    ) -> tuple[bytes, ...]:
        """A record as it lies in a pack, in pieces."""
        sealed = _cipher(self.secret, place.attempt).encrypt(
            _PLACE.pack(place.process, place.number, place.offset),
            b"".join(record),
            None,
        )
        total = xxhash.xxh3_64(SEALED_MAGIC)
        total.update(sealed)
        return SEALED_MAGIC, sealed, _CHECKSUM.pack(total.intdigest())

    def open_record(self, place: "RecordPlace", data: memoryview) -> memoryview:
        """The record that lies sealed in a place.

        Raises:
            CorruptionError: It is damaged, or was sealed elsewhere or by another key.
        """
        check_sealed(data)
        number = _PLACE.pack(place.process, place.number, place.offset)
        sealed = data[len(SEALED_MAGIC) : -_CHECKSUM.size]
        return memoryview(self._open(place.attempt, number, sealed, None, "a record"))

    def seal_part(
        self, attempt: bytes, process: int, head: bytes, body: bytes
    ) -> bytes:
        """The columns of a part, sealed together with its header."""
        number = _PLACE.pack(process, _PART_NUMBER, 0)
        return _cipher(self.secret, attempt).encrypt(number, body, head)

    def open_part(
        self, attempt: bytes, process: int, head: bytes, body: memoryview
    ) -> bytes:
        """The columns of a part.

        Raises:
            CorruptionError: They are damaged, or were sealed elsewhere.
        """
        number = _PLACE.pack(process, _PART_NUMBER, 0)
        return self._open(attempt, number, body, head, "a part")

    def _open(
        self,
        attempt: bytes,
        number: bytes,
        sealed: memoryview,
        beside: bytes | None,
        what: str,
    ) -> bytes:
        from cryptography.exceptions import InvalidTag

        if len(sealed) < TAG_BYTES:
            raise CorruptionError(
                f"{what} of {len(sealed)} bytes has no room for a tag"
            )
        try:
            return _cipher(self.secret, attempt).decrypt(number, sealed, beside)
        except InvalidTag:
            raise CorruptionError(
                f"{what} does not open with key {self.id}, which the step was written "
                "with: its bytes were changed, or it was moved here from elsewhere"
            ) from None


def fingerprint(key: Key | None) -> str:
    """That of a key; empty for none."""
    return "" if key is None else key.fingerprint


@dataclasses.dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where a record lies: its pack's attempt, process and number, and its offset."""

    attempt: bytes
    process: int
    number: int
    offset: int

    @classmethod
    def of(cls, pack: str, offset: int) -> "RecordPlace":
        """The place in a pack of this name."""
        attempt, process, number = _names(pack)
        return cls(attempt, process, number, offset)


@functools.lru_cache(maxsize=1 << 10)
def _names(pack: str) -> tuple[bytes, int, int]:
    attempt, process, number = pack.split("-")
    return bytes.fromhex(attempt), int(process[1:]), int(number)


def is_sealed(data: memoryview) -> bool:
    """Whether a record is sealed."""
    return bytes(data[: len(SEALED_MAGIC)]) == SEALED_MAGIC


def check_sealed(data: memoryview) -> None:
    """Look at a sealed record without its key.

    Raises:
        CorruptionError: It is none, or its checksum does not match.
    """
    if len(data) < SEALED_OVERHEAD_BYTES or not is_sealed(data):
        raise CorruptionError(
            f"a sealed record of {len(data)} bytes begins with {bytes(data[:4])!r}; "
            f"expected {SEALED_MAGIC!r} and at least {SEALED_OVERHEAD_BYTES} bytes"
        )
    (expected,) = _CHECKSUM.unpack(data[-_CHECKSUM.size :])
    if xxhash.xxh3_64_intdigest(data[: -_CHECKSUM.size]) != expected:
        raise CorruptionError("the checksum of a sealed record does not match")


def require() -> None:
    """See that the library is there before anything is written.

    Raises:
        InvalidInputError: It is not installed.
    """
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError as error:
        raise InvalidInputError(
            "encryption needs the package `cryptography`: install the extra, "
            "pip install 'orbax-delta[crypt]'"
        ) from error


@functools.lru_cache(maxsize=1 << 10)
def _cipher(secret: bytes, attempt: bytes) -> "AESGCM":
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(_derived(secret, attempt, _FOR_SEALING, KEY_BYTES))


@functools.lru_cache(maxsize=1 << 10)
def _derived(secret: bytes, salt: bytes, purpose: bytes, length: int) -> bytes:
    """HKDF of RFC 5869 with SHA-256."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    kdf = HKDF(algorithm=SHA256(), length=length, salt=salt, info=purpose)
    return kdf.derive(secret)
