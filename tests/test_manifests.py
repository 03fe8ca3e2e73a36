"""MANIFEST: literal bytes, every field back, and typed errors on any damage."""

import copy
import dataclasses
import json
import re
import struct

import hypothesis
import hypothesis.strategies as st
import pytest
import xxhash
import zstandard

from orbax_delta import blocking, manifests
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    InvalidInputError,
    UnsupportedVersionError,
)
from orbax_delta.manifests import LeafEntry, Manifest, PartEntry
from orbax_delta.options import DeltaOptions
from orbax_delta.places import locate

ATTEMPT = "000102030405060708090a0b0c0d0e0f"
PACK = "00000000000000000000000000000000-p0-0"
GOLDEN_BODY = (
    '{"attempt":"000102030405060708090a0b0c0d0e0f",'
    '"custom_metadata":{"\\u00e9":[1,null]},'
    '"item":"default",'
    '"leaves":['
    '{"dtype":"","kind":"float","path":["lr"],"shape":[],"sharding":0,'
    '"value":"3fb999999999999a"},'
    '{"dtype":"float32","kind":"numpy","path":["w"],"shape":[2,3],"sharding":0,'
    '"value":null}],'
    '"options":{"chunk_bytes":64},'
    '"packs":["00000000000000000000000000000000-p0-0"],'
    '"parts":[{"digest":"cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd","length":310,'
    '"name":"part-000102030405060708090a0b0c0d0e0f-p0","packs":[0],"rows":1}],'
    '"predecessor":{"attempt":"0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f","step":"6"},'
    '"report":{"step":"7"},'
    '"required_features":[],'
    '"root_uuid":"",'
    '"save_index":3,'
    '"shardings":[null],'
    '"step":7,'
    '"store_url":"/run/_delta_store/",'
    '"store_uuid":"abababababababababababababababab",'
    '"tree":{"dict":[["lr",{"leaf":0}],["w",{"leaf":1}]]},'
    '"versions":{"numpy":"2.0.0"},'
    '"wall_time":1700000000.5}'
)


def _signed(document, line="ORBAX-DELTA-MANIFEST 1 {digest} {size}"):
    """A MANIFEST of any document, under a header that says it is right."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    frame = zstandard.ZstdCompressor().compress(text)
    header = line.format(digest=xxhash.xxh3_128_hexdigest(frame), size=len(text))
    return header.encode() + b"\n" + frame


GOLDEN = _signed(GOLDEN_BODY.encode())
MANIFEST = Manifest(
    attempt=ATTEMPT,
    step=7,
    item="default",
    wall_time=1700000000.5,
    save_index=3,
    predecessor={"step": "6", "attempt": "0f" * 16},
    store_uuid="ab" * 16,
    store_url="/run/_delta_store/",
    options={"chunk_bytes": 64},
    versions={"numpy": "2.0.0"},
    tree={"dict": [["lr", {"leaf": 0}], ["w", {"leaf": 1}]]},
    leaves=(
        LeafEntry(path=("lr",), kind="float", value="3fb999999999999a"),
        LeafEntry(path=("w",), kind="numpy", dtype="float32", shape=(2, 3)),
    ),
    packs=[PACK],
    parts=(
        PartEntry(
            name=f"part-{ATTEMPT}-p0",
            length=310,
            digest="cd" * 16,
            rows=1,
            packs=(0,),
        ),
    ),
    report={"step": "7"},
    custom_metadata={"é": [1, None]},
    required_features=[],
)
"""A step of a learning rate (0.1) and a matrix, in one part and one pack."""

ON_ONE_DEVICE = {
    "kind": "single",
    "platform": "cpu",
    "memory_kind": "device",
    "device": "TFRT_CPU_0",
    "device_id": 0,
}
ON_A_MESH = {
    "kind": "named",
    "platform": "tpu",
    "memory_kind": None,
    "mesh": {
        "shape": [2, 2, 1],
        "axis_names": ["x", "y", "z"],
        "axis_types": ["Auto", "Explicit", "Manual"],
        "device_ids": [3, 1, 0, 2],
    },
    "spec": ["x", None, ["z", "y"], []],
}

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


def _text(data):
    """The JSON of a MANIFEST."""
    return zstandard.ZstdDecompressor().decompress(data.split(b"\n", 1)[1])


def _parse(data):
    return manifests.parse_manifest(data, where="/run/7/default/MANIFEST")


def _document(**changes):
    return json.loads(GOLDEN_BODY) | changes


def _leaf(**changes):
    return json.loads(GOLDEN_BODY)["leaves"][1] | changes


def test_a_manifest_is_these_bytes():
    """Header line and JSON, literally: keys sorted, no spaces, ASCII only.

    Not the frame's own bytes: they differ between versions of zstd.
    """
    line, frame = manifests.encode_manifest(MANIFEST).split(b"\n", 1)
    digest = xxhash.xxh3_128_hexdigest(frame)
    assert line.decode() == f"ORBAX-DELTA-MANIFEST 1 {digest} 875"
    assert _text(line + b"\n" + frame) == GOLDEN_BODY.encode()


def test_these_bytes_are_that_step():
    """The literal MANIFEST reads as what it was written for."""
    assert _parse(GOLDEN) == MANIFEST
    (learning_rate,) = struct.unpack(">d", bytes.fromhex(MANIFEST.leaves[0].value))
    assert learning_rate == 0.1
    assert MANIFEST.full_bytes == 24
    assert MANIFEST.word_sizes() == [0, 4]
    assert not MANIFEST.self_contained


@st.composite
def _manifests(draw):
    shardings = [None, ON_ONE_DEVICE, ON_A_MESH]
    paths = draw(st.lists(st.lists(st.text(), max_size=3), max_size=5, unique_by=tuple))
    leaves = [
        LeafEntry(
            path=tuple(path),
            kind="jax",
            dtype=draw(
                st.sampled_from(["float32", "bfloat16", "int4", ">f8", "<M8[ns]"])
            ),
            shape=tuple(draw(st.lists(st.integers(0, 1 << 14), max_size=4))),
            sharding=draw(st.sampled_from(shardings)),
        )
        for path in paths
    ]
    count = draw(st.integers(0, 3))
    return dataclasses.replace(
        MANIFEST,
        step=draw(st.none() | st.integers(0, 10**18 - 1)),
        item=draw(st.text()),
        wall_time=draw(st.floats(0, 1e10)),
        save_index=draw(st.integers(0, 1 << 40)),
        predecessor=draw(st.none() | st.just({"step": "6", "attempt": ATTEMPT})),
        store_uuid=draw(st.sampled_from(["", "ab" * 16])),
        leaves=tuple(leaves),
        packs=[f"{ATTEMPT}-p0-{n}" for n in range(count)],
        parts=tuple(
            PartEntry(
                name=f"part-{ATTEMPT}-p{n}",
                length=n,
                digest=ATTEMPT,
                rows=n,
                packs=tuple(draw(st.permutations(range(count)))),
            )
            for n in range(draw(st.integers(0, 3)))
        ),
        report=draw(st.dictionaries(st.text(), JSON_VALUES, max_size=3)),
        custom_metadata=draw(JSON_VALUES),
    )


@hypothesis.given(_manifests())
def test_any_manifest_comes_back(manifest):
    """All fields survive, and equal manifests give equal bytes."""
    data = manifests.encode_manifest(manifest)
    assert _parse(data) == manifest
    assert manifests.encode_manifest(copy.deepcopy(manifest)) == data
    assert _text(data).isascii()


def test_every_change_of_a_byte_of_a_manifest_is_noticed():
    """Nine values at each byte of header and frame: thousands of damaged files."""
    for position in range(len(GOLDEN)):
        damaged = bytearray(GOLDEN)
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged[position] = GOLDEN[position] ^ mask
            with pytest.raises(DeltaError, match="/run/7/default/MANIFEST"):
                _parse(bytes(damaged))


def test_every_wrong_length_of_a_manifest_is_noticed():
    """Cut off anywhere, or with bytes added."""
    for length in range(len(GOLDEN)):
        with pytest.raises(DeltaError, match=r"does not begin|digest of"):
            _parse(GOLDEN[:length])
    with pytest.raises(CorruptionError, match="digest of"):
        _parse(GOLDEN + b"\n")


@hypothesis.given(st.binary(max_size=200))
def test_noise_is_no_manifest(data):
    """With and without a header line that is right."""
    for attempt in (data, _signed(data)):
        with pytest.raises(DeltaError, match="MANIFEST"):
            _parse(attempt)


def _places(document, path=()):
    """Every place in a JSON document, by the keys that lead there."""
    yield path
    children = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, child in children:
        yield from _places(child, (*path, key))


def _with(document, path, value):
    if not path:
        return value
    document = copy.deepcopy(document)
    inside = document
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return document


@hypothesis.given(st.sampled_from(list(_places(json.loads(GOLDEN_BODY)))), JSON_VALUES)
@hypothesis.settings(max_examples=300)
def test_any_value_in_any_place_is_read_or_a_typed_error(path, value):
    """A writer that signs nonsense gets FormatError, not a KeyError of ours."""
    try:
        manifest = _parse(_signed(_with(_document(), path, value)))
    except DeltaError:
        return
    assert manifest.word_sizes() is not None
    assert manifest.full_bytes >= 0
    assert all(isinstance(leaf.name, str) for leaf in manifest.leaves)


@pytest.mark.parametrize("name", sorted(json.loads(GOLDEN_BODY)))
def test_a_missing_field_is_refused(name):
    """No field has a default on disk."""
    document = _document()
    del document[name]
    with pytest.raises(FormatError, match=name):
        _parse(_signed(document))


@pytest.mark.parametrize(
    "name", ["path", "kind", "dtype", "shape", "sharding", "value"]
)
def test_a_missing_field_of_a_leaf_is_refused(name):
    """Nor has a field of a leaf."""
    leaf = _leaf()
    del leaf[name]
    with pytest.raises(FormatError, match="found the fields"):
        _parse(_signed(_document(leaves=[leaf])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": 1}, "expected .*'attempt'"),
        ({"attempt": ATTEMPT.upper()}, "'attempt' breaks the format"),
        ({"attempt": ATTEMPT[:-1]}, "'attempt' breaks the format"),
        ({"step": True}, "'step' is True"),
        ({"step": "7"}, "'step' is '7'"),
        ({"packs": [PACK, PACK]}, "'packs' breaks the format"),
        ({"packs": ["../../etc/passwd"]}, "'packs' breaks the format"),
        ({"packs": [f"{ATTEMPT}-p0-0\n"]}, "'packs' breaks the format"),
        ({"packs": [7]}, "'packs' breaks the format"),
        ({"parts": [{"name": "MANIFEST"}]}, "found the fields"),
        ({"shardings": []}, "there is no sharding 0"),
        ({"leaves": [_leaf(), _leaf()]}, "'leaves' breaks the format"),
        ({"leaves": [_leaf(sharding=1)]}, "there is no sharding 1"),
        ({"leaves": [_leaf(kind="pickle")]}, "unknown kind 'pickle'"),
        ({"leaves": [_leaf(dtype="float31")]}, "'float31' is not known"),
        ({"leaves": [_leaf(dtype="f4")]}, "not a name of this format"),
        ({"leaves": [_leaf(shape=[-1])]}, "has the shape"),
        ({"leaves": [_leaf(shape=[2.0])]}, "has the shape"),
        ({"leaves": [_leaf(shape=[True])]}, "has the shape"),
        ({"leaves": [_leaf(path=[1])]}, "has the path"),
        ({"leaves": [_leaf(value="x")]}, "has the value 'x'"),
        ({"leaves": [_leaf(kind="int", value="0x1f")]}, "is no array but"),
    ],
)
def test_a_field_that_no_writer_makes_is_refused(changes, message):
    """Each with words of its own, under a digest that is right."""
    with pytest.raises(FormatError, match=message):
        _parse(_signed(_document(**changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": -1}, "there can be no part"),
        ({"rows": -1}, "there can be no part"),
        ({"digest": "cd" * 15}, "there can be no part"),
        ({"length": 1.5}, "'length' is 1.5"),
        ({"packs": [1]}, "'parts' breaks the format"),
        ({"packs": [-1]}, "'parts' breaks the format"),
        ({"packs": [True]}, "'parts' breaks the format"),
        ({"packs": 0}, "'packs' is 0"),
        ({"name": f"part-{'0' * 32}-p0"}, "'parts' breaks the format"),
        ({"name": f"part-{ATTEMPT}-p0/../x"}, "'parts' breaks the format"),
    ],
)
def test_a_part_entry_that_no_writer_makes_is_refused(changes, message):
    """A part of another attempt, or outside the folder, is never opened."""
    part = json.loads(GOLDEN_BODY)["parts"][0] | changes
    with pytest.raises(FormatError, match=message):
        _parse(_signed(_document(parts=[part])))


VALUES = [
    ("bool", True),
    ("int", "-0x1f"),
    ("int", hex(1 << 5000)),
    ("float", "7ff8000000000001"),
    ("complex", ["3ff0000000000000", "8000000000000000"]),
]


@pytest.mark.parametrize(("kind", "value"), VALUES)
def test_values_of_python_leaves_are_read_as_they_are_written(kind, value):
    """Integers of any size and the bits of floats stand in the document."""
    leaf = _leaf(kind=kind, value=value, dtype="", shape=[])
    assert _parse(_signed(_document(leaves=[leaf]))).leaves[0].value == value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((kind, None) for kind in ("bool", "int", "float", "complex", "key")),
        *(("bool", value) for value in ("true", 1)),
        *(("int", value) for value in ("31", "0X1F", "0x", "-0x1_f", "٣", 31)),
        *(("float", value) for value in ("7ff8", "7FF8000000000001", 0.5)),
        *(("complex", value) for value in (["3ff0000000000000"], "1j", [1.0, 2.0])),
    ],
)
def test_a_value_written_in_another_way_is_refused(kind, value):
    """There is one way to write each value."""
    array = {} if kind == "key" else {"dtype": "", "shape": []}
    leaf = _leaf(kind=kind, value=value, **array)
    with pytest.raises(FormatError, match=r"has the value|'value' is"):
        _parse(_signed(_document(leaves=[leaf])))


@pytest.mark.parametrize(
    ("header", "error", "message"),
    [
        (
            "ORBAX-DELTA-MANIFEST 2 {digest} {size}",
            UnsupportedVersionError,
            "version 2",
        ),
        (
            "ORBAX-DELTA-MANIFEST 999999999 {digest} 0",
            UnsupportedVersionError,
            "Upgrade",
        ),
        ("ORBAX-DELTA-MANIFEST 1 {digest} 1", CorruptionError, "expected 1"),
        ("ORBAX-DELTA-MANIFEST 1 {digest} {size} ", FormatError, "does not begin with"),
        ("ORBAX-DELTA-MANIFEST -1 {digest} {size}", FormatError, "does not begin with"),
        ("orbax-delta-manifest 0 {digest} {size}", FormatError, "does not begin with"),
    ],
)
def test_the_version_is_looked_at_before_anything_else(header, error, message):
    """A newer MANIFEST is told from a damaged one, even if nothing else of it fits."""
    with pytest.raises(error, match=message):
        _parse(_signed(GOLDEN_BODY.encode(), header))


def test_an_unknown_required_feature_is_a_newer_format():
    """Also where the feature brought fields that this version does not know."""
    document = _document(required_features=["grids", "codes"], grids={})
    with pytest.raises(UnsupportedVersionError, match=r"\['codes', 'grids'\]"):
        _parse(_signed(document))


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"required_features":[],"a":' * 30_000,
        b"\xff\xfe",
        b"null",
        b"[]",
        b'{"required_features":0}',
        b'{"required_features":[],"step":' + b"1" * 5000 + b"}",
    ],
)
def test_a_document_that_is_no_object_is_refused(body):
    """Deep nesting, foreign encodings and other JSON end in a FormatError."""
    with pytest.raises(FormatError, match="MANIFEST"):
        _parse(_signed(body))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ((), "(root)"),
        (("",), ""),
        (("(root)",), "(root)"),
        (("a", "b"), "a/b"),
        (("a/b",), "a~1b"),
        (("a~1b",), "a~01b"),
        (("", ""), "/"),
    ],
)
def test_path_names_are_readable(path, name):
    """Slashes and tildes in keys are escaped as in RFC 6901."""
    assert manifests.path_name(path) == name


@hypothesis.given(
    st.lists(st.lists(st.text("a/~01(root)"), min_size=1), unique_by=tuple)
)
def test_no_two_paths_have_one_name(paths):
    """Rows are found by name: two leaves of one tree must never share one."""
    assert len({manifests.path_name(path) for path in paths}) == len(paths)


def test_names_say_which_attempt_a_file_belongs_to():
    """Packs and parts are named by attempt, process and number."""
    assert manifests.PACK_NAME.fullmatch(PACK)
    assert not manifests.PACK_NAME.fullmatch(PACK.replace("p0", "p"))
    named = manifests.PART_NAME.fullmatch(f"part-{ATTEMPT}-p12")
    assert named is not None
    assert named[1] == ATTEMPT


def test_leaves_share_their_shardings():
    """Each distinct sharding stands once in the file, whatever the number of leaves."""
    leaves = tuple(
        LeafEntry(
            path=(str(n),), kind="jax", dtype="int8", shape=(1,), sharding=ON_A_MESH
        )
        for n in range(20)
    )
    data = manifests.encode_manifest(dataclasses.replace(MANIFEST, leaves=leaves))
    assert len(re.findall(b'"named"', _text(data))) == 1
    assert _parse(data).leaves == leaves


@hypothesis.given(_manifests())
def test_a_manifest_is_the_plain_document_of_its_fields(manifest):
    """What is written without copying is what the fields say, one by one."""
    document = dataclasses.asdict(manifest)
    table = [None]
    for leaf in document["leaves"]:
        if leaf["sharding"] not in table:
            table.append(leaf["sharding"])
        leaf["sharding"] = table.index(leaf["sharding"])
    document["shardings"] = table
    for feature, field in manifests._FEATURE_FIELDS.items():
        if feature not in document["required_features"]:
            del document[field]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert _text(manifests.encode_manifest(manifest)).decode() == text


@pytest.mark.parametrize(
    ("lossy", "message"),
    [
        ({"w": {"policy": "Grid", "bound": 0.5}}, None),
        ({}, None),
        ({"nobody": {"policy": "Grid"}}, "the field 'lossy' breaks the format"),
        ({"w": []}, "the field 'lossy' breaks the format"),
        ({"w": {"policy": {}}}, "the field 'lossy' breaks the format"),
        ([], "the field 'lossy' is"),
        (None, "found the fields"),
    ],
)
def test_policies_stand_in_the_manifest_with_their_feature(lossy, message):
    """By path of a leaf that is there; not without the feature."""
    document = _document(required_features=["lossy"], lossy=lossy)
    if lossy is None:
        del document["lossy"]
    if message is None:
        assert _parse(_signed(document)).lossy == lossy
        assert manifests.encode_manifest(_parse(_signed(document)))
        return
    with pytest.raises(FormatError, match=message):
        _parse(_signed(document))


def test_many_shardings_and_equal_ones_stand_once_each():
    """Told by what they say, not by which object says it."""
    shardings = [ON_ONE_DEVICE | {"device_id": n // 2} for n in range(100)]
    leaves = tuple(
        LeafEntry(path=(str(n),), kind="jax", dtype="int8", shape=(1,), sharding=s)
        for n, s in enumerate(shardings)
    )
    data = manifests.encode_manifest(dataclasses.replace(MANIFEST, leaves=leaves))
    assert json.loads(_text(data))["shardings"] == [None, *shardings[::2]]
    assert _parse(data).leaves == leaves


def test_a_manifest_of_any_metadata_is_written_so_that_it_is_read():
    """A million zeros shrink to less than a reader may believe: they are stored."""
    zeros = dataclasses.replace(MANIFEST, custom_metadata=[0] * 1_000_000)
    data = manifests.encode_manifest(zeros)
    assert len(data) > 1_000_000
    assert _parse(data) == zeros


def _prepared(custom_metadata):
    place = locate("/run/7.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp")
    request = blocking.prepare(
        {"a": 1}, place, DeltaOptions(), custom_metadata=custom_metadata
    )
    return request.custom_metadata


def test_custom_metadata_are_those_of_the_call():
    """What the caller changes after `save` does not reach the MANIFEST."""
    given = {"losses": [0.5], "name": "run"}
    taken = _prepared(given)
    given["losses"].append(0.25)
    assert taken == {"losses": [0.5], "name": "run"}


@pytest.mark.parametrize(
    "given", [{"a": {1, 2}}, {"a": float("nan")}, {1: 0, "b": 0}, {"a": object()}]
)
def test_custom_metadata_that_no_manifest_can_hold_are_refused_at_once(given):
    """In the call, not in the background; keys that cannot be sorted, too."""
    with pytest.raises(InvalidInputError, match="custom_metadata is not JSON"):
        _prepared(given)
