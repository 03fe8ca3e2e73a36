"""Exports: what others read of them, what they refuse, what is left of half of one."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import namedtuple

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import roots
import strategies
from hypothesis import strategies as st
from strategies import assert_same_tree, open_run

import orbax_delta
from orbax_delta import (
    DeltaRestore,
    check,
    exports,
    imports,
    orbaxfolders,
    policies,
    sources,
    tensorfolders,
)
from orbax_delta.errors import (
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from orbax_delta.places import locate

Point = namedtuple("Point", ["x", "y"])
PARAMS = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 33)), jnp.float32),
    "bf16": jnp.asarray(np.random.default_rng(1).normal(size=(7, 5)), jnp.bfloat16),
    "f8": jnp.asarray([0.5, -2, 448], jnp.float8_e4m3fn),
    "f8_5": jnp.asarray([0.5, -0.0, jnp.inf], jnp.float8_e5m2),
}
PAYLOADS = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 1], np.uint32)
STATE = {
    "params": PARAMS,
    "opt": optax.adamw(1e-3).init({"w": PARAMS["w"]}),
    "nan": PAYLOADS.view(np.float32),
    "point": Point(jnp.ones(2), [np.int64(3), (np.float32(-0.0), None)]),
    "scalar": jnp.float32(-0.0),
    "empty": np.zeros((0, 3), np.float16),
    "nothing": {},
    "key": jax.random.key(7),
    "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
    "by_int": {1: np.arange(5), 2: True},
    "step": 3,
    "rate": float("nan"),
    "name": "run ünder",
    "sharded": strategies.sharded(
        np.arange(64 * 8, dtype=np.float32).reshape(64, 8), (4, 2), "xy", "x", "y"
    ),
}
"""What all three forms hold."""

EXPORTS = {
    "delta": exports.export_delta,
    "orbax": exports.export_orbax,
    "safetensors": exports.export_safetensors,
}
every_form = pytest.mark.parametrize("form", EXPORTS)


def save(root, state, step=3, *, metadata=None, **options):
    """A root with a step."""
    with open_run(root, **options) as run:
        args = orbax_delta.DeltaSave(state, custom_metadata=metadata)
        run.manager.save(step, args=args)
        run.manager.wait_until_finished()
    return root


def restored(root, step=3, target=None):
    """A step of it, as saved or as a target asks."""
    with open_run(root) as run:
        return run.manager.restore(step, args=DeltaRestore(target))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A root that no test changes."""
    folder = tmp_path_factory.mktemp("made") / "run"
    return save(folder, STATE, metadata={"note": 1}, chunk_bytes=1024)


# --- round trips ----------------------------------------------------------------------


@every_form
def test_there_and_back(made, tmp_path, form):
    """Bit for bit, with kinds, shardings, metadata, tuples and int keys."""
    seen = []
    report = EXPORTS[form](
        made, 3, tmp_path / "out", progress=lambda *told: seen.append(told)
    )
    assert report.leaves == len(jax.tree.leaves(STATE))
    assert report.written_bytes == strategies.disk_bytes(tmp_path / "out")
    assert seen[-1] == ("chunks", len(seen), len(seen))
    back = imports.import_checkpoint(tmp_path / "out", tmp_path / "back", 5)
    assert back.leaves == report.leaves
    assert_same_tree(restored(tmp_path / "back", 5), restored(made))
    assert_same_tree(restored(tmp_path / "back", 5, STATE), STATE)
    manifest = strategies.read_step(tmp_path / "back", 5).manifest
    assert manifest.custom_metadata == {"note": 1}
    wanted = strategies.read_step(made, 3).manifest
    assert {leaf.path: leaf for leaf in manifest.leaves} == {
        leaf.path: leaf for leaf in wanted.leaves
    }
    assert check.verify(str(tmp_path / "back")).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "out"]


@every_form
@hypothesis.given(tree=strategies.trees(), include=st.booleans())
@hypothesis.settings(max_examples=25)
def test_any_state(tmp_path_factory, form, tree, include):
    """What a form takes comes back bit for bit; what it refuses it names."""
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        strategies.skip_disk_sync(patch)
        save(folder / "run", tree, chunk_bytes=64)
        patterns = ["*"] if include and jax.tree.leaves(tree) else []
        refused = None
        try:
            EXPORTS[form](folder / "run", 3, folder / "out", include=patterns)
        except InvalidInputError as error:
            refused = str(error)
        if refused is not None:
            assert form != "delta"
            assert re.search(r"leaf|leaves", refused)
            assert [path.name for path in folder.iterdir()] == ["run"]
        else:
            imports.import_checkpoint(folder / "out", folder / "back", 1)
            assert_same_tree(restored(folder / "back", 1), restored(folder / "run"))
    shutil.rmtree(folder)


def test_a_delta_folder_stands_for_itself(made, tmp_path):
    """Moved anywhere it restores and verifies; chunks are cut as they were."""
    exports.export_delta(made, 3, tmp_path / "a" / "b" / "final")
    moved = shutil.move(tmp_path / "a" / "b" / "final", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "a")
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        assert_same_tree(checkpointer.restore(moved, args=DeltaRestore(STATE)), STATE)
    assert check.verify(str(tmp_path)).whole_steps == ["elsewhere"]
    before = sources.of_step(str(made), "3")
    after = sources.of_place(locate(str(moved)))
    boxes = [
        {leaf.entry.path: sorted(piece.box for piece in leaf.pieces) for leaf in leaves}
        for leaves in (before.leaves, after.leaves)
    ]
    assert boxes[0] == boxes[1]


def test_chunks_that_are_large_stay_whole(tmp_path):
    """They are not read again for each piece of the default size."""
    state = {"w": np.arange(1 << 19, dtype=np.float32)}
    save(tmp_path / "run", state, chunk_bytes=2 << 20)
    seen = []
    exports.export_delta(
        tmp_path / "run", 3, tmp_path / "out", progress=lambda *told: seen.append(told)
    )
    assert seen == [("chunks", 1, 1)]
    found = sources.of_place(locate(str(tmp_path / "out")))
    assert len(found.leaves[0].pieces) == 1


def test_leaves_within_a_bound_are_exported_as_restored(tmp_path):
    """What comes back is exactly what a restore gives, and is lossless from then on."""
    state = {"w": np.random.default_rng(0).normal(size=20_000).astype(np.float32)}
    save(tmp_path / "run", state, lossy={"w": policies.Grid(bound=0.1)})
    wanted = restored(tmp_path / "run")
    assert (wanted["w"] != state["w"]).any()
    for step, (form, export) in enumerate(EXPORTS.items()):
        export(tmp_path / "run", 3, tmp_path / form)
        imports.import_checkpoint(tmp_path / form, tmp_path / "back", step)
        assert_same_tree(restored(tmp_path / "back", step), wanted)
        manifest = strategies.read_step(tmp_path / "back", step).manifest
        assert not manifest.lossy
        assert not manifest.required_features


def test_kept_bases_and_items(tmp_path):
    """A kept base by its folder; of several items one is named."""
    registry = orbax_delta.handler_registry(item=("opt", "params"))
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry) as manager:
        trees = {
            name: orbax_delta.DeltaSave({name: np.arange(9)})
            for name in ("opt", "params")
        }
        manager.save(3, args=ocp.args.Composite(**trees))
        manager.wait_until_finished()
    with pytest.raises(
        InvalidInputError, match=r"step 3 is 2 items: 'opt' \(3\), 'params' \(3\); name"
    ):
        exports.export_delta(tmp_path / "run", 3, tmp_path / "out")
    with pytest.raises(
        NotFoundError, match=r"step 3 has no item 'ema'; it has 'opt', 'params'"
    ):
        exports.export_delta(tmp_path / "run", 3, tmp_path / "out", item="ema")
    exports.export_delta(tmp_path / "run", 3, tmp_path / "out", item="opt")
    (base, _) = sorted((tmp_path / "run" / strategies.STORE / "bases").iterdir())
    shutil.rmtree(tmp_path / "run" / "3")
    name = f"{strategies.STORE}/bases/{base.name}"
    exports.export_orbax(tmp_path / "run", name, tmp_path / "base")
    (key,) = ocp.StandardCheckpointer().restore(tmp_path / "base")
    assert key in ("opt", "params")


# --- a subset -------------------------------------------------------------------------


def test_include_keeps_paths(made, tmp_path):
    """Leaves keep their paths; lists that lose members become dicts by index."""
    exports.export_delta(
        made, 3, tmp_path / "out", include=["params/*", "opt/0/mu/*", "point/y/1/0"]
    )
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        got = checkpointer.restore(tmp_path / "out")
        part = checkpointer.restore(
            tmp_path / "out",
            args=DeltaRestore(
                {"opt": ({"mu": STATE["opt"][0].mu},)}, partial_restore=True
            ),
        )
    assert set(got) == {"params", "opt", "point", "nothing"}
    assert_same_tree(got["params"], PARAMS)
    assert_same_tree(got["opt"], ({"mu": STATE["opt"][0].mu}, {}, {}))
    assert_same_tree(got["point"], {"y": {1: (np.float32(-0.0), None)}})
    assert got["nothing"] == {}
    assert_same_tree(part["opt"][0]["mu"], STATE["opt"][0].mu)


def test_a_pattern_that_fits_nothing(made, tmp_path):
    """It is told with what there is."""
    with pytest.raises(
        InvalidInputError,
        match=r"pattern 'weights/\*' fits no leaf of step 3, item 'default' .* there "
        r"are by_int/1, by_int/2, .* and \d+ more",
    ):
        exports.export_delta(made, 3, tmp_path / "out", include=["weights/*"])
    with pytest.raises(
        InvalidInputError, match=r"include is the text 'params/\*'; exp"
    ):
        exports.export_delta(made, 3, tmp_path / "out", include="params/*")
    assert list(tmp_path.iterdir()) == []


# --- readers without this package -----------------------------------------------------

STOCK = """
import sys
sys.modules["orbax_delta"] = None  # an import of it is an error
import jax, numpy as np, orbax.checkpoint as ocp
from etils import epath
folder = sys.argv[1]
plain = ocp.StandardCheckpointer().restore(folder)
assert plain["nan"].view(np.uint32).tolist() == [0x7FC00001, 0xFFC12345, 1 << 31, 1]
assert plain["params"]["bf16"].dtype == "bfloat16", plain["params"]["bf16"]
assert plain["empty"].shape == (0, 3) and plain["empty"].dtype == np.float16
assert (plain["step"], plain["name"]) == (3, "run \\u00fcnder")
assert np.signbit(plain["scalar"]) and plain["scalar"].shape == ()
assert jax.random.key_data(plain["key"]).tolist() == [0, 7]
assert plain["point"]["y"][1][1] is None and plain["nothing"] == {}
mesh = jax.sharding.Mesh(jax.devices(), ("x",))
where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
want = jax.ShapeDtypeStruct((64, 33), np.float32, sharding=where)
args = ocp.args.PyTreeRestore(
    item={"params": {"w": want}}, partial_restore=True,
    restore_args={"params": {"w": ocp.ArrayRestoreArgs(sharding=where)}})
part = ocp.PyTreeCheckpointHandler().restore(epath.Path(folder), args=args)
assert part["params"]["w"].sharding == where
assert (np.asarray(part["params"]["w"]) == plain["params"]["w"]).all()
manager = ocp.CheckpointManager(sys.argv[2])
print(sorted(manager.restore(7, args=ocp.args.StandardRestore())), manager.all_steps())
"""


def test_stock_orbax_opens_it(made, tmp_path):
    """In a process in which this package cannot be imported, as a step too."""
    exports.export_orbax(made, 3, tmp_path / "out")
    exports.export_orbax(made, 3, tmp_path / "run" / "7" / "default")
    done = subprocess.run(
        [sys.executable, "-c", STOCK, tmp_path / "out", tmp_path / "run"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"{sorted(STATE)} [7]"


def test_metadata_go_along(made, tmp_path):
    """The custom metadata of the step are those of the Orbax checkpoint."""
    exports.export_orbax(made, 3, tmp_path / "out")
    found = ocp.StandardCheckpointer().metadata(tmp_path / "out")
    assert found.item_metadata.custom_metadata["note"] == 1


@pytest.mark.parametrize("dtype", strategies.NUMPY_DTYPES)
def test_every_type_in_orbax(tmp_path, dtype):
    """Held bit for bit by stock Orbax, or refused by name."""
    array = strategies.random_array(np.random.default_rng(0), dtype, (5, 3))
    save(tmp_path / "run", {"w": array})
    refused = {"uint4", "uint2"}
    if dtype in refused or dtype[0] == ">" or "[" in dtype:
        with pytest.raises(
            InvalidInputError, match=r"leaf w is .*, which no Orbax checkpoint can hold"
        ):
            exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")
        return
    exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")
    assert_same_tree(ocp.StandardCheckpointer().restore(tmp_path / "out"), {"w": array})


NARROW = sorted(
    name
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type)
    and issubclass(kind, np.generic)
    and kind.__name__ == name  # 0.7 leaves a variable behind
)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_narrow_type_in_orbax(tmp_path, dtype):
    """Whatever ml_dtypes has: what is exported opens, or it is refused by name."""
    array = np.zeros((5, 3), getattr(ml_dtypes, dtype))
    try:
        save(tmp_path / "run", {"w": array})
    except InvalidInputError:
        return  # no step can hold it
    if dtype not in orbaxfolders._ZARR_TYPES:
        with pytest.raises(InvalidInputError, match=r"which no Orbax checkpoint can"):
            exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        return
    exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")
    assert_same_tree(ocp.StandardCheckpointer().restore(tmp_path / "out"), {"w": array})


def test_zarr_chunks_at_the_edge(tmp_path, monkeypatch):
    """A leaf of many chunks, with a rest in both dimensions."""
    monkeypatch.setattr(orbaxfolders, "CHUNK_BYTES", 200)
    for shape in ((37, 11), (3, 5, 7, 2), (1000,)):
        array = np.random.default_rng(0).normal(size=shape)
        save(tmp_path / "run", {"w": array}, chunk_bytes=300)
        exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")
        assert len(list((tmp_path / "out" / "w").iterdir())) > 3
        got = ocp.StandardCheckpointer().restore(tmp_path / "out")
        assert_same_tree(got, {"w": array})
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "run")


# --- safetensors ----------------------------------------------------------------------


def safetensors():
    """The package of that name, which is no part of this one."""
    pytest.importorskip("safetensors", reason="the extra `test` installs it")
    from safetensors import safe_open

    return safe_open


def test_the_real_package_reads_it(made, tmp_path):
    """Names, shapes and values; types that numpy lacks by their bits."""
    safe_open = safetensors()
    exports.export_safetensors(made, 3, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        names = set(file.keys())
        assert {"params.w", "opt.0.mu.w", "key", "by_int.1"} <= names
        assert "name" not in names
        assert "step" not in names
        assert file.metadata()["format"] == "pt"
        assert_same_tree(file.get_tensor("params.w"), np.asarray(PARAMS["w"]))
        assert file.get_tensor("nan").view(np.uint32).tolist() == PAYLOADS.tolist()
        assert_same_tree(file.get_tensor("empty"), STATE["empty"])
        assert_same_tree(file.get_tensor("sharded"), np.asarray(STATE["sharded"]))
        assert file.get_tensor("scalar").shape == ()
        codes = {name: file.get_slice(name).get_dtype() for name in names}
    assert codes["params.bf16"] == "BF16"
    assert (codes["params.f8"], codes["params.f8_5"]) == ("F8_E4M3", "F8_E5M2")
    assert (codes["key"], codes["by_int.1"]) == ("U32", "I64")


def test_shards_and_their_index(made, tmp_path):
    """As Hugging Face lays them out: each within the limit or one tensor, all named."""
    safe_open = safetensors()
    report = exports.export_safetensors(
        made, 3, tmp_path / "out", include=["params/*", "opt/*"], shard_bytes=9000
    )
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert files == [
        f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": report.state_bytes}
    found = {}
    for name in files:
        with safe_open(tmp_path / "out" / name, "np") as file:
            assert file.metadata()["format"] == "pt"
            found |= dict.fromkeys(file.keys(), name)
    assert found == index["weight_map"]
    imports.import_checkpoint(tmp_path / "out", tmp_path / "back", 3)
    got = restored(tmp_path / "back")
    assert_same_tree(got["params"], PARAMS)
    assert_same_tree(got["opt"][0]["mu"], {"w": STATE["opt"][0].mu["w"]})


def test_names_of_ones_own(made, tmp_path):
    """A function of the path; the way back still knows the paths."""
    safe_open = safetensors()
    exports.export_safetensors(
        made,
        3,
        tmp_path / "out",
        include=["params/*"],
        name=lambda path: "model/" + path[-1] + ".weight",
    )
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert "model/w.weight" in file.keys()  # noqa: SIM118 # no mapping
    imports.import_checkpoint(tmp_path / "out", tmp_path / "back", 3)
    assert_same_tree(restored(tmp_path / "back")["params"], PARAMS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (lambda _: "same", r"leaves params/bf16 and params/f8 would both be .*'same'"),
        (lambda _: 3, r"the name of leaf params/bf16 is 3; expected a text"),
        (lambda _: "__metadata__", r"the name of leaf params/bf16 is '__metadata__'"),
        (lambda _: "\ud800", r"the name of leaf params/bf16 is .* in UTF-8"),
        (
            lambda path: path[2],
            r"function of names fails at leaf params/bf16, whose path is \('params', "
            r"'bf16'\): IndexError: tuple index out of range",
        ),
    ],
)
def test_names_that_are_none(made, tmp_path, name, words):
    """Two leaves of one name, and what is no name."""
    with pytest.raises(InvalidInputError, match=words):
        exports.export_safetensors(
            made, 3, tmp_path / "out", include=["params/*"], name=name
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4, ml_dtypes.int4),
        np.zeros(2, np.complex128),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, ">f4"),
        np.zeros(2, ml_dtypes.float4_e2m1fn),
    ],
    ids=lambda array: array.dtype.str,
)
def test_types_that_no_tensor_has(tmp_path, array):
    """The leaf is named, and what to do."""
    save(tmp_path / "run", {"ok": np.ones(2), "bad": array})
    with pytest.raises(
        InvalidInputError,
        match=r"leaf bad is .*, which no safetensors file can hold; it can hold bool, "
        r".* Leave the leaf out by choosing others, or export to a plain Orbax",
    ):
        exports.export_safetensors(tmp_path / "run", 3, tmp_path / "out")
    exports.export_safetensors(tmp_path / "run", 3, tmp_path / "out", include=["ok"])


def test_long_texts(tmp_path):
    """A header is no place for them."""
    save(tmp_path / "run", {"w": np.ones(2), "text": "x" * (1 << 20), "more": "y"})
    with pytest.raises(InvalidInputError, match=r"leaf text is 1048576 bytes of text"):
        exports.export_safetensors(tmp_path / "run", 3, tmp_path / "out")


def test_a_header_that_nobody_reads(made, tmp_path, monkeypatch):
    """Readers refuse a longer one; it is said before anything is written."""
    monkeypatch.setattr(tensorfolders, "MAX_HEADER_BYTES", 100)
    with pytest.raises(
        InvalidInputError, match=r"needs a header of [\d,]+ bytes; read"
    ):
        exports.export_safetensors(made, 3, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_no_limit(made, tmp_path):
    """A file of less than a byte is none."""
    with pytest.raises(InvalidInputError, match=r"shard_bytes is 0; expected 1"):
        exports.export_safetensors(made, 3, tmp_path / "out", shard_bytes=0)


# --- what Orbax lacks -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1 << 63, r"leaf bad is an int of more than 64 bits, which no Orbax"),
        (1j, r"leaf bad is a Python complex number, which no Orbax"),
        (b"x", r"leaf bad is bytes, which no Orbax checkpoint can hold\. Leave it"),
        ("\ud800", r"leaf bad is a text with a lone surrogate, which no Orbax"),
    ],
)
def test_values_that_orbax_lacks(tmp_path, value, words):
    """They are named; safetensors and delta folders carry them."""
    state = {"bad": value, "w": np.ones(2)}
    save(tmp_path / "run", state)
    with pytest.raises(InvalidInputError, match=words):
        exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")
    exports.export_safetensors(tmp_path / "run", 3, tmp_path / "out")
    imports.import_checkpoint(tmp_path / "out", tmp_path / "back", 3)
    assert_same_tree(restored(tmp_path / "back"), state)


@pytest.mark.parametrize(
    "key",
    [
        *("_METADATA", "..", "a//b", "", "nul\0", "x" * 300, "_sharding/x"),
        # What Orbax takes for a database, for a folder in it, and for no text.
        *("manifest.ocdbt", "a\\b", "\ud800"),
    ],
)
def test_keys_that_are_no_folders(tmp_path, key):
    """Orbax names folders by them."""
    save(tmp_path / "run", {key: np.ones(2)})
    with pytest.raises(InvalidInputError, match=r"leaf .* of an Orbax checkpoint"):
        exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": np.ones(2), "a": {"b": np.ones(3)}},
        {"a": np.ones(2), "a/b": np.ones(3)},
        {"a": np.ones(2), "a/0": np.ones(3)},
    ],
)
def test_keys_that_meet(tmp_path, state):
    """Two leaves of one folder, or one in the other's."""
    save(tmp_path / "run", state)
    with pytest.raises(InvalidInputError, match=r"leaves a\S* and a\S* have one name"):
        exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")


def test_a_state_without_leaves(tmp_path):
    """Orbax saves none; the other forms do."""
    save(tmp_path / "run", {"a": None})
    with pytest.raises(InvalidInputError, match=r"has no leaf; Orbax saves no such"):
        exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")
    for form in ("delta", "safetensors"):
        EXPORTS[form](tmp_path / "run", 3, tmp_path / form)
        imports.import_checkpoint(tmp_path / form, tmp_path / "back", len(form))
        assert restored(tmp_path / "back", len(form)) == {"a": None}


# --- targets, roots, steps ------------------------------------------------------------


@every_form
def test_a_target_that_is_there(made, tmp_path, form):
    """File, folder or dangling link: left as it is."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(
            InvalidInputError, match=rf"{name} is there already; it was left as it is"
        ):
            EXPORTS[form](made, 3, tmp_path / name)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"file", "folder", "link"}
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "folder").iterdir()) == []


@every_form
def test_a_target_that_appears_meanwhile(made, tmp_path, form):
    """It is not replaced."""

    def appear(what, done, total):
        (tmp_path / "out").mkdir(exist_ok=True)

    with pytest.raises(InvalidInputError, match=r"out is there already"):
        EXPORTS[form](made, 3, tmp_path / "out", progress=appear)
    assert list((tmp_path / "out").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@every_form
def test_targets_elsewhere(made, form):
    """Exports go to this machine."""
    with pytest.raises(InvalidInputError, match=r"gs://b/x is not on this machine"):
        EXPORTS[form](made, 3, "gs://b/x")


@every_form
def test_folders_above_a_target(made, tmp_path, form):
    """They are made for an export, and gone again with one that fails."""
    (tmp_path / "mine").mkdir()
    target = tmp_path / "mine" / "new" / "newer" / "out"

    def fail(what, done, total):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises((StorageError, OSError), match=r"full"):
        EXPORTS[form](made, 3, target, progress=fail)
    assert list((tmp_path / "mine").iterdir()) == []
    EXPORTS[form](made, 3, target)
    assert target.is_dir()


@pytest.mark.parametrize("name", ["x" * 250, "ü" * 120])
def test_long_names(made, tmp_path, name):
    """As long as a folder's may be; in the other forms Orbax gives it a suffix."""
    exports.export_safetensors(made, 3, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@every_form
@pytest.mark.parametrize(
    ("text", "words"),
    [("", "the path is an empty text"), ("\udcff", "cannot be written in UTF-8")],
)
def test_paths_that_are_none(made, tmp_path, form, text, words):
    """A variable that is not set is not the folder that one is in."""
    with pytest.raises(InvalidInputError, match=words):
        EXPORTS[form](made, 3, text)
    with pytest.raises(InvalidInputError, match=words):
        EXPORTS[form](text, 3, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@every_form
def test_wrong_root_and_step(made, tmp_path, form):
    """As the commands have it: what is there instead."""
    with pytest.raises(NotFoundError, match=r"holds no step '4'.*; there are 3"):
        EXPORTS[form](made, 4, tmp_path / "out")
    with pytest.raises(NotFoundError, match=r"there is no folder .*none; expected the"):
        EXPORTS[form](tmp_path / "none", 3, tmp_path / "out")
    with pytest.raises(NotFoundError, match=r"holds no _delta_store and no MANIFEST"):
        EXPORTS[form](tmp_path, 3, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- damage ---------------------------------------------------------------------------


@every_form
def test_damage_is_healed_or_told(tmp_path, form):
    """A chunk whose content another record holds; one that none holds."""
    root = roots.make(tmp_path / "run", refresh_every=2, keep_bases=2)
    step = strategies.read_step(root, 5)
    packs = sorted({ref.pack for row in step.rows for ref in row.refs if ref.pack})
    wanted, outcomes = restored(root, 5), set()
    for number, pack in enumerate(packs):
        file = root / strategies.STORE / "packs" / pack
        whole = file.read_bytes()
        file.write_bytes(b"\0" * len(whole))
        target = tmp_path / str(number)
        told = ""
        try:
            EXPORTS[form](root, 5, target)
        except CorruptionError as error:
            told = str(error)
        if told:
            assert re.search(r"step 5, item 'default'.*leaf .*chunk", told)
            assert not target.exists()
            outcomes.add("told")
        else:
            imports.import_checkpoint(target, tmp_path / "back", number)
            assert_same_tree(restored(tmp_path / "back", number), wanted)
            outcomes.add("healed")
        file.write_bytes(whole)
    assert outcomes == {"told", "healed"}
    assert not list(tmp_path.glob(".*"))


@every_form
def test_a_damaged_manifest(tmp_path, form):
    """It is what is wrong, not a missing step."""
    save(tmp_path / "run", {"w": np.ones(2)})
    (tmp_path / "run" / "3" / "default" / "MANIFEST").write_bytes(b"garbled")
    with pytest.raises(FormatError, match=r"does not begin with a ORBAX-DELTA"):
        EXPORTS[form](tmp_path / "run", 3, tmp_path / "out")


# --- interruption ---------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_failures_leave_nothing(made, tmp_path, form, error):
    """A full disk and Ctrl-C, after some chunks."""

    def fail(what, done, total):
        if done > total // 2:
            raise error

    kinds = (KeyboardInterrupt, StorageError, OSError)
    with pytest.raises(kinds, match=r"full|^$"):
        EXPORTS[form](made, 3, tmp_path / "out", progress=fail)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
import orbax_delta
def die(what, done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
getattr(orbax_delta, sys.argv[1])(sys.argv[2], 3, sys.argv[3], progress=die)
"""


@every_form
def test_a_kill_leaves_nothing_that_looks_finished(made, tmp_path, form):
    """What is left is hidden, no reader takes it, and the export can be repeated."""
    name = f"export_{form}"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, name, made, tmp_path / "out"],
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-1000:]
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.out\.[0-9a-f]{8}\.exporting", left.name)
    with pytest.raises((InvalidInputError, FormatError, NotFoundError)):
        imports.import_checkpoint(left / "out", tmp_path / "back", 0)
    EXPORTS[form](made, 3, tmp_path / "out")
    imports.import_checkpoint(tmp_path / "out", tmp_path / "back", 0)


# --- memory ---------------------------------------------------------------------------

STATE_MIB = 1536
BOUND_MIB = 384

MEASURED = textwrap.dedent("""
    import sys
    from pathlib import Path
    import orbax_delta
    from orbax_delta import exports, imports

    def peak():  # not getrusage, which knows the parent's peak too
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])

    before = peak()
    call = getattr(orbax_delta, sys.argv[1])
    report = call(sys.argv[2], *eval(sys.argv[3]))
    print(report.state_bytes >> 20, (peak() - before) >> 10)
""")


def measured(name, first, *rest):
    """MiB of a state, and of memory that a process takes to pass it on."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("this system does not tell a process its peak")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, name, first, repr(rest)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    state, peak = map(int, done.stdout.split())
    assert peak > 10  # or it was not measured
    return state, peak


@pytest.mark.long
def test_memory_is_bounded(tmp_path, record_property):
    """A leaf is larger than what the process takes, whatever the form."""
    rng = np.random.default_rng(0)
    leaf = rng.standard_normal((STATE_MIB << 18) // 4096 * 4096, dtype=np.float32)
    save(tmp_path / "run", {"w": leaf.reshape(-1, 4096)}, base="store")
    for form in EXPORTS:
        out = tmp_path / form
        state, peak = measured(f"export_{form}", tmp_path / "run", 3, str(out))
        assert state == STATE_MIB
        assert peak < BOUND_MIB, form
        row = {"form": form, "way": "out", "state": state, "peak above start": peak}
        record_property("table: memory of exports and imports, MiB", row)
