"""A live tree that a restore may take content from, chunk by chunk, by digest.

What is live is believed in nothing: a chunk is taken if its bytes, digested now, have
the digest that a row asks for. If they have the digest of the row that is remembered
of that chunk, they are what the records of that row make, and what follows from those
needs the records after them alone. Does not belong here: reading records.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orbax_delta import chunks, records, trees
from orbax_delta.background import Pool, batches
from orbax_delta.base import Base
from orbax_delta.chunks import Box
from orbax_delta.codecs import Bytes
from orbax_delta.dtypes import Rule
from orbax_delta.errors import InvalidInputError
from orbax_delta.manifests import LeafEntry, path_name
from orbax_delta.reader import ListKey, Request, list_key

_TASK_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Arrays that a caller has at hand.

    Attributes:
        leaves: By path; what is no array is of no use.
        known: What is remembered of the item: perhaps the rows that they come from.
    """

    leaves: Mapping[trees.Path, Any]
    known: Base | None = None


def live_of(tree: Any) -> Live:
    """What a caller's tree holds, whatever its structure.

    Raises:
        InvalidInputError: An array of it has been deleted or donated, or it is no tree.
    """
    flat = trees.flatten(tree)
    leaves: dict[trees.Path, Any] = {}
    for path, value in zip(flat.paths, flat.values, strict=True):
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            _require_alive(path, value)
            leaves[path] = value
        elif isinstance(value, np.ndarray):
            leaves[path] = value
    return Live(leaves=leaves)


def _require_alive(path: trees.Path, value: jax.Array) -> None:
    shards = [] if value.is_deleted() else value.addressable_shards
    if value.is_deleted() or any(shard.data.is_deleted() for shard in shards):
        raise InvalidInputError(
            f"leaf {path_name(path)} of base has been deleted or donated; give the "
            "tree that the training step returned, or leave that leaf out"
        )


class _LiveLeaf:
    """One live array as it lies on the host, brought there when it is needed."""

    def __init__(self, entry: LeafEntry, value: Any) -> None:
        self.value = value
        self._entry = entry
        self._pieces: Sequence[tuple[Box, np.ndarray]] | None = None
        self._lock = threading.Lock()

    def is_usable(self) -> bool:
        """Whether its elements are of the kind that is stored."""
        value, entry = self.value, self._entry
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            if entry.kind != "key" or jax.random.key_impl(value) != entry.value:
                return False
            return bool(value.shape == entry.shape[:-1])
        same_type = bool(entry.dtype) and value.dtype == entry.element.dtype
        return same_type and value.shape == entry.shape

    def content(self, box: Box) -> Bytes | None:
        """The bytes of a chunk as it is now, or None if not all of it is here."""
        element, parts = self._entry.element, []
        for held, array in self._on_host():
            common = chunks.intersect(box, held)
            if common == box:
                return element.to_content(array[chunks.slices(box, held)])
            if common is not None:
                parts.append((common, array[chunks.slices(common, held)]))
        found = sum(chunks.element_count(common) for common, _ in parts)
        if found != chunks.element_count(box):
            return None
        whole = np.empty(chunks.box_shape(box), element.dtype)
        for common, part in parts:
            whole[chunks.slices(common, box)] = part
        return element.to_content(whole)

    def settled(self, box: Box) -> Bytes | None:
        """The same, but nothing that anybody can still write to."""
        content = self.content(box)
        if content is None or isinstance(self.value, jax.Array):
            return content
        return content.copy()

    def drop(self) -> None:
        """Let go of what lies on the host; it can be brought there again."""
        with self._lock:
            self._pieces = None

    def _on_host(self) -> Sequence[tuple[Box, np.ndarray]]:
        with self._lock:
            if self._pieces is None:
                self._pieces = list(self._fetched().items())
            return self._pieces

    def _fetched(self) -> dict[Box, np.ndarray]:
        """Its distinct shards: views where they lie in the host's memory already."""
        value = self.value
        if isinstance(value, np.ndarray):
            return {chunks.whole(value.shape): np.asarray(value)}
        _require_alive(self._entry.path, value)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        shards: dict[Box, np.ndarray] = {}
        for shard in value.addressable_shards:
            box = chunks.index_box(shard.index, value.shape)
            if box not in shards:
                data = shard.data
                # jax keeps what it has brought to the host as long as the array that
                # was asked for it: the caller's must not take that memory for good.
                passing = jax.make_array_from_single_device_arrays(
                    data.shape, data.sharding, [data], dtype=data.dtype
                )
                shards[box] = np.asarray(passing)
        return shards


class Survey:
    """Which wanted chunks are at hand in a live tree.

    Attributes:
        same: Chunks whose live bytes are those that are wanted.
        seeds: What lists of records decode to, of these chunks and of those whose live
            bytes are those of the remembered row.
    """

    def __init__(self, live: Live, wanted: Sequence[Request], executor: Pool) -> None:
        self.same: list[Request] = []
        self.seeds: dict[ListKey, _Seed] = {}
        self._known = live.known
        self._leaves: dict[trees.Path, _LiveLeaf] = {}
        for request in wanted:
            entry = request.leaf
            value = live.leaves.get(entry.path)
            if value is not None and entry.path not in self._leaves:
                self._leaves[entry.path] = _LiveLeaf(entry, value)
        usable = {path for path, leaf in self._leaves.items() if leaf.is_usable()}
        at_hand = sorted(
            (request for request in wanted if request.leaf.path in usable),
            key=lambda request: request.row.leaf,
        )
        last: _LiveLeaf | None = None
        for found in executor.map(
            self._look,
            batches(at_hand, lambda request: request.content_bytes, least=_TASK_BYTES),
        ):
            for sight in found:
                self._note(sight)
                if last is not None and last is not sight.leaf:
                    last.drop()  # what is still needed of it is brought again
                last = sight.leaf
        if last is not None:
            last.drop()

    def value(self, path: trees.Path) -> Any:
        """The live array at a path."""
        return self._leaves[path].value

    def content(self, request: Request) -> Bytes | None:
        """The content of a chunk of `same`; None if it has changed since.

        Only numpy arrays can change. Called on the pool's threads.
        """
        leaf = self._leaves[request.leaf.path]
        content = leaf.settled(request.row.box)
        if content is None or isinstance(leaf.value, jax.Array):
            return content
        return content if records.digest(content) == request.row.digest else None

    def _look(self, requests: Sequence[Request]) -> list["_Sight"]:
        """What the live bytes of some chunks are; called on the pool's threads."""
        return [self._look_at(request) for request in requests]

    def _look_at(self, request: Request) -> "_Sight":
        leaf, row = self._leaves[request.leaf.path], request.row
        content = leaf.content(row.box)
        digest = None if content is None else records.digest(content)
        if digest == row.digest:
            own = list_key(request) if row.rule is Rule.NONE else None
            return _Sight(leaf, request, same=True, made_by=own)
        entry = self._known and self._known.get(request.leaf, row.box)
        if not entry or entry.row.rule is not Rule.NONE or entry.row.digest != digest:
            return _Sight(leaf, request, same=False, made_by=None)
        key = entry.row.refs, request.content_bytes
        return _Sight(leaf, request, same=False, made_by=key)

    def _note(self, sight: "_Sight") -> None:
        if sight.same:
            self.same.append(sight.request)
        if sight.made_by is not None:
            self.seeds[sight.made_by] = _Seed(sight.leaf, sight.request.row.box)


@dataclasses.dataclass(frozen=True, slots=True)
class _Sight:
    """What was seen of one chunk.

    Attributes:
        leaf: Its live array.
        request: The chunk.
        same: Whether it is what is wanted.
        made_by: The list that decodes to what is live, if that is known.
    """

    leaf: _LiveLeaf
    request: Request
    same: bool
    made_by: ListKey | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Seed:
    """Content of a live chunk, when it is asked for."""

    leaf: _LiveLeaf
    box: Box

    def __call__(self) -> Bytes | None:
        return self.leaf.settled(self.box)
