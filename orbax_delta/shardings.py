"""Shardings: which process holds what, and documents kept with a step."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import xxhash
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from orbax_delta import chunks
from orbax_delta.chunks import Box
from orbax_delta.errors import InvalidInputError
from orbax_delta.fields import Json, check_sharding

# What jax raises for a mesh, spec or memory kind that it cannot make.
_JAX_REFUSES = (ValueError, TypeError, LookupError, NotImplementedError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshDocument:
    """The part of a NamedSharding's document that `ShardingMetadata` users want."""

    shape: Sequence[int]
    axis_names: Sequence[str]
    axis_types: Sequence[str]
    device_ids: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which process holds what of an array.

    Attributes:
        holders: For the box of each shard the processes that hold it, in order.
        name: A digest of that; never empty.
    """

    holders: Mapping[Box, Sequence[int]]
    name: str


@functools.lru_cache(maxsize=4096)
def layout(
    sharding: Sharding, shape: tuple[int, ...], processes: tuple[int, ...]
) -> Layout:
    """The layout of an array over some processes; the others count for nothing."""
    found: dict[Box, set[int]] = collections.defaultdict(set)
    placed: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in placed.items():
        if index is not None:
            found[chunks.index_box(index, shape)].add(device.process_index)
    holders = {
        box: tuple(sorted(found[box].intersection(processes))) for box in sorted(found)
    }
    name = xxhash.xxh3_64_hexdigest(repr(holders).encode())
    return Layout(holders=holders, name=name)


@functools.lru_cache(maxsize=4096)
def to_document(sharding: Sharding) -> Json:
    """JSON for a sharding; None for kinds that cannot be rebuilt from a document."""
    document = _document(sharding)
    try:
        check_sharding(document)
    except InvalidInputError:
        return None  # a reader would refuse it, and the step with it
    return document


def _document(sharding: Sharding) -> Json:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh = sharding.mesh
        if not all(isinstance(name, str) for name in mesh.axis_names):
            return None  # jax takes anything for a name, a document texts alone
        axis_types = mesh.axis_types or (AxisType.Auto,) * len(mesh.axis_names)
        return {
            "kind": "named",
            "mesh": {
                "shape": list(mesh.devices.shape),
                "axis_names": list(mesh.axis_names),
                "axis_types": [str(kind.name) for kind in axis_types],
                "device_ids": [int(device.id) for device in mesh.devices.flat],
            },
            "platform": mesh.devices.flat[0].platform,
            "spec": [_axes(entry) for entry in sharding.spec],
            "memory_kind": sharding.memory_kind,
        }
    if isinstance(sharding, SingleDeviceSharding):
        device: Any = next(iter(sharding.device_set))
        return {
            "kind": "single",
            "device": str(device),
            "device_id": int(device.id),
            "platform": device.platform,
            "memory_kind": sharding.memory_kind,
        }
    return None


def _axes(entry: Any) -> Json:
    if entry is None or isinstance(entry, str):
        return entry
    return [str(name) for name in entry]


def from_document(document: Json, shape: Sequence[int]) -> Sharding | None:
    """The sharding on this process's devices for an array of `shape`.

    None where the devices differ, or where this jax cannot lay such an array out so.
    """
    if document is None or len(document.get("spec", ())) > len(shape):
        return None
    try:
        sharding = _sharding(document)
        if sharding is not None:
            sharding.shard_shape(tuple(shape))
    except _JAX_REFUSES:
        return None
    return sharding


def _sharding(document: Json) -> Sharding | None:
    devices = {
        device.id: device
        for device in jax.devices()
        if device.platform == document["platform"]
    }
    memory_kind = document["memory_kind"]
    if document["kind"] == "single":
        device = devices.get(document["device_id"])
        if jax.process_count() > 1:
            return None
        return device and SingleDeviceSharding(device, memory_kind=memory_kind)
    mesh = mesh_document(document)
    if not set(mesh.device_ids) <= set(devices):
        return None
    if len({devices[i].process_index for i in mesh.device_ids}) < jax.process_count():
        return None  # all processes must come to the same decision
    grid = np.array([devices[i] for i in mesh.device_ids], dtype=object)
    return NamedSharding(
        Mesh(
            grid.reshape(mesh.shape),
            tuple(mesh.axis_names),
            axis_types=axis_types(mesh),
        ),
        partition_spec(document),
        memory_kind=memory_kind,
    )


def mesh_document(document: Json) -> MeshDocument:
    """The mesh of a document of kind `named`."""
    return MeshDocument(**document["mesh"])


def axis_types(mesh: MeshDocument) -> tuple[AxisType, ...]:
    """The types of its axes.

    Raises:
        KeyError: This jax knows no such type.
    """
    return tuple(AxisType[name] for name in mesh.axis_types)


def partition_spec(document: Json) -> PartitionSpec:
    """The PartitionSpec of a document of kind `named`."""
    return PartitionSpec(  # type: ignore[no-untyped-call] # jax leaves it so
        *(tuple(axes) if isinstance(axes, list) else axes for axes in document["spec"])
    )
