"""Sparse changes: which words of a chunk changed, and the payload that says how.

FORMAT.md section 4.7 is the contract. Does not belong here: when this form is taken.
"""

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np

from orbax_delta import differences, kernels, planes, scratch
from orbax_delta.differences import BLOCK_BYTES, Bytes
from orbax_delta.errors import CorruptionError

_HEAD = struct.Struct("<BI")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Where two contents differ.

    Attributes:
        count: Words that differ.
        blocks: bool[blocks], the 4 KiB blocks in which they lie.
        positions: uint32[count], which words they are; None: they are too many.
        values: uint8[count * word_bytes], their zigzag differences.
    """

    count: int
    blocks: np.ndarray
    positions: np.ndarray | None
    values: Bytes | None


def find(content: Bytes, base: Bytes, word_bytes: int, *, most: int) -> Changes:
    """Compare two contents of one size.

    Args:
        content: The new one.
        base: The old one.
        word_bytes: Size of a word, 1, 2, 4 or 8.
        most: Positions are wanted of so many words at most.
    """
    new, old = (differences.as_words(part, word_bytes) for part in (content, base))
    if kernels.pay(content.size):
        whole = content.size // 8 * 8
        runs = [differences.as_words(part[:whole], 8) for part in (content, base)]
        return _find_compiled(new, old, runs, most)
    changed = scratch.array("changed", new.size, 1).view(np.bool_)
    np.not_equal(new, old, out=changed)
    count = int(np.count_nonzero(changed))
    blocks = differences.changed_blocks(changed, word_bytes)
    if count > most:
        return Changes(count=count, blocks=blocks, positions=None, values=None)
    places = np.flatnonzero(changed)
    values = new[places].view(np.uint8)
    differences.subtract(values, old[places].view(np.uint8), word_bytes, values)
    positions = places.astype(np.uint32)
    return Changes(count=count, blocks=blocks, positions=positions, values=values)


def _find_compiled(
    new: np.ndarray, old: np.ndarray, runs: Sequence[np.ndarray], most: int
) -> Changes:
    word_bytes = new.itemsize
    room = most + kernels.FIND_ROOM
    positions = scratch.array("positions", room, 4)
    values = scratch.array("values", room, word_bytes)
    blocks = np.zeros(-(-new.nbytes // BLOCK_BYTES), np.bool_)
    find_words = kernels.of(word_bytes).find
    count = find_words(new, old, *runs, most, positions, values, blocks)
    if count > most:
        return Changes(count=count, blocks=blocks, positions=None, values=None)
    return Changes(
        count=count,
        blocks=blocks,
        positions=positions[:count].copy(),
        values=values[:count].copy().view(np.uint8),
    )


def encode(positions: np.ndarray, values: Bytes, word_bytes: int) -> bytes:
    """Payload of form SPARSE.

    Args:
        positions: Which words changed, in order.
        values: Their zigzag differences.
        word_bytes: Size of a word, 1, 2, 4 or 8.
    """
    gaps = positions.astype(np.uint32)
    gaps[1:] -= gaps[:-1] + np.uint32(1)
    widest = int(gaps.max(initial=0))
    gap_bytes = 1 if widest < 1 << 8 else 2 if widest < 1 << 16 else 4
    gap_words = gaps.astype(np.dtype(f"<u{gap_bytes}")).view(np.uint8)
    return b"".join(
        (
            _HEAD.pack(gap_bytes, positions.size),
            planes.encode(gap_words, gap_bytes),
            planes.encode(values, word_bytes),
        )
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Unpacked:
    """A payload whose planes are unpacked.

    Attributes:
        planes: Those of the gaps, then those of the zigzag differences.
        gap_bytes: How many of them are of gaps.
    """

    planes: Bytes
    gap_bytes: int

    def apply(self, content: Bytes, word_bytes: int) -> None:
        """Change `content`, which is the base, to what the payload makes of it.

        Raises:
            CorruptionError: The payload does not describe a change of it; `content`
                then holds anything.
        """
        words = differences.as_words(content, word_bytes)
        if kernels.pay(content.size):
            change = kernels.of(word_bytes).change
            last = change(self.planes, self.gap_bytes, words)
        else:
            last = self._apply_small(words)
        if last >= words.size:
            raise CorruptionError(
                f"a SPARSE record changes element {last} of {words.size}"
            )

    def _apply_small(self, words: np.ndarray) -> int:
        width = words.itemsize
        planes = self.planes.reshape(self.gap_bytes + width, -1)
        parts = np.split(planes, [self.gap_bytes])
        gaps, values = (np.array(part.T, order="C").reshape(-1) for part in parts)
        steps = differences.as_words(gaps, self.gap_bytes).astype(np.int64) + 1
        positions = np.cumsum(steps) - 1
        last = int(positions[-1]) if positions.size else -1
        if last < words.size:
            differences.add(values, words[positions].view(np.uint8), width)
            words[positions] = differences.as_words(values, width)
        return last


Payload = tuple[memoryview, int, int]
"""A payload, the size of the content and that of a word."""


def unpack(payloads: Sequence[Payload]) -> list[Unpacked]:
    """Unpack payloads, of which many take little longer than one.

    Raises:
        CorruptionError: One of them does not describe a change of such content.
    """
    parsed = [_parse(*payload) for payload in payloads]
    flat = planes.flatten([(found, count) for _, found, count in parsed])
    return [
        Unpacked(np.frombuffer(joined, np.uint8), gap_bytes)
        for (gap_bytes, _, _), joined in zip(parsed, flat, strict=True)
    ]


def unpacked_bytes(payload: bytes | memoryview, word_bytes: int) -> int:
    """How much memory `unpack` needs for a payload, by what that claims."""
    if len(payload) < _HEAD.size:
        return 0
    gap_bytes, count = _HEAD.unpack_from(payload)
    return int(count * (gap_bytes + word_bytes))


def _parse(
    view: memoryview, content_bytes: int, word_bytes: int
) -> tuple[int, list[planes.Plane], int]:
    if len(view) < _HEAD.size:
        raise CorruptionError(f"a SPARSE record of {len(view)} bytes has no header")
    gap_bytes, count = _HEAD.unpack_from(view)
    words = content_bytes // word_bytes
    if gap_bytes not in (1, 2, 4) or count > words:
        raise CorruptionError(
            f"a SPARSE record claims {count} changes with {gap_bytes}-byte gaps in a "
            f"chunk of {words} elements"
        )
    found, rest = planes.parse(view[_HEAD.size :], gap_bytes + word_bytes, count)
    planes.require_end(rest)
    return gap_bytes, found, count
