"""What the demo found out: the runs compared bit by bit, the measurements summed up.

Works on what the processes left behind: their logs and the bytes of their last states.
Does not belong here: starting processes (`runs`) and showing (`report`).
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from orbax_delta.demo.runs import (
    INTERRUPTED,
    SIDE_BY_SIDE,
    UNINTERRUPTED,
    Crash,
    DemoConfig,
    log_lines,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What one process of a training run did before it ended or was ended.

    Attributes:
        found_steps: Steps that Orbax listed when the process started.
        first_step: The first step that it trained.
        losses: Loss of each step, in nats a byte.
        loss_bits: Pairs of step and loss, the latter as its float32 bits.
    """

    found_steps: tuple[int, ...]
    first_step: int
    losses: tuple[float, ...]
    loss_bits: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFigures:
    """What saving and restoring cost through one handler.

    Attributes:
        first_bytes: Written by the first save.
        later_bytes: Written by each later save.
        later_mean_bytes: Their mean.
        first_blocking_seconds: How long the first save held training up.
        first_total_seconds: From the first save's call to its step being whole.
        blocking_seconds: Median over the later saves.
        total_seconds: Median over the later saves.
        restore_seconds: Median over the restores of the last step.
        restores_identical: Whether every restore had every bit of what was saved.
    """

    first_bytes: int
    later_bytes: tuple[int, ...]
    later_mean_bytes: float
    first_blocking_seconds: float
    first_total_seconds: float
    blocking_seconds: float
    total_seconds: float
    restore_seconds: float
    restores_identical: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Everything that the demo shows.

    Attributes:
        steps: Training steps of a whole run.
        save_every: Steps between two saves.
        seed: Seed of the parameters and of dropout.
        parameters: Parameters of the model.
        leaves: Leaves of the saved state.
        state_bytes: Raw bytes of the saved state.
        crash: What the kill hit.
        undisturbed: The run that was left alone.
        lives: The processes of the run that was killed, oldest first.
        losses_different: Steps whose loss differs in any bit, or is missing.
        leaves_different: Leaves of the last state that differ in any bit.
        restores_exact: Whether every compared restore through orbax_delta was exact.
        exact: Whether nothing at all was different.
        changed_share: Share of the elements that the last measured save found changed.
        orbax: Figures of Orbax's own Standard handler.
        orbax_delta: Figures of this package's handler.
        plot: Where the plot is.
        seconds: How long the demo took.
    """

    steps: int
    save_every: int
    seed: int
    parameters: int
    leaves: int
    state_bytes: int
    crash: Crash
    undisturbed: Life
    lives: tuple[Life, ...]
    losses_different: tuple[int, ...]
    leaves_different: tuple[str, ...]
    restores_exact: bool
    exact: bool
    changed_share: float
    orbax: HandlerFigures
    orbax_delta: HandlerFigures
    plot: str
    seconds: float


def collect(
    config: DemoConfig, work: Path, crash: Crash, plot: Path, seconds: float
) -> DemoResult:
    """Compare the runs and gather everything that is shown."""
    undisturbed = read_lives(work, UNINTERRUPTED)
    lives = read_lives(work, INTERRUPTED)
    wanted = dict(undisturbed[0].loss_bits)
    losses_different = {
        step
        for life in lives
        for step, bits in life.loss_bits
        if wanted.get(step) != bits
    } | (wanted.keys() - {step for life in lives for step, _ in life.loss_bits})
    leaves_different = different_leaves(work)
    start, *measured = log_lines(work, SIDE_BY_SIDE)
    handlers = [handler_figures(kind, measured) for kind in ("orbax", "orbax_delta")]
    restores_exact = start["identical"] and handlers[1].restores_identical
    return DemoResult(
        steps=config.steps,
        save_every=config.save_every,
        seed=config.seed,
        parameters=start["parameters"],
        leaves=start["leaves"],
        state_bytes=start["state_bytes"],
        crash=crash,
        undisturbed=undisturbed[0],
        lives=lives,
        losses_different=tuple(sorted(losses_different)),
        leaves_different=leaves_different,
        restores_exact=restores_exact,
        exact=not losses_different and not leaves_different and restores_exact,
        changed_share=measured[-1]["changed_share"],
        orbax=handlers[0],
        orbax_delta=handlers[1],
        plot=str(plot),
        seconds=seconds,
    )


def read_lives(work: Path, name: str) -> tuple[Life, ...]:
    """Read what each process of a run logged, oldest process first."""
    starts: list[dict[str, Any]] = []
    losses: list[list[dict[str, Any]]] = []
    for line in log_lines(work, name):
        if line["kind"] == "start":
            starts.append(line)
            losses.append([])
        else:
            losses[-1].append(line)
    return tuple(
        Life(
            found_steps=tuple(start["found"]),
            first_step=start["step"] + 1,
            losses=tuple(line["loss"] for line in lines),
            loss_bits=tuple((line["step"], line["bits"]) for line in lines),
        )
        for start, lines in zip(starts, losses, strict=True)
    )


def different_leaves(work: Path) -> tuple[str, ...]:
    """Name the leaves of the last states that differ in any bit between the runs."""
    with (
        np.load(work / f"{UNINTERRUPTED}.npz") as left,
        np.load(work / f"{INTERRUPTED}.npz") as right,
    ):
        names = sorted(set(left) | set(right))
        return tuple(
            name
            for name in names
            if name not in left
            or name not in right
            or not np.array_equal(left[name], right[name])
        )


def handler_figures(kind: str, lines: list[dict[str, Any]]) -> HandlerFigures:
    """Sum up what one handler was measured to cost, the first save apart."""
    mine = [line for line in lines if line.get("handler") == kind]
    saves = [line for line in mine if line["kind"] == "save"]
    restores = [line for line in mine if line["kind"] == "restore"]
    first, later = saves[0], saves[1:]
    return HandlerFigures(
        first_bytes=first["written_bytes"],
        later_bytes=tuple(line["written_bytes"] for line in later),
        later_mean_bytes=statistics.fmean(line["written_bytes"] for line in later),
        first_blocking_seconds=first["blocking_seconds"],
        first_total_seconds=first["total_seconds"],
        blocking_seconds=statistics.median(line["blocking_seconds"] for line in later),
        total_seconds=statistics.median(line["total_seconds"] for line in later),
        restore_seconds=statistics.median(line["seconds"] for line in restores),
        restores_identical=all(line["identical"] for line in restores),
    )
