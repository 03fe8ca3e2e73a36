"""From stored leaves to the leaves a caller wants: regions to fill, arrays to make.

`plan_leaf` says which regions of a leaf are needed on this process; once they are
filled, `LeafPlan.finish` makes the leaf. Nothing is cast or cut without being asked.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orbax_delta import chunks, leaves, shardings
from orbax_delta.buffers import Buffers, allocate
from orbax_delta.chunks import Box
from orbax_delta.errors import OutOfMemoryError, StructureError
from orbax_delta.manifests import VALUE_KINDS, LeafEntry
from orbax_delta.reports import human_bytes
from orbax_delta.targets import Make, Wanted

_logger = logging.getLogger("orbax_delta")

_MAKE_OF_KIND = {
    "jax": Make.JAX,
    "key": Make.JAX,
    "numpy": Make.NUMPY,
    "numpy_scalar": Make.NUMPY_SCALAR,
    "str": Make.PYTHON,
    "bytes": Make.PYTHON,
}
_TEXT_KINDS = ("str", "bytes")
_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}


@dataclasses.dataclass(slots=True, kw_only=True)
class LeafPlan:
    """One leaf on its way back.

    Attributes:
        entry: What is stored.
        wanted: What is asked for, with SAVED resolved.
        buffers: Regions of the stored leaf that are needed, to be filled.
    """

    entry: LeafEntry
    wanted: Wanted
    buffers: Buffers

    def finish(self) -> Any:
        """The leaf, once all buffers are filled."""
        entry, wanted = self.entry, self.wanted
        if wanted.make is Make.NOTHING:
            return ...
        if entry.kind in VALUE_KINDS:
            return _from_value(entry, wanted)
        if entry.kind in _TEXT_KINDS:
            return leaves.text_value(entry, self._whole())
        if entry.kind == "key":
            return _key(entry, self._whole(), wanted)
        if wanted.make is Make.JAX:
            return _jax_array(self)
        array = _cast(self._whole(), wanted, entry)
        if wanted.make is Make.NUMPY:
            return array
        if wanted.make is Make.NUMPY_SCALAR:
            return array[()]
        return _python(array.item(), wanted, entry)

    def is_made(self, value: Any) -> bool:
        """Whether an array with the bits that are stored is what `finish` would make.

        Then that very array can stand in its place.
        """
        entry, wanted = self.entry, self.wanted
        if wanted.shape not in (None, value.shape):
            return False
        if wanted.make is Make.NUMPY:
            own = type(value) is np.ndarray and value.flags.writeable
            # One whose elements share memory is no array of its own.
            own = own and not any(
                step == 0 and size > 1
                for step, size in zip(value.strides, value.shape, strict=True)
            )
            return own and bool(value.dtype == _dtype(wanted, entry))
        if wanted.make is not Make.JAX or not isinstance(value, jax.Array):
            return False
        if value.sharding != wanted.sharding or value.aval.weak_type:
            return False
        if entry.kind == "key":
            return wanted.dtype in (None, value.dtype)
        return bool(value.dtype == _dtype(wanted, entry))

    def _whole(self) -> np.ndarray:
        (array,) = self.buffers.values()
        return array


def plan_leaf(entry: LeafEntry, wanted: Wanted, *, moved: list[str]) -> LeafPlan:
    """What has to be read to make one leaf.

    Args:
        entry: What is stored.
        wanted: What is asked for.
        moved: Gets the name of a leaf whose devices are not here, which therefore
            comes back as numpy.

    Raises:
        StructureError: The leaf cannot become what is asked for.
    """
    if wanted.make is Make.SAVED:
        make = _MAKE_OF_KIND.get(entry.kind, Make.PYTHON)
        wanted = dataclasses.replace(wanted, make=make)
    _check(entry, wanted)
    if entry.kind == "key" and wanted.make is not Make.NOTHING:
        leaves.key_struct(entry)  # raises for what is none, before anything is read
    if wanted.make is Make.JAX:
        wanted = _placed(entry, _resolved(entry, wanted), moved)
    regions = dict.fromkeys(_regions(entry, wanted))
    memory = {box: _allocated(entry, wanted, box) for box in regions}
    return LeafPlan(entry=entry, wanted=wanted, buffers=memory)


def _allocated(entry: LeafEntry, wanted: Wanted, box: Box) -> np.ndarray:
    # What a caller gets as numpy is memory of its own.
    aligned = wanted.make is Make.JAX and entry.kind != "key"
    try:
        return allocate(entry, box, aligned=aligned)
    except MemoryError as error:
        raise OutOfMemoryError(
            f"there is no room for {chunks.box_shape(box)} of leaf {entry.name}, which "
            f"is stored as {_describe(entry)}, {human_bytes(entry.memory_bytes)}; "
            "restore fewer leaves, or onto more devices"
        ) from error


def _logical_shape(entry: LeafEntry) -> tuple[int, ...]:
    """Shape of the leaf as users know it; key data has trailing dimensions."""
    return entry.shape[:-1] if entry.kind == "key" else entry.shape


def _check(entry: LeafEntry, wanted: Wanted) -> None:
    if wanted.make is Make.NOTHING:
        return
    stored = f"leaf {entry.name} is stored as {_describe(entry)}"
    asked_key = wanted.dtype is not None and jnp.issubdtype(
        wanted.dtype, jax.dtypes.prng_key
    )
    if entry.kind in _TEXT_KINDS:
        if wanted.make is not Make.PYTHON or (wanted.python or str) not in (str, bytes):
            raise StructureError(f"{stored}; the target asks for {wanted.make.value}")
        if wanted.python not in (None, {"str": str, "bytes": bytes}[entry.kind]):
            raise StructureError(f"{stored}; the target is a {wanted.python}")
        return
    if wanted.python in (str, bytes):
        raise StructureError(f"{stored}; the target is a {wanted.python.__name__}")
    if entry.kind == "key":
        if _described_by_data(entry, wanted):
            return
        if wanted.make is not Make.JAX or (wanted.dtype is not None and not asked_key):
            raise StructureError(
                f"{stored}; the target asks for {wanted.make.value} of dtype "
                f"{wanted.dtype}. Give a typed key (jax.random.key) as target"
            )
    elif asked_key:
        raise StructureError(
            f"{stored}; the target is a typed key. Restore the array and call "
            "jax.random.wrap_key_data"
        )
    shape = () if wanted.make is Make.PYTHON else wanted.shape
    if wanted.make is Make.PYTHON and entry.kind in VALUE_KINDS:
        return
    logical = _logical_shape(entry)
    if shape is None or shape == logical:
        return
    if wanted.strict or len(shape) != len(logical) or entry.kind == "key":
        raise StructureError(f"{stored}; the target asks for shape {shape}")


def _described_by_data(entry: LeafEntry, wanted: Wanted) -> bool:
    """Whether a target names keys by shape and dtype of their data, as Orbax's do."""
    by_data = (Make.JAX, entry.shape, entry.element.dtype)
    return (wanted.make, wanted.shape, wanted.dtype) == by_data


def _describe(entry: LeafEntry) -> str:
    if entry.kind in VALUE_KINDS or entry.kind in _TEXT_KINDS:
        return f"a Python {entry.kind}"
    if entry.kind == "key":
        return f"typed keys ({entry.value}) of shape {_logical_shape(entry)}"
    return f"{entry.dtype} of shape {entry.shape}"


def _resolved(entry: LeafEntry, wanted: Wanted) -> Wanted:
    """What a target without sharding or dtype means for a leaf that is no jax array."""
    if entry.kind in VALUE_KINDS and wanted.dtype is None:
        # What jax makes of a Python number.
        dtype = jax.dtypes.canonicalize_dtype(_NUMBERS[entry.kind])
        return dataclasses.replace(wanted, dtype=dtype)
    if wanted.sharding is None and entry.kind not in ("jax", "key"):
        # Orbax's own targets and metadata describe leaves of the host like this.
        make = _MAKE_OF_KIND.get(entry.kind, Make.NUMPY)
        return dataclasses.replace(wanted, make=make)
    return wanted


def _placed(entry: LeafEntry, wanted: Wanted, moved: list[str]) -> Wanted:
    """Resolve where a jax array goes: as asked, as saved, or the default device."""
    if wanted.make is not Make.JAX:
        return wanted
    by_target = wanted.dtype is not None
    if entry.kind != "key":
        dtype = np.dtype(_dtype(wanted, entry))
        if not _jax_holds(dtype):
            if by_target:
                raise StructureError(
                    f"leaf {entry.name} is wanted as a jax array of {dtype}, which "
                    "this process would shorten. Set jax_enable_x64, or ask for numpy "
                    "or for a narrower dtype"
                )
            moved.append(entry.name)
            return dataclasses.replace(wanted, make=Make.NUMPY)
    if wanted.sharding is not None:
        return wanted
    sharding = shardings.from_document(entry.sharding, _logical_shape(entry))
    if sharding is not None:
        return dataclasses.replace(wanted, sharding=sharding)
    if entry.kind in ("jax", "key"):
        moved.append(entry.name)
    if not by_target and entry.kind != "key":
        return dataclasses.replace(wanted, make=Make.NUMPY)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return dataclasses.replace(wanted, sharding=here)


def _jax_holds(dtype: np.dtype) -> bool:
    """Whether jax has this type in this process, without shortening it."""
    return _jax_knows(dtype) and bool(jax.dtypes.canonicalize_dtype(dtype) == dtype)


@functools.cache
def _jax_knows(dtype: np.dtype) -> bool:
    """Whether jax and its backend hold arrays of this type.

    Only trying tells: jax 0.10.2 has names for 6-bit floats, and no arrays of them.
    """
    try:
        jax.device_put(np.zeros((), dtype))
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _dtype(wanted: Wanted, entry: LeafEntry) -> Any:
    return entry.element.dtype if wanted.dtype is None else wanted.dtype


def _regions(entry: LeafEntry, wanted: Wanted) -> Sequence[Box]:
    if wanted.make is Make.NOTHING or entry.kind in VALUE_KINDS:
        return ()
    if wanted.make is Make.JAX and entry.kind != "key":
        return [box for _, box in _device_boxes(wanted, entry)]
    shape = entry.shape if wanted.shape is None else wanted.shape
    return [chunks.whole(entry.shape if entry.kind == "key" else shape)]


def _device_boxes(wanted: Wanted, entry: LeafEntry) -> list[tuple[jax.Device, Box]]:
    shape = entry.shape if wanted.shape is None else wanted.shape
    try:
        indices = _sharding(wanted).addressable_devices_indices_map(shape)
    except ValueError as error:
        raise StructureError(
            f"leaf {entry.name} of shape {shape} does not fit its target sharding: "
            f"{error}"
        ) from error
    return [
        (device, chunks.index_box(index, shape))
        for device, index in indices.items()
        if index is not None
    ]


def _sharding(wanted: Wanted) -> jax.sharding.Sharding:
    if wanted.sharding is None:
        raise AssertionError("_placed gives every jax array a sharding")
    return wanted.sharding


def _jax_array(plan: LeafPlan) -> jax.Array:
    wanted, entry = plan.wanted, plan.entry
    shape = entry.shape if wanted.shape is None else wanted.shape
    cast = {box: _cast(data, wanted, entry) for box, data in plan.buffers.items()}
    sharding = _sharding(wanted)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding) and cast:
        (data,) = cast.values()
        array: jax.Array = jax.device_put(data, sharding)
        return array
    arrays = [
        jax.device_put(
            cast[box],
            jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for device, box in _device_boxes(wanted, entry)
    ]
    dtype = np.dtype(_dtype(wanted, entry))
    return jax.make_array_from_single_device_arrays(
        shape, sharding, arrays, dtype=dtype
    )


def _spread(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array of all processes from the copy that each of them has.

    Not by `jax.device_put`, which has all processes compare what they put.
    """
    places = sharding.addressable_devices_indices_map(array.shape)
    pieces = [
        jax.device_put(
            array[index],
            jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for device, index in places.items()
        if index is not None
    ]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, pieces, dtype=array.dtype
    )


def _cast(array: np.ndarray, wanted: Wanted, entry: LeafEntry) -> np.ndarray:
    if wanted.dtype is None or np.dtype(wanted.dtype) == array.dtype:
        return array
    to = np.dtype(wanted.dtype)
    if jnp.issubdtype(array.dtype, jnp.inexact) and not jnp.issubdtype(to, jnp.inexact):
        _logger.warning(
            "leaf %s is cast from %s to %s, as its target asks; fractions are lost",
            entry.name,
            array.dtype,
            to,
        )
    try:
        with np.errstate(all="ignore"):
            cast = array.astype(to)
    except TypeError as error:
        raise StructureError(
            f"leaf {entry.name} is stored as {array.dtype}; there is no cast to {to}, "
            "which the target asks for"
        ) from error
    if array.dtype.kind in "iu" and cast.dtype.kind in "iu" and (cast != array).any():
        _logger.warning(
            "leaf %s is cast from %s to %s, as its target asks; some values do not fit",
            entry.name,
            array.dtype,
            to,
        )
    return cast


def _key(entry: LeafEntry, data: np.ndarray, wanted: Wanted) -> jax.Array:
    keys: jax.Array
    if _described_by_data(entry, wanted):
        placed = _spread(data, _sharding(wanted))
        keys = jax.random.wrap_key_data(placed, impl=entry.value)
        return keys
    sharding = wanted.sharding
    everywhere = sharding is not None and not sharding.is_fully_addressable
    # Keys are spread as their data are, whose last dimensions lie together.
    placed = _spread(data, _sharding(wanted)) if everywhere else jax.device_put(data)
    keys = jax.random.wrap_key_data(placed, impl=entry.value)
    if wanted.dtype is not None and keys.dtype != wanted.dtype:
        raise StructureError(
            f"leaf {entry.name} is stored as typed keys ({entry.value}); the target's "
            f"dtype is {wanted.dtype}"
        )
    if sharding is not None and not everywhere:
        keys = jax.device_put(keys, sharding)
    return keys


def _from_value(entry: LeafEntry, wanted: Wanted) -> Any:
    value = leaves.plain_value(entry)
    if wanted.make is Make.PYTHON:
        return _python(value, wanted, entry)
    array = np.asarray(value)
    if array.dtype == object:
        raise StructureError(
            f"leaf {entry.name} holds an int that fits no array; the target asks for "
            f"{wanted.make.value}"
        )
    array = _cast(array, wanted, entry)
    if entry.kind == "int" and array.dtype.kind in "iu" and int(array) != value:
        raise StructureError(
            f"leaf {entry.name} holds the int {value}, which does not fit the target's "
            f"{array.dtype}; ask for a wider dtype or give a Python int as target"
        )
    if wanted.make is Make.NUMPY:
        return array
    if wanted.make is Make.NUMPY_SCALAR:
        return array[()]
    return _spread(array, _sharding(wanted))


def _python(value: Any, wanted: Wanted, entry: LeafEntry) -> Any:
    if wanted.python is None or type(value) is wanted.python:
        return value
    try:
        converted = wanted.python(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise StructureError(
            f"leaf {entry.name} holds a {type(value).__name__}, which cannot become "
            f"the target's {wanted.python.__name__}: {error}"
        ) from error
    if converted != value and value == value:
        _logger.warning(
            "leaf %s holds %r and becomes %r, as its target asks",
            entry.name,
            value,
            converted,
        )
    return converted
