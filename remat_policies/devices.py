"""What there is to know of an accelerator, with where it is known from.

Figures are per device as jax counts devices: a TPU chip, a GPU. Does not belong here:
what the compiler has to know of a device (see `targets`).
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from remat_policies.errors import InvalidInputError

_GIB = 1 << 30
_TPU_HOST_LINK = "host link: 'How to Scale Your Model' (Google DeepMind), chapter TPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of accelerator. Sizes in bytes, rates per second.

    A variant is made with `dataclasses.replace`; the name says for which target to
    compile and stays.

    Attributes:
        name: What targets and `device()` call it.
        kind: Whose compiler it needs.
        hbm_bytes: Memory a program may take. For TPUs what the compiler allows; for
            GPUs what the driver reports, or the data sheet's decimal gigabytes. jax
            itself takes 75 % of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.
        matmul_flops_per_second: Peak of dense bf16 matrix products; a multiply-add
            counts as 2.
        hbm_bytes_per_second: Peak rate of its memory.
        host_bytes_per_second: Peak rate of its link to the host's memory, one way.
        source: Where the figures are from.

    Example:
        >>> device("v5e").hbm_bytes / 2**30
        15.75
    """

    name: str
    kind: Literal["tpu", "gpu"]
    hbm_bytes: int
    matmul_flops_per_second: float
    hbm_bytes_per_second: float
    host_bytes_per_second: float
    source: str


DEVICES: tuple[Device, ...] = (
    Device(
        name="v4",
        kind="tpu",
        hbm_bytes=int(30.75 * _GIB),
        matmul_flops_per_second=275e12,
        hbm_bytes_per_second=1200e9,
        host_bytes_per_second=16e9,
        source="Cloud TPU documentation, page 'TPU v4'; memory: libtpu 0.0.52, both "
        f"cores of a chip as one device; {_TPU_HOST_LINK}",
    ),
    Device(
        name="v5e",
        kind="tpu",
        hbm_bytes=int(15.75 * _GIB),
        matmul_flops_per_second=197e12,
        hbm_bytes_per_second=819e9,
        host_bytes_per_second=15e9,
        source="Cloud TPU documentation, page 'TPU v5e'; memory: libtpu 0.0.52; "
        f"{_TPU_HOST_LINK}",
    ),
    Device(
        name="v5p",
        kind="tpu",
        hbm_bytes=int(95.73 * _GIB),
        matmul_flops_per_second=459e12,
        hbm_bytes_per_second=2765e9,
        host_bytes_per_second=15e9,
        source="Cloud TPU documentation, page 'TPU v5p'; memory: libtpu 0.0.52; "
        f"{_TPU_HOST_LINK}",
    ),
    Device(
        name="v6e",
        kind="tpu",
        hbm_bytes=int(31.24 * _GIB),
        matmul_flops_per_second=918e12,
        hbm_bytes_per_second=1638e9,
        host_bytes_per_second=32e9,
        source="Cloud TPU documentation, page 'TPU v6e'; memory: libtpu 0.0.52; "
        f"{_TPU_HOST_LINK}",
    ),
    Device(
        name="a100",
        kind="gpu",
        hbm_bytes=85_100_068_864,
        matmul_flops_per_second=312e12,
        hbm_bytes_per_second=2039e9,
        host_bytes_per_second=32e9,
        source="NVIDIA A100 data sheet, column 'A100 80GB SXM'; memory: OpenXLA's "
        "target description of the A100-SXM4-80GB; host link: half of PCIe Gen4's 64 "
        "GB/s for both ways",
    ),
    Device(
        name="h100",
        kind="gpu",
        hbm_bytes=84_942_979_072,
        matmul_flops_per_second=989e12,
        hbm_bytes_per_second=3350e9,
        host_bytes_per_second=64e9,
        source="NVIDIA H100 data sheet, column 'H100 SXM', half of the rate with "
        "sparsity; memory: OpenXLA's target description of the H100 80GB HBM3; host "
        "link: half of PCIe Gen5's 128 GB/s for both ways",
    ),
    Device(
        name="h200",
        kind="gpu",
        hbm_bytes=141_000_000_000,
        matmul_flops_per_second=989e12,
        hbm_bytes_per_second=4800e9,
        host_bytes_per_second=64e9,
        source="NVIDIA H200 data sheet, column 'H200 SXM', half of the rate with "
        "sparsity; memory as there, in decimal; host link: half of PCIe Gen5's 128 "
        "GB/s for both ways",
    ),
    Device(
        name="b200",
        kind="gpu",
        hbm_bytes=191_514_411_008,
        matmul_flops_per_second=2250e12,
        hbm_bytes_per_second=8000e9,
        host_bytes_per_second=64e9,
        source="NVIDIA Blackwell data sheet, column 'HGX B200', half of the rate with "
        "sparsity; memory: OpenXLA's target description of the B200; host link: half "
        "of PCIe Gen5's 128 GB/s for both ways",
    ),
)
"""Every device known here."""


def device(name: str) -> Device:
    """A device by name, in small or capital letters.

    Raises:
        InvalidInputError: No device has this name.

    Example:
        >>> device("H100").kind
        'gpu'
    """
    for known in DEVICES:
        if known.name == name.lower():
            return known
    names = [known.name for known in DEVICES]
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise InvalidInputError(
        f"no device is called {name!r}{hint} Known: {', '.join(names)}. For another "
        "memory size, use dataclasses.replace(device(...), hbm_bytes=...)."
    )
