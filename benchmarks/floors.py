"""What no handler can be faster than here: a manager's own time, and that of memory.

    python benchmarks/floors.py

A save and a restore of four numbers through `ocp.CheckpointManager`, with this handler
and with Orbax's own; then how fast one and two threads search two contents for what
differs (0.5 % of the words), and digest one of them, from memory that is in no cache.
"""

import argparse
import logging
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from contenders import DELTA, ORBAX, Manager
from rich.console import Console
from tables import new_table

from orbax_delta import records, sparse

WORDS = 1 << 18
EVERY = 200
"""Of so many words one differs."""


def manager_seconds(
    handler: str, saves: int, folder: pathlib.Path
) -> tuple[float, float]:
    """Returns the median seconds of a save, and of a restore, of four numbers."""
    state = {"four": jnp.zeros(4)}
    manager = Manager(handler, folder / handler)
    taken = []
    for step in range(saves):
        saving = manager.save(step, state)
        taken.append((saving.total_seconds, manager.restore(step, state)[1]))
    manager.close()
    save, restore = zip(*taken)
    return statistics.median(save), statistics.median(restore)


def search(new: np.ndarray, old: np.ndarray) -> None:
    """Finds what differs, as a save does."""
    pair = sparse.Pair(new.view(np.uint8), old.view(np.uint8), 4, most=WORDS // 8)
    sparse.find([pair])


def digest(new: np.ndarray, _: np.ndarray) -> None:
    """Digests the new content, as a save does."""
    records.digest(new.view(np.uint8))


def chunk_seconds(
    work: Callable[[np.ndarray, np.ndarray], None],
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    threads: int,
) -> float:
    """Returns the least seconds a chunk of three passes over all of them."""

    def run(part: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        for new, old in part:
            work(new, old)

    run(pairs)  # compiles, and touches all memory
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        workers = [
            threading.Thread(target=run, args=(pairs[number::threads],))
            for number in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, (time.perf_counter() - begin) / len(pairs))
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", type=int, default=30)
    parser.add_argument("--chunks", type=int, default=120, help="of 1 MiB")
    parser.add_argument("--folder", type=pathlib.Path, help="where roots are made")
    options = parser.parse_args(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)
    console = Console(width=100)
    table = new_table("Four numbers through a manager", ["by"], ["save", "restore"])
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for handler in (DELTA, ORBAX):
            save, restore = manager_seconds(
                handler, options.saves, pathlib.Path(folder)
            )
            table.add_row(handler, f"{1e3 * save:.1f} ms", f"{1e3 * restore:.1f} ms")
    console.print(table)
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(options.chunks):
        old = rng.integers(0, 1 << 32, WORDS, np.uint32)
        new = old.copy()
        new[::EVERY] += 1
        pairs.append((new, old))
    table = new_table("Chunks of 1 MiB", ["work"], ["a chunk", "GB/s", "two threads"])
    for work, read in ((search, 2), (digest, 1)):
        one, two = (chunk_seconds(work, pairs, threads) for threads in (1, 2))
        rate = read * pairs[0][0].nbytes / one / 1e9
        table.add_row(
            work.__name__, f"{1e6 * one:.0f} us", f"{rate:.1f}", f"{one / two:.2f} x"
        )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
