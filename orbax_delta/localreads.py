"""Ranges of local files, read with the system's own calls.

TensorStore reads a range into memory of its own and copies it when asked for its value,
which is a third of the work of a restore. Here a range is read once, by the thread that
needs it, and the system is told of all ranges beforehand. Does not belong here: what is
written; what lies in buckets.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator

SUPPORTED = hasattr(os, "pread") and hasattr(os, "posix_fadvise")


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """What was read, with the attributes that TensorStore gives it.

    Attributes:
        state: `value`, or `missing` where there is no such file.
        value: The bytes.
    """

    state: str
    value: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LocalRead:
    """A range of a file.

    It keeps no file open: thousands may be under way.

    Attributes:
        path: The file.
        offset: Where the range begins.
        length: Bytes of it, at least one.
    """

    path: str
    offset: int
    length: int

    def announce(self) -> None:
        """Have the system begin to read it, if it is there and can."""
        with contextlib.suppress(OSError), _opened(self.path) as file:
            os.posix_fadvise(file, self.offset, self.length, os.POSIX_FADV_WILLNEED)

    def result(self) -> Value:
        """Read it.

        Raises:
            OSError: The system does not give it.
            ValueError: The file ends before; `OUT_OF_RANGE`, as TensorStore says.
        """
        try:
            with _opened(self.path) as file:
                return Value("value", self._read(file))
        except FileNotFoundError:
            return Value("missing", b"")

    def _read(self, file: int) -> bytes:
        parts = []
        start, stop = self.offset, self.offset + self.length
        while start < stop:
            # The system gives at most 2 GiB at once.
            part = os.pread(file, stop - start, start)
            if not part:
                raise ValueError(
                    f"OUT_OF_RANGE: the file ends at {start} or before; expected "
                    f"{stop} bytes"
                )
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
