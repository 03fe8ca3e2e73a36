"""A healthy root with every kind of chunk, for the tests to damage."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies

STEPS = (2, 3, 4, 5)
"""Steps of the root; step 1 was saved too and deleted by Orbax."""

WEIGHTS_SHAPE = (64, 64)


def state(step: int) -> dict[str, Any]:
    """A state with full, sparse, constant, derived, copied and sharded chunks."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(WEIGHTS_SHAPE).astype(np.float32)
    for earlier in range(step):
        weights[earlier, :3] += 1
    sharded = strategies.sharded(
        rng.standard_normal((64, 8)).astype(np.float32), (8,), "x", "x"
    )
    return {
        "params": {
            "w": jnp.asarray(weights),
            "half": jnp.asarray(weights).astype(jnp.bfloat16),
            "copy": weights.copy(),
            "sharded": sharded,
        },
        "fresh": jnp.zeros(WEIGHTS_SHAPE),
        "empty": jnp.zeros((0, 3)),
        "noise": np.random.default_rng(step).standard_normal(2500),
        "key": jax.random.key(step),
        "step": step,
        "name": "run[1]",
    }


def make(folder: Path, **options: Any) -> Path:
    """Save `STEPS` and one more, which Orbax deletes, with small chunks and packs."""
    settings = {"chunk_bytes": 4096, "pack_bytes": 16 << 10, "full_every": 100}
    keep = ocp.CheckpointManagerOptions(max_to_keep=len(STEPS))
    with pytest.MonkeyPatch.context() as patch:
        strategies.skip_disk_sync(patch)
        with strategies.open_run(
            folder, manager_options=keep, **(settings | options)
        ) as run:
            for step in (1, *STEPS):
                run.save(step, state(step))
    return folder


def lines_of(text):
    """Lines as lists of columns, as a pipe shows them."""
    return [re.split(r"  +", line) for line in text.splitlines()]
