"""From rows to the content of chunks: ranged reads, decoding, verification.

Reads of neighbouring records are joined, the next batch is on its way while one is
decoded, a list that several chunks share is read and decoded once, and content that
does not have the digest of its row is never handed out.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from orbax_delta import chunks, codecs, dtypes, records
from orbax_delta.background import Pool
from orbax_delta.codecs import Bytes, Form
from orbax_delta.errors import CorruptionError, OutOfMemoryError, StorageError
from orbax_delta.manifests import LeafEntry
from orbax_delta.parts import Ref, Row
from orbax_delta.store import Folder, Pending

_JOIN_GAP_BYTES = 64 << 10
_JOIN_MAX_BYTES = 16 << 20
_BATCH_BYTES = 32 << 20
_BATCH_CONTENT_BYTES = 64 << 20


Unreadable = CorruptionError | StorageError
"""Why there is no content: damage, or a storage that did not give it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One chunk that is wanted."""

    leaf: LeafEntry
    row: Row

    @property
    def content_bytes(self) -> int:
        """Size of the chunk's content."""
        return self.leaf.element.content_bytes(chunks.element_count(self.row.box))

    @property
    def where(self) -> str:
        """The chunk in words, for messages."""
        spans = ", ".join(f"{start}:{stop}" for start, stop in self.row.box)
        return f"leaf {self.leaf.name}, chunk [{spans}]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A chunk's verified content, or why there is none."""

    request: Request
    content: Bytes | None
    error: Unreadable | None


class ReadCount:
    """Requests and bytes that a reader asked of the store."""

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0


class _MissingPackError(CorruptionError):
    """The pack is not there, so that no other range of it can be read either."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    pack: str
    start: int
    stop: int


_Group = Sequence[Request]


def fetch(
    packs: Folder, wanted: Iterable[Request], *, executor: Pool, count: ReadCount
) -> Iterator[Fetched]:
    """The content of every wanted chunk, in an order that suits the packs."""
    pending: _Batch | None = None
    for groups in _batches(_grouped(wanted)):
        following = _Batch(packs, groups, count)
        if pending is not None:
            yield from pending.decode(executor)
        pending = following
    if pending is not None:
        yield from pending.decode(executor)


def read_one(packs: Folder, request: Request) -> Bytes:
    """The content of one chunk, read now.

    Raises:
        CorruptionError: It is damaged or missing.
        StorageError: The store failed.
    """
    (fetched,) = _Batch(packs, [[request]], ReadCount()).decode_here()
    if fetched.content is None:
        raise fetched.error or CorruptionError(f"{request.where} has no content")
    return fetched.content


def _grouped(wanted: Iterable[Request]) -> list[_Group]:
    """Requests that share a list together, in order of their first record."""
    groups: dict[tuple[Ref, ...], list[Request]] = {}
    for request in wanted:
        groups.setdefault(request.row.refs, []).append(request)
    return sorted(groups.values(), key=_position)


def _position(group: _Group) -> tuple[str, int, int, chunks.Box]:
    row = group[0].row
    return row.refs[0].pack, row.refs[0].offset, row.leaf, row.box


def _batches(groups: Iterable[_Group]) -> Iterator[list[_Group]]:
    batch: list[_Group] = []
    stored = content = 0
    for group in groups:
        batch.append(group)
        stored += group[0].row.stored_bytes
        content += sum(request.content_bytes for request in group)
        if stored >= _BATCH_BYTES or content >= _BATCH_CONTENT_BYTES:
            yield batch
            batch, stored, content = [], 0, 0
    if batch:
        yield batch


class _Batch:
    """Groups whose reads are on their way."""

    def __init__(
        self, packs: Folder, groups: Sequence[_Group], count: ReadCount
    ) -> None:
        self._groups = groups
        self._packs = packs
        refs = {ref for group in groups for ref in group[0].row.refs if ref.pack}
        self._reads: list[tuple[Pending, _Range, Sequence[Ref]]] = []
        self._range_of: dict[Ref, _Range] = {}
        for span, members in _joined(refs):
            read = packs.start_read(span.pack, span.start, span.stop - span.start)
            self._reads.append((read, span, members))
            self._range_of.update(dict.fromkeys(members, span))
            count.requests += 1
            count.bytes += span.stop - span.start
        self._data: dict[_Range, memoryview | Unreadable] = {}

    def decode(self, executor: Pool) -> Iterator[Fetched]:
        self._await_reads()
        for fetched in executor.map(self._decode_group, self._groups):
            yield from fetched

    def decode_here(self) -> Iterator[Fetched]:
        self._await_reads()
        for group in self._groups:
            yield from self._decode_group(group)

    def _await_reads(self) -> None:
        for read, span, members in self._reads:
            self._await(read, span, members)

    def _await(self, read: Pending, span: _Range, members: Sequence[Ref]) -> None:
        """Keep what a read gives; where it fails, find out which records it spoils.

        A pack that is cut off, or a bad sector, is no reason to miss the records
        beside it that were only read along.
        """
        data = _settle(read, span, self._packs.url)
        self._data[span] = data
        whole = isinstance(data, memoryview | _MissingPackError)
        # Elsewhere a storage that fails has been asked many times, for minutes.
        down = isinstance(data, StorageError) and "://" in self._packs.url
        if whole or down or len(members) < 2:
            return
        middle = len(members) // 2
        for half in (members[:middle], members[middle:]):
            stop = max(ref.offset + ref.length for ref in half)
            part = _Range(span.pack, half[0].offset, stop)
            again = self._packs.start_read(part.pack, part.start, stop - part.start)
            self._range_of.update(dict.fromkeys(half, part))
            self._await(again, part, half)

    def _decode_group(self, group: _Group) -> list[Fetched]:
        sources: dict[int, Bytes] = {}

        def source(request: Request) -> Bytes:
            # One decoding serves all chunks that follow from the same records.
            width = dtypes.source_bytes(request.row.rule, request.content_bytes)
            if width not in sources:
                sources[width] = self._source(request)
            return sources[width]

        return [_checked(request, source) for request in group]

    def _source(self, request: Request) -> Bytes:
        """What the list of a row decodes to."""
        row, element = request.row, request.leaf.element
        content_bytes = dtypes.source_bytes(row.rule, request.content_bytes)
        word_bytes = dtypes.source_bytes(row.rule, element.word_bytes)
        content: Bytes | None = None
        for number, ref in enumerate(row.refs):
            if ref.form is Form.CONSTANT:
                content = codecs.decode(
                    ref.form, ref.word, None, content_bytes, word_bytes
                )
                continue
            try:
                content = self._apply(ref, content, content_bytes, word_bytes)
            except CorruptionError as error:
                raise CorruptionError(
                    f"record {number + 1} of {len(row.refs)} (pack {ref.pack}, offset "
                    f"{ref.offset}): {error}"
                ) from error
        if content is None:
            raise CorruptionError("the chunk lists no record")
        return content

    def _apply(
        self, ref: Ref, base: Bytes | None, content_bytes: int, word_bytes: int
    ) -> Bytes:
        span = self._range_of[ref]
        data = self._data[span]
        if isinstance(data, CorruptionError | StorageError):
            raise data
        start = ref.offset - span.start
        record = records.parse_record(data[start : start + ref.length])
        found = (record.form, record.content_bytes, record.word_bytes)
        if found != (ref.form, content_bytes, word_bytes):
            raise CorruptionError(
                f"the record is (form, content bytes, word bytes) {found}; the row "
                f"expects {(ref.form, content_bytes, word_bytes)}"
            )
        return codecs.decode(
            record.form, record.payload, base, content_bytes, word_bytes
        )


def _checked(request: Request, source: Callable[[Request], Bytes]) -> Fetched:
    row = request.row
    try:
        content: Bytes | None = source(request)
        if row.rule is not dtypes.Rule.NONE and content is not None:
            content = dtypes.derive(row.rule, content)
        if content is None:
            raise CorruptionError("its source holds a NaN that no cast is defined for")
        found = records.digest(content)
        if found != row.digest:
            raise CorruptionError(
                f"its content has digest {found.hex()}; expected {row.digest.hex()}"
            )
    except MemoryError as error:
        raise OutOfMemoryError(
            f"{request.where}: there is no room to decode its {request.content_bytes} "
            "bytes"
        ) from error
    except (CorruptionError, StorageError) as error:
        named = type(error)(f"{request.where}: {error}")
        return Fetched(request=request, content=None, error=named)
    return Fetched(request=request, content=content, error=None)


def _joined(refs: Iterable[Ref]) -> Iterator[tuple[_Range, list[Ref]]]:
    """Ranges to read, each with the records inside it."""
    members: list[Ref] = []
    start = stop = spare = 0
    for ref in sorted(refs, key=lambda ref: (ref.pack, ref.offset, ref.length)):
        end = ref.offset + ref.length
        gap = ref.offset - stop
        # What is read between records stays below a quarter of what is wanted.
        fits = (
            members
            and ref.pack == members[0].pack
            and gap <= min(_JOIN_GAP_BYTES, spare + ref.length // 4)
            and max(stop, end) - start <= _JOIN_MAX_BYTES
        )
        if members and not fits:
            yield _Range(members[0].pack, start, stop), members
            members = []
        if not members:
            start, stop, spare, gap = ref.offset, end, 0, 0
        members.append(ref)
        stop = max(stop, end)
        spare += ref.length // 4 - max(gap, 0)
    if members:
        yield _Range(members[0].pack, start, stop), members


def _settle(read: Pending, span: _Range, url: str) -> memoryview | Unreadable:
    """The bytes of a range; what is wrong is kept for the chunks that need them."""
    try:
        got = read.result()
    except StorageError as error:
        # TensorStore says that a range lies past the end of a file in words only.
        if "OUT_OF_RANGE" in str(error):
            return CorruptionError(
                f"the pack {url}{span.pack} ends before byte {span.stop}"
            )
        return error  # a bad sector spoils one pack, not the others
    if got.state != "value":
        return _MissingPackError(f"the pack {url}{span.pack} is missing")
    if len(got.value) != span.stop - span.start:
        return CorruptionError(
            f"the pack {url}{span.pack} gave {len(got.value)} bytes at {span.start}; "
            f"expected {span.stop - span.start}"
        )
    return memoryview(got.value)


def place(
    content: Bytes, request: Request, region: chunks.Box, out: np.ndarray
) -> None:
    """Copy the part of a chunk that lies in `region` into `out`, which holds it."""
    box = request.row.box
    common = chunks.intersect(box, region)
    if common is None:
        return
    array = request.leaf.element.from_content(content, chunks.box_shape(box))
    out[chunks.slices(common, region)] = array[chunks.slices(common, box)]
