"""Restoring into any target: kinds, casts, subsets, arguments of Orbax, errors."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from strategies import assert_same_leaf, assert_same_tree, bits, open_run

import orbax_delta
from orbax_delta.store import Folder


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def state():
    """Every kind of leaf once, in a nested tree."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((64, 32)).astype(np.float32)
    return {
        "params": {
            "w": jnp.asarray(weights),
            "half": jnp.asarray(weights, jnp.bfloat16),
            "bias": rng.standard_normal(32),
        },
        "opt": (jnp.arange(6, dtype=jnp.int32), [np.float32(0.5), 7]),
        "key": jax.random.key(3),
        "name": "run",
        "raw": b"\x00\xff",
        "flag": True,
        "rate": 0.1,
    }


@pytest.fixture
def run(root):
    """A manager that holds `state()` as step 3."""
    with open_run(root, chunk_bytes=1024, pack_bytes=1024) as opened:
        opened.save(3, state())
        yield opened


# --- kinds of targets ---------------------------------------------------------------


def test_no_arguments_at_all(run):
    """`restore(step)` gives everything as it was saved; so does the latest step."""
    assert_same_tree(run.manager.restore(3), state())
    assert_same_tree(run.manager.restore(None), state())


@pytest.mark.parametrize(
    "args",
    [
        orbax_delta.DeltaRestore,
        ocp.args.StandardRestore,
        ocp.args.PyTreeRestore,
    ],
    ids=lambda cls: cls.__name__,
)
def test_each_kind_of_arguments(run, args):
    """Our own and both of Orbax's arguments, without and with a target."""
    assert_same_tree(run.manager.restore(3, args=args()), state())
    assert_same_tree(run.manager.restore(3, args=args(state())), state())
    known = {key: state()[key] for key in ("params", "opt", "key", "flag", "rate")}
    target = {**state(), **jax.tree.map(ocp.utils.to_shape_dtype_struct, known)}
    assert_same_tree(run.manager.restore(3, args=args(target)), state())


def test_values_of_a_concrete_target_are_ignored(run):
    """Only kind, shape and dtype of a target count."""
    zeros = jax.tree.map(
        lambda x: x if isinstance(x, str | bytes) else x * 0,
        {key: value for key, value in state().items() if key not in ("key", "flag")},
    )
    target = {**zeros, "key": jax.random.key(0), "flag": False}
    assert_same_tree(run.restore(3, target), state())


def test_kind_of_the_target_decides(root):
    """A numpy array for jax, jax for numpy, Python for arrays, arrays for Python."""
    tree = {
        "jax": jnp.arange(4.0),
        "numpy": np.arange(4, dtype=np.int16),
        "struct": np.arange(4, dtype=np.int64),
        "zero": jnp.asarray(2.5),
        "one": np.asarray(3),
        "scalar": np.float32(1.5),
        "int": 7,
        "float": 0.5,
    }
    target = {
        "jax": np.zeros(4, np.float32),
        "numpy": jnp.zeros(4, jnp.int16),
        # Without a sharding what was on the host stays there, as Orbax has it.
        "struct": jax.ShapeDtypeStruct((4,), np.int64),
        "zero": 0.0,
        "one": 0,
        "scalar": jnp.zeros((), jnp.float32),
        "int": np.asarray(0, np.int64),
        "float": jax.ShapeDtypeStruct((), jnp.float32),
    }
    expected = {
        "jax": np.arange(4, dtype=np.float32),
        "numpy": jnp.arange(4, dtype=jnp.int16),
        "struct": np.arange(4, dtype=np.int64),
        "zero": 2.5,
        "one": 3,
        "scalar": jnp.asarray(1.5, jnp.float32),
        "int": np.asarray(7, np.int64),
        "float": np.asarray(0.5, np.float32),
    }
    with open_run(root) as run:
        run.save(0, tree)
        assert_same_tree(run.restore(0, target), expected)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("bfloat16", "float32"),
        ("float64", "float32"),
        ("int32", "float32"),
        ("float32", "float8_e4m3fn"),
        ("int8", "int32"),
        ("bool", "int8"),
        ("int4", "int8"),
    ],
)
def test_cast(root, stored, wanted):
    """Another dtype in the target is a cast, exactly numpy's."""
    rng = np.random.default_rng(1)
    source = strategies.random_array(rng, stored, (40, 5))
    source = np.nan_to_num(source) if source.dtype.kind == "f" else source
    with np.errstate(all="ignore"):
        expected = source.astype(jnp.dtype(wanted))
    with open_run(root) as run:
        run.save(0, {"w": source})
        on_device = run.restore(0, {"w": jnp.zeros((40, 5), wanted)})
        assert_same_leaf(on_device["w"], jnp.asarray(expected))
        on_host = run.restore(0, {"w": np.zeros((40, 5), jnp.dtype(wanted))})
        assert_same_leaf(on_host["w"], expected)


def test_cast_that_loses_fractions_warns(run, caplog):
    """Floats asked for as ints come with a warning that names the leaf."""
    with caplog.at_level(logging.WARNING, "orbax_delta"):
        restored = run.manager.restore(
            3,
            args=orbax_delta.DeltaRestore(
                {"params": {"w": jax.ShapeDtypeStruct((64, 32), jnp.int8)}},
                partial_restore=True,
            ),
        )
    assert restored["params"]["w"].dtype == jnp.int8
    (message,) = [r.getMessage() for r in caplog.records if r.name == "orbax_delta"]
    assert re.match(r"leaf params/w is cast from float32 to int8", message)


@pytest.mark.parametrize(
    ("stored", "wanted", "got"),
    [
        (np.array([300, 1]), np.zeros(2, np.int8), "[44, 1]"),
        (2.5, 0, "2"),
        (3, True, "True"),
        (np.array(2.5), 0, "2"),
    ],
    ids=["int8", "float to int", "int to bool", "array to int"],
)
def test_value_that_changes_in_a_cast_warns(root, caplog, stored, wanted, got):
    """A cast is done as asked, never without a word when it changes a value."""
    with open_run(root) as run, caplog.at_level(logging.WARNING, "orbax_delta"):
        run.save(0, {"x": stored})
        restored = run.restore(0, {"x": wanted})["x"]
    assert str(restored.tolist() if hasattr(restored, "tolist") else restored) == got
    messages = [r.getMessage() for r in caplog.records if r.name == "orbax_delta"]
    assert [m for m in messages if m.startswith("leaf x ")]


def test_restored_arrays_can_be_donated(root):
    """Copies on several devices do not share memory that a donation would reuse."""
    sharding = strategies.sharding_of((8,), "x")
    values = np.arange(1 << 12, dtype=np.float32)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    with open_run(root) as run:
        run.save(0, {"w": jax.device_put(values, sharding)})
        restored = run.restore(0)["w"]
        advanced = step(restored)
        for shard in advanced.addressable_shards:
            assert bits(shard.data) == bits(values + 1)
        assert_same_leaf(np.asarray(run.restore(0)["w"]), values)


def test_restored_numpy_is_the_callers_own(run):
    """Writing into a restored numpy leaf changes neither the step nor the next save."""
    first = run.restore(3)
    first["params"]["bias"][:] = 5.0
    assert_same_tree(run.restore(3), state())
    run.save(4, first)
    assert_same_tree(run.restore(4), first)
    assert_same_tree(run.restore(3), state())


# --- subsets ------------------------------------------------------------------------


def subset_target():
    """A target that has only some leaves of `state()`."""
    return {"params": {"half": state()["params"]["half"]}, "rate": 0.0}


@pytest.mark.parametrize(
    "args",
    [
        orbax_delta.DeltaRestore(subset_target(), partial_restore=True),
        ocp.args.PyTreeRestore(subset_target(), partial_restore=True),
        ocp.args.PyTreeRestore(subset_target(), transforms={}),
    ],
    ids=["delta", "pytree", "transforms"],
)
def test_partial_restore(run, args):
    """Leaves that the target lacks are left out."""
    expected = {"params": {"half": state()["params"]["half"]}, "rate": 0.1}
    assert_same_tree(run.manager.restore(3, args=args), expected)


@pytest.mark.parametrize(
    "args",
    [
        orbax_delta.DeltaRestore,
        ocp.args.StandardRestore,
        ocp.args.PyTreeRestore,
    ],
    ids=lambda cls: cls.__name__,
)
def test_placeholder(run, args):
    """`ocp.PLACEHOLDER` leaves one leaf out and comes back as itself."""
    target = state()
    target["params"]["w"] = ocp.PLACEHOLDER
    target["key"] = ocp.PLACEHOLDER
    restored = run.manager.restore(3, args=args(target))
    assert restored["params"].pop("w") is ocp.PLACEHOLDER
    assert restored.pop("key") is ocp.PLACEHOLDER
    expected = state()
    del expected["params"]["w"], expected["key"]
    assert_same_tree(restored, expected)


def test_smaller_and_larger_shapes_when_not_strict(run):
    """strict=False cuts off and pads with zeros, dimension by dimension."""
    weights = np.asarray(state()["params"]["w"])
    expected = np.zeros((10, 40), np.float32)
    expected[:, :32] = weights[:10]
    for kind in (jax.ShapeDtypeStruct, np.zeros):
        target = {"params": {"w": kind((10, 40), np.float32)}}
        args = orbax_delta.DeltaRestore(target, partial_restore=True, strict=False)
        restored = run.manager.restore(3, args=args)
        assert bits(restored["params"]["w"]) == bits(expected)
    padded = run.manager.restore(
        3,
        args=ocp.args.StandardRestore(
            {**state(), "opt": (jnp.zeros(9, jnp.int32), state()["opt"][1])},
            strict=False,
        ),
    )
    assert bits(padded["opt"][0]) == bits(np.r_[0:6, 0, 0, 0].astype(np.int32))


# --- Orbax's restore_args -----------------------------------------------------------


def test_restore_args_made_by_orbax(run):
    """`construct_restore_args` of what Orbax knows (no bytes, no numpy scalars)."""
    target = {key: state()[key] for key in ("params", "key", "flag", "rate", "name")}
    restored = run.manager.restore(
        3,
        args=ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        ),
    )
    assert_same_tree(restored, target)


def test_array_restore_args(run):
    """Sharding, mesh with axes, dtype, global shape and restore type are obeyed."""
    weights = np.asarray(state()["params"]["w"])
    sharding = strategies.sharding_of((4, 2), "xy", "x", "y")
    cases = {
        "sharding": ocp.ArrayRestoreArgs(sharding=sharding),
        "mesh": ocp.ArrayRestoreArgs(
            mesh=sharding.mesh, mesh_axes=jax.sharding.PartitionSpec("y", "x")
        ),
        "dtype": ocp.ArrayRestoreArgs(sharding=sharding, dtype=jnp.bfloat16),
        "shape": ocp.ArrayRestoreArgs(
            sharding=sharding, global_shape=(68, 32), strict=False
        ),
        "numpy": ocp.RestoreArgs(restore_type=np.ndarray),
    }
    got = {}
    for name, restore_args in cases.items():
        args = ocp.args.PyTreeRestore(
            {"params": {"w": 0}},
            restore_args={"params": {"w": restore_args}},
            partial_restore=True,
        )
        got[name] = run.manager.restore(3, args=args)["params"]["w"]
    assert got["sharding"].sharding == sharding
    assert bits(got["sharding"]) == bits(weights)
    assert got["mesh"].sharding.spec == jax.sharding.PartitionSpec("y", "x")
    assert bits(got["mesh"]) == bits(weights)
    assert bits(got["dtype"]) == bits(weights.astype(jnp.bfloat16))
    assert bits(got["shape"]) == bits(np.pad(weights, ((0, 4), (0, 0))))
    assert_same_leaf(got["numpy"], weights)


def test_array_restore_args_alone_for_every_leaf(root):
    """Without an item the tree of restore_args gives the structure."""
    tree = {"w": jnp.arange(8.0), "step": 5, "host": np.arange(3, dtype=np.int32)}
    sharding = strategies.sharding_of((1,), "x")
    everywhere = ocp.ArrayRestoreArgs(sharding=sharding)
    args = ocp.args.PyTreeRestore(
        restore_args={"w": everywhere, "step": everywhere, "host": everywhere}
    )
    with open_run(root) as run:
        run.save(0, tree)
        restored = run.manager.restore(0, args=args)
    assert all(isinstance(leaf, jax.Array) for leaf in restored.values())
    assert all(leaf.sharding == sharding for leaf in restored.values())
    assert_same_leaf(restored["host"], jnp.arange(3))
    assert_same_leaf(restored["w"], tree["w"])
    assert_same_leaf(restored["step"], jnp.asarray(5))


def test_fallback_sharding(run):
    """StandardRestore's fallback applies to leaves whose target has no sharding."""
    fallback = strategies.sharding_of((8,), "x")
    own = strategies.sharding_of((2,), "x", "x")
    target = state()
    target["params"]["w"] = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    target["params"]["half"] = jax.ShapeDtypeStruct(
        (64, 32), jnp.bfloat16, sharding=own
    )
    restored = run.manager.restore(
        3, args=ocp.args.StandardRestore(target, fallback_sharding=fallback)
    )
    assert restored["params"]["w"].sharding == fallback
    assert restored["params"]["half"].sharding == own
    assert_same_tree(restored, state())


# --- only what is needed is read ----------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """Every ranged read that the store is asked for, as (pack, bytes)."""
    seen = []
    start_read = Folder.start_read

    def counted(self, key, offset, length):
        seen.append((key, length))
        return start_read(self, key, offset, length)

    monkeypatch.setattr(Folder, "start_read", counted)
    return seen


def test_whole_restore_reads_each_chunk_once(run, root, reads):
    """All chunks that have records are read, and the report says so."""
    step = strategies.read_step(root, 3)
    run.restore(3)
    report = run.handler.last_restore_report
    assert report.chunks == report.chunks_in_step == len(step.rows)
    assert report.read_requests == len(reads)
    assert report.read_bytes == sum(length for _, length in reads)
    assert {pack for pack, _ in reads} == set(step.manifest.packs)
    assert report.restored_bytes == step.manifest.full_bytes


@pytest.mark.parametrize("how", ["partial", "placeholder"])
def test_subset_reads_only_its_own_chunks(run, root, reads, how):
    """One leaf of many costs the reads of that leaf alone."""
    if how == "partial":
        args = orbax_delta.DeltaRestore(
            {"params": {"bias": np.zeros(32)}}, partial_restore=True
        )
    else:
        target = jax.tree.map(lambda _: ..., state())
        target["params"]["bias"] = np.zeros(32)
        args = orbax_delta.DeltaRestore(target)
    run.manager.restore(3, args=args)
    step = strategies.read_step(root, 3)
    names = [leaf.name for leaf in step.manifest.leaves]
    (row,) = [row for row in step.rows if names[row.leaf] == "params/bias"]
    assert reads == [(row.refs[0].pack, row.refs[0].length)]
    report = run.handler.last_restore_report
    assert (report.chunks, report.read_requests) == (1, 1)
    assert report.read_bytes == row.refs[0].length


def test_part_of_a_leaf_reads_only_the_chunks_that_overlap(run, root, reads):
    """The first 8 of 64 rows are one of the leaf's eight chunks."""
    target = {"params": {"w": np.zeros((8, 32), np.float32)}}
    args = orbax_delta.DeltaRestore(target, partial_restore=True, strict=False)
    restored = run.manager.restore(3, args=args)
    assert bits(restored["params"]["w"]) == bits(state()["params"]["w"][:8])
    report = run.handler.last_restore_report
    assert (report.chunks, len(reads)) == (1, 1)
    assert report.chunks_in_step == len(strategies.read_step(root, 3).rows)


def test_unwanted_damage_does_not_hurt(run, root):
    """A subset restores although a pack that it does not need is gone."""
    step = strategies.read_step(root, 3)
    names = [leaf.name for leaf in step.manifest.leaves]
    needed = {
        ref.pack
        for row in step.rows
        if names[row.leaf] == "params/bias"
        for ref in row.refs
    }
    for name in strategies.packs_on_disk(root) - needed:
        (root / strategies.STORE / "packs" / name).unlink()
    target = {"params": {"bias": np.zeros(32)}}
    args = orbax_delta.DeltaRestore(target, partial_restore=True)
    restored = run.manager.restore(3, args=args)
    assert_same_leaf(restored["params"]["bias"], state()["params"]["bias"])
    with pytest.raises(orbax_delta.CorruptionError, match=r"leaf .*the pack .*missing"):
        run.restore(3)


# --- errors -------------------------------------------------------------------------


def changed(**leaves):
    """`state()` as a target with other leaves at the top."""
    return {**state(), **leaves}


def with_params(**leaves):
    """`state()` as a target with other parameters."""
    return changed(params={**state()["params"], **leaves})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (changed(extra=1), r"does not fit step 3.*\n  extra: not in the step"),
        (
            {key: value for key, value in state().items() if key != "rate"},
            r"does not fit step 3.*\n  rate \(float \(\)\): not in the target\n"
            r"To leave leaves out, use DeltaRestore\(target, partial_restore=True\)",
        ),
        (
            changed(params={"w": state()["params"]["w"]}),
            r"params/bias \(float64 \(32,\)\): not in the target\n"
            r"  params/half \(bfloat16 \(64, 32\)\): not in the target",
        ),
        (
            changed(rate={"low": 0.1}),
            r"rate/low: not in the step\n  rate \(float \(\)\): not in the target",
        ),
        (
            with_params(w=jax.ShapeDtypeStruct((64, 16), jnp.float32)),
            r"leaf params/w is stored as float32 of shape \(64, 32\); the target asks "
            r"for shape \(64, 16\)",
        ),
        (
            with_params(w=np.zeros((32, 64), np.float32)),
            r"leaf params/w is stored as float32 of shape \(64, 32\); the target asks "
            r"for shape \(32, 64\)",
        ),
        (
            with_params(w=0.5),
            r"leaf params/w is stored as float32 of shape \(64, 32\); the target asks "
            r"for shape \(\)",
        ),
        (
            with_params(w=jax.random.key(0)),
            r"leaf params/w is stored as float32 .*the target is a typed key.*"
            r"wrap_key_data",
        ),
        (
            changed(key=np.zeros(2, np.uint32)),
            r"leaf key is stored as typed keys \(threefry2x32\) of shape \(\); .*"
            r"Give a typed key",
        ),
        (
            changed(key=jax.random.key(0, impl="rbg")),
            r"leaf key is stored as typed keys \(threefry2x32\).*dtype is key<rbg>",
        ),
        (
            changed(key=jax.random.split(jax.random.key(0), 2)),
            r"leaf key is stored as typed keys .*asks for shape \(2,\)",
        ),
        (
            changed(name=3),
            r"leaf name is stored as a Python str; the target asks for a Python value",
        ),
        (
            changed(name=np.zeros(3)),
            r"leaf name is stored as a Python str; the target asks for a numpy array",
        ),
        (
            changed(raw="x"),
            r"leaf raw is stored as a Python bytes; the target is .*str",
        ),
        (
            changed(rate="x"),
            r"leaf rate is stored as a Python float; the target is a str",
        ),
        (
            changed(rate=np.zeros(2)),
            r"leaf rate is stored as a Python float; the target asks for shape \(2,\)",
        ),
        (
            changed(rate=object()),
            r"target leaf rate is a object; expected an array, a jax\.ShapeDtype",
        ),
    ],
)
def test_target_that_does_not_fit(run, root, target, message):
    """Each error names the leaf, what is stored and what was asked for."""
    before = strategies.listing(root)
    with pytest.raises(orbax_delta.StructureError, match=re.compile(message, re.S)):
        run.restore(3, target)
    assert strategies.listing(root) == before


@pytest.mark.parametrize("count", [3, 40])
def test_many_differences_are_counted(root, count):
    """At most ten leaves of each kind are named; the rest is counted."""
    with open_run(root) as run:
        run.save(0, {f"k{i:02d}": i for i in range(count)})
        with pytest.raises(orbax_delta.StructureError, match="k02 ") as caught:
            run.restore(0, {"k00": 0})
    named = str(caught.value).count(": not in the target")
    assert named == min(count - 1, 10)
    assert ("and 29 more that are not in the target" in str(caught.value)) == (
        count == 40
    )


def test_wrong_shape_of_another_rank_when_not_strict(run):
    """strict=False never guesses how dimensions correspond."""
    target = {"params": {"w": jax.ShapeDtypeStruct((64,), jnp.float32)}}
    args = orbax_delta.DeltaRestore(target, partial_restore=True, strict=False)
    with pytest.raises(
        orbax_delta.StructureError, match=r"params/w .*\(64, 32\); .*shape \(64,\)"
    ):
        run.manager.restore(3, args=args)


def test_64_bit_array_wanted_on_device(run):
    """A jax array that this process would shorten is refused, not shortened."""
    sharding = strategies.sharding_of((1,), "x")
    wide = ocp.ArrayRestoreArgs(dtype=np.float64, sharding=sharding)
    target = {"params": {"bias": wide}}
    args = ocp.args.PyTreeRestore(
        {"params": {"bias": 0}}, restore_args=target, partial_restore=True
    )
    with pytest.raises(
        orbax_delta.StructureError,
        match=r"params/bias is wanted as a jax array of float64.*jax_enable_x64",
    ):
        run.manager.restore(3, args=args)


@pytest.mark.parametrize(
    ("value", "target", "message"),
    [
        (2**99, np.zeros((), np.int64), "leaf n holds an int that fits no array"),
        (2**40, jnp.zeros((), jnp.int32), r"leaf n holds .* does not fit .*int32"),
        (-1, np.zeros((), np.uint8), r"leaf n holds the int -1, .* not fit .*uint8"),
    ],
)
def test_int_that_does_not_fit_its_target(root, value, target, message):
    """A Python int is refused as an array that cannot hold it, never cut short."""
    with open_run(root) as run:
        run.save(0, {"n": value})
        with pytest.raises(orbax_delta.StructureError, match=message):
            run.restore(0, {"n": target})


def test_transforms_are_refused(run):
    """Renaming transforms are not silently ignored."""
    args = ocp.args.PyTreeRestore(
        state(), transforms={"x": ocp.Transform(original_key="y")}
    )
    with pytest.raises(
        orbax_delta.InvalidInputError, match="transforms is not supported"
    ):
        run.manager.restore(3, args=args)
