"""orbax_delta, Orbax's own handler and outside peers side by side, in one run.

    python benchmarks/compare.py --cache ~/.cache/orbax-delta-benchmarks --plot plots

For each workload successive states of real training go through `ocp.CheckpointManager`
with orbax_delta, with Orbax's Standard handler and with that handler uncompressed, in
turn, in each folder, and through the outside peers that are installed. Then come the
peaks of memory of saving loops, the means of 100 saves with retention and the disk
after 200. Every restore is compared bit for bit. What is wanted stands beside what is
found; the exit code is 1 if anything is not met.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import verdicts as wanted
from arguments import parse_arguments
from contenders import HANDLERS
from decoder import State
from disk import DiskResult, measure_disk
from headlines import headlines
from measure import LiveResult, measure_live
from memory import MemoryResult, measure_memory
from plots import plot_pairs, plot_ratios, plot_verdicts
from rich.console import Console
from rich.progress import Progress
from sidebyside import Pair, measure_handlers, measure_peers
from sizes import live_table
from tables import (
    disk_table,
    headline_table,
    memory_table,
    pair_tables,
    verdict_table,
)
from workloads import WORKLOADS, Setup

TABLE_COLUMNS = 150


@dataclasses.dataclass(kw_only=True, slots=True)
class Results:
    """What has been measured so far."""

    pairs: list[Pair] = dataclasses.field(default_factory=list)
    memory: list[MemoryResult] = dataclasses.field(default_factory=list)
    live: list[LiveResult] = dataclasses.field(default_factory=list)
    disk: list[DiskResult] = dataclasses.field(default_factory=list)
    part_seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def verdicts(self) -> list[wanted.Verdict]:
        """Returns all that is wanted of what was measured."""
        found = [one for pair in self.pairs for one in wanted.of_pair(pair)]
        found += [wanted.of_memory(one) for one in self.memory]
        found += [one for run in self.live for one in wanted.of_live(run)]
        return found + [wanted.of_disk(run) for run in self.disk]

    def document(self) -> dict[str, Any]:
        """Returns all figures as JSON takes them."""
        return {
            "jax": jax.__version__,
            "orbax": ocp.__version__,
            "python": sys.version.split()[0],
            **dataclasses.asdict(self),
            "verdicts": [
                dataclasses.asdict(one) | {"met": one.met} for one in self.verdicts()
            ],
            "headlines": [
                dataclasses.asdict(one) | {"verdict": one.verdict}
                for one in headlines(self.pairs, self.live)
            ],
        }


class Run:
    """One run of the command: measures part by part into its results."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        """Takes the options as they were given."""
        self.options = options
        self.results = Results()
        self._console = console

    def measure(self) -> Results:
        """Does all parts; what is known already is written after each."""
        options = self.options
        for workload in options.workloads:
            self._workload(workload, options.scale)
        if "large" in options.parts:
            for workload in options.large:
                with self._part("large"):
                    states = self._states(workload, "large", 2)
                    self._handlers(workload, "large", states)
                if "memory" in options.parts:
                    self._memory(f"{workload}, large", states)
        for part, names, measure in (
            ("live", options.live, self._live),
            ("disk", options.disk, self._disk),
        ):
            for workload in names if part in options.parts else ():
                with self._part(part), self._temporary() as folder:
                    measure(workload, folder)
        return self.results

    def _workload(self, workload: str, scale: str) -> None:
        parts = self.options.parts
        if not {"pairs", "peers", "memory"} & set(parts):
            return
        # The states of `dense_k100` are a hundred steps of training apart.
        later = 0 if workload == "dense_k100" else self.options.later
        with self._part("training"):
            states = self._states(workload, scale, 2 + later)
        if "pairs" in parts or "peers" in parts:
            with self._part("pairs"):
                pairs = self._handlers(workload, scale, states)
        if "peers" in parts and len(states) > 1:
            with self._part("peers"), self._console.status("") as status:
                peers = measure_peers(
                    states,
                    self.options.folder[0],
                    self.options.peer_repetitions,
                    lambda name: status.update(f"{workload} by {name}"),
                )
                self._replace(pairs[0], dataclasses.replace(pairs[0], peers=peers))
        if "memory" in parts and workload in self.options.memory and len(states) > 1:
            self._memory(f"{workload}, {scale}", states)

    def _states(self, workload: str, scale: str, count: int) -> list[State]:
        setup = self._setup(scale)
        return list(itertools.islice(WORKLOADS[workload](setup), count))

    def _setup(self, scale: str) -> Setup:
        return Setup(scale=scale, seed=self.options.seed, cache=self.options.cache)

    def _handlers(
        self, workload: str, scale: str, states: Sequence[State]
    ) -> list[Pair]:
        folders, repetitions = self.options.folder, self.options.repetitions
        total = len(folders) * repetitions * len(HANDLERS)
        with Progress(console=self._console, transient=True) as progress:
            task = progress.add_task(f"{workload}, {scale}", total=total)
            pairs = [
                measure_handlers(
                    workload,
                    scale,
                    states,
                    folder,
                    repetitions,
                    lambda: progress.advance(task),
                )
                for folder in folders
            ]
        self.results.pairs += pairs
        return pairs

    def _replace(self, old: Pair, new: Pair) -> None:
        pairs = self.results.pairs
        pairs[pairs.index(old)] = new

    def _memory(self, where: str, states: Sequence[State]) -> None:
        with (
            self._part("memory"),
            self._temporary() as folder,
            self._console.status(f"memory: {where}"),
        ):
            saves = self.options.memory_saves
            result = measure_memory(where, states[:2], folder, saves)
            self.results.memory.append(result)

    def _live(self, workload: str, folder: pathlib.Path) -> None:
        result = measure_live(
            workload,
            self._setup(self.options.scale),
            folder,
            self.options.live_saves,
            self._console,
            keep_bases=2,
        )
        self.results.live.append(result)

    def _disk(self, workload: str, folder: pathlib.Path) -> None:
        setup = self._setup(self.options.disk_scale)
        count = self.options.disk_saves
        result = measure_disk(workload, setup, folder, count, self._console)
        self.results.disk.append(result)

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[pathlib.Path]:
        with tempfile.TemporaryDirectory(dir=self.options.folder[-1]) as folder:
            yield pathlib.Path(folder)

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        taken = self.results.part_seconds
        taken[name] = taken.get(name, 0.0) + time.monotonic() - begin
        if self.options.json:
            document = json.dumps(self.results.document(), indent=1)
            self.options.json.write_text(document)


def report(results: Results, options: argparse.Namespace, console: Console) -> bool:
    """Prints and draws what was measured; returns whether all is met."""
    tables = [table for pair in results.pairs for table in pair_tables(pair)]
    if results.memory:
        tables.append(memory_table(results.memory))
    if results.live:
        tables.append(live_table(results.live))
    if results.disk:
        tables.append(disk_table(results.disk))
    found = results.verdicts()
    tables.append(headline_table(headlines(results.pairs, results.live)))
    tables.append(verdict_table(found))
    console.print(*tables, sep="\n")
    console.print("Minutes by part:", _minutes(results))
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        if results.pairs:
            plot_pairs(results.pairs, options.plot)
            plot_ratios(results.pairs, options.plot)
        plot_verdicts(found, options.plot)
    return all(one.met for one in found)


def _minutes(results: Results) -> str:
    parts = results.part_seconds.items()
    return ", ".join(f"{name} {taken / 60:.1f}" for name, taken in parts)


def main() -> int:
    """Measures and prints; returns 0 if everything wanted is met, 1 if not."""
    options = parse_arguments((__doc__ or "").partition("\n")[0])
    # Each save is waited for on purpose, which Orbax would warn of every time.
    logging.getLogger("absl").setLevel(logging.ERROR)
    os.environ.setdefault("ICECHUNK_LOG", "error")
    console = Console()
    console.width = max(console.width, TABLE_COLUMNS)
    results = Run(options, Console(stderr=True)).measure()
    return 0 if report(results, options, console) else 1


if __name__ == "__main__":
    sys.exit(main())
