"""All processes that hold a leaf cut it alike, whatever each knows by itself."""

import numpy as np
import pytest

from orbax_delta import changes, chunks, leaves
from orbax_delta.base import Base
from orbax_delta.leaves import HostLeaf
from orbax_delta.manifests import LeafEntry
from orbax_delta.options import DeltaOptions
from orbax_delta.shardings import Layout

OPTIONS = DeltaOptions(chunk_bytes=144)
HALVES = (((0, 20), (0, 6)), ((20, 40), (0, 6)))
"""Shards of a table; each lies on both processes."""


def table(process, *, placed):
    """A table as one of two processes has it: on devices, or on the primary's host."""
    whole = ((0, 40), (0, 6))
    values = np.arange(240, dtype=np.float32).reshape(40, 6)
    entry = LeafEntry(path=("a", "w"), kind="jax", dtype="float32", shape=values.shape)
    if placed:
        shards = [(box, values[chunks.slices(box, whole)]) for box in HALVES]
        layout = Layout(holders=dict.fromkeys(HALVES, (0, 1)), name="halves")
        return HostLeaf(entry=entry, shards=shards, layout=layout)
    shards = [(whole, values)] if process == 0 else []
    return HostLeaf(entry=entry, shards=shards)


def text(process, value):
    """A text as one of two processes has it; the primary's counts."""
    data = np.frombuffer(value.encode(), np.uint8)
    entry = LeafEntry(path=("b", "w"), kind="str", dtype="uint8", shape=data.shape)
    return HostLeaf(entry=entry, shards=[(((0, data.size),), data)][process:])


def save(bases, snapshots):
    """Both processes save; whether what they write makes up the state."""
    covered = 0
    for process, (base, taken) in enumerate(zip(bases, snapshots, strict=True)):
        cut = changes.cut(taken, base, OPTIONS, process=process)
        covered += chunks.cover((chunk.leaf_index, chunk.box) for chunk in cut.own)
        own = [(chunk.leaf, chunk.box) for chunk in cut.own]
        base.commit(
            [(leaf, box, None) for leaf, box in [*own, *cut.others]],
            layouts={leaf.entry.name: leaf.layout.name for leaf in taken},
            pack_sizes={},
            store_uuid="",
            predecessor={},
        )
    entries = enumerate(leaf.entry for leaf in snapshots[0])
    whole = chunks.cover((i, chunks.whole(entry.shape)) for i, entry in entries)
    return (covered - whole) % chunks.COVER_MODULUS == 0


def test_what_was_on_the_host_is_cut_afresh():
    """Only the primary knows in which boxes it was stored."""
    bases = [Base(), Base()]
    for placed in (False, True, True, False):
        taken = [[table(process, placed=placed)] for process in range(2)]
        assert save(bases, taken)


@pytest.mark.parametrize("length", range(4))
def test_texts_differ_between_processes(length):
    """One that happens to be as long as an array is none of its family."""
    whole = ((0, length + 1),)
    entry = LeafEntry(path=("c", "w"), kind="jax", dtype="float32", shape=(length + 1,))
    array = HostLeaf(
        entry=entry,
        shards=[(whole, np.ones(length + 1, np.float32))],
        layout=Layout(holders={whole: (0, 1)}, name="replicated"),
    )
    for theirs in range(1, 9):
        taken = [[text(0, "x"), array], [text(1, "x" * theirs), array]]
        assert save([Base(), Base()], taken)


def test_layouts_on_the_host_have_a_name():
    """No name stands for boxes that all processes know, of a step restored by all."""
    assert leaves.NO_LAYOUT.name
