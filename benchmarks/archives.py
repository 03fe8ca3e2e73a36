"""How much of the packs that an archive holds its steps really use.

    python benchmarks/archives.py --cache ~/.cache/orbax-delta-benchmarks

A live run is saved after each of its steps with default options and `max_to_keep=3`,
and every tenth step is copied to an archive as soon as it is there. Packs are copied
whole, so an archive holds records too that none of its steps needs; the table says how
many bytes, and what as many steps by themselves would take.
"""

import argparse
import itertools
import pathlib
import tempfile

from counting import raw_bytes
from decoder import SCALES
from disk import live_record_bytes
from measure import Root
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS, Setup

import orbax_delta
from orbax_delta import check

NAMES = ("dense", "rl_bf16", "frozen_backbone")
COLUMNS = ("workload", "steps", "raw MB", "packs MB", "used MB", "used", "raw / packs")


def measure(name: str, setup: Setup, folder: pathlib.Path, saves: int, every: int):
    """Returns a row of the table.

    Raises:
        AssertionError: The archive is not whole.
    """
    root = Root(folder / name / "run", delta=True, max_to_keep=3)
    cold = folder / name / "cold"
    archived = raw = 0
    for step, state in enumerate(itertools.islice(WORKLOADS[name](setup), saves)):
        root.save(step, state)
        if step % every == every - 1:
            report = orbax_delta.archive(root.path, cold, steps=[step])
            assert report.ok, report
            archived, raw = archived + 1, raw + raw_bytes(state)
    root.close()
    assert check.verify(str(cold)).ok
    packs = (cold / "_delta_store" / "packs").iterdir()
    held = sum(path.stat().st_size for path in packs)
    used = live_record_bytes(cold)
    megabytes = (f"{count / 1e6:,.1f}" for count in (raw, held, used))
    return name, str(archived), *megabytes, f"{used / held:.0%}", f"{raw / held:.2f}"


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=pathlib.Path, required=True)
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=NAMES)
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    setup = Setup(scale=options.scale, seed=options.seed, cache=options.cache)
    table = Table(*COLUMNS, title="What an archive holds, and what its steps use of it")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads:
            place = pathlib.Path(folder)
            row = measure(name, setup, place, options.saves, options.every)
            table.add_row(*row)
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
