"""Folders of safetensors files, in the layout of Hugging Face, written.

`model.safetensors`, or `model-00001-of-0000N.safetensors` and an index. Chunks go to
their places as they are decoded. Does not belong here: the bytes of a file
(`tensorfiles`), reading (`tensorsources`), when a folder counts as written.
"""

import base64
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from orbax_delta import tensorfiles
from orbax_delta.background import ordered_map, pool
from orbax_delta.errors import InvalidInputError
from orbax_delta.manifests import ARRAY_KINDS
from orbax_delta.options import DeltaOptions
from orbax_delta.sources import Source, passport
from orbax_delta.tensorfiles import DTYPES, LENGTH_BYTES, MAX_HEADER_BYTES, Tensor
from orbax_delta.unread import Piece, Unread, runs

Name = Callable[[tuple[str, ...]], str]
"""From the path of a leaf to the name of its tensor."""

SHARD_BYTES = 5_000_000_000
"""Of a file, as Hugging Face has it."""

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
PASSPORT = "orbax_delta"
"""What the header's entry of this package is called."""

TEXT_KINDS = ("str", "bytes")

_MAX_TEXT_BYTES = 1 << 20
# What readers of Hugging Face ask of every file: how tensors are to be understood.
_COMMON = {"format": "pt"}


def dotted(path: tuple[str, ...]) -> str:
    """The name that tensors have by default.

    >>> dotted(("params", "layers", "0", "kernel"))
    'params.layers.0.kernel'
    """
    return ".".join(path)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """What is to be written.

    Attributes:
        files: Tensors of each file, by its name, with the leaves that they are made of.
        metadata: What goes into the header of the first file.
    """

    files: Mapping[str, Sequence[tuple[Tensor, Unread]]]
    metadata: Mapping[str, str]


def plan(source: Source, *, shard_bytes: int, name: Name) -> TensorPlan:
    """Give every leaf a tensor and every tensor a place; reads only texts.

    Raises:
        InvalidInputError: A leaf cannot be a tensor, two have one name, `name` fails,
            `shard_bytes` is not positive, or a header would be longer than readers
            take.
        CorruptionError: A text is damaged.
    """
    if shard_bytes < 1:
        raise InvalidInputError(f"shard_bytes is {shard_bytes}; expected 1 or more")
    named = [
        (_tensor(leaf, name), leaf)
        for leaf in source.leaves
        if leaf.entry.kind in ARRAY_KINDS and leaf.entry.kind not in TEXT_KINDS
    ]
    _require_distinct(named)
    shards = _shards(named, shard_bytes)
    if len(shards) == 1:
        files = {f"model{SUFFIX}": shards[0]}
    else:
        files = {
            f"model-{number:05}-of-{len(shards):05}{SUFFIX}": shard
            for number, shard in enumerate(shards, 1)
        }
    metadata = _described(source, named)
    for number, shard in enumerate(files.values()):
        header = tensorfiles.encode_header(
            [tensor for tensor, _ in shard], _COMMON if number else metadata
        )
        if len(header) > LENGTH_BYTES + MAX_HEADER_BYTES:
            raise InvalidInputError(
                f"{source.label} needs a header of {len(header):,} bytes; readers of "
                f"safetensors take {MAX_HEADER_BYTES:,}. Give a smaller shard_bytes, "
                "keep fewer custom metadata, or leave leaves out"
            )
    return TensorPlan(files=files, metadata=metadata)


def _tensor(leaf: Unread, name: Name) -> Tensor:
    entry = leaf.entry
    if entry.dtype not in DTYPES:
        raise InvalidInputError(
            f"leaf {entry.name} is {entry.dtype}, which no safetensors file can hold; "
            f"it can hold {', '.join(DTYPES)}. Leave the leaf out by choosing others, "
            "or export to a plain Orbax checkpoint or a delta folder"
        )
    try:
        made = name(entry.path)
    except Exception as error:
        raise InvalidInputError(
            f"the function of names fails at leaf {entry.name}, whose path is "
            f"{entry.path!r}: {type(error).__name__}: {error!s:.200}"
        ) from error
    if not _is_name(made):
        raise InvalidInputError(
            f"the name of leaf {entry.name} is {made!r:.80}; expected a text that is "
            "not __metadata__ and can be written in UTF-8"
        )
    return Tensor(name=made, dtype=entry.dtype, shape=entry.shape)


def _is_name(made: object) -> bool:
    if type(made) is not str or made == "__metadata__":
        return False
    # A lone surrogate is a text to Python alone.
    return made.encode(errors="replace").decode() == made


def _require_distinct(named: Sequence[tuple[Tensor, Unread]]) -> None:
    owners: dict[str, str] = {}
    for tensor, leaf in named:
        other = owners.setdefault(tensor.name, leaf.entry.name)
        if other != leaf.entry.name:
            raise InvalidInputError(
                f"leaves {other} and {leaf.entry.name} would both be the tensor "
                f"{tensor.name!r}; give another function of names"
            )


def _shards(
    named: Sequence[tuple[Tensor, Unread]], shard_bytes: int
) -> list[Sequence[tuple[Tensor, Unread]]]:
    """Tensors by file; one that is larger than a file may be has its own."""
    shards: list[list[tuple[Tensor, Unread]]] = [[]]
    size = 0
    for tensor, leaf in named:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((tensor, leaf))
        size += tensor.nbytes
    return [_placed(shard) for shard in shards]


def _placed(
    shard: Sequence[tuple[Tensor, Unread]],
) -> Sequence[tuple[Tensor, Unread]]:
    leaves = {tensor.name: leaf for tensor, leaf in shard}
    placed = tensorfiles.laid_out([tensor for tensor, _ in shard])
    return [(tensor, leaves[tensor.name]) for tensor in placed]


def _described(
    source: Source, named: Sequence[tuple[Tensor, Unread]]
) -> Mapping[str, str]:
    """What lets the files become that step again; other readers do not look at it."""
    text = passport(source)
    if text is None:
        return _COMMON
    names = {leaf.entry.name: tensor.name for tensor, leaf in named}
    texts = {}
    room = _MAX_TEXT_BYTES
    for leaf in source.leaves:
        if leaf.entry.kind in TEXT_KINDS:
            room -= leaf.nbytes
            if room < 0:
                raise InvalidInputError(
                    f"leaf {leaf.entry.name} is {leaf.nbytes} bytes of text; the "
                    f"headers of safetensors have room for {_MAX_TEXT_BYTES} in all. "
                    "Leave it out by choosing other leaves"
                )
            data = leaf.whole().tobytes()
            texts[leaf.entry.name] = base64.b64encode(data).decode()
    document = {"manifest": text, "names": names, "texts": texts}
    return _COMMON | {PASSPORT: json.dumps(document)}


def write(planned: TensorPlan, folder: Path, *, threads: int | None = None) -> None:
    """Write the files into a folder that is there.

    In memory are a few chunks for each thread, whatever the size of a leaf.

    Raises:
        CorruptionError: A chunk is damaged.
        OSError: The system refuses something.
    """
    metadata = planned.metadata
    workers = DeltaOptions(threads=threads).worker_count
    with pool(workers) as executor:
        for file, tensors in planned.files.items():
            header = tensorfiles.encode_header([one for one, _ in tensors], metadata)
            metadata = _COMMON
            descriptor = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                end = len(header) + sum(tensor.nbytes for tensor, _ in tensors)
                os.truncate(descriptor, end)
                pieces = (
                    (len(header) + tensor.start, leaf, piece)
                    for tensor, leaf in tensors
                    for piece in leaf.pieces
                )
                put = functools.partial(_put, descriptor)
                for _ in ordered_map(executor, put, pieces, window=2 * workers):
                    pass
                # Last: half of a file begins with zeros, which is no header.
                _pwrite(descriptor, memoryview(header), 0)
            finally:
                os.close(descriptor)
    if len(planned.files) > 1:
        _write_index(planned, folder)


def _put(descriptor: int, place: tuple[int, Unread, Piece]) -> None:
    """Put a chunk to where its rows lie in the file."""
    start, leaf, piece = place
    content = np.ascontiguousarray(piece.read()).reshape(-1)
    itemsize = content.dtype.itemsize
    data = content.view(np.uint8).data
    done = 0
    for first, count in runs(piece.box, leaf.entry.shape):
        length = count * itemsize
        _pwrite(descriptor, data[done : done + length], start + first * itemsize)
        done += length


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _write_index(planned: TensorPlan, folder: Path) -> None:
    total = sum(one.nbytes for file in planned.files.values() for one, _ in file)
    where = {
        tensor.name: file
        for file, tensors in planned.files.items()
        for tensor, _ in tensors
    }
    document = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(where.items())),
    }
    with (folder / INDEX).open("x") as out:
        json.dump(document, out, indent=2)
