"""One leaf on its devices: which chunks changed there, and copies of some of them.

All of it is put into the devices' queues before `save()` returns, so that the caller
may donate the arrays then: what runs later runs on buffers that the runtime keeps until
then. The caller's arrays themselves are never kept, and never read later: a copy that
they have only been told to make is lost when they are donated. Does not belong here:
which chunks are wanted (`selection`), the programs (`device`).
"""

import collections
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from orbax_delta import chunks, device, digests
from orbax_delta.changes import Chunk
from orbax_delta.chunks import Box
from orbax_delta.device import Detect, Gather, Join, Program, Shards
from orbax_delta.leaves import Brought, HostLeaf, StagedLeaf

STAGED_BYTES = 256 << 20
"""Device memory that copied chunks may take until they have reached the host."""

_BATCH_BYTES = 8 << 20
_BATCH_BOXES = 8
_WHOLE_SHARE = 0.5
_PINNED = "pinned_host"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafDigests:
    """Digests of a leaf's blocks, where the leaf lies.

    Attributes:
        shards: What they were made of.
        boxes: Of each of these shards.
        array: The digests.
    """

    shards: Shards
    boxes: tuple[Box, ...]
    array: jax.Array


class Arrival:
    """An array of ours on its way to the host, and then its content."""

    def __init__(self, data: jax.Array) -> None:
        data.copy_to_host_async()
        self.size_bytes = data.nbytes
        self._data: Any = data
        self._lock = threading.Lock()

    def wait(self) -> np.ndarray:
        """The content; the device's memory is free again."""
        with self._lock:
            if not isinstance(self._data, np.ndarray):
                self._data = jax.device_get(self._data)
            found: np.ndarray = self._data
            return found


class Staging:
    """Copies under way, and a bound on what they take on the devices.

    Attributes:
        total_bytes: All that was copied.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self._staged_bytes = 0
        self._waiting: collections.deque[tuple[int, list[Arrival]]] = (
            collections.deque()
        )

    def make_room(self, size_bytes: int) -> None:
        """Wait for the oldest copies, where there are too many."""
        while self._waiting and self._staged_bytes + size_bytes > STAGED_BYTES:
            freed, arrivals = self._waiting.popleft()
            for arrival in arrivals:
                arrival.wait()
            self._staged_bytes -= freed

    def bring(self, size_bytes: int, arrays: Sequence[jax.Array]) -> list[Arrival]:
        """Start copies of arrays of ours that take so much on each device."""
        arrivals = [Arrival(data) for data in arrays]
        self.total_bytes += sum(arrival.size_bytes for arrival in arrivals)
        self._staged_bytes += size_bytes
        self._waiting.append((size_bytes, arrivals))
        return arrivals


class DeviceLeaf:
    """A leaf that is compared where it lies. Lives as long as `save()` does.

    Attributes:
        leaf: The leaf; without shards.
        shards: Its shards on this process's devices.
        boxes: Of each of these.
        chunks: What this process writes of it, by shard; see `add`.
        found: Its digests now; None: they were not made.
        changed: For each shard which blocks differ from the kept digests; None: not
            known.
        detector: The program that makes both.
    """

    def __init__(self, staged: StagedLeaf) -> None:
        self.leaf = staged.leaf
        self.boxes = tuple(staged.parts)
        self._arrays = list(staged.parts.values())
        self.shards = Shards(
            devices=tuple(next(iter(data.devices())) for data in self._arrays),
            shape=self._arrays[0].shape,
            dtype=np.dtype(self._arrays[0].dtype),
        )
        self.chunks: dict[Box, list[Chunk]] = {box: [] for box in self.boxes}
        self.found: LeafDigests | None = None
        self.changed: Any = None
        self.detector = Detect(shards=self.shards)
        self._made: tuple[jax.Array, jax.Array] | None = None
        self._bundle = self.shards.bundled(self._arrays)

    def detect(self, kept: LeafDigests | None) -> None:
        """Have digests made and compared with kept ones."""
        blocks = (len(self.boxes), digests.LANES, self.shards.blocks)
        if kept and (kept.shards, kept.boxes) != (self.shards, self.boxes):
            kept = None
        old = kept.array if kept else device.put(self.shards, np.zeros(blocks, "u4"))
        self._made = device.run(self.detector, self._bundle, old)
        if self._made is None:
            return
        array, changed = self._made
        self.found = LeafDigests(shards=self.shards, boxes=self.boxes, array=array)
        self.changed = changed if kept else None

    def made_of(self, box: Box) -> list[Arrival]:
        """What the program made of one shard: digests, and where they are not zero.

        Of a leaf that it made digests of without kept ones to compare them with.
        """
        place = self.shards.devices[self.boxes.index(box)]
        return [
            Arrival(shard.data)
            for array in self._made or ()
            for shard in array.addressable_shards
            if shard.device == place
        ]

    def add(self, chunk: Chunk) -> None:
        """A chunk that this process writes."""
        shard, _ = chunk.shard
        self.chunks[shard].append(chunk)

    def unchanged(self) -> Iterator[Chunk]:
        """Chunks of which no block has changed."""
        if self.changed is None:
            return
        size = digests.geometry(self.shards.shape).block_elements
        for (box, cut), mask in zip(self.chunks.items(), self.changed):
            before = np.concatenate([[0], np.cumsum(mask)])
            for chunk in cut:
                low, high = self._span(chunk.box, box)
                if before[low // size] == before[high // size + 1]:
                    yield chunk

    def _span(self, box: Box, origin: Box) -> tuple[int, int]:
        """Where the first and the last element lie in the shard, in C order."""
        low = high = 0
        for (start, stop), (first, _), side in zip(box, origin, self.shards.shape):
            low = low * side + start - first
            high = high * side + stop - first - 1
        return low, high

    def bring(
        self,
        wanted: Callable[[Chunk], bool],
        staging: Staging,
        *,
        entire: Box | None = None,
    ) -> HostLeaf:
        """Start to copy the wanted chunks; shards of which many are, as a whole.

        Args:
            wanted: Which.
            staging: Copies under way.
            entire: A shard that comes as a whole if any of it is wanted.
        """
        lists = [[c for c in cut if wanted(c)] for cut in self.chunks.values()]
        small, large = self._gathers()
        ready = small and large and device.is_ready(small) and device.is_ready(large)
        whole = [
            not ready or box == entire or self._is_dense(one)
            for box, one in zip(self.boxes, lists)
        ]
        boxes = [
            [] if as_one else [chunk.box for chunk in one]
            for as_one, one in zip(whole, lists)
        ]
        pieces: list[dict[Box, Callable[[], np.ndarray]]] = [{} for _ in boxes]
        while small and large and (most := max(map(len, boxes))):
            program = large if most >= large.count else small
            heads = [one[: program.count] for one in boxes]
            boxes = [one[program.count :] for one in boxes]
            for found, got in zip(pieces, self._gather(program, heads, staging)):
                found.update(got)
        shards = [
            (
                box,
                Brought(
                    whole=self._copy(data, staging) if as_one and one else None,
                    pieces=found,
                ),
            )
            for box, data, as_one, one, found in zip(
                self.boxes, self._arrays, whole, lists, pieces
            )
        ]
        return dataclasses.replace(self.leaf, shards=shards)

    def programs(self) -> list[Program]:
        """What the leaf needs."""
        gathers = [program for program in self._gathers() if program]
        return [self.detector, *gathers]

    def _is_dense(self, wanted: Sequence[Chunk]) -> bool:
        count = sum(chunks.element_count(chunk.box) for chunk in wanted)
        return count > _WHOLE_SHARE * math.prod(self.shards.shape)

    def _gathers(self) -> tuple[Gather | None, Gather | None]:
        """Programs for one box and for many; None: chunks are not taken one by one."""
        cut = itertools.chain.from_iterable(self.chunks.values())
        shapes = {chunks.box_shape(chunk.box) for chunk in cut}
        if not shapes:
            return None, None
        size = tuple(map(max, zip(*shapes)))
        largest = math.prod(size)
        if largest > 2 * max(map(math.prod, shapes)):
            return None, None  # long ones and wide ones; of another mesh
        count = _BATCH_BYTES // (largest * self.shards.dtype.itemsize)
        counts = 1, min(max(count, 1), _BATCH_BOXES)
        small, large = (Gather(shards=self.shards, size=size, count=n) for n in counts)
        return small, large

    def _gather(
        self, program: Gather, boxes: Sequence[Sequence[Box]], staging: Staging
    ) -> list[Mapping[Box, Callable[[], np.ndarray]]]:
        """Copy boxes of each shard, at most as many as the program takes."""
        # A slice never reaches beyond the shard; one of less than full size begins
        # earlier, and what is too much of it is cut off on the host.
        latest = np.subtract(self.shards.shape, program.size)
        starts = np.zeros((len(boxes), program.count, len(program.size)), np.int32)
        places: list[dict[Box, tuple[Any, ...]]] = []
        for origin, wanted, rows in zip(self.boxes, boxes, starts):
            inside: dict[Box, tuple[Any, ...]] = {}
            for number, box in enumerate(wanted):
                offsets = [a - first for (a, _), (first, _) in zip(box, origin)]
                rows[number] = np.minimum(offsets, latest)
                inside[box] = (
                    number,
                    *(
                        slice(offset - start, offset - start + side)
                        for offset, start, side in zip(
                            offsets, rows[number].tolist(), chunks.box_shape(box)
                        )
                    ),
                )
            places.append(inside)
        item_bytes = self.shards.dtype.itemsize
        size_bytes = program.count * math.prod(program.size) * item_bytes
        staging.make_room(size_bytes)
        made = device.run(program, self._bundle, device.put(self.shards, starts))
        parts = {shard.device: shard.data for shard in made.addressable_shards}
        needed = [one for one, wanted in zip(self.shards.devices, boxes) if wanted]
        arrivals = staging.bring(size_bytes, [parts[one] for one in needed])
        by_device = dict(zip(needed, arrivals))
        dtype = self.shards.dtype
        return [
            {
                box: functools.partial(_cut_out, by_device[one], inside[box], dtype)
                for box in inside
            }
            for one, inside in zip(self.shards.devices, places)
        ]

    def _copy(self, data: jax.Array, staging: Staging) -> Callable[[], np.ndarray]:
        """Copy a whole shard into memory of the host that the device writes to."""
        (place,) = data.devices()
        if any(memory.kind == _PINNED for memory in place.addressable_memories()):
            data = jax.device_put(
                data, SingleDeviceSharding(place, memory_kind=_PINNED)
            )
            (arrival,) = staging.bring(0, [data])
            return arrival.wait
        (arrival,) = staging.bring(0, [data])
        array = arrival.wait()  # the caller's: not to be read later
        return lambda: array


def _cut_out(arrival: Arrival, index: tuple[Any, ...], dtype: np.dtype) -> np.ndarray:
    piece: np.ndarray = arrival.wait()[index].view(dtype)
    return piece


def read_masks(compared: Sequence[DeviceLeaf]) -> None:
    """Bring to the host which blocks changed; this is what a save waits for."""
    waiting: list[tuple[list[DeviceLeaf], list[jax.Array]]] = []
    known = [leaf for leaf in compared if leaf.changed is not None]
    for program, members in _joins(known):
        masks = [leaf.changed for leaf in members]
        joined = device.run(program, *masks)
        arrays = masks if joined is None else [joined]
        for array in arrays:
            array.copy_to_host_async()
        waiting.append((members, arrays))
    for members, arrays in waiting:
        whole = np.concatenate([jax.device_get(array) for array in arrays], axis=1)
        ends = itertools.accumulate(leaf.shards.blocks for leaf in members)
        for leaf, end in zip(members, ends):
            leaf.changed = whole[:, end - leaf.shards.blocks : end]


def programs_of(compared: Sequence[DeviceLeaf]) -> list[Program]:
    """What leaves like these need, each once."""
    wanted = [program for leaf in compared for program in leaf.programs()]
    wanted += [program for program, _ in _joins(compared)]
    return list(dict.fromkeys(wanted))


def _joins(compared: Sequence[DeviceLeaf]) -> list[tuple[Join, list[DeviceLeaf]]]:
    """Leaves that lie on the same devices, and what joins their masks."""
    groups: dict[tuple[Any, ...], list[DeviceLeaf]] = {}
    for leaf in compared:
        groups.setdefault(leaf.shards.devices, []).append(leaf)
    joins = []
    for devices, members in groups.items():
        blocks = tuple(leaf.shards.blocks for leaf in members)
        joins.append((Join(devices=devices, blocks=blocks), members))
    return joins
