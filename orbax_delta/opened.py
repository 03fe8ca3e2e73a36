"""Records of a batch; the small changes among them are unpacked together, beforehand.

A list of records has many that take microseconds; each step of theirs that lets go of
the interpreter's lock would cost more than itself where several threads decode. Does
not belong here: reading, what a list of records decodes to.
"""

import contextlib
from collections.abc import Iterable

from orbax_delta import codecs, records
from orbax_delta.codecs import Form, Unpacked
from orbax_delta.errors import CorruptionError, StorageError
from orbax_delta.parts import Ref
from orbax_delta.ranges import Records

_MOST = 1024
"""Records that are opened beforehand: a hostile list may have very many."""


class Opened:
    """Some records.

    Args:
        read: Their bytes.
        refs: Where they lie.
    """

    def __init__(self, read: Records, refs: Iterable[Ref]) -> None:
        self._read = read
        self._ahead: dict[Ref, tuple[records.Record, Unpacked | None]] = {}
        found: dict[Ref, records.Record] = {}
        for ref in refs:
            if ref.form is Form.SPARSE and ref not in found and len(found) < _MOST:
                with contextlib.suppress(CorruptionError, StorageError, MemoryError):
                    found[ref] = self._parsed(ref)
        alike = {ref: r for ref, r in found.items() if r.form is Form.SPARSE}
        # What is wrong is told by who opens the record by itself, with its place.
        with contextlib.suppress(CorruptionError, MemoryError):
            unpacked = codecs.unpack_small([record.sparse for record in alike.values()])
            opened = zip(alike.values(), unpacked, strict=True)
            self._ahead = dict(zip(alike, opened, strict=True))

    def get(self, ref: Ref) -> tuple[records.Record, Unpacked | None]:
        """A record, and its planes if they are unpacked.

        Raises:
            CorruptionError: It is damaged or missing.
            StorageError: The storage did not give it.
        """
        return self._ahead.get(ref) or (self._parsed(ref), None)

    def _parsed(self, ref: Ref) -> records.Record:
        return records.parse_record(self._read.get(ref))
