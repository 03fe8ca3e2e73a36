"""Files of keys: 64 hexadecimal digits a line, the key to write with first.

Does not belong here: which key a step needs (`keys`).
"""

import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from orbax_delta import localwrites
from orbax_delta.errors import InvalidInputError, WrongKeyError
from orbax_delta.sealing import KEY_BYTES, Key

KEY_LINE = re.compile(r"[0-9a-fA-F]{64}")
_MAX_FILE_BYTES = 1 << 20
_OWNER_ONLY = 0o600


def new_key_file(path: str | os.PathLike[str]) -> Path:
    """Make a file with one new random key, for its owner alone.

    Raises:
        InvalidInputError: There is something of that name, or no folder to hold it.

    Example:
        >>> len(new_key_file(folder / "mine").read_text())
        65
    """
    path = Path(path)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
                file.flush()
                # What is sealed with it outlives a loss of power, and so must this.
                os.fsync(file.fileno())
            if localwrites.SUPPORTED:
                localwrites.sync_folder(path.parent)
        except OSError:
            path.unlink()
            raise
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"could not make a key file: {error}") from error
    return path


def keys_of(path: Path) -> Iterator[Key]:
    """The keys of a file, the one to write with first.

    Raises:
        WrongKeyError: It cannot be read, or is no key file.
    """
    try:
        data = _read(path)
    except (OSError, ValueError) as error:
        raise WrongKeyError(f"could not read the key file {path}: {error}") from error
    # Editors put a mark of the encoding before the first line.
    lines = [line.strip() for line in data.decode("utf-8-sig", "replace").splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found or not all(map(KEY_LINE.fullmatch, found)):
        raise WrongKeyError(
            f"{path} is no key file: expected lines of 64 hexadecimal digits, the "
            "first of them the key to write with. `orbax-delta new-key FILE` makes one"
        )
    for line in found:
        secret = bytes.fromhex(line)
        yield Key(id=Key(id="", secret=secret).fingerprint, secret=secret)


class _Streams:
    """What came out of pipes, such as a shell's `<(command)`: it comes only once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[tuple[int, int], bytes] = {}

    def read(self, path: Path, found: os.stat_result) -> bytes:
        with self._lock:
            mark = (found.st_dev, found.st_ino)
            if mark not in self._read:
                self._read[mark] = _beginning(path)
            return self._read[mark]


_streams = _Streams()


def _read(path: Path) -> bytes:
    found = path.stat()
    if stat.S_ISFIFO(found.st_mode):
        return _streams.read(path, found)
    return _beginning(path)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_FILE_BYTES)
