"""Leaves: what each one is, its bytes on the host, and the leaf made from bytes again.

`snapshot` runs in the blocking phase of a save and does no I/O; what it raises depends
on structure and dtypes only. Does not belong here: chunks, records, Orbax.
"""

import dataclasses
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orbax_delta import chunks, dtypes, shardings, trees
from orbax_delta.chunks import Box
from orbax_delta.errors import CorruptionError, FormatError, InvalidInputError
from orbax_delta.hosts import Job
from orbax_delta.manifests import Json, LeafEntry, path_name
from orbax_delta.shardings import Layout
from orbax_delta.unread import Unread

NO_LAYOUT = Layout(holders={}, name="host")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """A shard that is on its way to the host, or of which only some chunks are.

    Attributes:
        whole: Waits for all of it; None: only pieces come.
        pieces: Wait for the chunks that come, by box.
    """

    whole: Callable[[], np.ndarray] | None = None
    pieces: Mapping[Box, Callable[[], np.ndarray]] = dataclasses.field(
        default_factory=dict
    )

    def holds(self, box: Box) -> bool:
        """Whether that chunk comes."""
        return self.whole is not None or box in self.pieces

    def piece(self, box: Box, origin: Box) -> np.ndarray:
        """A chunk that comes, of the shard whose box is `origin`."""
        if self.whole is None:
            return self.pieces[box]()
        return self.whole()[chunks.slices(box, origin)]


HostShard = tuple[Box, np.ndarray | Brought]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostLeaf:
    """A leaf as it was when `save` was called.

    Attributes:
        entry: What the MANIFEST will say of it.
        shards: Distinct shards with their boxes; the arrays may be views of device
            buffers on CPU, which jax does not reuse while they are viewed.
        layout: Which process holds what; nothing of a leaf of this process alone.
    """

    entry: LeafEntry
    shards: Sequence[HostShard]
    layout: Layout = NO_LAYOUT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedLeaf:
    """A leaf that was looked at and not copied yet.

    Attributes:
        leaf: The leaf, with what of it was on the host already.
        parts: Distinct shards on devices of this process, in order of their boxes.
    """

    leaf: HostLeaf
    parts: Mapping[Box, jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """What a copy of the shards takes."""
        return sum(data.nbytes for data in self.parts.values())

    def start(self) -> None:
        """Start to copy the shards to the host."""
        for data in self.parts.values():
            data.copy_to_host_async()

    def finish(self) -> HostLeaf:
        """Wait for the copy; the caller may then donate the arrays."""
        if not self.parts:
            return self.leaf
        shards = [(box, jax.device_get(data)) for box, data in self.parts.items()]
        return dataclasses.replace(self.leaf, shards=shards)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A pytree as it was when `save` was called.

    Attributes:
        structure: For the MANIFEST.
        leaves: In order.
        copied_bytes: Of device arrays, brought to the host.
    """

    structure: Json
    leaves: Sequence[HostLeaf]
    copied_bytes: int

    def outline(self) -> list[str]:
        """What must be alike on all processes, by leaf; values may differ."""
        return [f"{leaf.entry.name}: {_fixed(leaf)}" for leaf in self.leaves]


def _fixed(leaf: HostLeaf) -> str:
    entry = leaf.entry
    if entry.kind not in ("jax", "numpy", "numpy_scalar", "key"):
        return entry.kind  # the primary's is saved, whatever it is
    placed = f" laid out as {leaf.layout.name}" if leaf.layout.holders else ""
    implementation = f" of {entry.value}" if entry.kind == "key" else ""
    shape = list(entry.shape)
    return f"{entry.kind} {entry.dtype}{shape}{implementation}{placed}"


def snapshot(tree: Any, job: Job) -> Snapshot:
    """Bring to the host what this process holds of every leaf.

    Leaves that are on the host already are the primary's: they are the same on all
    processes, or nobody could say which is right.

    Raises:
        InvalidInputError: A leaf cannot be stored; the message names it.
    """
    structure, staged = stage(tree, job)
    for one in staged:
        one.start()
    return Snapshot(
        structure=structure,
        leaves=[one.finish() for one in staged],
        copied_bytes=sum(one.device_bytes for one in staged),
    )


def stage(tree: Any, job: Job) -> tuple[Json, list[StagedLeaf]]:
    """Structure and leaves of a tree, checked; of device arrays nothing is copied.

    Raises:
        InvalidInputError: A leaf cannot be stored; the message names it.
    """
    flat = trees.flatten(tree)
    staged = [
        _stage(path, value, job)
        for path, value in zip(flat.paths, flat.values, strict=True)
    ]
    return flat.structure, staged


def storable(tree: Any) -> bool:
    """Whether every leaf is of a type that `snapshot` takes; looks at no content."""
    try:
        values = trees.flatten(tree).values
    except InvalidInputError:
        return False
    arrays = jax.Array | np.ndarray | np.generic
    return all(
        isinstance(value, arrays) or type(value) in _PLAIN_LEAVES for value in values
    )


def _stage(path: trees.Path, value: Any, job: Job) -> StagedLeaf:
    if isinstance(value, jax.core.Tracer):
        raise _unsupported(path, value, "save outside of jit, grad and vmap")
    if isinstance(value, jax.Array):
        return _stage_jax(path, value, job)
    if isinstance(value, np.ndarray | np.generic):
        return StagedLeaf(leaf=_numpy_leaf(path, value, job))
    if isinstance(value, Unread):
        return StagedLeaf(leaf=_unread_leaf(path, value, job))
    reader = _PLAIN_LEAVES.get(type(value))
    if reader is None:
        raise _unsupported(
            path,
            value,
            "expected a jax or numpy array, a typed key, int, float, bool, complex, "
            "str, bytes or None; convert it, or register its type as a pytree node",
        )
    leaf = reader(path, value)
    if not job.primary:
        leaf = dataclasses.replace(leaf, shards=())
    return StagedLeaf(leaf=leaf)


def _unsupported(path: trees.Path, value: Any, hint: str) -> InvalidInputError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return InvalidInputError(f"leaf {path_name(path)} is a {kind}: {hint}")


def _stage_jax(path: trees.Path, value: jax.Array, job: Job) -> StagedLeaf:
    if value.is_deleted():
        raise InvalidInputError(
            f"leaf {path_name(path)} has been deleted or donated; save the state that "
            "the training step returned"
        )
    if getattr(getattr(value.sharding, "spec", None), "unreduced", None):
        raise _unsupported(path, value, "its sums over devices are not done; reduce it")
    if not job.alone and value.is_fully_addressable:
        raise _unsupported(
            path,
            value,
            "host local, while several processes save together, and nobody knows whose "
            "is right. Make it global (jax.make_array_from_callback with a sharding "
            "over all processes), or give a numpy array, of which the primary's is "
            "saved",
        )
    document = shardings.to_document(value.sharding)
    kind, implementation = "jax", None
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        kind, implementation = "key", jax.random.key_impl(value)
        if not isinstance(implementation, str):
            raise _unsupported(
                path, value, "keys of an implementation that jax knows by no name"
            )
        value = jax.random.key_data(value)
    entry = LeafEntry(
        path=path,
        kind=kind,
        dtype=_element(path, value.dtype).name,
        shape=value.shape,
        sharding=document,
        value=implementation,
    )
    distinct: dict[Box, jax.Array] = {}
    for shard in value.addressable_shards:
        box = chunks.index_box(shard.index, value.shape)
        distinct.setdefault(box, shard.data)
    own = job.alone and value.is_fully_addressable
    layout = NO_LAYOUT if own else _layout(path, value, job)
    if value.size == 0:
        distinct = {}
    leaf = HostLeaf(entry=entry, shards=(), layout=layout)
    return StagedLeaf(leaf=leaf, parts=dict(sorted(distinct.items())))


def _layout(path: trees.Path, value: jax.Array, job: Job) -> Layout:
    """Which of the processes that save hold which shard."""
    layout = shardings.layout(value.sharding, value.shape, tuple(job.processes))
    if not all(layout.holders.values()):
        raise _unsupported(
            path,
            value,
            f"parts of it lie on none of the processes {list(job.processes)} that save",
        )
    return layout


def _numpy_leaf(path: trees.Path, value: np.ndarray | np.generic, job: Job) -> HostLeaf:
    if isinstance(value, np.ma.MaskedArray):
        raise _unsupported(path, value, "save its data and its mask as two leaves")
    kind = "numpy" if isinstance(value, np.ndarray) else "numpy_scalar"
    array = np.asarray(value)
    if job.primary:
        # The caller may change the array as soon as save returns.
        array = np.array(value, order="C", copy=True, subok=False)
    entry = LeafEntry(
        path=path,
        kind=kind,
        dtype=_element(path, array.dtype).name,
        shape=array.shape,
    )
    shards = _single_shard(array) if job.primary else []
    return HostLeaf(entry=entry, shards=shards)


def _unread_leaf(path: trees.Path, value: Unread, job: Job) -> HostLeaf:
    """Each piece is a shard, so that it keeps its cut; it is read when it is needed."""
    entry = dataclasses.replace(value.entry, path=path)
    pieces = value.pieces if job.primary else ()
    shards = [(piece.box, Brought(whole=piece.read)) for piece in pieces]
    return HostLeaf(entry=entry, shards=shards)


def _element(path: trees.Path, dtype: np.dtype) -> dtypes.ElementType:
    try:
        return dtypes.element_type(np.dtype(dtype))
    except InvalidInputError as error:
        raise InvalidInputError(f"leaf {path_name(path)}: {error}") from error


def _single_shard(array: np.ndarray) -> list[HostShard]:
    return [(chunks.whole(array.shape), array)] if array.size else []


def _text_leaf(path: trees.Path, value: str | bytes) -> HostLeaf:
    kind = type(value).__name__
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    array = np.frombuffer(data, np.uint8)
    entry = LeafEntry(path=path, kind=kind, dtype="uint8", shape=array.shape)
    return HostLeaf(entry=entry, shards=_single_shard(array))


def _value_leaf(path: trees.Path, value: Any) -> HostLeaf:
    document = _VALUE_WRITERS[type(value).__name__](value)
    entry = LeafEntry(path=path, kind=type(value).__name__, value=document)
    return HostLeaf(entry=entry, shards=())


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _float_from_bits(document: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(document))
    return float(value)


# Hexadecimal keeps the bits of a float and the digits of an int of any size.
_VALUE_WRITERS: Mapping[str, Callable[[Any], Json]] = {
    "bool": bool,
    "int": hex,
    "float": _float_bits,
    "complex": lambda value: [_float_bits(value.real), _float_bits(value.imag)],
}
_VALUE_READERS: Mapping[str, Callable[[Json], Any]] = {
    "bool": bool,
    "int": lambda document: int(document, 16),
    "float": _float_from_bits,
    "complex": lambda document: complex(*map(_float_from_bits, document)),
}
_PLAIN_LEAVES: Mapping[type, Callable[[trees.Path, Any], HostLeaf]] = {
    bool: _value_leaf,
    int: _value_leaf,
    float: _value_leaf,
    complex: _value_leaf,
    str: _text_leaf,
    bytes: _text_leaf,
}


def plain_value(entry: LeafEntry) -> bool | int | float | complex:
    """The value of a leaf of VALUE_KINDS."""
    value: bool | int | float | complex = _VALUE_READERS[entry.kind](entry.value)
    return value


def text_value(entry: LeafEntry, array: np.ndarray) -> str | bytes:
    """The str or bytes leaf whose content is `array`.

    Raises:
        CorruptionError: A str leaf is not UTF-8.
    """
    data = array.tobytes()
    if entry.kind != "str":
        return data
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CorruptionError(
            f"leaf {entry.name} is a str, but its content is not UTF-8: {error}"
        ) from error


def key_struct(entry: LeafEntry) -> Any:
    """What typed keys a leaf of kind `key` holds: a struct of shape and dtype.

    Raises:
        FormatError: jax knows no such implementation, or the stored data are none of
            its keys.
    """
    make = functools.partial(jax.random.wrap_key_data, impl=entry.value)
    data: Any = jax.ShapeDtypeStruct(entry.shape, entry.element.dtype)  # type: ignore[no-untyped-call] # jax leaves it so
    try:
        return jax.eval_shape(make, data)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(
            f"leaf {entry.name} holds typed keys of the implementation "
            f"{entry.value!r:.80} in {entry.dtype} of shape {entry.shape}, which this "
            f"jax cannot make ({error!s:.200}). Register the implementation before you "
            "restore"
        ) from error
