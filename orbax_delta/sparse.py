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
_MAX_GAP_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Where two contents differ.

    Attributes:
        content_bytes: Size of either content.
        word_bytes: Size of a word, 1, 2, 4 or 8.
        count: Words that differ.
        blocks: bool[blocks], the 4 KiB blocks in which they lie.
        positions: uint32[count], which words they are; None: they are too many.
        values: uint8[count * word_bytes], their zigzag differences.
    """

    content_bytes: int
    word_bytes: int
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
    places = values = None
    if count <= most:
        found = np.flatnonzero(changed)
        values = new[found].view(np.uint8)
        differences.subtract(values, old[found].view(np.uint8), word_bytes, values)
        places = found.astype(np.uint32)
    return Changes(
        content_bytes=content.size,
        word_bytes=word_bytes,
        count=count,
        blocks=blocks,
        positions=places,
        values=values,
    )


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
    few = count <= most
    return Changes(
        content_bytes=new.nbytes,
        word_bytes=word_bytes,
        count=count,
        blocks=blocks,
        positions=positions[:count].copy() if few else None,
        values=values[:count].copy().view(np.uint8) if few else None,
    )


def encode(several: Sequence[Changes]) -> list[bytes]:
    """Payloads of form SPARSE, of which many take little longer than one.

    Args:
        several: Changes of known positions.
    """
    packed = [_pack(changes) for changes in several]
    coded = planes.encode_all([found[1:] for found in packed])
    return [
        _HEAD.pack(gap_bytes, changes.count) + payload
        for changes, (gap_bytes, _, _), payload in zip(
            several, packed, coded, strict=True
        )
    ]


def _pack(changes: Changes) -> tuple[int, np.ndarray, Sequence[bool]]:
    """How many planes are of gaps, all planes, and which of them are of one value."""
    positions, values, width = changes.positions, changes.values, changes.word_bytes
    if positions is None or values is None:
        raise AssertionError("only a few changes are coded one by one")
    words = differences.as_words(values, width)
    if kernels.pay(changes.content_bytes):
        flat = np.empty((_MAX_GAP_BYTES + width) * words.size, np.uint8)
        same = np.zeros(_MAX_GAP_BYTES + width, np.bool_)
        gap_bytes = kernels.of(width).pack(positions, words, flat, same)
        count = gap_bytes + width
        found = flat[: count * words.size].reshape(count, -1)
        return gap_bytes, found, same[:count].tolist()
    gaps = positions.astype(np.uint32)
    gaps[1:] -= positions[:-1] + np.uint32(1)
    widest = int(gaps.max(initial=0))
    gap_bytes = 1 if widest < 1 << 8 else 2 if widest < 1 << 16 else _MAX_GAP_BYTES
    gap_words = gaps.astype(np.dtype(f"<u{gap_bytes}"))
    parts = ((gap_words, gap_bytes), (words, width))
    found = np.ascontiguousarray(
        np.hstack([p.view(np.uint8).reshape(p.size, wide) for p, wide in parts]).T
    )
    return gap_bytes, found, (found == found[:, :1]).all(axis=1).tolist()


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
