"""Large local files, written with the system's own calls in a thread.

TensorStore first copies what it is given, in the calling thread and with the
interpreter's lock, which takes longer than the write. Here a file comes about as there:
beside its key, under the name that TensorStore gives to unfinished files, then synced
and renamed. Does not belong here: small files; what two may write at once.
"""

import collections
import concurrent.futures
import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path

SUPPORTED = os.name == "posix"

LEAST_BYTES = 1 << 20
"""Below this a thread costs more than the copy."""

UNFINISHED = ".__lock"
"""What the name of a file ends in until it is whole."""


# Of one call, by Linux and macOS; the latter refuses 2 GiB as well.
_MOST_PIECES = 1024
_MOST_BYTES = 1 << 30

Data = bytes | Sequence[bytes | memoryview]
"""What a file is to hold, whole or in pieces."""


def joined(data: Data) -> bytes:
    """Data in one piece."""
    return data if isinstance(data, bytes) else b"".join(data)


def pays(data: Data) -> bool:
    """Whether there is enough of it, on a system that has the calls."""
    pieces = [data] if isinstance(data, bytes) else data
    return SUPPORTED and sum(map(len, pieces)) >= LEAST_BYTES


def start(path: str, data: Data) -> concurrent.futures.Future[None]:
    """Begin to write a file that nobody else writes; it is durable with the result.

    The result raises `OSError` where the system refuses; nothing is then left behind.
    """
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            _write(Path(path), data)
        except BaseException as error:  # noqa: BLE001 # told to who waits for it
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="orbax_delta_write").start()
    return future


def _write(path: Path, data: Data) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + UNFINISHED)
    try:
        with partial.open("wb", buffering=0) as file:
            _write_all(file.fileno(), [data] if isinstance(data, bytes) else data)
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def _write_all(file: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write pieces as they lie, without a buffer, which would copy them."""
    left = collections.deque(memoryview(piece) for piece in pieces if len(piece))
    while left:
        some, size = [], 0
        for piece in itertools.islice(left, _MOST_PIECES):
            some.append(piece[: _MOST_BYTES - size])
            size += len(some[-1])
        written = os.writev(file, some)  # perhaps less
        if not written:
            raise OSError(errno.EIO, "the system writes nothing more")
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = left[0][written:]


def sync_folder(folder: Path) -> None:
    """Make new names in a folder durable."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
