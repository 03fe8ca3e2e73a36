"""A training run that is stopped and killed ends with the bits of one that is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import orbax_delta
from orbax_delta import check

pytest.importorskip("grain", reason="Grain has no wheel for this platform")
import resumable

LAST_STEP = 14
LIVES = (
    {"last_step": 4},  # stops after a step that was not saved
    {"last_step": 8, "killed_at": 7, "operations": 2},
    {"last_step": 9},  # stops at a save
    {"last_step": 13, "killed_at": 12, "operations": 9},
    {"last_step": LAST_STEP},
)
"""How the processes of the interrupted run end, one after the other."""


@pytest.fixture
def live(tmp_path):
    """Runs one process of `resumable`; returns what it said and how it ended."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(orbax_delta.__file__).parents[1]),
        # What the first process compiles the others load: most of their time.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }

    def run(name, **settings):
        done = subprocess.run(
            [
                *(sys.executable, resumable.__file__),
                *(str(tmp_path / name), json.dumps(settings)),
            ],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
            check=False,
        )
        died = -9 if "killed_at" in settings else 0
        assert done.returncode == died, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_every_bit_of_an_interrupted_run(live, tmp_path, record_property):
    """State, shardings, batches, losses and the place in the data; five processes."""
    _, *wanted, end = live("whole", last_step=LAST_STEP)
    assert [line["step"] for line in wanted] == list(range(1, LAST_STEP + 1))
    assert len({line["batch"] for line in wanted}) == LAST_STEP
    done = 0
    for number, life in enumerate(LIVES):
        start, *steps = live("interrupted", **life)
        last = steps.pop() if "killed_at" not in life else None
        # It went back to a committed save: at most those of two saves are repeated.
        assert start["start"] % resumable.SAVE_EVERY == 0
        assert done - 2 * resumable.SAVE_EVERY <= start["start"] <= done
        assert bool(start["start"]) == bool(number)
        done = steps[-1]["step"]
        assert steps == wanted[start["start"] : done]
    assert done == LAST_STEP
    # Which chunks were written in full may differ: copies in memory end with a process.
    assert last["place"] == end["place"]
    assert {"difference", "sparse", "derived", "reference"} <= end["forms"].keys()
    bits, expected = (
        np.load(tmp_path / f"{name}.npz") for name in ("interrupted", "whole")
    )
    assert set(bits) == set(expected)
    for name in expected:
        assert np.array_equal(bits[name], expected[name]), name
    assert any(name.startswith(".key key<fry>") for name in expected)
    report = check.verify(str(tmp_path / "interrupted"))
    assert report.ok
    assert list(report.whole_steps) == ["9", "12"]
    record_property("kills", sum("killed_at" in life for life in LIVES))
