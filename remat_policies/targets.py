"""Devices that exist on paper, for the compilers to compile for.

libtpu compiles for any TPU slice, and jax's CUDA plugin for any GPU it is told about,
on a machine that has neither. Does not belong here: compiling (see `verify`).
"""

import contextlib
import functools
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import topologies

from remat_policies import devices
from remat_policies.errors import CompilerMissingError, InvalidInputError

LARGEST_COUNT = 256
"""Devices of a target at most: a full pod of v5e or v6e."""

_TORUS_DIMENSIONS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}

_TPU_ENVIRONMENT = {
    # Without these libtpu asks a cloud machine's services what it runs on, and waits.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    # Its lock file keeps one process from another's chips; nobody uses chips here.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

_CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """What XLA has to know of a GPU beyond its memory: NVIDIA's whitepapers have it."""

    description: str
    capability: int
    multiprocessors: int
    fp32_lanes: int
    l2_bytes: int
    clock_ghz: float
    shared_bytes: int


_GPUS = {
    "a100": _Gpu(
        description="NVIDIA A100-SXM4-80GB",
        capability=8,
        multiprocessors=108,
        fp32_lanes=64,
        l2_bytes=40 << 20,
        clock_ghz=1.41,
        shared_bytes=164 << 10,
    ),
    "h100": _Gpu(
        description="NVIDIA H100 80GB HBM3",
        capability=9,
        multiprocessors=132,
        fp32_lanes=128,
        l2_bytes=50 << 20,
        clock_ghz=1.98,
        shared_bytes=228 << 10,
    ),
    "h200": _Gpu(
        description="NVIDIA H200",
        capability=9,
        multiprocessors=132,
        fp32_lanes=128,
        l2_bytes=50 << 20,
        clock_ghz=1.98,
        shared_bytes=228 << 10,
    ),
    "b200": _Gpu(
        description="NVIDIA B200",
        capability=10,
        multiprocessors=148,
        fp32_lanes=128,
        l2_bytes=126 << 20,
        clock_ghz=1.965,
        shared_bytes=228 << 10,
    ),
}


def aot_devices(target: str, count: int = 1) -> tuple[jax.Device, ...]:
    """Devices of a target to compile for; nothing can run on them.

    Args:
        target: Name of a device, as `devices.device` knows it.
        count: How many: a power of two up to `LARGEST_COUNT`. TPUs come as the most
            compact slice of that many chips, GPUs as hosts of eight.

    Raises:
        InvalidInputError: The target is unknown, or comes in no such number.
        CompilerMissingError: Its compiler is not installed or did not load.
    """
    return _aot_devices(devices.device(target).name, count)


def aot_mesh(target: str, axes: Mapping[str, int] | None = None) -> jax.sharding.Mesh:
    """A mesh of a target's devices, by size of each axis; of one device without axes.

    Raises:
        InvalidInputError: The target is unknown, or comes in no such number.
        CompilerMissingError: Its compiler is not installed or did not load.

    Example:
        >>> dict(aot_mesh("v5e", {"data": 2, "model": 4}).shape)
        {'data': 2, 'model': 4}
    """
    axes = {"devices": 1} if axes is None else dict(axes)
    chosen = aot_devices(target, math.prod(axes.values()))
    grid = np.array(chosen, dtype=object).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(grid, tuple(axes))


@functools.cache
def _aot_devices(name: str, count: int) -> tuple[jax.Device, ...]:
    if not 1 <= count <= LARGEST_COUNT or count.bit_count() != 1:
        raise InvalidInputError(
            f"{count} devices of {name!r} are no whole slice: ask for a power of two "
            f"from 1 to {LARGEST_COUNT}."
        )
    if name in _TORUS_DIMENSIONS:
        return _tpus(name, count)
    return _gpus(name, count)


def _tpus(name: str, count: int) -> tuple[jax.Device, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise _missing(name, "libtpu is not installed", "tpu-aot")
    # Programs of a v4 see the two cores of a chip as one device, except ahead of time.
    options = {"chip_config_name": "megacore"} if name == "v4" else {}
    with _defaults(_TPU_ENVIRONMENT):
        described = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{name}:{_torus(count, _TORUS_DIMENSIONS[name])}",
            **options,
        )
    return tuple(described.devices)


def _torus(count: int, dimensions: int) -> str:
    """The most compact torus of 2**n chips: 8 are 2x4, or 2x2x2."""
    doublings, sizes = count.bit_length() - 1, []
    for left in range(dimensions, 0, -1):
        sizes.append(1 << doublings // left)
        doublings -= doublings // left
    return "x".join(map(str, sizes))


def _gpus(name: str, count: int) -> tuple[jax.Device, ...]:
    if not any(map(_is_installed, _CUDA_PLUGINS)):
        raise _missing(name, "jax's CUDA plugin is not installed", "gpu-aot")
    hosts, each = (1, count) if count <= 8 else (count // 8, 8)
    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            target_config=_target_config(name),
            topology=f"1x{hosts}x{each}",
        )
    except NotImplementedError as error:
        # jax left the plugin out at its start, for want of a driver or CUDA libraries.
        raise CompilerMissingError(
            f"cannot compile for {name!r}: jax started without its CUDA plugin, as it "
            "does where there is no GPU. Set JAX_PLATFORMS=cpu before jax starts; it "
            "then leaves the search for GPUs out and keeps the compiler."
        ) from error
    return tuple(described.devices)


def _target_config(name: str) -> str:
    """The GPU in XLA's notation: the fields its cost models and limits cannot miss."""
    gpu, known = _GPUS[name], devices.device(name)
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block_optin: {gpu.shared_bytes - 1024}
  core_count: {gpu.multiprocessors}
  fpus_per_core: {gpu.fp32_lanes}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  memory_bandwidth: {int(known.hbm_bytes_per_second)}
  device_memory_size: {known.hbm_bytes}
  cuda_compute_capability {{ major: {gpu.capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.description}"
"""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the package it would be in
        return False


def _missing(name: str, found: str, extra: str) -> CompilerMissingError:
    return CompilerMissingError(
        f"cannot compile for {name!r}: {found}. Run `pip install orbax-delta[{extra}]` "
        "(Linux on x86-64); no accelerator is needed."
    )


@contextlib.contextmanager
def _defaults(environment: Mapping[str, str]) -> Iterator[None]:
    """Set what is absent, for libtpu to read while it loads, and take it out again.

    What stayed would reach child processes, which may have real TPUs to find.
    """
    absent = [name for name in environment if name not in os.environ]
    os.environ.update({name: environment[name] for name in absent})
    try:
        yield
    finally:
        for name in absent:
            os.environ.pop(name, None)
