"""Pytrees as leaves with paths and a structure document, and back.

A leaf is known by its path, a tuple of strings; the document keeps what the strings
lose (integer keys, tuples, node types), so that a tree comes back without a target.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu

from orbax_delta.errors import FormatError, InvalidInputError
from orbax_delta.manifests import Json, path_name

Path = tuple[str, ...]

_MAX_DEPTH = 100
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
        if len(path) > _MAX_DEPTH:
            raise InvalidInputError(
                f"the tree is more than {_MAX_DEPTH} levels deep at "
                f"{path_name(path[:3])}/...; flatten it, or keep it as one array"
            )
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
    remaining = enumerate(values)
    try:
        tree = _rebuild(structure, remaining)
    except _DAMAGE as error:
        raise FormatError(f"the tree of a MANIFEST is damaged: {error!r}") from error
    unused = [index for index, _ in remaining]
    if unused:
        raise FormatError(f"the tree of a MANIFEST lacks the leaves {unused}")
    return tree


def _rebuild(structure: Json, remaining: Iterator[tuple[int, Any]]) -> Any:
    if "leaf" in structure:
        index, value = next(remaining, (None, None))
        if index is None or structure["leaf"] != index:
            raise ValueError(f"leaf {structure['leaf']!r} stands where {index} belongs")
        return value
    if "none" in structure:
        return None
    if "list" in structure:
        return [_rebuild(child, remaining) for child in structure["list"]]
    if "tuple" in structure:
        return tuple(_rebuild(child, remaining) for child in structure["tuple"])
    pairs = structure["dict"] if "dict" in structure else structure["node"]
    keys = [_read_key(key) for key, _ in pairs]
    children = [_rebuild(child, remaining) for _, child in pairs]
    if "node" in structure and keys and keys == list(range(len(keys))):
        return children
    return dict(zip(keys, children, strict=True))
