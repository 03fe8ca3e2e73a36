"""Memory that a leaf is restored into: allocated, filled chunk by chunk.

Chunks whose bytes lie together in a region are decoded right into it. Does not belong
here: which regions are needed, what becomes of them.
"""

import math
from collections.abc import Mapping

import numpy as np

from orbax_delta import chunks
from orbax_delta.chunks import Box
from orbax_delta.codecs import Bytes
from orbax_delta.manifests import LeafEntry

ALIGNMENT = 64
"""Bytes. The CPU backend of jax takes over memory that is aligned like this, if nobody
writes to it; anything else it copies."""

Buffers = Mapping[Box, np.ndarray]
"""Regions of a leaf with the memory that is to be filled."""


def allocate(entry: LeafEntry, region: Box, *, aligned: bool) -> np.ndarray:
    """Memory for a region of a leaf.

    Every element of the leaf lies in a chunk (`steps` checks that), so that only what
    reaches beyond the leaf has to be zero from the start.

    Args:
        entry: The leaf.
        region: A box, which may reach beyond it.
        aligned: Whether to align it; such an array is a view and not `OWNDATA`.

    Raises:
        MemoryError: There is no room.
    """
    shape, dtype = chunks.box_shape(region), entry.element.dtype
    if not chunks.contains(chunks.whole(entry.shape), region):
        return np.zeros(shape, dtype)
    if not aligned:
        return np.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def window(buffers: Buffers, entry: LeafEntry, box: Box) -> Bytes | None:
    """The memory of a chunk, if its content has the same bytes in the same order."""
    if entry.element.bits < 8:
        return None
    for region, buffer in buffers.items():
        if chunks.contains(region, box):
            part = buffer[chunks.slices(box, region)]
            if part.flags.c_contiguous:
                return part.reshape(-1).view(np.uint8)
    return None


def place(
    buffers: Buffers, entry: LeafEntry, box: Box, content: Bytes, *, placed: bool
) -> None:
    """Copy the content of a chunk to wherever it belongs.

    Args:
        buffers: Where that is.
        entry: The leaf.
        box: The chunk.
        content: Its content.
        placed: It is what `window` has given, so that it lies in one place already.
    """
    if placed and len(buffers) == 1:
        return
    array: np.ndarray | None = None
    for region, buffer in buffers.items():
        common = chunks.intersect(box, region)
        if common is None:
            continue
        if array is None:
            array = entry.element.from_content(content, chunks.box_shape(box))
        target = buffer[chunks.slices(common, region)]
        if placed and target.ctypes.data == array.ctypes.data:
            continue
        target[...] = array[chunks.slices(common, box)]
