"""Programs and libraries outside Orbax that save states too, as far as they are there.

Each is used as its documentation says: the whole state goes in, as arrays or as a file
of their bytes, and comes out again. None of them waits for the disk. Codecs of
differences have the state before in memory, for the save and for the restore.
"""

import importlib.util
import os
import pathlib
import shutil
import struct
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from counting import bits

Leaves = Sequence[Any]


class Peer(Protocol):
    """Something that keeps the states of a run.

    Attributes:
        needs: Module, or program, that it comes with.
        install: How to get it.
    """

    needs: ClassVar[str]
    install: ClassVar[str]

    def __init__(self, folder: pathlib.Path, scratch: pathlib.Path) -> None:
        """Starts empty; `folder` is counted, `scratch` is not."""

    def put(self, step: int, leaves: Leaves) -> None:
        """Saves a state."""

    def get(self, step: int) -> Sequence[np.ndarray]:
        """Returns the bits of a state's leaves, one row each."""


def missing(peer: type[Peer]) -> bool:
    """Whether neither a module nor a program of that name is at hand."""
    return not (importlib.util.find_spec(peer.needs) or shutil.which(peer.needs))


def joined(leaves: Leaves, path: pathlib.Path) -> None:
    """Writes the bytes of all leaves into one file."""
    with path.open("wb") as file:
        for leaf in leaves:
            file.write(bits(leaf).view(np.uint8))


def parted(data: bytes | bytearray, like: Leaves) -> list[np.ndarray]:
    """Returns the bits of leaves out of the bytes of all."""
    found, offset = [], 0
    for leaf in like:
        view = np.frombuffer(data, f"u{leaf.dtype.itemsize}", leaf.size, offset)
        found.append(view)
        offset += leaf.nbytes
    return found


class _Differences:
    """A file for each state: of each leaf what a codec makes of it and the one before.

    The first state is not coded; nothing of it is counted.
    """

    def __init__(self, folder: pathlib.Path, scratch: pathlib.Path) -> None:
        self._folder = folder
        self._states: list[list[np.ndarray]] = []
        self._kinds: list[str] = []

    def encode(self, new: np.ndarray, old: np.ndarray, kind: str) -> bytes:
        raise NotImplementedError

    def decode(self, data: bytes, old: np.ndarray, kind: str) -> np.ndarray:
        raise NotImplementedError

    def put(self, step: int, leaves: Leaves) -> None:
        self._kinds = [str(leaf.dtype) for leaf in leaves]
        self._states.append([bits(leaf) for leaf in leaves])
        if step:
            old, new = self._states[-2:]
            with (self._folder / f"{step}").open("wb") as file:
                for pair in zip(new, old, self._kinds, strict=True):
                    data = self.encode(*pair)
                    file.write(struct.pack("<Q", len(data)) + data)

    def get(self, step: int) -> Sequence[np.ndarray]:
        found = []
        with (self._folder / f"{step}").open("rb") as file:
            for old, kind in zip(self._states[step - 1], self._kinds, strict=True):
                (length,) = struct.unpack("<Q", file.read(8))
                found.append(self.decode(file.read(length), old, kind))
        return found


class ZipNN(_Differences):
    """ZipNN's coder of byte groups on the exclusive or with the state before."""

    needs, install = "zipnn", "pip install zipnn"

    def _coder(self, kind: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about itself
            import zipnn

        kind = kind if kind in ("float32", "bfloat16") else "float32"
        return zipnn.ZipNN(bytearray_dtype=kind, threads=os.cpu_count() or 1)

    def encode(self, new: np.ndarray, old: np.ndarray, kind: str) -> bytes:
        data = bytearray((new ^ old).view(np.uint8))
        # Its coder takes no leaf smaller than a few groups.
        return bytes(data if new.nbytes < 4096 else self._coder(kind).compress(data))

    def decode(self, data: bytes, old: np.ndarray, kind: str) -> np.ndarray:
        if old.nbytes >= 4096:
            data = self._coder(kind).decompress(data)
        return np.frombuffer(data, old.dtype) ^ old


class Z4ai(_Differences):
    """z4ai's coder of a state against the one before."""

    needs, install = "z4ai", "pip install z4ai"

    def encode(self, new: np.ndarray, old: np.ndarray, kind: str) -> bytes:
        import z4ai

        return z4ai.compress_delta(new.tobytes(), old.tobytes(), dtype=kind)

    def decode(self, data: bytes, old: np.ndarray, kind: str) -> np.ndarray:
        import z4ai

        return np.frombuffer(z4ai.decompress_delta(data, old.tobytes()), old.dtype)


class TorchSave:
    """torch.save of a dictionary of tensors."""

    needs, install = "torch", "pip install torch"

    def __init__(self, folder: pathlib.Path, scratch: pathlib.Path) -> None:
        self._folder = folder

    def put(self, step: int, leaves: Leaves) -> None:
        import torch

        torch.save(_tensors(leaves), self._folder / f"{step}.pt")

    def get(self, step: int) -> Sequence[np.ndarray]:
        import torch

        tensors = torch.load(self._folder / f"{step}.pt", weights_only=True)
        return [_tensor_bits(tensor) for tensor in tensors.values()]


class TorchDcp:
    """torch.distributed.checkpoint in one process."""

    needs, install = "torch", "pip install torch"

    def __init__(self, folder: pathlib.Path, scratch: pathlib.Path) -> None:
        self._folder = folder
        self._like: dict[str, Any] = {}

    def put(self, step: int, leaves: Leaves) -> None:
        self._like = _tensors(leaves)
        self._call("save", self._like, step)

    def get(self, step: int) -> Sequence[np.ndarray]:
        import torch

        found = {name: torch.empty_like(like) for name, like in self._like.items()}
        self._call("load", found, step)
        return [_tensor_bits(tensor) for tensor in found.values()]

    def _call(self, name: str, tensors: Mapping[str, Any], step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that this is one process
            import torch.distributed.checkpoint as dcp

            getattr(dcp, name)(tensors, checkpoint_id=self._folder / f"{step}")


def _tensors(leaves: Leaves) -> dict[str, Any]:
    import torch

    return {f"{i:05d}": torch.from_dlpack(leaf) for i, leaf in enumerate(leaves)}


def _tensor_bits(tensor: Any) -> np.ndarray:
    import torch

    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    array = tensor.reshape(-1).view(words[tensor.element_size()]).numpy()
    return array.view(f"u{array.dtype.itemsize}")


class Icechunk:
    """icechunk: an array of Zarr for each leaf, a snapshot for each state."""

    needs, install = "icechunk", "pip install icechunk"

    def __init__(self, folder: pathlib.Path, scratch: pathlib.Path) -> None:
        import icechunk

        storage = icechunk.local_filesystem_storage(str(folder / "repository"))
        self._repository = icechunk.Repository.create(storage)
        self._snapshots: list[str] = []
        self._count = 0

    def put(self, step: int, leaves: Leaves) -> None:
        import zarr

        self._count = len(leaves)
        session = self._repository.writable_session("main")
        for index, leaf in enumerate(leaves):
            name, data = f"{index:05d}", bits(leaf)
            if step:
                zarr.open_array(session.store, path=name)[:] = data
            else:
                zarr.create_array(session.store, name=name, data=data)
        self._snapshots.append(session.commit(f"{step}"))

    def get(self, step: int) -> Sequence[np.ndarray]:
        import zarr

        snapshot = self._snapshots[step]
        store = self._repository.readonly_session(snapshot_id=snapshot).store
        names = (f"{index:05d}" for index in range(self._count))
        return [zarr.open_array(store, path=name, mode="r")[:] for name in names]


class _OfFiles:
    """Programs that are given a file of all bytes."""

    def __init__(self, folder: pathlib.Path, scratch: pathlib.Path) -> None:
        self._folder, self._scratch = folder, scratch
        self._like: Leaves = ()

    def _file(self, step: int) -> pathlib.Path:
        return self._scratch / f"state-{step}"

    def _run(self, *command: str | pathlib.Path) -> bytes:
        nowhere = self._scratch / "home"
        settings = {
            "BORG_BASE_DIR": str(nowhere),
            "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
        }
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            env=os.environ | settings,
            cwd=self._scratch,
        )
        return done.stdout


class Borg(_OfFiles):
    """borg with chunks of about 64 KiB by content, zstd 1, without encryption."""

    needs, install = "borg", "apt-get install borgbackup"

    def put(self, step: int, leaves: Leaves) -> None:
        repository, self._like = self._folder / "repository", leaves
        if step == 0:
            self._run("borg", "init", "-e", "none", repository)
        joined(leaves, self._scratch / "state")
        chunks = ("--chunker-params", "12,20,16,4095", "--compression", "zstd,1")
        self._run("borg", "create", *chunks, f"{repository}::{step}", "state")

    def get(self, step: int) -> Sequence[np.ndarray]:
        archive = f"{self._folder / 'repository'}::{step}"
        data = self._run("borg", "extract", "--stdout", archive, "state")
        return parted(data, self._like)


class ZstdPatch(_OfFiles):
    """zstd --patch-from the file of the state before, which has to be kept."""

    needs, install = "zstd", "apt-get install zstd"

    def put(self, step: int, leaves: Leaves) -> None:
        self._like = leaves
        joined(leaves, self._file(step))
        if step:
            self._zstd(step, "-1", self._file(step), "-o", self._folder / f"{step}.zst")

    def get(self, step: int) -> Sequence[np.ndarray]:
        data = self._zstd(step, "-d", "--stdout", self._folder / f"{step}.zst")
        return parted(data, self._like)

    def _zstd(self, step: int, *command: str | pathlib.Path) -> bytes:
        before = self._file(step - 1)
        return self._run("zstd", "-q", "--long=31", f"--patch-from={before}", *command)


PEERS: Mapping[str, Callable[[pathlib.Path, pathlib.Path], Peer]] = {
    "ZipNN on XOR": ZipNN,
    "z4ai delta": Z4ai,
    "torch.save": TorchSave,
    "torch DCP": TorchDcp,
    "icechunk": Icechunk,
    "borg, 64 KiB": Borg,
    "zstd --patch-from": ZstdPatch,
}
