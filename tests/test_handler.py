"""The handler under the real CheckpointManager: every way to plug it in."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from etils import epath
from strategies import STORE, assert_same_tree, open_run, packs_named, packs_on_disk

import orbax_delta


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def state(step):
    """A small state."""
    weights = np.arange(2000, dtype=np.float32)
    weights[step] += 1
    return {"w": jnp.asarray(weights), "opt": (np.zeros(300), [step])}


# --- ways to plug it in -------------------------------------------------------------


@pytest.mark.parametrize(
    ("save", "restore"),
    [
        (ocp.args.StandardSave, ocp.args.StandardRestore),
        (ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
        (orbax_delta.DeltaSave, orbax_delta.DeltaRestore),
        (ocp.args.StandardSave, ocp.args.PyTreeRestore),
        (ocp.args.PyTreeSave, orbax_delta.DeltaRestore),
        (orbax_delta.DeltaSave, ocp.args.StandardRestore),
    ],
)
def test_the_advertised_line(root, save, restore):
    """One line turns a manager to deltas; call sites keep whatever arguments."""
    with ocp.CheckpointManager(
        root, handler_registry=orbax_delta.handler_registry()
    ) as manager:
        for step in range(3):
            manager.save(step, args=save(state(step)))
        manager.wait_until_finished()
        for step in range(3):
            got = manager.restore(step, args=restore(state(0)))
            assert_same_tree(got, state(step))
            assert_same_tree(manager.restore(step, args=restore()), state(step))
        assert orbax_delta.save_report(root / "2").chunks_by_form["reference"] > 0


def test_item_handlers(root):
    """The older way to give a manager its handler, with our own arguments."""
    handler = orbax_delta.DeltaCheckpointHandler(orbax_delta.DeltaOptions(threads=1))
    with ocp.CheckpointManager(root, item_handlers=handler) as manager:
        manager.save(0, args=orbax_delta.DeltaSave(state(0)))
        manager.wait_until_finished()
        assert_same_tree(manager.restore(0), state(0))
        args = orbax_delta.DeltaRestore(state(1))
        assert_same_tree(manager.restore(0, args=args), state(0))
    assert handler.last_save_report.full_bytes == 4 * 2000 + 8 * 300


def test_item_handlers_by_name(root):
    """Several items, each with a handler of its own."""
    handlers = {name: orbax_delta.DeltaCheckpointHandler() for name in ("a", "b")}
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        for step in range(3):
            manager.save(
                step,
                args=ocp.args.Composite(
                    a=orbax_delta.DeltaSave(state(step)),
                    b=orbax_delta.DeltaSave(state(step + 1)),
                ),
            )
        manager.wait_until_finished()
        got = manager.restore(2)
        assert_same_tree(got.a, state(2))
        assert_same_tree(got.b, state(3))
    assert packs_on_disk(root) == packs_named(root)


def test_unconfigured_manager(root):
    """Our arguments alone tell Orbax which handler to use."""
    with ocp.CheckpointManager(root) as manager:
        for step in range(2):
            manager.save(step, args=orbax_delta.DeltaSave(state(step)))
        manager.wait_until_finished()
    with ocp.CheckpointManager(root) as manager:
        assert_same_tree(manager.restore(1), state(1))
        args = orbax_delta.DeltaRestore(state(0))
        assert_same_tree(manager.restore(0, args=args), state(0))


def test_one_handler_for_two_roots(tmp_path):
    """Roots are kept apart by one handler; `close` may come more than once."""
    handler = orbax_delta.DeltaCheckpointHandler()
    roots = [tmp_path / "a", tmp_path / "b"]
    managers = [ocp.CheckpointManager(root, item_handlers=handler) for root in roots]
    for step in range(3):
        for number, manager in enumerate(managers):
            args = orbax_delta.DeltaSave(state(step + 10 * number))
            manager.save(step, args=args)
    for number, manager in enumerate(managers):
        manager.wait_until_finished()
        for step in range(3):
            assert_same_tree(manager.restore(step), state(step + 10 * number))
        manager.close()
    handler.close()
    handler.close()
    for root in roots:
        assert packs_on_disk(root) == packs_named(root)
        assert not list((root / STORE / "pins").glob("*"))


def test_handler_is_recorded_under_a_stable_name(root):
    """`_CHECKPOINT_METADATA` names the handler whatever module it lives in."""
    with open_run(root) as run:
        run.save(0, state(0))
        found = run.manager.metadata(0).item_handlers
    name = "orbax_delta.handler.DeltaCheckpointHandler"
    assert found == {"default": name} or found == name
    assert orbax_delta.DeltaCheckpointHandler.typestr() == name


@pytest.mark.parametrize("processes", [(1,), (0, 1)])
def test_a_process_saves_with_those_that_there_are(root, processes):
    """Process 0 of 1 cannot save as process 1, nor with it."""
    with (
        open_run(root, processes=processes) as run,
        pytest.raises(
            orbax_delta.InvalidInputError, match=r"this is process 0 of 1; DeltaOptions"
        ),
    ):
        run.handler.save(epath.Path(root / "0" / "default"), orbax_delta.DeltaSave(1))
    assert not (root / "0").exists()


def test_finalize_checks_that_the_step_is_there(root):
    """What removed the MANIFEST during a save is not covered up."""
    with pytest.raises(orbax_delta.NotFoundError, match=r"has no MANIFEST although"):
        orbax_delta.DeltaCheckpointHandler().finalize(epath.Path(root / "0"))


# --- names, roots, options of the manager -------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"step_prefix": "ckpt"}, "ckpt_3"),
        ({"step_format_fixed_length": 8}, "00000003"),
        ({"step_prefix": "a_b", "step_format_fixed_length": 4}, "a_b_0003"),
    ],
)
def test_other_names_of_steps(root, options, name):
    """Prefixes and leading zeros: the number is found, retention and rest work."""
    keep = ocp.CheckpointManagerOptions(max_to_keep=2, **options)
    with open_run(root, manager_options=keep) as run:
        for step in range(4):
            run.save(step, state(step))
        assert (root / name).is_dir()
        for step in (2, 3):
            assert_same_tree(run.restore(step), state(step))
        step, tree = orbax_delta.restore_latest_good(run.manager)
        assert step == 3
        assert_same_tree(tree, state(3))
    assert strategies.read_step(root, name).manifest.step == 3
    assert packs_on_disk(root) == packs_named(root)
    assert orbax_delta.save_report(root / name).step == name


def test_root_with_an_odd_name(tmp_path):
    """Spaces, percent signs, hashes, brackets and umlauts in the path."""
    root = tmp_path / "my run #1 %20 ü? [x] {y}"
    with open_run(root) as run:
        for step in range(3):
            run.save(step, state(step))
        run.manager.delete(1)
    with open_run(root) as run:
        assert_same_tree(run.restore(2), state(2))
        run.save(3, state(3))
        assert_same_tree(run.restore(0), state(0))
    assert packs_on_disk(root) == packs_named(root)


def test_root_behind_a_symbolic_link(tmp_path):
    """A link to the root is the root."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with open_run(tmp_path / "run") as run:
        run.save(0, state(0))
        run.save(1, state(1))
    with open_run(tmp_path / "disk") as run:
        for step in range(2):
            assert_same_tree(run.restore(step), state(step))


def test_cleanup_of_temporary_directories_spares_the_store(root):
    """Orbax's clean-up at start leaves the store alone."""
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with open_run(root, manager_options=options) as run:
        run.save(0, state(0))
    (root / "1.orbax-checkpoint-tmp" / "default.orbax-checkpoint-tmp").mkdir(
        parents=True
    )
    with open_run(root, manager_options=options) as run:
        run.save(2, state(2))
        assert not list(root.glob("1.*"))
        for step in (0, 2):
            assert_same_tree(run.restore(step), state(step))


def test_commit_by_marker_file(root):
    """Object stores commit by a marker instead of a rename; so may a local disk."""
    options = ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=True,
        max_to_keep=2,
        temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath,
    )
    for begin in (0, 3):
        with open_run(root, manager_options=options) as run:
            if begin:
                assert_same_tree(run.restore(begin - 1), state(begin - 1))
            for step in range(begin, begin + 3):
                run.save(step, state(step))
            assert run.handler.last_save_report.chunks_by_form["reference"] > 0
            for step in run.manager.all_steps():
                assert_same_tree(run.restore(step), state(step))
    assert (root / STORE / "STORE.json").exists()
    assert packs_on_disk(root) == packs_named(root)


def test_store_is_no_step(root):
    """Orbax's scanners and its older helpers see steps only."""
    with open_run(root) as run:
        for step in (3, 12):
            run.save(step, state(step))
        assert run.manager.all_steps(read=True) == [3, 12]
        assert run.manager.latest_step() == 12
    assert sorted(ocp.utils.checkpoint_steps(root)) == [3, 12]


def test_nested_runs(root):
    """A run inside another one's folder: stores do not mix."""
    with open_run(root) as outer, open_run(root / "inner") as inner:
        for step in range(3):
            outer.save(step, state(step))
            inner.save(step, state(step + 5))
        outer.manager.delete(1)
        inner.manager.delete(0)
        outer.save(7, state(7))
        inner.save(8, state(8))
        for step, run, saved in ((2, outer, 2), (7, outer, 7), (1, inner, 6)):
            assert_same_tree(run.restore(step), state(saved))
    shutil.rmtree(root / "inner")
    with open_run(root) as outer:
        assert_same_tree(outer.restore(7), state(7))


# --- reports ------------------------------------------------------------------------


def test_reports_and_their_lines(root, caplog):
    """Each save and restore logs one line; the save's report stays with the step."""
    with caplog.at_level(logging.INFO, "orbax_delta"), open_run(root) as run:
        run.save(0, state(0))
        run.save(1, state(1))
        run.restore(1)
        saved, restored = run.handler.last_save_report, run.handler.last_restore_report
    lines = [r.getMessage() for r in caplog.records if r.name == "orbax_delta"]
    assert [line.split(":")[0] for line in lines if "step" in line][:3] == [
        "saved step 0 (default)",
        "saved step 1 (default)",
        "restored step 1 (default)",
    ]
    kept = orbax_delta.save_report(root / "1")
    assert kept == orbax_delta.save_report(root / "1" / "default")
    assert kept.elements_changed == saved.elements_changed == 2
    assert kept.blocks_changed == 1
    assert kept.full_bytes == restored.restored_bytes == 4 * 2000 + 8 * 300
    assert kept.elements == 2000 + 300
    assert kept.written_bytes < 500
    assert kept.chunks == sum(kept.chunks_by_form.values()) == 2
    assert 0 < kept.blocking_seconds <= kept.total_seconds


def test_metadata_of_every_manifest(root):
    """Step, time, predecessor, store, versions and options are on record."""
    with open_run(root, full_every=7) as run:
        for step in (4, 9):
            run.save(step, state(step))
    first, second = (strategies.read_step(root, step).manifest for step in (4, 9))
    assert (first.step, second.step) == (4, 9)
    assert first.predecessor is None
    assert second.predecessor == {"step": "4", "attempt": first.attempt}
    assert second.wall_time > first.wall_time > 1.7e9
    assert (first.save_index, second.save_index) == (0, 1)
    assert first.store_uuid == second.store_uuid
    assert first.options["full_every"] == 7
    assert first.versions["jax"] == jax.__version__
    assert first.versions["orbax-checkpoint"] == ocp.__version__
