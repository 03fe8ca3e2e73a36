"""What fields of a MANIFEST may hold: names, types and numbers, down to shardings.

Whoever can compute a digest can put anything into a MANIFEST. What has passed here
can be counted with, printed and used as it stands. Does not belong here: leaves, what
a field means.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_delta.chunks import MAX_DIMENSIONS
from orbax_delta.errors import InvalidInputError

Json = Any
"""A value made of dict, list, str, int, float, bool and None."""
Types = tuple[type, ...]

MAX_COUNT = (1 << 63) - 1
"""Largest number of bytes, elements or rows: what any 64-bit integer holds."""
MAX_METADATA_DEPTH = 100
# Later times do not fit the calendars of all languages.
_MAX_WALL_TIME = 250_000_000_000
_MAX_STEP = 10**18 - 1

_SCALARS = (str, bool, int, float, type(None))
_TEXT = (str,)
_MAYBE_TEXT = (str, type(None))
_PREDECESSOR_FIELDS: Mapping[str, Types] = {"step": _TEXT, "attempt": _TEXT}
_SHARDING_FIELDS: Mapping[str, Mapping[str, Types]] = {
    "named": {
        "kind": _TEXT,
        "platform": _TEXT,
        "memory_kind": _MAYBE_TEXT,
        "mesh": (dict,),
        "spec": (list,),
    },
    "single": {
        "kind": _TEXT,
        "platform": _TEXT,
        "memory_kind": _MAYBE_TEXT,
        "device": _TEXT,
        "device_id": (int,),
    },
}
_MESH_FIELDS: Mapping[str, Types] = {
    "shape": (list,),
    "axis_names": (list,),
    "axis_types": (list,),
    "device_ids": (list,),
}


def short(value: object) -> str:
    """`value` for a message: a line of bounded length, however large or deep it is."""
    return f"{reprlib.repr(value):.200}"


def check(document: Json, fields: Mapping[str, Types]) -> None:
    """Raise unless `document` is an object with exactly these fields and types.

    Raises:
        InvalidInputError: It is not.
    """
    if type(document) is not dict or set(document) != set(fields):
        found = (
            f"{sorted(document)!r:.300}" if type(document) is dict else short(document)
        )
        raise InvalidInputError(f"found the fields {found}; expected {sorted(fields)}")
    for name, types in fields.items():
        if type(document[name]) not in types:
            raise InvalidInputError(f"the field {name!r} is {short(document[name])}")


def is_count(value: object, most: int = MAX_COUNT) -> bool:
    """Whether it is a whole number from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def is_number(value: object) -> bool:
    """Whether it is a number that a double holds, 0 or more."""
    if type(value) is int:
        return is_count(value)
    return type(value) is float and math.isfinite(value) and value >= 0


def is_step(value: object) -> bool:
    """Whether it can be the number of a step."""
    return value is None or is_count(value, _MAX_STEP)


def is_time(value: object) -> bool:
    """Whether it is a time in seconds since 1970 that calendars know."""
    return is_number(value) and bool(value <= _MAX_WALL_TIME)  # type: ignore[operator]


def is_predecessor(value: Json) -> bool:
    """Whether it names a step and its attempt, or nothing."""
    if value is None:
        return True
    check(value, _PREDECESSOR_FIELDS)
    return True


def holds(value: Json, types: Types = _SCALARS) -> bool:
    """Whether it is an object with members of these types alone."""
    return type(value) is dict and all(type(v) in types for v in value.values())


def is_shallow(value: Json, limit: int = MAX_METADATA_DEPTH) -> bool:
    """Whether objects and arrays are nested at most `limit` deep.

    Deeper ones could not be printed or compared without exhausting Python's stack.
    """
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for node in level
            if type(node) in (dict, list)
            for child in (node.values() if type(node) is dict else node)
        ]
        if not level:
            return True
    return False


def check_sharding(document: Json) -> None:
    """Raise unless `document` is null or describes a sharding.

    Raises:
        InvalidInputError: No array can lie like that, wherever it is.
    """
    if document is None:
        return
    kind = document.get("kind") if type(document) is dict else None
    fields = _SHARDING_FIELDS.get(kind) if type(kind) is str else None
    if fields is None:
        raise InvalidInputError(f"there is no sharding like {short(document)}")
    check(document, fields)
    if kind == "single":
        good = is_count(document["device_id"])
    else:
        check(document["mesh"], _MESH_FIELDS)
        good = _is_mesh(**document["mesh"]) and _is_spec(
            document["spec"], document["mesh"]["axis_names"]
        )
    if not good:
        raise InvalidInputError(f"there is no sharding like {short(document)}")


def _is_mesh(
    *,
    shape: Sequence[Json],
    axis_names: Sequence[Json],
    axis_types: Sequence[Json],
    device_ids: Sequence[Json],
) -> bool:
    return (
        len(shape) == len(axis_names) == len(axis_types) <= MAX_DIMENSIONS
        and all(is_count(size) and size > 0 for size in shape)
        and all(type(name) is str for name in (*axis_names, *axis_types))
        and len(set(axis_names)) == len(axis_names)
        and all(map(is_count, device_ids))
        and len(set(device_ids)) == len(device_ids) == math.prod(shape)
    )


def _is_spec(spec: Sequence[Json], axis_names: Sequence[str]) -> bool:
    """Whether each axis of the mesh stands at most once in it, and nothing else."""
    if not all(entry is None or type(entry) in (str, list) for entry in spec):
        return False
    lists = [[entry] if type(entry) is str else entry for entry in spec]
    axes = [axis for entry in lists for axis in entry or ()]
    return (
        all(type(axis) is str for axis in axes)
        and len(set(axes)) == len(axes)
        and set(axes) <= set(axis_names)
    )
