"""Programs that run where arrays live: which blocks changed, and a copy of some boxes.

A leaf's shards on this process's devices are bundled, without a copy, to one array over
a mesh of just these devices, so that one program serves all of them and has no
collective: no process ever waits for another one here. Programs are compiled ahead of
time, in the background of a save; one that is not ready is not waited for.

Does not belong here: what is copied and why (`transfers`), the digest's definition
(`digests`).
"""

import collections
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_delta import digests, dtypes
from orbax_delta.digests import LANES

_logger = logging.getLogger("orbax_delta")

_AXIS = "shard"
_ON_SHARDS = PartitionSpec(_AXIS)  # type: ignore[no-untyped-call] # jax leaves it so
_WIDEST_BITS = 32

MOST_IDLE = 256
"""Programs that are kept beside those of the save that was last."""

# What jax raises for a program that it or the device's compiler cannot make.
_REFUSED = (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError)

_Lanes = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def can_compare(shape: Sequence[int], dtype: np.dtype) -> bool:
    """Whether shards like this can be compared on a device.

    Wide elements would need 64-bit arithmetic, and rows that do not divide into pieces
    a second copy of the array; of packed ones jax and XLA name the layout differently
    (0.10.2), so that a program compiled ahead of time refuses them.
    """
    plan = digests.geometry(shape)
    even = not plan.pieces or shape[-1] % digests.PIECE_ELEMENTS == 0
    narrow = 8 <= dtypes.element_type(dtype).bits <= _WIDEST_BITS
    return bool(shape) and even and narrow and plan.blocks > 0


# --- what runs on one shard -----------------------------------------------------------


def block_digests(shard: jax.Array) -> jax.Array:
    """`uint32[4, blocks]`: as `digests.block_digests`, the other way round."""
    plan = digests.geometry(shard.shape)
    if plan.pieces:
        shape = (*shard.shape[:-1], plan.pieces, digests.PIECE_ELEMENTS)
        shard = lax.reshape(shard, shape)
    # Otherwise as it is: on TPU another shape is another layout, and a copy.
    words = lax.convert_element_type(_as_unsigned(shard), np.dtype(np.uint32))
    lead = words.ndim - len(plan.segment)
    keys = digests.segment_keys(plan.elements)
    keys = keys.reshape(2 * LANES, *[1] * lead, *plan.segment)
    terms = [_term(words, keys, lane) for lane in range(LANES)]
    sums = [one.reshape(-1) for one in _added(terms, range(lead, words.ndim))]
    if plan.group > 1:
        sums = _grouped(sums, plan)
    return jnp.stack(_finalised(sums))


def _as_unsigned(array: jax.Array) -> jax.Array:
    """The bits of the elements as unsigned integers of the same width."""
    if array.dtype == np.bool_:
        return lax.convert_element_type(array, np.dtype(np.uint8))
    if jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        return array
    bits = dtypes.element_type(array.dtype).bits
    found: jax.Array = lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}"))
    return found


def _term(words: jax.Array, keys: digests.Words, lane: int) -> jax.Array:
    value = _rotated(words, 8) if lane % 2 else words
    high = lax.shift_right_logical(value, jnp.full_like(value, 16))
    return lax.mul(value + keys[2 * lane], high + keys[2 * lane + 1])


def _added(terms: Sequence[jax.Array], axes: Iterable[int]) -> list[jax.Array]:
    # One reduction of four operands reads the array once; four read it four times.
    zeros = (np.uint32(0),) * len(terms)
    return list(lax.reduce(tuple(terms), zeros, _sum_each, tuple(axes)))


def _sum_each(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> Any:
    return tuple(map(lax.add, left, right))


def _grouped(sums: Sequence[jax.Array], plan: digests.Geometry) -> list[jax.Array]:
    """The lanes of blocks of several segments."""
    missing = plan.blocks * plan.group - plan.segments
    rows = [
        lax.pad(one, np.uint32(0), [(0, missing, 0)]).reshape(plan.blocks, plan.group)
        for one in sums
    ]
    keys = digests.block_keys(plan.group)[:, None]
    terms = [
        functools.reduce(
            lax.add, (_term(rows[q], keys[..., q], lane) for q in range(LANES))
        )
        for lane in range(LANES)
    ]
    return _added(terms, [1])


def _rotated(words: jax.Array, by: int) -> jax.Array:
    left = lax.shift_left(words, jnp.full_like(words, by))
    return left | lax.shift_right_logical(words, jnp.full_like(words, 32 - by))


def _finalised(sums: Sequence[jax.Array]) -> _Lanes:
    a, b, c, d = sums
    for _ in range(4):
        a = a + b
        d = _rotated(d ^ a, 16)
        c = c + d
        b = _rotated(b ^ c, 12)
        a = a + b
        d = _rotated(d ^ a, 8)
        c = c + d
        b = _rotated(b ^ c, 7)
    return a, b, c, d


def _detect(shard: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """New digests `[1, 4, blocks]`, and which blocks differ from the kept ones."""
    found = block_digests(shard)[None]
    return found, (found != kept).any(axis=1)


def _gather(
    shard: jax.Array, starts: jax.Array, *, size: tuple[int, ...], early: bool
) -> jax.Array:
    """Boxes of one size, `[count, *size]`, as unsigned integers.

    As integers, because XLA's CPU backend may quiet NaNs where it moves floats, and
    debug_nans looks at floats. A TPU would copy the whole array to have it as integers
    first: there the boxes are taken out before.
    """
    source = _as_unsigned(shard) if early else shard
    boxes = [lax.dynamic_slice(source, list(one), size) for one in starts[0]]
    return jnp.stack([box if early else _as_unsigned(box) for box in boxes])


def _join(*masks: jax.Array) -> jax.Array:
    return jnp.concatenate(masks, axis=1)


# --- programs -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Shards of one shape on different devices of this process, one on each.

    Attributes:
        devices: The devices, in the order of the shards.
        shape: Of each shard.
        dtype: Of the elements.
    """

    devices: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def blocks(self) -> int:
        """Blocks of a shard."""
        return digests.geometry(self.shape).blocks

    @property
    def size_bytes(self) -> int:
        """Of a shard."""
        return math.prod(self.shape) * self.dtype.itemsize

    def bundled(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """One array of the shards, along the first axis; no copy, and not to be kept.

        It is deleted with the arrays that the caller may donate.
        """
        first, *rest = self.shape
        shape = (len(self.devices) * first, *rest)
        sharding = _sharding(self.devices)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays))

    def struct(self) -> Any:
        """What a program is told of the bundle."""
        return _struct(self.devices, self.shape, self.dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Detect:
    """(bundle, kept digests) -> (digests, which blocks changed).

    Digests are `uint32[devices, 4, blocks]`, changes `bool[devices, blocks]`.
    """

    shards: Shards

    @property
    def devices(self) -> tuple[Any, ...]:
        """Where it runs."""
        return self.shards.devices

    def lower(self) -> Any:
        """The program, for a compiler."""
        kept = _struct(self.devices, (1, LANES, self.shards.blocks), np.uint32)
        return _lower(_detect, self.devices, self.shards.struct(), kept)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """(bundle, starts) -> boxes, as unsigned integers.

    Attributes:
        shards: The shards.
        size: Of a box.
        count: Boxes taken of each shard; `starts` is `int32[devices, count, axes]`.
    """

    shards: Shards
    size: tuple[int, ...]
    count: int

    @property
    def devices(self) -> tuple[Any, ...]:
        """Where it runs."""
        return self.shards.devices

    def lower(self) -> Any:
        """The program, for a compiler."""
        starts = _struct(self.devices, (1, self.count, len(self.size)), np.int32)
        early = self.devices[0].platform == "cpu"
        body = functools.partial(_gather, size=self.size, early=early)
        return _lower(body, self.devices, self.shards.struct(), starts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Changes of several leaves -> one array, so that one transfer brings them all.

    Attributes:
        devices: Where it runs.
        blocks: Blocks of each leaf, in order.
    """

    devices: tuple[Any, ...]
    blocks: tuple[int, ...]

    def lower(self) -> Any:
        """The program, for a compiler."""
        masks = [_struct(self.devices, (1, count), np.bool_) for count in self.blocks]
        return _lower(_join, self.devices, *masks)


Program = Detect | Gather | Join


@functools.lru_cache(maxsize=256)
def _mesh(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.array(devices, dtype=object), (_AXIS,))


def _sharding(devices: tuple[Any, ...]) -> NamedSharding:
    return NamedSharding(_mesh(devices), _ON_SHARDS)


def _struct(devices: tuple[Any, ...], shape: Sequence[int], dtype: Any) -> Any:
    """What a program is told of an array with a part of this shape on each device."""
    first, *rest = shape
    whole = (len(devices) * first, *rest)
    return jax.ShapeDtypeStruct(whole, dtype, sharding=_sharding(devices))  # type: ignore[no-untyped-call] # jax leaves it so


def _lower(body: Callable[..., Any], devices: tuple[Any, ...], *structs: Any) -> Any:
    mesh = _mesh(devices)
    specs = (_ON_SHARDS,) * len(structs)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=_ON_SHARDS)
    with jax.set_mesh(mesh):
        return jax.jit(mapped).lower(*structs)


@dataclasses.dataclass(slots=True)
class _Made:
    """What became of a program.

    Attributes:
        call: It, compiled; None: it cannot be.
        proved: Whether it was seen to do what it should.
    """

    call: Any
    proved: bool = False


_compiled: collections.OrderedDict[Program, _Made] = collections.OrderedDict()
"""Those last used last."""
_lock = threading.Lock()


def compile_all(programs: Sequence[Program]) -> None:
    """Have programs ready for the next save; for the background, it takes seconds.

    One that cannot be compiled is logged and not tried again while that is remembered:
    what it is for is then brought to the host whole. What other saves need is kept, as
    far as it is not too much.
    """
    for program in programs:
        if _find(program) is not None:
            continue
        try:
            made = program.lower().compile()
        except _REFUSED as error:
            _logger.warning("copying whole leaves, without %s: %s", program, error)
            made = None
        with _lock:
            _compiled.setdefault(program, _Made(made))
    with _lock:
        while len(_compiled) > MOST_IDLE + len(programs):
            _compiled.popitem(last=False)


def _find(program: Program) -> _Made | None:
    with _lock:
        found = _compiled.get(program)
        if found is not None:
            _compiled.move_to_end(program)
        return found


def is_ready(program: Program) -> bool:
    """Whether it can be run."""
    found = _find(program)
    return found is not None and found.call is not None


def is_proved(program: Program) -> bool:
    """Whether it can be run and its results be relied on."""
    found = _find(program)
    return found is not None and found.proved


def set_proved(program: Program) -> None:
    """Rely on its results, until it is compiled anew."""
    found = _find(program)
    if found is not None:
        found.proved = True


def run(program: Program, *arguments: Any) -> Any:
    """What a program makes of its arguments; None where it is not ready.

    It is only put into the device's queue; nothing is waited for.
    """
    made = _find(program)
    if made is None or made.call is None:
        return None
    # A mesh that the caller has set is about other devices.
    with jax.set_mesh(_mesh(program.devices)):
        return made.call(*arguments)


def put(shards: Shards, values: np.ndarray) -> jax.Array:
    """An array of the host, with an equal part on each device."""
    placed: jax.Array = jax.device_put(values, _sharding(shards.devices))
    return placed
