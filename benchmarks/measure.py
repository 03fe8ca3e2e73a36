"""Saves the states of a workload with both handlers and counts the bytes on disk.

Bytes are those of the files that a save leaves in the root and that were not there
before, never taken from a report; every restore is compared bit for bit.
"""

import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu
import orbax.checkpoint as ocp
from counting import (
    Change,
    State,
    added_bytes,
    compare_states,
    files_on_disk,
    raw_bytes,
    require_equal_bits,
)
from rich.console import Console
from rich.progress import Progress
from workloads import WORKLOADS, Setup

import orbax_delta

ORBAX_EVERY = 10
"""Live runs go through Orbax's own handler at every tenth save only, to save time."""

TARGETS: Mapping[str, float] = {
    "dense": 1.60,
    "fine_tune": 2.0,
    "frozen_backbone": 2.5,
    "lora": 15.0,
    "rl_bf16": 130.0,
    "embedding": 220.0,
    "fresh_adamw": 1 / 0.26,
}
"""How many times smaller than the raw state the measured save has to be, at least."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairResult:
    """Bytes that the measured save of a pair put on disk, by either handler.

    Attributes:
        workload: Name of the workload.
        save: "second", or "first" where the workload has one state only.
        raw_bytes: Bytes of the state in memory.
        delta_bytes: Bytes that the save through orbax_delta added to its root.
        orbax_bytes: Bytes that the save through Orbax's handler added to its root.
        reported_bytes: What orbax_delta's own report says that it wrote.
        changes: What differs between the two states.
    """

    workload: str
    save: str
    raw_bytes: int
    delta_bytes: int
    orbax_bytes: int
    reported_bytes: int
    changes: tuple[Change, ...]

    @property
    def met(self) -> bool | None:
        """Whether the save is as small as wanted; None where nothing is wanted."""
        if self.workload not in TARGETS:
            return None
        return self.raw_bytes / self.delta_bytes >= TARGETS[self.workload]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LiveResult:
    """Bytes that each save of a live run put on disk.

    Attributes:
        workload: Name of the workload.
        raw_bytes: Bytes of one state in memory.
        delta_bytes: Bytes that each save through orbax_delta added to its root.
        orbax_bytes: The same of Orbax's handler, by save; it made every tenth only.
        reported_bytes: What orbax_delta's own reports say that each save wrote.
        records_per_chunk_max: The longest list of records of any chunk of any save.
        root_bytes: Size of the root of orbax_delta after each save.
    """

    workload: str
    raw_bytes: int
    delta_bytes: tuple[int, ...]
    orbax_bytes: Mapping[int, int]
    reported_bytes: tuple[int, ...]
    records_per_chunk_max: int
    root_bytes: tuple[int, ...]


# -------------------------------------------------------------------------- saving


class Root:
    """A folder of checkpoints under its own CheckpointManager, and what saves add.

    Attributes:
        path: The folder.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        delta: bool,
        max_to_keep: int | None,
        **settings: Any,
    ):
        """Opens a manager, with orbax_delta's registry or with Orbax's own handler."""
        self.path = path
        self._manager = ocp.CheckpointManager(
            path,
            options=ocp.CheckpointManagerOptions(max_to_keep=max_to_keep),
            handler_registry=(
                orbax_delta.handler_registry(**settings) if delta else None
            ),
        )

    def save(self, step: int, state: State) -> int:
        """Saves a state and returns the bytes that this added on disk."""
        before = files_on_disk(self.path)
        self._manager.save(step, args=ocp.args.StandardSave(state))
        self._manager.wait_until_finished()
        return added_bytes(before, files_on_disk(self.path))

    def check(self, step: int, state: State) -> None:
        """Restores a step and raises AssertionError unless all its bits are right."""
        target = jtu.tree_map(ocp.utils.to_shape_dtype_struct, state)
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        require_equal_bits(restored, state, f"{self.path.name}, step {step}")

    def size_bytes(self) -> int:
        """Returns the bytes of all files of the root."""
        return sum(size for _, _, size in files_on_disk(self.path).values())

    def close(self) -> None:
        """Ends the manager and removes the folder."""
        self._manager.close()
        shutil.rmtree(self.path)


def measure_pair(name: str, setup: Setup, folder: pathlib.Path) -> PairResult:
    """Saves two successive states of a workload with both handlers in turn.

    Args:
        name: Key of `WORKLOADS`.
        setup: Scale, seed and cache of the run.
        folder: Where the two roots are made; they are removed again.

    Returns:
        What the last of the saves cost; a workload of one state has one save.

    Raises:
        AssertionError: A restored state differs from the saved one.
    """
    states = list(itertools.islice(WORKLOADS[name](setup), 2))
    delta = Root(folder / "delta", delta=True, max_to_keep=None)
    orbax = Root(folder / "orbax", delta=False, max_to_keep=None)
    for step, state in enumerate(states):
        delta_bytes = delta.save(step, state)
        orbax_bytes = orbax.save(step, state)
    for step, state in enumerate(states):
        delta.check(step, state)
        orbax.check(step, state)
    last = len(states) - 1
    report = orbax_delta.save_report(delta.path / str(last))
    delta.close()
    orbax.close()
    return PairResult(
        workload=name,
        save="second" if last else "first",
        raw_bytes=raw_bytes(states[last]),
        delta_bytes=delta_bytes,
        orbax_bytes=orbax_bytes,
        reported_bytes=report.written_bytes,
        changes=compare_states(*states) if last else (),
    )


def measure_live(
    name: str,
    setup: Setup,
    folder: pathlib.Path,
    saves: int,
    console: Console,
    *,
    keep_bases: int,
) -> LiveResult:
    """Saves a live run after each of its steps, otherwise with default options.

    Args:
        name: Key of `WORKLOADS`.
        setup: Scale, seed and cache of the run.
        folder: Where the two roots are made; they are removed again.
        saves: How many steps to train and save.
        console: Where the progress bar goes.
        keep_bases: States that the store keeps whatever is deleted.

    Returns:
        What each save cost. Every tenth save and the last were restored and compared.

    Raises:
        AssertionError: A restored state differs from the saved one.
    """
    delta = Root(folder / "delta", delta=True, max_to_keep=3, keep_bases=keep_bases)
    orbax = Root(folder / "orbax", delta=False, max_to_keep=3)
    delta_bytes, root_bytes, reports = [], [], []
    orbax_bytes: dict[int, int] = {}
    states = itertools.islice(WORKLOADS[name](setup), saves)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"live run: {name}", total=saves)
        for step, state in enumerate(states):
            delta_bytes.append(delta.save(step, state))
            reports.append(orbax_delta.save_report(delta.path / str(step)))
            root_bytes.append(delta.size_bytes())
            if step % ORBAX_EVERY == 0:
                orbax_bytes[step] = orbax.save(step, state)
                orbax.check(step, state)
            if step % ORBAX_EVERY == 0 or step == saves - 1:
                delta.check(step, state)
            progress.advance(task)
    delta.close()
    orbax.close()
    return LiveResult(
        workload=name,
        raw_bytes=raw_bytes(state),
        delta_bytes=tuple(delta_bytes),
        orbax_bytes=orbax_bytes,
        reported_bytes=tuple(report.written_bytes for report in reports),
        records_per_chunk_max=max(report.records_per_chunk_max for report in reports),
        root_bytes=tuple(root_bytes),
    )
