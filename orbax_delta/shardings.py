"""Shardings as documents: kept with a step, rebuilt where the same devices exist."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from orbax_delta.manifests import Json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshDocument:
    """The part of a NamedSharding's document that `ShardingMetadata` users want."""

    shape: Sequence[int]
    axis_names: Sequence[str]
    axis_types: Sequence[str]
    device_ids: Sequence[int]


def to_document(sharding: Sharding) -> Json:
    """JSON for a sharding; None for kinds that cannot be rebuilt from a document."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh = sharding.mesh
        axis_types = mesh.axis_types or (AxisType.Auto,) * len(mesh.axis_names)
        return {
            "kind": "named",
            "mesh": {
                "shape": list(mesh.devices.shape),
                "axis_names": [str(name) for name in mesh.axis_names],
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


def from_document(document: Json) -> Sharding | None:
    """The sharding on this process's devices, or None where they differ."""
    if document is None:
        return None
    devices = {
        device.id: device
        for device in jax.devices()
        if device.platform == document["platform"]
    }
    memory_kind = document["memory_kind"]
    if document["kind"] == "single":
        device = devices.get(document["device_id"])
        return device and SingleDeviceSharding(device, memory_kind=memory_kind)
    mesh = mesh_document(document)
    if not set(mesh.device_ids) <= set(devices):
        return None
    grid = np.array([devices[i] for i in mesh.device_ids], dtype=object)
    return NamedSharding(
        Mesh(
            grid.reshape(mesh.shape),
            tuple(mesh.axis_names),
            axis_types=tuple(AxisType[name] for name in mesh.axis_types),
        ),
        partition_spec(document),
        memory_kind=memory_kind,
    )


def mesh_document(document: Json) -> MeshDocument:
    """The mesh of a document of kind `named`."""
    return MeshDocument(**document["mesh"])


def partition_spec(document: Json) -> PartitionSpec:
    """The PartitionSpec of a document of kind `named`."""
    return PartitionSpec(  # type: ignore[no-untyped-call] # jax leaves it so
        *(tuple(axes) if isinstance(axes, list) else axes for axes in document["spec"])
    )
