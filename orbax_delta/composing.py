"""Small deltas become one: which records the next one replaces, and what it builds on.

Differences are of words modulo their range, so the content before the last records of a
list is the content now without their changes: the full record need not be read for it.
Pure bytes and rows. Does not belong here: reading, what a save prefers.
"""

from collections.abc import Sequence

import numpy as np

from orbax_delta import codecs, records
from orbax_delta.codecs import Bytes, Form
from orbax_delta.errors import CorruptionError
from orbax_delta.options import DeltaOptions
from orbax_delta.parts import Row
from orbax_delta.records import Record

# What replaces records is hardly longer than all of them. Above this share of a full
# record that one pays: it makes the list short, and cheap to read, as well.
_MOST_SHARE = 0.5

_NOT_SUMS = (Form.GRID_CHANGE, Form.RELATIVE)
"""Forms of changes that are no sums of words."""


def replaced(
    row: Row, content_bytes: int, options: DeltaOptions, *, hurried: bool
) -> int | None:
    """How many records at the end of a list the next one replaces.

    Args:
        row: The list, of a chunk that is not derived.
        content_bytes: Size of the chunk.
        options: Options in force.
        hurried: Whether what can wait is left to the next save.

    Returns:
        Their number; None if the next record is to be full.
    """
    deltas = len(row.refs) - 1
    if not options.full_every or options.max_chain < 2:
        return None
    if not hurried and row.age + 1 >= options.refresh_every:
        return None
    room = len(row.refs) < options.max_chain
    due = row.since >= options.full_every and not hurried
    if room and not due:
        return 0
    count = min(row.since, deltas) if due else deltas
    if len(row.refs) - count >= options.max_chain:
        count = deltas
    tail = row.refs[len(row.refs) - count :]
    if any(ref.form in _NOT_SUMS for ref in tail):
        return None
    full_bytes = row.refs[0].length or content_bytes
    lengths = sum(ref.length for ref in tail)
    return None if lengths > _MOST_SHARE * full_bytes else count


def earlier(content: Bytes, changes: Sequence[Record], word_bytes: int) -> Bytes:
    """The content before the last records of a list.

    Args:
        content: What the list yields.
        changes: Its last records, oldest first; deltas, parsed.
        word_bytes: Size of an element, 1, 2, 4 or 8.

    Raises:
        CorruptionError: A payload does not describe a change of such content.
    """
    before = content.copy()
    small = [record.sparse for record in changes if record.form is Form.SPARSE]
    for payload, unpacked in zip(small, codecs.unpack_small(small), strict=True):
        change = unpacked or codecs.unpack([payload])[0]
        change.apply(before, word_bytes, undo=True)
    if len(small) == len(changes):
        return before
    # Others are decoded by adding them, so upon zeros the changes themselves add up.
    total = np.zeros_like(content)
    for record in changes:
        if record.form is not Form.SPARSE:
            codecs.decode(
                record.form, record.payload, total, content.size, word_bytes, out=total
            )
    word = np.dtype(f"<u{word_bytes}")
    before.view(word)[:] -= total.view(word)
    return before


def check_earlier(content: Bytes, row: Row, count: int, head: memoryview) -> None:
    """Check what `earlier` gave against what the list says of it.

    Args:
        content: The content without the last records.
        row: The whole list.
        count: How many of its last records are left out.
        head: First bytes of the record before those; empty where it is a constant.

    Raises:
        CorruptionError: It is not what the record before those yields.
    """
    last = row.refs[-count - 1]
    if last.form is Form.CONSTANT:
        words = content.reshape(-1, len(last.word))
        right = bool((words == np.frombuffer(last.word, np.uint8)).all())
    else:
        right = records.digest(content) == records.content_digest(head)
    if not right:
        raise CorruptionError(
            f"without its last {count} records it is not the content that the record "
            f"before them yields (pack {last.pack or 'none'}, offset {last.offset})"
        )
