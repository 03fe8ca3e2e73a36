"""Devices on paper: slices, meshes, and what is said where there is no compiler."""

import importlib.util
import os
import subprocess
import sys

import compilers
import pytest

from remat_policies import devices, targets
from remat_policies.errors import CompilerMissingError, InvalidInputError


@pytest.fixture
def fresh(monkeypatch):
    """Nothing cached, before or after."""
    targets._aot_devices.cache_clear()
    yield monkeypatch
    targets._aot_devices.cache_clear()


@pytest.mark.parametrize("known", devices.DEVICES, ids=lambda known: known.name)
def test_every_known_device_is_a_target(known):
    """One of each, and a slice."""
    marks = {
        "tpu": compilers.needs_tpu_compiler,
        "gpu": compilers.needs_gpu_compiler,
    }
    if marks[known.kind].args[0]:
        pytest.skip(marks[known.kind].kwargs["reason"])
    for count in (1, 2, 16):
        described = targets.aot_devices(known.name, count)
        assert len(described) == count
        expected = {"tpu": "TPU v", "gpu": f"NVIDIA {known.name.upper()}"}
        assert described[0].device_kind.startswith(expected[known.kind])


@pytest.mark.parametrize(
    ("count", "dimensions", "torus"),
    [(1, 2, "1x1"), (2, 2, "1x2"), (8, 2, "2x4"), (256, 2, "16x16"), (16, 3, "2x2x4")],
)
def test_slices_are_compact(count, dimensions, torus):
    """As square as powers of two can be."""
    assert targets._torus(count, dimensions) == torus


@pytest.mark.parametrize("target", compilers.BOTH)
def test_meshes_have_the_axes_asked_for(target):
    """Of one device without any."""
    assert targets.aot_mesh(target).size == 1
    mesh = targets.aot_mesh(target, {"data": 2, "model": 4})
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert len(set(mesh.devices.flat)) == 8


@compilers.needs_tpu_compiler
def test_devices_are_cached_whatever_the_case():
    """The same objects, so that meshes of them are equal."""
    assert targets.aot_devices("V5E") is targets.aot_devices("v5e")


@pytest.mark.parametrize("count", [0, -1, 3, 512])
def test_odd_numbers_of_devices_are_refused(count):
    """A slice is a power of two."""
    with pytest.raises(InvalidInputError, match=f"{count} devices .*power of two"):
        targets.aot_devices("v5e", count)


def test_unknown_targets_are_refused():
    """With the words of `device`."""
    with pytest.raises(InvalidInputError, match="did you mean 'h100'"):
        targets.aot_devices("h10")


@pytest.mark.parametrize(("target", "extra"), [("v5e", "tpu-aot"), ("h100", "gpu-aot")])
def test_a_missing_compiler_names_its_extra(fresh, target, extra):
    """Nothing else has to be known to mend it."""
    fresh.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompilerMissingError, match=rf"orbax-delta\[{extra}\]"):
        targets.aot_devices(target)


def test_a_missing_parent_package_is_a_missing_compiler(fresh):
    """Where no plugin of jax is installed, `jax_plugins` is not there either."""

    def absent(name):
        raise ModuleNotFoundError(name)

    fresh.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(CompilerMissingError, match="plugin is not installed"):
        targets.aot_devices("h100")


@compilers.needs_gpu_compiler
def test_a_plugin_that_jax_left_out_is_told_of(fresh):
    """As on a machine without a GPU, unless JAX_PLATFORMS says not to look for one."""

    def left_out(**_):
        raise NotImplementedError("topology not implemented for cuda")

    fresh.setattr(targets.topologies, "get_topology_desc", left_out)
    with pytest.raises(CompilerMissingError, match="Set JAX_PLATFORMS=cpu before"):
        targets.aot_devices("h100")


@compilers.needs_tpu_compiler
def test_settings_for_libtpu_do_not_stay(fresh):
    """What is set already stays as it is; the rest is gone afterwards."""
    fresh.setenv("TPU_WORKER_HOSTNAMES", "elsewhere")
    fresh.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    before = dict(os.environ)
    with targets._defaults(targets._TPU_ENVIRONMENT):
        assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
        assert os.environ["TPU_WORKER_HOSTNAMES"] == "elsewhere"
    assert dict(os.environ) == before
    targets.aot_devices("v5e")
    assert dict(os.environ) == before


@compilers.needs_tpu_compiler
def test_two_processes_may_load_libtpu():
    """Its lock file is for chips, and there are none."""
    targets.aot_devices("v5e")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from remat_policies import targets; print(targets.aot_devices('v5e'))",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "TpuDevice" in done.stdout
