"""Memory of a restore: filled alike by every way, aligned, and little besides it."""

import tracemalloc

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from hypothesis import given
from strategies import assert_same_tree, open_run

from orbax_delta import assemble, buffers, chunks, restore
from orbax_delta.manifests import LeafEntry
from orbax_delta.options import DeltaOptions
from orbax_delta.places import locate


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@st.composite
def boxes(draw, shape):
    """Any box in a leaf of that shape."""
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return tuple(
        (start, draw(st.integers(start + 1, size)))
        for start, size in zip(starts, shape, strict=True)
    )


@given(
    dtype=st.sampled_from(strategies.NUMPY_DTYPES),
    shape=st.lists(st.integers(1, 6), max_size=3).map(tuple),
    chunk_elements=st.integers(1, 40),
    aligned=st.booleans(),
    seed=strategies.SEEDS,
    draw=st.data(),
)
def test_windows_fill_what_copies_fill(
    dtype, shape, chunk_elements, aligned, seed, draw
):
    """Chunks put into their windows and chunks copied give the same regions."""
    array = strategies.random_array(np.random.default_rng(seed), dtype, shape)
    name = strategies.dtype_name(array)
    entry = LeafEntry(path=("w",), kind="numpy", dtype=name, shape=shape)
    regions = draw.draw(st.sets(boxes(shape), min_size=1, max_size=3))
    plain, direct = (
        {box: buffers.allocate(entry, box, aligned=how) for box in regions}
        for how in (False, aligned)
    )
    for box in chunks.cut(chunks.whole(shape), chunk_elements):
        content = entry.element.to_content(
            array[chunks.slices(box, chunks.whole(shape))]
        )
        buffers.place(plain, entry, box, content, placed=False)
        window = buffers.window(direct, entry, box)
        if window is not None:
            assert window.nbytes == content.nbytes
            window[:] = content
        given_content = content if window is None else window
        buffers.place(direct, entry, box, given_content, placed=window is not None)
    for region in regions:
        expected = array[chunks.slices(region, chunks.whole(shape))]
        for found in (plain, direct):
            assert strategies.bits(found[region]) == strategies.bits(expected)
        if aligned:
            assert direct[region].ctypes.data % buffers.ALIGNMENT == 0


def test_regions_beyond_the_leaf_are_zero():
    """What no chunk fills is zero from the start."""
    entry = LeafEntry(path=("w",), kind="jax", dtype="float32", shape=(3, 2))
    region = ((0, 4), (0, 3))
    assert not buffers.allocate(entry, region, aligned=True).any()


@pytest.mark.parametrize("layout", ["one device", "eight", "copies"])
def test_jax_takes_the_memory_over(root, monkeypatch, layout):
    """On CPU what is decoded is not copied once more, and nobody else holds it."""
    made = set()
    allocate = buffers.allocate

    def noted(*arguments, **named):
        array = allocate(*arguments, **named)
        made.add(array.ctypes.data)
        return array

    sharding = {
        "one device": jax.sharding.SingleDeviceSharding(jax.devices()[3]),
        "eight": strategies.sharding_of((8,), "x", "x"),
        "copies": strategies.sharding_of((8,), "x"),
    }[layout]
    tree = {"w": jax.device_put(jnp.arange(8192.0), sharding)}
    with open_run(root) as run:
        run.save(0, tree)
        monkeypatch.setattr(assemble, "allocate", noted)
        got = run.restore(0)
    assert_same_tree(got, tree)
    held = {s.data.unsafe_buffer_pointer() for s in got["w"].addressable_shards}
    assert held == made


def test_a_restore_takes_little_besides_its_result(root):
    """Less than 40 MB, for a state of 80 MB whose chunks list two records."""
    rng = np.random.default_rng(0)
    first = rng.standard_normal(20_000_000, np.float32)
    with open_run(root, keep_bases=0) as run:
        run.save(0, {"w": first})
        run.save(1, {"w": first + np.float32(1e-3)})
    del first
    place = locate(str(root / "1" / "default"))
    tracemalloc.start()
    try:
        got = restore.run(place, None, DeltaOptions(threads=4))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got.report.records_per_chunk_max == 2
    assert got.tree["w"].nbytes == 80_000_000
    assert peak < 120_000_000
