"""The report of a save says where its time went."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_delta

STAGES = {"wait", "begin", "compare", "code", "write", "part"}


@pytest.mark.parametrize("self_contained", [False, True])
def test_stages_and_blocking_are_parts_of_the_whole(tmp_path, self_contained):
    """All stages are there, none is negative, and no second is counted twice."""
    state = {"w": np.arange(3000, dtype=np.float32)}
    if self_contained:
        with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
            checkpointer.save(tmp_path / "0", args=orbax_delta.DeltaSave(state))
        report = orbax_delta.save_report(tmp_path / "0")
    else:
        registry = orbax_delta.handler_registry()
        with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:
            manager.save(0, args=ocp.args.StandardSave(state))
        report = orbax_delta.save_report(tmp_path / "0")
    seconds = report.stage_seconds
    assert STAGES - {"begin"} <= seconds.keys() <= STAGES
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) + report.blocking_seconds <= report.total_seconds
