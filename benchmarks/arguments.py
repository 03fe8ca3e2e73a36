"""The options of the comparison."""

import argparse
import pathlib
import tempfile
from collections.abc import Sequence

from decoder import SCALES
from workloads import WORKLOADS

PARTS = ("pairs", "large", "peers", "memory", "live", "disk")
SHARED_MEMORY = pathlib.Path("/dev/shm")


def parse_arguments(description: str) -> argparse.Namespace:
    """Returns the options of the command line, with the folders resolved."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names, scales = tuple(WORKLOADS), tuple(SCALES)

    def workloads(flag: str, default: Sequence[str], text: str) -> None:
        parser.add_argument(
            flag, nargs="*", choices=names, default=default, metavar="NAME", help=text
        )

    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=PARTS, help="what to measure"
    )
    workloads("--workloads", names, "pairs, and of them peers and memory")
    time_ratios = ("dense", "rl_bf16", "frozen_backbone")
    workloads("--large", time_ratios, "pairs and memory of states of up to 1 GB")
    peaks = ("dense", "frozen_backbone", "rl_bf16", "moe")
    workloads("--memory", peaks, "peaks of memory, of --workloads")
    workloads("--live", ("rl_bf16", "embedding"), "means of many saves")
    workloads("--disk", ("frozen_backbone", "moe"), "disk after many saves")
    parser.add_argument(
        "--folder", action="append", type=pathlib.Path, help="where roots are made"
    )
    counts = {
        "repetitions": 5,
        "peer-repetitions": 3,
        "later": 2,
        "memory-saves": 4,
        "live-saves": 100,
        "disk-saves": 200,
        "seed": 0,
    }
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="how many")
    parser.add_argument("--scale", choices=scales, default="medium", help="size")
    parser.add_argument("--disk-scale", choices=scales, default="small", help="size")
    parser.add_argument("--cache", type=pathlib.Path, help="keeps warmed-up weights")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all figures")
    parser.add_argument("--plot", type=pathlib.Path, help="folder for pictures")
    parser.add_argument(
        "--quick", action="store_true", help="tiny states, once: does it all run?"
    )
    options = parser.parse_args()
    if not options.folder:
        options.folder = [pathlib.Path(tempfile.gettempdir())]
        if SHARED_MEMORY.is_dir():
            options.folder.insert(0, SHARED_MEMORY)
    if options.quick:
        options.scale = options.disk_scale = "tiny"
        options.repetitions = options.peer_repetitions = options.memory_saves = 1
        options.live_saves = options.disk_saves = 12
        options.large = []
    return options
