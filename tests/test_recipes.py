"""The README's recipes in earnest: what each keeps, frees and survives, bit by bit."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import readme
import strategies
from jax.sharding import Mesh, PartitionSpec
from processes import reserved_port

import orbax_delta
from orbax_delta import check, prune
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.store import DeltaStore, Folder

pytest.importorskip("grain", reason="Grain has no wheel for this platform")
import recipe_runs
from recipe_runs import bits

LAST_STEP = 130
HOUR = 3_600_000_000_000
LIFE_SECONDS = 200
"""A process that takes longer hangs, and is killed."""
BYTES = "table: bytes on disk after 40 dense saves, in times the state"


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@pytest.fixture(scope="module")
def wanted():
    """Bits after each step of a run that neither saves nor restores."""
    target = recipe_runs.LOOP["placed"](
        Mesh(jax.devices(), ("fsdp",)), PartitionSpec("fsdp")
    )
    return recipe_runs.undisturbed(LAST_STEP, target)


@pytest.fixture
def recipe(root):
    """Runs the blocks of a recipe after those that it builds on; what they define."""
    recipes = readme.recipes()

    def run(title, *before, **changed):
        names = readme.run(recipes[readme.LOOP], root=root)
        names |= {name: change(names[name]) for name, change in changed.items()}
        texts = [block for name in (*before, title) for block in recipes[name]]
        return readme.run(texts, **names)

    return run


def assert_same_bits(got, expected):
    """All leaves, and every bit of each."""
    assert got.keys() == expected.keys()
    for name in expected:
        strategies.assert_same_leaf(got[name], expected[name], name)


def steps_of(root):
    """Numbers of the steps on disk."""
    return sorted(int(path.name) for path in root.glob("[0-9]*"))


def restored(root, step):
    """Bits of a step, read by a handler that knows nothing of it."""
    handler = orbax_delta.DeltaCheckpointHandler()
    return bits(handler.restore(root / str(step) / "default")["state"])


def check_steps(root, wanted, steps):
    """These are the steps on disk, and each restores to the bits of its moment."""
    assert steps_of(root) == steps
    for step in steps:
        assert_same_bits(restored(root, step), wanted[step])


def prune_all(root):
    """Remove what nothing names any more."""
    store = DeltaStore.open(Folder(str(root)))
    prune.execute(store, prune.plan(store))


# --- when to save, what to keep -------------------------------------------------------


def test_by_steps(recipe, root, wanted):
    """The newest three and every fifth one; Orbax's older options say the same."""
    names = recipe("By steps, and some for good")
    check_steps(root / "by-steps", wanted, [50, 100, 110, 120, 130])
    strategies.check_clean(root / "by-steps", [50, 100, 110, 120, 130])
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=10, max_to_keep=3, keep_period=50
    )
    names["train"](root / "old", LAST_STEP, options)
    assert steps_of(root / "old") == steps_of(root / "by-steps")


def older(root, by):
    """Let every step have been committed so many nanoseconds earlier."""
    for path in root.glob("[0-9]*/_CHECKPOINT_METADATA"):
        document = json.loads(path.read_text())
        document["commit_timestamp_nsecs"] -= by
        path.write_text(json.dumps(document))


def test_by_time(recipe, root, wanted):
    """Counted from the newest step, across restarts; one of each day stays."""
    names = recipe("By time", "By steps, and some for good")
    train, options, run = names["train"], names["options"], root / "by-time"
    assert steps_of(run) == [1]
    train(run, 60, options)
    assert steps_of(run) == [1]
    older(run, HOUR // 12)
    train(run, 60, options)
    assert steps_of(run) == [1]
    for restart in range(7):
        older(run, 10 * HOUR)
        got = train(run, 20, options)
        assert steps_of(run)[-1] == restart + 2
    assert_same_bits(bits(got), wanted[20])
    check_steps(run, wanted, [1, 4, 6, 7, 8])


def worse_after(step):
    """Let the loop report ten times the loss after a step; it trains as ever."""

    def change(train_step):
        def changed(state, batch):
            state, loss = train_step(state, batch)
            return state, jnp.where(state["step"] > step, 10 * loss, loss)

        return changed

    return change


def test_the_best_ones(recipe, root, wanted):
    """The best two and the newest are whole, and the others' packs are gone."""
    names = recipe(
        "The best ones", "By steps, and some for good", train_step=worse_after(40)
    )
    check_steps(root / "best", wanted, [30, 40, 100])
    strategies.check_clean(root / "best", [30, 40, 100])
    options = names["options"]
    with ocp.CheckpointManager(root / "best", options=options) as manager:
        assert manager.best_step() == 40
    all_kept = ocp.CheckpointManagerOptions(
        save_interval_steps=10, best_fn=names["loss"], best_mode="min"
    )
    names["train"](root / "all", 100, all_kept)
    assert len(steps_of(root / "all")) == 11
    before = strategies.disk_bytes(root / "all")
    names["train"](root / "all", 110, options)
    prune_all(root / "all")
    assert strategies.disk_bytes(root / "all") < 0.6 * before
    check_steps(root / "all", wanted, [30, 40, 110])


# --- cold storage ---------------------------------------------------------------------


def test_rolling_with_cold_storage(recipe, root, wanted):
    """What was moved restores from either place; the archive alone is a run, too."""
    names = recipe("Rolling, with cold storage", "By steps, and some for good")
    hot, cold = root / "rolling", root / "cold"
    moved = [50, 100]
    check_steps(hot, wanted, [50, 100, 110, 120, 130])
    check_steps(cold, wanted, moved)
    for step in moved:
        assert not (hot / str(step) / "default" / MANIFEST_NAME).exists()
    strategies.check_clean(cold, moved)
    shutil.rmtree(hot)
    assert_same_bits(bits(names["train"](cold, 120)), wanted[120])


# --- preempted ------------------------------------------------------------------------


@pytest.fixture
def process():
    """Starts processes of `recipe_runs`; those that still run at the end are killed."""
    with contextlib.ExitStack() as stack:

        def start(root, devices, **settings):
            script = [sys.executable, recipe_runs.__file__, str(root)]
            flags = f"--xla_force_host_platform_device_count={devices}"
            child = subprocess.Popen(
                [*script, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"XLA_FLAGS": flags},
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            limit = threading.Timer(LIFE_SECONDS, child.kill)
            limit.start()
            stack.callback(limit.cancel)
            return child

        yield start


def heard(child):
    """What a process says, line by line; it must end well."""
    for line in child.stdout:
        yield json.loads(line)
    assert child.wait() == 0


def left(root, name):
    """Bits that a process has left."""
    return dict(np.load(f"{root}-{name}.npz"))


def test_preempted(process, root, tmp_path):
    """SIGTERM: the step at which the loop ends is saved, and no bit differs later."""
    with reserved_port() as port:
        child = process(root, 2, last_step=10**9, port=port, interval=10**9)
        for said in heard(child):
            if said.get("step") == 7:
                child.send_signal(signal.SIGTERM)
        last_step = said["end"]
    assert last_step > 7
    # None but the first of all was due: the last one is there because of the signal.
    assert steps_of(root) == [1, last_step]
    assert_same_bits(restored(root, last_step), left(root, last_step))
    end = last_step + 25
    for run, first in ((root, last_step + 1), (tmp_path / "whole", 1)):
        with reserved_port() as port:
            said = list(heard(process(run, 2, last_step=end, port=port)))
        assert said[0] == {"step": first}
        assert said[-1]["end"] == end
    assert_same_bits(left(root, end), left(tmp_path / "whole", end))


# --- not to be lost -------------------------------------------------------------------


def test_not_to_be_lost(recipe, root, wanted):
    """All steps deleted: the run goes on from a kept base, bit for bit."""
    recipe("Not to be lost")
    assert steps_of(root / "safe")[-1] == 110
    assert_same_bits(restored(root / "safe", 110), wanted[110])


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Roots after a save at each of 40 steps, by how many bases they keep."""
    roots = {count: tmp_path_factory.mktemp("kept") / "run" for count in (0, 2, 3)}
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    for count, root in roots.items():
        recipe_runs.LOOP["train"](root, 40, options, keep_bases=count)
        prune_all(root)
    return roots


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("damage", ["deleted", "damaged"])
def test_three_separate_states(kept, root, wanted, lost, damage):
    """Without any step and without the newest bases' packs an older base is whole."""
    shutil.copytree(kept[3], root)
    for step in steps_of(root):
        shutil.rmtree(root / str(step))
    bases = [
        strategies.read_manifest(path)
        for path in (root / strategies.STORE / "bases").rglob(MANIFEST_NAME)
    ]
    assert len(bases) == 3
    bases.sort(key=lambda base: base.wall_time, reverse=True)
    for pack in (pack for base in bases[:lost] for pack in base.packs):
        path = root / strategies.STORE / "packs" / pack
        if damage == "deleted":
            path.unlink()
        else:
            path.write_bytes(bytes(path.stat().st_size))
    with ocp.CheckpointManager(
        root, handler_registry=orbax_delta.handler_registry()
    ) as manager:
        step, tree = orbax_delta.restore_latest_good(manager)
    assert step == (40 - 10 * (lost + 1)) + 1
    assert_same_bits(bits(tree["state"]), wanted[step])


def test_what_bases_cost(kept, wanted, record_property):
    """What the README says of it: bytes on disk, in times the state."""
    raw = sum(array.nbytes for array in wanted[1].values())
    sizes = {count: strategies.disk_bytes(root) / raw for count, root in kept.items()}
    row = {f"keep_bases={count}": f"{size:.1f}" for count, size in sizes.items()}
    record_property(BYTES, row)
    text = " ".join(readme.README.read_text().split())
    (said,) = re.findall(r"takes ([\d.]+), ([\d.]+) and ([\d.]+) times the state", text)
    assert list(map(float, said)) == pytest.approx(list(sizes.values()), rel=0.1)


# --- branches -------------------------------------------------------------------------


def test_a_branch(recipe, root, wanted):
    """It begins with nothing but references, and stands when its parent is gone."""
    names = recipe("A branch")
    parent = orbax_delta.save_report(root / "parent" / "40")
    for name in ("left", "right"):
        first = orbax_delta.save_report(root / name / "40")
        # Its newest step is another one, and all of the state has changed since.
        assert not first.bytes_by_form
        assert first.written_bytes < 0.035 * parent.written_bytes
    for step in steps_of(root / "parent"):
        shutil.rmtree(root / "parent" / str(step))
    prune_all(root / "parent")
    for name in ("left", "right"):
        check_steps(root / name, wanted, [40, 50, 60])
        assert_same_bits(bits(names["train"](root / name, 70)), wanted[70])
        assert check.verify(str(root / name)).ok


# --- other hardware -------------------------------------------------------------------


def test_on_other_hardware(process, root):
    """8 devices, 2, then 1: what is restored and how it goes on, bit for bit."""
    begun = {"start": 20, "mesh": "tp", "cut": [None, "tp"]}
    lives = [
        (8, {"last_step": 20}),
        (2, {"last_step": 40, **begun}),
        (1, {"last_step": 60, "start": 40}),
    ]
    for devices, life in lives:
        *_, last = heard(process(root, devices, **life))
        assert last == {"end": life["last_step"], "devices": devices}
    for step in (20, 40):
        assert_same_bits(left(root, f"{step}-restored"), left(root, step))
    for step in (40, 60):
        assert_same_bits(left(root, step), left(root, f"{step}-wanted"))


def test_another_type_on_restore(recipe, root):
    """The cast of what was saved, as jax casts, cut as the target says."""
    names = recipe("On other hardware")
    saved = restored(root / "moved", 30)
    for name, leaf in names["half"].items():
        expected = jnp.asarray(saved[f"params/{name}"]).astype(jnp.bfloat16)
        strategies.assert_same_leaf(np.asarray(leaf), np.asarray(expected), name)
        assert leaf.sharding == names["params"][name].sharding
    with strategies.open_run(root / "half") as run:
        run.save(0, names["half"])
        target = {
            k: leaf.update(dtype=jnp.float32) for k, leaf in names["params"].items()
        }
        for name, leaf in run.restore(0, target).items():
            expected = np.asarray(names["half"][name]).astype(np.float32)
            strategies.assert_same_leaf(np.asarray(leaf), expected, name)
