"""Sealed records and parts: their bytes, and what does not open."""

import dataclasses
import hmac
import sys

import hypothesis
import hypothesis.strategies as st
import pytest
import second_decoder

from orbax_delta import records, sealing
from orbax_delta.codecs import Form
from orbax_delta.errors import CorruptionError, InvalidInputError
from orbax_delta.sealing import Key, RecordPlace

SECRET = bytes(range(32))
KEY = Key(id="test", secret=SECRET)
ATTEMPT = bytes.fromhex("0123456789abcdef" * 2)
PACK = f"{ATTEMPT.hex()}-p3-7"
PLACE = RecordPlace.of(PACK, 32)

GOLDEN = bytes.fromhex(
    "4f445253589a00e7d0a548f78ac7240fed385f929bf889f32f5061260f0a906740f7"
)
"""`b"record"` sealed at `PLACE`."""


def test_a_sealed_record_is_these_bytes():
    """Magic, what AES-256-GCM makes of it, its tag, a checksum."""
    sealed = b"".join(KEY.seal_record(PLACE, (b"rec", memoryview(b"ord"))))
    assert sealed == GOLDEN
    assert len(sealed) == len(b"record") + sealing.SEALED_OVERHEAD_BYTES
    assert bytes(KEY.open_record(PLACE, memoryview(sealed))) == b"record"


def test_what_is_made_of_a_key_is_these_bytes():
    """By RFC 5869, step by step."""
    pseudo = hmac.digest(ATTEMPT, SECRET, "sha256")
    check = hmac.digest(pseudo, b"orbax_delta check\1", "sha256")[:16]
    assert KEY.check(ATTEMPT) == check.hex() == "04074952993f6fcf5c496840a885c369"
    assert KEY.fingerprint == "23b23abc52af1017"
    assert sealing.fingerprint(None) == ""
    assert SECRET.hex() not in repr(KEY)
    assert repr(SECRET) not in repr(KEY)


@hypothesis.given(
    data=st.binary(max_size=300),
    secret=st.binary(min_size=32, max_size=32),
    attempt=st.binary(min_size=16, max_size=16),
    numbers=st.tuples(*[st.integers(0, 999_999_999)] * 2, st.integers(0, 2**32 - 1)),
)
def test_the_second_reader_opens_what_was_sealed(data, secret, attempt, numbers):
    """Any record, key and place."""
    place = RecordPlace(attempt, *numbers)
    sealed = b"".join(Key(id="", secret=secret).seal_record(place, (data,)))
    opened = second_decoder.unseal(secret, attempt.hex(), numbers, sealed[4:-8], None)
    assert opened == data
    assert len(data) < 8 or data not in sealed


@hypothesis.given(data=st.data())
def test_nothing_opens_elsewhere_or_changed(data):
    """Any other place, key or bit."""
    sealed = bytearray(GOLDEN)
    key, place = KEY, PLACE
    match data.draw(st.sampled_from(["place", "key", "bit", "length"])):
        case "place":
            field = data.draw(st.sampled_from(["process", "number", "offset"]))
            other = data.draw(st.integers(0, 1 << 31))
            hypothesis.assume(other != getattr(place, field))
            place = dataclasses.replace(place, **{field: other})
        case "key":
            key = Key(id="test", secret=data.draw(st.binary(min_size=32, max_size=32)))
            hypothesis.assume(key != KEY)
        case "bit":
            bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
            sealed[bit // 8] ^= 1 << bit % 8
        case "length":
            del sealed[data.draw(st.integers(0, len(sealed) - 1)) :]
    with pytest.raises(CorruptionError, match=r"sealed record|does not open with key"):
        key.open_record(place, memoryview(bytes(sealed)))


def test_a_change_behind_a_good_checksum():
    """Who computes the checksum has no key."""
    changed = bytearray(GOLDEN[:-8])
    changed[6] ^= 1
    changed += records.checksum(bytes(changed)).to_bytes(8, "little")
    records.check_record(memoryview(bytes(changed)))
    with pytest.raises(CorruptionError, match="does not open with key test"):
        KEY.open_record(PLACE, memoryview(bytes(changed)))


def test_parts_are_bound_to_their_header():
    """Columns open with their own header, process and attempt alone."""
    sealed = memoryview(KEY.seal_part(ATTEMPT, 1, b"head", b"columns"))
    assert KEY.open_part(ATTEMPT, 1, b"head", sealed) == b"columns"
    for attempt, process, head in (
        (bytes(16), 1, b"head"),
        (ATTEMPT, 2, b"head"),
        (ATTEMPT, 1, b"HEAD"),
    ):
        with pytest.raises(CorruptionError, match="a part does not open with key test"):
            KEY.open_part(attempt, process, head, sealed)
    with pytest.raises(
        CorruptionError, match="a part of 3 bytes has no room for a tag"
    ):
        KEY.open_part(ATTEMPT, 1, b"head", sealed[:3])


def test_equal_contents_are_different_bytes():
    """In another place, of another attempt, under another key."""
    others = [
        KEY.seal_record(dataclasses.replace(PLACE, offset=64), (b"record",)),
        KEY.seal_record(dataclasses.replace(PLACE, attempt=bytes(16)), (b"record",)),
        Key(id="test", secret=bytes(32)).seal_record(PLACE, (b"record",)),
    ]
    bodies = [GOLDEN[4:-24], *(sealed[:-16] for _, sealed, _ in others)]
    assert len(set(bodies)) == len(bodies)


def test_a_pack_of_sealed_records():
    """Its index is in the clear; records are looked at without the key."""
    record = records.Record(
        form=Form.PLANES,
        word_bytes=1,
        content_bytes=5,
        content_digest=records.digest(b"aaaab"),
        payload=b"\0\5\0\0\0aaaab",
    )
    builder = records.PackBuilder(ATTEMPT, 7, process=3, key=KEY)
    offset, length = builder.add(record.pieces())
    pack = memoryview(b"".join(builder.finish()))
    assert records.parse_pack(pack).spans == ((offset, length),)
    stored = pack[offset : offset + length]
    records.check_record(stored)
    with pytest.raises(CorruptionError, match="a record begins with b'ODRS'"):
        records.parse_record(stored)
    place = RecordPlace.of(PACK, offset)
    assert records.parse_record(KEY.open_record(place, stored)) == record


def test_without_the_library(monkeypatch):
    """The extra is named."""
    monkeypatch.setitem(
        sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None
    )
    with pytest.raises(InvalidInputError, match=r"pip install 'orbax-delta\[crypt\]'"):
        sealing.require()
