"""The rows of a save as they become known, and what its report counts.

Changed chunks get theirs when their record has found its place in a pack; the others
when all of those are known, because a derived chunk lists the records of its source.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from orbax_delta import codecs, coding, holding
from orbax_delta.base import Entry
from orbax_delta.changes import Finding, Status
from orbax_delta.codecs import Form
from orbax_delta.dtypes import Rule
from orbax_delta.options import DeltaOptions
from orbax_delta.parts import Ref, Row

MAX_AGE = 32_000


class SaveRows:
    """Rows of a save as they become known, and what the report counts.

    Args:
        findings: All chunks, in order.
        options: Options in force.

    Attributes:
        findings: As given.
        entries: Their entries of the next base, in the same order, once filled in.
        elements_changed: Of all records so far.
        blocks_changed: Of all records so far.
        read_bytes: Bytes read from the store for the save.
    """

    def __init__(self, findings: Sequence[Finding], options: DeltaOptions) -> None:
        self.findings = findings
        self._options = options
        self.entries: list[Entry] = []
        self._coded: dict[int, Entry] = {}
        self._position = {id(finding): i for i, finding in enumerate(findings)}
        sizes = (finding.chunk.content_bytes for finding in findings)
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self.chunks_by_form: collections.Counter[str] = collections.Counter()
        self.bytes_by_form: collections.Counter[str] = collections.Counter()
        self.elements_changed = 0
        self.blocks_changed = 0
        self.read_bytes = 0

    def add(self, coded: coding.Coded, pack: str, offset: int, length: int) -> None:
        """A record has found its place."""
        form = coded.form.name.lower()
        self.chunks_by_form[form] += 1
        self.bytes_by_form[form] += length
        self.elements_changed += coded.changed_words
        self.blocks_changed += coded.changed_blocks
        index = self._position[id(coded.finding)]
        since, age = self._counters(coded, index)
        self._coded[index] = Entry(
            row=coded.row(pack, offset, length, since=since, age=age),
            content=coded.content,
            grace=coded.outlook.grace,
            skip=coded.outlook.skip,
        )

    def _counters(self, coded: coding.Coded, index: int) -> tuple[int, int]:
        """`since` and `age` of the row of a new record."""
        stored = coded.finding.chunk.stored
        if stored is None or stored.row.rule is not Rule.NONE:
            return self._first_counters(index)
        if coded.form.is_full or coded.form is Form.RELATIVE:
            return 0, 0
        age = min(stored.row.age + 1, MAX_AGE)
        return 0 if coded.composed else min(stored.row.since + 1, MAX_AGE), age

    def _first_counters(self, index: int) -> tuple[int, int]:
        """`since` and `age` of a chunk's first row, spread so that renewals are too.

        Deltas become one at another save in each chunk, by a hash. Full records are
        renewed in the order of the state, which is that of their packs: so a pack is
        left behind as a whole, instead of living on for the last of its records.
        """
        every, spread = self._options.full_every, self.findings[index].chunk.spread
        share = self._starts[index] / max(self._starts[-1], 1)
        return spread % every if every else 0, -int(share * self._options.refresh_every)

    def fill_in(self) -> None:
        """Rows of the chunks that needed no record."""
        settled = [
            self._coded.get(index) or self._settled(finding, index)
            for index, finding in enumerate(self.findings)
        ]
        followed = [
            entry or self._derived(finding, settled, index)
            for index, (entry, finding) in enumerate(
                zip(settled, self.findings, strict=True)
            )
        ]
        self.entries = [
            self._relative(entry, followed[finding.source])
            if entry.row.refs[0].form is Form.RELATIVE
            else entry
            for entry, finding in zip(followed, self.findings, strict=True)
        ]

    @staticmethod
    def _relative(entry: Entry, source: Entry) -> Entry:
        """An entry whose record builds on the list of another chunk."""
        refs = (*source.row.refs, *entry.row.refs)
        return dataclasses.replace(entry, row=dataclasses.replace(entry.row, refs=refs))

    def _settled(self, finding: Finding, index: int) -> Entry | None:
        chunk = finding.chunk
        if finding.status is Status.DERIVED:
            return None
        self.chunks_by_form[finding.status.value] += 1
        if finding.status is Status.SAME and chunk.stored is not None:
            row = chunk.stored.row
            aged = dataclasses.replace(
                row, leaf=chunk.leaf_index, age=min(row.age + 1, MAX_AGE)
            )
            entry = holding.unchanged(
                chunk.stored, aged, self._options, always=chunk.needs_copy
            )
            if chunk.needs_copy and entry.content is None:
                entry.content = chunk.content().copy()
            return entry
        since, age = self._first_counters(index)
        self._count_whole(finding)
        refs = finding.refs or (Ref(form=Form.CONSTANT, word=finding.word),)
        return Entry(row=_row(finding, Rule.NONE, refs, since, age), content=None)

    def _derived(
        self,
        finding: Finding,
        settled: Sequence[Entry | None],
        index: int,
    ) -> Entry:
        self.chunks_by_form[finding.status.value] += 1
        stored = finding.chunk.stored
        if stored is None or stored.row.digest != finding.digest:
            self._count_whole(finding)
        source = settled[finding.source]
        if source is None:
            raise AssertionError("a derived chunk follows from one that is not derived")
        # A copy shares the records of its source, and its cast if that has one.
        rule = finding.rule or source.row.rule
        since, age = self._first_counters(index)
        return Entry(row=_row(finding, rule, source.row.refs, since, age), content=None)

    def _count_whole(self, finding: Finding) -> None:
        self.elements_changed += finding.chunk.word_count
        self.blocks_changed += -(-finding.chunk.content_bytes // codecs.BLOCK_BYTES)


def _row(
    finding: Finding, rule: Rule, refs: tuple[Ref, ...], since: int, age: int
) -> Row:
    return Row(
        leaf=finding.chunk.leaf_index,
        box=finding.chunk.box,
        digest=finding.digest,
        rule=rule,
        refs=refs,
        since=since,
        age=age,
    )
