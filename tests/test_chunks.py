"""Boxes: every cut covers its shard exactly, without overlap, and stays contiguous."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from orbax_delta import chunks

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def _boxes(draw, shape=None, *, empty=True):
    """A box inside a leaf of `shape`, or of a shape of its own."""
    if shape is None:
        shape = draw(SHAPES)
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        low = start if empty else min(start + 1, size)
        box.append((start, draw(st.integers(low, size))))
    return tuple(box)


@st.composite
def _box_pairs(draw):
    shape = draw(SHAPES)
    return draw(_boxes(shape)), draw(_boxes(shape))


def _count_cover(shape, boxes):
    """How many boxes hold each element of a leaf."""
    count = np.zeros(shape, int)
    for box in boxes:
        count[chunks.slices(box, chunks.whole(shape))] += 1
    return count


def _extent(*boxes):
    return tuple(max(box[axis][1] for box in boxes) for axis in range(len(boxes[0])))


@hypothesis.given(_boxes(), st.integers(1, 60))
def test_a_cut_covers_its_box_once_in_row_major_order(box, max_elements):
    """No element is left out or held twice, no piece is too large, order is fixed."""
    pieces = list(chunks.cut(box, max_elements))
    inside = np.zeros(_extent(box), int)
    inside[chunks.slices(box, chunks.whole(_extent(box)))] = 1
    assert np.array_equal(_count_cover(_extent(box), pieces), inside)
    assert pieces == sorted(pieces)
    for piece in pieces:
        assert 0 < chunks.element_count(piece) <= max_elements


@hypothesis.given(_boxes(), st.integers(1, 60))
def test_every_piece_is_contiguous_in_its_box(box, max_elements):
    """A shard's memory holds each chunk as one run, so that no copy is needed."""
    shape = chunks.box_shape(box)
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    position = 0
    for piece in chunks.cut(box, max_elements):
        run = numbers[chunks.slices(piece, box)].ravel()
        assert run.tolist() == list(range(position, position + run.size))
        position += run.size
    assert position == numbers.size


@hypothesis.given(_boxes(empty=False), st.integers(1, 60))
def test_pieces_along_the_cut_are_even(box, max_elements):
    """All pieces of a cut but the last of each run have one size."""
    sizes = [chunks.element_count(piece) for piece in chunks.cut(box, max_elements)]
    if sizes:
        assert max(sizes) == sizes[0]
        assert chunks.element_count(box) <= sizes[0] * len(sizes)


def test_an_empty_box_has_no_pieces_and_a_scalar_one():
    """Nothing is stored of a zero-size leaf; a 0-d leaf is one chunk of one element."""
    assert list(chunks.cut(((0, 0), (0, 5)), 10)) == []
    assert list(chunks.cut((), 1)) == [()]
    assert chunks.element_count(()) == 1


def test_cuts_of_one_shape_do_not_depend_on_where_the_box_lies():
    """A shard that moved by whole boxes is cut at the same offsets."""
    here = list(chunks.cut(((0, 7), (0, 10)), 12))
    there = list(chunks.cut(((7, 14), (10, 20)), 12))
    moved = [((a + 7, b + 7), (c + 10, d + 10)) for (a, b), (c, d) in here]
    assert there == moved


@hypothesis.given(_box_pairs())
def test_intersection_is_what_both_hold(pair):
    """Element by element, and None exactly when there is none."""
    left, right = pair
    shape = _extent(left, right)
    both = _count_cover(shape, [left]) * _count_cover(shape, [right])
    common = chunks.intersect(left, right)
    if common is None:
        assert not both.any()
    else:
        assert np.array_equal(_count_cover(shape, [common]), both)


@hypothesis.given(_box_pairs())
def test_subtraction_leaves_the_rest_in_disjoint_pieces(pair):
    """Box minus hole, no element twice, in row-major order of starts."""
    box, hole = pair
    shape = _extent(box, hole)
    pieces = chunks.subtract(box, hole)
    expected = _count_cover(shape, [box]) * (1 - _count_cover(shape, [hole]))
    assert np.array_equal(_count_cover(shape, pieces), expected)
    assert pieces == sorted(pieces)


@hypothesis.given(_box_pairs())
def test_containment_is_that_of_the_bounds(pair):
    """A box contains another where its bounds do."""
    outer, inner = pair
    if chunks.contains(outer, inner) and chunks.element_count(inner):
        assert chunks.intersect(outer, inner) == inner
    assert chunks.contains(outer, outer)


@hypothesis.given(st.data())
def test_recutting_keeps_known_boxes_and_covers_the_shard_once(data):
    """Boxes of an old mesh that lie in a new shard stay; only the rest is cut anew."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    known = list(chunks.cut(chunks.whole(shape), data.draw(st.integers(1, 40))))
    known = [box for box in known if data.draw(st.booleans())]
    shard = data.draw(_boxes(shape, empty=False))
    max_elements = data.draw(st.integers(1, 40))
    pieces = chunks.recut(shard, known, max_elements)
    assert np.array_equal(_count_cover(shape, pieces), _count_cover(shape, [shard]))
    kept = {box for box in known if chunks.contains(shard, box)}
    assert kept <= set(pieces)
    assert pieces == sorted(pieces)
    for piece in set(pieces) - kept:
        assert chunks.element_count(piece) <= max_elements


def test_recutting_a_long_leaf_takes_a_few_steps_a_box(monkeypatch):
    """With one of 500 boxes missing the work grows with the boxes, not their square."""
    calls = []

    def counted(box, hole):
        calls.append(box)
        return subtract(box, hole)

    subtract = chunks.subtract
    monkeypatch.setattr(chunks, "subtract", counted)
    known = set(chunks.cut(((0, 500), (0, 8)), 8)) - {((7, 8), (0, 8))}
    assert len(chunks.recut(((0, 500), (0, 8)), known, 8)) == 500
    assert len(calls) < 4 * 500


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_mesh_of_any_size_keeps_the_boxes_that_fit_its_shards(parts):
    """Cut on 8 devices, met again on fewer: every box lies whole in a larger shard."""
    shape, limit = (64, 12), 24
    fine = [
        box
        for start in range(0, 64, 8)
        for box in chunks.cut(((start, start + 8), (0, 12)), limit)
    ]
    rows = 64 // parts
    coarse = [
        box
        for start in range(0, 64, rows)
        for box in chunks.recut(((start, start + rows), (0, 12)), fine, limit)
    ]
    assert coarse == fine
    assert np.array_equal(_count_cover(shape, coarse), np.ones(shape, int))


@hypothesis.given(_boxes(), st.integers(1, 20))
def test_what_a_cut_makes_tiles_its_box(box, max_elements):
    """Pieces in any order; none missing, doubled or replaced by one of its size."""
    pieces = list(chunks.cut(box, max_elements))
    assert chunks.tile(reversed(pieces), box)
    for index, piece in enumerate(pieces):
        others = pieces[:index] + pieces[index + 1 :]
        assert not chunks.tile(others, box)
        assert not chunks.tile([*pieces, piece], box)
        assert not any(chunks.tile([*others, other], box) for other in others)


@hypothesis.given(st.data())
def test_boxes_tile_exactly_when_each_element_is_held_once(data):
    """Any few boxes of a small leaf, counted element by element."""
    shape = data.draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    boxes = data.draw(st.lists(_boxes(shape, empty=False), max_size=4))
    boxes = [box for box in boxes if chunks.element_count(box)]
    once = bool((_count_cover(shape, boxes) == 1).all())
    assert chunks.tile(boxes, chunks.whole(shape)) == once


def test_slices_pick_a_box_out_of_the_array_of_another():
    """Bounds are global, indices local to the array of the shard."""
    shard = ((2, 6), (10, 14))
    array = np.arange(16).reshape(4, 4)
    picked = array[chunks.slices(((3, 5), (11, 12)), shard)]
    assert picked.tolist() == [[5], [9]]


def test_a_cut_counts_from_the_inside_out():
    """Inner dimensions stay whole as long as they fit; one is cut, outer ones split."""
    pieces = list(chunks.cut(((0, 2), (0, 5), (0, 4)), 8))
    assert pieces == [
        ((row, row + 1), (low, min(low + 2, 5)), (0, 4))
        for row in range(2)
        for low in range(0, 5, 2)
    ]
