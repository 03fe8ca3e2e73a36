"""Parsing as if hostile: any bytes under right digests end in a value or a typed error.

Never another exception, never memory beyond the bounds of FORMAT.md section 13.2, never
a pack deleted that a healthy step needs, never other bits for a healthy step.
"""

import json
import random
import shutil
import struct
from pathlib import Path

import fuzz
import fuzz_targets
import hostile
import hypothesis
import hypothesis.strategies as st
import jax
import mutations
import numpy as np
import pytest
import strategies
from hostile import Judge, item_folder, part_file
from mutations import Choices
from strategies import STORE

import orbax_delta
from orbax_delta import (
    cli,
    frames,
    marks,
    parts,
    records,
    restore,
    steps,
    storefiles,
)
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    InvalidInputError,
    UnsupportedVersionError,
)
from orbax_delta.manifests import MANIFEST_NAME, parse_manifest
from orbax_delta.options import DeltaOptions
from orbax_delta.places import locate

OPTIONS = DeltaOptions(threads=1)


@pytest.fixture(autouse=True)
def _nothing_is_deleted(monkeypatch):
    """Nobody need wait for the end of a deletion, hundreds of times."""
    monkeypatch.setattr(steps, "let_deletions_end", lambda: None)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A small root of three steps and a kept base; put right after every change."""
    root = hostile.make(tmp_path_factory.mktemp("hostile") / "run")
    with pytest.MonkeyPatch.context() as patch:
        strategies.skip_disk_sync(patch)
        yield Judge.of(root)


@pytest.fixture
def copied(healthy, tmp_path):
    """A copy of that root, to be changed for good."""
    return Path(shutil.copytree(healthy.root, tmp_path / "run"))


# --- any bytes ----------------------------------------------------------------------

PARSERS = {
    "MANIFEST": lambda data: parse_manifest(data, where="a file"),
    "part": lambda data: list(
        parts.parse_part(data, attempt=bytes(16), rows=1, packs=(), words=(4,))
    ),
    "pack": lambda data: records.parse_pack(memoryview(data)),
    "record": lambda data: records.parse_record(memoryview(data)),
    "mark": lambda data: marks.parse_mark(data, where="a file"),
    "store": lambda data: storefiles.parse_store(data, "a file"),
    "root": lambda data: storefiles.parse_root(data, "a file"),
    "entry": lambda data: storefiles.parse_entry(data, "a file"),
    "archived": lambda data: storefiles.parse_archived(data, "a file"),
    "frame": lambda data: frames.decompress_text(data, 64),
    "empty frame": lambda data: frames.decompress(data, 0),
}
BEGINNINGS = (
    *(b"", b"ORBAX-DELTA-MANIFEST 1 ", b"ODPART\r\n\1\0", b"ODPACK\r\n\1\0", b"ODR0"),
    *(b"\x28\xb5\x2f\xfd", b'{"format_version": 1, ', b'{"magic": "orbax-delta-store"'),
)


@pytest.mark.parametrize("name", PARSERS)
def test_any_bytes_are_refused(name, record_property):
    """Noise, also behind the beginning of a real file, is no file of any kind."""
    tried = 0

    @hypothesis.given(st.sampled_from(BEGINNINGS), st.binary(max_size=300))
    @hypothesis.settings(max_examples=100)
    def look(beginning, rest):
        nonlocal tried
        tried += 1
        with pytest.raises(DeltaError, match=r"\w"):
            PARSERS[name](beginning + rest)

    look()
    record_property("fuzz_inputs", tried)


# --- files that a hostile writer makes ----------------------------------------------


def _manifest_files(root, choices):
    path = item_folder(root, 2) / MANIFEST_NAME
    document = hostile.manifest_document(path.read_bytes())
    return 2, {path: hostile.manifest_bytes(mutations.mutated(document, choices))}


def _part_files(root, choices):
    path = part_file(root, 2)
    data = mutations.mutated_part(path.read_bytes(), choices)
    manifest = item_folder(root, 2) / MANIFEST_NAME
    named = hostile.manifest_of_part(manifest.read_bytes(), data)
    return 2, {path: data, manifest: named}


def _pack_files(root, choices):
    path = choices.of(sorted((root / STORE / "packs").iterdir()))
    return None, {path: mutations.mutated_pack(path.read_bytes(), choices)}


def _store_files(root, choices):
    path = root / STORE / "STORE.json"
    return None, {path: mutations.mutated_json(path.read_bytes(), choices)}


def _mark_files(root, choices):
    kind = choices.of(("pins", "condemned"))
    name = choices.of(("0" * 32 + "-p0", "0" * 32, "x", "-"))
    packs = sorted(path.name for path in (root / STORE / "packs").iterdir())
    owner = {"host": "somewhere", "pid": 1, "start": "2"}
    document = {"format_version": 1, "owner": owner, "packs": packs}
    data = mutations.mutated_json(json.dumps(document).encode(), choices)
    return None, {root / STORE / kind / name: data}


def _base_files(root, choices):
    (path,) = (root / STORE / "bases").rglob(MANIFEST_NAME)
    document = hostile.manifest_document(path.read_bytes())
    return None, {path: hostile.manifest_bytes(mutations.mutated(document, choices))}


FILES = {
    "MANIFEST": (_manifest_files, 40),
    "part": (_part_files, 35),
    "pack": (_pack_files, 25),
    "STORE.json": (_store_files, 12),
    "mark": (_mark_files, 12),
    "base": (_base_files, 12),
}


@pytest.mark.parametrize("name", FILES)
def test_whole_roots_with_a_hostile_file(healthy, name, record_property):
    """Restore, metadata, ls, show, verify and prune: right, or an error in words.

    Healthy steps restore to the same bits, and no prune plans to take their packs.
    """
    make, examples = FILES[name]
    tried = 0

    @hypothesis.given(st.binary(min_size=8, max_size=60))
    @hypothesis.settings(max_examples=examples)
    def look(data):
        nonlocal tried
        tried += 1
        step, files = make(healthy.root, Choices(data))
        with healthy.changed(files):
            healthy.look(step, shared=step is None)

    look()
    assert healthy.look(None) == 0
    record_property("fuzz_inputs", tried)


@pytest.mark.parametrize("name", fuzz.NAMES)
def test_the_targets_of_the_fuzzer(name, record_property):
    """What `tests/fuzz.py` does for hours, on a few inputs of fixed seeds."""
    assert tuple(fuzz_targets.TARGETS) == fuzz.NAMES
    inputs = [*fuzz_targets.corpus()[name][:-50]]
    for seed in range(250):
        rng = random.Random(f"{name} {seed}")
        inputs.append(rng.randbytes(rng.randrange(200)))
    for data in inputs:
        fuzz_targets.TARGETS[name](data)
    record_property("fuzz_inputs", len(inputs))


# --- fields under a right digest ----------------------------------------------------


def _mesh(**changes):
    def change(document):
        (named,) = (s for s in document["shardings"] if s and s["kind"] == "named")
        named["mesh"] |= changes

    return change


def _sharding(wanted, /, **changes):
    def change(document):
        (found,) = (s for s in document["shardings"] if s and s["kind"] == wanted)
        found.update(changes)

    return change


REFUSED = {
    "no kind": _sharding("named", kind="spread"),
    "more fields": _sharding("named", more=1),
    "platform": _sharding("named", platform=None),
    "memory kind": _sharding("single", memory_kind=7),
    "device": _sharding("single", device_id="0"),
    "negative device": _sharding("single", device_id=-1),
    "mesh": _sharding("named", mesh=[]),
    "spec of numbers": _sharding("named", spec=[1]),
    "spec of another axis": _sharding("named", spec=["y"]),
    "axis twice": _sharding("named", spec=["x", ["x"]]),
    "nested spec": _sharding("named", spec=[[["x"]]]),
    "negative id": _mesh(device_ids=[0, -1]),
    "same id": _mesh(device_ids=[0, 0]),
    "few ids": _mesh(device_ids=[0]),
    "text id": _mesh(device_ids=[0, "1"]),
    "negative size": _mesh(shape=[-2]),
    "huge size": _mesh(shape=[1 << 62]),
    "many sizes": _mesh(shape=[1] * 100_000),
    "same names": _mesh(shape=[2, 1], axis_names=["x", "x"], axis_types=["Auto"] * 2),
    "few types": _mesh(axis_types=[]),
}
FALLING_BACK = {
    "devices that are not here": _mesh(device_ids=[5, 1 << 40]),
    "another platform": _sharding("named", platform="quantum"),
    "memory of no kind": _sharding("named", memory_kind="papyrus"),
    "axis of no type": _mesh(axis_types=["Imaginary"]),
    "spec longer than the shape": _sharding("named", spec=["x", None, None]),
    "sizes that are not divided": _sharding("named", spec=[None, "x"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_sharding_that_cannot_be_is_refused(copied, name):
    """By everything that reads the MANIFEST, before any of it is used."""
    hostile.rewritten(copied, 2, REFUSED[name])
    message = rf"2/{hostile.ITEM}/MANIFEST describes.*(there is no sharding|the field)"
    with pytest.raises(FormatError, match=message):
        hostile.restored(copied, 2)


@pytest.mark.parametrize("name", FALLING_BACK)
def test_a_sharding_that_cannot_be_here_falls_back(copied, name, caplog):
    """The leaf comes back without it, exact, with the warning for absent devices."""

    def change(document):
        FALLING_BACK[name](document)
        if "divided" in name:  # by 5 columns that two devices cannot share
            document["shardings"][hostile.leaf(document, "w")["sharding"]]["mesh"] |= {
                "shape": [3],
                "device_ids": [0, 1, 2],
            }

    hostile.rewritten(copied, 2, change)
    found = hostile.restored(copied, 2)
    assert strategies.bits(found["w"]) == strategies.bits(hostile.state(2)["w"])
    assert isinstance(found["w"], np.ndarray)
    assert "1 leaves were saved with are not here (first: w)" in caplog.text
    handler = orbax_delta.DeltaCheckpointHandler()
    assert handler.metadata(item_folder(copied, 2))["w"].shape == (24, 8)


@pytest.mark.parametrize(
    "changes",
    [
        {"value": "one-time pad"},
        {"value": "rbg"},
        {"value": ""},
        {"shape": [1, 2]},
        {"shape": [2, 1]},
        {"dtype": "int32"},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_keys_that_cannot_be_are_refused(copied, changes):
    """Name, shape or type of the data do not fit: before anything is read of it."""
    hostile.rewritten(
        copied, 2, lambda document: hostile.leaf(document, "key").update(changes)
    )
    message = r"leaf key holds typed keys|leaf key cover|of leaf key|names leaf"
    place = locate(str(item_folder(copied, 2)))
    with pytest.raises((FormatError, CorruptionError), match=message) as raised:
        restore.run(place, None, OPTIONS)
    assert place.item_url in str(raised.value)
    if changes.keys() & {"value", "dtype"}:
        with pytest.raises(FormatError, match="leaf key holds typed keys"):
            orbax_delta.DeltaCheckpointHandler().metadata(item_folder(copied, 2))


def test_text_that_is_no_utf8_is_damage(copied):
    """A bytes leaf that is passed off as a str, and the other way round."""

    def change(document):
        hostile.leaf(document, "values", "4")["kind"] = "bytes"

    hostile.rewritten(copied, 2, change)
    assert hostile.restored(copied, 2)["values"][4] == b"text\xed\xa0\x80"
    hostile.rewritten(
        copied, 3, lambda found: hostile.leaf(found, "values", "5").update(kind="str")
    )
    with pytest.raises(
        CorruptionError, match=r"step 3.*leaf values/5 is a str, .* is not UTF-8"
    ):
        hostile.restored(copied, 3)


def _in_tree(*path):
    def edit(document):
        *above, last, value = path
        inside = document["tree"]
        for key in above:
            inside = inside[key]
        inside[last] = value

    return edit


def _swapped(document):
    first, second = document["tree"]["dict"][:2]
    first[0], second[0] = second[0], first[0]


TREES = {
    "swapped names": (_swapped, "stands at"),
    "another key": (_in_tree("dict", 1, 0, "other"), "stands at"),
    "key of another kind": (_in_tree("dict", 0, 0, ["int", 7]), "no key is written"),
    "a leaf twice": (_in_tree("dict", 1, 1, {"leaf": 1}), "stands where"),
    "a leaf by truth": (_in_tree("dict", 0, 1, {"list": [{"leaf": False}]}), "stands"),
    "a leaf gone": (_in_tree("dict", 1, 1, {"none": True}), "stands where"),
    "a text": (_in_tree("dict", "leaf"), "where an array belongs"),
    "two members": (_in_tree("leaf", 0), "there is no node"),
    "nothing": (lambda document: document["tree"].clear(), "there is no node"),
    "equal keys": (
        _in_tree("dict", 0, ["by number", {"dict": [["1", {"none": True}]] * 2}]),
        "are equal",
    ),
    "deep": (_in_tree("dict", mutations.deep(150)), "damaged"),
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_that_disagrees_with_its_leaves_is_refused(copied, name):
    """Where everything is asked for; a target needs paths alone."""
    change, message = TREES[name]
    hostile.rewritten(copied, 2, change)
    with pytest.raises(FormatError, match=rf"the tree of step 2.*{message}"):
        hostile.restored(copied, 2)
    handler = orbax_delta.DeltaCheckpointHandler()
    with pytest.raises(FormatError, match=rf"the tree of .*MANIFEST .*{message}"):
        handler.metadata(item_folder(copied, 2))
    target = {"w": np.zeros((24, 8), np.float32)}
    args = orbax_delta.DeltaRestore(target, partial_restore=True)
    found = handler.restore(item_folder(copied, 2), args)
    assert strategies.bits(found["w"]) == strategies.bits(hostile.state(2)["w"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("full_bytes", value) for value in (-1, 10**400, 1.5, "1", None, True)),
        *(("total_seconds", value) for value in (-1.0, "1", None, [], 1 << 70)),
        ("chunks_by_form", {"planes": "many"}),
        ("chunks_by_form", [1]),
        ("stage_seconds", {"part": None}),
        ("step", 2),
    ],
)
def test_a_report_of_another_shape_is_an_error_of_those_who_show_it(
    copied, name, value, capsys
):
    """`ls` and `show` name the file; the step restores."""
    hostile.rewritten(
        copied, 2, lambda document: document["report"].update({name: value})
    )
    with pytest.raises(FormatError, match=rf"2/{hostile.ITEM}/MANIFEST is damaged in "):
        orbax_delta.save_report(copied / "2")
    for words in (["ls"], ["show", "2"]):
        code = cli.main([words[0], str(copied), *words[1:]])
        assert code == FormatError.exit_code
        shown = capsys.readouterr()
        assert f"MANIFEST is damaged in {name}" in shown.out + shown.err
    strategies.assert_same_tree(hostile.restored(copied, 2), hostile.state(2))


def _field(**changes):
    return lambda document: document.update(changes)


def _shaped(*shapes):
    def change(document):
        arrays = [one for one in document["leaves"] if one["kind"] == "numpy"]
        for found, shape in zip(arrays, shapes, strict=False):
            found["shape"] = shape

    return change


def _many_leaves(document):
    like = hostile.leaf(document, "zeros")
    for number in range(40):
        path = ["more", str(number)]
        document["leaves"].append({**like, "path": path, "shape": [1 << 57]})


NUMBERS = {
    "time without end": _field(wall_time=float("1e308")),
    "time before all": _field(wall_time=-1),
    "step": _field(step=10**18),
    "negative step": _field(step=-1),
    "saves": _field(save_index=1 << 63),
    "predecessor": _field(predecessor={"step": "1"}),
    "predecessor's step": _field(predecessor={"step": 1, "attempt": "0" * 32}),
    "store": _field(store_uuid="../../other"),
    "options": _field(options={"chunk_bytes": [1]}),
    "versions": _field(versions={"numpy": None}),
    "deep metadata": _field(custom_metadata=mutations.deep(101)),
    "size": _shaped([1 << 63]),
    "product": _shaped([1 << 32, 1 << 31]),
    "product with a zero": _shaped([1 << 32, 0, 1 << 32]),
    "product for a wider type": _shaped([1 << 59]),
    "sum": _many_leaves,
    "dimensions": _shaped([1] * 65),
    "many dimensions": _shaped([1 << 62] * 100_000),
    "pack of other digits": _field(packs=["0" * 32 + "-p\u0663-0"]),
    "part of other digits": lambda document: document["parts"][0].update(
        name=f"part-{document['attempt']}-p\u0663"
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_and_names_that_cannot_be_are_refused(copied, name, capsys):
    """By everything that reads the MANIFEST; a prune then deletes nothing."""
    hostile.rewritten(copied, 2, NUMBERS[name])
    shutil.rmtree(copied / "1")
    before = strategies.packs_on_disk(copied)
    with pytest.raises(FormatError, match=r"MANIFEST describes .* wrongly"):
        hostile.restored(copied, 2)
    for words in (["show", "2"], ["prune"], ["ls"]):
        code = cli.main([words[0], str(copied), *words[1:]])
        assert code == FormatError.exit_code
        shown = capsys.readouterr()
        assert "MANIFEST describes" in shown.out + shown.err
    assert cli.main(["verify", str(copied)]) == CorruptionError.exit_code
    assert strategies.packs_on_disk(copied) == before


def test_a_type_that_jax_does_not_hold_comes_back_as_numpy(copied, caplog):
    """As wide numbers do where jax has no 64-bit types."""
    hostile.rewritten(
        copied, 2, lambda document: hostile.leaf(document, "w").update(dtype=">f4")
    )
    found = hostile.restored(copied, 2)["w"]
    assert (type(found), found.dtype) == (np.ndarray, np.dtype(">f4"))
    assert found.tobytes() == strategies.bits(hostile.state(2)["w"])
    assert "are not here (first: w)" in caplog.text


def test_the_largest_numbers_are_read(copied):
    """What lies just inside the limits, with the digits of a far future."""

    def change(document):
        document |= {"wall_time": 250_000_000_000, "save_index": (1 << 63) - 1}
        document["custom_metadata"] = mutations.deep(99)

    hostile.rewritten(copied, 2, change)
    strategies.assert_same_tree(hostile.restored(copied, 2), hostile.state(2))
    for words in (["ls"], ["show", "2"], ["show", "2", "--json"]):
        assert cli.main([words[0], str(copied), *words[1:]]) == 0


def test_what_a_writer_is_given_it_can_read_again(root, monkeypatch):
    """Depths and axes that a reader would refuse are refused, or left out, in time."""
    strategies.skip_disk_sync(monkeypatch)
    with pytest.raises(InvalidInputError, match="nested more than 100 deep"):
        orbax_delta.blocking.prepare(
            {},
            locate(str(root / "1" / "x")),
            OPTIONS,
            custom_metadata=mutations.deep(101),
        )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), (1, "1"))
    spec = jax.sharding.PartitionSpec(1, "1")
    array = jax.device_put(
        np.arange(16.0, dtype=np.float32).reshape(4, 4),
        jax.sharding.NamedSharding(mesh, spec),
    )
    with strategies.open_run(root) as run:
        run.save(0, {"w": array})
        assert strategies.bits(run.restore(0)["w"]) == strategies.bits(array)


def test_a_terminal_is_sent_no_commands_from_a_file(copied, capsys):
    """Names and metadata with escape sequences are shown, not obeyed."""
    command = "\x1b]0;owned\x07\x9b2J"

    def change(document):
        document["custom_metadata"] = command
        document["versions"][command] = "1"
        hostile.leaf(document, "w")["path"] = [command]

    hostile.rewritten(copied, 2, change)
    for words in (["ls"], ["show", "2"], ["verify"]):
        cli.main([words[0], str(copied), *words[1:]])
        shown = capsys.readouterr()
        assert not {"\x1b", "\x07", "\x9b"} & set(shown.out + shown.err)
        if words[0] == "show":
            assert shown.out.count("\\x1b]0;owned\\x07\\x9b2J") == 3


# --- versions -----------------------------------------------------------------------

GARBAGE = bytes(range(255, 0, -1))


def _newer_manifest(root):
    path = item_folder(root, 2) / MANIFEST_NAME
    path.write_bytes(b"ORBAX-DELTA-MANIFEST 7 of another kind\n" + GARBAGE)


def _newer_feature(root):
    path = item_folder(root, 2) / MANIFEST_NAME
    document = {"required_features": ["holograms"], "leaves": 7, "packs": {}}
    path.write_bytes(hostile.manifest_bytes(document))


def _newer_base(root):
    (path,) = (root / STORE / "bases").rglob(MANIFEST_NAME)
    path.write_bytes(b"ORBAX-DELTA-MANIFEST 7 of another kind\n" + GARBAGE)


def _newer_part(root):
    hostile.put_part(root, 2, b"ODPART\r\n" + struct.pack("<H", 7) + GARBAGE)


def _newer_short_part(root):
    hostile.put_part(root, 2, b"ODPART\r\n" + struct.pack("<H", 7))


def _newer_pack(root):
    for path in (root / STORE / "packs").iterdir():
        path.write_bytes(b"ODPACK\r\n" + struct.pack("<H", 7))


def _newer_store(root):
    document = {"magic": "orbax-delta-store", "format_version": 7, "digest": 1}
    (root / STORE / "STORE.json").write_text(json.dumps(document))


def _newer_mark(kind, name):
    def write(root):
        path = root / STORE / kind / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"format_version": 7, "owner": 1, "digest": 1}))

    return write


NEWER = {
    # what: (how it is made, who must refuse it)
    "MANIFEST": (_newer_manifest, "restore ls show prune verify"),
    "feature": (_newer_feature, "restore ls show prune verify"),
    "base": (_newer_base, "prune verify"),
    "part": (_newer_part, "restore show verify"),
    "short part": (_newer_short_part, "restore show verify"),
    "pack": (_newer_pack, "verify"),
    "STORE.json": (_newer_store, "restore ls show prune verify"),
    "pin": (_newer_mark("pins", "0" * 32 + "-p0"), "prune verify"),
    "mark": (_newer_mark("condemned", "0" * 32), "prune verify"),
}


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_file_is_told_from_a_damaged_one(copied, name, capsys):
    """Version 7, and nothing else in it as this version has it: still the version."""
    make, readers = NEWER[name]
    make(copied)
    shutil.rmtree(copied / "1")
    before = strategies.packs_on_disk(copied)
    if "restore" in readers:
        with pytest.raises(UnsupportedVersionError, match="Upgrade orbax_delta"):
            hostile.restored(copied, 2)
    for words in (["ls"], ["show", "2"], ["verify"], ["prune"]):
        if words[0] not in readers:
            continue
        code = cli.main([words[0], str(copied), *words[1:]])
        shown = capsys.readouterr()
        assert "Upgrade orbax_delta" in shown.out + shown.err, words
        newer = UnsupportedVersionError.exit_code
        assert code == (CorruptionError.exit_code if words == ["verify"] else newer)
    if "prune" in readers:
        assert strategies.packs_on_disk(copied) == before
