"""Forms of a chunk: how its bytes, or the change of its bytes, become a payload.

Pure functions over `uint8[n]` arrays and integer views; never a float comparison, so
NaN payloads, -0.0 and sub-byte types survive. FORMAT.md section 4 is the contract.
Does not belong here: record headers, which form a save prefers, anything stored.
"""

import dataclasses
import enum

import numpy as np

from orbax_delta import differences, gridforms, grids, kernels, planes, sparse
from orbax_delta.differences import BLOCK_BYTES as BLOCK_BYTES
from orbax_delta.differences import Bytes as Bytes
from orbax_delta.errors import CorruptionError
from orbax_delta.grids import Codes
from orbax_delta.sparse import Changes
from orbax_delta.sparse import Payload as Payload
from orbax_delta.sparse import Unpacked as Unpacked
from orbax_delta.sparse import unpack as unpack
from orbax_delta.sparse import unpack_small as unpack_small

SPARSE_MAX_DENSITY = 0.125
# Above it, codes of few values take less than bits of floats.
SPARSE_MAX_DENSITY_ON_GRIDS = 1 / 64
BLOCKS_MAX_SHARE = 0.75


class Form(enum.IntEnum):
    """What a record's payload means; the numbers are on disk."""

    CONSTANT = 1
    PLANES = 2
    DIFFERENCE = 3
    BLOCKS = 4
    SPARSE = 5
    GRID = 6
    GRID_CHANGE = 7
    RELATIVE = 8

    @property
    def is_full(self) -> bool:
        """Whether the content follows from this record alone."""
        return self in (Form.CONSTANT, Form.PLANES, Form.GRID)


GRID_FORMS = frozenset({Form.GRID, Form.GRID_CHANGE, Form.RELATIVE})
"""Those of values on a grid."""

FORM_NUMBERS = frozenset(map(int, Form))
"""Numbers that stand for a form (Python 3.11 cannot ask the enum)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The smallest payload found for a change.

    Attributes:
        form: A form that is not full.
        payload: Its bytes.
        changed_words: Elements whose bits differ.
        changed_blocks: 4 KiB blocks with any change.
        positions: Which words they are, where they are few.
    """

    form: Form
    payload: bytes | memoryview
    changed_words: int
    changed_blocks: int
    positions: np.ndarray | None


def constant_word(content: Bytes, word_bytes: int) -> bytes | None:
    r"""The one word that fills `content`, or None when it is not constant.

    >>> constant_word(np.zeros(8, np.uint8), 4)
    b'\x00\x00\x00\x00'
    """
    words = differences.as_words(content, word_bytes)
    if words[0] != words[-1] or words[0] != words[words.size // 2]:
        return None
    return words[0].tobytes() if bool(np.all(words == words[0])) else None


def fill(word: bytes, content_bytes: int, out: Bytes | None = None) -> Bytes:
    """`content_bytes` bytes made of repeated `word`, in `out` or a fresh buffer."""
    content = np.empty(content_bytes, np.uint8) if out is None else out
    content.reshape(-1, len(word))[:] = np.frombuffer(word, np.uint8)
    return content


def encode_full(content: Bytes, word_bytes: int) -> bytes | memoryview:
    """Payload of form PLANES: byte planes, each raw, filled or entropy coded."""
    return planes.encode(content, word_bytes)


def encode_on_grid(codes: Codes) -> bytes:
    """Payload of form GRID, or RELATIVE where the grid is."""
    return gridforms.encode(codes)


def estimate_full_bytes(content: Bytes, word_bytes: int) -> int:
    """About what `encode_full` would give, from a few pieces of the content."""
    return planes.estimate_bytes(content, word_bytes)


def most_listed(content_bytes: int, word_bytes: int, *, on_grid: bool = False) -> int:
    """How many words may differ for SPARSE to be tried.

    Args:
        content_bytes: Size of the content.
        word_bytes: Size of an element, 1, 2, 4 or 8.
        on_grid: Whether the new content has codes.
    """
    density = SPARSE_MAX_DENSITY_ON_GRIDS if on_grid else SPARSE_MAX_DENSITY
    return int(density * (content_bytes // word_bytes))


def encode_delta(
    content: Bytes,
    base: Bytes,
    word_bytes: int,
    found: Changes | None = None,
    codes: Codes | None = None,
    listed: bytes | memoryview | None = None,
) -> Delta:
    """The smallest delta payload that turns `base` into `content`.

    Sparse positions are tried below 12.5 % changed elements, blocks while a quarter of
    them is unchanged and the others are not sparse themselves, planes of the whole
    difference whenever that is not tiny.

    Args:
        content: The new content.
        base: The old one, of the same size.
        word_bytes: Size of an element, 1, 2, 4 or 8.
        found: What `sparse.find` finds, if it has been called.
        codes: Of the new content, if it lies on a grid that is not RELATIVE.
        listed: What `sparse.encode` gives for them, if it has been called.
    """
    if found is None:
        most = most_listed(content.size, word_bytes, on_grid=codes is not None)
        (found,) = sparse.find([sparse.Pair(content, base, word_bytes, most)])
    changed_blocks = int(np.count_nonzero(found.blocks))
    words = content.size // word_bytes
    block_words = max(changed_blocks * BLOCK_BYTES // word_bytes, 1)
    candidates: list[tuple[int, Form, bytes | memoryview]] = []
    payload: bytes | memoryview
    if found.positions is not None:
        payload = listed or sparse.encode([found])[0]
        candidates.append((len(payload), Form.SPARSE, payload))
    rarely = codes is None and changed_blocks <= BLOCKS_MAX_SHARE * found.blocks.size
    if rarely and found.count > SPARSE_MAX_DENSITY * block_words:
        picked = _marked_blocks(content, found.blocks)
        before = _marked_blocks(base, found.blocks)
        differences.subtract(picked, before, word_bytes, picked)
        payload = _encode_blocks(found.blocks, picked, word_bytes)
        candidates.append((len(payload), Form.BLOCKS, payload))
    if codes is not None:
        payload = gridforms.encode(codes, base)
        candidates.append((len(payload), Form.GRID_CHANGE, payload))
    elif found.count > SPARSE_MAX_DENSITY / 4 * words or not candidates:
        payload = planes.encode_change(content, base, word_bytes)
        candidates.append((len(payload), Form.DIFFERENCE, payload))
    _, form, payload = min(candidates)
    return Delta(
        form=form,
        payload=payload,
        changed_words=found.count,
        changed_blocks=changed_blocks,
        positions=found.positions,
    )


def carry_over(content: Bytes, base: Bytes, delta: Delta, word_bytes: int) -> None:
    """Make `base`, to which `delta` applies, `content`, which it leads to."""
    if delta.positions is None:
        np.copyto(base, content)
        return
    new, old = (differences.as_words(part, word_bytes) for part in (content, base))
    if kernels.pay_briefly(content.size):
        kernels.of(word_bytes).carry(delta.positions, new, old)
    else:
        old[delta.positions] = new[delta.positions]


def decode(
    form: Form,
    payload: bytes | memoryview,
    base: Bytes | None,
    content_bytes: int,
    word_bytes: int,
    out: Bytes | None = None,
    unpacked: Unpacked | None = None,
) -> Bytes:
    """The content that `payload` stands for, in `out` or else in a fresh buffer.

    Args:
        form: How to read `payload`.
        payload: Bytes as written by the matching encoder.
        base: Content that a delta applies to; ignored by full forms.
        content_bytes: Size of the content.
        word_bytes: Size of an element, 1, 2, 4 or 8.
        out: Where the content goes; it may be `base`, and holds anything after an
            error.
        unpacked: What `unpack` made of it; of form SPARSE.

    Raises:
        CorruptionError: The payload does not describe content of this size.
    """
    view = memoryview(payload)
    if form is Form.CONSTANT:
        if len(view) != word_bytes:
            raise CorruptionError(
                f"a constant record holds {len(view)} bytes; expected {word_bytes}"
            )
        return fill(bytes(view), content_bytes, out)
    if form is Form.PLANES:
        return planes.decode_exactly(view, content_bytes, word_bytes, out)
    if form in GRID_FORMS and word_bytes != grids.WORD_BYTES:
        raise CorruptionError(
            f"a {form.name} record has words of {word_bytes} bytes; expected "
            f"{grids.WORD_BYTES}"
        )
    if form is Form.GRID:
        return gridforms.decode(view, None, content_bytes, relative=False, out=out)
    if base is None or base.size != content_bytes:
        raise CorruptionError(
            f"a {form.name} record needs {content_bytes} bytes of base content; "
            f"found {None if base is None else base.size}"
        )
    if form is Form.DIFFERENCE:
        return planes.decode_change(view, base, word_bytes, out)
    if form is Form.BLOCKS:
        return _decode_blocks(view, base, word_bytes, out)
    if form in GRID_FORMS:
        relative = form is Form.RELATIVE
        return gridforms.decode(view, base, content_bytes, relative=relative, out=out)
    content = _copied(base, out)
    if unpacked is None:
        (unpacked,) = sparse.unpack([(view, content_bytes, word_bytes)])
    unpacked.apply(content, word_bytes)
    return content


def _copied(base: Bytes, out: Bytes | None) -> Bytes:
    """`base` in `out` or a fresh buffer, to be changed there."""
    if out is None:
        return base.copy()
    if out is not base:
        np.copyto(out, base)
    return out


def _encode_blocks(block_map: np.ndarray, picked: Bytes, word_bytes: int) -> bytes:
    bitmap = np.packbits(block_map, bitorder="little").tobytes()
    return bitmap + planes.encode(picked, word_bytes)


def _marked_blocks(content: Bytes, block_map: np.ndarray) -> Bytes:
    """The marked blocks of `content` after one another."""
    whole = content.size // BLOCK_BYTES
    dense = content[: whole * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
    picked: Bytes = dense[block_map[:whole]].reshape(-1)
    if block_map.size > whole and block_map[whole]:
        picked = np.concatenate([picked, content[whole * BLOCK_BYTES :]])
    return picked


def _decode_blocks(
    view: memoryview, base: Bytes, word_bytes: int, out: Bytes | None
) -> Bytes:
    block_count = -(-base.size // BLOCK_BYTES)
    bitmap_bytes = -(-block_count // 8)
    if len(view) < bitmap_bytes:
        raise CorruptionError(
            f"a BLOCKS record of {len(view)} bytes is shorter than its bitmap of "
            f"{bitmap_bytes}"
        )
    bits = np.unpackbits(
        np.frombuffer(view[:bitmap_bytes], np.uint8), bitorder="little"
    )
    if bits[block_count:].any():
        raise CorruptionError("a BLOCKS record marks blocks past the chunk's end")
    marked = bits[:block_count].astype(bool)
    missing = block_count * BLOCK_BYTES - base.size if marked[-1] else 0
    picked_bytes = int(np.count_nonzero(marked)) * BLOCK_BYTES - missing
    picked = planes.decode_exactly(view[bitmap_bytes:], picked_bytes, word_bytes)
    differences.add(picked, _marked_blocks(base, marked), word_bytes)
    content = _copied(base, out)
    whole = base.size // BLOCK_BYTES
    dense = content[: whole * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
    dense_bytes = int(np.count_nonzero(marked[:whole])) * BLOCK_BYTES
    dense[marked[:whole]] = picked[:dense_bytes].reshape(-1, BLOCK_BYTES)
    if dense_bytes < picked.size:
        content[whole * BLOCK_BYTES :] = picked[dense_bytes:]
    return content
