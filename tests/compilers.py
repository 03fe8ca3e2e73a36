"""Marks for tests that compile for accelerators which are not here."""

import importlib.util

import pytest

from remat_policies import targets

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the extra tpu-aot: wheels for Linux on x86-64 alone",
)
needs_gpu_compiler = pytest.mark.skipif(
    not any(map(targets._is_installed, targets._CUDA_PLUGINS)),
    reason="needs the extra gpu-aot: wheels for Linux on x86-64 alone",
)
BOTH = (
    pytest.param("v5e", marks=needs_tpu_compiler),
    pytest.param("h100", marks=needs_gpu_compiler),
)
"""A target of each compiler."""
