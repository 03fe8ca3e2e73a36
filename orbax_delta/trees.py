"""Pytrees as leaves with paths and a structure document, and back.

A leaf is known by its path, a tuple of strings; the document keeps what the strings
lose (integer keys, tuples, node types), so that a tree comes back without a target.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from orbax_delta.errors import FormatError, InvalidInputError
from orbax_delta.fields import Json, short
from orbax_delta.manifests import path_name

Path = tuple[str, ...]

MAX_DEPTH = 100
"""Levels of a tree, at most."""

# No node of a pytree is one of these: there is no need to ask jax, leaf by leaf.
_PLAIN_TYPES = frozenset({np.ndarray, bool, int, float, complex, str, bytes})
_DAMAGE = (LookupError, TypeError, ValueError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatTree:
    """A pytree taken apart.

    Attributes:
        structure: JSON document; leaves stand in it by index.
        paths: Path of each leaf, in jax's order of leaves.
        values: The leaves themselves.
    """

    structure: Json
    paths: Sequence[Path]
    values: Sequence[Any]


def flatten(tree: Any) -> FlatTree:
    """Take `tree` apart, one level at a time.

    >>> flatten({"a": (1, None)}).structure
    {'dict': [['a', {'tuple': [{'leaf': 0}, {'none': True}]}]]}

    Raises:
        InvalidInputError: Two leaves have the same path, or jax cannot take a node
            apart, or the tree is too deep.
    """
    paths: list[Path] = []
    values: list[Any] = []

    def visit(node: Any, path: Path) -> Json:
        if node is None:
            return {"none": True}
        # Deeper ones would exhaust Python's stack here or in a reader.
        if len(path) > MAX_DEPTH:
            raise InvalidInputError(
                f"the tree is more than {MAX_DEPTH} levels deep at "
                f"{path_name(path[:3])}/...; flatten it, or keep it as one array"
            )
        if type(node) in _PLAIN_TYPES or isinstance(node, jax.Array):
            paths.append(path)
            values.append(node)
            return {"leaf": len(values) - 1}
        try:
            children, _ = jtu.tree_flatten_with_path(
                node, is_leaf=lambda child: child is not node
            )
        except ValueError as error:
            raise InvalidInputError(
                f"the {type(node).__name__} at {path_name(path)} is no tree for jax: "
                f"{error}"
            ) from error
        if len(children) == 1 and not children[0][0]:
            paths.append(path)
            values.append(node)
            return {"leaf": len(values) - 1}
        keys = [_key(entry[0]) for entry, _ in children]
        texts = _texts(keys, path)
        documents = [
            visit(child, (*path, text))
            for text, (_, child) in zip(texts, children, strict=True)
        ]
        return _node_document(node, keys, documents)

    structure = visit(tree, ())
    if len(set(paths)) != len(paths):
        twice = collections.Counter(paths).most_common(1)[0][0]
        raise InvalidInputError(
            f"two leaves have the path {path_name(twice)}; rename a key, so that no "
            "two keys of a node read the same"
        )
    return FlatTree(structure=structure, paths=paths, values=values)


def _key(entry: Any) -> Any:
    """The bare key of one of jax's path entries."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _texts(keys: Sequence[Any], path: Path) -> list[str]:
    """How the keys of a node read; no two may read the same."""
    try:
        texts = [str(key) for key in keys]
    except ValueError as error:
        raise InvalidInputError(
            f"a key at {path_name(path)} cannot be written: {error}; rename it"
        ) from error
    if len(set(texts)) != len(texts):
        twice = collections.Counter(texts).most_common(1)[0][0]
        raise InvalidInputError(
            f"two leaves have the path {path_name((*path, twice))}; rename a key, so "
            "that no two keys of a node read the same"
        )
    return texts


def _node_document(node: Any, keys: Sequence[Any], documents: Sequence[Json]) -> Json:
    if type(node) in (list, tuple):
        return {type(node).__name__: list(documents)}
    pairs = [
        [_key_document(key), child] for key, child in zip(keys, documents, strict=True)
    ]
    if isinstance(node, Mapping):
        return {"dict": pairs}
    return {"node": pairs, "type": f"{type(node).__module__}.{type(node).__qualname__}"}


def _key_document(key: Any) -> Json:
    if type(key) is str:
        return key
    if type(key) is int:
        return ["int", hex(key)]
    if type(key) is bool:
        return ["bool", key]
    if type(key) is float:
        return ["float", key.hex()]
    if type(key) is bytes:
        return ["bytes", key.hex()]
    if type(key) is tuple:
        return ["tuple", [_key_document(part) for part in key]]
    return ["text", str(key)]


_KEY_READERS: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda value: int(value, 16),
    "bool": bool,
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "tuple": lambda value: tuple(_read_key(part) for part in value),
    "text": str,
}
_KEY_TYPES: Mapping[str, type] = {"bool": bool, "tuple": list}
_MEMBERS = (
    *({name} for name in ("leaf", "none", "list", "tuple", "dict")),
    {"node", "type"},
)


def _read_key(document: Json) -> Any:
    if type(document) is str:
        return document
    kind, value = document if type(document) is list else ("", None)
    if type(value) is not _KEY_TYPES.get(kind, str):
        raise ValueError(f"no key is written as {short(document)}")
    return _KEY_READERS[kind](value)


def rebuild(
    structure: Json,
    values: Sequence[Any],
    *,
    paths: Sequence[Path] | None = None,
    where: str = "a MANIFEST",
) -> Any:
    """A plain tree of dict, list, tuple and None from its document.

    Nodes of other types come back as a dict of their fields, those with the keys
    0, 1, 2... as a list.

    Args:
        structure: The document.
        values: Leaves, in order.
        paths: Their paths, which the keys on the way must read as; None: not compared.
        where: Whose tree it is, for messages.

    Raises:
        FormatError: The document is not one that `flatten` makes, or not of `paths`.
    """
    leaves = _Leaves(values, paths)
    try:
        tree = leaves.rebuild(structure, ())
    except _DAMAGE as error:
        raise FormatError(f"the tree of {where} is damaged: {error!r:.300}") from error
    if leaves.used < len(values):
        raise FormatError(
            f"the tree of {where} lacks {len(values) - leaves.used} of {len(values)} "
            "leaves"
        )
    return tree


class _Leaves:
    """Leaves that find their places in a tree, in order.

    Attributes:
        used: How many have found it.
    """

    def __init__(self, values: Sequence[Any], paths: Sequence[Path] | None) -> None:
        self.used = 0
        self._values = values
        self._paths = paths

    def rebuild(self, structure: Json, keys: tuple[Any, ...]) -> Any:
        """The node that `structure` describes, with all below it."""
        if type(structure) is not dict or set(structure) not in _MEMBERS:
            raise ValueError(f"there is no node {short(structure)}")
        if len(keys) > MAX_DEPTH:
            raise ValueError(f"it is more than {MAX_DEPTH} levels deep")
        if "leaf" in structure:
            return self._leaf(structure["leaf"], keys)
        if "none" in structure:
            return None
        for name, make in (("list", list), ("tuple", tuple)):
            if name in structure:
                items = enumerate(_array(structure[name]))
                return make([self.rebuild(child, (*keys, i)) for i, child in items])
        return self._mapping(structure, keys)

    def _leaf(self, index: Json, keys: tuple[Any, ...]) -> Any:
        if type(index) is not int or index != self.used or index >= len(self._values):
            raise ValueError(f"leaf {short(index)} stands where {self.used} belongs")
        if self._paths is not None and not _reads_as(keys, self._paths[index]):
            raise ValueError(
                f"leaf {index} is {path_name(self._paths[index])}, but stands at "
                f"{short(keys)}"
            )
        self.used += 1
        return self._values[index]

    def _mapping(self, structure: Json, above: tuple[Any, ...]) -> Any:
        pairs = _array(structure["node" if "node" in structure else "dict"])
        keys = [_read_key(key) for key, _ in pairs]
        children = [
            self.rebuild(child, (*above, key))
            for key, (_, child) in zip(keys, pairs, strict=True)
        ]
        if "node" in structure and keys and keys == list(range(len(keys))):
            return children
        found = dict(zip(keys, children, strict=True))
        if len(found) != len(keys):
            raise ValueError(f"two keys of {short(keys)} are equal")
        return found


def _array(document: Json) -> list[Json]:
    if type(document) is not list:
        raise ValueError(f"{short(document)} stands where an array belongs")
    return document


def _reads_as(keys: Sequence[Any], path: Path) -> bool:
    """Whether the text of `keys` is `path`.

    A part of a tuple may have come back as its text, so that tuples read in another
    way than the keys that were saved.
    """
    return len(keys) == len(path) and all(
        type(key) is tuple or str(key) == text
        for key, text in zip(keys, path, strict=True)
    )
