"""The recipes for a live tree, in real processes: following a trainer, going back."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import followers
import numpy as np
import pytest

import orbax_delta


@pytest.fixture
def start(tmp_path):
    """Starts a process of `followers`; those that still run at the end are ended."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(orbax_delta.__file__).parents[1]),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    started = []

    def run(role, **settings):
        process = subprocess.Popen(
            [
                *(sys.executable, followers.__file__, role),
                *(str(tmp_path / "run"), json.dumps(settings)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with process:
            process.kill()


def advance(trainer, steps=1):
    """Let a trainer take some steps; what it says of them."""
    trainer.stdin.write("\n" * steps)
    trainer.stdin.flush()
    return [json.loads(trainer.stdout.readline()) for _ in range(steps)]


def test_an_evaluator_follows_a_trainer(start):
    """It has the trainer's bits at each step that it sees, and reads what changed."""
    trainer, follower = start("trainer"), start("follower", last_step=9)
    said, seen = {}, []
    # Step by step, then several at a time, of which it may miss those in between.
    for steps in (1, 1, 1, 3, 3):
        said |= {line["step"]: line for line in advance(trainer, steps)}
        while not seen or seen[-1]["step"] < max(said):
            seen.append(json.loads(follower.stdout.readline()))
    assert [line["step"] for line in seen[:3]] == [1, 2, 3]
    for line in seen:
        assert line["head"] == said[line["step"]]["head"]
    assert seen[-1]["loss"] < seen[0]["loss"]
    first, *later = seen
    assert first["reused"] == 0
    assert all(line["same_body"] for line in later)
    body_chunks = sum(line["reused"] for line in later) / len(later)
    assert 0 < body_chunks < first["chunks"]
    # One that missed the step before reads that step's records too.
    for before, line in itertools.pairwise(seen):
        if line["step"] == before["step"] + 1:
            assert line["read"] < first["read"]
    assert follower.wait(timeout=60) == 0
    trainer.stdin.close()
    assert trainer.wait(timeout=60) == 0


def test_a_run_goes_back_after_a_loss_spike(start):
    """Bit for bit the run that never saw the batch that caused it."""
    process = start("spiking", last_step=14, bad=7)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    spike, end = (json.loads(line) for line in out.splitlines())
    assert spike["back"] == 6
    assert spike["same_body"]
    assert 0 < spike["reused"] < spike["chunks"]
    assert end["left_out"] == [7]
    state = followers.fresh()
    for number in [*range(7), *range(8, 15)]:
        state, _ = followers.train_step(state, followers.batch_of(number))
    assert int(state["step"]) == 14
    assert followers.name_of(state) == end["end"]
    assert np.isfinite(np.asarray(state["head"]["inner"])).all()
