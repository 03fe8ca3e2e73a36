"""Sparse changes: which words of a chunk changed, and the payload that says how.

FORMAT.md section 4.7 is the contract. Does not belong here: when this form is taken.
"""

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_delta import differences, kernels, planes, scratch
from orbax_delta.differences import BLOCK_BYTES, Bytes
from orbax_delta.errors import CorruptionError

_HEAD = struct.Struct("<BI")
_MAX_GAP_BYTES = 4
_SMALL_BYTES = 4 << 20
_BRIEF_BYTES = 1 << 20
_EMPTY = np.frombuffer(b"", np.uint8)


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


class Pair(NamedTuple):
    """Two contents of one size.

    Attributes:
        content: The new one.
        base: The old one.
        word_bytes: Size of a word, 1, 2, 4 or 8.
        most: Positions are wanted of so many words at most.
    """

    content: Bytes
    base: Bytes
    word_bytes: int
    most: int


def find(pairs: Sequence[Pair]) -> list[Changes]:
    """Compare contents, many by one call, which needs the interpreter's lock once."""
    found: dict[int, Changes] = {}
    together: dict[int, list[int]] = {}
    for index, pair in enumerate(pairs):
        if kernels.pay_briefly(pair.content.size):
            together.setdefault(pair.word_bytes, []).append(index)
        elif kernels.pay(pair.content.size):
            (found[index],) = _find_compiled([pair])
        else:
            found[index] = _find(pair)
    for members in together.values():
        for start in range(0, len(members), kernels.TOGETHER):
            some = members[start : start + kernels.TOGETHER]
            found.update(zip(some, _find_compiled([pairs[index] for index in some])))
    return [found[index] for index in range(len(pairs))]


def _find(pair: Pair) -> Changes:
    content, base, word_bytes, most = pair
    new, old = (differences.as_words(part, word_bytes) for part in (content, base))
    changed = scratch.array("changed", new.size, 1).view(np.bool_)
    np.not_equal(new, old, out=changed)
    count = int(np.count_nonzero(changed))
    positions = values = None
    if count <= most:
        found = np.flatnonzero(changed)
        values = new[found].view(np.uint8)
        differences.subtract(values, old[found].view(np.uint8), word_bytes, values)
        positions = found.astype(np.uint32)
    return Changes(
        content_bytes=content.size,
        word_bytes=word_bytes,
        count=count,
        blocks=differences.changed_blocks(changed, word_bytes),
        positions=positions,
        values=values,
    )


def _find_compiled(pairs: Sequence[Pair]) -> Iterator[Changes]:
    """The same of contents with words of one size, no more than `TOGETHER`."""
    width, number = pairs[0].word_bytes, len(pairs)
    most = np.array([pair.most for pair in pairs])
    room = int(most.max()) + kernels.FIND_ROOM
    positions = scratch.array("positions", number * room, 4).reshape(number, room)
    values = scratch.array("values", number * room, width).reshape(number, room)
    block_counts = [-(-pair.content.size // BLOCK_BYTES) for pair in pairs]
    blocks = np.zeros((number, max(block_counts)), np.bool_)
    counts = np.zeros(number, np.int64)
    filled = [_EMPTY] * (kernels.TOGETHER - number)
    new = (*(_read_only(pair.content) for pair in pairs), *filled)
    old = (*(_read_only(pair.base) for pair in pairs), *filled)
    kernels.of(width).find(new, old, most, positions, values, blocks, counts)
    for index, pair in enumerate(pairs):
        count = int(counts[index])
        few = count <= pair.most
        yield Changes(
            content_bytes=pair.content.size,
            word_bytes=width,
            count=count,
            blocks=blocks[index, : block_counts[index]].copy(),
            positions=_copy_of(positions[index, :count]) if few else None,
            values=_copy_of(values[index, :count]).view(np.uint8) if few else None,
        )


def _copy_of(words: np.ndarray) -> np.ndarray:
    """A copy, and of few words one that keeps the interpreter's lock."""
    if words.nbytes > _BRIEF_BYTES:
        return words.copy()
    return np.frombuffer(words.tobytes(), words.dtype)


def _read_only(content: Bytes) -> Bytes:
    """A view of the one type that compiled passes are made for."""
    view = content.view()
    view.flags.writeable = False
    return view


def encode(several: Sequence[Changes]) -> list[bytes | memoryview]:
    """Payloads of form SPARSE, of which many take little longer than one.

    Args:
        several: Changes of known positions.
    """
    packed = [_pack(changes) for changes in several]
    heads = [
        _HEAD.pack(gap_bytes, changes.count)
        for changes, (gap_bytes, _, _) in zip(several, packed, strict=True)
    ]
    return planes.encode_all([found[1:] for found in packed], heads)


def _pack(changes: Changes) -> tuple[int, np.ndarray, Sequence[bool]]:
    """How many planes are of gaps, all planes, and which of them are of one value."""
    positions, values, width = changes.positions, changes.values, changes.word_bytes
    if positions is None or values is None:
        raise AssertionError("only a few changes are coded one by one")
    words = differences.as_words(values, width)
    if kernels.pay_briefly(changes.content_bytes):
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

    def apply(self, content: Bytes, word_bytes: int, *, undo: bool = False) -> None:
        """Change `content`, which is the base, to what the payload makes of it.

        Args:
            content: The base.
            word_bytes: Size of a word, 1, 2, 4 or 8.
            undo: Whether it is the other way round.

        Raises:
            CorruptionError: The payload does not describe a change of it; `content`
                then holds anything.
        """
        words = differences.as_words(content, word_bytes)
        if kernels.pay_briefly(content.size):
            change = kernels.of(word_bytes).change
            last = change(self.planes, self.gap_bytes, words, undo)
        else:
            last = self._apply_plainly(words, undo=undo)
        if last >= words.size:
            raise CorruptionError(
                f"a SPARSE record changes element {last} of {words.size}"
            )

    def _apply_plainly(self, words: np.ndarray, *, undo: bool) -> int:
        width = words.itemsize
        apart = self.planes.reshape(self.gap_bytes + width, -1)
        parts = np.split(apart, [self.gap_bytes])
        gaps, values = (np.array(part.T, order="C").reshape(-1) for part in parts)
        steps = differences.as_words(gaps, self.gap_bytes).astype(np.int64) + 1
        positions = np.cumsum(steps) - 1
        last = int(positions[-1]) if positions.size else -1
        if last < words.size:
            change = differences.as_words(values, width)
            differences.add(values, np.zeros_like(values), width)
            words[positions] += np.negative(change) if undo else change
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


def unpack_small(payloads: Sequence[Payload]) -> list[Unpacked | None]:
    """The same of the first ones, which together need little memory by what they claim.

    None stands for each of the others: one may need much.

    Raises:
        CorruptionError: As `unpack`.
    """
    room, number = _SMALL_BYTES, 0
    for view, _, word_bytes in payloads:
        gap_bytes, count = (
            _HEAD.unpack_from(view) if len(view) >= _HEAD.size else (0, 0)
        )
        room -= count * (gap_bytes + word_bytes)
        if room < 0:
            break
        number += 1
    others = [None] * (len(payloads) - number)
    return [*unpack(payloads[:number]), *others]


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
