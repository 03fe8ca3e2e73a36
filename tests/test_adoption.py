"""Taking over a run that Orbax's own handlers began, metadata, and falling back."""

import functools
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from strategies import assert_same_tree, open_run, packs_named, packs_on_disk

import orbax_delta
from orbax_delta import restore_latest_good


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def state(step):
    """A sharded master, a replicated copy, a count and a host array."""
    array = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    array[step % 64, :3] += step
    return {
        "params": {
            "w": jax.device_put(array, strategies.sharding_of((8,), "x", "x")),
            "b": jnp.arange(5.0) + step,
        },
        "count": step,
        "host": np.arange(4) + step,
    }


def structs(tree):
    """The usual target: shapes, dtypes and shardings of every leaf."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


@pytest.fixture(params=["standard", "pytree", "pytree without OCDBT"])
def orbax_root(request, root):
    """A root with steps 0 and 1 of Orbax's own handlers."""
    save = ocp.args.StandardSave
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    if request.param != "standard":
        save = ocp.args.PyTreeSave
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=request.param == "pytree")
        registry.add("default", ocp.args.PyTreeSave, handler)
        registry.add("default", ocp.args.PyTreeRestore, handler)
    else:
        handler = ocp.StandardCheckpointHandler()
        registry.add("default", ocp.args.StandardSave, handler)
        registry.add("default", ocp.args.StandardRestore, handler)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in range(2):
            manager.save(step, args=save(state(step)))
    return root


@pytest.mark.parametrize(
    "args",
    [
        orbax_delta.DeltaRestore,
        ocp.args.StandardRestore,
        lambda target: ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        ),
    ],
    ids=["delta", "standard", "pytree"],
)
def test_steps_of_orbax_restore_with_any_arguments(orbax_root, args):
    """Orbax's steps restore through this handler as through their own."""
    with open_run(orbax_root) as run:
        for step in range(2):
            restored = run.manager.restore(step, args=args(structs(state(step))))
            assert_same_tree(restored, state(step))
            sharding = state(step)["params"]["w"].sharding
            assert restored["params"]["w"].sharding == sharding


def test_steps_of_orbax_restore_without_a_target(orbax_root):
    """As Orbax restores them itself: plain containers, saved shardings."""
    with open_run(orbax_root) as run:
        assert_same_tree(run.manager.restore(1), state(1))
        args = orbax_delta.DeltaRestore()
        assert_same_tree(run.manager.restore(0, args=args), state(0))


def test_part_of_a_step_of_orbax(orbax_root):
    """partial_restore works on both kinds of steps."""
    target = {"params": {"b": state(0)["params"]["b"]}}
    with open_run(orbax_root) as run:
        run.save(2, state(2))
        for step in (1, 2):
            args = orbax_delta.DeltaRestore(target, partial_restore=True)
            restored = run.manager.restore(step, args=args)
            assert_same_tree(restored, {"params": {"b": state(step)["params"]["b"]}})


def test_run_goes_on_with_deltas(orbax_root):
    """Restore Orbax's newest step, save on; old and new steps restore."""
    options = ocp.CheckpointManagerOptions(max_to_keep=4)
    with open_run(orbax_root, manager_options=options, full_every=50) as run:
        latest = run.manager.latest_step()
        tree = run.restore(latest, structs(state(latest)))
        assert_same_tree(tree, state(1))
        for step in (2, 3, 4):
            run.save(step, state(step))
        assert run.handler.last_save_report.chunks_by_form.get("sparse", 0) > 0
        assert sorted(run.manager.all_steps()) == [1, 2, 3, 4]
        for step in (1, 2, 3, 4):
            assert_same_tree(run.restore(step, structs(state(step))), state(step))
    assert packs_on_disk(orbax_root) == packs_named(orbax_root)


def test_leaving_again(root):
    """A step read by this handler and saved by Orbax's own is Orbax's again."""
    with open_run(root) as run:
        run.save(0, state(0))
        tree = run.restore(0)
    with ocp.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
    shutil.rmtree(root / strategies.STORE)
    shutil.rmtree(root / "0")
    with ocp.CheckpointManager(root) as manager:
        restored = manager.restore(1, args=ocp.args.StandardRestore(structs(state(0))))
    assert_same_tree(restored, state(0))


def test_unconfigured_manager_reads_delta_steps(root):
    """Once the package is imported, a manager without a registry restores too."""
    with open_run(root) as run:
        run.save(0, state(0))
    with ocp.CheckpointManager(root) as manager:
        assert_same_tree(manager.restore(0), state(0))


# --- metadata -----------------------------------------------------------------------


def metadata_target(metadata):
    """What Orbax users write to make a target of `item_metadata`."""
    return jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(
            m.shape, m.dtype, sharding=m.sharding and m.sharding.to_jax_sharding()
        ),
        metadata,
    )


def test_item_metadata_of_both_kinds_of_steps(orbax_root):
    """Shape, dtype, sharding and structure; equal for Orbax's step and ours."""
    with open_run(orbax_root) as run:
        run.save(2, state(0))
    with open_run(orbax_root) as run:
        theirs, ours = (run.manager.item_metadata(step).tree for step in (0, 2))
        assert jax.tree.structure(theirs) == jax.tree.structure(ours)
        for metadata in (theirs, ours):
            weights = metadata["params"]["w"]
            assert tuple(weights.shape) == (64, 32)
            assert weights.dtype == jnp.float32
            assert (
                weights.sharding.to_jax_sharding() == state(0)["params"]["w"].sharding
            )
            assert metadata["host"].shape == (4,)
            assert metadata["host"].dtype == np.int64
        assert type(ours["count"]) is type(theirs["count"])


def test_item_metadata_as_a_target(root):
    """`jax.tree.map` over `.tree` gives a target that restores everything."""
    with open_run(root) as run:
        run.save(0, state(3))
    with open_run(root) as run:
        target = metadata_target(run.manager.item_metadata(0).tree)
        restored = run.restore(0, target)
        # Metadata tells a Python int from a 0-d array by its class alone.
        assert_same_tree(restored, {**state(3), "count": np.asarray(3)})
        sharding = state(3)["params"]["w"].sharding
        assert restored["params"]["w"].sharding == sharding


def test_item_metadata_of_other_leaves(root):
    """Keys, text, huge ints, custom metadata; nothing of the packs is read."""
    tree = {
        "key": jax.random.split(jax.random.key(0), 3),
        "text": "x",
        "n": 2**200,
        "z": 1j,
        "half": jnp.ones(3, jnp.bfloat16),
        "nested": ({7: np.zeros((0, 2), np.int8)},),
    }
    with open_run(root) as run:
        run.manager.save(
            0, args=orbax_delta.DeltaSave(tree, custom_metadata={"run": [1, None]})
        )
        run.manager.wait_until_finished()
    shutil.rmtree(root / strategies.STORE / "packs")
    with open_run(root) as run:
        metadata = run.manager.item_metadata(0)
    assert metadata.custom_metadata == {"run": [1, None]}
    found = metadata.tree
    assert found["key"].shape == (3,)
    assert found["key"].dtype == tree["key"].dtype
    assert found["half"].dtype == jnp.bfloat16
    assert found["nested"][0][7].shape == (0, 2)
    assert isinstance(found["text"], ocp.metadata.StringMetadata)
    assert isinstance(found["n"], ocp.metadata.ScalarMetadata)
    # It reads like the mapping it stands for, and is a pytree.
    assert set(metadata.keys()) == set(metadata) == set(tree)
    assert "half" in metadata
    assert metadata["half"] is found["half"] is metadata.get("half")
    assert len(jax.tree.leaves(metadata)) == len(tree)


def test_orbax_custom_metadata_is_kept(root):
    """StandardSave's custom_metadata comes back with the item's metadata."""
    with open_run(root) as run:
        args = ocp.args.StandardSave(state(0), custom_metadata={"lr": 0.1})
        run.manager.save(0, args=args)
        run.manager.wait_until_finished()
        assert run.manager.item_metadata(0).custom_metadata == {"lr": 0.1}


def test_metadata_of_a_missing_step(root):
    """Orbax's own answer for a step that is not there."""
    with open_run(root) as run:
        run.save(0, state(0))
        (root / "0" / "default" / "MANIFEST").unlink()
        assert run.manager.item_metadata(0) is None


# --- restore_latest_good ------------------------------------------------------------


@functools.cache
def numbers(step):
    """Random numbers that no step shares."""
    return np.random.default_rng(step).standard_normal(2000)


@pytest.fixture
def three_steps(root):
    """A root with steps 0, 1 and 2, each with packs of its own."""
    with open_run(root, full_every=0, keep_bases=0) as run:
        for step in range(3):
            run.save(step, {"w": numbers(step), "step": step})
    return root


def own_packs(root, step):
    """Packs that only one step names."""
    named = {
        path.parents[1].name: set(strategies.read_manifest(path).packs)
        for path in root.rglob("MANIFEST")
    }
    others = set().union(*(p for name, p in named.items() if name != str(step)))
    return named[str(step)] - others


def flip_a_byte(root):
    """Damage in the middle of a pack that only step 2 uses."""
    (name,) = own_packs(root, 2)
    path = root / strategies.STORE / "packs" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def cut_the_pack(root):
    """A pack that ends too early."""
    (name,) = own_packs(root, 2)
    path = root / strategies.STORE / "packs" / name
    path.write_bytes(path.read_bytes()[:100])


def lose_the_pack(root):
    """A pack that is gone."""
    (name,) = own_packs(root, 2)
    (root / strategies.STORE / "packs" / name).unlink()


def lose_the_manifest(root):
    """A MANIFEST that is gone."""
    (root / "2" / "default" / "MANIFEST").unlink()


def garble_the_manifest(root):
    """A MANIFEST with another byte."""
    path = root / "2" / "default" / "MANIFEST"
    data = path.read_bytes()
    path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])


def lose_the_part(root):
    """A part that is gone."""
    (path,) = (root / "2" / "default").glob("part-*")
    path.unlink()


def lose_the_item(root):
    """A step of which only the outer folder is left."""
    shutil.rmtree(root / "2" / "default")


def lose_everything_inside(root):
    """A step of which only an empty folder is left."""
    shutil.rmtree(root / "2")
    (root / "2").mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        cut_the_pack,
        lose_the_pack,
        lose_the_manifest,
        garble_the_manifest,
        lose_the_part,
        lose_the_item,
        lose_everything_inside,
    ],
    ids=lambda function: function.__name__,
)
def test_newest_step_damaged(three_steps, caplog, damage):
    """The newest whole step is restored, loudly; nothing on disk changes."""
    damage(three_steps)
    before = strategies.listing(three_steps)
    with open_run(three_steps) as run, caplog.at_level(logging.ERROR, "orbax_delta"):
        step, tree = restore_latest_good(run.manager)
    assert step == 1
    assert_same_tree(tree, {"w": numbers(1), "step": 1})
    assert strategies.listing(three_steps) == before
    errors = [r.getMessage() for r in caplog.records if r.name == "orbax_delta"]
    assert len(errors) == 1
    assert "step 2 does not restore, trying an older one" in errors[0]


@pytest.mark.parametrize("damage", [flip_a_byte, cut_the_pack, lose_the_pack])
def test_plain_restore_of_a_damaged_step_is_an_error(three_steps, damage):
    """It names step, leaf and chunk, and says what to do; other steps restore."""
    damage(three_steps)
    with open_run(three_steps) as run:
        with pytest.raises(
            orbax_delta.CorruptionError,
            match=r"step 2, .*leaf w, chunk \[0:2000\].*orbax-delta verify",
        ):
            run.restore(2)
        for step in (0, 1):
            assert_same_tree(run.restore(step), {"w": numbers(step), "step": step})


def test_saving_on_after_falling_back(three_steps):
    """The next save builds on the step that was restored, not on the damaged one."""
    flip_a_byte(three_steps)
    with open_run(three_steps) as run:
        step, _ = restore_latest_good(run.manager)
        run.save(3, {"w": numbers(step), "step": step})
        assert run.handler.last_save_report.chunks_by_form == {"reference": 1}
        assert_same_tree(run.restore(3), {"w": numbers(1), "step": 1})


def test_nothing_is_good(three_steps):
    """With every step damaged the error lists each; with none it says so."""
    for name in strategies.packs_on_disk(three_steps):
        (three_steps / strategies.STORE / "packs" / name).unlink()
    with (
        open_run(three_steps) as run,
        pytest.raises(
            orbax_delta.CorruptionError,
            match=r"(?s)none of the 3 steps.*  step 2: .*  step 1: .*  step 0: ",
        ),
    ):
        restore_latest_good(run.manager)
    with (
        open_run(three_steps / "empty") as run,
        pytest.raises(orbax_delta.NotFoundError, match="empty holds no step"),
    ):
        restore_latest_good(run.manager)


def test_target_that_does_not_fit_is_no_damage(three_steps):
    """A wrong target is raised at once instead of trying older steps."""
    with (
        open_run(three_steps) as run,
        pytest.raises(orbax_delta.StructureError, match="other: not in the step"),
    ):
        restore_latest_good(run.manager, {"other": 1})


def test_partial_target_with_a_leaf_that_orbax_did_not_save(root):
    """Orbax would hand back the target's own value; it is refused instead."""
    with ocp.CheckpointManager(root) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": jnp.arange(3.0)}))
    with open_run(root) as run:
        target = {"w": jnp.zeros(3), "head": jnp.full(3, 7.0)}
        args = orbax_delta.DeltaRestore(target, partial_restore=True)
        with pytest.raises(orbax_delta.StructureError, match="head not in the step"):
            run.manager.restore(0, args=args)
        args = orbax_delta.DeltaRestore(
            {"w": jnp.zeros(2)}, partial_restore=True, strict=False
        )
        with pytest.raises(orbax_delta.InvalidInputError, match="leave strict=True"):
            run.manager.restore(0, args=args)
