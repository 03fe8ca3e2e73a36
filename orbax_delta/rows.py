"""The rows of a save as they become known, and what its report counts.

Changed chunks get theirs when their record has found its place in a pack; the others
when all of those are known, because a derived chunk lists the records of its source.
"""

import collections
import dataclasses
from collections.abc import Sequence

from orbax_delta import codecs, coding
from orbax_delta.base import Entry
from orbax_delta.changes import Finding, Status
from orbax_delta.codecs import Form
from orbax_delta.dtypes import Rule
from orbax_delta.options import DeltaOptions
from orbax_delta.parts import Ref, Row


class SaveRows:
    """Rows of a save as they become known, and what the report counts.

    Attributes:
        findings: All chunks, in order.
        entries: Their entries of the next base, in the same order, once filled in.
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = findings
        self.entries: list[Entry] = []
        self._coded: dict[int, Entry] = {}
        self._position = {id(finding): i for i, finding in enumerate(findings)}
        self.chunks_by_form: collections.Counter[str] = collections.Counter()
        self.bytes_by_form: collections.Counter[str] = collections.Counter()
        self.elements_changed = 0
        self.blocks_changed = 0
        self.read_bytes = 0

    def add(self, coded: coding.Coded, pack: str, offset: int) -> None:
        """A record has found its place."""
        form = coded.form.name.lower()
        self.chunks_by_form[form] += 1
        self.bytes_by_form[form] += len(coded.record)
        self.elements_changed += coded.changed_words
        self.blocks_changed += coded.changed_blocks
        self.read_bytes += coded.read_bytes
        self._coded[self._position[id(coded.finding)]] = Entry(
            row=coded.row(pack, offset), content=coded.content
        )

    def fill_in(self, options: DeltaOptions) -> None:
        """Rows of the chunks that needed no record."""
        settled = [
            self._coded.get(index) or self._settled(finding, options)
            for index, finding in enumerate(self.findings)
        ]
        self.entries = [
            entry or self._derived(finding, settled, options)
            for entry, finding in zip(settled, self.findings, strict=True)
        ]

    def _settled(self, finding: Finding, options: DeltaOptions) -> Entry | None:
        chunk = finding.chunk
        if finding.status is Status.DERIVED:
            return None
        self.chunks_by_form[finding.status.value] += 1
        if finding.status is Status.SAME and chunk.stored is not None:
            row = chunk.stored.row
            aged = dataclasses.replace(
                row, leaf=chunk.leaf_index, age=min(row.age + 1, coding.MAX_AGE)
            )
            return Entry(row=aged, content=chunk.stored.content)
        since, age = coding.first_counters(chunk.spread, options)
        self._count_whole(finding)
        refs = finding.refs or (Ref(form=Form.CONSTANT, word=finding.word),)
        return Entry(row=_row(finding, Rule.NONE, refs, since, age), content=None)

    def _derived(
        self,
        finding: Finding,
        settled: Sequence[Entry | None],
        options: DeltaOptions,
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
        since, age = coding.first_counters(finding.chunk.spread, options)
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
