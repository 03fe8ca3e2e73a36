"""Arrays that others have written as zarr, read a stored chunk at a time.

Beside `store` the only module that uses TensorStore: Orbax reads a leaf whole, and a
leaf may be larger than memory. Does not belong here: which arrays there are.
"""

import collections
import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from orbax_delta import chunks
from orbax_delta.chunks import Box
from orbax_delta.errors import CorruptionError

HELD_CHUNKS = 2
"""Stored chunks that are held at least: one ends where the next begins, and two
threads read them at the same time."""

HELD_BYTES = 16 << 20
"""Of stored chunks that are held, where more of them are so small."""

# One chunk is read at a time; each thread more keeps memory of its own.
_CONTEXT = ts.Context(
    {"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}}
)

# What TensorStore's status codes become in Python.
_ERRORS = (ValueError, OSError, IndexError, RuntimeError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a folder holds its arrays.

    Attributes:
        folder: The folder.
        ocdbt: Whether they lie in an OCDBT database there, or in folders of their own.
        zarr3: Whether they are zarr of version 3.
        sparse: Whether a chunk that is not there is one of zeros, and not lost.
    """

    folder: Path
    ocdbt: bool
    zarr3: bool
    sparse: bool

    def spec(self, name: str) -> dict[str, Any]:
        """What TensorStore is asked to open."""
        path = f"{self.folder}/"
        if self.ocdbt:
            base = {"driver": "file", "path": path}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        else:
            kvstore = {"driver": "file", "path": f"{path}{name}/"}
        return {
            "driver": "zarr3" if self.zarr3 else "zarr",
            "kvstore": kvstore,
            "fill_missing_data_reads": self.sparse,
        }


class Arrays:
    """The arrays of a folder; any thread may read."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._opened: dict[str, Any] = {}
        self._held: collections.OrderedDict[tuple[str, Box], np.ndarray] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def chunk(self, name: str, box: Box) -> np.ndarray:
        """A stored chunk of an array; those read last are held.

        Raises:
            CorruptionError: It is not there or cannot be read.
        """
        with self._lock:
            key = name, box
            if key not in self._held:
                self._make_room(box)
                self._held[key] = self._read(name, box)
            self._held.move_to_end(key)
            return self._held[key]

    def _make_room(self, box: Box) -> None:
        # Its size in elements of one byte: few are narrower, and most are wider.
        coming = chunks.element_count(box)
        while len(self._held) >= HELD_CHUNKS and (
            sum(array.nbytes for array in self._held.values()) + coming > HELD_BYTES
        ):
            self._held.popitem(last=False)

    def _read(self, name: str, box: Box) -> np.ndarray:
        try:
            if name not in self._opened:
                spec = ts.Spec(self._layout.spec(name))
                self._opened[name] = ts.open(
                    spec, open=True, read=True, context=_CONTEXT
                ).result()
            index = tuple(slice(start, stop) for start, stop in box)
            made: np.ndarray = self._opened[name][index].read().result()
        except _ERRORS as error:
            raise CorruptionError(
                f"the array {name!r} in {self._layout.folder} cannot be read: "
                f"{error!s:.300}"
            ) from error
        return made
