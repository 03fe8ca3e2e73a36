"""Packs of one save: records collected and put as packs fill, few in flight.

A leaf that fills a pack begins one and ends one, so that dead bytes rarely have live
neighbours. The same records in the same order give the same packs.
"""

import collections

from orbax_delta.records import PackBuilder
from orbax_delta.store import Folder, Pending

_MAX_IN_FLIGHT = 2


class PackWriter:
    """Puts the packs of one process of one attempt.

    Attributes:
        names: Packs so far, in order.
        written_bytes: Their total size.
        pack_bytes: A pack is put once it holds this many.
    """

    def __init__(
        self, folder: Folder, *, attempt: bytes, process: int, pack_bytes: int
    ) -> None:
        self._folder = folder
        self._attempt = attempt
        self._process = process
        self.pack_bytes = pack_bytes
        self._in_flight: collections.deque[Pending] = collections.deque()
        self.names: list[str] = []
        self.written_bytes = 0
        self._builder: PackBuilder | None = None

    def add(self, record: bytes) -> tuple[str, int]:
        """Append a record; returns its pack and offset."""
        if self._builder is None:
            number = len(self.names)
            self._builder = PackBuilder(self._attempt, number)
            self.names.append(f"{self._attempt.hex()}-p{self._process}-{number}")
        offset, _ = self._builder.add(record)
        name = self.names[-1]
        if self._builder.size_bytes >= self.pack_bytes:
            self.cut()
        return name, offset

    def cut(self) -> None:
        """End the current pack, if any, and begin to put it."""
        if self._builder is None:
            return
        data = self._builder.finish()
        self._builder = None
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._in_flight.popleft().result()
        self._in_flight.append(self._folder.start_write(self.names[-1], data))
        self.written_bytes += len(data)

    def finish(self) -> None:
        """Put what is left and wait until every pack is durable."""
        self.cut()
        self.drain()

    def drain(self) -> None:
        """Wait for all packs in flight, also when one of them fails.

        Raises:
            StorageError: A failure, once nothing is in flight any more.
        """
        try:
            while self._in_flight:
                self._in_flight.popleft().result()
        finally:
            if self._in_flight:
                self.drain()
