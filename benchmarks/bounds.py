"""What a bound costs: sizes and times of saves of dense AdamW state, policy by policy.

    python benchmarks/bounds.py --cache ~/.cache/orbax-delta-benchmarks --plot b.png

States of real pre-training, 14 bytes a parameter, go through `ocp.CheckpointManager`:
two that are one step apart, and two that are 100. Bytes are those of the files that the
second save adds; every restored element is held against its bound. The exit code is 1
if the default of `policies.adamw` is larger than wanted, or slower to save than the
lossless state.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp
from counting import State, added_bytes, files_on_disk, raw_bytes
from decoder import SCALES
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from tables import megabytes, new_table
from workloads import WORKLOADS, Setup

import orbax_delta
from orbax_delta import policies

LEARNING_RATE = 3e-4
"""Of pre-training once it is warm."""

STRIDES = {"dense": 1, "dense_k100": 100}
TARGETS: Mapping[str, float] = {"dense": 40.0, "dense_k100": 12.5}
"""How many times smaller than the state the second save has to be by default."""

TABLE_COLUMNS = 200

TIMES = ("save, s", "save, CPU s", "restore, s", "restore, CPU s")
"""Of the second save, and of a restore of what it wrote."""

LOSSLESS, DEFAULT = "lossless", "adamw(lr)"

Settings = Mapping[str, Any]
ROWS: Mapping[str, Settings | None] = {
    LOSSLESS: None,
    "fp32 master exact": {"weights": 0},
    "bf16 weights exact": {"weights": "bfloat16"},
    "weights 0.03 lr, mu 0.02, nu 1/16 octave": {
        "weights": 0.03,
        "mu": 0.02,
        "nu_octaves": 1 / 16,
    },
    "weights 0.1 lr, mu 0.05, nu 1/8 octave": {
        "weights": 0.1,
        "mu": 0.05,
        "nu_octaves": 1 / 8,
    },
    "weights 0.25 lr, mu 0.05, nu 1/4 octave": {
        "weights": 0.25,
        "mu": 0.05,
        "nu_octaves": 1 / 4,
    },
    "weights 1 lr, mu 0.1, nu 1/2 octave": {"mu": 0.1, "nu_octaves": 0.5},
    "weights 1 lr, mu 0.1, nu 1 octave": {"mu": 0.1},
    DEFAULT: {},
    "weights 4 lr, mu 0.2, nu 1 octave": {"weights": 4.0},
    "weights 16 lr, mu 0.5, nu 2 octaves": {
        "weights": 16.0,
        "mu": 0.5,
        "nu_octaves": 2.0,
    },
}
"""Arguments of `policies.adamw`, from exact to harmful; see quality.py."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What one policy makes of one pair of states.

    Attributes:
        policy: Its row.
        workload: The pair.
        raw_bytes: Bytes of a state.
        added_bytes: Of the second save.
        first_bytes: Of the first save, which has nothing to build on.
        seconds: By `TIMES`, of each repetition.
        largest: The largest error by kind of leaf, in the unit of its bound.
    """

    policy: str
    workload: str
    raw_bytes: int
    added_bytes: int
    first_bytes: int
    seconds: Mapping[str, tuple[float, ...]]
    largest: Mapping[str, float]

    @property
    def times_smaller(self) -> float:
        """Raw bytes over those of the second save."""
        return self.raw_bytes / self.added_bytes

    def median(self, time: str) -> float:
        """Of one of `TIMES`."""
        return statistics.median(self.seconds[time])


@contextlib.contextmanager
def timed(name: str, seconds: dict[str, tuple[float, ...]]) -> Iterator[None]:
    """Puts what the block takes where `TIMES` name it, instead of what is there."""
    begun = time.perf_counter(), time.process_time()
    yield
    seconds[f"{name}, s"] = (time.perf_counter() - begun[0],)
    seconds[f"{name}, CPU s"] = (time.process_time() - begun[1],)


def measure(
    policy: str, workload: str, states: Sequence[State], folder: pathlib.Path
) -> Size:
    """Saves two states through a manager and checks what comes back.

    Raises:
        AssertionError: An element is not within its bound.
    """
    settings = ROWS[policy]
    lossy = None
    if settings is not None:
        lossy = policies.adamw(LEARNING_RATE, **settings)
    with (
        tempfile.TemporaryDirectory(dir=folder) as root,
        ocp.CheckpointManager(
            root, handler_registry=orbax_delta.handler_registry(lossy=lossy)
        ) as manager,
    ):
        added: list[int] = []
        seconds: dict[str, tuple[float, ...]] = {}
        for step, state in enumerate(states):
            before = files_on_disk(pathlib.Path(root))
            with timed("save", seconds):
                manager.save(step, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
            added.append(added_bytes(before, files_on_disk(pathlib.Path(root))))
        last = len(states) - 1
        target = jtu.tree_map(ocp.utils.to_shape_dtype_struct, states[last])
        with timed("restore", seconds):
            found = manager.restore(last, args=ocp.args.StandardRestore(target))
    return Size(
        policy=policy,
        workload=workload,
        raw_bytes=raw_bytes(states[-1]),
        added_bytes=added[-1],
        first_bytes=added[0],
        seconds=seconds,
        largest=check(found, states[last], settings),
    )


def check(found: State, true: State, settings: Settings | None) -> dict[str, float]:
    """Returns the largest error by kind of leaf, in the unit of its bound.

    Raises:
        AssertionError: One exceeds it.
    """
    worst = {"weights, lr": 0.0, "mu, sqrt(nu)": 0.0, "nu, relative": 0.0}
    kinds = zip(
        jtu.tree_leaves(found["master"]),
        jtu.tree_leaves(true["master"]),
        *(jtu.tree_leaves(found["moments"][kind]) for kind in ("mu", "nu")),
        *(jtu.tree_leaves(true["moments"][kind]) for kind in ("mu", "nu")),
        strict=True,
    )
    for leaves in kinds:
        w, true_w, mu, nu, true_mu, true_nu = (
            np.asarray(x, np.float64) for x in leaves
        )
        scale = np.sqrt(np.asarray(leaves[3])) + np.float32(1e-8)
        normal = np.maximum(true_nu, 2.0**-126)
        for name, error in (
            ("weights, lr", np.abs(w - true_w) / LEARNING_RATE),
            ("mu, sqrt(nu)", np.abs(mu - true_mu) / scale.astype(np.float64)),
            ("nu, relative", np.abs(nu - true_nu) / normal),
        ):
            worst[name] = max(worst[name], float(error.max()))
        if ((nu == 0) != (true_nu == 0)).any() or (nu < 0).any():
            raise AssertionError("nu became zero or negative")
    if settings is None:
        bounds = dict.fromkeys(worst, 0.0)
    else:
        given = policies.adamw(LEARNING_RATE, **settings)
        exact = not isinstance(given.weights, str)
        bounds = {
            "weights, lr": float(given.weights) if exact else np.inf,
            "mu, sqrt(nu)": given.mu,
            "nu, relative": given.nu_octaves / 2,
        }
    for name, bound in bounds.items():
        if worst[name] > bound:
            raise AssertionError(f"{name}: an error of {worst[name]}, bound {bound}")
    return worst


def plot(sizes: Sequence[Size], path: pathlib.Path) -> None:
    """Writes one bar for each policy and pair: how many times smaller it is."""
    names = list(dict.fromkeys(size.policy for size in sizes))
    figure = Figure(figsize=(9, 1.5 + 0.55 * len(names)), layout="constrained")
    axes = figure.subplots()
    for place, (workload, stride) in enumerate(STRIDES.items()):
        rows = {s.policy: s.times_smaller for s in sizes if s.workload == workload}
        label = "1 step apart" if stride == 1 else f"{stride} steps apart"
        bars = axes.barh(
            np.arange(len(rows)) + 0.4 * place, list(rows.values()), 0.4, label=label
        )
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize="small")
        if workload in TARGETS:
            axes.axvline(TARGETS[workload], ls=":", color=f"C{place}")
    axes.set_yticks(np.arange(len(names)) + 0.2, names)
    axes.invert_yaxis()
    axes.set(
        xscale="log",
        xlabel="times smaller than the state (dotted: wanted of the default)",
        title="Second save of dense AdamW state, 14 bytes a parameter",
    )
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> int:
    """Measures every policy on both pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=tuple(SCALES), default="medium")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cache", type=pathlib.Path, help="keeps warmed-up weights")
    parser.add_argument("--folder", type=pathlib.Path, help="where roots are made")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all figures")
    parser.add_argument("--plot", type=pathlib.Path, help="where to write the picture")
    options = parser.parse_args()
    folder = options.folder or pathlib.Path(tempfile.gettempdir())
    setup = Setup(scale=options.scale, seed=options.seed, cache=options.cache)
    sizes: list[Size] = []
    for workload in STRIDES:
        states = list(itertools.islice(WORKLOADS[workload](setup), 2))
        runs = [policy for _ in range(options.repetitions) for policy in ROWS]
        console = Console(stderr=True)
        found: dict[str, Size] = {}
        for policy in track(runs, workload, console=console, transient=True):
            one = measure(policy, workload, states, folder)
            earlier = found.get(policy)
            if earlier is not None:
                seconds = {t: earlier.seconds[t] + one.seconds[t] for t in TIMES}
                one = dataclasses.replace(one, seconds=seconds)
            found[policy] = one
        sizes += found.values()
    return report(sizes, options.json, options.plot)


def report(
    sizes: Sequence[Size], json_path: pathlib.Path | None, picture: pathlib.Path | None
) -> int:
    """Prints the tables and what is wanted; returns the exit code."""
    console = Console(width=TABLE_COLUMNS)
    met = True
    for workload, stride in STRIDES.items():
        rows = [size for size in sizes if size.workload == workload]
        state = f"dense AdamW state of {megabytes(rows[0].raw_bytes)} MB"
        table = new_table(
            f"Second save of {state}, {stride} step(s) after the first",
            ["policy"],
            ["MB", "times smaller", "bits a parameter", "first save"]
            + ["save, s (CPU)", "restore, s (CPU)"]
            + ["largest error: " + name for name in rows[0].largest],
        )
        for size in rows:
            table.add_row(
                size.policy,
                megabytes(size.added_bytes),
                f"{size.times_smaller:.2f}",
                f"{112 / size.times_smaller:.2f}",
                f"{size.raw_bytes / size.first_bytes:.2f}",
                *(
                    f"{size.median(whole):.2f} ({size.median(cpu):.2f})"
                    for whole, cpu in (TIMES[:2], TIMES[2:])
                ),
                *(f"{error:.3g}" for error in size.largest.values()),
            )
        console.print(table)
        by_policy = {size.policy: size for size in rows}
        default, lossless = by_policy[DEFAULT], by_policy[LOSSLESS]
        target = TARGETS[workload]
        shares = [default.median(time) / lossless.median(time) for time in TIMES]
        slower = shares[0]
        console.print(
            f"{DEFAULT}: {default.times_smaller:.1f} times smaller, wanted "
            f"{target:g}; takes {slower:.2f} of the lossless save's time, wanted 1 "
            f"({shares[1]:.2f} of its processor time), and {shares[2]:.2f} "
            f"({shares[3]:.2f}) of its restore's\n"
        )
        met = met and default.times_smaller >= target and slower <= 1
    if json_path:
        json_path.write_text(
            json.dumps([dataclasses.asdict(s) for s in sizes], indent=1)
        )
    if picture:
        plot(sizes, picture)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
