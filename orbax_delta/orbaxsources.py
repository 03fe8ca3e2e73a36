"""Plain Orbax checkpoints, read as a source.

Orbax tells which leaves there are and restores the small ones; arrays are read by
their stored chunks (`zarrays`). Does not belong here: steps of this package.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from orbax_delta import chunks, dtypes, leaves, trees
from orbax_delta.chunks import Box
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    OutOfMemoryError,
)
from orbax_delta.hosts import ALONE
from orbax_delta.manifests import VALUE_KINDS, LeafEntry
from orbax_delta.orbaxfolders import METADATA_FILE, PASSPORT, grid_boxes
from orbax_delta.sources import Source, as_saved, read_passport
from orbax_delta.unread import PIECE_BYTES, Piece, Unread, in_pieces
from orbax_delta.zarrays import Arrays, Layout

_SMALL_BYTES = 1 << 20
_KEY_WORDS = (2, 4)


def is_checkpoint(path: Path) -> bool:
    """Whether Orbax's Standard or PyTree handler has written a folder."""
    return (path / METADATA_FILE).is_file()


def source(path: Path) -> Source:
    """A checkpoint of Orbax's Standard or PyTree handler.

    What was exported by this package is the same tree again. Of others a leaf is a
    numpy array, a typed key, a Python number or a text, and nodes are what Orbax makes
    of them: dicts and lists. Arrays are read by their stored chunks, of which a few are
    held (`zarrays`); Orbax itself makes one of each shard that it saves.

    Raises:
        FormatError: It is no such checkpoint.
        CorruptionError: A small leaf of it cannot be read.
        OutOfMemoryError: There is no room for it.
        PermissionError: It must not be read.
    """
    label = f"the Orbax checkpoint {path}"
    try:
        return _source(path, label)
    except (DeltaError, PermissionError):
        raise  # which say nothing of the file
    except MemoryError as error:
        raise OutOfMemoryError(f"{label}: no room to read it ({error})") from error
    except Exception as error:  # of damaged files Orbax raises any kind
        raise FormatError(f"{label} cannot be read: {error!s:.300}") from error


def _source(path: Path, label: str) -> Source:
    metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(path))
    checkpoint = _Checkpoint(path, metadata)
    custom = dict(metadata.custom_metadata or {})
    text = custom.get(PASSPORT)
    if text is not None:
        manifest = read_passport(text, where=label)
        made = [checkpoint.exported(entry) for entry in manifest.leaves]
        return as_saved(manifest, tuple(made), label)
    return Source(
        label=label,
        structure=checkpoint.structure,
        leaves=checkpoint.foreign(),
        custom_metadata=custom or None,
    )


class _Checkpoint:
    """A checkpoint, by what Orbax tells of it.

    Attributes:
        structure: Its tree.
    """

    def __init__(self, path: Path, metadata: Any) -> None:
        self._path = epath.Path(path)
        self._treedef: Any = jtu.tree_structure(metadata.tree)
        flat = trees.flatten(metadata.tree)
        self.structure = flat.structure
        self._found = dict(zip(flat.paths, flat.values, strict=True))
        ocdbt = ocp.type_handlers.is_ocdbt_checkpoint(self._path)
        layout = Layout(
            folder=path, ocdbt=ocdbt, zarr3=metadata.use_zarr3, sparse=_is_sparse(path)
        )
        self._arrays = Arrays(layout)

    def exported(self, entry: LeafEntry) -> Unread:
        """A leaf of which the passport tells what it was."""
        if entry.kind in VALUE_KINDS:
            return Unread(entry=entry)
        metadata = self._found.get(entry.path)
        if metadata is None:
            raise FormatError(
                f"leaf {entry.name} is not in {self._path} any more; it was written "
                "by this package and changed since"
            )
        if entry.kind == "str":
            text = self._restore([(entry.path, ocp.RestoreArgs())])[entry.path]
            return _held(entry, np.frombuffer(_encoded(text), np.uint8))
        if (tuple(metadata.shape), metadata.dtype) != (
            entry.shape,
            entry.element.dtype,
        ):
            raise FormatError(
                f"leaf {entry.name} in {self._path} is {metadata.dtype} "
                f"{tuple(metadata.shape)}; expected {entry.dtype} {entry.shape}, as "
                "this package has written it"
            )
        return self._unread(entry, metadata)

    def foreign(self) -> tuple[Unread, ...]:
        """The leaves of a checkpoint of somebody else."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        as_jax = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=here)
        # Orbax restores what is small together; the metadata show keys as their data.
        small = self._restore(
            [
                (path, as_jax if _may_be_keys(metadata) else ocp.RestoreArgs())
                for path, metadata in self._found.items()
                if _may_be_keys(metadata) or not _is_array(metadata)
            ]
        )
        made = []
        for path, metadata in self._found.items():
            value = small.get(path)
            if not _is_array(metadata):
                made.append(_small(path, _plain(value, metadata)))
            elif value is not None and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                made.append(_small(path, value))
            else:
                dtype = dtypes.element_type(metadata.dtype).name
                shape = tuple(metadata.shape)
                entry = LeafEntry(path=path, kind="numpy", dtype=dtype, shape=shape)
                made.append(self._unread(entry, metadata))
        return tuple(made)

    def _unread(self, entry: LeafEntry, metadata: Any) -> Unread:
        """An array, in pieces of its stored chunks."""
        most = max(1, PIECE_BYTES // entry.element.dtype.itemsize)
        pieces = []
        for _, stored in grid_boxes(entry.shape, metadata.storage.chunk_shape):
            for box in chunks.cut(stored, most):
                read = functools.partial(self._part, metadata.name, stored, box)
                pieces.append(Piece(box=box, read=read))
        return Unread(entry=entry, pieces=tuple(pieces))

    def _part(self, name: str, stored: Box, box: Box) -> np.ndarray:
        return self._arrays.chunk(name, stored)[chunks.slices(box, stored)]

    def _restore(
        self, wanted: Sequence[tuple[trees.Path, Any]]
    ) -> Mapping[trees.Path, Any]:
        """Have Orbax read some leaves, and nothing of the others."""
        how = dict(wanted)
        args = ocp.args.PyTreeRestore(
            item=self._treedef.unflatten(
                [one if path in how else ... for path, one in self._found.items()]
            ),
            restore_args=self._treedef.unflatten(
                [how.get(path, ocp.RestoreArgs()) for path in self._found]
            ),
        )
        try:
            restored = ocp.PyTreeCheckpointHandler().restore(self._path, args=args)
        except PermissionError:
            raise
        except MemoryError as error:
            raise OutOfMemoryError(
                f"the Orbax checkpoint {self._path}: no room to restore it ({error})"
            ) from error
        except Exception as error:  # Orbax raises any kind
            raise CorruptionError(
                f"the Orbax checkpoint {self._path} does not restore: {error!s:.300}"
            ) from error
        values = zip(self._found, jtu.tree_leaves(restored), strict=True)
        return {path: value for path, value in values if path in how}


def _is_sparse(path: Path) -> bool:
    """Whether Orbax has left out chunks of zeros, as its first versions did."""
    document = json.loads((path / METADATA_FILE).read_bytes())
    return not document.get("store_array_data_equal_to_fill_value", False)


def _is_array(metadata: Any) -> bool:
    # A scalar's metadata are an array's, too.
    kinds = ocp.metadata.ArrayMetadata, ocp.metadata.ScalarMetadata
    return isinstance(metadata, kinds[0]) and not isinstance(metadata, kinds[1])


def _may_be_keys(metadata: Any) -> bool:
    if not _is_array(metadata) or metadata.dtype != np.uint32 or not metadata.shape:
        return False
    by_jax = metadata.storage.write_shape is not None
    size = math.prod(metadata.shape) * metadata.dtype.itemsize
    return by_jax and metadata.shape[-1] in _KEY_WORDS and size <= _SMALL_BYTES


def _plain(value: Any, metadata: Any) -> Any:
    if not isinstance(metadata, ocp.metadata.ScalarMetadata):
        return value
    array = np.asarray(value)
    # Of these three types are Python's own numbers; others were numpy's.
    plain = metadata.dtype in (np.int64, np.float64, np.bool_)
    return array.item() if plain else array.astype(metadata.dtype)[()]


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _held(entry: LeafEntry, array: np.ndarray) -> Unread:
    """A small leaf that has been read."""
    return in_pieces(
        entry, lambda box: array[chunks.slices(box, chunks.whole(array.shape))]
    )


def _small(path: trees.Path, value: Any) -> Unread:
    """A leaf that is in memory."""
    (leaf,) = leaves.snapshot(value, ALONE).leaves
    entry = dataclasses.replace(leaf.entry, path=path)
    if not leaf.shards:
        return Unread(entry=entry)
    (_, content), *_ = leaf.shards
    return _held(entry, np.asarray(content))
