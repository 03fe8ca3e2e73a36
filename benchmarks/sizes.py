"""What a save costs on disk, on states of real training, beside Orbax's own handler.

    python benchmarks/sizes.py --cache ~/.cache/orbax-delta-benchmarks

For each workload two successive states go through `ocp.CheckpointManager` with the
registry of orbax_delta and, in turn, with Orbax's own Standard handler; the first table
has the bytes of the second save. Then live runs are saved after each of 100 steps with
default options and `max_to_keep=3`; the second table has the mean of all saves. Bytes
are always counted on disk, never taken from a report, and every restore is compared
bit for bit.
"""

import argparse
import dataclasses
import json
import logging
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from decoder import SCALES
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from measure import (
    ORBAX_EVERY,
    TARGETS,
    LiveResult,
    PairResult,
    measure_live,
    measure_pair,
)
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS, Setup

DISK_NEEDED_BYTES = 6_000_000_000
TABLE_COLUMNS = 130


def megabytes(count: float) -> str:
    """Returns a count of bytes as text in MB of 1e6 bytes."""
    return f"{count / 1e6:,.2f}" if count < 1e7 else f"{count / 1e6:,.1f}"


def changes_table(results: list[PairResult]) -> Table:
    """Returns the table of what differs between the two states of each pair."""
    table = Table(title="What changed from one state to the next")
    for column in ("workload", "leaves"):
        table.add_column(column)
    for column in ("MB", "elements changed", "MB in leaves wholly unchanged"):
        table.add_column(column, justify="right")
    for result in results:
        for change in result.changes:
            table.add_row(
                result.workload,
                change.group,
                megabytes(change.raw_bytes),
                f"{100 * change.changed / change.elements:.3f} %",
                megabytes(change.same_bytes),
            )
        table.add_section()
    return table


def pairs_table(results: list[PairResult]) -> Table:
    """Returns the table of what the measured saves cost."""
    table = Table(title="What one save of each pair costs")
    for column in ("workload", "save"):
        table.add_column(column)
    for column in (
        "raw MB",
        "orbax_delta MB",
        "times smaller",
        "Orbax MB",
        "times smaller",
        "wanted",
        "met",
    ):
        table.add_column(column, justify="right")
    for result in results:
        wanted = TARGETS.get(result.workload)
        table.add_row(
            result.workload,
            result.save,
            megabytes(result.raw_bytes),
            megabytes(result.delta_bytes),
            f"{result.raw_bytes / result.delta_bytes:.2f}",
            megabytes(result.orbax_bytes),
            f"{result.raw_bytes / result.orbax_bytes:.2f}",
            "-" if wanted is None else f"{wanted:.2f}",
            {None: "-", True: "yes", False: "[bold red]no[/]"}[result.met],
        )
    return table


def live_table(results: list[LiveResult]) -> Table:
    """Returns the table of the mean save of each live run."""
    table = Table(
        title="Mean save of a live run: every step, default options, max_to_keep=3",
        caption=(
            f"Orbax's figures are of every {ORBAX_EVERY}th save of the same run. "
            "Longest chain: most records that any chunk of any save was made of."
        ),
    )
    table.add_column("workload")
    for column in (
        "saves",
        "raw MB",
        "orbax_delta MB",
        "times smaller",
        "Orbax MB",
        "times smaller",
        "longest chain",
        "root max MB",
        "root last MB",
    ):
        table.add_column(column, justify="right")
    for result in results:
        delta_mean = float(np.mean(result.delta_bytes))
        orbax_mean = float(np.mean(list(result.orbax_bytes.values())))
        table.add_row(
            result.workload,
            str(len(result.delta_bytes)),
            megabytes(result.raw_bytes),
            megabytes(delta_mean),
            f"{result.raw_bytes / delta_mean:.2f}",
            megabytes(orbax_mean),
            f"{result.raw_bytes / orbax_mean:.2f}",
            str(result.records_per_chunk_max),
            megabytes(max(result.root_bytes)),
            megabytes(result.root_bytes[-1]),
        )
    return table


def report_gaps(pairs: list[PairResult], live: list[LiveResult]) -> list[str]:
    """Returns a line for each workload whose reports are over 1 % off the disk."""
    rows = [(row.workload, row.reported_bytes, row.delta_bytes) for row in pairs]
    rows += [
        (f"{row.workload}, live", sum(row.reported_bytes), sum(row.delta_bytes))
        for row in live
    ]
    return [
        f"{name}: the save report says {megabytes(reported)} MB, on disk are "
        f"{megabytes(measured)} MB."
        for name, reported, measured in rows
        if abs(reported - measured) > 0.01 * measured
    ]


def plot_live(results: list[LiveResult], path: pathlib.Path) -> None:
    """Writes a PNG of the bytes of each save of the live runs."""
    figure = Figure(figsize=(5 * len(results), 4), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        axis.plot(np.array(result.delta_bytes) / 1e6, label="orbax_delta")
        steps, counts = zip(*result.orbax_bytes.items(), strict=True)
        axis.plot(steps, np.array(counts) / 1e6, "s", label="Orbax's own handler")
        axis.axhline(result.raw_bytes / 1e6, color="grey", ls=":", label="raw state")
        axis.set(title=result.workload, xlabel="save", ylabel="MB added", yscale="log")
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter())
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    figure.savefig(path, dpi=120)


def as_document(pairs: list[PairResult], live: list[LiveResult]) -> dict[str, Any]:
    """Returns all figures as a JSON document."""
    return {
        "jax": jax.__version__,
        "orbax": ocp.__version__,
        "python": sys.version.split()[0],
        "pairs": [
            dataclasses.asdict(result)
            | {"wanted": TARGETS.get(result.workload), "met": result.met}
            for result in pairs
        ],
        "live": [dataclasses.asdict(result) for result in live],
    }


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = tuple(WORKLOADS)
    parser.add_argument(
        "--workloads",
        nargs="*",
        choices=names,
        default=list(names),
        metavar="NAME",
        help=f"pairs to measure, of: {', '.join(names)}",
    )
    parser.add_argument(
        "--live",
        nargs="*",
        choices=names,
        metavar="NAME",
        default=["dense", "rl_bf16", "embedding"],
        help="live runs to measure",
    )
    parser.add_argument("--saves", type=int, default=100, help="saves of a live run")
    parser.add_argument(
        "--keep-bases", type=int, default=2, help="states that live runs keep"
    )
    parser.add_argument(
        "--scale", choices=tuple(SCALES), default="medium", help="size of the decoder"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of every run")
    parser.add_argument(
        "--cache", type=pathlib.Path, help="folder that keeps warmed-up weights"
    )
    parser.add_argument("--json", type=pathlib.Path, help="where to write all figures")
    parser.add_argument("--plot", type=pathlib.Path, help="where to write a PNG")
    return parser.parse_args()


def main() -> int:
    """Measures and prints; returns 0 if every wanted size is met, 1 if not."""
    options = parse_arguments()
    # Each save is waited for on purpose, which Orbax would warn of every time.
    logging.getLogger("absl").setLevel(logging.ERROR)
    console, progress_console = Console(), Console(stderr=True)
    console.width = max(console.width, TABLE_COLUMNS)
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if free_bytes < DISK_NEEDED_BYTES:
        console.print(
            f"{tempfile.gettempdir()} has {free_bytes / 1e9:.1f} GB free; this needs "
            f"{DISK_NEEDED_BYTES / 1e9:.0f} GB. Set TMPDIR to a roomier folder."
        )
        return 2
    setup = Setup(scale=options.scale, seed=options.seed, cache=options.cache)
    pairs: list[PairResult] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for name in options.workloads:
            with progress_console.status(f"saving a pair: {name}"):
                pairs.append(measure_pair(name, setup, folder))
        live = [
            measure_live(
                name,
                setup,
                folder,
                options.saves,
                progress_console,
                keep_bases=options.keep_bases,
            )
            for name in options.live
        ]
    tables = []
    if pairs:
        tables += [changes_table(pairs), pairs_table(pairs)]
    if live:
        tables += [live_table(live)]
    console.print(*tables, *report_gaps(pairs, live), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(as_document(pairs, live), indent=1))
    if options.plot and live:
        plot_live(live, options.plot)
    return int(any(result.met is False for result in pairs))


if __name__ == "__main__":
    sys.exit(main())
