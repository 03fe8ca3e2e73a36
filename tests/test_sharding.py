"""Saving and restoring across meshes: 8, 4, 2, 1 devices, 2-D, replicated, moved."""

import json
import pathlib
import subprocess
import sys
import tempfile
import textwrap

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from hypothesis import given
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)
from strategies import assert_same_leaf, assert_same_tree, bits, open_run, sharding_of

import orbax_delta


@pytest.fixture(autouse=True, scope="module")
def _unsynced():
    with pytest.MonkeyPatch.context() as monkeypatch:
        strategies.skip_disk_sync(monkeypatch)
        yield


SHARDINGS = {
    "8 rows": lambda: sharding_of((8,), "x", "x"),
    "4 columns": lambda: sharding_of((4,), "x", None, "x"),
    "2 rows": lambda: sharding_of((2,), "x", "x"),
    "1": lambda: sharding_of((1,), "x", "x"),
    "4 by 2": lambda: sharding_of((4, 2), "xy", "x", "y"),
    "2 by 4 on one axis": lambda: sharding_of((2, 4), "xy", None, ("y", "x")),
    "replicated": lambda: sharding_of((8,), "x"),
    "half replicated": lambda: sharding_of((4, 2), "xy", "x"),
    "third device": lambda: SingleDeviceSharding(jax.devices()[2]),
}


def values(step=0):
    """A (48, 16) fp32 array after `step` changes of single elements."""
    array = np.random.default_rng(0).standard_normal((48, 16)).astype(np.float32)
    for number in range(step):
        array[(7 * number) % 48, (5 * number) % 16] += 1
    return array


@pytest.mark.parametrize("saved", SHARDINGS)
def test_every_sharding_restores_as_every_other(root, saved):
    """From one sharding to each: bits, sharding and the shards themselves."""
    tree = {"w": jax.device_put(values(), SHARDINGS[saved]())}
    with open_run(root, chunk_bytes=256) as run:
        run.save(0, tree)
        assert_same_tree(run.restore(0), tree)
        assert run.restore(0)["w"].sharding == tree["w"].sharding
        for make in SHARDINGS.values():
            target = jax.ShapeDtypeStruct((48, 16), jnp.float32, sharding=make())
            restored = run.restore(0, {"w": target})["w"]
            assert restored.sharding == make()
            assert_same_leaf(restored, tree["w"])
            for shard in restored.addressable_shards:
                assert bits(shard.data) == bits(values()[shard.index])


def test_run_that_moves_from_mesh_to_mesh(root):
    """8, 4, 2, 1 and again 8 devices, each a new run that restores, then saves."""
    order = ["8 rows", "4 by 2", "4 columns", "2 rows", "1", "replicated", "8 rows"]
    for step, name in enumerate(order):
        sharding = SHARDINGS[name]()
        with open_run(root, chunk_bytes=256) as run:
            if step:
                target = jax.ShapeDtypeStruct((48, 16), jnp.float32, sharding=sharding)
                restored = run.restore(step - 1, {"w": target})
                assert_same_leaf(np.asarray(restored["w"]), values(step - 1))
            run.save(step, {"w": jax.device_put(values(step), sharding)})
    with open_run(root) as run:
        for step in range(len(order)):
            assert bits(run.restore(step)["w"]) == bits(values(step))


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ("8 rows", "4 by 2", 0),  # every old box is cut in two
        ("8 rows", "2 rows", 24),  # every old box lies in one new shard
        ("4 by 2", "8 rows", 16),  # boxes of 4 rows, shards of 6: two in three
        ("8 rows", "replicated", 24),
        ("replicated", "8 rows", 24),
        ("2 rows", "third device", 24),
    ],
)
def test_boxes_that_lie_in_one_new_shard_keep_their_identity(root, first, then, kept):
    """The first save on another mesh refers to what it can, writes the rest."""
    with open_run(root, chunk_bytes=128) as run:
        run.save(0, {"w": jax.device_put(values(), SHARDINGS[first]())})
        before = run.handler.last_save_report
    sharding = SHARDINGS[then]()
    with open_run(root, chunk_bytes=128) as run:
        target = jax.ShapeDtypeStruct((48, 16), jnp.float32, sharding=sharding)
        restored = run.restore(0, {"w": target})
        run.save(1, restored)
        report = run.handler.last_save_report
        assert report.chunks_by_form.get("reference", 0) == kept
        assert_same_tree(run.restore(1), restored)
    assert before.chunks == 24


def test_first_save_after_a_restart_is_a_delta(root):
    """Restore, change one element, save: one small record, the rest by reference."""
    sharding = SHARDINGS["8 rows"]()
    with open_run(root, chunk_bytes=256) as run:
        run.save(0, {"w": jax.device_put(values(0), sharding), "step": 0})
    with open_run(root, chunk_bytes=256) as run:
        assert_same_leaf(np.asarray(run.restore(0)["w"]), values(0))
        run.save(1, {"w": jax.device_put(values(1), sharding), "step": 1})
        report = run.handler.last_save_report
        assert report.elements_changed == 1
        assert report.chunks_by_form == {"reference": 15, "sparse": 1}
        assert report.read_bytes > 0  # the base's content came from the store
        # Without a restore nothing is known of the store: all is written.
    with open_run(root, chunk_bytes=256) as run:
        run.save(2, {"w": jax.device_put(values(2), sharding), "step": 2})
        assert run.handler.last_save_report.chunks_by_form == {"planes": 16}
        for step in range(3):
            assert bits(run.restore(step)["w"]) == bits(values(step))


@st.composite
def mesh_shardings(draw):
    """A sharding of a (24, 8) array over some of the devices."""
    sizes = draw(st.sampled_from([(1,), (2,), (4,), (8,), (2, 2), (2, 4), (4, 2)]))
    names = "xyz"[: len(sizes)]
    axes = draw(st.permutations([*names, None, None]))
    return sharding_of(sizes, names, *axes[:2])


@given(
    plan=st.lists(
        st.tuples(mesh_shardings(), strategies.SEEDS), min_size=2, max_size=4
    ),
    chunk_bytes=st.sampled_from([64, 96, 256, 4096]),
)
def test_any_sequence_of_meshes(tmp_path_factory, plan, chunk_bytes):
    """Any shardings, any chunk size: each step restores onto each mesh of the plan."""
    array = np.random.default_rng(1).integers(0, 99, (24, 8)).astype(np.int16)
    saved = []
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as name:
        root = pathlib.Path(name) / "run"
        with open_run(root, chunk_bytes=chunk_bytes) as run:
            for step, (sharding, seed) in enumerate(plan):
                array = strategies.edited([array], [("few", seed)])[0]
                saved.append(array)
                run.save(step, [jax.device_put(array, sharding)])
            for step, expected in enumerate(saved):
                for sharding, _ in plan:
                    target = jax.ShapeDtypeStruct((24, 8), jnp.int16, sharding=sharding)
                    (restored,) = run.restore(step, [target])
                    assert restored.sharding == sharding
                    assert bits(restored) == bits(expected)


def test_mesh_set_globally_and_explicit_axes(root):
    """Saving and restoring under `jax.set_mesh`, with explicit axis types."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    tree = {"w": jax.device_put(values(), sharding), "alone": jnp.arange(3)}
    with open_run(root) as run:
        with jax.set_mesh(mesh):
            run.save(0, tree)
            assert_same_tree(run.restore(0), tree)
        restored = run.restore(0)
        assert_same_tree(restored, tree)
        assert restored["w"].sharding == sharding


@pytest.mark.parametrize("kind", ["unpinned_host", "pinned_host"])
def test_memory_kind_is_kept(root, kind):
    """An array in host memory comes back there."""
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if kind not in kinds:
        pytest.skip(f"CPU devices have {sorted(kinds)}")
    sharding = sharding_of((2,), "x", "x").with_memory_kind(kind)
    tree = {"w": jax.device_put(values(), sharding)}
    with open_run(root) as run:
        run.save(0, tree)
        for restored in (run.restore(0), run.restore(0, tree)):
            assert_same_tree(restored, tree)
            assert restored["w"].sharding.memory_kind == kind


def test_sub_byte_leaf_across_meshes(root):
    """Packed 4-bit elements, an odd number a shard, cross meshes too."""
    array = strategies.random_array(np.random.default_rng(2), "int4", (8, 3))
    tree = {"w": jax.device_put(array, sharding_of((8,), "x", "x"))}
    with open_run(root, chunk_bytes=64) as run:
        run.save(0, tree)
        for sharding in (sharding_of((2,), "x", "x"), sharding_of((1,), "x")):
            target = jax.ShapeDtypeStruct((8, 3), jnp.int4, sharding=sharding)
            assert_same_leaf(run.restore(0, {"w": target})["w"], tree["w"])


def test_sharding_that_does_not_divide_the_shape(root):
    """The error names the leaf, its shape and what does not fit."""
    with open_run(root) as run:
        run.save(0, {"a": {"w": jnp.arange(6.0)}})
        target = jax.ShapeDtypeStruct(
            (6,), jnp.float32, sharding=sharding_of((4,), "x", "x")
        )
        with pytest.raises(
            orbax_delta.StructureError,
            match=r"leaf a/w of shape \(6,\) does not fit its target sharding: .*4",
        ):
            run.restore(0, {"a": {"w": target}})


_ON_TWO_DEVICES = """
    import json, logging, sys
    import jax, jax.numpy as jnp, numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    import orbax_delta

    class Keep(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    logging.getLogger("orbax_delta").addHandler(Keep(logging.WARNING))
    messages, result = [], {"devices": jax.device_count()}

    def describe(name, tree):
        result[name] = {
            key: [type(x).__name__, np.asarray(x).tolist(), len(getattr(
                x, "devices", lambda: [])())]
            for key, x in tree.items() if key != "key"
        }
        key = tree["key"]
        result[name]["key"] = np.asarray(jax.random.key_data(key)).tolist()
        result[name]["warnings"] = list(messages)
        messages.clear()

    with ocp.CheckpointManager(
        sys.argv[1], handler_registry=orbax_delta.handler_registry()
    ) as manager:
        describe("no target", manager.restore(0))
        like = {
            "w": jax.ShapeDtypeStruct((8,), jnp.float32),
            "b": jax.ShapeDtypeStruct((8,), jnp.int32),
            "host": np.zeros(2),
            "one": jax.ShapeDtypeStruct((2,), jnp.float32),
            "key": jax.eval_shape(lambda: jax.random.key(0)),
        }
        args = ocp.args.StandardRestore(like)
        describe("no sharding", manager.restore(0, args=args))
        sharding = NamedSharding(
            Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x")
        )
        for name in "wb":
            like[name] = jax.ShapeDtypeStruct(
                like[name].shape, like[name].dtype, sharding=sharding
            )
        args = ocp.args.StandardRestore(like)
        describe("sharding", manager.restore(0, args=args))
        metadata = manager.item_metadata(0).tree
        result["metadata"] = [
            list(metadata["w"].shape), str(metadata["w"].dtype),
            str(metadata["w"].sharding),
        ]
    print("RESULT " + json.dumps(result))
"""


def test_on_fewer_devices(root):
    """Without a target numpy and one warning; a target decides; metadata reads."""
    sharding = sharding_of((8,), "x", "x")
    tree = {
        "w": jax.device_put(jnp.arange(8.0), sharding),
        "b": jax.device_put(jnp.arange(8), sharding),
        "host": np.ones(2),
        "one": jnp.ones(2),
        "key": jax.device_put(jax.random.key(5), sharding_of((8,), "x")),
    }
    with open_run(root) as run:
        run.save(0, tree)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_ON_TWO_DEVICES), str(root)],
        env={
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(pathlib.Path(orbax_delta.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["devices"] == 2
    w, b = [float(i) for i in range(8)], list(range(8))
    key = np.asarray(jax.random.key_data(tree["key"])).tolist()

    plain = result["no target"]
    assert plain["w"] == ["ndarray", w, 0]
    assert plain["b"] == ["ndarray", b, 0]
    assert plain["one"] == ["ArrayImpl", [1.0, 1.0], 1]
    assert plain["key"] == key
    (warning,) = plain["warnings"]
    assert "step 0" in warning
    assert "3 leaves" in warning
    assert "This process has 2 devices" in warning

    placed = result["no sharding"]
    assert placed["w"] == ["ArrayImpl", w, 1]
    assert placed["host"] == ["ndarray", [1.0, 1.0], 0]
    assert len(placed["warnings"]) == 1

    sharded = result["sharding"]
    assert sharded["w"] == ["ArrayImpl", w, 2]
    assert sharded["b"] == ["ArrayImpl", b, 2]
    assert result["metadata"][:2] == [[8], "float32"]
    assert "x" in result["metadata"][2]
