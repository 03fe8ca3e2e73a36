"""The main job as one command: train, be killed in the middle of a save, go on exactly.

`run` starts two trainings of the same small model as processes of their own. One is
left alone. The other is killed while it saves, and a third process goes on from what
is on disk. Losses and last states are then compared bit by bit, and a last process
saves the same states through Orbax's Standard handler and through this package's, side
by side. Does not belong here: how each part is done (`model`, `training`,
`runs`, `results`, `report`).
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import rich.console

from orbax_delta import errors
from orbax_delta.demo import report
from orbax_delta.demo.results import DemoResult, collect
from orbax_delta.demo.runs import DemoConfig, run_side_by_side, train_both

PLOT_NAME = "orbax-delta-demo.png"


def run(
    *,
    folder: Path | None,
    plot: Path | None,
    steps: int,
    seed: int,
    console: rich.console.Console,
) -> DemoResult:
    """Run the demo in its usual size and show it.

    Args:
        folder: Where the checkpoints go and stay, new or empty; None takes a
            temporary folder that is removed at the end.
        plot: Where the PNG goes; None puts it into `folder`, or into the current
            folder where there is none.
        steps: Training steps of a whole run, at least 8.
        seed: Seed of the parameters and of dropout.
        console: Where tables and progress are shown.

    Returns:
        Everything that was shown.

    Raises:
        InvalidInputError: `folder` holds something, or `steps` is too small.
        DemoError: A process of the demo failed.
    """
    config = DemoConfig(steps=steps, seed=seed)
    return run_config(config, folder=folder, plot=plot, console=console)


def run_config(
    config: DemoConfig,
    *,
    folder: Path | None,
    plot: Path | None,
    console: rich.console.Console,
) -> DemoResult:
    """Run the demo in any size and show it; see `run`."""
    plot = (plot or (folder or Path.cwd()) / PLOT_NAME).absolute()
    start = time.monotonic()
    with working_folder(folder) as work:
        plot.parent.mkdir(parents=True, exist_ok=True)
        report.show_opening(console, steps=config.steps, seed=config.seed)
        with report.progress_bar(console) as progress:
            crash = train_both(config, work, progress)
            run_side_by_side(config, work, progress)
        result = collect(config, work, crash, plot, time.monotonic() - start)
    report.draw_plot(result, plot)
    report.show_result(console, result)
    return result


@contextlib.contextmanager
def working_folder(folder: Path | None) -> Iterator[Path]:
    """Give the demo's folder: the caller's, which stays, or a temporary one.

    Raises:
        InvalidInputError: The caller's folder is a file or not empty.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="orbax-delta-demo-") as temporary:
            yield Path(temporary)
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise errors.InvalidInputError(
            f"The demo's folder {folder} is not an empty folder; the demo would "
            "resume from what it finds there. Name a new folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    yield folder.absolute()
