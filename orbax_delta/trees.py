"""Pytrees as leaves with paths and a structure document, and back.

A leaf is known by its path, a tuple of strings; the document keeps what the strings
lose (integer keys, tuples, node types), so that a tree comes back without a target.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu

from orbax_delta.errors import FormatError, InvalidInputError
from orbax_delta.manifests import Json, path_name

Path = tuple[str, ...]


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
        InvalidInputError: Two leaves have the same path.
    """
    paths: list[Path] = []
    values: list[Any] = []

    def visit(node: Any, path: Path) -> Json:
        if node is None:
            return {"none": True}
        children, _ = jtu.tree_flatten_with_path(
            node, is_leaf=lambda child: child is not node
        )
        if len(children) == 1 and not children[0][0]:
            paths.append(path)
            values.append(node)
            return {"leaf": len(values) - 1}
        keys = [_key(entry[0]) for entry, _ in children]
        documents = [
            visit(child, (*path, str(key)))
            for key, (_, child) in zip(keys, children, strict=True)
        ]
        return _node_document(node, keys, documents)

    structure = visit(tree, ())
    if len(set(paths)) != len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
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


def _node_document(node: Any, keys: Sequence[Any], documents: Sequence[Json]) -> Json:
    if type(node) in (list, tuple):
        return {type(node).__name__: list(documents)}
    pairs = [
        [_key_document(key), child] for key, child in zip(keys, documents, strict=True)
    ]
    if type(node) is dict:
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


def _read_key(document: Json) -> Any:
    if isinstance(document, str):
        return document
    kind, value = document
    return _KEY_READERS[kind](value)


def rebuild(structure: Json, values: Sequence[Any]) -> Any:
    """A plain tree of dict, list, tuple and None from its document.

    Nodes of other types come back as a dict of their fields, those with the keys
    0, 1, 2... as a list.

    Raises:
        FormatError: The document is not one that `flatten` makes.
    """
    try:
        return _rebuild(structure, values)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(f"the tree of a MANIFEST is damaged: {error!r}") from error


def _rebuild(structure: Json, values: Sequence[Any]) -> Any:
    if "leaf" in structure:
        return values[structure["leaf"]]
    if "none" in structure:
        return None
    if "list" in structure:
        return [_rebuild(child, values) for child in structure["list"]]
    if "tuple" in structure:
        return tuple(_rebuild(child, values) for child in structure["tuple"])
    pairs = structure["dict"] if "dict" in structure else structure["node"]
    keys = [_read_key(key) for key, _ in pairs]
    children = [_rebuild(child, values) for _, child in pairs]
    if "node" in structure and keys and keys == list(range(len(keys))):
        return children
    return dict(zip(keys, children, strict=True))
