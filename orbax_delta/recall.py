"""What a save needs to know of the past of its changed chunks, read ahead of coding.

A delta builds on the content before it: the one in memory if it is held, or else what
the store has. Reads are joined over many chunks and are on their way while earlier
chunks are coded; chunks that will be written in full anyway are not read.
"""

import dataclasses
import logging
from collections.abc import Iterable, Iterator

from orbax_delta import codecs, composing, ranges, reader, records
from orbax_delta.changes import Finding, Status
from orbax_delta.codecs import Bytes, Form
from orbax_delta.dtypes import Rule
from orbax_delta.errors import CorruptionError, StorageError
from orbax_delta.options import DeltaOptions
from orbax_delta.parts import Ref

_logger = logging.getLogger("orbax_delta")

_WINDOW_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A chunk to be written, with its past at hand.

    Attributes:
        finding: The chunk.
        replaces: Records at the end of its list that the new one takes the place of;
            None: it is to be full.
        ahead: Where what had to be read is; None: nothing had to.
    """

    finding: Finding
    replaces: int | None
    ahead: ranges.Records | None

    @property
    def recalled(self) -> bool:
        """Whether its old content is not held, and was read for this."""
        return self.replaces is not None and _request(self.finding) is not None

    def base(self) -> Bytes | None:
        """The content that the new record is to build on; None: there is none.

        Damage is no error here, the chunk is written in full: the save does not need
        the old content, and whoever verifies will hear of it.
        """
        if self.replaces is None:
            return None
        try:
            content = self._content()
            if content is None or not self.replaces:
                return content
            return self._earlier(content, self.replaces)
        except (CorruptionError, StorageError) as error:
            _logger.warning("%s; writing the chunk in full", self._named(error))
            return None

    def _named(self, error: Exception) -> str:
        chunk, stored = self.finding.chunk, self.finding.chunk.stored
        if stored is None:
            raise AssertionError("a chunk without a past was given one")
        where = reader.Request(leaf=chunk.leaf, row=stored.row).where
        return str(error) if where in str(error) else f"{where}: {error}"

    def _content(self) -> Bytes | None:
        chunk, stored = self.finding.chunk, self.finding.chunk.stored
        if stored is None:
            return None
        request = _request(self.finding)
        if request is not None and self.ahead is not None:
            return reader.content(request, self.ahead)
        if stored.content is None:
            word = stored.row.refs[-1].word[: chunk.leaf.element.word_bytes]
            return codecs.fill(word, chunk.content_bytes)
        content = stored.checked_content()
        if content is None:
            raise CorruptionError("its previous content changed in memory")
        return content

    def _earlier(self, content: Bytes, count: int) -> Bytes:
        chunk, stored = self.finding.chunk, self.finding.chunk.stored
        if stored is None or self.ahead is None:
            raise AssertionError("records to replace were not read")
        row, word_bytes = stored.row, chunk.leaf.element.word_bytes
        changes = []
        for ref in row.refs[-count:]:
            record = records.parse_record(self.ahead.get(ref))
            found = (record.form, record.content_bytes, record.word_bytes)
            if found != (ref.form, content.size, word_bytes):
                raise CorruptionError(
                    f"the record in pack {ref.pack}, offset {ref.offset}, is (form, "
                    f"content bytes, word bytes) {found}; the row expects "
                    f"{(ref.form, content.size, word_bytes)}"
                )
            changes.append(record)
        before = composing.earlier(content, changes, word_bytes)
        last = row.refs[-count - 1]
        head = memoryview(b"")
        if last.pack:
            head = self.ahead.get(self.ahead.packs.head_of(last))
        composing.check_earlier(before, row, count, head)
        return before


def ahead(
    changed: Iterable[Finding],
    options: DeltaOptions,
    packs: ranges.Packs,
    count: reader.ReadCount,
    *,
    hurried: bool,
) -> Iterator[Task]:
    """Tasks in the order of the findings, each when what it needs has been read.

    Args:
        changed: Chunks to be written.
        options: Options in force.
        packs: Where what is stored of them lies.
        count: Hears what is read.
        hurried: Whether what can wait is left to the next save.
    """
    waiting: _Window | None = None
    for window in _windows(changed, options, packs, hurried=hurried):
        window.begin(count)
        if waiting is not None:
            yield from waiting.tasks()
        waiting = window
    if waiting is not None:
        yield from waiting.tasks()


class _Window:
    """Chunks that are read together."""

    def __init__(self, packs: ranges.Packs) -> None:
        self._packs = packs
        self._members: list[tuple[Finding, int | None]] = []
        self._requests: list[reader.Request] = []
        self._refs: list[Ref] = []
        self._ahead: ranges.Records | None = None
        self.read_bytes = 0

    def add(self, finding: Finding, replaces: int | None) -> None:
        self._members.append((finding, replaces))
        stored = finding.chunk.stored
        if replaces is None or stored is None:
            return
        request = _request(finding)
        if request is not None:
            self._requests.append(request)
            self.read_bytes += request.row.stored_bytes
        if replaces:
            refs = stored.row.refs[-replaces - 1 :]
            wanted = [self._packs.head_of(refs[0])] if refs[0].pack else []
            wanted += refs[1:]
            self._refs += wanted
            self.read_bytes += sum(ref.length for ref in wanted)

    def begin(self, count: reader.ReadCount) -> None:
        if self._requests or self._refs:
            self._ahead = reader.read_ahead(
                self._packs, self._requests, self._refs, count
            )

    def tasks(self) -> Iterator[Task]:
        for finding, replaces in self._members:
            yield Task(finding=finding, replaces=replaces, ahead=self._ahead)


def _windows(
    changed: Iterable[Finding],
    options: DeltaOptions,
    packs: ranges.Packs,
    *,
    hurried: bool,
) -> Iterator[_Window]:
    window = _Window(packs)
    for finding in changed:
        window.add(finding, _replaces(finding, options, hurried=hurried))
        if window.read_bytes >= _WINDOW_BYTES:
            yield window
            window = _Window(packs)
    yield window


def _replaces(finding: Finding, options: DeltaOptions, *, hurried: bool) -> int | None:
    stored = finding.chunk.stored
    own = stored is not None and stored.row.rule is Rule.NONE
    if finding.status is not Status.CHANGED or stored is None or not own or stored.skip:
        return None
    if finding.relative:
        return None  # it builds on another chunk, not on its own past
    if finding.chunk.referred and options.max_chain > 1:
        # A record of another chunk comes after the list.
        options = dataclasses.replace(options, max_chain=options.max_chain - 1)
    size = finding.chunk.content_bytes
    return composing.replaced(stored.row, size, options, hurried=hurried)


def _request(finding: Finding) -> reader.Request | None:
    """How to read the old content; None where that is not needed."""
    stored = finding.chunk.stored
    if stored is None or stored.content is not None:
        return None
    if stored.row.refs[-1].form is Form.CONSTANT:
        return None
    return reader.Request(leaf=finding.chunk.leaf, row=stored.row)
