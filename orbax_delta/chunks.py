"""Boxes: the hyper-rectangles into which a leaf is cut, by global index.

A box is `((start, stop), ...)`, one pair per dimension of the leaf; a 0-d leaf has the
empty box `()`. Cutting, overlap and subtraction only; no bytes, no jax.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from types import EllipsisType

import xxhash

Box = tuple[tuple[int, int], ...]

MAX_DIMENSIONS = 64
"""Of a leaf and of a box; numpy has no more."""

_PRIME = COVER_MODULUS = (1 << 61) - 1


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole leaf.

    >>> whole((2, 3))
    ((0, 2), (0, 3))
    """
    return tuple((0, size) for size in shape)


def index_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of a shard that jax describes by slices.

    >>> index_box((slice(2, 4), slice(None)), (8, 3))
    ((2, 4), (0, 3))
    """
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)


def box_shape(box: Box) -> tuple[int, ...]:
    """Extent of `box` along each dimension."""
    return tuple(stop - start for start, stop in box)


def element_count(box: Box) -> int:
    """Elements in `box`; 1 for the box of a 0-d leaf."""
    return math.prod([stop - start for start, stop in box])


def intersect(left: Box, right: Box) -> Box | None:
    """The common box, or None where there is none."""
    common = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def contains(outer: Box, inner: Box) -> bool:
    """Whether `inner` lies in `outer`."""
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def tile(boxes: Iterable[Box], whole_box: Box) -> bool:
    """Whether `boxes` hold every element of `whole_box` exactly once.

    Each bound of each dimension gets a pseudo-random number, and a box the product of
    its differences along the dimensions. That is a measure: boxes that tile the whole
    add up to its own, and with a hole or an overlap they do so by a chance of 2^-58.

    >>> tile([((0, 2),), ((2, 3),)], ((0, 3),)), tile([((0, 2),)] * 2, ((0, 4),))
    (True, False)
    """
    return (sum(map(_measure, boxes)) - _measure(whole_box)) % _PRIME == 0


def cover(boxes: Iterable[tuple[int, Box]]) -> int:
    """That measure of boxes of many leaves, given by index, as one number.

    What several processes write tiles all leaves if their numbers add up, modulo
    `COVER_MODULUS`, to that of the whole boxes.
    """
    return sum(_number(-1, leaf) * _measure(box) for leaf, box in boxes) % COVER_MODULUS


def _measure(box: Box) -> int:
    sides = (
        _number(axis, stop) - _number(axis, start)
        for axis, (start, stop) in enumerate(box)
    )
    return math.prod(sides)


# Leaves of one shape have the same bounds.
@functools.lru_cache(maxsize=1 << 14)
def _number(axis: int, bound: int) -> int:
    return xxhash.xxh3_64_intdigest(b"%d %d" % (axis, bound))


def slices(box: Box, origin: Box) -> tuple[slice | EllipsisType, ...]:
    """Index of `box` in an array that holds exactly `origin`.

    The ellipsis keeps a 0-d array an array: a numpy scalar has no byte order.
    """
    spans = (
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(box, origin, strict=True)
    )
    return (*spans, ...)


def cut(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut `box` into boxes that are contiguous in it, in row-major order.

    One dimension is cut into even pieces, those before it into single indices, those
    after it not at all.

    >>> list(cut(((0, 4), (0, 3)), 6))
    [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    """
    shape = box_shape(box)
    if math.prod(shape) == 0:
        return
    axis, inner = len(shape), 1
    while axis > 0 and inner * shape[axis - 1] <= max_elements:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield box
        return
    axis -= 1
    start, stop = box[axis]
    pieces = -(-shape[axis] // max(1, max_elements // inner))
    size = -(-shape[axis] // pieces)
    for head in _single_indices(box[:axis]):
        for low in range(start, stop, size):
            yield (*head, (low, min(low + size, stop)), *box[axis + 1 :])


def _single_indices(box: Box) -> Iterator[Box]:
    if not box:
        yield ()
        return
    start, stop = box[0]
    for index in range(start, stop):
        for rest in _single_indices(box[1:]):
            yield ((index, index + 1), *rest)


def subtract(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`, as disjoint boxes in row-major order of their starts."""
    common = intersect(box, hole)
    if common is None:
        return [box]
    pieces: list[Box] = []
    rest = list(box)
    for axis, (start, stop) in enumerate(common):
        low, high = rest[axis]
        if low < start:
            pieces.append((*rest[:axis], (low, start), *rest[axis + 1 :]))
        if stop < high:
            pieces.append((*rest[:axis], (stop, high), *rest[axis + 1 :]))
        rest[axis] = (start, stop)
    return sorted(pieces)


def recut(box: Box, known: Iterable[Box], max_elements: int) -> list[Box]:
    """Cut a shard, keeping every known box that lies wholly in it.

    A box keeps its identity on a changed mesh as long as one new shard holds it; what
    the known boxes leave of the shard is cut anew.
    """
    # In order, so that few pieces are open at a time: thousands may be known.
    kept = sorted(inner for inner in known if contains(box, inner))
    if sum(map(element_count, kept)) == element_count(box):
        return kept
    rest = [box]
    for hole in kept:
        rest = [piece for part in rest for piece in subtract(part, hole)]
    fresh = [piece for part in rest for piece in cut(part, max_elements)]
    return sorted(kept + fresh)
