"""The handler under Orbax v1: real Checkpointers, free functions, both APIs mixed."""

import contextlib
import doctest
import errno
import gc
import json
import logging
import shutil
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from orbax.checkpoint import v1
from strategies import STORE, assert_same_tree, packs_named, packs_on_disk

import orbax_delta
from orbax_delta import (
    DeltaOptions,
    DeltaState,
    check,
    handler_v1,
    processes,
    sessions,
    testing,
    v1_context,
)
from orbax_delta.places import locate
from orbax_delta.sessions import Sessions

V0_TYPESTR = "orbax_delta.handler.DeltaCheckpointHandler"
V1_TYPESTR = "orbax_delta.handler_v1.DeltaHandler"
NOISE = np.random.default_rng(0).standard_normal(60_000).astype(np.float32)

EVERY_STEP = v1.training.save_decision_policies.FixedIntervalPolicy(1)


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    orbax_delta.v1_release()


def state(step):
    """Noise, of which each step changes one element more; host leaves, key, values."""
    weights = NOISE.copy()
    weights[: step + 1] += 1
    return {
        "w": jnp.asarray(weights),
        "opt": (np.full(300, step), [step, 0.5 + step]),
        "key": jax.random.key(step),
        "name": f"step {step}",
        "nothing": None,
        "scalar": np.float32(step),
    }


@contextlib.contextmanager
def checkpointer(root, context=None, **options):
    """A v1 Checkpointer that saves whenever it is told to, as v1_context makes it."""
    options.setdefault("save_decision_policy", EVERY_STEP)
    with v1.training.Checkpointer(root, context=context, **options) as made:
        yield made


def recorded(folder):
    """Which handlers Orbax noted down for a step."""
    return json.loads((folder / "_CHECKPOINT_METADATA").read_text())["item_handlers"]


def written(root, step):
    """Bytes that a save wrote, by its report."""
    return orbax_delta.save_report(root / str(step)).written_bytes


def held():
    """Host memory that contents of the v1 adapter's states take."""
    sessions = handler_v1._SESSIONS._sessions.values()
    return sum(session.state.base.held_bytes for session in sessions)


# --- ways to plug it in -------------------------------------------------------------


def test_the_advertised_line(root):
    """One line turns a Checkpointer to deltas; `save` and `load` stay as they are."""
    with checkpointer(root, v1_context()) as made:
        for step in range(3):
            assert made.save_checkpointables(step, {"state": state(step)})
        for step in range(3):
            assert_same_tree(made.load(step), state(step))
            assert_same_tree(made.load(step, state(0)), state(step))
        plain = {"w": state(3)["w"], "n": 3}
        assert made.save(3, plain)
        assert_same_tree(made.load(), plain)
    assert written(root, 0) > NOISE.nbytes / 2
    assert written(root, 2) < 2000
    assert orbax_delta.save_report(root / "2").chunks_by_form["sparse"] >= 1


def test_by_the_name_of_an_item(root):
    """As MaxText calls it: a tree under a name of its own, in the background."""
    with checkpointer(root, v1_context("items")) as made:
        for step in range(3):
            response = made.save_checkpointables_async(step, {"items": state(step)})
            assert response.result()
        target = jax.tree.map(lambda leaf: leaf, state(0))
        got = made.load_checkpointables(2, {"items": target})
        assert_same_tree(got["items"], state(2))
    assert recorded(root / "2") == {"items": V1_TYPESTR}
    assert written(root, 2) < 2000


def test_two_items_and_one_of_orbax(root):
    """Two items by deltas beside one that Orbax keeps, and metrics."""
    context = v1_context(("params", "opt"))
    with checkpointer(root, context) as made:
        for step in range(3):
            made.save_checkpointables(
                step,
                {"params": state(step), "opt": state(step + 5), "data": {"at": step}},
                metrics={"loss": 0.5},
            )
        got = made.load_checkpointables(2)
        assert_same_tree(got["params"], state(2))
        assert_same_tree(got["opt"], state(7))
        assert got["data"] == {"at": 2}
        only = made.load_checkpointables(1, {"opt": None})
        assert only.keys() == {"opt"}
        assert_same_tree(only["opt"], state(6))
    found = recorded(root / "2")
    assert found["params"] == found["opt"] == V1_TYPESTR
    assert found["data"].startswith("orbax.")
    for item in ("params", "opt"):
        assert strategies.read_step(root, 2, item).manifest.item == item
        assert orbax_delta.save_report(root / "2" / item).written_bytes < 2000


def test_every_item(root):
    """`item=None` takes whatever no name is registered for; `metrics` stays Orbax's."""
    with checkpointer(root, v1_context(None)) as made:
        items = {"state": state(0), "anything": state(1), "own": DeltaState(state(2))}
        made.save_checkpointables(0, items, metrics={"loss": 0.5})
        got = made.load_checkpointables(0, {"state": None, "anything": None})
        assert_same_tree(got["state"], state(0))
        assert_same_tree(got["anything"], state(1))
    found = recorded(root / "0")
    assert found["state"] == found["anything"] == V1_TYPESTR
    assert found["own"].endswith(".StatefulCheckpointableHandler")
    assert found["metrics"].endswith(".MetricsHandler")


def test_registered_globally(root):
    """`register_handler` for all of a process, in a process of its own."""
    script = (
        "import sys, numpy as np; from orbax.checkpoint import v1; import orbax_delta;"
        "v1.handlers.register_handler("
        "    orbax_delta.DeltaHandler, checkpointable_name='items');"
        "c = v1.training.Checkpointer(sys.argv[1]);"
        "c.save_checkpointables(0, {'items': {'w': np.arange(9)}});"
        "print(c.load_checkpointables(0)['items']['w'].sum()); c.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, root], capture_output=True, check=True, text=True
    )
    assert done.stdout == "36\n"
    assert recorded(root / "0") == {"items": V1_TYPESTR}
    # It has ended, and let go of its pin by itself.
    assert list((root / STORE / "pins").iterdir()) == []


def test_as_a_stateful_object(root):
    """`DeltaState` needs no context and may be made anew for every save."""
    with checkpointer(root) as made:
        for step in range(3):
            made.save_checkpointables(step, {"state": DeltaState(state(step))})
        kept = DeltaState(state(0))
        got = made.load_checkpointables(2, {"state": kept})
        assert got["state"] is kept
        assert_same_tree(kept.tree, state(2))
        everything = made.load_checkpointables(1, {"state": DeltaState()})
        assert_same_tree(everything["state"].tree, state(1))
    assert written(root, 2) < 2000
    # The tree itself, by the handler; and by v0, for which Orbax noted nothing usable.
    with checkpointer(root, v1_context()) as made:
        assert_same_tree(made.load(2), state(2))
    registry = orbax_delta.handler_registry(item="state")
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        assert_same_tree(manager.restore(2)["state"], state(2))


def test_options_of_both_ways(root):
    """Options reach the MANIFEST."""
    context = v1_context("a", full_every=7)
    with checkpointer(root, context) as made:
        other = DeltaState(state(0), full_every=3)
        made.save_checkpointables(0, {"a": state(0), "b": other})
    for item, wanted in (("a", 7), ("b", 3)):
        manifest = strategies.read_step(root, 0, item).manifest
        assert manifest.options["full_every"] == wanted


def test_the_context_given_is_kept_and_left_alone(root):
    """What it says holds; its own registry does not change."""
    given = v1.Context()
    given.pytree.loading.partial_load = True
    given.asynchronous.create_directories_asynchronously = False
    context = v1_context(context=given)
    assert not context.asynchronous.create_directories_asynchronously
    assert given.checkpointables.registry.get("state") is v1.handlers.PyTreeHandler
    with checkpointer(root, context) as made:
        made.save_checkpointables(0, {"state": state(0)})
        part = {"opt": state(0)["opt"]}
        assert_same_tree(made.load(0, part), part)


def test_free_functions_stand_for_themselves(tmp_path, root):
    """A save without a Checkpointer has no store, whatever its path ends in."""
    for name in ("final", "gemma-7", "12"):
        with v1_context():
            v1.save_checkpointables(tmp_path / name, {"state": state(1)})
            v1.save_checkpointables(
                tmp_path / name, {"state": state(2)}, overwrite=True
            )
        (tmp_path / name).rename(root)
        assert not (tmp_path / STORE).exists()
        with v1_context():
            got = v1.load_checkpointables(root, {"state": state(0)})
            assert_same_tree(got["state"], state(2))
            assert_same_tree(v1.load_checkpointables(root)["state"], state(2))
            response = v1.save_checkpointables_async(
                root, {"state": state(3)}, overwrite=True
            )
            response.result()
            assert_same_tree(v1.load_checkpointables(root)["state"], state(3))
        assert check.verify(str(tmp_path)).problems == []
        root.rename(tmp_path / f"done {name}")
    assert held() == 0


def test_commit_by_marker_file_and_other_names_of_steps(root):
    """As on object stores, where nothing carries a suffix; steps with a prefix."""
    context = v1.Context()
    context.atomicity.mode = v1.options.AtomicityMode.COMMIT_FILE
    context = v1_context(context=context)
    names = v1.path.step.standard_name_format(step_prefix="ckpt")
    options = {"step_name_format": names, "cleanup_tmp_directories": True}
    for begin in (0, 2):
        with checkpointer(root, context, **options) as made:
            for step in (begin, begin + 1):
                made.save_checkpointables(step, {"state": state(step)})
            for step in range(begin + 2):
                assert_same_tree(made.load(step), state(step))
    assert orbax_delta.save_report(root / "ckpt_3").written_bytes < 2000
    assert strategies.read_step(root, "ckpt_3", "state").manifest.step == 3
    orbax_delta.v1_release()
    strategies.check_clean(root, [f"ckpt_{step}" for step in range(4)])


# --- names that are on disk ---------------------------------------------------------


def test_recorded_names(root):
    """Both adapters' names never change, for they are in every checkpoint."""
    assert orbax_delta.DeltaCheckpointHandler.typestr() == V0_TYPESTR
    assert orbax_delta.DeltaHandler.__module__ == "orbax_delta.handler_v1"
    assert orbax_delta.DeltaHandler.__qualname__ == "DeltaHandler"
    with checkpointer(root, v1_context(threads=1)) as made:
        made.save_checkpointables(0, {"state": state(0)})
    assert recorded(root / "0") == {"state": V1_TYPESTR}


def test_v1_opens_what_v0_wrote_and_goes_on(root):
    """In mid-run from v0 to v1, by name and by what v0 noted down."""
    with strategies.open_run(root) as run:
        for step in range(2):
            run.save(step, state(step))
    assert recorded(root / "1") == {"default": V0_TYPESTR}
    with v1_context("other"):
        got = v1.load_checkpointables(root / "1")
        assert_same_tree(got["default"], state(1))
        got = v1.load_checkpointables(root / "1", {"default": state(0)})
        assert_same_tree(got["default"], state(1))
    with checkpointer(root, v1_context("default")) as made:
        assert made.latest.step == 1
        target = jax.tree.map(lambda leaf: leaf, state(0))
        got = made.load_checkpointables(None, {"default": target})
        assert_same_tree(got["default"], state(1))
        made.save_checkpointables(2, {"default": state(2)})
        assert_same_tree(made.load_checkpointables(2)["default"], state(2))
    # The step that was restored was its base.
    assert written(root, 2) < 2000
    assert not check.verify(str(root)).problems


@pytest.mark.parametrize("item", ["default", "state"])
def test_v0_opens_what_v1_wrote_and_goes_on(root, item):
    """And back: managers with the registry, and with nothing at all."""
    with checkpointer(root, v1_context(item)) as made:
        for step in range(2):
            made.save_checkpointables(step, {item: state(step)})
    with ocp.CheckpointManager(root) as manager:
        assert manager.latest_step() == 1
        got = manager.restore(1)
        assert_same_tree(got if item == "default" else got[item], state(1))
    registry = orbax_delta.handler_registry(item=item)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        assert manager.all_steps() == [0, 1]
        wanted = ocp.args.StandardRestore(state(0))
        saved = ocp.args.StandardSave(state(2))
        if item != "default":
            wanted = ocp.args.Composite(**{item: wanted})
            saved = ocp.args.Composite(**{item: saved})
        got = manager.restore(1, args=wanted)
        assert_same_tree(got if item == "default" else got[item], state(1))
        manager.save(2, args=saved)
        manager.wait_until_finished()
    assert orbax_delta.save_report(root / "2" / item).written_bytes < 2000
    assert not check.verify(str(root)).problems


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_a_run_that_orbax_began(root):
    """Steps of v1's own handler restore; deltas go on in the same root."""
    plain = {"w": jnp.asarray(NOISE), "host": np.arange(7), "n": 3, "text": "a"}
    with checkpointer(root) as made:
        made.save(0, plain)
    with checkpointer(root, v1_context()) as made:
        assert_same_tree(made.load(0), plain)
        assert_same_tree(made.load(0, plain), plain)
        got = made.load_checkpointables(0, {"state": orbax_delta.DeltaRestore(plain)})
        assert_same_tree(got["state"], plain)
        part = orbax_delta.DeltaRestore({"w": plain["w"]}, partial_restore=True)
        got = made.load_checkpointables(0, {"state": part})
        assert_same_tree(got["state"], {"w": plain["w"]})
        found = made.checkpointables_metadata(0).metadata["state"]
        assert found["w"].shape == plain["w"].shape
        made.save(1, plain)
        assert_same_tree(made.load(1), plain)
    assert recorded(root / "1") == {"state": V1_TYPESTR}


# --- targets and metadata -----------------------------------------------------------


def test_targets_with_shardings_and_types(root):
    """Any mesh, a cast, numpy for jax and back, types for "as it was", a gap."""
    with checkpointer(root, v1_context()) as made:
        made.save_checkpointables(0, {"state": state(0)})
        spread = strategies.sharding_of((8,), "x", "x")
        one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
        target = {
            **state(0),
            "w": jax.ShapeDtypeStruct((60_000,), jnp.bfloat16, sharding=spread),
            "opt": (jax.ShapeDtypeStruct((300,), np.int32, sharding=one), [int, ...]),
            "scalar": np.ndarray,
        }
        got = made.load(0, target)
        assert got["w"].sharding == spread
        want = jnp.asarray(state(0)["w"]).astype(jnp.bfloat16)
        assert_same_tree(np.asarray(got["w"]), np.asarray(want))
        assert got["opt"][0].sharding == one
        assert got["opt"][1] == [0, ...]
        assert_same_tree(got["scalar"], np.float32(0))
        as_numpy = made.load(0, {**state(0), "w": NOISE})
        assert isinstance(as_numpy["w"], np.ndarray)


def test_metadata_is_a_target(root):
    """Shapes, types and shardings without reading; handed back it restores as saved."""
    spread = strategies.sharding_of((8,), "x", "x")
    saved = {**state(3), "spread": jax.device_put(np.arange(64.0), spread)}
    with checkpointer(root, v1_context()) as made:
        made.save_checkpointables(
            0, {"state": saved}, custom_metadata={"note": [1, "two"]}
        )
        found = made.checkpointables_metadata(0)
        assert found.custom_metadata == {"note": [1, "two"]}
        tree = found.metadata["state"]
        assert (tree["w"].shape, tree["w"].dtype) == ((60_000,), np.float32)
        assert tree["spread"].sharding == spread
        assert tree["key"].dtype == saved["key"].dtype
        assert tree["opt"][0] == handler_v1.NumpyMetadata(
            shape=(300,), dtype=np.dtype(np.int64)
        )
        assert tree["opt"][1] == [0, 0.0]
        assert (tree["name"], tree["nothing"]) == ("", None)
        assert_same_tree(tree["scalar"], np.float32(0))
        assert_same_tree(made.load_checkpointables(0, found.metadata)["state"], saved)
        assert_same_tree(made.load(0, tree), saved)


def test_metadata_of_a_step_that_is_not_there(root, caplog):
    """Orbax turns the error into None; the log says what it was."""
    with checkpointer(root, v1_context()) as made:
        made.save_checkpointables(0, {"state": state(0)})
        (root / "0" / "state" / "MANIFEST").unlink()
        with caplog.at_level(logging.WARNING, "absl"):
            assert made.checkpointables_metadata(0).metadata == {"state": None}
    assert "holds no MANIFEST" in caplog.text


def test_what_is_handleable():
    """Trees of what can be stored, targets, and nothing that looks after itself."""
    handler = orbax_delta.DeltaHandler()
    assert handler.is_handleable(state(0))
    assert not handler.is_handleable({"a": object()})
    assert not handler.is_handleable({1: 0, "1": 0})
    assert not handler.is_handleable(DeltaState(1))
    assert handler.is_abstract_handleable(jax.eval_shape(lambda: {"a": jnp.ones(3)}))
    assert handler.is_abstract_handleable(orbax_delta.DeltaRestore(state(0)))
    assert not handler.is_abstract_handleable({"a": object()})
    assert not handler.is_abstract_handleable(DeltaState(1))


# --- wrong input --------------------------------------------------------------------


@pytest.mark.parametrize("item", ["", (), ("a", ""), 3, ("a", None), ("a", "a")])
def test_names_that_are_none(item):
    """The message says what was given."""
    with pytest.raises(
        orbax_delta.InvalidInputError, match=r"expected the name of a checkpointable"
    ):
        v1_context(item)


@pytest.mark.parametrize("make", [v1_context, DeltaState])
def test_unknown_options(make):
    """A misspelt option is told at once, with those that there are."""
    with pytest.raises(
        orbax_delta.InvalidInputError,
        match=r"unknown options \['fulleevery'\].*threads",
    ):
        make(fulleevery=3)


def test_errors_of_a_restore_come_as_they_are(root):
    """Not as a KeyError about handlers, which is what Orbax makes of them later on."""
    with checkpointer(root, v1_context()) as made:
        made.save_checkpointables(0, {"state": state(0)})
        with pytest.raises(orbax_delta.StructureError, match=r"opt/1/0 .*not in the t"):
            made.load_checkpointables(0, {"state": {"w": NOISE}})
        args = orbax_delta.DeltaRestore({"w": NOISE}, partial_restore=True)
        got = made.load_checkpointables(0, {"state": args})
        assert got["state"].keys() == {"w"}
        args = orbax_delta.DeltaRestore(on_corruption="hope")
        with pytest.raises(orbax_delta.InvalidInputError, match=r"is 'hope'; expected"):
            made.load_checkpointables(0, {"state": args})


def test_damage_and_falling_back(root, caplog):
    """A damaged step names the newest whole one, or gives way to it."""
    with checkpointer(root, v1_context(refresh_every=1, full_every=0)) as made:
        for step in range(2):
            made.save_checkpointables(step, {"state": state(step)})
        only = packs_on_disk(root) - set(
            strategies.read_step(root, 0, "state").manifest.packs
        )
        for pack in only:
            (root / STORE / "packs" / pack).unlink()
        with pytest.raises(
            orbax_delta.CorruptionError, match=r"newest state that restores is step 0"
        ):
            made.load(1)
        args = orbax_delta.DeltaRestore(on_corruption="fallback")
        with caplog.at_level(logging.ERROR, "orbax_delta"):
            got = made.load_checkpointables(1, {"state": args})
        assert_same_tree(got["state"], state(0))
        assert "restored step 0 instead of step 1" in caplog.text


@pytest.mark.parametrize("item", ["state", "default"])
def test_the_newest_whole_state(root, item):
    """`restore_latest_good` takes a Checkpointer: past damage, to a base at last."""
    context = v1_context(item, full_every=1)
    name = None if item == "state" else item
    with checkpointer(root, context) as made:
        for step in range(4):
            made.save_checkpointables(step, {item: state(step)})

        def latest():
            step, tree = orbax_delta.restore_latest_good(made, state(0), item=name)
            assert_same_tree(tree, state(step))
            return step

        assert latest() == 3
        (root / "3" / item / "MANIFEST").write_bytes(b"damaged")
        assert latest() == 2
        (root / "2" / "_CHECKPOINT_METADATA").unlink()
        assert latest() == 2
        shutil.rmtree(root / "2" / item)
        assert latest() == 1
        shutil.rmtree(root / "1")
        shutil.rmtree(root / "0")
        assert latest() == 3  # of the kept base


# --- failures -----------------------------------------------------------------------


@pytest.mark.parametrize("default_policy", [True, False])
@pytest.mark.parametrize("stateful", [True, False])
def test_a_leaf_that_cannot_be_stored(root, default_policy, stateful):
    """The save raises, nothing is written, and later saves are not skipped for it."""
    policy = {} if default_policy else {"save_decision_policy": EVERY_STEP}
    with v1.training.Checkpointer(root, context=v1_context(), **policy) as made:
        made.save_checkpointables(0, {"state": state(0)})
        before = strategies.listing(root / STORE)
        bad = {"a": {"b": object()}}
        item = DeltaState(bad) if stateful else bad
        with pytest.raises(orbax_delta.InvalidInputError, match=r"leaf a/b is a built"):
            made.save_checkpointables(1, {"state": item})
        assert not made.is_saving_in_progress()
        assert strategies.listing(root / STORE) == before
        told_again(made, orbax_delta.InvalidInputError, r"leaf a/b")
        assert made.save_checkpointables(2, {"state": state(2)})
        assert_same_tree(made.load(2), state(2))


def told_again(made, kind, match):
    """The same error once more, which orbax-checkpoint 0.12.8 tells every thread."""
    with pytest.raises(kind, match=match):
        made.wait()
    made.reload()


def test_a_process_saves_with_those_that_there_are(root):
    """As by the v0 handler: process 0 of 1 cannot save as process 1."""
    message = r"this is process 0 of 1; DeltaOptions"
    with checkpointer(root, v1_context(processes=(1,))) as made:
        with pytest.raises(orbax_delta.InvalidInputError, match=message):
            made.save_checkpointables(0, {"state": state(0)})
        told_again(made, orbax_delta.InvalidInputError, message)


@pytest.mark.parametrize("kind", ["checkpointer", "free"])
def test_a_failure_in_the_background(root, tmp_path, kind):
    """`result()` raises it, nothing of the save counts, the next one is right."""
    full = testing.fail(errno.ENOSPC, testing.Match(kind="write"))
    if kind == "free":
        with v1_context(), testing.faults(full):
            response = v1.save_checkpointables_async(root, {"state": state(0)})
            with pytest.raises(orbax_delta.StorageError, match=r"No space left"):
                response.result()
        assert not root.exists()
        return
    with checkpointer(root, v1_context()) as made:
        made.save_checkpointables(0, {"state": state(0)})
        with testing.faults(full):
            response = made.save_checkpointables_async(1, {"state": state(1)})
            with pytest.raises(orbax_delta.StorageError, match=r"No space left"):
                response.result()
        assert made.latest.step == 0
        told_again(made, orbax_delta.StorageError, r"No space left")
        made.save_checkpointables(2, {"state": state(2)})
        assert_same_tree(made.load(2), state(2))
        assert_same_tree(made.load(0), state(0))
    assert written(root, 2) < 2000


def test_a_save_that_is_cancelled(root, monkeypatch):
    """It counts for nothing, comes to an end by itself, and the next one is right.

    Orbax tells of its end a little early at times: a future that had done its part when
    it was cancelled hides those after it.
    """
    began, gate, ended = threading.Event(), threading.Event(), threading.Event()
    run = sessions.save.run

    def held_back(request, item_state):
        if request.place.step_name != "1":
            return run(request, item_state)
        began.set()
        assert gate.wait(timeout=60)
        try:
            return run(request, item_state)
        finally:
            ended.set()

    monkeypatch.setattr(sessions.save, "run", held_back)
    with checkpointer(root, v1_context()) as made:
        made.save_checkpointables(0, {"state": state(0)})
        response = made.save_checkpointables_async(1, {"state": state(1)})
        assert began.wait(timeout=60)
        made.cancel(1)
        made.cancel(1)
        gate.set()
        response.result()
        assert ended.wait(timeout=60)
        assert [found.step for found in made.checkpoints] == [0]
        made.save_checkpointables(2, {"state": state(2)})
        for step in (0, 2):
            assert_same_tree(made.load(step), state(step))
    with checkpointer(root, v1_context(), cleanup_tmp_directories=True) as made:
        assert [found.step for found in made.checkpoints] == [0, 2]
    orbax_delta.v1_release()
    strategies.check_clean(root, (0, 2))


# --- deletion -----------------------------------------------------------------------


def test_retention_and_prune(root):
    """Old steps go by policy or by hand, and their packs with the next save."""
    keep = v1.training.preservation_policies.LatestN(2)
    context = v1_context(refresh_every=1, full_every=0, keep_bases=0)
    with checkpointer(root, context, preservation_policy=keep) as made:
        for step in range(5):
            made.save_checkpointables(step, {"state": state(step)})
        assert [found.step for found in made.checkpoints] == [3, 4]
        assert made.delete(3)
        made.save_checkpointables(5, {"state": state(5)})
        for step in (4, 5):
            assert_same_tree(made.load(step), state(step))
    orbax_delta.v1_release(made.directory)
    assert packs_on_disk(root) == packs_named(root)
    strategies.check_clean(root, (4, 5))


def test_deleting_one_item(root):
    """v1 can delete one item of a step; the other one restores."""
    with checkpointer(root, v1_context(("a", "b"))) as made:
        made.save_checkpointables(0, {"a": state(0), "b": state(1)})
        assert made.delete(0, checkpointable_name="a")
        made.save_checkpointables(1, {"a": state(2), "b": state(3)})
        assert_same_tree(made.load_checkpointables(0)["b"], state(1))
        assert_same_tree(made.load_checkpointables(1)["a"], state(2))
    orbax_delta.v1_release()
    strategies.check_clean(root, (1,))


# --- what is remembered, and for how long -------------------------------------------


def test_what_is_held_is_bounded(tmp_path, monkeypatch):
    """Of many roots only the last one's contents stay; the others read theirs back."""
    bounded = Sessions(held_bytes=NOISE.nbytes * 2.5, states=6)
    monkeypatch.setattr(handler_v1, "_SESSIONS", bounded)
    roots = [tmp_path / f"run {number}" for number in range(8)]
    seen = []
    for step in range(2):
        for root in roots:
            with checkpointer(root, v1_context()) as made:
                made.save_checkpointables(step, {"state": state(step)})
                assert held() <= NOISE.nbytes * 3.6
                assert len(bounded._sessions) <= 6
                if step:
                    report = orbax_delta.save_report(root / "1")
                    seen.append((report.read_bytes > 0, report.written_bytes > 2000))
                assert_same_tree(made.load(step), state(step))
    # Eight by turns are too many for six: each one was forgotten and writes in full.
    assert seen == [(False, True)] * 8
    for number in (6, 2, 7):
        with checkpointer(roots[number], v1_context()) as made:
            made.save_checkpointables(2, {"state": state(2)})
    # The state was there, its content was not (2) or was (6, 7).
    reports = {n: orbax_delta.save_report(roots[n] / "2") for n in (6, 2, 7)}
    assert all(report.written_bytes < 2000 for report in reports.values())
    assert reports[2].read_bytes > 0
    # What fell out has let go of its pin.
    pins = [list((root / STORE / "pins").iterdir()) for root in roots]
    assert sum(map(len, pins)) == len(bounded._sessions) <= 6
    bounded.forget()
    for root in roots:
        strategies.check_clean(root, (0, 1))


def test_items_of_the_root_in_use_stay(root, monkeypatch):
    """However small the bound, what one step consists of is held."""
    monkeypatch.setattr(handler_v1, "_SESSIONS", Sessions(held_bytes=0, states=1))
    with checkpointer(root, v1_context(("a", "b", "c"))) as made:
        for step in range(2):
            made.save_checkpointables(step, dict.fromkeys("abc", state(step)))
    for item in "abc":
        report = orbax_delta.save_report(root / "1" / item)
        assert (report.read_bytes, report.written_bytes < 2000) == (0, True)
    handler_v1._SESSIONS.forget()


def test_release_gives_back_memory_and_pins(tmp_path):
    """One root or all; saving again goes on, in full."""
    roots = [tmp_path / name for name in ("a", "b")]
    for root in roots:
        with checkpointer(root, v1_context()) as made:
            made.save_checkpointables(0, {"state": state(0)})
    both = held()
    orbax_delta.v1_release(roots[0])
    assert held() == both / 2
    pins = [list((root / STORE / "pins").iterdir()) for root in roots]
    assert [len(names) for names in pins] == [0, 1]
    orbax_delta.v1_release()
    assert held() == 0
    with checkpointer(roots[0], v1_context()) as made:
        made.save_checkpointables(1, {"state": state(1)})
        for step in range(2):
            assert_same_tree(made.load(step), state(step))
    assert written(roots[0], 1) > NOISE.nbytes / 2


def test_many_threads(tmp_path):
    """Saves and restores of several roots and of one item at once, with evictions.

    Orbax itself saves from one thread at a time, so this is what lies below it.
    """
    bounded = Sessions(held_bytes=NOISE.nbytes, states=2)
    failures = []

    def train(number):
        try:
            root = tmp_path / f"run {number // 2}"
            for step in range(number % 2, 8, 2):
                folder = str(root / str(step) / "state")
                tree = state(step + number)
                options = DeltaOptions(threads=1)
                bounded.save(
                    processes.prepare(tree, folder, options, known=bounded.known)
                )
                got = bounded.restore(locate(folder), None, DeltaOptions(threads=1))
                assert_same_tree(got.tree, tree)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=train, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(bounded._sessions) <= 2
    bounded.forget()
    for number in range(3):
        strategies.check_clean(tmp_path / f"run {number}", range(8))


def test_the_state_is_let_go_once_it_is_written(root):
    """The awaitable, which Orbax keeps, does not keep the leaves."""
    with checkpointer(root, v1_context()) as made:
        tree = state(0)
        watched = [weakref.ref(tree["opt"][0]), weakref.ref(tree["w"])]
        made.save_checkpointables(0, {"state": tree})
        del tree
        made.save_checkpointables(1, {"state": state(1)})
        gc.collect()
        assert [ref() for ref in watched] == [None, None]


def test_the_end_of_the_process_releases_pins(root):
    """Without a close: the last pins fall at exit, in the process that made them."""
    script = (
        "import os, sys, numpy as np; from orbax.checkpoint import v1;"
        "import orbax_delta;"
        "c = v1.training.Checkpointer(sys.argv[1], context=orbax_delta.v1_context());"
        "c.save_checkpointables(0, {'state': {'w': np.arange(9)}});"
        "pins = os.path.join(sys.argv[1], '_delta_store', 'pins');"
        "child = os.fork();"
        "child or sys.exit();"
        "os.waitpid(child, 0);"
        "print(len(os.listdir(pins)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, root],
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout == "1\n"
    assert list((root / STORE / "pins").iterdir()) == []


# --- traps of orbax-checkpoint 0.12.8, each until it is mended -----------------------


class Raising:
    """A handler that raises where it is told to."""

    async def save(self, directory, checkpointable):
        if checkpointable["where"] == "save":
            raise OSError("from save")

        async def write():
            await directory.await_creation()

        return write()

    async def load(self, directory, abstract_checkpointable=None):
        async def read():
            raise OSError("from the awaitable")

        return read()

    async def metadata(self, directory):
        return None

    def is_handleable(self, checkpointable):
        return True

    def is_abstract_handleable(self, abstract_checkpointable):
        return True


@pytest.fixture
def raising():
    """A context with that handler."""
    context = v1.Context()
    context.checkpointables.registry = v1.handlers.local_registry().add(
        Raising, checkpointable_name="it"
    )
    # Otherwise a thread would wait 300 s for the folder of the save that was refused.
    context.asynchronous.create_directories_asynchronously = False
    return context


def test_trap_a_refused_save_stays_in_progress(root, raising):
    """Why `DeltaHandler.save` leaves raising to its awaitable."""
    with v1.training.Checkpointer(root, context=raising) as made:
        assert made.save_checkpointables(0, {"it": {"where": ""}})
        with pytest.raises(OSError, match=r"from save"):
            made.save_checkpointables(1, {"it": {"where": "save"}})
        assert made.is_saving_in_progress()
        assert not made.save_checkpointables(2, {"it": {"where": ""}})


def test_trap_errors_of_a_load_are_renamed(root, raising):
    """Why `DeltaHandler.load` restores before it returns its awaitable."""
    with checkpointer(root, raising) as made:
        made.save_checkpointables(0, {"it": {"where": ""}})
        with pytest.raises(KeyError, match=r"incompatible handler") as caught:
            made.load_checkpointables(0)
    assert isinstance(caught.value.__cause__, OSError)


def test_trap_load_and_metadata_insist_on_a_file_of_orbax(root):
    """Why the README says `load_checkpointables` and `checkpointables_metadata`."""
    with checkpointer(root, v1_context()) as made:
        made.save_checkpointables(0, {"state": state(0)})
        with pytest.raises(v1.errors.InvalidLayoutError, match=r"No valid PyTree"):
            made.metadata(0)
    with v1_context():
        with pytest.raises(v1.errors.InvalidLayoutError, match=r"No valid PyTree"):
            v1.load(root / "0")
        assert_same_tree(v1.load_checkpointables(root / "0")["state"], state(0))


# --- documentation ------------------------------------------------------------------


def test_examples(root):
    """What the docstrings show works."""
    names = {"root": root, "jnp": jnp, "v1": v1}
    failed, tried = doctest.testmod(handler_v1, extraglobs=names)
    assert (failed, tried) == (0, 4)


def test_policies_and_an_exact_save(tmp_path):
    """Options of a context hold for v1 too; one save may be exact."""
    lossy = {"w": orbax_delta.policies.Grid(bound=0.1)}
    with v1_context(lossy=lossy), v1.training.Checkpointer(tmp_path / "run") as made:
        made.save_checkpointables(0, {"state": state(0)})
        made.save_checkpointables(
            1, {"state": orbax_delta.DeltaSave(state(0), exact=True)}
        )
        rounded, exact = (
            made.load_checkpointables(step, {"state": None})["state"]["w"]
            for step in (0, 1)
        )
    true = state(0)["w"]
    assert 0 < np.abs(np.asarray(rounded) - np.asarray(true)).max() <= 0.1
    assert (np.asarray(exact) == np.asarray(true)).all()
