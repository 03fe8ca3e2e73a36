"""From a changed chunk to a record: when it is full, which form, and the new row.

One rule per chunk, no "base saves": its next record is full when its list would grow
past `max_chain` records, past `read_budget` times a full record in bytes, or after
`full_every` deltas. A hash of the chunk staggers the first round.
"""

import dataclasses
import logging

import numpy as np

from orbax_delta import codecs, reader, records
from orbax_delta.changes import Finding, Status
from orbax_delta.codecs import Bytes, Form
from orbax_delta.dtypes import Rule
from orbax_delta.errors import CorruptionError, StorageError
from orbax_delta.options import DeltaOptions
from orbax_delta.parts import Ref, Row
from orbax_delta.store import Folder

_logger = logging.getLogger("orbax_delta")

# A delta below this share of the full record that its list begins with is taken as it
# is; above, a full record may be smaller, and a sample of the chunk tells.
_SURELY_WORTH_SHARE = 0.3
_SAMPLE_MARGIN = 1.15
_SELF_CHECK_EVERY = 16
MAX_AGE = 32_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A chunk's new record, not yet in a pack.

    Attributes:
        finding: The chunk.
        form: Form of the record.
        record: Its bytes.
        earlier: Records that it builds on.
        since: For the row.
        age: For the row.
        content: Private copy of the new content, to be the next save's base.
        changed_words: Elements that differ from what was stored.
        changed_blocks: 4 KiB blocks with any difference.
        read_bytes: Bytes read from the store to have something to compare with.
    """

    finding: Finding
    form: Form
    record: bytes
    earlier: tuple[Ref, ...]
    since: int
    age: int
    content: Bytes
    changed_words: int
    changed_blocks: int
    read_bytes: int

    def row(self, pack: str, offset: int) -> Row:
        """The row, once it is known where the record lies."""
        ref = Ref(form=self.form, pack=pack, offset=offset, length=len(self.record))
        return Row(
            leaf=self.finding.chunk.leaf_index,
            box=self.finding.chunk.box,
            digest=self.finding.digest,
            rule=Rule.NONE,
            refs=(*self.earlier, ref),
            since=self.since,
            age=self.age,
        )


def code(finding: Finding, *, options: DeltaOptions, packs: Folder) -> Coded:
    """Code one changed chunk, against what is stored of it where that pays."""
    chunk = finding.chunk
    content = chunk.content()
    base, read_bytes = None, 0
    if finding.status is Status.CHANGED and not _full_is_due(finding, options):
        base, read_bytes = _base_content(finding, packs)
    delta = None
    if base is not None:
        delta = codecs.encode_delta(content, base, chunk.leaf.element.word_bytes)
        if chunk.spread % _SELF_CHECK_EVERY == 0:
            _self_check(finding, delta, base, content)
    return _record(finding, content, delta, options, read_bytes)


def _full_is_due(finding: Finding, options: DeltaOptions) -> bool:
    stored = finding.chunk.stored
    if stored is None or stored.row.rule is not Rule.NONE:
        return True
    row = stored.row
    return len(row.refs) >= options.max_chain or row.since >= options.full_every


def _base_content(finding: Finding, packs: Folder) -> tuple[Bytes | None, int]:
    """What the chunk's stored list decodes to, and the bytes read for it."""
    chunk = finding.chunk
    stored = chunk.stored
    if stored is None:
        return None, 0
    if stored.content is not None:
        content = stored.checked_content()
        if content is None:
            _logger.warning(
                "leaf %s, chunk %s: its previous content changed in memory; "
                "writing it in full",
                chunk.leaf.name,
                chunk.box,
            )
        return content, 0
    row = stored.row
    if row.refs[-1].form is Form.CONSTANT:
        word = row.refs[-1].word[: chunk.leaf.element.word_bytes]
        return codecs.fill(word, chunk.content_bytes), 0
    request = reader.Request(leaf=chunk.leaf, row=row)
    try:
        return reader.read_one(packs, request), row.stored_bytes
    except (CorruptionError, StorageError) as error:
        # The save does not need the old content; whoever verifies will hear of it.
        _logger.warning("%s; writing the chunk in full", error)
        return None, 0


def _record(
    finding: Finding,
    content: Bytes,
    delta: codecs.Delta | None,
    options: DeltaOptions,
    read_bytes: int,
) -> Coded:
    chunk, stored = finding.chunk, finding.chunk.stored
    word_bytes = chunk.leaf.element.word_bytes
    form, payload = _choose(finding, content, delta, options)
    record = records.Record(
        form=form,
        word_bytes=word_bytes,
        content_bytes=content.size,
        content_digest=finding.digest,
        payload=payload,
    ).encode()
    earlier = stored.row.refs if stored and not form.is_full else ()
    since, age = _counters(finding, options, full=form.is_full)
    renewed = finding.status is Status.REFRESH
    blocks = 0 if renewed else -(-content.size // codecs.BLOCK_BYTES)
    return Coded(
        finding=finding,
        form=form,
        record=record,
        earlier=earlier,
        since=since,
        age=age,
        content=_keep(finding, content),
        changed_words=_changed(finding, delta.changed_words if delta else None),
        changed_blocks=delta.changed_blocks if delta else blocks,
        read_bytes=read_bytes,
    )


def _choose(
    finding: Finding,
    content: Bytes,
    delta: codecs.Delta | None,
    options: DeltaOptions,
) -> tuple[Form, bytes]:
    """The delta, if its list stays cheap to read and no full record is smaller."""
    word_bytes = finding.chunk.leaf.element.word_bytes
    stored = finding.chunk.stored
    if delta is None or stored is None:
        return Form.PLANES, codecs.encode_full(content, word_bytes)
    first, delta_bytes = stored.row.refs[0], len(delta.payload)
    full: bytes | None = None
    full_bytes = first.length
    if first.form is Form.CONSTANT:
        # Nothing tells how large a full record would be but making it.
        full = codecs.encode_full(content, word_bytes)
        full_bytes = len(full) + records.RECORD_OVERHEAD_BYTES
    elif delta_bytes > _SURELY_WORTH_SHARE * full_bytes:
        expected = codecs.estimate_full_bytes(content, word_bytes)
        if expected < _SAMPLE_MARGIN * delta_bytes:
            full = codecs.encode_full(content, word_bytes)
    total = stored.row.stored_bytes + delta_bytes + records.RECORD_OVERHEAD_BYTES
    too_dear = total > options.read_budget * full_bytes
    if too_dear or (full is not None and len(full) <= delta_bytes):
        return Form.PLANES, full or codecs.encode_full(content, word_bytes)
    return delta.form, delta.payload


def _counters(
    finding: Finding, options: DeltaOptions, *, full: bool
) -> tuple[int, int]:
    """`since` and `age` of the new row."""
    chunk = finding.chunk
    row = chunk.stored.row if chunk.stored else None
    if row is not None and row.rule is Rule.NONE:
        if full:
            return 0, 0
        return row.since + 1, min(row.age + 1, MAX_AGE)
    return first_counters(chunk.spread, options)


def first_counters(spread: int, options: DeltaOptions) -> tuple[int, int]:
    """`since` and `age` of a chunk's first row, spread so that renewals are too."""
    since = spread % options.full_every if options.full_every else 0
    return since, -(spread // 64 % options.refresh_every)


def _keep(finding: Finding, content: Bytes) -> Bytes:
    """A private copy of the content, in the buffer of the old one if there is one."""
    stored = finding.chunk.stored
    if stored is not None and stored.content is not None:
        np.copyto(stored.content, content)
        return stored.content
    return content.copy()


def _changed(finding: Finding, compared: int | None) -> int:
    if finding.status is Status.REFRESH:
        return 0
    return finding.chunk.word_count if compared is None else compared


def _self_check(
    finding: Finding, delta: codecs.Delta, base: Bytes, content: Bytes
) -> None:
    """Decode what was just coded; a fault of coder or memory must not be stored."""
    decoded = codecs.decode(
        delta.form,
        delta.payload,
        base,
        content.size,
        finding.chunk.leaf.element.word_bytes,
    )
    if not np.array_equal(decoded, content):
        raise CorruptionError(
            f"leaf {finding.chunk.leaf.name}, chunk {finding.chunk.box}: a "
            f"{delta.form.name} record does not decode to what was coded; nothing was "
            "committed. Check this machine's memory, and report it if it happens again"
        )
