"""Shared set-up: eight CPU devices, strict dtypes, Hypothesis profiles, one state."""

import os

# Before the first import of jax: meshes of 1, 2, 4 and 8 devices on any machine.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    max_examples=40,
    stateful_step_count=25,
    print_blob=True,
    # A shared build must not fail by the luck of the draw; everybody else explores.
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "long",
    parent=hypothesis.settings.get_profile("default"),
    derandomize=False,
    max_examples=1000,
    stateful_step_count=60,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def root(tmp_path):
    """An empty folder for a CheckpointManager."""
    return tmp_path / "run"
