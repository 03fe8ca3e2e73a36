"""From a changed chunk to a record: whether it is full, and which form.

One rule per chunk, no "base saves". Its next record is a delta until `full_every` of
them have gathered; then one stands for them all, or, where they are not small, it is
full. It is also full when its list would grow past `max_chain` records or past
`read_budget` times a full record in bytes, and after `refresh_every` saves.
"""

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

from orbax_delta import codecs, holding, records, sparse
from orbax_delta.changes import Finding, Status
from orbax_delta.codecs import Bytes, Form
from orbax_delta.dtypes import Rule
from orbax_delta.errors import CorruptionError
from orbax_delta.grids import Codes
from orbax_delta.holding import UNPAID_SHARE, Outlook
from orbax_delta.options import DeltaOptions
from orbax_delta.packs import Lifetime
from orbax_delta.parts import Ref, Row
from orbax_delta.recall import Task

# A delta below this share of the full record that its list begins with is taken as it
# is; above, a full record may be smaller, and a sample of the chunk tells.
_SURELY_WORTH_SHARE = 0.75
_SAMPLE_MARGIN = 1.02
_SELF_CHECK_EVERY = 16

_small_steps = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A chunk's new record, not yet in a pack.

    Attributes:
        finding: The chunk.
        form: Form of the record.
        record: Its bytes, in pieces.
        earlier: Records of the chunk itself that it builds on.
        composed: Whether it stands for several changes at once.
        content: Private copy of the new content, to be the next save's base; None: it
            is not held.
        outlook: What becomes of it.
        changed_words: Elements that differ from what was stored.
        changed_blocks: 4 KiB blocks with any difference.
    """

    finding: Finding
    form: Form
    record: records.Pieces
    earlier: tuple[Ref, ...]
    composed: bool
    content: Bytes | None
    outlook: Outlook
    changed_words: int
    changed_blocks: int

    @property
    def record_bytes(self) -> int:
        """Length of the record."""
        return sum(map(len, self.record))

    def row(self, pack: str, offset: int, length: int, *, since: int, age: int) -> Row:
        """The row, once it is known where the record lies."""
        ref = Ref(form=self.form, pack=pack, offset=offset, length=length)
        return Row(
            leaf=self.finding.chunk.leaf_index,
            box=self.finding.chunk.box,
            digest=self.finding.digest,
            rule=Rule.NONE,
            refs=(*self.earlier, ref),
            since=since,
            age=age,
        )

    def lifetime(self, options: DeltaOptions) -> Lifetime:
        """For how many saves the record is likely needed."""
        stored = self.finding.chunk.stored
        if self.composed or self.finding.status is Status.REFRESH or stored is None:
            return Lifetime.LONG
        if self.form.is_full or self.form is Form.RELATIVE:
            due = stored.row.age + 1 >= options.refresh_every
            return Lifetime.LONG if due else Lifetime.SHORT
        full_bytes = self.earlier[0].length or self.finding.chunk.content_bytes
        gathers = self.record_bytes * options.full_every <= full_bytes
        return Lifetime.CYCLE if gathers else Lifetime.SHORT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """A changed chunk beside what is stored of it, and where the two differ."""

    task: Task
    content: Bytes
    codes: Codes | None
    base: Bytes | None
    changes: sparse.Changes | None

    @property
    def few(self) -> sparse.Changes | None:
        """The changes, if few words differ, so that coding is many small steps."""
        known = self.changes is not None and self.changes.positions is not None
        return self.changes if known else None


def code(tasks: Sequence[Task], *, options: DeltaOptions) -> list[Coded]:
    """Code changed chunks, each against what is stored of it where that pays.

    They are compared, and most coded, in long passes without the interpreter's lock.
    What takes many small steps comes last and is done by one thread at a time: several
    would wake each other at every step, and get through less (DESIGN.md, decision 73).
    """
    coded: dict[int, Coded] = {}
    waiting: dict[int, tuple[_Compared, sparse.Changes]] = {}
    for index, compared in enumerate(_compare(tasks)):
        if compared.few is not None:
            waiting[index] = compared, compared.few
        else:
            coded[index] = _code(compared, options)
    with _small_steps:
        listed = sparse.encode([few for _, few in waiting.values()])
        for (index, (compared, _)), payload in zip(
            waiting.items(), listed, strict=True
        ):
            coded[index] = _code(compared, options, payload)
    return [coded[index] for index in range(len(tasks))]


def _compare(tasks: Sequence[Task]) -> list[_Compared]:
    contents = [_contents(task) for task in tasks]
    pairs = []
    for task, (content, codes, base) in zip(tasks, contents, strict=True):
        if base is not None:
            width = task.finding.chunk.leaf.element.word_bytes
            on_grid = codes is not None
            most = codecs.most_listed(content.size, width, on_grid=on_grid)
            pairs.append(sparse.Pair(content, base, width, most))
    found = iter(sparse.find(pairs))
    return [
        _Compared(
            task=task,
            content=content,
            codes=codes,
            base=base,
            changes=None if base is None else next(found),
        )
        for task, (content, codes, base) in zip(tasks, contents, strict=True)
    ]


def _contents(task: Task) -> tuple[Bytes, Codes | None, Bytes | None]:
    """What is in a chunk, its codes, and what it is to be compared with."""
    finding = task.finding
    chunk = finding.chunk
    (content, codes), base = chunk.coded(), task.base()
    if finding.wants_source and not finding.relative:
        codes = None  # there is no list that it could build on
    if chunk.rounding and records.digest(content) != finding.digest:
        # It is made again from the same values, which must not have moved.
        raise CorruptionError(
            f"leaf {chunk.leaf.name}, chunk {chunk.box}: rounded twice, it gave two "
            "contents; nothing was committed. Check this machine's memory, and report "
            "it if it happens again"
        )
    return content, codes, base


def _code(
    compared: _Compared, options: DeltaOptions, listed: bytes | memoryview | None = None
) -> Coded:
    task, content, codes = compared.task, compared.content, compared.codes
    base, finding = compared.base, task.finding
    chunk = finding.chunk
    delta = None
    if base is not None and compared.changes is not None:
        word_bytes = chunk.leaf.element.word_bytes
        delta = codecs.encode_delta(
            content, base, word_bytes, compared.changes, codes, listed
        )
        if task.replaces or chunk.spread % _SELF_CHECK_EVERY == 0:
            _self_check(finding, delta, base, content)
    return _record(compared, delta, options)


def _record(
    compared: _Compared, delta: codecs.Delta | None, options: DeltaOptions
) -> Coded:
    task, content = compared.task, compared.content
    finding, replaces = task.finding, task.replaces or 0
    chunk, stored = finding.chunk, finding.chunk.stored
    refs = stored.row.refs if stored and delta else ()
    earlier = refs[: len(refs) - replaces]
    form, payload, full_bytes = _choose(compared, delta, earlier, options)
    record = records.Record(
        form=form,
        word_bytes=chunk.leaf.element.word_bytes,
        content_bytes=content.size,
        content_digest=finding.digest,
        payload=payload,
    ).pieces()
    alone = form.is_full or form is Form.RELATIVE
    renewed = finding.status is Status.REFRESH
    if form is Form.RELATIVE:
        outlook = Outlook(hold=False)  # nothing builds on it
    elif renewed:
        outlook = holding.renewed(options, always=chunk.needs_copy)
    else:
        unpaid = delta is not None and len(delta.payload) > UNPAID_SHARE * full_bytes
        outlook = holding.written(
            stored,
            options,
            recalled=task.recalled,
            unpaid=unpaid,
            always=chunk.needs_copy,
        )
    blocks = 0 if renewed else -(-content.size // codecs.BLOCK_BYTES)
    return Coded(
        finding=finding,
        form=form,
        record=record,
        earlier=() if alone else earlier,
        composed=bool(replaces) and not alone,
        content=_keep(compared, delta) if outlook.hold else None,
        outlook=outlook,
        changed_words=_changed(finding, delta.changed_words if delta else None),
        changed_blocks=delta.changed_blocks if delta else blocks,
    )


def _choose(
    compared: _Compared,
    delta: codecs.Delta | None,
    earlier: tuple[Ref, ...],
    options: DeltaOptions,
) -> tuple[Form, bytes | memoryview, int]:
    """The delta, if its list stays cheap to read and no full record is smaller.

    Returns:
        Form and payload, and about what the payload of a full record takes.
    """
    if delta is None or not earlier:
        form, full = _full(compared)
        return form, full, len(full)
    first, delta_bytes = earlier[0], len(delta.payload)
    made: tuple[Form, bytes | memoryview] | None = None
    full_bytes = first.length
    if first.form is Form.CONSTANT:
        # Nothing tells how large a full record would be but making it.
        made = _full(compared)
        full_bytes = len(made[1]) + records.RECORD_OVERHEAD_BYTES
    elif delta_bytes > _SURELY_WORTH_SHARE * full_bytes:
        expected = _expected_full_bytes(compared, first)
        if expected < _SAMPLE_MARGIN * delta_bytes:
            made = _full(compared)
    listed = sum(ref.length for ref in earlier)
    total = listed + delta_bytes + records.RECORD_OVERHEAD_BYTES
    too_dear = total > options.read_budget * full_bytes
    if made is not None:
        full_bytes = len(made[1])
    if too_dear or (made is not None and len(made[1]) <= delta_bytes):
        form, full = made or _full(compared)
        return form, full, len(full)
    return delta.form, delta.payload, full_bytes


def _full(compared: _Compared) -> tuple[Form, bytes | memoryview]:
    """The record that needs none of the chunk's own before it."""
    finding, codes = compared.task.finding, compared.codes
    if codes is not None and codes.alone:
        form = Form.RELATIVE if finding.relative else Form.GRID
        return form, codecs.encode_on_grid(codes)
    word_bytes = finding.chunk.leaf.element.word_bytes
    return Form.PLANES, codecs.encode_full(compared.content, word_bytes)


def _expected_full_bytes(compared: _Compared, first: Ref) -> int:
    if compared.codes is not None and compared.codes.alone:
        return first.length if first.form is Form.GRID else 0
    word_bytes = compared.task.finding.chunk.leaf.element.word_bytes
    return codecs.estimate_full_bytes(compared.content, word_bytes)


def _keep(compared: _Compared, delta: codecs.Delta | None) -> Bytes:
    """A private copy of the content, in the buffer of the old one if there is one."""
    task, content = compared.task, compared.content
    chunk = task.finding.chunk
    held = chunk.stored.content if chunk.stored else None
    if held is None:
        # What has codes was made of the chunk, and is nobody else's.
        return content.copy() if compared.codes is None else content
    if delta is not None and not task.replaces:
        codecs.carry_over(content, held, delta, chunk.leaf.element.word_bytes)
    else:
        np.copyto(held, content)
    return held


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
