"""Facts about accelerators."""

import pytest

from remat_policies import devices
from remat_policies.errors import InvalidInputError


@pytest.mark.parametrize("known", devices.DEVICES, ids=lambda known: known.name)
def test_figures_are_in_their_units(known):
    """Bytes, not gigabytes; FLOPs, not teraflops; and in the order of all hardware."""
    assert 1e10 < known.hbm_bytes < 1e12
    assert 1e14 < known.matmul_flops_per_second < 1e16
    assert 1e10 <= known.host_bytes_per_second < known.hbm_bytes_per_second < 1e13


@pytest.mark.parametrize("known", devices.DEVICES, ids=lambda known: known.name)
def test_every_device_names_its_source(known):
    """The vendor's page, and where memory and host link are from."""
    vendor = "Cloud TPU documentation" if known.kind == "tpu" else "NVIDIA"
    assert vendor in known.source
    assert "memory" in known.source
    assert "host link" in known.source


def test_names_are_unique_and_found():
    """In any case."""
    for known in devices.DEVICES:
        assert devices.device(known.name) is known
        assert devices.device(known.name.upper()) is known


def test_unknown_names_get_a_suggestion():
    """The nearest one, all of them, and what to do about another memory size."""
    with pytest.raises(InvalidInputError, match=r"'v5'; did you mean 'v5[ep]'\? Known"):
        devices.device("v5")
    with pytest.raises(InvalidInputError, match=r"'tesla'\. Known: v4, .*replace"):
        devices.device("tesla")
