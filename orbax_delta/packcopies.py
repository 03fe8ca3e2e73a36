"""Packs copied whole from one store to another, byte for byte, and checked both ways.

A pack keeps its name, so that whatever is there already is not copied again. Nothing is
decoded: what a record says of its stored bytes is enough. Does not belong here: which
packs a step needs, pins.
"""

import collections
import dataclasses
import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping

from orbax_delta import filesizes, records
from orbax_delta.background import ordered_map, pool
from orbax_delta.errors import CorruptionError, FormatError, StorageError
from orbax_delta.parts import Row
from orbax_delta.store import Folder

_logger = logging.getLogger("orbax_delta")

PACKS_IN_FLIGHT = 4
"""Each is in memory twice: as it was read, and as it reads back."""

MOST_RECORDS = 500_000
"""Whose places are remembered, at some 150 bytes each; older packs are read again."""

Span = tuple[int, int]
"""Offset and length of a record in its pack."""


def records_of(rows: Iterable[Row]) -> dict[str, set[Span]]:
    """The records that rows need, by their pack."""
    found: dict[str, set[Span]] = collections.defaultdict(set)
    for row in rows:
        for ref in row.refs:
            if ref.pack:
                found[ref.pack].add((ref.offset, ref.length))
    return dict(found)


@dataclasses.dataclass(frozen=True, slots=True)
class _Checked:
    """What is known of a pack that was read whole.

    Attributes:
        spans: Its records.
        damaged: Those whose bytes are wrong, with what is.
    """

    spans: frozenset[Span]
    damaged: Mapping[Span, str]

    def require(self, needed: Collection[Span], where: str) -> None:
        """Whether every record that is needed is there and whole.

        Raises:
            CorruptionError: One is not.
        """
        for span in sorted(needed):
            what = self.damaged.get(span, "" if span in self.spans else "none is there")
            if what:
                raise CorruptionError(
                    f"the record of {span[1]} bytes at {span[0]} of {where}: {what}"
                )


def _check_pack(name: str, data: bytes, where: str) -> _Checked:
    """Look at a whole pack.

    Raises:
        CorruptionError: Its header or index is damaged.
        FormatError: It is no pack.
    """
    pack = memoryview(data)
    try:
        index = records.parse_pack(pack)
    except (CorruptionError, FormatError) as error:
        raise type(error)(f"{where}: {error}") from error
    attempt, _, number = name.split("-")
    if (index.attempt.hex(), str(index.number)) != (attempt, number):
        raise CorruptionError(
            f"{where} is by its header pack {index.number} of attempt "
            f"{index.attempt.hex()}"
        )
    damaged = {}
    for offset, length in index.spans:
        try:
            records.check_record(pack[offset : offset + length])
        except CorruptionError as error:
            damaged[offset, length] = str(error)
    return _Checked(frozenset(index.spans), damaged)


class PackCopier:
    """Brings packs from one folder to another.

    Args:
        source: Where they come from.
        target: Where they go.
        distrusted: Names at the target that do not count as there.
    """

    def __init__(
        self, source: Folder, target: Folder, distrusted: Collection[str] = ()
    ) -> None:
        self._source = source
        self._target = target
        self._distrusted = distrusted
        self._checked: dict[tuple[str, str], _Checked] = {}
        self._remembered = 0
        self._lock = threading.Lock()

    def bring(
        self, needed: Mapping[str, Collection[Span]], *, strict: bool
    ) -> Iterator[int]:
        """Copy what is missing; yields for each pack the bytes written, 0 if there.

        Args:
            needed: Records that are needed, by pack.
            strict: Read what is at the target already: the source is to be deleted.

        Raises:
            CorruptionError: A record that is needed is damaged, or a pack is missing.
            FormatError: A pack is none.
            StorageError: A pack does not read back as it was written.
        """
        names = sorted(needed)
        here = filesizes.pack_sizes(self._source, names)
        there = filesizes.pack_sizes(self._target, names)

        def one(name: str) -> int:
            size = None if name in self._distrusted else there.get(name)
            known = size is not None and size == here.get(name, size)
            # A pack at the target is a copy of what is here: unless that is to go, it
            # is enough to read the one of the two that costs no request.
            at_target = strict or self._target.is_local or name not in here
            looked_at = self._target if at_target else self._source
            if known and self._is_good(looked_at, name, needed[name]):
                return 0
            return self._copy(name, needed[name])

        with pool(PACKS_IN_FLIGHT) as executor:
            yield from ordered_map(executor, one, names, window=PACKS_IN_FLIGHT)

    def _is_good(self, folder: Folder, name: str, needed: Collection[Span]) -> bool:
        """Whether a pack has what is needed; else it is copied anew, or that fails."""
        try:
            self._look_at(folder, name).require(needed, f"pack {folder.url}{name}")
        except (CorruptionError, FormatError) as error:
            if folder is self._target:
                _logger.warning("%s; it is copied anew", error)
            return False
        return True

    def _look_at(self, folder: Folder, name: str) -> _Checked:
        """What is known of a pack; read only if nothing is."""
        with self._lock:
            known = self._checked.get((folder.url, name))
        if known is None:
            data = folder.read(name)
            if data is None:
                raise CorruptionError(f"the pack {folder.url}{name} is missing")
            known = self._learn(folder, name, data)
        return known

    def _learn(self, folder: Folder, name: str, data: bytes) -> _Checked:
        found = _check_pack(name, data, f"pack {folder.url}{name}")
        self._remember(folder, name, found)
        return found

    def _remember(self, folder: Folder, name: str, found: _Checked) -> None:
        """Steps that follow each other share packs: those looked at long ago go."""
        with self._lock:
            if (folder.url, name) not in self._checked:
                self._remembered += len(found.spans)
            self._checked[folder.url, name] = found
            while self._remembered > MOST_RECORDS and len(self._checked) > 1:
                oldest = next(iter(self._checked))
                self._remembered -= len(self._checked.pop(oldest).spans)

    def _copy(self, name: str, needed: Collection[Span]) -> int:
        data = self._source.read(name)
        if data is None:
            raise CorruptionError(f"the pack {self._source.url}{name} is missing")
        found = self._learn(self._source, name, data)
        found.require(needed, f"pack {self._source.url}{name}")
        for (offset, _), what in found.damaged.items():
            _logger.warning(
                "pack %s%s is copied with a damaged record at %d, which the step does "
                "not need: %s",
                self._source.url,
                name,
                offset,
                what,
            )
        self._target.start_write(name, data).result()
        if self._target.read(name) != data:
            raise StorageError(
                f"{self._target.url}{name} does not read back as it was written"
            )
        self._remember(self._target, name, found)
        return len(data)
