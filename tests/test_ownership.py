"""Who writes a chunk that several processes hold."""

import collections

import hypothesis
import hypothesis.strategies as st

from orbax_delta import chunks, ownership
from orbax_delta.manifests import LeafEntry

SETS = st.sets(st.integers(0, 9), min_size=2, max_size=6).map(sorted)
BOXES = [((i, i + 1), (0, 64)) for i in range(1000)]


def test_chunks_are_spread_evenly():
    """Of 1,000 chunks each of four processes writes about 250."""
    owners = collections.Counter(
        ownership.owner("params/w", box, (0, 1, 2, 3)) for box in BOXES
    )
    assert set(owners) == {0, 1, 2, 3}
    assert max(owners.values()) < 300


@hypothesis.given(SETS, st.data())
def test_only_the_chunks_of_those_that_go_change_hands(holders, data):
    """So that the others are deltas still."""
    gone = data.draw(st.sampled_from(holders))
    rest = [process for process in holders if process != gone]
    for box in BOXES[:50]:
        before = ownership.owner("w", box, holders)
        assert before in holders
        if before != gone:
            assert ownership.owner("w", box, rest) == before


def _leaves(*paths, shape=(8,)):
    return [
        LeafEntry(path=tuple(path.split("/")), kind="jax", dtype="float32", shape=shape)
        for path in paths
    ]


def test_masters_moments_and_averages_are_of_one_family():
    """A bf16 copy follows from its master only if one process writes both."""
    names = ownership.families(
        _leaves(
            *("params/block_0/attn/q", "params/block_1/attn/q"),
            *("opt/0/mu/block_0/attn/q", "opt/0/mu/block_1/attn/q"),
            *("ema/block_0/attn/q", "ema/block_1/attn/q"),
        )
    )
    assert names == ["block_0/attn/q", "block_1/attn/q"] * 3


def test_another_shape_is_another_family():
    """Boxes of other shapes never are copies of each other."""
    leaves = _leaves("a/w") + _leaves("b/w", shape=(9,))
    assert ownership.families(leaves) == ["a/w", "b/w"]


def test_a_bare_array_is_a_leaf_too():
    """Its path is empty."""
    (leaf,) = [LeafEntry(path=(), kind="jax", dtype="float32", shape=(8,))]
    assert ownership.families([leaf]) == [""]


@hypothesis.given(st.data())
def test_the_shares_of_processes_add_up_to_the_whole(data):
    """A chunk that nobody writes, or two do, is noticed, whichever it is."""
    whole = {0: ((0, 12), (0, 5)), 3: ((0, 40),), 4: ()}
    boxes = [
        (leaf, box) for leaf, all_of in whole.items() for box in chunks.cut(all_of, 7)
    ]
    shares = collections.defaultdict(list)
    for piece in boxes:
        shares[data.draw(st.integers(0, 3))].append(piece)
    expected = chunks.cover(whole.items())
    total = sum(map(chunks.cover, shares.values()))
    assert (total - expected) % chunks.COVER_MODULUS == 0
    odd = data.draw(st.sampled_from(boxes))
    for change in (1, -1):
        assert (total + change * chunks.cover([odd]) - expected) % chunks.COVER_MODULUS
