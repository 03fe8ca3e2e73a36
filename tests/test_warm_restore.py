"""Restoring with a live tree at hand: the same bits, and only what differs is read."""

import dataclasses
import logging
import pathlib
import shutil
import tempfile

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from hypothesis import given
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1
from strategies import STORE, assert_same_leaf, assert_same_tree, bits, open_run

import orbax_delta
from orbax_delta import DeltaRestore, DeltaState, reader, steps
from orbax_delta.background import Pool
from orbax_delta.errors import CorruptionError, InvalidInputError
from orbax_delta.filling import Filling
from orbax_delta.live import Survey, live_of
from orbax_delta.store import Folder


@pytest.fixture(autouse=True, scope="module")
def _unsynced():
    with pytest.MonkeyPatch.context() as monkeypatch:
        strategies.skip_disk_sync(monkeypatch)
        yield


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    orbax_delta.v1_release()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where examples make their roots."""
    return tmp_path_factory.mktemp("warm")


def warm(run, step, base, target=None, **more):
    """Restore a step with a live tree; also the report."""
    args = DeltaRestore(target, base=base, **more)
    return run.manager.restore(step, args=args), run.handler.last_restore_report


def all_bits(tree):
    """The bits of every leaf."""
    return [bits(leaf) for leaf in jtu.tree_leaves(tree)]


# --- properties ---------------------------------------------------------------------


@given(
    tree=strategies.trees(),
    changes=st.lists(strategies.edits(), min_size=1, max_size=3),
    options=strategies.option_values(),
    draw=st.data(),
)
def test_warm_is_cold_bit_for_bit(folder, tree, changes, options, draw):
    """Whatever is live and whatever is remembered; and the live tree stays as it is."""
    states = [tree]
    for change in changes:
        states.append(strategies.edited(states[-1], change))
    number = st.integers(0, len(states) - 1)
    root = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "run"
    with open_run(root, **options) as run:
        for step, state in enumerate(states):
            run.save(step, {"tree": state, "step": step})
        for _ in range(2):
            wanted = draw.draw(number, label="wanted")
            if draw.draw(st.booleans(), label="restored before"):
                run.restore(draw.draw(number, label="which"))
            live = strategies.edited(
                {"tree": states[draw.draw(number, label="live")]},
                draw.draw(strategies.edits(), label="damage"),
            )
            before = all_bits(live)
            got, report = warm(run, wanted, live)
            assert_same_tree(got, {"tree": states[wanted], "step": wanted})
            assert all_bits(live) == before
            assert report.chunks_reused <= report.chunks
    shutil.rmtree(root.parent)


SHARDINGS = {
    "8 rows": lambda: strategies.sharding_of((8,), "x", "x"),
    "4 columns": lambda: strategies.sharding_of((4,), "x", None, "x"),
    "4 by 2": lambda: strategies.sharding_of((4, 2), "xy", "x", "y"),
    "replicated": lambda: strategies.sharding_of((8,), "x"),
    "half replicated": lambda: strategies.sharding_of((4, 2), "xy", "x"),
    "third device": lambda: SingleDeviceSharding(jax.devices()[2]),
    "host": lambda: None,
}


def placed(array, name):
    """`array` on devices, or as it is."""
    sharding = SHARDINGS[name]()
    return array if sharding is None else jax.device_put(array, sharding)


def struct(array, name):
    """A target of that kind."""
    sharding = SHARDINGS[name]()
    if sharding is None:
        return np.zeros(array.shape, array.dtype)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


@given(
    dtype=st.sampled_from(strategies.JAX_DTYPES),
    layouts=st.tuples(*[st.sampled_from(list(SHARDINGS))] * 3),
    differing=st.integers(0, 4),
    seed=strategies.SEEDS,
    remembered=st.booleans(),
)
def test_any_mesh_and_dtype(folder, dtype, layouts, differing, seed, remembered):
    """Saved, live and wanted on any devices; a few elements of what is live differ."""
    saved, live, wanted = layouts
    rng = np.random.default_rng(seed)
    old = strategies.random_array(rng, dtype, (16, 24))
    new = strategies.edited({"w": old}, [("few", seed)])["w"]
    mine = (old if remembered else new).copy()
    for _ in range(differing):
        where = tuple(rng.integers(0, mine.shape))
        mine[where] = strategies.random_array(rng, dtype, ())
    root = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "run"
    with open_run(root, chunk_bytes=256, threads=2) as run:
        run.save(0, {"w": placed(old, saved)})
        run.save(1, {"w": placed(new, saved)})
        if remembered:
            run.restore(0)
        base = {"w": placed(mine, live)}
        got, _ = warm(run, 1, base, {"w": struct(new, wanted)})
    assert_same_leaf(got["w"], placed(new, wanted))
    if isinstance(got["w"], jax.Array):
        assert got["w"].sharding == SHARDINGS[wanted]()
        for shard in got["w"].addressable_shards:
            assert bits(shard.data) == bits(new[shard.index])
    assert bits(base["w"]) == bits(mine)
    shutil.rmtree(root.parent)


# --- what is read -------------------------------------------------------------------


def numbers(step):
    """fp32 values of which each step changes a few in each half."""
    found = np.random.default_rng(3).standard_normal(2000).astype(np.float32)
    for past in range(step):
        found[[past, past + 1000]] += 1
    return found


def state(step):
    """A master with its cast copy, what never changes, and what changes as a whole."""
    fresh = np.random.default_rng(100 + step)
    return {
        "master": jnp.asarray(numbers(step)),
        "half": jnp.asarray(numbers(step)).astype(jnp.bfloat16),
        "frozen": jnp.asarray(numbers(0)[::-1].copy()),
        "host": np.arange(500) ** 2,
        "key": jax.random.key(7),
        "noise": jnp.asarray(fresh.standard_normal(300), jnp.float32),
        "name": "run",
        "step": step,
    }


@pytest.fixture
def run(root):
    """A manager that holds `state(step)` as steps 0 to 4."""
    with open_run(root, chunk_bytes=4096, full_every=100) as opened:
        for step in range(5):
            opened.save(step, state(step))
        yield opened


@pytest.fixture
def follower(run, root):
    """A handler that has seen nothing of it yet."""
    with open_run(root) as opened:
        yield opened


@pytest.fixture
def reads(monkeypatch):
    """Every ranged read that the store is asked for, as (pack, offset, length)."""
    seen = []
    start_read = Folder.start_read

    def counted(self, key, offset, length):
        seen.append((key, offset, length))
        return start_read(self, key, offset, length)

    monkeypatch.setattr(Folder, "start_read", counted)
    return seen


def rows_of(root, step, name):
    """The rows of a leaf."""
    found = strategies.read_step(root, step)
    return [row for row in found.rows if found.manifest.leaves[row.leaf].name == name]


def test_nothing_is_read_of_what_is_live(run, reads):
    """Every array is the very one that is live; texts and values are made anew."""
    live = run.restore(4)
    del reads[:]
    got, report = warm(run, 4, live)
    assert_same_tree(got, state(4))
    for name in ("master", "half", "frozen", "host", "key", "noise"):
        assert got[name] is live[name], name
    assert report.chunks_reused == report.chunks - 1  # the text
    assert report.reused_bytes == report.restored_bytes - len("run")
    assert report.records_read == len(reads) == 1
    assert "of them live" in report.line()


def test_a_follower_reads_only_deltas(follower, root, reads):
    """From one step to the next: the last records, and what has changed as a whole."""
    live = follower.restore(3)
    del reads[:]
    got, report = warm(follower, 4, live)
    assert_same_tree(got, state(4))
    assert got["frozen"] is live["frozen"]
    last = {row.refs[-1] for row in rows_of(root, 4, "master")}
    assert all(len(row.refs) == 5 for row in rows_of(root, 4, "master"))
    assert all(ref.length < 200 for ref in last)
    # The bf16 copy follows from the master; the noise is written as a whole.
    others = [*rows_of(root, 4, "noise"), *rows_of(root, 4, "name")]
    last |= {ref for row in others for ref in row.refs}
    assert report.records_read == len(last)
    assert report.read_bytes < sum(ref.length for ref in last) + 200
    assert_same_tree(live, state(3))


def test_several_steps_on(follower, root):
    """A follower that has missed steps reads all records since."""
    live = follower.restore(1)
    got, report = warm(follower, 4, live)
    assert_same_tree(got, state(4))
    extra = len(rows_of(root, 4, "noise")) + len(rows_of(root, 4, "name"))
    assert report.records_read == 3 * len(rows_of(root, 4, "master")) + extra


def test_a_copy_follows_from_a_live_source(follower, reads):
    """A cast copy that is not live is made of the master that is."""
    live = follower.restore(4)
    del reads[:]
    got, _ = warm(follower, 4, {**live, "half": live["half"] * 0, "name": "x"})
    assert_same_tree(got, state(4))
    assert len(reads) == 1  # the text


def test_a_trainer_goes_back(run):
    """After a loss spike only what has changed since is read."""
    spiked = {**state(4), "master": state(4)["master"] * 2, "noise": jnp.ones(300)}
    got, report = warm(run, 2, spiked)
    assert_same_tree(got, state(2))
    assert got["frozen"] is spiked["frozen"]
    assert got["host"] is spiked["host"]
    changed = ("master", "half", "noise")
    expected = {
        ref
        for name in changed
        for row in rows_of(run.manager.directory, 2, name)
        for ref in row.refs
    }
    assert report.records_read == len(expected) + 1


def test_a_saver_goes_on_from_what_it_saved(run, root):
    """What the last save left is remembered like what a restore has left."""
    with open_run(root) as other:
        other.save(5, state(5))
    run.manager.reload()
    got, report = warm(run, 5, state(4))
    assert_same_tree(got, state(5))
    extra = len(rows_of(root, 5, "noise")) + len(rows_of(root, 5, "name"))
    assert report.records_read == len(rows_of(root, 5, "master")) + extra


def test_nothing_remembered_of_a_chunk(follower):
    """Without a restore before it every chunk that differs is read as a whole."""
    got, report = warm(follower, 4, state(3))
    assert_same_tree(got, state(4))
    root = follower.manager.directory
    masters = rows_of(root, 4, "master")
    assert report.records_read >= 5 * len(masters)
    assert got["frozen"].unsafe_buffer_pointer()


def test_base_may_have_any_structure(follower):
    """Leaves are found by their path; what is no array is passed over."""

    @dataclasses.dataclass
    class Pair:
        master: object
        frozen: object

    jtu.register_dataclass(Pair, ["master", "frozen"], [])
    whole = state(4)
    for base in (
        Pair(whole["master"], whole["frozen"]),
        {"master": whole["master"], "other": jnp.ones(3), "frozen": whole["frozen"]},
        {"master": whole["master"], "frozen": whole["frozen"], "half": ..., "step": 9},
    ):
        got, report = warm(follower, 4, base)
        assert_same_tree(got, state(4))
        assert got["frozen"] is whole["frozen"]
        assert got["master"] is whole["master"]
        assert report.chunks_reused == 4


def test_arrays_of_another_kind_are_not_used(follower):
    """Another shape, dtype or sort of key: no error, and no use."""
    base = {
        "master": jnp.zeros((2, 1000)),
        "half": jnp.zeros(2000, jnp.float16),
        "frozen": [jnp.zeros(2000)],
        "host": np.arange(500, dtype=np.int32),
        "key": jax.random.key(7, impl="rbg"),
        "noise": np.array([{}, "text"]),
        "name": jnp.zeros(3, jnp.uint8),
        "step": np.array("text"),
    }
    got, report = warm(follower, 4, base)
    assert_same_tree(got, state(4))
    assert report.chunks_reused == 0


def test_partial_restore(follower, reads):
    """A target with some leaves takes from a base with others."""
    live = follower.restore(3)
    del reads[:]
    target = {"half": live["half"], "frozen": live["frozen"]}
    got, report = warm(follower, 4, live, target, partial_restore=True)
    assert_same_tree(got, {name: state(4)[name] for name in target})
    assert got["frozen"] is live["frozen"]
    assert report.chunks_reused == 2
    # The master itself is not wanted, so that the copy's records are read from the
    # first one on.
    assert report.records_read == 10


# --- the same array -----------------------------------------------------------------


def test_the_same_array_only_where_it_is_what_is_asked_for(run):
    """Another sharding, dtype, kind or shape: a new array with the same bits."""
    sharded = strategies.sharding_of((8,), "x", "x")
    live = state(4)
    frozen = live["frozen"]
    elsewhere = jax.ShapeDtypeStruct((2000,), jnp.float32, sharding=sharded)
    targets = {
        "sharding": elsewhere,
        "dtype": jax.ShapeDtypeStruct((2000,), jnp.bfloat16, sharding=frozen.sharding),
        "numpy": np.zeros(2000, np.float32),
        "shorter": jax.ShapeDtypeStruct((1500,), jnp.float32, sharding=frozen.sharding),
    }
    expected = {
        "sharding": jax.device_put(frozen, sharded),
        "dtype": frozen.astype(jnp.bfloat16),
        "numpy": np.asarray(frozen),
        "shorter": frozen[:1500],
    }
    for name, target in targets.items():
        wanted = {"frozen": target}
        strict = name != "shorter"
        more = {"partial_restore": True, "strict": strict}
        got, report = warm(run, 4, live, wanted, **more)
        assert got["frozen"] is not frozen
        assert_same_leaf(got["frozen"], expected[name], name)
        assert report.read_bytes == 0
    assert got["frozen"].sharding == frozen.sharding


def test_weak_types_do_not_come_back(root):
    """What jax promotes in another way is not the same array."""
    with open_run(root) as run:
        run.save(0, {"x": jnp.asarray(2.5)})
        live = {"x": jnp.asarray(2.5)}
        assert live["x"].aval.weak_type
        got, report = warm(run, 0, live)
    assert got["x"] is not live["x"]
    assert not got["x"].aval.weak_type
    assert_same_leaf(got["x"], jnp.asarray(2.5, jnp.float32))
    assert report.chunks_reused == 1


def test_numpy_arrays_that_a_caller_could_not_write_to(root):
    """Read-only ones and those of a subclass come back as plain arrays."""
    values = np.arange(40)
    frozen = values.copy()
    frozen.flags.writeable = False
    with open_run(root) as run:
        run.save(0, {"a": values, "b": values})
        live = {"a": frozen, "b": values.view(np.recarray)}
        got, report = warm(run, 0, live)
    for name, leaf in live.items():
        assert type(got[name]) is np.ndarray
        assert not np.shares_memory(got[name], leaf)
        got[name][0] = 5
    assert frozen[0] == 0
    assert report.read_bytes == 0


def test_foreign_order_in_memory(root):
    """Live arrays that are no C-ordered run of bytes have the same elements."""
    values = np.random.default_rng(0).standard_normal((40, 30))
    with open_run(root, chunk_bytes=512) as run:
        run.save(0, {"w": values})
        for live in (np.asfortranarray(values), np.repeat(values, 2, axis=1)[:, ::2]):
            got, report = warm(run, 0, {"w": live})
            assert got["w"] is live
            assert report.read_bytes == 0


# --- what is live may be wrong, or change, or go --------------------------------------


def test_a_flipped_bit_never_leaks(run):
    """In any array, at any place; on top of what is remembered too."""
    rng = np.random.default_rng(0)
    for remembered in (4, 3):
        live = run.restore(remembered)
        for name in ("master", "half", "frozen", "host", "noise"):
            array = np.array(live[name])
            flat = array.reshape(-1).view(np.uint8)
            flat[rng.integers(flat.size)] ^= np.uint8(1 << rng.integers(8))
            wrong = array if name == "host" else jax.device_put(array)
            got, _ = warm(run, 4, {**live, name: wrong})
            assert_same_tree(got, state(4))
            run.restore(remembered)


@pytest.mark.parametrize("remembered", [3, 4])
def test_an_array_that_is_written_to_meanwhile(follower, monkeypatch, remembered):
    """A caller must not, but then gets what is stored, not what was there."""
    live = jtu.tree_map(
        lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf,
        follower.restore(remembered, {**state(4), "master": numbers(0)}),
    )
    fetch = reader.fetch

    def later(*arguments, **named):
        live["master"][:] += 1
        return fetch(*arguments, **named)

    monkeypatch.setattr(reader, "fetch", later)
    target = {**state(4), "master": jnp.asarray(numbers(0))}
    got, _ = warm(follower, 4, live, target)
    assert_same_tree(got, state(4))


def test_few_copies_wait_to_be_filled_in(run, root, monkeypatch):
    """However slow that is: not a second copy of the live tree."""
    asked, filled = [], []
    submit, put = Pool.submit, Filling.put

    def submitted(pool, function, *arguments):
        if getattr(function, "__func__", None) is Survey.content:
            asked.append(function)
        return submit(pool, function, *arguments)

    def filling(self, *arguments, **named):
        filled.append(len(asked) - len(filled))
        put(self, *arguments, **named)

    monkeypatch.setattr(Pool, "submit", submitted)
    monkeypatch.setattr(Filling, "put", filling)
    live = {"master": numbers(4), "frozen": numbers(0)[::-1], "host": state(4)["host"]}
    with open_run(root, threads=1) as opened:
        got, report = warm(opened, 4, live)
    assert_same_tree(got, state(4))
    assert report.chunks_reused == len(asked) + 1 > 4  # `host` is itself reused
    assert max(filled) <= 2


def test_a_donated_array_is_named_before_anything_is_read(follower, reads):
    """Deleted or donated: an error at once, with the leaf's path."""
    gone = jnp.ones(3)
    gone.delete()
    for read in (
        lambda: warm(follower, 4, {"frozen": [jnp.ones(2), gone]}),
        lambda: live_of({"frozen": [jnp.ones(2), gone]}),
    ):
        with pytest.raises(InvalidInputError, match=r"leaf frozen/1 of base has been "):
            read()
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    live = follower.restore(4)
    del reads[:]
    step(live["master"])
    with pytest.raises(InvalidInputError, match=r"leaf master of base .* or donated"):
        warm(follower, 4, live)
    assert not reads


def test_an_array_that_is_donated_meanwhile(follower, monkeypatch):
    """The same error, and no half-made tree."""
    live = follower.restore(4)
    open_step = steps.open_step

    def later(place):
        live["master"].delete()
        return open_step(place)

    monkeypatch.setattr(steps, "open_step", later)
    with pytest.raises(InvalidInputError, match=r"leaf master of base .* or donated"):
        warm(follower, 4, live)


def test_the_result_can_be_donated(run):
    """Donating what was restored does not touch what was made from it or beside it."""
    live = {"frozen": state(4)["frozen"]}
    got, _ = warm(run, 4, live, {**state(4), "frozen": jnp.zeros(2000, jnp.bfloat16)})
    step = jax.jit(lambda tree: jtu.tree_map(lambda x: x + 1, tree), donate_argnums=0)
    step({name: got[name] for name in ("master", "half", "noise", "frozen")})
    assert_same_leaf(live["frozen"], state(4)["frozen"])
    assert_same_tree(run.restore(4), state(4))


# --- damage ---------------------------------------------------------------------------


def spoil(root, refs):
    """Flip a byte in the middle of records."""
    for ref in refs:
        path = root / STORE / "packs" / ref.pack
        data = bytearray(path.read_bytes())
        data[ref.offset + ref.length // 2] ^= 0xFF
        path.write_bytes(data)


def test_damage_in_what_is_live_does_not_matter(follower, root):
    """Records that are not needed are not looked at, healthy or not."""
    live = follower.restore(3)
    spoil(root, {row.refs[0] for row in rows_of(root, 4, "master")})
    got, report = warm(follower, 4, live)
    assert_same_tree(got, state(4))
    assert report.chunks_healed == 0
    with pytest.raises(CorruptionError, match=r"leaf (half|master), chunk"):
        follower.restore(4)


def test_damage_elsewhere_is_healed(root, caplog):
    """What has to be read and is damaged is found in other records."""
    first, second = (np.random.default_rng(n).standard_normal(900) for n in (1, 2))
    with open_run(root, chunk_bytes=4096) as run:
        run.save(0, {"a": first, "b": first[::-1]})
        run.save(1, {"a": second, "b": first[::-1]})
        run.save(2, {"a": first, "b": second})
        newest = {row.refs[0] for row in rows_of(root, 2, "a")}
        assert newest.isdisjoint(row.refs[0] for row in rows_of(root, 0, "a"))
        spoil(root, newest)
        live = {"a": second, "b": first[::-1].copy()}
        with caplog.at_level(logging.ERROR, "orbax_delta"):
            got, report = warm(run, 2, live)
    assert_same_tree(got, {"a": first, "b": second})
    assert report.chunks_healed == len(newest)
    assert [r for r in caplog.records if "are damaged" in r.getMessage()]


def test_damage_that_nothing_heals(run, root):
    """An error that names the chunk; or an older state, with what is live of that."""
    live = {**state(3), "noise": jnp.zeros(300)}
    spoil(root, {row.refs[0] for row in rows_of(root, 4, "noise")})
    with pytest.raises(CorruptionError, match=r"noise, chunk .* restores is step 3"):
        warm(run, 4, live)
    got, report = warm(run, 4, live, on_corruption="fallback")
    assert_same_tree(got, state(3))
    assert report.step == "3"
    assert got["master"] is live["master"]
    assert report.chunks_reused == report.chunks - 2


# --- the other ways in --------------------------------------------------------------


def test_other_arguments_and_other_steps(root, tmp_path):
    """Orbax's own arguments have no base; its own steps are read as always."""
    tree = {"w": jnp.arange(8.0)}
    with ocp.CheckpointManager(root) as manager:
        manager.save(0, args=ocp.args.StandardSave(tree))
    with open_run(root) as run:
        got = run.manager.restore(0, args=DeltaRestore(tree, base=tree))
        assert_same_tree(got, tree)
        assert "base" not in repr(DeltaRestore(base=tree))


def test_v1(root):
    """`DeltaRestore` with a Checkpointer, `DeltaState(base=...)`."""
    live = state(3)
    context = orbax_delta.v1_context(chunk_bytes=4096)
    with v1.training.Checkpointer(root, context=context) as checkpointer:
        checkpointer.save(4, state(4))
        args = DeltaRestore(state(4), base=live)
        got = checkpointer.load_checkpointables(4, {"state": args})["state"]
    assert_same_tree(got, state(4))
    assert got["frozen"] is live["frozen"]
    with v1.training.Checkpointer(root.with_name("other")) as checkpointer:
        checkpointer.save_checkpointables(4, {"model": DeltaState(state(4))})
        for tree in (None, {**state(4), "host": np.zeros(500, np.int64)}):
            model = DeltaState(tree, base=live)
            checkpointer.load_checkpointables(4, {"model": model})
            assert_same_tree(model.tree, state(4))
            assert model.tree["frozen"] is live["frozen"]
            assert model.tree["host"] is live["host"]
            assert model.base is None


def test_saves_go_on_from_a_warm_restore(follower):
    """What a warm restore leaves behind is a base like any other."""
    live = follower.restore(3)
    got, _ = warm(follower, 4, live)
    follower.save(5, {**got, "step": 5})
    assert follower.handler.last_save_report.chunks_by_form.keys() <= {"reference"}
    assert_same_tree(follower.restore(5), {**state(4), "step": 5})


def test_an_array_that_shares_its_own_memory_is_not_taken(root):
    """Writing one element of it would change all."""
    zeros = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (50,), (0,))
    with open_run(root) as run:
        run.save(0, {"w": np.zeros(50, np.float32)})
        args = orbax_delta.DeltaRestore(
            {"w": np.zeros(50, np.float32)}, base={"w": zeros}
        )
        got = run.manager.restore(0, args=args)["w"]
    got[3] = 1
    assert got.tolist() == [0, 0, 0, 1] + [0] * 46
    assert zeros[3] == 0


def test_a_base_of_which_a_shard_is_gone(root):
    """The array itself does not know that it has been deleted in part."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    live = jax.device_put(np.arange(8, dtype=np.float32), spread)
    with open_run(root) as run:
        run.save(0, {"w": live})
        live.addressable_shards[1].data.delete()
        with pytest.raises(orbax_delta.InvalidInputError, match=r"leaf w of base has"):
            run.manager.restore(0, args=orbax_delta.DeltaRestore(base={"w": live}))
