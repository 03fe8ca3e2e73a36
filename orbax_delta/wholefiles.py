"""Files for people and other programs, written as a whole.

Who reads one meanwhile sees the old or the new one, and a full disk leaves the old one.
Does not belong here: files of a root or its store (`store`).
"""

import contextlib
import os
import secrets
from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """Make `data` the content of a file on this machine.

    Args:
        path: Where; its folder must be there.
        data: What it is to hold.

    Raises:
        OSError: The system refuses it; what was there still is.

    Example:
        >>> replace(Path("/metrics/run.prom"), b"up 1")  # doctest: +SKIP
    """
    # Hidden and of another ending: nobody must take it for one of the files.
    beside = path.with_name(f".{path.name:.50}.{secrets.token_hex(8)}.tmp")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
