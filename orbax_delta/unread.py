"""Leaves that are not in memory: their content is read piece by piece, when asked for.

A tree of these can be saved like one of arrays: a save asks for one chunk after the
other, so that a state passes through that is larger than memory. Does not belong here:
where pieces come from.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np

from orbax_delta import chunks
from orbax_delta.chunks import Box
from orbax_delta.manifests import ARRAY_KINDS, LeafEntry

PIECE_BYTES = 1 << 20
"""About how much is read at a time of what is not cut into chunks already."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a leaf.

    Attributes:
        box: Its place in the leaf.
        read: Reads its content, an array of the box's shape; any thread may call it,
            again and again. What it returns is not written to.
    """

    box: Box
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A leaf whose content is read when it is asked for.

    Attributes:
        entry: What a MANIFEST says of it.
        pieces: Every element lies in exactly one; none of a leaf that is empty, or
            whose value stands in the entry.
    """

    entry: LeafEntry
    pieces: tuple[Piece, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the content in memory."""
        return sum(map(self.piece_bytes, self.pieces))

    def piece_bytes(self, piece: Piece) -> int:
        """Bytes of a piece's content in memory."""
        return chunks.element_count(piece.box) * self.entry.element.dtype.itemsize

    def read(self, box: Box) -> np.ndarray:
        """The content of a part of the leaf, put together from its pieces.

        >>> data = np.arange(6)
        >>> halves = [
        ...     Piece(box=((i, i + 3),), read=lambda i=i: data[i : i + 3])
        ...     for i in (0, 3)
        ... ]
        >>> entry = LeafEntry(path=("a",), kind="numpy", dtype="int64", shape=(6,))
        >>> Unread(entry=entry, pieces=tuple(halves)).read(((2, 5),))
        array([2, 3, 4])
        """
        made = np.empty(chunks.box_shape(box), self.entry.element.dtype)
        for piece in self.pieces:
            common = chunks.intersect(piece.box, box)
            if common is not None:
                content = piece.read()[chunks.slices(common, piece.box)]
                made[chunks.slices(common, box)] = content
        return made

    def whole(self) -> np.ndarray:
        """All of it; for leaves that are small."""
        return self.read(chunks.whole(self.entry.shape))


def in_pieces(entry: LeafEntry, read: Callable[[Box], np.ndarray]) -> Unread:
    """A leaf of which any box can be read, cut into pieces of about `PIECE_BYTES`."""
    if entry.kind not in ARRAY_KINDS:
        return Unread(entry=entry)
    most = max(1, PIECE_BYTES // entry.element.dtype.itemsize)
    pieces = (
        Piece(box=box, read=functools.partial(read, box))
        for box in chunks.cut(chunks.whole(entry.shape), most)
    )
    return Unread(entry=entry, pieces=tuple(pieces))


def runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Where the elements of a box lie in its leaf, in C order: (first, how many).

    >>> list(runs(((1, 3), (0, 2)), (4, 2))), list(runs(((0, 2), (1, 2)), (2, 3)))
    ([(2, 4)], [(1, 1), (4, 1)])
    """
    inner = len(shape)
    length = 1
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
        length *= shape[inner]
    if inner:
        inner -= 1
        length *= box[inner][1] - box[inner][0]
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    start = sum(low * stride for (low, _), stride in zip(box, strides))
    for index in np.ndindex(*chunks.box_shape(box[:inner])):
        yield start + sum(i * stride for i, stride in zip(index, strides)), length
