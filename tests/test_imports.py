"""Imports: checkpoints that others wrote, and runs that go on from them."""

import asyncio
import contextlib
import doctest
import json
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import buckets
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import strategies
import tensorstore as ts
import test_exports
from strategies import assert_same_tree, open_run
from test_exports import PARAMS, STATE, measured, restored, safetensors, save

import orbax_delta
from orbax_delta import exports, imports, tensorsources, zarrays
from orbax_delta.errors import (
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    OutOfMemoryError,
    StorageError,
)
from orbax_delta.imports import import_checkpoint

FOREIGN = {
    "params": {name: PARAMS[name] for name in ("w", "bf16", "f8")},
    "opt": optax.adamw(1e-3).init({"w": PARAMS["w"]}),
    "key": jax.random.key(7),
    "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
    "words": jnp.arange(8, dtype=jnp.uint32).reshape(2, 4),
    "host": np.arange(5),
    "scalar": jnp.float32(-0.0),
    "sharded": STATE["sharded"],
    "none": None,
    "step": 3,
    "rate": 0.5,
}


def stock(folder, state, **options):
    """A checkpoint as Orbax itself writes it."""
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        args = ocp.args.PyTreeSave(state, custom_metadata={"from": "stock"})
        checkpointer.save(folder, args=args)
    return folder


# --- plain Orbax checkpoints ----------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=str
)
def test_a_stock_checkpoint(tmp_path, options):
    """Every leaf restores bit for bit into the run's own tree; keys are keys."""
    stock(tmp_path / "stock", FOREIGN, **options)
    report = import_checkpoint(tmp_path / "stock", tmp_path / "run", 10)
    assert report.leaves == len(jax.tree.leaves(FOREIGN))
    assert_same_tree(restored(tmp_path / "run", 10, FOREIGN), FOREIGN)
    got = restored(tmp_path / "run", 10)
    assert (got["step"], got["rate"], got["none"]) == (3, 0.5, None)
    assert_same_tree(got["keys"], FOREIGN["keys"])
    assert_same_tree(got["words"], np.asarray(FOREIGN["words"]))
    manifest = strategies.read_step(tmp_path / "run", 10).manifest
    assert manifest.custom_metadata == {"from": "stock"}


def test_a_text_and_a_numpy_scalar(tmp_path):
    """What Orbax's PyTree handler takes besides."""
    stock(tmp_path / "stock", {"name": "ünder", "n": np.float32(2), "yes": True})
    import_checkpoint(tmp_path / "stock", tmp_path / "run", 0)
    wanted = {"name": "ünder", "n": np.float32(2), "yes": True}
    assert_same_tree(restored(tmp_path / "run", 0), wanted)


def test_a_run_goes_on(tmp_path):
    """From a standard checkpoint, by the run's own tree; then only what changed."""
    state = {"w": jnp.asarray(np.random.default_rng(0).normal(size=300_000)), "step": 0}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "stock", state)
    report = import_checkpoint(tmp_path / "stock", tmp_path / "run", 100)
    with open_run(tmp_path / "run") as run:
        state = run.restore(100, state)
        state = {"w": state["w"].at[7].add(1.0), "step": 1}
        run.save(101, state)
        saved = run.handler.last_save_report
        assert "sparse" in saved.chunks_by_form
        assert saved.written_bytes < report.written_bytes / 100
        assert_same_tree(run.restore(101, state), state)


def test_an_export_that_changed(tmp_path):
    """Tensors of another type than the export says are not taken for it."""
    save(tmp_path / "run", {"w": np.ones(3, np.float32)})
    exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")
    spec = tmp_path / "out" / "w" / ".zarray"
    spec.write_text(spec.read_text().replace("<f4", "<i4"))
    with pytest.raises(
        FormatError, match=r"leaf w in .* is int32 \(3,\); expected float32 \(3,\)"
    ):
        import_checkpoint(tmp_path / "out", tmp_path / "back", 0)


def test_a_damaged_array(tmp_path):
    """The array is named, nothing is committed, and the next import works."""
    save(tmp_path / "run", {"w": np.ones(3, np.float32)})
    exports.export_orbax(tmp_path / "run", 3, tmp_path / "out")
    chunk = tmp_path / "out" / "w" / "0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-1])
    with pytest.raises(CorruptionError, match=r"the array 'w' in .* cannot be read"):
        import_checkpoint(tmp_path / "out", tmp_path / "back", 0)
    chunk.unlink()  # which zarr takes for zeros
    with pytest.raises(CorruptionError, match=r"the array 'w' in .* cannot be read"):
        import_checkpoint(tmp_path / "out", tmp_path / "back", 0)
    chunk.write_bytes(whole)
    import_checkpoint(tmp_path / "out", tmp_path / "back", 0)
    assert_same_tree(restored(tmp_path / "back", 0), {"w": np.ones(3, np.float32)})


def test_chunks_of_zeros_that_orbax_left_out(tmp_path):
    """Its first versions did not store them, and say so by saying nothing."""
    stock(tmp_path / "stock", {"w": np.ones(3)}, use_ocdbt=False)
    (tmp_path / "stock" / "w" / "0").unlink()
    file = tmp_path / "stock" / "_METADATA"
    document = json.loads(file.read_text())
    assert document.pop("store_array_data_equal_to_fill_value")
    file.write_text(json.dumps(document))
    import_checkpoint(tmp_path / "stock", tmp_path / "run", 0)
    assert_same_tree(restored(tmp_path / "run", 0), {"w": np.zeros(3)})


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b'{"tree_metadata": []}'])
@pytest.mark.parametrize("name", ["_METADATA", "_sharding", "k/0", "w/.zarray"])
def test_files_of_something_else(tmp_path, name, data):
    """Whatever Orbax raises about them, it is one of our errors and no step."""
    state = {"w": jnp.arange(6.0), "k": jax.random.key(3), "n": 3}
    stock(tmp_path / "stock", state, use_ocdbt=False)
    (tmp_path / "stock" / name).write_bytes(data)
    if name == "_sharding":  # which a checkpoint can do without
        expected = contextlib.suppress(FormatError, CorruptionError)
    else:
        errors = (FormatError, CorruptionError, InvalidInputError)
        expected = pytest.raises(errors, match=re.escape(str(tmp_path / "stock")))
    with expected:
        import_checkpoint(tmp_path / "stock", tmp_path / "run", 0)


def test_tensorstore_reports_to_a_closed_loop(monkeypatch):
    """Why pyproject.toml ignores one warning; once this fails it can go."""
    promise, future = ts.Promise.new()
    told: queue.Queue[BaseException | None] = queue.Queue()
    monkeypatch.setattr(sys, "unraisablehook", lambda found: told.put(found.exc_value))
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(asyncio.wait_for(future, None))
    loop.call_later(0, loop.stop)
    loop.run_forever()
    loop.close()
    promise.set_result(None)
    assert str(told.get(timeout=60)) == "Event loop is closed"
    assert not waiting.done()


@pytest.mark.parametrize("error", [PermissionError, MemoryError])
def test_what_says_nothing_of_the_file(tmp_path, monkeypatch, error):
    """A refusal of the system, or no room, is not called damage."""
    stock(tmp_path / "stock", {"w": np.ones(3)})

    def refusing(*_):
        raise error("not now")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "metadata", refusing)
    with pytest.raises((StorageError, OutOfMemoryError), match="not now"):
        import_checkpoint(tmp_path / "stock", tmp_path / "run", 0)
    assert not (tmp_path / "run").exists()


def test_damaged_metadata(tmp_path):
    """Orbax's own words, with the folder."""
    stock(tmp_path / "stock", {"w": np.ones(3)})
    (tmp_path / "stock" / "_METADATA").write_text("{")
    with pytest.raises(FormatError, match=r"Orbax checkpoint .*stock cannot be read"):
        import_checkpoint(tmp_path / "stock", tmp_path / "run", 0)


def test_stored_chunks_are_read_about_once(tmp_path, monkeypatch):
    """Twice for a save, which goes through a state twice, and not once a piece."""
    state = {str(i): np.random.default_rng(i).normal(size=1 << 18) for i in range(5)}
    stock(tmp_path / "stock", state)
    monkeypatch.setattr(zarrays, "HELD_BYTES", 0)
    reads = []
    real = zarrays.Arrays._read

    def read(self, name, box):
        reads.append(name)
        return real(self, name, box)

    monkeypatch.setattr(zarrays.Arrays, "_read", read)
    import_checkpoint(tmp_path / "stock", tmp_path / "run", 0)
    assert_same_tree(restored(tmp_path / "run", 0), state)
    assert len(state) < len(reads) <= 3 * len(state)


# --- safetensors ----------------------------------------------------------------------


def test_files_of_the_real_package(tmp_path):
    """Names become paths at the dots, arrays numpy's."""
    safetensors()
    from safetensors.numpy import save_file

    tensors = {
        "model.layers.0.w": np.random.default_rng(0).normal(size=(70, 9)),
        "model.layers.0.b": np.zeros((0, 3), np.float32),
        "model.step": np.array(3),
        "half": np.ones(5, np.float16),
        "yes": np.array([True, False]),
        "c": np.ones(3, np.complex64),
    }
    save_file(tensors, tmp_path / "one.safetensors")
    import_checkpoint(tmp_path / "one.safetensors", tmp_path / "run", 1)
    layer = {
        "w": tensors["model.layers.0.w"],
        "b": tensors["model.layers.0.b"],
    }
    wanted = {
        "model": {"layers": {"0": layer}, "step": tensors["model.step"]},
        **{name: tensors[name] for name in ("half", "yes", "c")},
    }
    assert_same_tree(restored(tmp_path / "run", 1), wanted)
    import_checkpoint(
        tmp_path,
        tmp_path / "run",
        2,
        split=lambda name: ("all", name),
        include=["all/c"],
    )
    assert_same_tree(restored(tmp_path / "run", 2), {"all": {"c": tensors["c"]}})


def test_types_that_numpy_lacks(tmp_path):
    """bf16 and f8 by their bits, through files that name nothing of this package."""
    tensors = {name: np.asarray(PARAMS[name]) for name in ("bf16", "f8", "f8_5")}
    save(tmp_path / "run", tensors)
    exports.export_safetensors(tmp_path / "run", 3, tmp_path / "out")
    import_checkpoint(
        tmp_path / "out", tmp_path / "back", 0, split=tensorsources.undotted
    )
    assert_same_tree(restored(tmp_path / "back", 0), tensors)


def test_tensors_that_changed(tmp_path, caplog):
    """Another type than exported: they are taken by their names, with a warning."""
    safetensors()
    from safetensors import safe_open
    from safetensors.numpy import save_file

    save(tmp_path / "run", {"w": np.ones(3, np.float32), "step": 3})
    exports.export_safetensors(tmp_path / "run", 3, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        metadata = file.metadata()
    narrow = {"w": np.ones(3, np.float16)}
    save_file(narrow, tmp_path / "narrow.safetensors", metadata=metadata)
    import_checkpoint(tmp_path / "narrow.safetensors", tmp_path / "back", 0)
    assert_same_tree(restored(tmp_path / "back", 0), narrow)
    assert "are not those any more that this package exported" in caplog.text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a", "a.b"), r"the tensor 'a.b' lies in another one's place"),
        (("a.b", "a"), r"the tensor 'a' lies in another one's place"),
        (("a.b.c", "a.b"), r"the tensor 'a.b' lies in another one's place"),
    ],
)
def test_paths_that_meet(tmp_path, names, words):
    """One leaf cannot lie in another."""
    safetensors()
    from safetensors.numpy import save_file

    # Its own order is by type, then name.
    kinds = (np.int64, np.int32)
    tensors = {name: np.ones(2, kind) for name, kind in zip(names, kinds)}
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(InvalidInputError, match=words):
        import_checkpoint(tmp_path / "x.safetensors", tmp_path / "run", 0)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (lambda _: ("same",), r"'a' and 'b' would both be the leaf \('same',\)"),
        (lambda _: (), r"the path of tensor 'a' is \(\); expected texts"),
        (lambda _: (1,), r"the path of tensor 'a' is \(1,\); expected texts"),
        (lambda _: 3, r"the path of tensor 'a' is 3; expected texts"),
        (lambda name: name, r"the path of tensor 'a' is 'a'; expected texts"),
        (lambda name: name[5], r"split fails at the tensor 'a': IndexError: string"),
        (lambda _: ("x",) * 101, r"tensor 'a' is 101 levels deep; a tree has at most"),
    ],
)
def test_splits_that_are_none(tmp_path, split, words):
    """What a function of one's own may do wrong."""
    safetensors()
    from safetensors.numpy import save_file

    save_file({"a": np.ones(2), "b": np.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(InvalidInputError, match=words):
        import_checkpoint(tmp_path / "x.safetensors", tmp_path / "run", 0, split=split)


def test_indices_that_do_not_fit(tmp_path):
    """Files that are missing, lie elsewhere or belong to nothing."""
    save(tmp_path / "run", STATE)
    out = tmp_path / "out"
    exports.export_safetensors(tmp_path / "run", 3, out, shard_bytes=9000)
    index = out / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    (first, second, *_) = sorted(out.glob("*.safetensors"))
    first.rename(out / "aside")
    with pytest.raises(NotFoundError, match=rf"not there: \['{first.name}'\]"):
        import_checkpoint(out, tmp_path / "back", 0)
    shutil.copy(second, first)
    with pytest.raises(FormatError, match=r"both .* and .* hold the tensor"):
        import_checkpoint(out, tmp_path / "back", 0)
    document["weight_map"]["x"] = "../aside"
    index.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=r"names files outside of its folder"):
        import_checkpoint(out, tmp_path / "back", 0)
    for text in ("[]", '{"weight_map": {}}'):
        index.write_text(text)
        with pytest.raises(FormatError, match=r"is no index of safetensors"):
            import_checkpoint(out, tmp_path / "back", 0)
    index.unlink()
    index.mkdir()
    with pytest.raises(StorageError, match=r"could not import .*out.*Is a directory"):
        import_checkpoint(out, tmp_path / "back", 0)
    index.rmdir()
    with pytest.raises(FormatError, match=r"holds \d+ safetensors files and no model"):
        import_checkpoint(out, tmp_path / "back", 0)


def test_an_index_that_says_otherwise(tmp_path):
    """Of a tensor that no file holds, or another file: the state is not whole."""
    safetensors()
    from safetensors.numpy import save_file

    for name in "ab":
        save_file({name: np.ones(2)}, tmp_path / f"{name}.safetensors")
    # As a library for diffusion models calls it.
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    good = {"a": "a.safetensors", "b": "b.safetensors"}
    for more in ({"c": "a.safetensors"}, {"b": "a.safetensors"}):
        index.write_text(json.dumps({"weight_map": good | more}))
        with pytest.raises(
            FormatError, match=r"says that a\.safetensors holds the tensor '[bc]', wh"
        ):
            import_checkpoint(tmp_path, tmp_path / "run", 0)
    assert not (tmp_path / "run").exists()
    index.write_text(json.dumps({"weight_map": good}))
    import_checkpoint(tmp_path, tmp_path / "run", 0)
    assert_same_tree(restored(tmp_path / "run", 0), {n: np.ones(2) for n in "ab"})


@pytest.mark.parametrize("shape", [[1] * 65, [0, 1 << 62, 4], [0, 1 << 64]], ids=len)
def test_shapes_that_no_step_holds(tmp_path, shape):
    """They are seen before anything is written."""
    place = {"dtype": "U8", "shape": shape, "data_offsets": [0, int(0 not in shape)]}
    header = json.dumps({"w": place}).encode()
    file = tmp_path / "x.safetensors"
    length = len(header).to_bytes(8, "little")
    file.write_bytes(length + header + bytes(int(0 not in shape)))
    with pytest.raises(InvalidInputError, match=r"leaf w of .* which no step can hold"):
        import_checkpoint(file, tmp_path / "run", 0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda document: document | {"texts": {}}, r"header is damaged"),
        (lambda document: document | {"names": 3}, r"header is damaged"),
        (lambda document: document | {"manifest": "??"}, r"carries no MANIFEST"),
        (lambda document: 3, r"header is damaged"),
        (
            lambda document: document | {"texts": {"name": "!"}},
            r"header is damaged: leaf name",
        ),
        (
            lambda document: document | {"texts": {"name": "AAAA"}},
            r"header is damaged: leaf name has 3 bytes",
        ),
    ],
)
def test_what_goes_along_is_damaged(tmp_path, change, words):
    """It is said, not guessed around."""
    safetensors()
    from safetensors import safe_open
    from safetensors.numpy import save_file

    save(tmp_path / "run", {"w": np.ones(3), "name": "runs"})
    exports.export_safetensors(tmp_path / "run", 3, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        metadata = file.metadata()
    document = change(json.loads(metadata["orbax_delta"]))
    metadata = metadata | {"orbax_delta": json.dumps(document)}
    save_file({"w": np.ones(3)}, tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(FormatError, match=words):
        import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back", 0)


def test_a_file_that_was_cut_off(tmp_path):
    """Before the import and in the middle of it."""
    save(tmp_path / "run", {"w": np.ones(3000), "v": np.ones(3000)})
    exports.export_safetensors(tmp_path / "run", 3, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    whole = file.read_bytes()

    def cut(what, done, total):
        file.write_bytes(whole[:-1])

    with pytest.raises(FormatError, match=r"became shorter meanwhile"):
        import_checkpoint(tmp_path / "out", tmp_path / "back", 0, progress=cut)
    with pytest.raises(FormatError, match=r"the file was cut off"):
        import_checkpoint(tmp_path / "out", tmp_path / "back", 0)


# --- where from, where to -------------------------------------------------------------


def test_a_delta_step_of_another_root(tmp_path):
    """Its item's folder is named."""
    save(tmp_path / "run", STATE)
    import_checkpoint(tmp_path / "run" / "3" / "default", tmp_path / "back", 1)
    assert_same_tree(restored(tmp_path / "back", 1), restored(tmp_path / "run"))


def test_an_item_beside_others(tmp_path):
    """A root of several items gets one of them."""
    stock(tmp_path / "stock", {"w": np.ones(3)})
    import_checkpoint(tmp_path / "stock", tmp_path / "run", 4, item="params")
    registry = orbax_delta.handler_registry(item=("params",))
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry) as manager:
        args = ocp.args.Composite(params=orbax_delta.DeltaRestore())
        assert_same_tree(manager.restore(4, args=args).params, {"w": np.ones(3)})


def test_beside_a_run(tmp_path):
    """Nothing of the root is deleted, and what it has is shared."""
    state = {"w": np.random.default_rng(0).normal(size=100_000)}
    save(tmp_path / "run", state, step=1)
    before = strategies.listing(tmp_path / "run")
    stock(tmp_path / "stock", state)
    import_checkpoint(tmp_path / "stock", tmp_path / "run", 2)
    after = strategies.listing(tmp_path / "run")
    assert before.keys() - after.keys() == set()
    assert_same_tree(restored(tmp_path / "run", 1), state)
    assert_same_tree(restored(tmp_path / "run", 2), state)


@pytest.mark.parametrize("step", [-1, "3", 1.5, True])
def test_steps_that_are_none(tmp_path, step):
    """A step is a number."""
    stock(tmp_path / "stock", {"w": np.ones(3)})
    with pytest.raises(
        InvalidInputError, match=r"step is .*; expected a number from 0"
    ):
        import_checkpoint(tmp_path / "stock", tmp_path / "run", step)


@pytest.mark.parametrize("item", ["", ".", "..", "a/b", "metrics"])
def test_items_that_are_none(tmp_path, item):
    """Folders that cannot be, and the one that Orbax keeps metrics in."""
    stock(tmp_path / "stock", {"w": np.ones(3)})
    with pytest.raises(InvalidInputError, match=r"the item .* cannot be; expected the"):
        import_checkpoint(tmp_path / "stock", tmp_path / "run", 0, item=item)
    assert not (tmp_path / "run").exists()


def test_what_the_system_refuses(tmp_path):
    """A root below a file, a source of too long a name, a link to nothing."""
    stock(tmp_path / "stock", {"w": np.ones(3)})
    (tmp_path / "file").write_text("mine")
    refused = {tmp_path / "file": "File exists", tmp_path / "file" / "x": "Not a dir"}
    for root, words in refused.items():
        with pytest.raises(StorageError, match=rf"could not import .*{words}"):
            import_checkpoint(tmp_path / "stock", root, 0)
    with pytest.raises(StorageError, match=r"could not import .*name too long"):
        import_checkpoint("/" + "x" * 500, tmp_path / "run", 0)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(StorageError, match=r"could not import .*No such file"):
        import_checkpoint(tmp_path / "links", tmp_path / "run", 0)
    assert not (tmp_path / "run").exists()


def test_into_a_bucket(s3):
    """A root may be one: a new one, and that of a run."""
    if not buckets.installed("s3fs"):
        pytest.skip(buckets.NEEDS_S3FS)
    with tempfile.TemporaryDirectory() as folder:
        state = {"w": np.arange(3000)}
        stock(Path(folder) / "stock", state)
        root = f"s3://{buckets.BUCKET}/{uuid.uuid4().hex}"
        for step in (3, 4):
            import_checkpoint(Path(folder) / "stock", root, step)
            exports.export_delta(root, step, Path(folder) / str(step))
            imports_of = Path(folder) / "back"
            import_checkpoint(Path(folder) / str(step), imports_of, step)
            assert_same_tree(restored(imports_of, step), state)
        with pytest.raises(InvalidInputError, match=r"has a step 4 already"):
            import_checkpoint(Path(folder) / "stock", root, 4)


def test_a_step_that_is_there(tmp_path):
    """It is left as it is."""
    save(tmp_path / "run", {"w": np.ones(3)})
    before = strategies.listing(tmp_path / "run" / "3")
    stock(tmp_path / "stock", {"w": np.zeros(3)})
    with pytest.raises(InvalidInputError, match=r"has a step 3 already; it was left"):
        import_checkpoint(tmp_path / "stock", tmp_path / "run", 3)
    assert strategies.listing(tmp_path / "run" / "3") == before


def test_what_is_no_checkpoint(tmp_path):
    """Nothing there, a folder of something else, one folder too high, a bucket."""
    with pytest.raises(NotFoundError, match=r"there is no .*none; expected a check"):
        import_checkpoint(tmp_path / "none", tmp_path / "run", 0)
    with pytest.raises(
        InvalidInputError, match=r"is no plain Orbax checkpoint .*item$"
    ):
        import_checkpoint(tmp_path, tmp_path / "run", 0)
    stock(tmp_path / "9" / "default", {"w": np.ones(3)})
    with pytest.raises(InvalidInputError, match=r"It holds default; name one of these"):
        import_checkpoint(tmp_path / "9", tmp_path / "run", 0)
    with pytest.raises(InvalidInputError, match=r"gs://b/x is not on this machine"):
        import_checkpoint("gs://b/x", tmp_path / "run", 0)
    assert not (tmp_path / "run").exists()


def test_a_failed_import_leaves_no_step(tmp_path):
    """The root is as it was, and takes the next import."""
    save(tmp_path / "run", {"w": np.ones(3)})
    stock(tmp_path / "stock", {"a": np.ones(3000), "b": np.arange(3000)})

    def fail(what, done, total):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match=r"stopped"):
        import_checkpoint(tmp_path / "stock", tmp_path / "run", 4, progress=fail)
    with open_run(tmp_path / "run") as run:
        assert run.manager.all_steps() == [3]
    import_checkpoint(tmp_path / "stock", tmp_path / "run", 4)
    assert_same_tree(restored(tmp_path / "run", 4)["b"], np.arange(3000))


KILLED = """
import os, signal, sys
import orbax_delta
def die(what, done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
orbax_delta.import_checkpoint(sys.argv[1], sys.argv[2], 4, progress=die)
"""


def test_a_kill_leaves_no_step(tmp_path):
    """The root has the steps that it had, and takes the import again."""
    state = {str(i): np.random.default_rng(i).normal(size=300_000) for i in range(3)}
    save(tmp_path / "run", {"w": np.ones(3)})
    stock(tmp_path / "stock", state)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "stock", tmp_path / "run"],
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-1000:]
    with open_run(tmp_path / "run") as run:
        assert run.manager.all_steps() == [3]
    import_checkpoint(tmp_path / "stock", tmp_path / "run", 4)
    assert_same_tree(restored(tmp_path / "run", 4), state)
    strategies.check_clean(tmp_path / "run", [3, 4])


# --- memory, documentation ------------------------------------------------------------


@pytest.mark.long
def test_memory_is_bounded(tmp_path, record_property):
    """A leaf is larger than what the process takes, unless Orbax stored it in one."""
    mib = test_exports.STATE_MIB
    rng = np.random.default_rng(0)
    leaf = rng.standard_normal((mib << 18) // 4096 * 4096, dtype=np.float32)
    state = {"w": leaf.reshape(-1, 4096)}
    save(tmp_path / "run", state, base="store")
    exports.export_orbax(tmp_path / "run", 3, tmp_path / "orbax")
    exports.export_safetensors(tmp_path / "run", 3, tmp_path / "safetensors")
    exports.export_delta(tmp_path / "run", 3, tmp_path / "delta")
    for step, form in enumerate(("orbax", "safetensors", "delta")):
        into = str(tmp_path / "into")
        state_mib, peak = measured("import_checkpoint", tmp_path / form, into, step)
        assert state_mib == mib
        assert peak < test_exports.BOUND_MIB, form
        row = {"form": form, "way": "in", "state": state_mib, "peak above start": peak}
        record_property("table: memory of exports and imports, MiB", row)


def test_examples(tmp_path):
    """What the docstrings show works."""
    state = {"params": {"w": jnp.ones((4, 2))}, "step": 3}
    save(tmp_path / "run", state)
    names = {"root": tmp_path / "run", "exports": tmp_path}
    for module, count in ((exports, 7), (imports, 2)):
        tried = doctest.testmod(module, extraglobs=names)
        assert (tried.failed, tried.attempted) == (0, count)
