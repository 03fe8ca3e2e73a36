"""Bits that changed, and bytes that came on disk.

Imports no model, so that processes that only save and count start fast.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu
import numpy as np

State = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """How much of a group of leaves differs between two states.

    Attributes:
        group: First part of the leaves' paths.
        elements: Elements of the group.
        changed: Elements with any bit changed.
        raw_bytes: Bytes of the group.
        same_bytes: Bytes in leaves of which not one bit changed.
    """

    group: str
    elements: int
    changed: int
    raw_bytes: int
    same_bytes: int


def bits(leaf: Any) -> np.ndarray:
    """Returns an array's bits as one row of unsigned integers of its item size."""
    array = np.ascontiguousarray(leaf).reshape(-1)
    return array.view(f"u{array.dtype.itemsize}")


def raw_bytes(state: State) -> int:
    """Returns the bytes of all leaves."""
    return sum(leaf.nbytes for leaf in jtu.tree_leaves(state))


def compare_states(first: State, second: State) -> tuple[Change, ...]:
    """Returns what differs between two states, by group of leaves; no scalars."""
    groups: dict[str, list[tuple[int, int, int, int]]] = {}
    leaves = zip(
        jtu.tree_flatten_with_path(first)[0], jtu.tree_leaves(second), strict=True
    )
    for (path, old), new in leaves:
        if old.ndim == 0:
            continue
        name = jtu.keystr(path[:2], simple=True, separator="/")
        group = name if name.startswith("moments") else name.partition("/")[0]
        changed = int(np.count_nonzero(bits(old) != bits(new)))
        same_bytes = 0 if changed else old.nbytes
        groups.setdefault(group, []).append((old.size, changed, old.nbytes, same_bytes))
    return tuple(
        Change(
            group=group,
            elements=sums[0],
            changed=sums[1],
            raw_bytes=sums[2],
            same_bytes=sums[3],
        )
        for group, rows in groups.items()
        for sums in [np.sum(rows, axis=0).tolist()]
    )


def require_equal_bits(restored: State, state: State, what: str) -> None:
    """Raises AssertionError if a restored leaf differs in any bit."""
    pairs = zip(
        jtu.tree_flatten_with_path(state)[0], jtu.tree_leaves(restored), strict=True
    )
    for (path, wanted), found in pairs:
        if found.dtype != wanted.dtype or not np.array_equal(bits(found), bits(wanted)):
            raise AssertionError(f"{what}: {jtu.keystr(path)} came back changed")


def files_on_disk(root: pathlib.Path) -> dict[pathlib.Path, tuple[int, int, int]]:
    """Returns (inode, time of change in ns, bytes) of every file below a folder."""
    found = {}
    for path in root.rglob("*"):
        if path.is_file():
            status = path.stat()
            found[path] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def added_bytes(
    before: Mapping[pathlib.Path, tuple[int, int, int]],
    after: Mapping[pathlib.Path, tuple[int, int, int]],
) -> int:
    """Returns the bytes of files that are new or were written again.

    Deletions do not lower it, a renamed file adds nothing, and a file that was touched
    counts with all its bytes.
    """
    return sum(size for _, _, size in set(after.values()) - set(before.values()))
