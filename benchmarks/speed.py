"""How fast one core, and several, compare, encode and decode real changes.

    python benchmarks/speed.py --cache ~/.cache/orbax-delta-benchmarks

Chunk by chunk as a save and a restore do it, without storage: `compare` is the digest
of content that did not change; `encode` digest, check of the base, delta, record, and
the copy that the next save builds on; `encode full` the same without a base; `decode`
checks the record, decodes it and checks the digest of what came out. GB are 1e9 bytes
of content. CPU time is per core whatever else runs; wall time needs a quiet machine.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from decoder import SCALES
from forms import PAIRS, Change, changes
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS, Setup

from orbax_delta import codecs, records
from orbax_delta.codecs import Form

Work = Callable[[Change], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One operation on all changed chunks of a workload.

    Attributes:
        workload: Its name.
        operation: What was done.
        threads: On how many threads.
        cpu: GB a second and core, by CPU time; median of all runs.
        wall: GB a second, by wall time; the same.
    """

    workload: str
    operation: str
    threads: int
    cpu: float
    wall: float


def compare(change: Change) -> None:
    """What a save does to an unchanged chunk."""
    records.digest(change.content)


def encode(change: Change) -> None:
    """What a save does to a changed chunk whose base it holds."""
    digest = records.digest(change.content)
    records.digest(change.base)
    delta = codecs.encode_delta(change.content, change.base, change.word_bytes)
    _record(change, delta.form, delta.payload, digest)
    np.copyto(np.empty_like(change.base), change.content)


def encode_full(change: Change) -> None:
    """What a save does to a chunk that it writes in full."""
    digest = records.digest(change.content)
    payload = codecs.encode_full(change.content, change.word_bytes)
    _record(change, Form.PLANES, payload, digest)
    change.content.copy()


def _record(change: Change, form: Form, payload: bytes, digest: bytes) -> bytes:
    return records.Record(
        form=form,
        word_bytes=change.word_bytes,
        content_bytes=change.content.size,
        content_digest=digest,
        payload=payload,
    ).encode()


def decoder(change: Change, *, full: bool) -> Callable[[], None]:
    """Encodes a change; the returned call does what a restore does to its record."""
    digest = records.digest(change.content)
    if full:
        payload = codecs.encode_full(change.content, change.word_bytes)
        data = _record(change, Form.PLANES, payload, digest)
    else:
        delta = codecs.encode_delta(change.content, change.base, change.word_bytes)
        data = _record(change, delta.form, delta.payload, digest)

    def decode() -> None:
        record = records.parse_record(memoryview(data))
        content = codecs.decode(
            record.form,
            record.payload,
            None if full else change.base,
            record.content_bytes,
            record.word_bytes,
        )
        if records.digest(content) != digest:
            raise AssertionError(f"a {record.form.name} record came back changed")

    return decode


def measure(
    calls: list[Callable[[], None]], raw_bytes: int, threads: int, runs: int
) -> tuple[float, float]:
    """Median GB a second, by CPU time of the threads and by wall time."""
    share = [calls[number::threads] for number in range(threads)]

    def run(part: list[Callable[[], None]]) -> float:
        start = time.thread_time()
        for call in part:
            call()
        return time.thread_time() - start

    cpu, wall = [], []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(runs):
            start = time.perf_counter()
            cpu.append(raw_bytes / sum(pool.map(run, share)) / 1e9)
            wall.append(raw_bytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(cpu), statistics.median(wall)


def speeds(name: str, setup: Setup, *, runs: int) -> list[Speed]:
    """Speeds of every operation on the pair of a workload, on one and two threads."""
    pair = list(changes(*itertools.islice(WORKLOADS[name](setup), 2)))
    raw_bytes = sum(change.content.size for change in pair)

    def each(work: Work) -> list[Callable[[], None]]:
        return [lambda change=change: work(change) for change in pair]

    operations = {
        "compare": each(compare),
        "encode": each(encode),
        "encode full": each(encode_full),
        "decode": [decoder(change, full=False) for change in pair],
        "decode full": [decoder(change, full=True) for change in pair],
    }
    found = []
    for operation, calls in operations.items():
        for threads in (1, 2):
            cpu, wall = measure(calls, raw_bytes, threads, runs)
            found.append(
                Speed(
                    workload=name,
                    operation=operation,
                    threads=threads,
                    cpu=cpu,
                    wall=wall,
                )
            )
    return found


def table_of(found: list[Speed]) -> Table:
    """Returns the table of one workload."""
    table = Table(title=f"{found[0].workload}: GB a second")
    table.add_column("operation")
    for column in ("threads", "by CPU time, a core", "by wall time", "of one thread"):
        table.add_column(column, justify="right")
    alone = {speed.operation: speed.wall for speed in found if speed.threads == 1}
    for speed in found:
        table.add_row(
            speed.operation,
            str(speed.threads),
            f"{speed.cpu:.2f}",
            f"{speed.wall:.2f}",
            f"x{speed.wall / alone[speed.operation]:.2f}",
        )
    return table


def main() -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", nargs="*", choices=PAIRS, default=["dense"])
    parser.add_argument("--scale", choices=sorted(SCALES), default="medium")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5, help="medians are over these")
    parser.add_argument("--cache", type=pathlib.Path, help="folder for trained weights")
    parser.add_argument("--json", type=pathlib.Path, help="file for all figures")
    options = parser.parse_args()
    setup = Setup(scale=options.scale, seed=options.seed, cache=options.cache)
    results = [speeds(name, setup, runs=options.runs) for name in options.workloads]
    Console().print(*map(table_of, results), sep="\n")
    if options.json:
        document = [dataclasses.asdict(speed) for found in results for speed in found]
        options.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
