"""Stored records on their way: ranged reads that neighbouring records share.

Reads are begun together and waited for one by one, by whoever needs a record first.
Does not belong here: what a record means.
"""

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence

from orbax_delta.errors import CorruptionError, StorageError
from orbax_delta.parts import Ref
from orbax_delta.records import RECORD_HEAD_BYTES
from orbax_delta.sealing import Key, RecordPlace
from orbax_delta.store import Folder, Pending

_JOIN_GAP_BYTES = 64 << 10

Unreadable = CorruptionError | StorageError
"""Why there is no content: damage, or a storage that did not give it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """Where records lie, and what opens them.

    Attributes:
        folder: Folder of the packs.
        key: Key that the records are sealed with; None: they are not.
    """

    folder: Folder
    key: Key | None = None

    @property
    def url(self) -> str:
        """Location of the folder."""
        return self.folder.url

    def head_of(self, ref: Ref) -> Ref:
        """What must be read of a record to see its header."""
        if self.key is not None:
            return ref  # nothing of it opens before all of it
        return ref._replace(length=RECORD_HEAD_BYTES)

    def open(self, ref: Ref, stored: memoryview) -> memoryview:
        """The record that lies in a place.

        Raises:
            CorruptionError: It is sealed and does not open.
        """
        if self.key is None:
            return stored
        return self.key.open_record(RecordPlace.of(ref.pack, ref.offset), stored)


class ReadCount:
    """What a reader asked of the store.

    Attributes:
        requests: Ranged reads.
        bytes: Bytes of them.
        records: Records that were wanted.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self.records = 0


class _MissingPackError(CorruptionError):
    """The pack is not there, so that no other range of it can be read either."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    pack: str
    start: int
    stop: int


class Records:
    """The bytes of some records, whose reads have begun.

    Args:
        packs: Where they lie.
        refs: The records.
        most_bytes: Of one read.
        count: Is told of every read.

    Attributes:
        packs: As given.
    """

    def __init__(
        self, packs: Packs, refs: Iterable[Ref], *, most_bytes: int, count: ReadCount
    ) -> None:
        self.packs = packs
        self._read_of: dict[Ref, _Read] = {}
        for span, members in _joined(refs, most_bytes):
            read = _Read(packs.folder, span, members)
            self._read_of.update(dict.fromkeys(members, read))
            count.requests += 1
            count.bytes += span.stop - span.start
            count.records += len(members)

    def get(self, ref: Ref) -> memoryview:
        """The bytes of one record; waits for them.

        Raises:
            CorruptionError: Its pack is missing or ends before, or it does not open.
            StorageError: The storage did not give it.
        """
        return self.packs.open(ref, self._read_of[ref].get(ref))


class _Read:
    """One read under way; any thread may wait for it."""

    def __init__(self, packs: Folder, span: _Range, members: Sequence[Ref]) -> None:
        self._packs = packs
        self._span = span
        self._members = members
        self._pending: Pending | StorageError
        try:
            self._pending = packs.start_read(
                span.pack, span.start, span.stop - span.start
            )
        except StorageError as error:
            self._pending = error  # told to whoever needs it, like one that comes later
        self._lock = threading.Lock()
        self._data: memoryview | Unreadable | None = None
        self._halves: dict[Ref, _Read] = {}

    def get(self, ref: Ref) -> memoryview:
        with self._lock:
            if self._data is None:
                self._data = self._settle()
                self._halves = self._split(self._data)
        if ref in self._halves:
            return self._halves[ref].get(ref)
        if isinstance(self._data, CorruptionError | StorageError):
            raise self._data
        start = ref.offset - self._span.start
        return self._data[start : start + ref.length]

    def _settle(self) -> memoryview | Unreadable:
        """The bytes of the range; what is wrong is kept for the chunks that need it."""
        span, where = self._span, f"{self._packs.url}{self._span.pack}"
        if isinstance(self._pending, StorageError):
            return self._pending
        try:
            got = self._pending.result()
        except StorageError as error:
            # TensorStore says that a range lies past the end of a file in words only.
            if "OUT_OF_RANGE" in str(error):
                return CorruptionError(f"the pack {where} ends before byte {span.stop}")
            return error  # a bad sector spoils one pack, not the others
        if got.state != "value":
            return _MissingPackError(f"the pack {where} is missing")
        data = memoryview(got.value)  # once: TensorStore copies whenever it is asked
        if len(data) != span.stop - span.start:
            return CorruptionError(
                f"the pack {where} gave {len(data)} bytes at {span.start}; expected "
                f"{span.stop - span.start}"
            )
        return data

    def _split(self, data: memoryview | Unreadable) -> dict[Ref, "_Read"]:
        """Where a read failed, reads of its halves, to find what of it is spoilt.

        A pack that is cut off, or a bad sector, is no reason to miss the records
        beside it that were only read along.
        """
        whole = isinstance(data, memoryview | _MissingPackError)
        # Elsewhere a storage that fails has been asked many times, for minutes.
        down = isinstance(data, StorageError) and "://" in self._packs.url
        if whole or down or len(self._members) < 2:
            return {}
        middle = len(self._members) // 2
        halves: dict[Ref, _Read] = {}
        for half in (self._members[:middle], self._members[middle:]):
            stop = max(ref.offset + ref.length for ref in half)
            span = _Range(self._span.pack, half[0].offset, stop)
            halves.update(dict.fromkeys(half, _Read(self._packs, span, half)))
        return halves


def _joined(refs: Iterable[Ref], most_bytes: int) -> Iterator[tuple[_Range, list[Ref]]]:
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
            and max(stop, end) - start <= most_bytes
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
