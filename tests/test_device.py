"""Comparison where arrays live: the same bits, rows and restores as on the host.

Here the devices are CPUs, and `compare_on="device"` forces what GPUs and TPUs do.
"""

import errno
import logging
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from expected import assert_restored
from hypothesis import given
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from processes import Job
from strategies import assert_same_tree, bits, open_run, sharding_of

import orbax_delta
from orbax_delta import (
    check,
    device,
    digests,
    dtypes,
    selection,
    testing,
    transfers,
    trust,
)
from orbax_delta.base import Base
from orbax_delta.errors import CorruptionError, InvalidInputError, StorageError
from orbax_delta.options import DeltaOptions

OPTIONS = {"chunk_bytes": 1024, "compare_on": "device", "threads": 2}


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@pytest.fixture
def small(monkeypatch):
    """Leaves of any size are compared on their devices."""
    monkeypatch.setattr(selection, "SMALLEST_SHARD_BYTES", 1)


# --- digests and copies ---------------------------------------------------------------

DTYPES = (
    *("float32", "bfloat16", "float16", "bool", "int8", "uint16", "int32", "uint32"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"),
)
SHAPES = ((1,), (5,), (300, 7), (17, 384), (3, 5, 64), (262272,))


def random_bits(dtype, shape, seed=0):
    """Any bits, of NaNs too."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = rng.integers(
        0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), "u1"
    )
    return raw.view(dtype)[..., 0]


def ready(program):
    """A program, compiled."""
    device.compile_all([program])
    assert device.is_ready(program)
    return program


def bundle_of(arrays):
    """Shards on as many devices, and their bundle."""
    devices = jax.devices()[: len(arrays)]
    shards = device.Shards(
        devices=tuple(devices), shape=arrays[0].shape, dtype=arrays[0].dtype
    )
    placed = [jax.device_put(one, on) for one, on in zip(arrays, devices)]
    return shards, shards.bundled(placed)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, (300, 7)) for dtype in DTYPES),
        *(("bfloat16", shape) for shape in SHAPES if shape != (300, 7)),
    ],
)
def test_devices_and_numpy_agree(dtype, shape):
    """On all digests of all shards, and on which of them have changed."""
    arrays = [random_bits(dtype, shape, seed) for seed in range(2)]
    shards, bundle = bundle_of(arrays)
    assert device.can_compare(shape, shards.dtype)
    element = dtypes.element_type(shards.dtype)
    expected = np.stack([digests.block_digests(one, element).T for one in arrays])
    kept = expected.copy()
    kept[1, 2, -1] ^= 1
    program = ready(device.Detect(shards=shards))
    found, changed = device.run(program, bundle, device.put(shards, kept))
    assert np.array_equal(found, expected)
    assert np.argwhere(changed).tolist() == [[1, shards.blocks - 1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_boxes_come_bit_for_bit(dtype):
    """NaNs of any payload too, which XLA's CPU backend quiets where it moves floats."""
    arrays = [random_bits(dtype, (64, 32), seed) for seed in range(2)]
    shards, bundle = bundle_of(arrays)
    program = ready(device.Gather(shards=shards, size=(9, 20), count=3))
    starts = np.array([[[0, 0], [55, 12], [3, 7]], [[1, 2], [3, 4], [5, 6]]], np.int32)
    found = np.asarray(device.run(program, bundle, device.put(shards, starts)))
    for number, (array, places) in enumerate(zip(arrays, starts)):
        for box, (row, column) in zip(found[3 * number :], places):
            assert bits(box.view(array.dtype)) == bits(
                array[row : row + 9, column : column + 20]
            )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), "float32"),  # nothing to reduce
        ((0, 4), "float32"),
        ((8,), "float64"),
        ((8,), "complex64"),
        ((8,), "int4"),
        ((262145,), "float32"),  # pieces of 128, and one
    ],
)
def test_what_is_not_compared(shape, dtype):
    """It is copied, as everything is on the host."""
    assert not device.can_compare(shape, np.dtype(getattr(ml_dtypes, dtype, dtype)))


def test_a_program_that_cannot_be_compiled(monkeypatch, caplog):
    """Is named once and tried no more; its leaves are copied whole."""
    shards, _ = bundle_of([np.zeros(77, np.float32)])
    program = device.Gather(shards=shards, size=(78,), count=1)
    for _ in range(2):
        device.compile_all([program])
    assert not device.is_ready(program)
    assert device.run(program) is None
    assert caplog.text.count("copying whole leaves, without Gather(") == 1


def test_programs_that_are_kept(monkeypatch):
    """Those of the last save, and of the others some that were used last."""
    monkeypatch.setattr(device, "MOST_IDLE", 2)
    monkeypatch.setattr(device, "_compiled", type(device._compiled)())
    programs = [
        device.Join(devices=(jax.devices()[0],), blocks=(n,)) for n in range(1, 7)
    ]
    device.compile_all(programs[:4])
    assert all(map(device.is_ready, programs[:4]))  # as many as one save needs
    device.set_proved(programs[0])
    assert device.is_proved(programs[0])  # and was used last
    device.compile_all(programs[4:])
    assert [device.is_ready(one) for one in programs] == [1, 0, 0, 1, 1, 1]
    device.compile_all(programs[1:3])
    device.compile_all(programs[:1])
    assert not device.is_proved(programs[0])  # compiled anew


# --- saves ----------------------------------------------------------------------------


def rows_of(root, step):
    """All that rows say but names and places of packs."""
    found = strategies.read_step(root, step)
    return sorted(
        (
            found.manifest.leaves[row.leaf].name,
            row.box,
            row.digest,
            row.rule,
            row.since,
            row.age,
            [(ref.form, ref.length, ref.word) for ref in row.refs],
        )
        for row in found.rows
    )


LAYOUTS = (
    lambda: sharding_of((2, 2), "xy", "x", "y"),
    lambda: sharding_of((1,), "x"),
)
LEAVES = (("float32", (64, 48)), ("bfloat16", (64, 48)), ("uint8", (64, 192)))


def _edit(arrays, kind, seed):
    """One step of something like training, in place."""
    rng = np.random.default_rng(seed)
    name = sorted(arrays)[seed % len(arrays)]
    words = arrays[name].reshape(-1).view(f"u{arrays[name].itemsize}")
    if kind == "few":
        words[rng.integers(0, words.size, 3)] ^= 1
    if kind == "signs":  # what weaker digests miss
        words[rng.integers(0, words.size, 2)] ^= words.dtype.type(
            1 << (8 * words.itemsize - 1)
        )
    if kind == "all":
        words[:] = rng.integers(0, 255, words.size)
    if kind == "constant":
        words[:] = seed
    if kind == "cast":
        with np.errstate(invalid="ignore"):
            arrays["1"][:] = arrays["0"].astype(ml_dtypes.bfloat16)
    if kind == "copy":
        arrays["2"] = arrays["0"].copy()


def _donate(tree):
    """What a training step does with the state as soon as `save()` has returned."""
    overwrite = jax.jit(
        lambda t: jtu.tree_map(lambda x: jnp.where(x == x, x * 0, x), t),
        donate_argnums=0,
    )
    return overwrite(tree)


@pytest.mark.usefixtures("small")
@hypothesis.settings(max_examples=6, phases=[hypothesis.Phase.generate])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["none", "few", "signs", "all", "constant", "cast", "copy"]
            ),
            st.integers(0, 99),
        ),
        min_size=3,
        max_size=5,
    ),
    st.sampled_from(LAYOUTS),
    st.sampled_from([{}, {"refresh_every": 2}, {"full_every": 2, "keep_bases": 1}]),
    st.booleans(),
)
def test_saves_as_on_the_host(tmp_path_factory, edits, layout, options, donate):
    """The same rows, whatever changes, wherever it lies, and though it is donated."""
    folder = tmp_path_factory.mktemp("runs")
    # Small numbers and, but for the first leaf, NaNs: those are never cast.
    arrays = {str(i): random_bits(*leaf, i) for i, leaf in enumerate(LEAVES)}
    arrays["0"] = np.random.default_rng(0).standard_normal((64, 48)).astype("f4")
    sharding, derived, saved = layout(), False, []
    with (
        open_run(
            folder / "host", **{**OPTIONS, **options, "compare_on": "host"}
        ) as host,
        open_run(folder / "device", **OPTIONS, **options) as here,
    ):
        for step, (kind, seed) in enumerate(edits):
            _edit(arrays, kind, seed)
            for run in (host, here):
                tree = {k: jax.device_put(v, sharding) for k, v in arrays.items()}
                run.manager.save(step, args=ocp.args.StandardSave(tree))
                if donate:
                    _donate(tree)
                run.manager.wait_until_finished()
            rows = [rows_of(folder / name, step) for name in ("host", "device")]
            derived = derived or kind in ("cast", "copy")
            if derived:
                # What follows from a chunk whose content is not at hand is not found.
                rows = [[row[:3] for row in found] for found in rows]
            assert rows[0] == rows[1]
            saved.append({name: bits(array) for name, array in arrays.items()})
        reports = [run.handler.last_save_report for run in (host, here)]
    with open_run(folder / "device") as run:
        for step, expected in enumerate(saved):
            found = {name: bits(leaf) for name, leaf in run.restore(step).items()}
            assert found == expected
    assert reports[0].copied_bytes == sum(a.nbytes for a in arrays.values())
    assert reports[1].copied_bytes <= reports[0].copied_bytes


def _state(step, sharding=None):
    """One large leaf that barely changes, one that is frozen, and small ones."""
    table = np.arange(64 * 1024, dtype=np.float32).reshape(512, 128)
    table[step] += 1  # always in the first chunk
    sharding = sharding or sharding_of((4,), "x", "x")
    return {
        "table": jax.device_put(table, sharding),
        "frozen": jax.device_put(np.arange(1 << 16, dtype=np.int32), sharding),
        "key": jax.random.key(step),
        "step": jnp.int32(step),
        "host": np.arange(9) + step,
    }


SMALL_BYTES = 8 + 4
"""Of the key and the step, which are always copied."""

CHUNK_BYTES = 16 << 10


def _save_steps(run, steps):
    """Saves; what each copied of the large leaves, in chunks."""
    copied = []
    for step in steps:
        run.save(step, _state(step))
        report = run.handler.last_save_report
        copied.append((report.copied_bytes - SMALL_BYTES) / CHUNK_BYTES)
    return copied


@pytest.fixture
def here(root):
    """A run that compares on devices; its two large leaves have 32 chunks."""
    # Programs that other tests have had compiled are another matter.
    device._compiled.clear()
    options = {**OPTIONS, "chunk_bytes": CHUNK_BYTES}
    with open_run(root, **options) as run:
        yield run


def test_only_what_changed_is_copied(root, here):
    """From the third save on: the chunk that changed, and one of the others."""
    assert _save_steps(here, range(6)) == [32, 32, 2, 2, 2, 2]
    report = here.handler.last_save_report
    assert report.chunks_by_form["reference"] == 31
    assert orbax_delta.save_report(root / "5").copied_bytes == report.copied_bytes
    for step in range(6):
        assert_same_tree(here.restore(step, _state(0)), _state(step))


def test_what_changed_by_half_is_copied_whole(here):
    """A shard of whose four chunks three changed; not the one that has lost two."""
    _save_steps(here, range(3))
    state = _state(2)
    table = np.array(state["table"])
    table[0:96] *= 2  # of four times 32 rows in each shard
    table[128:192] *= 2
    state["table"] = jax.device_put(table, state["table"].sharding)
    here.save(3, state)
    report = here.handler.last_save_report
    assert report.copied_bytes - SMALL_BYTES == CHUNK_BYTES * (4 + 2 + 1)
    assert_same_tree(here.restore(3, state), state)


def test_what_is_due_is_copied(root):
    """Chunks that are written anew for their age must be looked at."""
    options = {**OPTIONS, "chunk_bytes": CHUNK_BYTES, "refresh_every": 2}
    with open_run(root, **options) as run:
        assert min(_save_steps(run, range(8))[2:]) > 2
        assert run.handler.last_save_report.chunks_by_form["planes"] > 2
        assert_same_tree(run.restore(7, _state(0)), _state(7))


def test_another_layout_is_copied(here):
    """Digests of other shards say nothing of these; then they are kept of them."""
    _save_steps(here, range(3))
    moved = sharding_of((2,), "x", "x")
    for step, copied in ((3, 32), (4, 32), (5, 2)):
        state = _state(step, moved)
        here.save(step, state)
        report = here.handler.last_save_report
        assert (report.copied_bytes - SMALL_BYTES) / CHUNK_BYTES == copied
        assert_same_tree(here.restore(step, state), state)


def test_a_restore_of_what_was_saved_last_keeps_digests(here):
    """They tell of a save, not of a call: after another step's restore they do not."""
    _save_steps(here, range(3))
    here.restore(2)
    assert _save_steps(here, [3, 4]) == [2, 2]
    here.restore(3)
    assert _save_steps(here, [5, 6]) == [32, 2]
    assert_same_tree(here.restore(6, _state(0)), _state(6))


def test_a_failed_save_in_between(root, here):
    """What it touched is copied by the next one; the rest is known from before it."""
    _save_steps(here, range(3))
    state = _state(3)
    state["frozen"] = state["frozen"].at[-1].add(1)
    matching = testing.Match(kind="write", url="*/part-*")
    with (
        testing.faults(testing.fail(errno.EIO, matching)),
        pytest.raises(StorageError, match="could not write"),
    ):
        here.save(3, state)
    here.manager.reload()
    (copied,) = _save_steps(here, [4])
    assert copied == 3  # changed since step 2, touched by step 3, and the sample
    assert_same_tree(here.restore(4, _state(0)), _state(4))


def test_a_lying_device_is_found_out(root, here, monkeypatch, caplog):
    """Nothing of that save counts, and devices are not asked any more."""
    monkeypatch.setattr(trust._Process, "lost", False)
    _save_steps(here, range(3))
    real = device.run

    def lie(program, *arguments):
        made = real(program, *arguments)
        if isinstance(program, device.Detect):
            return made[0], jnp.zeros_like(made[1])
        return made

    monkeypatch.setattr(device, "run", lie)
    state = _state(3)
    state["table"] = state["table"] * 2 + 1
    state["frozen"] = state["frozen"] + 1
    wanted = r"step 3, .*leaf \w+, chunk .* has changed, but the device"
    with pytest.raises(CorruptionError, match=wanted):
        here.save(3, state)
    errors = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert [one.name for one in errors].count("orbax_delta") == 1
    here.manager.reload()
    assert _save_steps(here, [4]) == [32]
    assert _save_steps(here, [5]) == [32]
    assert_same_tree(here.restore(5, _state(0)), _state(5))
    assert not check.verify(str(root)).problems


def _wrong_digests(made):
    return made[0] ^ 1, made[1]


def _no_changes(made):
    return made[0], jnp.zeros_like(made[1])


def _one_bit(made):
    return made[0].at[:, 2, -1].add(1 << 31), made[1]


@pytest.mark.parametrize("lie", [_wrong_digests, _no_changes, _one_bit, None])
def test_a_program_that_is_wrong_from_the_start(root, here, monkeypatch, caplog, lie):
    """Is found out by the first digests; that save is right, the others copy all."""
    monkeypatch.setattr(trust._Process, "lost", False)
    real, real_wait, asked = device.run, transfers.Arrival.wait, []

    def run(program, *arguments):
        made = real(program, *arguments)
        if made is None or not isinstance(program, device.Detect):
            return made
        asked.append(program)
        return lie(made) if lie else made

    def wait(arrival):
        found = real_wait(arrival)
        if not lie and found.shape[0] == 1:  # what a program made
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return found

    monkeypatch.setattr(device, "run", run)
    monkeypatch.setattr(transfers.Arrival, "wait", wait)
    assert _save_steps(here, range(2)) == [32, 32]
    assert len(asked) == 2
    (error,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    found = "expected digest [0-9a-f]{32}, found " if lie else "RESOURCE_EXHAUSTED"
    wanted = rf"step 1, .*leaf \w+, shard .* on cpu does not .*{found}.*and report it"
    assert re.search(wanted, error.getMessage())
    assert _save_steps(here, range(2, 5)) == [32, 32, 32]
    assert len(asked) == 2  # never again
    for step in range(5):
        assert_same_tree(here.restore(step, _state(0)), _state(step))
    assert not check.verify(str(root)).problems


def test_programs_are_proved_little_by_little(here, monkeypatch):
    """One a save if the bound is small; what is not proved yet is copied."""
    monkeypatch.setattr(trust, "PROVED_BYTES", 1)
    first, second, third, fourth = _save_steps(here, range(4))
    assert (first, second, fourth) == (32, 32, 2)
    assert third in {16 + 1, 16 + 2}  # the one, and of the other what is copied of it
    assert_same_tree(here.restore(3, _state(0)), _state(3))


def test_zeros_prove_nothing(root):
    """They are copied until there is something else to prove the program by."""
    options = {**OPTIONS, "chunk_bytes": CHUNK_BYTES}
    device._compiled.clear()
    copied = []
    with open_run(root, **options) as run:
        for step in range(6):
            values = np.zeros((512, 128), np.float32)
            values[:, :64] = max(0, step - 2)
            state = {"w": jax.device_put(values, sharding_of((4,), "x", "x"))}
            run.save(step, state)
            copied.append(run.handler.last_save_report.copied_bytes // CHUNK_BYTES)
            device_proved = [made.proved for made in device._compiled.values()]
            assert any(device_proved) == (step >= 3)
            assert_same_tree(run.restore(step, state), state)
    assert copied == [16] * 6


def test_the_sample_goes_round():
    """In as many saves as it takes every chunk is looked at once."""
    unchanged = dict.fromkeys([(0, ((i, i + 1),)) for i in range(200)])
    samples = [set(selection._sample(unchanged, turn)) for turn in range(64)]
    assert {len(sample) for sample in samples} == {3, 4}
    assert sum(map(len, samples)) == len(set.union(*samples)) == 200
    few = dict(list(unchanged.items())[:5])
    assert len({next(iter(selection._sample(few, turn))) for turn in range(5)}) == 5
    assert selection._sample({}, 3) == {}


# --- under whatever a training loop has set -------------------------------------------


def _mesh(axis_type):
    return Mesh(
        np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=(axis_type,) * 2
    )


MODES = {
    "auto mesh": lambda: jax.set_mesh(_mesh(AxisType.Auto)),
    "explicit mesh": lambda: jax.set_mesh(_mesh(AxisType.Explicit)),
    "no rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "64 bits": lambda: jax.enable_x64(True),
    "NaNs are errors": lambda: jax.debug_nans(True),
    "no transfers": lambda: jax.transfer_guard("disallow"),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(root, mode):
    """All calls in the training loop's thread work; NaNs and donated arrays too."""
    device._compiled.clear()
    mesh = _mesh(AxisType.Explicit if mode == "explicit mesh" else AxisType.Auto)
    shardings = {
        "both": NamedSharding(mesh, PartitionSpec("x", "y")),
        "rows": NamedSharding(mesh, PartitionSpec("y")),
    }
    values = {
        "both": random_bits("float32", (512, 256)),
        "rows": random_bits("bfloat16", (1024, 128)),
    }
    copied = []
    real = selection.take

    def take(*arguments, **named):
        with MODES[mode]():
            return real(*arguments, **named)

    with open_run(root, chunk_bytes=CHUNK_BYTES, compare_on="device") as run:
        for step in range(4):
            values["both"][step] = np.nan
            tree = {k: jax.device_put(v, shardings[k]) for k, v in values.items()}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(selection, "take", take)
                assert run.manager.save(step, args=ocp.args.StandardSave(tree))
            _donate(tree)
            run.manager.wait_until_finished()
            copied.append(run.handler.last_save_report.copied_bytes)
        for name, restored in run.restore(3).items():
            assert bits(restored) == bits(values[name])
    assert copied[0] == copied[1] == sum(v.nbytes for v in values.values())
    assert copied[2] < copied[0] // 8


def test_room_on_devices_is_bounded(root, monkeypatch):
    """Copies that take more wait for those before them, and nothing is lost."""
    monkeypatch.setattr(transfers, "STAGED_BYTES", 3 << 10)
    waits = []
    real = transfers.Arrival.wait

    def wait(arrival):
        waits.append(arrival)
        return real(arrival)

    values = np.zeros((1024, 64), np.float32)
    with open_run(root, **OPTIONS) as run:
        for step in range(4):
            values[8 * step : 8 * step + 400 : 8] += 1
            tree = {"w": jax.device_put(values)}
            if step == 3:
                monkeypatch.setattr(transfers.Arrival, "wait", wait)
            assert run.manager.save(step, args=ocp.args.StandardSave(tree))
            waited = len(waits)
            _donate(tree)
            run.manager.wait_until_finished()
        assert waited > 3
        assert bits(run.restore(3)["w"]) == bits(values)
        assert run.handler.last_save_report.copied_bytes < values.nbytes // 2


def test_other_memory_is_copied(root):
    """What was offloaded to the host is there already."""
    layout = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    tree = {"w": jax.device_put(np.arange(1 << 15, dtype=np.float32), layout)}
    with open_run(root, **OPTIONS) as run:
        for step in range(4):
            run.save(step, tree)
            assert run.handler.last_save_report.copied_bytes == 4 << 15
        assert_same_tree(run.restore(3, tree), tree)


def test_where_is_a_choice(root):
    """By default CPUs compare on the host, where a copy costs nothing."""
    with pytest.raises(
        InvalidInputError, match=r"compare_on is 'gpu'; expected one of"
    ):
        DeltaOptions(compare_on="gpu")
    for number, compare_on in enumerate(("auto", "host")):
        with open_run(root / str(number), compare_on=compare_on) as run:
            for step in range(3):
                run.save(step, _state(step))
            assert run.handler.last_save_report.copied_bytes == (1 << 19) + SMALL_BYTES
            options = strategies.read_step(root / str(number), 2).manifest.options
            assert "compare_on" not in options


def test_v1(root):
    """The other adapter knows what it saved last too."""
    v1 = ocp.v1
    with v1.training.Checkpointer(
        root, context=orbax_delta.v1_context(**OPTIONS)
    ) as checkpointer:
        for step in range(4):
            checkpointer.save(step, _state(step))
        loaded = checkpointer.load(3, _state(0))
    report = orbax_delta.save_report(root / "3" / "state")
    orbax_delta.v1_release(root)
    assert report.copied_bytes < 1 << 15
    assert_same_tree(loaded, _state(3))


def test_many_processes(root, tmp_path):
    """Each compares its own shards, waits for no other, copies what it writes alone."""
    with Job(2, tmp_path / "job") as job:
        job.do("open", root=str(root), compare_on="device", smallest_shard=1)
        copied = []
        for step in range(4):
            answers = job.do("save", step=step, version=step, mesh="data parallel")
            assert [answer["error"] for answer in answers] == [None, None]
            copied.append(answers[0]["report"]["copied_bytes"])
        # A table of 16 kB, which is one block, and others that change all over; and
        # zeros, by which no program is proved.
        assert copied[3] < 0.7 * copied[0]
        assert_restored(job.do("restore", step=3, mesh="fully sharded"), 3)
        job.do("close")
    strategies.check_clean(root, range(4))


# --- rows that are lost between the call and the writing ------------------------------


def _lose_rows(monkeypatch, *, contents=True):
    """Saves find all packs gone when they write their pin, as after a repair.

    Args:
        monkeypatch: Undoes it.
        contents: Whether the copies on the host are left.
    """
    real = Base.forget_packs

    def forget(base, gone):
        if not contents:
            base.drop_contents()
        return real(base, gone | base.packs())

    monkeypatch.setattr(Base, "forget_packs", forget)


@pytest.mark.parametrize("contents", [True, False])
def test_packs_that_are_condemned(root, here, monkeypatch, contents):
    """What was left on the device comes from the host or the store, to be written."""
    _save_steps(here, range(3))
    with monkeypatch.context() as patch:
        _lose_rows(patch, contents=contents)
        assert _save_steps(here, [3]) == [2]
    assert here.handler.last_save_report.chunks_by_form["planes"] == 34
    assert_same_tree(here.restore(3, _state(0)), _state(3))
    assert _save_steps(here, [4]) == [2]


def test_packs_that_are_gone(root, here, monkeypatch):
    """Nobody has what was left on the device: that save fails, the next copies it."""
    _save_steps(here, range(3))
    for pack in (root / strategies.STORE / "packs").iterdir():
        pack.unlink()
    with monkeypatch.context() as patch:
        _lose_rows(patch, contents=False)
        wanted = r"leaf \w+, chunk .* left on its device .* Save again"
        with pytest.raises(StorageError, match=wanted):
            here.save(3, _state(3))
    here.manager.reload()
    (copied,) = _save_steps(here, [4])
    assert copied == 32
    assert_same_tree(here.restore(4, _state(0)), _state(4))
