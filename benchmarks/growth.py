"""How seconds, memory and bytes grow with the state, its leaves and the saves before.

    python benchmarks/growth.py --plot plots

States of 0.25, 1 and 4 GB; 10, 1,000 and 10,000 leaves; 1 to 500 saves. Each point is
measured in a process of its own. Peaks of memory stand beside what the formula in
`orbax_delta/DESIGN.md`, "Memory", says. Linux alone.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from growing import Cost
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from tables import megabytes, new_table

from orbax_delta.options import DeltaOptions

GIGABYTES = (0.25, 1.0, 4.0)
LEAVES = (10, 1_000, 10_000)
SAVES = 500
LEAVES_OF_SIZES = 16
"""Leaves of the states of growing size."""
MEGABYTES_OF_LEAVES, MEGABYTES_OF_SAVES = 100, 8
"""Sizes of the states of growing count of leaves, and of the long run."""

ROW_BYTES, RECORD_BYTES = 300, 140
RESTORE_BYTES = 100 << 20
EXACT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""What makes glibc give memory back as soon as it is freed."""

Point = Mapping[str, Any]


def point(
    count: int, state_bytes: int, folder: pathlib.Path, *, exact: bool = False
) -> Point:
    """Returns the costs of saves and of a restore, each measured in its own process.

    Args:
        count: Leaves.
        state_bytes: Bytes of all of them.
        folder: Where a temporary folder is made.
        exact: Let memory that is freed go back at once. It is slower, and shows what is
            in use instead of what the allocator holds.
    """
    settings = EXACT if exact else {}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        costs = _child("save", temporary, count, state_bytes, settings)
        costs += _child("restore", temporary, count, state_bytes, settings)
    return {"leaves": count, "state_bytes": state_bytes, "costs": costs}


def often(saves: int, state_bytes: int, folder: pathlib.Path) -> list[Cost]:
    """Returns the costs of each save of a long run."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        return _child("often", temporary, saves, state_bytes)


def _child(
    kind: str,
    folder: str,
    count: int,
    state_bytes: int,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> list[Cost]:
    program = pathlib.Path(__file__).with_name("growing.py")
    done = subprocess.run(
        [sys.executable, program, kind, folder, str(count), str(state_bytes)],
        check=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | settings,
    )
    return [Cost(**cost) for cost in json.loads(done.stdout)]


def formula_bytes(cost: Cost, state_bytes: int) -> int:
    """Returns the memory above the training state that DESIGN.md says is needed.

    The snapshot of a save is a view on a CPU, and the state of this measurement is not
    trained on meanwhile, so it needs nothing.
    """
    if cost.what == "restore":
        return state_bytes + RESTORE_BYTES
    options = DeltaOptions()
    rows = cost.chunks * (ROW_BYTES + RECORD_BYTES * cost.records_mean)
    window = 5 * options.pack_size(local=True, state_bytes=state_bytes)
    scratch = 8 * options.worker_count * options.chunk_bytes
    return int(state_bytes + rows + window + scratch)


# --------------------------------------------------------------- tables and pictures


def print_points(title: str, points: Sequence[Point], console: Console) -> None:
    """Prints what each point cost, and its memory against the formula."""
    table = new_table(
        title,
        ["what"],
        [
            "state MB",
            "leaves",
            "s",
            "processor s",
            "blocking s",
            "GB/s",
            "MB on disk",
            "memory MB",
        ],
    )
    for what, one, cost in _by_kind(points):
        table.add_row(
            what,
            megabytes(one["state_bytes"]),
            f"{one['leaves']:,}",
            f"{cost.wall_seconds:.3f}",
            f"{cost.cpu_seconds:.3f}",
            f"{cost.blocking_seconds:.3f}",
            f"{one['state_bytes'] / cost.wall_seconds / 1e9:.2f}",
            megabytes(cost.disk_bytes) if cost.disk_bytes else "-",
            megabytes(cost.memory_bytes),
        )
    console.print(table)


def print_memory(
    usual: Sequence[Point], exact: Sequence[Point], console: Console
) -> None:
    """Prints the formula of memory against what is used and what is held."""
    table = new_table(
        "Peak of memory above the state, against the formula",
        ["what"],
        ["state MB", "formula MB", "in use MB", "share", "with glibc's defaults MB"],
    )
    by_size = {one["state_bytes"]: one for one in usual}
    for what, one, cost in _by_kind(exact):
        same = by_size[one["state_bytes"]]["costs"]
        held = next(c.memory_bytes for c in same if c.what == what)
        predicted = formula_bytes(cost, one["state_bytes"])
        table.add_row(
            what,
            megabytes(one["state_bytes"]),
            megabytes(predicted),
            megabytes(cost.memory_bytes),
            f"{cost.memory_bytes / predicted:.2f}",
            megabytes(held),
        )
    console.print(table)


def _by_kind(points: Sequence[Point]) -> Iterator[tuple[str, Point, Cost]]:
    for index in range(len(points[0]["costs"])):
        for one in points:
            cost = one["costs"][index]
            yield cost.what, one, cost


def print_saves(costs: Sequence[Cost], console: Console) -> None:
    """Prints a long run by tenths."""
    table = new_table(
        "A long run: 1 % of the elements changed, max_to_keep=3",
        ["saves"],
        ["median s", "processor s", "blocking s", "root MB", "memory MB", "records"],
    )
    for part in np.array_split(np.arange(len(costs)), min(10, len(costs))):
        some = [costs[index] for index in part]
        table.add_row(
            f"{part[0] + 1}-{part[-1] + 1}",
            f"{_median('wall_seconds', some):.4f}",
            f"{_median('cpu_seconds', some):.4f}",
            f"{_median('blocking_seconds', some):.4f}",
            megabytes(_median("disk_bytes", some)),
            megabytes(max(cost.memory_bytes for cost in some)),
            f"{_median('records_mean', some):.1f}",
        )
    console.print(table)


def _median(field: str, costs: Sequence[Cost]) -> float:
    return float(np.median([getattr(cost, field) for cost in costs]))


def plot_points(points: Sequence[Point], by: str, path: pathlib.Path) -> None:
    """Draws seconds, memory and bytes over sizes or leaves, with straight lines."""
    counts = np.array([one[by] for one in points])
    fields = {
        "wall_seconds": "seconds",
        "memory_bytes": "bytes of memory",
        "disk_bytes": "bytes on disk",
    }
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    for axes, (field, label) in zip(figure.subplots(1, 3), fields.items(), strict=True):
        largest = 0.0
        for what in [cost.what for cost in points[0]["costs"]]:
            costs = [c for one in points for c in one["costs"] if c.what == what]
            values = [getattr(cost, field) or float("nan") for cost in costs]
            axes.loglog(counts, values, "o-", label=what)
            largest = max(largest, np.nan_to_num(values[-1]))
        axes.loglog(counts, largest * counts / counts[-1], "k:", label="straight line")
        axes.set(xlabel=by.replace("_", " "), ylabel=label)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def plot_saves(costs: Sequence[Cost], path: pathlib.Path) -> None:
    """Draws each save of a long run; level lines are the medians of the first tenth."""
    fields = {
        "wall_seconds": "seconds",
        "memory_bytes": "bytes of memory",
        "disk_bytes": "bytes of the root",
    }
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    first = costs[: max(1, len(costs) // 10)]
    for axes, (field, label) in zip(figure.subplots(1, 3), fields.items(), strict=True):
        axes.plot([getattr(cost, field) for cost in costs], lw=0.8)
        axes.axhline(_median(field, first), color="black", ls=":", label="level")
        axes.set(xlabel="save", ylabel=label, ylim=(0, None))
        axes.legend()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    lists = {"gigabytes": (float, GIGABYTES), "leaves": (int, LEAVES)}
    for name, (kind, default) in lists.items():
        parser.add_argument(
            f"--{name}", nargs="*", type=kind, default=default, help="points"
        )
    parser.add_argument(
        "--exact",
        nargs="*",
        type=float,
        default=GIGABYTES[:2],
        help="of --gigabytes, those whose memory is compared with the formula",
    )
    parser.add_argument("--saves", type=int, default=SAVES, help="of the long run")
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=pathlib.Path(tempfile.gettempdir()),
        help="where the states are put, for a while",
    )
    parser.add_argument("--json", type=pathlib.Path, help="where to write all figures")
    parser.add_argument("--plot", type=pathlib.Path, help="folder for pictures")
    options = parser.parse_args()
    options.exact = [one for one in options.exact if one in options.gigabytes]
    return options


def main() -> None:
    """Measures, prints and draws."""
    options = parse_arguments()
    console, folder = Console(), options.folder
    console.width = max(console.width, 130)
    sizes, exact, leaves = [], [], []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        total = sum(map(len, (options.gigabytes, options.exact, options.leaves))) + 1
        task = progress.add_task("growth", total=total)
        for gigabytes in options.gigabytes:
            sizes.append(point(LEAVES_OF_SIZES, int(gigabytes * 1e9), folder))
            progress.advance(task)
        for gigabytes in options.exact:
            state_bytes = int(gigabytes * 1e9)
            exact.append(point(LEAVES_OF_SIZES, state_bytes, folder, exact=True))
            progress.advance(task)
        for count in options.leaves:
            leaves.append(point(count, MEGABYTES_OF_LEAVES * 1_000_000, folder))
            progress.advance(task)
        saves = often(options.saves, MEGABYTES_OF_SAVES * 1_000_000, folder)
    for title, points in (("By size", sizes), ("By leaves", leaves)):
        if points:
            print_points(title, points, console)
    if exact:
        print_memory(sizes, exact, console)
    print_saves(saves, console)
    if options.json:
        document = {"sizes": sizes, "exact": exact, "leaves": leaves, "saves": saves}
        options.json.write_text(json.dumps(document, indent=1, default=_plain))
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        for name, points in (("state_bytes", sizes), ("leaves", leaves)):
            if points:
                plot_points(points, name, options.plot / f"growth-{name}.png")
        plot_saves(saves, options.plot / "growth-saves.png")


def _plain(cost: Cost) -> Any:
    return {name: getattr(cost, name) for name in Cost.__slots__}


if __name__ == "__main__":
    main()
