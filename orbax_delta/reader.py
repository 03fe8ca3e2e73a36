"""From rows to the content of chunks: read, decoded, verified.

Some batches of reads are on their way while others are decoded, on all threads of the
pool and without a pause between batches. A list that several chunks share is read and
decoded once, and content that does not have the digest of its row is never handed out.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from orbax_delta import chunks, codecs, dtypes, records
from orbax_delta.background import Pool, batches
from orbax_delta.codecs import Bytes, Form
from orbax_delta.errors import CorruptionError, OutOfMemoryError, StorageError
from orbax_delta.manifests import LeafEntry
from orbax_delta.opened import Opened
from orbax_delta.parts import Ref, Row
from orbax_delta.ranges import Packs, Records, Unreadable
from orbax_delta.ranges import ReadCount as ReadCount

_TASK_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """How much is read at a time.

    Attributes:
        join_bytes: Most bytes of one read.
        stored_bytes: Of records in a batch, about.
        content_bytes: Of contents in a batch, about.
        batches: On their way or being decoded.
    """

    join_bytes: int
    stored_bytes: int
    content_bytes: int
    batches: int


# A disk is best read in pieces that stay in the processor's cache until they are
# decoded; in a bucket each request costs its own.
_LOCAL = _Pace(
    join_bytes=1 << 20, stored_bytes=8 << 20, content_bytes=8 << 20, batches=5
)
_REMOTE = _Pace(
    join_bytes=16 << 20, stored_bytes=32 << 20, content_bytes=32 << 20, batches=2
)


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
    """A chunk's verified content, or why there is none.

    Attributes:
        request: What was asked for.
        content: Its content.
        error: Why there is none.
        placed: Whether `content` is the buffer that was given for it.
    """

    request: Request
    content: Bytes | None
    error: Unreadable | None
    placed: bool = False


ListKey = tuple[tuple[Ref, ...], int]
"""A list of records, and how many bytes it decodes to."""

Seeds = Mapping[ListKey, Callable[[], Bytes | None]]
"""What lists decode to, as far as it is at hand. Nobody relies on it: what comes of it
is checked like everything else."""

Into = Callable[[Request], Bytes | None]
"""Where the content of a chunk is to be decoded to; None: to memory of its own."""


def _nowhere(_: Request) -> None:
    return None


def list_key(request: Request) -> ListKey:
    """The list of a chunk."""
    row = request.row
    return row.refs, dtypes.source_bytes(row.rule, request.content_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Chunks that follow from one list.

    Attributes:
        requests: The chunks.
        source_bytes: Size of what the list decodes to.
        seed: What its first records decode to, where that is at hand.
        skip: How many records those are.
    """

    requests: Sequence[Request]
    source_bytes: int
    seed: Callable[[], Bytes | None] | None
    skip: int

    @property
    def refs(self) -> Sequence[Ref]:
        """The records that are needed."""
        return self.requests[0].row.refs[self.skip :]

    @property
    def content_bytes(self) -> int:
        return sum(request.content_bytes for request in self.requests)

    def continues(self, list_key: ListKey) -> bool:
        """Whether its list begins with a whole other one."""
        (refs, source_bytes), own = list_key, self.requests[0].row.refs
        longer = self.source_bytes == source_bytes and len(own) > len(refs)
        return longer and bool(refs[0].pack) and own[: len(refs)] == refs

    def after(self, list_key: ListKey, content: Bytes) -> "_Group":
        """The same group, where the content of what it continues is at hand."""
        skip = len(list_key[0])
        if self.skip >= skip:
            return self
        return dataclasses.replace(self, seed=lambda: content, skip=skip)


def fetch(
    packs: Packs,
    wanted: Iterable[Request],
    *,
    executor: Pool,
    count: ReadCount,
    into: Into = _nowhere,
    seeds: Seeds | None = None,
) -> Iterator[Fetched]:
    """The content of every wanted chunk, in an order that suits the packs.

    Args:
        packs: Where the records lie.
        wanted: The chunks.
        executor: Decodes.
        count: Is told what is read.
        into: Called on the pool's threads. What it gives for a chunk whose content is
            not handed out holds anything afterwards.
        seeds: What need not be read; called on the pool's threads.
    """
    pace = _LOCAL if packs.folder.is_local else _REMOTE
    under_way: collections.deque[list[_Decoding]] = collections.deque()
    for groups in _batches(_grouped(wanted, seeds or {}), pace):
        under_way.append(_begin(packs, groups, pace, count, executor, into))
        if len(under_way) == pace.batches:
            yield from _results(under_way.popleft())
    while under_way:
        yield from _results(under_way.popleft())


_Decoding = concurrent.futures.Future[list[Fetched]]


def _begin(
    packs: Packs,
    groups: Sequence[_Group],
    pace: _Pace,
    count: ReadCount,
    executor: Pool,
    into: Into,
) -> list[_Decoding]:
    read = _read(packs, groups, pace, count)
    return [
        executor.submit(_decode_families, task, read, into)
        for task in batches(
            _families(groups),
            lambda family: sum(group.content_bytes for group in family),
            least=_TASK_BYTES,
        )
    ]


def _results(batch: list[_Decoding]) -> Iterator[Fetched]:
    batch.reverse()
    while batch:
        # Contents that nobody holds on to go at once, not with their batch.
        yield from batch.pop().result()


def _read(
    packs: Packs, groups: Iterable[_Group], pace: _Pace, count: ReadCount
) -> Records:
    refs = {ref for group in groups for ref in group.refs if ref.pack}
    return Records(packs, refs, most_bytes=pace.join_bytes, count=count)


def read_ahead(
    packs: Packs, requests: Iterable[Request], refs: Iterable[Ref], count: ReadCount
) -> Records:
    """Begin to read chunks, and other pieces of packs; `content` decodes the former."""
    pace = _LOCAL if packs.folder.is_local else _REMOTE
    listed = (ref for request in requests for ref in request.row.refs if ref.pack)
    return Records(packs, {*listed, *refs}, most_bytes=pace.join_bytes, count=count)


def content(request: Request, read: Records) -> Bytes:
    """The content of one chunk whose records are on their way.

    Raises:
        CorruptionError: It is damaged or missing.
        StorageError: The store failed.
    """
    (fetched,) = _decode_families([_grouped([request], {})], read, _nowhere)
    if fetched.content is None:
        raise fetched.error or CorruptionError(f"{request.where} has no content")
    return fetched.content


def read_one(packs: Packs, request: Request) -> Bytes:
    """The content of one chunk, read now.

    Raises:
        CorruptionError: It is damaged or missing.
        StorageError: The store failed.
    """
    return content(request, read_ahead(packs, [request], (), ReadCount()))


def _grouped(wanted: Iterable[Request], seeds: Seeds) -> list[_Group]:
    """Requests that share a list together, in order of their first record."""
    groups: dict[ListKey, list[Request]] = {}
    for request in wanted:
        groups.setdefault(list_key(request), []).append(request)
    made = []
    for (refs, source_bytes), requests in groups.items():
        skip = _known(refs, source_bytes, seeds)
        seed = seeds[refs[:skip], source_bytes] if skip else None
        made.append(_Group(requests, source_bytes, seed, skip))
    return sorted(made, key=_position)


def _known(refs: tuple[Ref, ...], source_bytes: int, seeds: Seeds) -> int:
    """How many of the first records of a list make what is at hand."""
    if not seeds:
        return 0
    lengths = range(len(refs), 0, -1)
    return next((n for n in lengths if (refs[:n], source_bytes) in seeds), 0)


def _position(group: _Group) -> tuple[str, int, int, int, chunks.Box]:
    row = group.requests[0].row
    first = (group.refs or row.refs)[0]
    return first.pack, first.offset, len(row.refs), row.leaf, row.box


def _families(groups: Iterable[_Group]) -> Iterator[list[_Group]]:
    """Each list with those that continue it, which come next in order of position."""
    family: list[_Group] = []
    for group in groups:
        if family and not group.continues(list_key(family[0].requests[0])):
            yield family
            family = []
        family.append(group)
    if family:
        yield family


def _batches(groups: Iterable[_Group], pace: _Pace) -> Iterator[list[_Group]]:
    batch: list[_Group] = []
    stored = content = 0
    for group in groups:
        batch.append(group)
        stored += sum(ref.length for ref in group.refs)
        content += group.content_bytes
        if stored >= pace.stored_bytes or content >= pace.content_bytes:
            yield batch
            batch, stored, content = [], 0, 0
    if batch:
        yield batch


def _decode_families(
    families: Iterable[Sequence[_Group]], read: Records, into: Into
) -> list[Fetched]:
    families = list(families)
    refs = (ref for family in families for group in family for ref in group.refs)
    opened = Opened(read, (ref for ref in refs if ref.pack))
    made: list[Fetched] = []
    for first, *others in families:
        start = len(made)
        made += _decode_group(first, opened, into)
        request, content = made[start].request, made[start].content
        for group in others:
            if content is not None and request.row.rule is dtypes.Rule.NONE:
                group = group.after(list_key(request), content)
            made += _decode_group(group, opened, into)
    return made


def _decode_group(group: _Group, opened: Opened, into: Into) -> Iterator[Fetched]:
    """The chunks of one list, of which the first is decoded where it belongs."""
    source: Bytes | None = None
    for request in group.requests:
        try:
            out = into(request)
            if source is None:
                direct = out if request.row.rule is dtypes.Rule.NONE else None
                source = _source(group, opened, direct)
            content = _checked(request, source)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"{request.where}: there is no room to decode its "
                f"{request.content_bytes} bytes"
            ) from error
        except (CorruptionError, StorageError) as error:
            named = type(error)(f"{request.where}: {error}")
            yield Fetched(request=request, content=None, error=named)
            continue
        if out is not None and out is not content:
            np.copyto(out, content)
            content = out
        yield Fetched(
            request=request, content=content, error=None, placed=out is not None
        )


def _checked(request: Request, source: Bytes) -> Bytes:
    """The content of a chunk, from what its list decodes to."""
    row = request.row
    content: Bytes | None = source
    if row.rule is not dtypes.Rule.NONE:
        content = dtypes.derive(row.rule, source)
    if content is None:
        raise CorruptionError("its source holds a NaN that no cast is defined for")
    found = records.digest(content)
    if found != row.digest:
        raise CorruptionError(
            f"its content has digest {found.hex()}; expected {row.digest.hex()}"
        )
    return content


def _source(group: _Group, opened: Opened, out: Bytes | None) -> Bytes:
    """What the list of a group decodes to, in `out` where that is given."""
    request = group.requests[0]
    word_bytes = dtypes.source_bytes(request.row.rule, request.leaf.element.word_bytes)
    content = group.seed() if group.seed else None
    own = out
    for number, ref in enumerate(group.refs, group.skip + 1):
        try:
            content = _apply(ref, opened, content, group.source_bytes, word_bytes, own)
        except CorruptionError as error:
            if ref.form is Form.CONSTANT:
                raise
            raise CorruptionError(
                f"record {number} of {len(request.row.refs)} (pack {ref.pack}, offset "
                f"{ref.offset}): {error}"
            ) from error
        own = content  # what a record has made the next one may change
    if content is None:
        raise CorruptionError("the chunk lists no record")
    if out is None or out is content:
        return content
    np.copyto(out, content)
    return out


def _apply(
    ref: Ref,
    opened: Opened,
    base: Bytes | None,
    content_bytes: int,
    word_bytes: int,
    out: Bytes | None,
) -> Bytes:
    if ref.form is Form.CONSTANT:
        return codecs.decode(ref.form, ref.word, None, content_bytes, word_bytes, out)
    record, unpacked = opened.get(ref)
    found = (record.form, record.content_bytes, record.word_bytes)
    if found != (ref.form, content_bytes, word_bytes):
        raise CorruptionError(
            f"the record is (form, content bytes, word bytes) {found}; the row "
            f"expects {(ref.form, content_bytes, word_bytes)}"
        )
    return codecs.decode(
        record.form, record.payload, base, content_bytes, word_bytes, out, unpacked
    )
