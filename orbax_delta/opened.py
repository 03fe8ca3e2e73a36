"""Records of a batch, parsed, and the small changes among them unpacked together.

A list of records has many that take microseconds; each step of theirs that lets go of
the interpreter's lock would cost more than itself where several threads decode. Does
not belong here: reading, what a list of records decodes to.
"""

from collections.abc import Iterable

from orbax_delta import codecs, records
from orbax_delta.codecs import Form, Unpacked
from orbax_delta.errors import CorruptionError, StorageError
from orbax_delta.parts import Ref
from orbax_delta.ranges import Records, Unreadable


class Opened:
    """Some records; what is wrong with one is raised when it is asked for.

    Args:
        read: Their bytes, which are waited for.
        refs: Where they lie; constants are none.
    """

    def __init__(self, read: Records, refs: Iterable[Ref]) -> None:
        self._found: dict[Ref, records.Record | Unreadable] = {}
        for ref in refs:
            try:
                self._found[ref] = records.parse_record(read.get(ref))
            except (CorruptionError, StorageError) as error:
                self._found[ref] = error
        self._unpacked = self._together()

    def get(self, ref: Ref) -> tuple[records.Record, Unpacked | None]:
        """A record, and its planes if they are unpacked.

        Raises:
            CorruptionError: It is damaged or missing.
            StorageError: The storage did not give it.
        """
        found = self._found[ref]
        if isinstance(found, CorruptionError | StorageError):
            raise found
        return found, self._unpacked.get(ref)

    def _together(self) -> dict[Ref, Unpacked | None]:
        small = {
            ref: record.sparse
            for ref, record in self._found.items()
            if isinstance(record, records.Record) and record.form is Form.SPARSE
        }
        try:
            unpacked = codecs.unpack_small(list(small.values()))
        except CorruptionError:
            return {}  # which one it is turns out when they are decoded one by one
        return dict(zip(small, unpacked, strict=True))
