"""Plain Orbax checkpoints, written without the whole state in memory.

Orbax's own handler writes the tree and whatever is small, and asks a handler of ours
where arrays that are not in memory belong; these are then written chunk after chunk, as
uncompressed zarr arrays. Does not belong here: reading (`orbaxsources`), when a folder
counts as written.
"""

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from orbax_delta import chunks, leaves, trees
from orbax_delta.background import ordered_map, pool
from orbax_delta.chunks import Box
from orbax_delta.errors import InvalidInputError
from orbax_delta.manifests import VALUE_KINDS, LeafEntry
from orbax_delta.options import DeltaOptions
from orbax_delta.sources import Source, passport
from orbax_delta.unread import Unread

METADATA_FILE = "_METADATA"
"""Which Orbax's Standard and PyTree handlers write."""

PASSPORT = "orbax_delta"
"""What the entry of this package in a checkpoint's metadata is called."""

CHUNK_BYTES = 4 << 20
"""Of a zarr chunk; each is one file."""

# What TensorStore's zarr driver can hold, of the types that numpy does not have itself.
_ZARR_TYPES = frozenset(
    {
        *("bfloat16", "int4", "int2", "float4_e2m1fn", "float8_e3m4", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        "float8_e8m0fnu",
    }
)
_ASIDE = "_METADATA.unfinished"
_MAX_NAME_BYTES = 255
_OWN_FILES = (
    *(METADATA_FILE, _ASIDE, "_CHECKPOINT_METADATA", "_sharding", "_strings.json"),
    *("array_metadatas", "commit_success.txt", "checkpoint_success.txt"),
    "manifest.ocdbt",  # by which Orbax tells a database from folders
)


class _UnreadHandler(ocp.type_handlers.NumpyHandler):
    """Leaves that are not in memory, as what Orbax calls numpy arrays.

    It only notes which are where. They are written when Orbax is done, so that no
    thread of Orbax is at work when something fails.

    Attributes:
        noted: Name of the folder and leaf, one after the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, Unread]] = []

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        """Note them."""
        del args
        names = [info.name for info in infos]
        self.noted += zip(names, values, strict=True)
        return []


def _grid(entry: LeafEntry) -> tuple[int, ...]:
    """Shape of the chunks of a zarr array; no dimension of one may be 0."""
    itemsize = entry.element.dtype.itemsize
    whole = chunks.whole(entry.shape)
    first = next(chunks.cut(whole, max(1, CHUNK_BYTES // itemsize)), whole)
    return tuple(max(1, size) for size in chunks.box_shape(first))


def _write_arrays(noted: Sequence[tuple[str, Unread]], folder: Path) -> None:
    workers = DeltaOptions().worker_count
    with pool(workers) as executor:
        for name, leaf in noted:
            own = folder / name
            own.mkdir(parents=True)
            boxes = grid_boxes(leaf.entry.shape, _grid(leaf.entry))
            put = functools.partial(_put_chunk, own, leaf)
            for _ in ordered_map(executor, put, boxes, window=workers):
                pass
            # Last: without it there is no array, and a chunk that is not there is 0.
            (own / ".zarray").write_text(json.dumps(_zarr_document(leaf.entry)))


def _zarr_document(entry: LeafEntry) -> Mapping[str, Any]:
    dtype = entry.element.dtype
    return {
        "zarr_format": 2,
        "shape": entry.shape,
        "chunks": _grid(entry),
        # TensorStore knows the types of ml_dtypes by their names.
        "dtype": dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str,
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }


def grid_boxes(
    shape: Sequence[int], grid: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The place of each chunk of a zarr array in its grid, and its box.

    >>> list(grid_boxes((3,), (2,)))
    [((0,), ((0, 2),)), ((1,), ((2, 3),))]
    """
    counts = [-(-size // step) for size, step in zip(shape, grid)]
    for index in itertools.product(*map(range, counts)):
        yield (
            index,
            tuple(
                (i * step, min((i + 1) * step, size))
                for i, step, size in zip(index, grid, shape)
            ),
        )


def _put_chunk(folder: Path, leaf: Unread, place: tuple[tuple[int, ...], Box]) -> None:
    index, box = place
    content, grid = leaf.read(box), _grid(leaf.entry)
    if content.shape != grid:
        # Chunks at the edge are as large as the others.
        padded = np.zeros(grid, content.dtype)
        padded[tuple(map(slice, content.shape))] = content
        content = padded
    with (folder / (".".join(map(str, index)) or "0")).open("xb") as file:
        file.write(content.reshape(-1).view(np.uint8).data)


def write(source: Source, folder: Path) -> None:
    """Write a plain Orbax checkpoint to a folder that is not there.

    Raises:
        InvalidInputError: Orbax cannot hold a leaf.
        CorruptionError: A chunk is damaged.
        OSError: The system refuses something.
    """
    _require_names(source)
    paths = [leaf.entry.path for leaf in source.leaves]
    values = [_value(leaf) for leaf in source.leaves]
    tree = trees.rebuild(source.structure, values, paths=paths, where=source.label)
    if not values:
        raise InvalidInputError(f"{source.label} has no leaf; Orbax saves no such tree")
    text = passport(source)
    custom = source.custom_metadata
    metadata = dict(custom) if isinstance(custom, Mapping) else {}
    handlers = ocp.type_handlers
    arrays = _UnreadHandler()
    registry = handlers.create_type_handler_registry(
        (Unread, arrays),
        *(
            (kind, handlers.get_type_handler(kind))
            for kind in (int, float, np.number, jax.Array, str)
        ),
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, type_handler_registry=registry
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(
            epath.Path(folder),
            args=ocp.args.PyTreeSave(
                tree, custom_metadata=metadata | ({PASSPORT: text} if text else {})
            ),
        )
    # Without its metadata half an export is no checkpoint to anybody.
    metadata_file = folder / METADATA_FILE
    aside = metadata_file.rename(folder / _ASIDE)
    _write_arrays(arrays.noted, folder)
    aside.rename(metadata_file)


def _require_names(source: Source) -> None:
    """Orbax makes a folder of each array, named by its path with dots."""
    owners: dict[str, str] = {}
    for leaf in source.leaves:
        name = ".".join(leaf.entry.path)
        if not _is_folder(name):
            raise InvalidInputError(
                f"leaf {leaf.entry.name:.80} would be the folder {name!r:.80} of an "
                "Orbax checkpoint, which cannot be; rename its key, or leave it out"
            )
        owners.setdefault(name, leaf.entry.name)
    for leaf in source.leaves:
        name = ".".join(leaf.entry.path)
        above = itertools.accumulate(name.split("/"), "{}/{}".format)
        for folder in above:
            other = owners.get(folder, leaf.entry.name)
            if other != leaf.entry.name:
                raise InvalidInputError(
                    f"leaves {other} and {leaf.entry.name} have one name in an Orbax "
                    f"checkpoint, {folder!r}, or one lies in the other's folder; "
                    "rename a key, or leave one of them out"
                )


def _is_folder(name: str) -> bool:
    """Whether readers find a folder of this name where Orbax and TensorStore put it."""
    parts = name.split("/")
    try:
        lengths = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:  # a lone surrogate
        return False
    # TensorStore takes a backslash for a slash.
    return (
        parts[0] not in _OWN_FILES
        and not {"", ".", ".."}.intersection(parts)
        and max(lengths) <= _MAX_NAME_BYTES
        and not {"\0", "\\"}.intersection(name)
    )


def _value(leaf: Unread) -> Any:
    """What is given to Orbax for a leaf.

    Raises:
        InvalidInputError: Orbax has nothing like it.
    """
    entry = leaf.entry
    if entry.kind in VALUE_KINDS:
        value = leaves.plain_value(entry)
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            raise _unknown(entry, "an int of more than 64 bits")
        if type(value) is complex:
            raise _unknown(entry, "a Python complex number")
        return value
    if entry.kind == "str":
        text = str(leaves.text_value(entry, leaf.whole()))
        if text.encode(errors="replace").decode() != text:
            raise _unknown(entry, "a text with a lone surrogate")
        return text
    if entry.kind == "bytes":
        raise _unknown(entry, "bytes")
    if entry.kind == "key":
        leaves.key_struct(entry)
        data = jax.device_put(leaf.whole())
        return jax.random.wrap_key_data(data, impl=entry.value)
    is_own = hasattr(ml_dtypes, entry.element.dtype.name)
    if entry.dtype[0] in "<>" or (is_own and entry.dtype not in _ZARR_TYPES):
        raise _unknown(entry, entry.dtype)
    return leaf


def _unknown(entry: LeafEntry, what: str) -> InvalidInputError:
    return InvalidInputError(
        f"leaf {entry.name} is {what}, which no Orbax checkpoint can hold. Leave it "
        "out by choosing other leaves, or export to a delta folder"
    )
