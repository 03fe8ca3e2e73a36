"""The demo's processes: start them, watch them, kill one in the middle of a save.

The trainings run as processes of their own (`training`), because only another
process can end one without warning. What they have to say is in their logs, and what
they have saved is on disk; both are all that this module looks at. Does not belong
here: anything that needs jax, and judging what came out (`demo`).
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rich.progress

from orbax_delta import errors

UNINTERRUPTED = "uninterrupted"
INTERRUPTED = "interrupted"
SIDE_BY_SIDE = "side_by_side"

KEPT_STEPS = 3

# Orbax's name for a step that is being saved. Its removal commits the step.
UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"
# A save that has put this much on disk has begun with the state itself; before that
# there are only small files, and a kill would prove less.
KILL_AFTER_BYTES = 64 * 1024
# Short against a save, which takes some hundredths of a second at the least.
POLL_SECONDS = 0.002
PROGRESS_SECONDS = 0.1
STDERR_TAIL_LINES = 20


class DemoError(errors.DeltaError):
    """A process of the demo failed; the message has the end of what it said."""

    kind = "demo"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What is trained and how much of it.

    Attributes:
        steps: Training steps of a whole run.
        seed: Seed of the parameters and of dropout.
        width: Width of the model, in elements; a multiple of `heads`.
        layers: Number of transformer blocks.
        heads: Attention heads of a block.
        context: Bytes of text that the model sees at once.
        batch: Rows of text a step.
        measured_saves: Saves through each handler in the comparison.
        measured_restores: Restores through each handler in the comparison.

    Raises:
        InvalidInputError: Too few steps to be killed in the middle of a save.
    """

    steps: int
    seed: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    batch: int = 8
    measured_saves: int = 13
    measured_restores: int = 7

    def __post_init__(self) -> None:
        """Check the number of steps."""
        if self.steps < 8:
            raise errors.InvalidInputError(
                f"The demo was asked for {self.steps} training steps; it needs at "
                "least 8 for a save before the kill and one after it."
            )

    @property
    def save_every(self) -> int:
        """Steps between two saves: a dozen saves a run, where there are the steps."""
        return max(2, self.steps // 12)

    @property
    def kill_steps(self) -> range:
        """Steps in whose save the kill is tried, in this order."""
        saves = self.steps // self.save_every
        first = (saves // 2 + 1) * self.save_every
        return range(first, self.steps, self.save_every)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """What the kill hit.

    Attributes:
        kills: How often a process was killed; more than once where one kill missed.
        in_save: Whether the last kill was in the middle of a save.
        step: The step that was being saved.
        whole_steps: Steps that were whole on disk right after the kill.
        unfinished_bytes: What the save had already put on disk.
    """

    kills: int
    in_save: bool
    step: int
    whole_steps: tuple[int, ...]
    unfinished_bytes: int


def file_sizes(folder: Path) -> dict[str, int]:
    """Measure every file below a folder.

    Args:
        folder: Where to look; may be missing, and may change meanwhile.

    Returns:
        Size in bytes by path.
    """
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            # A file that was renamed or removed since it was listed is no longer here.
            with contextlib.suppress(FileNotFoundError):
                sizes[path] = os.stat(path).st_size
    return sizes


def new_bytes(folder: Path, before: dict[str, int]) -> int:
    """Count the bytes of the files that were not there before.

    Args:
        folder: Where to look.
        before: What `file_sizes` gave then. A file of the store is written once, so a
            known path needs no second look.
    """
    return sum(size for path, size in file_sizes(folder).items() if path not in before)


def log_lines(work: Path, name: str) -> list[dict[str, Any]]:
    """Read the whole lines that the processes of one name have logged so far."""
    path = work / f"{name}.jsonl"
    if not path.exists():
        return []
    # What follows the last line end is a line that is still being written.
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


@contextlib.contextmanager
def child(
    role: str, name: str, config: DemoConfig, work: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of `training`; on leaving it is ended and reaped."""
    environment = dict(os.environ)
    environment.setdefault("JAX_PLATFORMS", "cpu")
    # All processes run the same programs; the later ones need not compile them again.
    if "JAX_COMPILATION_CACHE_DIR" not in environment:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(work / "compiled")
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    settings = json.dumps(dataclasses.asdict(config))
    command = [sys.executable, "-m", "orbax_delta.demo.training", role, name]
    with open(work / f"{name}.stderr", "wb") as stderr:
        process = subprocess.Popen(
            [*command, str(work), settings],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_for(
    process: subprocess.Popen[bytes],
    name: str,
    work: Path,
    tick: Callable[[], None],
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until a process has ended well, or until something is true before that.

    Raises:
        DemoError: It failed.
    """
    while process.poll() is None and not until():
        tick()
        time.sleep(PROGRESS_SECONDS)
    tick()
    if process.poll():
        said = (work / f"{name}.stderr").read_text(errors="replace").splitlines()
        tail = "\n".join(said[-STDERR_TAIL_LINES:])
        raise DemoError(
            f"The demo's process '{name}' ended with status {process.returncode}. "
            f"The end of what it said:\n{tail}"
        )


def ticker(
    config: DemoConfig, work: Path, progress: rich.progress.Progress
) -> Callable[[], None]:
    """Give a function that brings both training bars up to date, cheaply."""
    bars = {
        UNINTERRUPTED: progress.add_task("training, left alone", total=config.steps),
        INTERRUPTED: progress.add_task("training, killed once", total=config.steps),
    }
    last_seconds = 0.0

    def tick() -> None:
        nonlocal last_seconds
        if time.monotonic() - last_seconds < PROGRESS_SECONDS:
            return
        last_seconds = time.monotonic()
        for name, bar in bars.items():
            lines = log_lines(work, name)
            if lines:
                progress.update(bar, completed=lines[-1]["step"])

    return tick


def train_both(
    config: DemoConfig, work: Path, progress: rich.progress.Progress
) -> Crash:
    """Train undisturbed and, beside it, with a kill and a new start."""
    tick = ticker(config, work, progress)
    with child("train", UNINTERRUPTED, config, work) as undisturbed:
        # Once it trains, its compiled programs are there for the others to use.
        wait_for(
            undisturbed,
            UNINTERRUPTED,
            work,
            tick,
            until=lambda: len(log_lines(work, UNINTERRUPTED)) > 1,
        )
        crash = train_and_kill(config, work, tick)
        if crash.in_save:
            with child("train", INTERRUPTED, config, work) as resumed:
                wait_for(resumed, INTERRUPTED, work, tick)
        wait_for(undisturbed, UNINTERRUPTED, work, tick)
    return crash


def train_and_kill(config: DemoConfig, work: Path, tick: Callable[[], None]) -> Crash:
    """Train and kill in the middle of a save, again at a later save if that missed.

    Returns:
        What was on disk at the last kill. If it was not in the middle of a save, the
        run has then been brought to its end without another one.
    """
    steps = iter(config.kill_steps)
    crash = Crash(kills=0, in_save=False, step=0, whole_steps=(), unfinished_bytes=0)
    while not crash.in_save:
        with child("train", INTERRUPTED, config, work) as process:
            found = kill_in_save(process, work / INTERRUPTED, steps, tick)
            if found is None:
                wait_for(process, INTERRUPTED, work, tick)
                break
            crash = dataclasses.replace(found, kills=crash.kills + 1)
    return crash


def kill_in_save(
    process: subprocess.Popen[bytes],
    root: Path,
    steps: Iterator[int],
    tick: Callable[[], None],
) -> Crash | None:
    """Kill a training process once it is seen to be in the middle of a save.

    Args:
        process: What to kill.
        root: The folder of its checkpoints.
        steps: Steps to try, in this order; those tried are taken out.
        tick: Called while waiting.

    Returns:
        What the kill left on disk; None if no save was caught, the process still runs
        or has ended then.
    """
    for step in steps:
        files_before = wait_for_save(process, root, step, tick)
        if files_before is None:
            continue
        process.kill()
        process.wait()
        return Crash(
            kills=1,
            # The process may have finished the save before the signal reached it.
            in_save=not (root / str(step)).exists(),
            step=step,
            whole_steps=tuple(
                sorted(int(path.name) for path in root.iterdir() if path.name.isdigit())
            ),
            unfinished_bytes=new_bytes(root, files_before),
        )
    return None


def wait_for_save(
    process: subprocess.Popen[bytes], root: Path, step: int, tick: Callable[[], None]
) -> dict[str, int] | None:
    """Wait until the save of one step is on its way to the disk.

    Returns:
        The files as they were before that save; None if the step was finished, or the
        process ended, without the save having been seen.
    """
    unfinished = root / f"{step}{UNFINISHED_SUFFIX}"
    before = file_sizes(root)
    while process.poll() is None and not (root / str(step)).exists():
        if not unfinished.exists():
            before = file_sizes(root)
        elif new_bytes(root, before) >= KILL_AFTER_BYTES:
            return before
        tick()
        time.sleep(POLL_SECONDS)
    return None


def run_side_by_side(
    config: DemoConfig, work: Path, progress: rich.progress.Progress
) -> None:
    """Measure both handlers in one process, which logs what it measures."""
    lines = 2 + 2 * (config.measured_saves + config.measured_restores)
    bar = progress.add_task("the same states through both handlers", total=lines)
    with child("measure", SIDE_BY_SIDE, config, work) as process:
        wait_for(
            process,
            SIDE_BY_SIDE,
            work,
            lambda: progress.update(bar, completed=len(log_lines(work, SIDE_BY_SIDE))),
        )
