"""The demo: one small run of all of it, and its parts that only trouble reaches."""

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import rich.console

from orbax_delta import demo, errors
from orbax_delta.demo import report, results, runs

SMALL = runs.DemoConfig(
    steps=12,
    seed=3,
    width=64,
    layers=1,
    heads=2,
    context=32,
    batch=4,
    measured_saves=3,
    measured_restores=1,
)


@pytest.fixture(scope="module")
def small_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[demo.DemoResult, str, Path]:
    """Run the demo once in a small size: its result, what it printed, its folder."""
    folder = tmp_path_factory.mktemp("demo") / "new"
    console = rich.console.Console(file=io.StringIO(), width=100)
    result = demo.run_config(SMALL, folder=folder, plot=None, console=console)
    return result, console.file.getvalue(), folder


@contextlib.contextmanager
def python(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a few lines as a process of its own, which is over on leaving."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def test_the_killed_run_is_exact(small_run: tuple[demo.DemoResult, str, Path]) -> None:
    """The resumed run has every loss and every leaf of the one left alone."""
    result, _, _ = small_run
    assert result.exact
    assert (result.losses_different, result.leaves_different) == ((), ())
    assert [step for step, _ in result.undisturbed.loss_bits] == list(range(1, 13))
    assert result.orbax.restores_identical
    assert result.restores_exact


def test_the_kill_is_told_as_it_was(
    small_run: tuple[demo.DemoResult, str, Path],
) -> None:
    """What is said of the kill agrees with what the next process found on disk."""
    result, shown, _ = small_run
    crash = result.crash
    assert len(result.lives) == 1 + crash.kills
    assert crash.in_save == ("(SIGKILL) while it was saving" in shown)
    if crash.kills:
        assert result.lives[-1].found_steps == crash.whole_steps
        assert result.lives[-1].first_step == max(crash.whole_steps) + 1
        assert crash.in_save == (crash.step not in crash.whole_steps)


def test_everything_shown_is_json(
    small_run: tuple[demo.DemoResult, str, Path],
) -> None:
    """The result is plain values, and the verdict and both handlers are printed."""
    result, shown, _ = small_run
    assert json.loads(json.dumps(dataclasses.asdict(result)))["exact"] is True
    assert "Bit-identical" in shown
    assert "Orbax Standard" in shown
    assert len(result.orbax_delta.later_bytes) == SMALL.measured_saves - 1


def test_the_plot_is_a_picture(small_run: tuple[demo.DemoResult, str, Path]) -> None:
    """The PNG lies in the demo's folder and holds more than one colour."""
    result, _, folder = small_run
    assert Path(result.plot) == folder / demo.PLOT_NAME
    pixels = matplotlib.image.imread(result.plot)
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 3


def test_a_difference_is_found_and_said(
    small_run: tuple[demo.DemoResult, str, Path], tmp_path: Path
) -> None:
    """One other bit in one leaf is named, and the verdict says so."""
    for name, last in ((runs.UNINTERRUPTED, 0), (runs.INTERRUPTED, 1)):
        same, other = np.zeros(4, np.uint8), np.array([0, last], np.uint8)
        leaves = {"['same'] u": same, "['other'] u": other}
        np.savez(tmp_path / f"{name}.npz", **leaves)
    different = results.different_leaves(tmp_path)
    assert different == ("['other'] u",)
    result = dataclasses.replace(
        small_run[0], exact=False, leaves_different=different, losses_different=(7,)
    )
    console = rich.console.Console(file=io.StringIO(), width=100)
    report.show_result(console, result)
    assert "NOT identical: 1 losses differ (steps 7)" in console.file.getvalue()
    assert "['other'] u" in console.file.getvalue()


def test_kill_falls_into_the_first_save_that_is_seen(tmp_path: Path) -> None:
    """A step that is already whole is passed over; the next one's save is killed."""
    root = tmp_path / "root"
    (root / "6").mkdir(parents=True)
    (root / "6" / "whole").write_bytes(bytes(100))
    saving = (
        "import pathlib, sys\n"
        "step = pathlib.Path(sys.argv[1])\n"
        "step.mkdir()\n"
        "(step / 'part').write_bytes(bytes(int(sys.argv[2])))\n"
        "sys.stdin.read()\n"
    )
    size = runs.KILL_AFTER_BYTES
    with python(saving, f"{root}/8.orbax-checkpoint-tmp", str(size)) as process:
        crash = runs.kill_in_save(process, root, iter((6, 8, 10)), lambda: None)
        assert process.returncode is not None
    assert crash == runs.Crash(
        kills=1, in_save=True, step=8, whole_steps=(6,), unfinished_bytes=size
    )


def test_a_process_that_ends_by_itself_is_not_called_killed(tmp_path: Path) -> None:
    """Without a save to be seen there is no crash to tell of."""
    with python("") as process:
        found = runs.kill_in_save(process, tmp_path, iter((6, 8)), lambda: None)
    assert found is None


def test_a_kill_that_came_too_late_is_tried_again_and_told(
    small_run: tuple[demo.DemoResult, str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a missed kill the run goes on to its end, and no hit is claimed."""
    missed = runs.Crash(
        kills=1, in_save=False, step=6, whole_steps=(4, 6), unfinished_bytes=9
    )
    outcomes = iter((missed, None))
    monkeypatch.setattr(runs, "child", lambda *_: python(""))
    monkeypatch.setattr(runs, "kill_in_save", lambda *_: next(outcomes))
    crash = runs.train_and_kill(SMALL, tmp_path, lambda: None)
    assert crash == missed
    assert next(outcomes, "used up") == "used up"
    result = dataclasses.replace(small_run[0], crash=crash)
    assert "no kill fell into a save" in report.crash_sentence(result)


def test_a_loss_is_said_as_plainly_as_a_gain(
    small_run: tuple[demo.DemoResult, str, Path],
) -> None:
    """Where orbax_delta needs more, the table and the sentence name it."""
    result, _, _ = small_run
    slower = dataclasses.replace(
        result.orbax,
        restore_seconds=2 * result.orbax.restore_seconds,
        later_mean_bytes=1.02 * result.orbax.later_mean_bytes,
    )
    sentence = report.cost_sentence(dataclasses.replace(result, orbax_delta=slower))
    assert "ahead in[/] later saves' bytes (1.02x more), restoring (2.00x more)" in (
        sentence
    )
    assert "orbax_delta is ahead" not in sentence


def test_a_failed_process_is_quoted(tmp_path: Path) -> None:
    """The error of a process that fails has the end of what it said."""
    (tmp_path / "run.stderr").write_text("first\nno room for the model\n")
    with (
        python("raise SystemExit(3)") as process,
        pytest.raises(runs.DemoError, match=r"(?s)status 3\..*no room for the mo"),
    ):
        runs.wait_for(process, "run", tmp_path, lambda: None)


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    """A folder that holds something is left as it is."""
    (tmp_path / "mine").touch()
    console = rich.console.Console(file=io.StringIO())
    with pytest.raises(errors.InvalidInputError, match="not an empty folder"):
        demo.run(folder=tmp_path, plot=None, steps=12, seed=0, console=console)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_too_few_steps_are_refused() -> None:
    """A run too short to be killed in a save is refused."""
    with pytest.raises(errors.InvalidInputError, match="at least 8"):
        runs.DemoConfig(steps=7, seed=0)
