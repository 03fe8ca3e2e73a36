"""Packs of one save: records collected and put as packs fill, few in flight.

A leaf that fills a pack begins one and ends one, so that dead bytes rarely have live
neighbours. The same records in the same order give the same packs.
"""

import collections
import enum
import time

from orbax_delta.ranges import Packs
from orbax_delta.records import PackBuilder, Pieces
from orbax_delta.store import Pending

_MAX_IN_FLIGHT = 2


class Lifetime(enum.IntEnum):
    """For how many saves a record is likely needed.

    Those alike lie in packs of their own: what is soon dead does not stay on the disk
    because of what lies beside it.
    """

    SHORT = 0
    CYCLE = 1
    LONG = 2


class PackWriter:
    """Puts the packs of one process of one attempt.

    Attributes:
        sizes: Bytes of the packs that were put, by name.
        pack_bytes: A pack is put once it holds this many.
        put_seconds: Time spent on putting packs together and waiting for the storage.
    """

    def __init__(
        self, packs: Packs, *, attempt: bytes, process: int, pack_bytes: int
    ) -> None:
        self._packs = packs
        self._attempt = attempt
        self._process = process
        self.pack_bytes = pack_bytes
        self._in_flight: collections.deque[Pending] = collections.deque()
        self.sizes: dict[str, int] = {}
        self.put_seconds = 0.0
        self._begun = 0
        self._open: dict[Lifetime, PackBuilder] = {}

    def add(
        self, record: Pieces, lifetime: Lifetime = Lifetime.LONG
    ) -> tuple[str, int, int]:
        """Append a record; returns its pack, offset and length there."""
        builder = self._open.get(lifetime)
        if builder is None:
            builder = self._open[lifetime] = PackBuilder(
                self._attempt,
                self._begun,
                process=self._process,
                key=self._packs.key,
            )
            self._begun += 1
        offset, length = builder.add(record)
        if builder.size_bytes >= self.pack_bytes:
            self._put(lifetime)
        return self._name(builder), offset, length

    def _name(self, builder: PackBuilder) -> str:
        return f"{self._attempt.hex()}-p{self._process}-{builder.number}"

    def cut(self, *, least: int = 0) -> None:
        """End the packs that are open, and begin to put them.

        Args:
            least: Those that hold fewer bytes stay open.
        """
        for lifetime in sorted(self._open):
            if self._open[lifetime].size_bytes >= least:
                self._put(lifetime)

    def _put(self, lifetime: Lifetime) -> None:
        start = time.perf_counter()
        builder = self._open.pop(lifetime)
        data = builder.finish()
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._in_flight.popleft().result()
        name = self._name(builder)
        self._in_flight.append(self._packs.folder.start_write(name, data))
        self.sizes[name] = sum(map(len, data))
        self.put_seconds += time.perf_counter() - start

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
