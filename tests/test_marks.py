"""Pins, condemned marks and STORE.json: literal bytes and typed errors on damage."""

import json
import os

import hypothesis
import hypothesis.strategies as st
import pytest
import xxhash

from orbax_delta import jsontext, marks, owners, store, storefiles
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    UnsupportedVersionError,
)
from orbax_delta.marks import Mark
from orbax_delta.owners import Owner

PACK = "00000000000000000000000000000000-p0-0"
GOLDEN_PIN = (
    b'{"digest": "c28933145af060d0582bd310a8d6cf49", "format_version": 1, '
    b'"owner": {"host": "node-1", "pid": 4711, "start": "99"}, '
    b'"packs": ["00000000000000000000000000000000-p0-0"]}'
)
PIN = Mark(owner=Owner(host="node-1", pid=4711, start="99"), packs=(PACK,))

GOLDEN_STORE = (
    b'{"digest": "b5ed919d1e77d8256d232349bdbc84f8", "format_version": 1, '
    b'"magic": "orbax-delta-store", "shared": false, '
    b'"uuid": "abababababababababababababababab"}\n'
)


def _parse(data):
    return marks.parse_mark(data, where="pins/x")


def _pin(**changes):
    """A pin with other fields, and the digest that these have."""
    return jsontext.sealed(json.loads(GOLDEN_PIN) | changes)


def _store_file(**changes):
    return jsontext.sealed(json.loads(GOLDEN_STORE) | changes)


def test_a_pin_is_these_bytes():
    """Literal JSON, keys sorted, and the same read back."""
    assert PIN.encode() == GOLDEN_PIN
    assert _parse(GOLDEN_PIN) == PIN


@hypothesis.given(
    st.text(), st.integers(1, (1 << 31) - 1), st.text(), st.integers(0, 30)
)
def test_any_mark_comes_back(host, pid, start, count):
    """Whatever hosts are called and however many packs are named."""
    packs = tuple(f"{'0f' * 16}-p0-{number}" for number in range(count))
    mark = Mark(owner=Owner(host=host, pid=pid, start=start), packs=packs)
    assert _parse(mark.encode()) == mark


@pytest.mark.parametrize("golden", [GOLDEN_PIN, GOLDEN_STORE], ids=["pin", "store"])
def test_a_changed_byte_is_noticed(golden):
    """All 255 other values at each byte; other white space and -0 mean the same."""
    parse = (
        _parse if golden is GOLDEN_PIN else lambda d: storefiles.parse_store(d, "r/")
    )
    spaces = bytes.maketrans(b"\t\r\n", b"   ")
    for position in range(len(golden)):
        damaged = bytearray(golden)
        for mask in range(1, 256):
            damaged[position] = golden[position] ^ mask
            text = bytes(damaged)
            plain = text.translate(spaces).replace(b"-0,", b" 0,")
            if plain == golden.translate(spaces):
                assert parse(text) == parse(golden)
                continue
            with pytest.raises(DeltaError, match=r"damaged|not|version"):
                parse(text)


def test_a_changed_name_is_noticed():
    """A digit changed in the name of a pack gives another name, and another digest."""
    damaged = GOLDEN_PIN.replace(b"00-p0-0", b"01-p0-0")
    with pytest.raises(CorruptionError, match=r"pins/x is damaged \(its digest is"):
        _parse(damaged)
    damaged = GOLDEN_STORE.replace(b'"ab', b'"bb')
    with pytest.raises(CorruptionError, match="repair` of this root writes it anew"):
        storefiles.parse_store(damaged, "r/")


def test_the_digest_is_that_of_the_canonical_text():
    """By hand: names sorted, no white space, ASCII only, the digest itself left out."""
    text = (
        '{"format_version":1,"owner":{"host":"node-1","pid":4711,"start":"99"},'
        f'"packs":["{PACK}"]}}'
    )
    expected = xxhash.xxh3_128_hexdigest(text.encode())
    assert json.loads(GOLDEN_PIN)["digest"] == expected
    document = {"digest": "x", "b": "\x7f\u00fc\U0001f600\n", "a": None}
    text = '{"a":null,"b":"\\u007f\\u00fc\\ud83d\\ude00\\n"}'
    assert jsontext.document_digest(document) == xxhash.xxh3_128_hexdigest(
        text.encode()
    )


def test_every_mark_that_is_cut_off_is_noticed():
    """Half a mark never counts as one."""
    for length in range(len(GOLDEN_PIN)):
        with pytest.raises(FormatError, match="pins/x is damaged"):
            _parse(GOLDEN_PIN[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"null",
        b"[0]",
        b"\xff",
        b"[" * 100_000,
        GOLDEN_PIN.replace(b'"pid": 4711', b'"pid": 4711, "pid": 4711'),
        GOLDEN_PIN.replace(b'"pid": 4711', b'"pid": NaN'),
        GOLDEN_PIN.replace(b'"pid": 4711', b'"pid": -Infinity'),
        GOLDEN_PIN.replace(b'"pid": 4711', b'"pid": 1e999'),
        GOLDEN_PIN.decode().encode("utf-16"),
        b"\xef\xbb\xbf" + GOLDEN_PIN,
        _pin(owner=None),
        _pin(owner={"host": "a", "pid": 1}),
        _pin(owner={"host": 1, "pid": 1, "start": ""}),
        _pin(owner={"host": "a", "pid": "1", "start": ""}),
        _pin(owner={"host": "a", "pid": True, "start": ""}),
        _pin(owner={"host": "a", "pid": 0, "start": ""}),
        _pin(owner={"host": "a", "pid": -1, "start": ""}),
        _pin(owner={"host": "a", "pid": 1 << 31, "start": ""}),
        _pin(owner={"host": "a", "pid": 1, "start": 5}),
        _pin(packs=None),
        _pin(packs=PACK),
        _pin(packs=[1]),
        _pin(packs=["../x"]),
        _pin(packs={"a": 1}),
    ],
)
def test_a_mark_that_no_writer_makes_is_refused(data):
    """A prune stops at what it cannot read, and never asks for process 0 or -1."""
    with pytest.raises(FormatError, match="no job is saving to this root, remove it"):
        _parse(data)


def test_a_newer_mark_is_not_guessed_at():
    """Its version is looked at before its digest and its fields."""
    newer = json.dumps({"format_version": 2, "digest": 5}).encode()
    with pytest.raises(UnsupportedVersionError, match="format version 2"):
        _parse(newer)
    with pytest.raises(UnsupportedVersionError, match="format version 2"):
        _parse(_pin(format_version=2, owner=None))


def test_marks_of_a_folder_are_read_by_name(tmp_path):
    """All of them, and a damaged one is named in full."""
    folder = store.Folder(str(tmp_path / "pins"))
    assert marks.read_marks(folder) == {}
    folder.write("a", GOLDEN_PIN)
    folder.write("b", GOLDEN_PIN)
    assert marks.read_marks(folder) == {"a": PIN, "b": PIN}
    folder.write("b", b"{")
    with pytest.raises(FormatError, match="pins/b is damaged"):
        marks.read_marks(folder)


def test_this_process_is_alive_and_others_are_known_by_number_and_start():
    """A number that another process took over is a dead owner; other hosts are not."""
    me = owners.this_process()
    assert me.pid == os.getpid()
    assert not me.known_dead
    assert not Owner(host="elsewhere", pid=me.pid, start="0").known_dead
    assert Owner(host=me.host, pid=(1 << 31) - 1, start=me.start).known_dead
    if me.start:
        assert Owner(host=me.host, pid=me.pid, start=me.start + "0").known_dead


def test_the_store_file_is_these_bytes():
    """Literal JSON of STORE.json, and its identity read back."""
    assert storefiles.store_document("ab" * 16) == GOLDEN_STORE
    found = storefiles.parse_store(GOLDEN_STORE, "root/STORE.json")
    assert found == storefiles.Identity(uuid="ab" * 16, shared=False)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", FormatError, "is not JSON"),
        (b"\xff", FormatError, "is not JSON"),
        (b"[" * 100_000, FormatError, "is not JSON"),
        (b"[]", FormatError, "not the file of a delta store"),
        (b'{"magic": 1}', FormatError, "not the file of a delta store"),
        (b'{"magic": "orbax-delta-store"}', FormatError, "no whole number"),
        (
            GOLDEN_STORE.replace(b'"format_version": 1', b'"format_version": 2'),
            UnsupportedVersionError,
            "format version 2",
        ),
        (GOLDEN_STORE.replace(b"uuid", b"name"), CorruptionError, "its digest is"),
        (GOLDEN_STORE.replace(b"digest", b"dagest"), CorruptionError, "says None"),
        (GOLDEN_STORE.replace(b": 1", b": 1, " * 2 + b'"x": 0'), FormatError, "JSON"),
        (
            GOLDEN_STORE.replace(b"{", b'{"uuid": "00", '),
            FormatError,
            "names 'uuid' twice",
        ),
        (_store_file(uuid=None), FormatError, "no uuid of 32 hexadecimal digits"),
        (_store_file(uuid=["ab" * 16]), FormatError, "has no uuid"),
        (_store_file(uuid="AB" * 16), FormatError, "has no uuid"),
        (_store_file(uuid="ab" * 17), FormatError, "has no uuid"),
        (_store_file(uuid="ab" * 16 + "\n"), FormatError, "has no uuid"),
        (_store_file(shared=1), FormatError, "does not say whether it is shared"),
        (_store_file(shared=None), FormatError, "does not say whether it is shared"),
    ],
)
def test_a_damaged_store_file_is_refused(data, error, message):
    """Nothing is saved to, or pruned from, a store that cannot be told apart."""
    with pytest.raises(error, match=message):
        storefiles.parse_store(data, "root/_delta_store/STORE.json")
