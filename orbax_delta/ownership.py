"""Which process writes a chunk that several hold.

By rendezvous: of the processes that hold a chunk the one with the highest hash of the
chunk and its own index. All processes find the same one without asking, and when some
go or come, only their chunks change hands.
"""

import collections
from collections.abc import Sequence

import xxhash

from orbax_delta.chunks import Box
from orbax_delta.manifests import LeafEntry


def families(leaves: Sequence[LeafEntry]) -> list[str]:
    """A name for each leaf, shared by leaves that are likely copies of each other.

    A copy or a cast follows from its source only if one process writes both: the bf16
    parameters, their fp32 masters and their averages lie at paths that end alike.

    >>> paths = ("p", "a", "w"), ("mu", "a", "w"), ("p", "b", "w"), ("step",)
    >>> leaves = [LeafEntry(path=path, kind="jax", dtype="float32") for path in paths]
    >>> families(leaves)
    ['a/w', 'a/w', 'w', 'step']
    """
    shared = collections.Counter(
        (leaf.shape, leaf.path[start:])
        for leaf in leaves
        for start in range(len(leaf.path))
    )
    names = []
    for leaf in leaves:
        tails = (leaf.path[start:] for start in range(len(leaf.path)))
        tail = next((t for t in tails if shared[leaf.shape, t] > 1), leaf.path)
        names.append("/".join(tail))
    return names


def owner(family: str, box: Box, holders: Sequence[int]) -> int:
    """The process of `holders` that writes the chunk."""
    if len(holders) == 1:
        return holders[0]
    name = f"{family} {box} ".encode("utf-8", "surrogatepass")
    return max(
        holders,
        key=lambda process: xxhash.xxh3_64_intdigest(name + b"%d" % process),
    )
