"""Large local files, written with the system's own calls in a thread.

TensorStore first copies what it is given, in the calling thread and with the
interpreter's lock, which takes longer than the write. Here a file comes about as there:
beside its key, under the name that TensorStore gives to unfinished files, then synced
and renamed. Does not belong here: small files; what two may write at once.
"""

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

SUPPORTED = os.name == "posix"

LEAST_BYTES = 1 << 20
"""Below this a thread costs more than the copy."""

UNFINISHED = ".__lock"
"""What the name of a file ends in until it is whole."""


# IOV_MAX of all systems that have the call.
_MOST_PIECES = 1024

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
    start, skip = 0, 0
    while start < len(pieces):
        some = [memoryview(piece) for piece in pieces[start : start + _MOST_PIECES]]
        some[0] = some[0][skip:]
        written = os.writev(file, some)  # at most 2 GiB, and perhaps less
        for piece in some:
            if written < len(piece):
                break
            written -= len(piece)
            start += 1
            skip = 0
        skip += written


def sync_folder(folder: Path) -> None:
    """Make new names in a folder durable."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
