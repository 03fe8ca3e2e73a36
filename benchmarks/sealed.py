"""What encryption costs: saves and restores with it and without, in turns.

    python benchmarks/sealed.py --cache ~/.cache/orbax-delta-benchmarks

States of real training go through `ocp.CheckpointManager` with the defaults, and with
`encryption=` beside them in the same run; every restored state is compared bit for bit.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence

from contenders import DELTA, SEALED, Sample, alternate
from counting import raw_bytes
from decoder import SCALES
from rich.console import Console
from rich.progress import track
from tables import megabytes, new_table
from workloads import WORKLOADS, Setup

STATES = 3
TABLE_COLUMNS = 140

TIMES: dict[str, Callable[[Sample], float | None]] = {
    "save": lambda sample: sample.saves[-1].total_seconds,
    "blocking": lambda sample: sample.saves[-1].blocking_seconds,
    "restore": lambda sample: sample.restore_seconds,
    "warm restore": lambda sample: sample.warm_seconds,
}


def ratio(
    samples: dict[str, list[Sample]], time: Callable[[Sample], float | None]
) -> str:
    """Returns both medians, and that of the encrypted run as a share of the other."""
    plain, sealed = (
        statistics.median(time(sample) or 0.0 for sample in samples[handler])
        for handler in (DELTA, SEALED)
    )
    return f"{sealed / plain:.2f} ({sealed:.3f} / {plain:.3f} s)"


def row(workload: str, size: int, samples: dict[str, list[Sample]]) -> tuple[str, ...]:
    """Returns one line of the table."""
    bytes_of = {name: found[0].saves[-1].added_bytes for name, found in samples.items()}
    return (
        workload,
        megabytes(size),
        f"{bytes_of[DELTA]:,}",
        f"{bytes_of[SEALED] - bytes_of[DELTA]:,}",
        *(ratio(samples, time) for time in TIMES.values()),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ("dense", "rl_bf16", "embedding", "frozen_backbone")
    parser.add_argument(
        "--workloads", nargs="*", choices=tuple(WORKLOADS), default=default
    )
    parser.add_argument("--scale", choices=tuple(SCALES), default="medium")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cache", type=pathlib.Path, help="keeps warmed-up weights")
    parser.add_argument("--folder", type=pathlib.Path, help="where roots are made")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all figures")
    options = parser.parse_args(arguments)
    setup = Setup(scale=options.scale, seed=options.seed, cache=options.cache)
    table = new_table(
        "Second saves and restores with encryption, as shares of those without",
        ["state"],
        ["raw MB", "bytes without", "more with", *TIMES],
    )
    everything = {}
    for workload in options.workloads:
        states = list(itertools.islice(WORKLOADS[workload](setup), STATES))
        samples: dict[str, list[Sample]] = {DELTA: [], SEALED: []}
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = track(
                alternate(
                    states, pathlib.Path(folder), options.repetitions, [*samples]
                ),
                workload,
                total=options.repetitions * len(samples),
                console=Console(stderr=True),
                transient=True,
            )
            for handler, sample in found:
                samples[handler].append(sample)
        table.add_row(*row(workload, raw_bytes(states[-1]), samples))
        everything[workload] = {
            name: [dataclasses.asdict(sample) for sample in found]
            for name, found in samples.items()
        }
    Console(width=TABLE_COLUMNS).print(table)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
