"""However steps are deleted, every other one restores, and dead packs go away."""

import functools
import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from etils import epath
from strategies import (
    assert_same_tree,
    open_run,
    packs_named,
    packs_on_disk,
    read_step,
)

import orbax_delta


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


ALWAYS_DELTAS = {"full_every": 100, "max_chain": 100}
"""Options under which no full record is due in the few saves of a test."""


@functools.cache
def weights(step):
    """fp32 weights after `step` sparse updates; a frozen half stays as it is."""
    if step == 0:
        return np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    values = weights(step - 1).copy()
    values[np.random.default_rng(step).integers(0, 2048, 5)] += 1
    return values


def state(step):
    """What the tests save as `step`: a delta of `state(step - 1)`."""
    return {"w": jnp.asarray(weights(step)), "step": step, "fresh": np.zeros(500)}


def restore_alone(path):
    """Restore an item's directory with a handler that knows nothing of a manager."""
    return orbax_delta.DeltaCheckpointHandler().restore(epath.Path(path))


def assert_intact(root, steps, saved=state):
    """Exactly these steps are there, each as it was saved, and no pack without need."""
    with open_run(root) as run:
        assert set(run.manager.all_steps()) == set(steps)
        for step in steps:
            assert_same_tree(run.restore(step), saved(step))
    assert packs_on_disk(root) == packs_named(root)


def keep(**options):
    """Manager options."""
    return ocp.CheckpointManagerOptions(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (keep(), range(9)),
        (keep(max_to_keep=1), {8}),
        (keep(max_to_keep=3), {6, 7, 8}),
        (keep(max_to_keep=2, keep_period=3), {0, 3, 6, 7, 8}),
        (keep(max_to_keep=0), set()),
        (
            keep(max_to_keep=2, best_fn=lambda m: m["loss"], best_mode="min"),
            {2, 3},
        ),
        (
            keep(
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(
                    [
                        ocp.checkpoint_managers.LatestN(1),
                        ocp.checkpoint_managers.CustomSteps([1, 4]),
                    ]
                )
            ),
            {1, 4, 8},
        ),
    ],
    ids=[
        *("all", "one", "three", "keep_period", "none", "best_fn", "policy"),
    ],
)
def test_retention_by_the_manager(root, options, expected):
    """Whatever Orbax keeps restores; what it deletes takes its own packs along."""
    with open_run(root, manager_options=options) as run:
        for step in range(9):
            run.manager.save(
                step,
                args=ocp.args.StandardSave(state(step)),
                metrics={"loss": abs(step - 2.4)},
            )
    assert_intact(root, set(expected))


def test_saves_after_the_first_are_deltas_throughout(root):
    """Deletion of the predecessor does not make the next save full."""
    options = keep(max_to_keep=1)
    with open_run(root, manager_options=options, **ALWAYS_DELTAS) as run:
        for step in range(6):
            run.save(step, state(step))
            if step:
                report = run.handler.last_save_report
                assert report.chunks_by_form.get("sparse") == 1
                assert report.elements_changed <= 5 + 1
                assert report.written_bytes < 1000


def test_background_deletion(root):
    """Deletion that overlaps later saves harms none of them."""
    options = keep(max_to_keep=2, enable_background_delete=True)
    with open_run(root, manager_options=options) as run:
        for step in range(8):
            run.manager.save(step, args=ocp.args.StandardSave(state(step)))
    # The deleter may end after the handler's last sweep; the next run sweeps.
    with open_run(root, manager_options=options) as run:
        run.save(8, state(8))
    assert_intact(root, {7, 8})


def test_trash_folder(root):
    """Steps moved to a trash folder restore there and keep their packs until gone."""
    options = keep(max_to_keep=1, todelete_subdir="trash")
    with open_run(root, manager_options=options) as run:
        for step in range(5):
            run.save(step, state(step))
        for step in range(4):
            path = root / "trash" / str(step) / "default"
            assert_same_tree(restore_alone(path), state(step))
        assert packs_named(root) <= packs_on_disk(root)
        shutil.rmtree(root / "trash")
        run.save(5, state(5))
        shutil.rmtree(root / "trash")
    assert_intact(root, {5})


def test_step_moved_back_from_the_trash(root):
    """A step taken out of the trash folder again is an ordinary step."""
    options = keep(max_to_keep=1, todelete_subdir="trash")
    with open_run(root, manager_options=options) as run:
        for step in range(4):
            run.save(step, state(step))
    (root / "trash" / "1").rename(root / "1")
    with open_run(root) as run:
        run.save(9, state(4))
    shutil.rmtree(root / "trash")
    assert_intact(root, {1, 3, 9}, lambda step: state({9: 4}.get(step, step)))


def test_delete_by_the_manager(root):
    """`manager.delete` of any step, the newest too; the next save is right."""
    with open_run(root, **ALWAYS_DELTAS) as run:
        for step in range(6):
            run.save(step, state(step))
        for step in (0, 3, 5):
            run.manager.delete(step)
        run.save(6, state(6))
        # The base of the deleted step 5 was still pinned.
        assert run.handler.last_save_report.chunks_by_form.get("sparse") == 1
        for step in (1, 2, 4, 6):
            assert_same_tree(run.restore(step), state(step))
    assert_intact(root, {1, 2, 4, 6})


def test_rmtree_behind_the_managers_back(root):
    """`rm -rf` of steps, between saves and between runs."""
    with open_run(root) as run:
        for step in range(6):
            run.save(step, state(step))
            if step in (2, 4):
                shutil.rmtree(root / str(step))
    shutil.rmtree(root / "5")
    with open_run(root) as run:
        run.save(7, state(7))
    assert_intact(root, {0, 1, 3, 7})


def test_every_step_gone(root):
    """With all steps deleted by hand the next save starts anew in the same store."""
    with open_run(root) as run:
        for step in range(3):
            run.save(step, state(step))
    for step in range(3):
        shutil.rmtree(root / str(step))
    with open_run(root) as run:
        run.save(5, state(5))
        assert run.handler.last_save_report.chunks_by_form.get("planes") == 1
    assert_intact(root, {5})


def test_base_deleted_and_swept_between_restore_and_save(root, caplog):
    """A restored step whose packs are swept before the next save: written in full."""
    frozen = weights(40)
    with open_run(root) as first:
        first.save(0, state(0))
        first.save(1, {**state(1), "frozen": frozen})
    with open_run(root) as run:
        run.restore(1)
        shutil.rmtree(root / "1")
        shutil.rmtree(root / "0")
        with open_run(root) as other:
            other.save(50, {"other": 1})
        run.manager.reload()
        run.save(60, {**state(2), "frozen": frozen})
        forms = run.handler.last_save_report.chunks_by_form
        assert forms == {"planes": 2, "reference": 1}  # zeros need no pack
        assert_same_tree(run.restore(60), {**state(2), "frozen": frozen})
    messages = [record.getMessage() for record in caplog.records]
    assert any("stored chunks are gone" in message for message in messages)


def test_older_step_by_force(root):
    """Steps saved out of order with force=True are deltas of the last save."""
    options = keep(max_to_keep=3)
    with open_run(root, manager_options=options, **ALWAYS_DELTAS) as run:
        for step in (10, 12, 14):
            run.save(step, state(step))
        run.save(5, state(5), force=True)
        assert read_step(root, 5).manifest.predecessor["step"] == "14"
        assert run.handler.last_save_report.chunks_by_form.get("sparse") == 1
        kept = set(run.manager.all_steps())
        assert 5 in kept
        for step in kept:
            assert_same_tree(run.restore(step), state(step))
    assert_intact(root, kept)


@pytest.mark.parametrize("how", ["manager", "rmtree"])
def test_same_step_saved_again(root, how):
    """A deleted step saved again with another state; what followed it stays right."""
    with open_run(root) as run:
        for step in range(4):
            run.save(step, state(step))
        if how == "manager":
            run.manager.delete(2)
        else:
            shutil.rmtree(root / "2")
            run.manager.reload()
        run.save(2, state(20), force=True)
        run.save(5, state(5), force=True)
    assert_intact(root, {0, 1, 2, 3, 5}, lambda step: state({2: 20}.get(step, step)))


def test_leftover_of_an_interrupted_save(root):
    """A temporary folder of a killed save is neither a step nor in the way."""
    with open_run(root) as run:
        run.save(0, state(0))
    leftover = root / "1.orbax-checkpoint-tmp" / "default.orbax-checkpoint-tmp"
    leftover.mkdir(parents=True)
    (leftover / "part-junk").write_bytes(b"junk")
    with open_run(root) as run:
        run.save(1, state(1))
        run.save(2, state(2))
    assert_intact(root, {0, 1, 2})


def test_interrupted_deletion(root):
    """A half-deleted step keeps nothing alive and hurts nobody."""
    with open_run(root) as run:
        for step in range(3):
            run.save(step, state(step))
    (root / "1" / "default" / "MANIFEST").unlink()
    with open_run(root) as run:
        run.save(3, state(3))
        with pytest.raises(orbax_delta.NotFoundError, match=r"step 1, .*no MANIFEST"):
            run.restore(1)
        run.manager.delete(1)
    assert_intact(root, {0, 2, 3})


# --- plain Checkpointers ------------------------------------------------------------


@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
@pytest.mark.parametrize("name", ["final", "7", "7/final"])
def test_plain_checkpointer_is_self_contained(tmp_path, kind, name):
    """A save without a manager needs nothing outside its own directory."""
    path = tmp_path / "models" / name
    path.parent.mkdir(parents=True)
    with kind(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=orbax_delta.DeltaSave(state(3)))
        if kind is ocp.AsyncCheckpointer:
            checkpointer.wait_until_finished()
        # Nothing is remembered: the second save is whole, too.
        checkpointer.save(
            path.with_name("second"), args=orbax_delta.DeltaSave(state(3))
        )
    assert not list(tmp_path.rglob(strategies.STORE))
    elsewhere = tmp_path / "copy"
    shutil.copytree(path.with_name("second"), elsewhere)
    shutil.rmtree(tmp_path / "models")
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        assert_same_tree(checkpointer.restore(elsewhere), state(3))
        args = orbax_delta.DeltaRestore(state(0))
        assert_same_tree(checkpointer.restore(elsewhere, args=args), state(3))


def test_plain_checkpointer_inside_a_managers_root(root):
    """A self-contained save below a root is no business of its store."""
    with open_run(root) as run:
        run.save(0, state(0))
        with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
            path = root / "exports" / "best"
            path.parent.mkdir()
            checkpointer.save(path, args=orbax_delta.DeltaSave(state(1)))
            run.save(2, state(2))
            run.manager.delete(0)
            run.save(3, state(3))
            assert_same_tree(checkpointer.restore(path), state(1))
        for step in (2, 3):
            assert_same_tree(run.restore(step), state(step))


# --- several items ------------------------------------------------------------------


def items(step):
    """Arguments of a manager with two delta items and a JSON one."""
    return ocp.args.Composite(
        params=ocp.args.StandardSave({"w": jnp.asarray(weights(step))}),
        opt=orbax_delta.DeltaSave({"mu": weights(step)[::-1].copy(), "count": step}),
        meta=ocp.args.JsonSave({"position": step}),
    )


@pytest.fixture
def registry():
    """A registry with two delta items and a JSON one."""
    registry = orbax_delta.handler_registry(item=("params", "opt"), **ALWAYS_DELTAS)
    handler = ocp.JsonCheckpointHandler()
    registry.add("meta", ocp.args.JsonSave, handler)
    registry.add("meta", ocp.args.JsonRestore, handler)
    return registry


def test_several_items(root, registry):
    """Items of one root share a store, are deltas each, and metrics stay Orbax's."""
    options = keep(max_to_keep=2, best_fn=lambda m: m["loss"], best_mode="min")
    with ocp.CheckpointManager(
        root, options=options, handler_registry=registry
    ) as manager:
        for step in range(6):
            manager.save(step, args=items(step), metrics={"loss": 10.0 - step})
            manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [4, 5]
        assert manager.best_step() == 5
        for step in (4, 5):
            got = manager.restore(step)
            assert_same_tree(got.params, {"w": jnp.asarray(weights(step))})
            assert_same_tree(got.opt, {"mu": weights(step)[::-1], "count": step})
            assert got.meta == {"position": step}
            for item in ("params", "opt"):
                report = orbax_delta.save_report(root / str(step) / item)
                assert report.chunks_by_form.get("sparse") == 1
                assert report.item == item
    assert packs_on_disk(root) == packs_named(root)
    assert [path.name for path in root.rglob(strategies.STORE)] == [strategies.STORE]


def test_one_item_of_several(root, registry):
    """Items restore one by one, each with a target of its own."""
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        manager.save(0, args=items(0))
        manager.wait_until_finished()
        target = {"w": np.zeros(4096, np.float32)}
        got = manager.restore(
            0, args=ocp.args.Composite(params=orbax_delta.DeltaRestore(target))
        )
        assert_same_tree(got.params, {"w": weights(0)})
        assert "opt" not in got
        assert manager.item_metadata(0).params.tree["w"].shape == (4096,)


def test_any_item(root):
    """`item=None` serves whatever item comes with such arguments."""
    registry = orbax_delta.handler_registry(item=None)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        args = ocp.args.Composite(
            a=ocp.args.StandardSave({"w": weights(0)}),
            b=orbax_delta.DeltaSave({"w": weights(1)}),
        )
        manager.save(0, args=args)
        manager.wait_until_finished()
        got = manager.restore(
            0,
            args=ocp.args.Composite(
                a=ocp.args.StandardRestore(), b=orbax_delta.DeltaRestore()
            ),
        )
        assert_same_tree(got.a, {"w": weights(0)})
        assert_same_tree(got.b, {"w": weights(1)})
