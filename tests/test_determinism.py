"""The same input gives the same bytes, at any number of threads."""

import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import open_run, read_step

import orbax_delta


@pytest.fixture(autouse=True, scope="module")
def _unsynced():
    with pytest.MonkeyPatch.context() as monkeypatch:
        strategies.skip_disk_sync(monkeypatch)
        yield


def written(root, trees, options):
    """Rows and record bytes of each step, with attempts named by their step."""
    with open_run(root, **options) as run:
        for step, tree in enumerate(trees):
            run.manager.save(step, args=orbax_delta.DeltaSave(tree))
        run.manager.wait_until_finished()
        steps = [read_step(root, step) for step in range(len(trees))]
        number = {s.manifest.attempt: str(i) for i, s in enumerate(steps)}
        return [_described(root, step, number) for step in steps]


def _described(root, step, number):
    packs = {
        name: (root / strategies.STORE / "packs" / name).read_bytes()
        for name in step.manifest.packs
    }

    def place(ref):
        if not ref.pack:
            return ref.form, ref.word
        attempt, _, rest = ref.pack.partition("-")
        record = packs[ref.pack][ref.offset : ref.offset + ref.length]
        return ref.form, number[attempt] + rest, ref.offset, record

    return [
        (
            *(row.leaf, row.box, row.digest, row.rule, row.since, row.age),
            *(place(ref) for ref in row.refs),
        )
        for row in step.rows
    ]


def large_states():
    """A few megabytes in many chunks, with changes of every kind between saves."""
    rng = np.random.default_rng(0)
    master = rng.standard_normal((600, 500)).astype(np.float32)
    for step in range(4):
        yield {
            "master": master.copy(),
            "half": jnp.asarray(master, jnp.bfloat16),
            "copy": master.copy(),
            "mu": np.full((600, 500), 0.5 * (step > 1), np.float32),
            "frozen": np.arange(50_000),
        }
        master[:100] *= np.float32(1.0001)
        master.reshape(-1)[rng.integers(0, master.size, 100)] += 1


def test_large_state_at_any_number_of_threads(tmp_path):
    """Rows, their order, record bytes and their places do not depend on threads."""
    trees = list(large_states())
    options = {"chunk_bytes": 16 << 10, "pack_bytes": 256 << 10, "refresh_every": 2}
    first, *others = (
        written(tmp_path / str(threads), trees, {**options, "threads": threads})
        for threads in (1, 2, 8)
    )
    assert len(first[0]) > 200
    for other in others:
        assert other == first


def test_repeated_run(tmp_path):
    """Nothing of a run depends on time, addresses or random numbers but its names."""
    trees = list(large_states())[:2]
    runs = [written(tmp_path / name, trees, {"threads": 2}) for name in "ab"]
    assert runs[0] == runs[1]


@given(
    tree=strategies.trees(),
    changes=st.lists(strategies.edits(), min_size=1, max_size=3),
    options=strategies.option_values(),
)
@settings(max_examples=max(2, settings().max_examples // 3))
def test_any_state_at_any_number_of_threads(tmp_path_factory, tree, changes, options):
    """The same for any states and options."""
    trees = [tree]
    for edits in changes:
        trees.append(strategies.edited(trees[-1], edits))
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as name:
        one, two, eight = (
            written(
                pathlib.Path(name) / str(threads),
                trees,
                {**options, "threads": threads},
            )
            for threads in (1, 2, 8)
        )
    assert one == two == eight
