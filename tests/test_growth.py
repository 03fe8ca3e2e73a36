"""Long runs: what a step costs to read, how long its lists are, what the disk holds."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from strategies import assert_same_tree, disk_bytes, open_run, read_step

import orbax_delta

SAVES = 500
KEEP = 5


@pytest.fixture(autouse=True, scope="module")
def _unsynced():
    with pytest.MonkeyPatch.context() as monkeypatch:
        strategies.skip_disk_sync(monkeypatch)
        yield


class Training:
    """A small state that changes the way states do: dense, sparse, now and then, never.

    Attributes:
        step: Saves so far.
    """

    def __init__(self):
        self.step = 0
        self._rng = np.random.default_rng(0)
        normal = self._rng.standard_normal
        self._dense = (0.02 * normal((128, 96))).astype(np.float32)
        self._embedding = (0.02 * normal((400, 32))).astype(np.float32)
        self._frozen = normal((100, 100)).astype(np.float32)
        self._adapter = normal((40, 40)).astype(np.float32)

    def advance(self):
        """One interval between saves."""
        self.step += 1
        update = self._rng.standard_normal(self._dense.shape).astype(np.float32)
        self._dense += np.float32(1e-4) * update
        rows = self._rng.integers(0, 400, 6)
        self._embedding[rows] += np.float32(1e-3)
        if self.step % 7 == 0:
            self._adapter[self.step % 40] *= np.float32(1.01)

    def state(self):
        """The state as it is now."""
        return {
            "dense": self._dense.copy(),
            "half": jnp.asarray(self._dense, jnp.bfloat16),
            "embedding": self._embedding.copy(),
            "frozen": self._frozen,
            "adapter": self._adapter.copy(),
            "unused": np.zeros((60, 60), np.float32),
            "step": self.step,
        }


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one save left behind.

    Attributes:
        step: Its number.
        read_bytes: Bytes of all records that make the step, shared ones once.
        full_bytes: Bytes of the records of a fresh save of the same state.
        longest: Records of its longest list.
        disk_bytes: All files of the root.
        written_bytes: What the save wrote.
        oldest: Saves since the oldest record that the step needs was written.
    """

    step: int
    read_bytes: int
    full_bytes: int
    longest: int
    disk_bytes: int
    written_bytes: int
    oldest: int


def record_bytes(root, step):
    """Bytes of the records that make a step, and its longest list."""
    rows = read_step(root, step).rows
    refs = {ref for row in rows for ref in row.refs}
    return sum(ref.length for ref in refs), max(len(row.refs) for row in rows)


@pytest.fixture(scope="module")
def run_of_500(tmp_path_factory):
    """500 saves with the newest five kept; a sample of each."""
    folder = tmp_path_factory.mktemp("growth")
    root = folder / "run"
    options = orbax_delta.DeltaOptions(chunk_bytes=8 << 10, pack_bytes=64 << 10)
    values = dataclasses.asdict(options)
    training, samples, attempts = Training(), [], []
    keep = ocp.CheckpointManagerOptions(max_to_keep=KEEP)
    with open_run(root, manager_options=keep, **values) as run:
        for step in range(SAVES):
            training.advance()
            state = training.state()
            run.save(step, state)
            read, longest = record_bytes(root, step)
            full = samples[-1].full_bytes if samples else 0
            if step % 50 == 0:
                # Its size hardly changes: the state is random numbers throughout.
                fresh = folder / f"fresh{step}"
                with open_run(fresh, **values) as other:
                    other.save(step, state)
                full, _ = record_bytes(fresh, step)
            if step % 100 == 99:
                for kept in run.manager.all_steps():
                    assert kept > step - KEEP
                assert_same_tree(run.restore(step), state)
            manifest = read_step(root, step).manifest
            attempts.append(manifest.attempt)
            oldest = min(attempts.index(p.partition("-")[0]) for p in manifest.packs)
            samples.append(
                Sample(
                    step=step,
                    read_bytes=read,
                    full_bytes=full,
                    longest=longest,
                    disk_bytes=disk_bytes(root),
                    written_bytes=run.handler.last_save_report.written_bytes,
                    oldest=step - oldest,
                )
            )
        newest = training.state()
        oldest_kept = min(run.manager.all_steps())
    return root, options, samples, newest, oldest_kept


def test_reading_any_step_stays_cheap(run_of_500):
    """At most `read_budget` times 1.25 of what a fresh save of the state would take."""
    _, options, samples, _, _ = run_of_500
    worst = max(sample.read_bytes / sample.full_bytes for sample in samples)
    assert worst <= 1.25 * options.read_budget
    # And lists are made use of: most steps are more than their full records.
    assert worst > 1.1


def test_no_list_is_longer_than_allowed(run_of_500):
    """However many deltas there are: they become one before `max_chain` is exceeded."""
    _, options, samples, _, _ = run_of_500
    longest = max(sample.longest for sample in samples)
    assert options.full_every + 1 < longest <= options.max_chain


def test_disk_stays_flat(run_of_500):
    """What 500 saves leave behind is no more than what 300 did."""
    _, _, samples, _, _ = run_of_500
    # From 200 saves on there are two separate copies of all.
    early = max(sample.disk_bytes for sample in samples[200:300])
    late = max(sample.disk_bytes for sample in samples[-100:])
    assert late <= 1.5 * early


def test_all_that_is_kept_restores_in_the_end(run_of_500):
    """The newest and the oldest kept step, by a process that saw none of it."""
    root, _, _, newest, oldest = run_of_500
    with open_run(root) as run:
        assert sorted(run.manager.all_steps()) == list(range(SAVES - KEEP, SAVES))
        assert_same_tree(run.restore(SAVES - 1), newest)
        report = run.handler.last_restore_report
        assert report.records_per_chunk_max <= 20
        assert run.restore(oldest)["step"] == oldest + 1
    assert strategies.packs_on_disk(root) == strategies.packs_named(root)


def test_saves_are_nearly_even_in_size(run_of_500):
    """Renewal is spread: no save writes as much as a full one after the first."""
    _, _, samples, _, _ = run_of_500
    sizes = np.array([sample.written_bytes for sample in samples[1:]])
    assert sizes.max() < 0.8 * samples[-1].full_bytes
    assert sizes.max() < 2.5 * sizes.mean()


def test_unchanged_chunks_are_renewed(run_of_500):
    """Nothing that a step needs is older than twice `refresh_every` saves."""
    _, options, samples, _, _ = run_of_500
    assert max(sample.oldest for sample in samples) <= 2 * options.refresh_every


def test_first_save_of_a_fresh_adamw_state(root):
    """fp32 master, zero moments, bf16 copy: at most 0.26 of the raw bytes."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (2000, 256), "w1": (256, 1024), "w2": (1024, 256), "b": (256,)}
    master = {
        name: (0.02 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    state = {
        "master": {name: jnp.asarray(leaf) for name, leaf in master.items()},
        "mu": {name: jnp.zeros_like(leaf) for name, leaf in master.items()},
        "nu": {name: jnp.zeros_like(leaf) for name, leaf in master.items()},
        "params": {k: jnp.asarray(leaf, jnp.bfloat16) for k, leaf in master.items()},
        "count": 0,
    }
    raw = sum(14 * leaf.size for leaf in master.values())
    with open_run(root) as run:
        run.save(0, state)
        report = run.handler.last_save_report
        assert report.full_bytes == raw
        # Not 0.26 by luck: a fresh master is noise, of which 0.83 cannot be saved.
        assert 0.2 * raw < disk_bytes(root) <= 0.26 * raw
        assert report.chunks_by_form["derived"] == report.chunks_by_form["planes"]
        assert_same_tree(run.restore(0), state)
