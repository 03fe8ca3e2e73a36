"""Folders of safetensors files, read as a source.

What was exported by this package is the same tree again; of others the names of the
tensors make it. Does not belong here: the bytes of a file (`tensorfiles`).
"""

import base64
import binascii
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from orbax_delta import jsontext, tensorfiles
from orbax_delta.chunks import Box, box_shape
from orbax_delta.errors import FormatError, InvalidInputError, NotFoundError
from orbax_delta.manifests import ARRAY_KINDS, Json, LeafEntry
from orbax_delta.sources import Source, as_saved, read_passport
from orbax_delta.tensorfiles import LENGTH_BYTES, Tensor
from orbax_delta.tensorfolders import INDEX, PASSPORT, SUFFIX, TEXT_KINDS
from orbax_delta.trees import MAX_DEPTH
from orbax_delta.unread import Unread, in_pieces, runs

_INDEX_SUFFIX = SUFFIX + ".index.json"
_logger = logging.getLogger("orbax_delta")

Split = Callable[[str], tuple[str, ...]]
"""From the name of a tensor to the path of its leaf."""


def undotted(name: str) -> tuple[str, ...]:
    """The path that a tensor's name stands for by default.

    >>> undotted("params.layers.0.kernel")
    ('params', 'layers', '0', 'kernel')
    """
    return tuple(name.split("."))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor in its file."""

    file: Path
    data_start: int
    tensor: Tensor

    def read(self, box: Box) -> np.ndarray:
        """The content of a part of it."""
        shape = self.tensor.shape
        dtype = np.dtype(self.entry((self.tensor.name,)).element.dtype)
        made = np.empty(box_shape(box), dtype)
        data = made.reshape(-1).view(np.uint8).data
        base = self.data_start + self.tensor.start
        with self.file.open("rb", buffering=0) as file:
            done = 0
            for first, count in runs(box, shape):
                file.seek(base + first * dtype.itemsize)
                rest = data[done : done + count * dtype.itemsize]
                done += len(rest)
                while rest:
                    got = file.readinto(rest)
                    if not got:
                        raise FormatError(f"{self.file} became shorter meanwhile")
                    rest = rest[got:]
        return made

    def entry(self, path: tuple[str, ...]) -> LeafEntry:
        """What a MANIFEST would say of it."""
        dtype, shape = self.tensor.dtype, self.tensor.shape
        return LeafEntry(path=path, kind="numpy", dtype=dtype, shape=shape)


def is_tensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a folder that holds some."""
    return path.suffix == SUFFIX or (path.is_dir() and any(path.glob("*" + SUFFIX)))


def source(path: Path, *, split: Split | None = None) -> Source:
    """What safetensors files hold: a file, or the folder of a sharded state.

    What was exported by this package is the same tree again, unless `split` says
    otherwise or its tensors have changed in type or shape.

    Args:
        path: A file, or a folder with one file, or with an index.
        split: From names to paths; None: as exported, otherwise at the dots.

    Raises:
        NotFoundError: There is no such file, or one that the index names.
        FormatError: A file is no safetensors file, or index and files disagree.
        InvalidInputError: Two tensors would have one path, one lies in the other, or
            `split` fails.
        OSError: The system refuses something.
    """
    stored: dict[str, _Stored] = {}
    described: str | None = None
    files, places = _files(path)
    for file in files:
        tensors, metadata = _open(file)
        described = metadata.get(PASSPORT, described)
        for one in tensors:
            if one.tensor.name in stored:
                raise FormatError(
                    f"both {stored[one.tensor.name].file} and {file} hold the tensor "
                    f"{one.tensor.name!r:.80}"
                )
            stored[one.tensor.name] = one
    for name, file in places.items():
        if name not in stored or stored[name].file != file:
            raise FormatError(
                f"the index in {path} says that {file.name} holds the tensor "
                f"{name!r:.80}, which it does not; get both again from one place"
            )
    label = f"the safetensors in {path}"
    if described is not None and split is None:
        found = _as_exported(described, stored, label)
        if found is not None:
            return found
    return _as_named(stored, split or undotted, label)


def _files(path: Path) -> tuple[list[Path], Mapping[str, Path]]:
    """The files, and where an index says that each tensor is."""
    if not path.exists():
        raise NotFoundError(
            f"there is no {path}; expected a safetensors file or folder"
        )
    if path.is_file():
        return [path], {}
    files = sorted(path.glob("*" + SUFFIX))
    # Others call it by the names of their files.
    indices = sorted(path.glob("*" + _INDEX_SUFFIX))
    index = path / INDEX if path / INDEX in indices or not indices else indices[0]
    if index not in indices or (index.name != INDEX and len(indices) > 1):
        if len(files) == 1:
            return files, {}
        raise FormatError(
            f"{path} holds {len(files)} safetensors files and no {INDEX}, so that "
            "nobody can tell whether they belong together; name one of them"
        )
    return _indexed(path, index)


def _indexed(path: Path, index: Path) -> tuple[list[Path], Mapping[str, Path]]:
    try:
        named = jsontext.parse(index.read_bytes())["weight_map"]
        places = {name: path / file for name, file in named.items()}
        if not places:
            raise ValueError("it names no tensor")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise FormatError(
            f"{index} is no index of safetensors: {error!s:.200}"
        ) from error
    files = sorted(set(places.values()))
    if any(file.parent != path for file in files):
        raise FormatError(f"{index} names files outside of its folder")
    there = {file.name for file in path.iterdir() if file.is_file()}
    missing = [file.name for file in files if file.name not in there]
    if missing:
        raise NotFoundError(f"{index} names files that are not there: {missing!r:.300}")
    return files, places


def _open(file: Path) -> tuple[list[_Stored], dict[str, str]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        head = opened.read(LENGTH_BYTES)
        length = tensorfiles.header_bytes(head, file_bytes=size, where=str(file))
        text = opened.read(length)
    start = LENGTH_BYTES + length
    tensors, metadata = tensorfiles.parse_header(
        text, data_bytes=size - start, where=str(file)
    )
    stored = [_Stored(file=file, data_start=start, tensor=one) for one in tensors]
    return stored, metadata


def _as_exported(
    described: str, stored: Mapping[str, _Stored], label: str
) -> Source | None:
    """The tree that was exported; None where the tensors are not those any more."""
    try:
        document = jsontext.parse(described.encode())
        manifest = read_passport(document["manifest"], where=label)
        names, texts = document["names"], document["texts"]
        leaves = [_exported(leaf, names, texts, stored) for leaf in manifest.leaves]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise FormatError(
            f"{label}: what this package wrote into the header is damaged: "
            f"{error!s:.200}"
        ) from error
    whole = [leaf for leaf in leaves if leaf is not None]
    if len(whole) < len(leaves) or set(names.values()) != stored.keys():
        _logger.warning(
            "%s are not those any more that this package exported; they are taken by "
            "their names, as numpy arrays",
            label,
        )
        return None
    return as_saved(manifest, tuple(whole), label)


def _exported(
    entry: LeafEntry,
    names: Mapping[str, str],
    texts: Mapping[str, str],
    stored: Mapping[str, _Stored],
) -> Unread | None:
    if entry.kind not in ARRAY_KINDS:
        return Unread(entry=entry)
    if entry.kind in TEXT_KINDS:
        try:
            data = base64.b64decode(texts[entry.name].encode(), validate=True)
        except binascii.Error as error:
            raise ValueError(f"leaf {entry.name}: {error}") from error
        array = np.frombuffer(data, np.uint8)
        if array.shape != entry.shape:
            raise ValueError(f"leaf {entry.name} has {array.size} bytes of text")
        return in_pieces(entry, lambda box: array[slice(*box[0])])
    found = stored.get(names[entry.name])
    if found is None or (entry.dtype, entry.shape) != (
        found.tensor.dtype,
        found.tensor.shape,
    ):
        return None
    return in_pieces(entry, found.read)


def _path(name: str, split: Split) -> tuple[str, ...]:
    try:
        found = split(name)
    except Exception as error:
        raise InvalidInputError(
            f"split fails at the tensor {name!r:.80}: {type(error).__name__}: "
            f"{error!s:.200}"
        ) from error
    is_path = isinstance(found, Sequence) and not isinstance(found, str)
    if not is_path or not found or not all(type(key) is str for key in found):
        raise InvalidInputError(
            f"the path of tensor {name!r:.80} is {found!r:.80}; expected texts, as in "
            "('params', 'w')"
        )
    if len(found) > MAX_DEPTH:
        raise InvalidInputError(
            f"the tensor {name!r:.80} is {len(found)} levels deep; a tree has at most "
            f"{MAX_DEPTH}. Split its name otherwise"
        )
    return tuple(found)


def _as_named(stored: Mapping[str, _Stored], split: Split, label: str) -> Source:
    """A tree of dicts, by what the names read as."""
    tree: dict[str, Json] = {}
    by_path: dict[tuple[str, ...], tuple[str, _Stored]] = {}
    for name, one in stored.items():
        path = _path(name, split)
        if path in by_path:
            raise InvalidInputError(
                f"the tensors {by_path[path][0]!r:.80} and {name!r:.80} would both be "
                f"the leaf {path}; split their names otherwise"
            )
        by_path[path] = name, one
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or path[-1] in node:
            raise InvalidInputError(
                f"the tensor {name!r:.80} lies in another one's place: one path begins "
                "with the other's. Split their names otherwise"
            )
        node[path[-1]] = path
    leaves: list[Unread] = []

    def document(node: Json) -> Json:
        if isinstance(node, tuple):
            stored_one = by_path[node][1]
            leaves.append(in_pieces(stored_one.entry(node), stored_one.read))
            return {"leaf": len(leaves) - 1}
        return {"dict": [[key, document(node[key])] for key in sorted(node)]}

    structure = document(tree)
    return Source(label=label, structure=structure, leaves=tuple(leaves))
