"""What rows and leaves cost: bytes, seconds and memory, up to millions of chunks.

    python benchmarks/rows.py --plot rows.png

No state is saved: rows are made as a sharded transformer's would be (fp32 master and
moments and a bf16 copy, in chunks of 1 MiB on two tensor-parallel shards; lists of one
to ten records in packs of 64 MiB), and go through the functions that a save, a restore
and a prune use. Seconds are those of the processor, so that other programs do not
count. Each figure comes from a process of its own, whose peak of memory counts above
what it had before. Needs Linux or macOS.
"""

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from orbax_delta import manifests, parts, prune, records, steps
from orbax_delta.codecs import Form
from orbax_delta.dtypes import Rule
from orbax_delta.manifests import LeafEntry, Manifest, PartEntry
from orbax_delta.places import locate
from orbax_delta.store import DeltaStore, Folder

ROW_COUNTS = (1_000, 10_000, 100_000, 600_000, 2_400_000)
LEAF_COUNTS = (100, 1_000, 10_000, 100_000)
ROWS_PER_LEAF = 240
STEPS = 10
"""Steps in the root: as many saves as a list has records at most."""
PACK_BYTES = 64 << 20
FULL_BYTES, DELTA_BYTES = (900_000, 990_000), (600_000, 700_000)
"""Least and most bytes of a record of 1 MiB of fp32: whole, and as a difference."""
COPIES_EVERY = 4
CUT, SHARDS, COLUMNS = 256, 2, 1024
ON_A_MESH = {
    "kind": "named",
    "platform": "tpu",
    "memory_kind": "device",
    "mesh": {
        "shape": [64, SHARDS],
        "axis_names": ["fsdp", "tp"],
        "axis_types": ["Auto", "Auto"],
        "device_ids": list(range(64 * SHARDS)),
    },
    "spec": ["fsdp", "tp"],
}


# --- what is measured -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """One point: how many leaves of how many rows there are."""

    leaves: int
    rows_per_leaf: int

    @property
    def rows(self) -> int:
        return self.leaves * self.rows_per_leaf


def attempt(save: int) -> str:
    """Returns the identity of a save."""
    return records.digest(b"%d" % save).hex()


def leaves(sizes: Sizes) -> list[LeafEntry]:
    """Returns matrices of a transformer: master, two moments and a copy of each."""
    height = CUT * sizes.rows_per_leaf // SHARDS
    kinds = ("master", "mu", "nu", "compute")
    return [
        LeafEntry(
            path=(kinds[n % COPIES_EVERY], f"layer_{n // 16}", f"kernel_{n % 16}"),
            kind="jax",
            dtype="bfloat16" if n % COPIES_EVERY == COPIES_EVERY - 1 else "float32",
            shape=(height, COLUMNS * SHARDS),
            sharding=ON_A_MESH,
        )
        for n in range(sizes.leaves)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """Where each save put the record of each fp32 chunk: arrays [save, chunk]."""

    pack: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    @classmethod
    def of(cls, chunks: int) -> "Records":
        rng = np.random.default_rng(0)
        full = rng.integers(*FULL_BYTES, (STEPS, chunks), np.uint32)
        delta = rng.integers(*DELTA_BYTES, (STEPS, chunks), np.uint32)
        first = STEPS - list_lengths(chunks)
        length = np.where(np.arange(STEPS)[:, None] == first, full, delta)
        ends = np.cumsum(length, axis=1, dtype=np.int64)
        pack = (ends // PACK_BYTES).astype(np.uint32)
        begins = np.array([row[np.searchsorted(p, p)] for row, p in zip(ends, pack)])
        return cls(pack=pack, offset=(ends - begins).astype(np.uint32), length=length)


def list_lengths(chunks: int) -> np.ndarray:
    """Returns how many records each fp32 chunk's list has: 1 to STEPS, staggered."""
    return 1 + np.arange(chunks) * 7 % STEPS


def rows(sizes: Sizes) -> Iterator[parts.Row]:
    """Yields the rows of the last save."""
    per_leaf = sizes.rows_per_leaf
    whole = sizes.leaves - sizes.leaves // COPIES_EVERY
    found = Records.of(whole * per_leaf)
    lengths = list_lengths(whole * per_leaf)
    names = [
        [f"{attempt(save)}-p0-{n}" for n in range(int(found.pack[save, -1]) + 1)]
        for save in range(STEPS)
    ]
    first, lists = 0, []
    for leaf in range(sizes.leaves):
        copy = leaf % COPIES_EVERY == COPIES_EVERY - 1
        if not copy:
            span = slice(first, first + per_leaf)
            first += per_leaf
            places = [
                getattr(found, name)[:, span].T.tolist()
                for name in ("pack", "offset", "length")
            ]
            lists = [
                reference_list(names, int(count), *place)
                for count, *place in zip(lengths[span], *places)
            ]
        for index, refs in enumerate(lists):
            row, shard = index // SHARDS * CUT, index % SHARDS * COLUMNS
            yield parts.Row(
                leaf=leaf,
                box=((row, row + CUT), (shard, shard + COLUMNS)),
                digest=records.digest(b"%d %d" % (leaf, index)),
                rule=Rule.F32_TO_BF16 if copy else Rule.NONE,
                refs=refs,
                since=len(refs) - 1,
                age=len(refs) - 1,
            )


def reference_list(
    names: Sequence[Sequence[str]],
    count: int,
    packs: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
) -> tuple[parts.Ref, ...]:
    """Returns the list of a chunk that was written whole `count` saves ago."""
    return tuple(
        parts.Ref(
            form=Form.PLANES if save == STEPS - count else Form.DIFFERENCE,
            pack=names[save][packs[save]],
            offset=offsets[save],
            length=lengths[save],
        )
        for save in range(STEPS - count, STEPS)
    )


def manifest(step: int, sizes: Sizes, packs: Sequence[str], part: bytes) -> Manifest:
    """Returns the MANIFEST of a step of these rows."""
    own = attempt(step)
    entry = PartEntry(
        name=f"part-{own}-p0",
        length=len(part),
        digest=records.digest(part).hex(),
        rows=sizes.rows,
        packs=tuple(range(len(packs))),
    )
    return Manifest(
        attempt=own,
        step=step,
        item="default",
        wall_time=1.8e9,
        save_index=step,
        predecessor=None,
        store_uuid="",
        store_url="",
        root_uuid="",
        options={},
        versions={},
        tree={},
        leaves=leaves(sizes),
        packs=packs,
        parts=(entry,),
        report={},
    )


# --- in the process that is measured --------------------------------------------------


def peak_bytes() -> int:
    """Returns the most memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measured(name: str, action: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Calls `action`; returns its result and what it cost."""
    before = peak_bytes()
    begin = time.process_time()
    result = action()
    seconds = time.process_time() - begin
    return result, {f"{name}: s": seconds, f"{name}: bytes": peak_bytes() - before}


def make(folder: pathlib.Path, sizes: Sizes) -> dict[str, float]:
    """Encodes part and MANIFEST, and lays out a root of STEPS steps that name packs."""
    gc.disable()  # it would traverse all rows again and again while they are made
    made = list(rows(sizes))
    gc.enable()
    packs = sorted({ref.pack for row in made for ref in row.refs})
    own = bytes.fromhex(attempt(STEPS - 1))
    part, costs = measured("encode part", lambda: parts.encode_part(own, made, packs))
    last = manifest(STEPS - 1, sizes, packs, part)
    data, more = measured("encode MANIFEST", lambda: manifests.encode_manifest(last))
    store = DeltaStore.open_or_create(Folder(str(folder)))
    (folder / "_delta_store" / "packs").mkdir()
    for pack in packs:
        (folder / "_delta_store" / "packs" / pack).touch()
    for step in range(STEPS):
        item = folder / str(step) / "default"
        item.mkdir(parents=True)
        mine = dataclasses.replace(
            manifest(step, sizes, packs, part), store_uuid=store.uuid
        )
        (item / manifests.MANIFEST_NAME).write_bytes(manifests.encode_manifest(mine))
    (item / last.parts[0].name).write_bytes(part)
    sizes_of_files = {"part": len(part), "MANIFEST": len(data), "packs": len(packs)}
    return costs | more | sizes_of_files


def place(folder: pathlib.Path) -> Any:
    """Returns where the last step lies."""
    return locate(str(folder / str(STEPS - 1) / "default"))


def parse_manifest(folder: pathlib.Path, sizes: Sizes) -> dict[str, float]:
    """Reads the leaves of a step."""
    data = Folder(place(folder).item_url).read(manifests.MANIFEST_NAME) or b""
    _, costs = measured(
        "parse MANIFEST", lambda: manifests.parse_manifest(data, where="here")
    )
    return costs


def parse_part(folder: pathlib.Path, sizes: Sizes) -> dict[str, float]:
    """Reads all rows of a step, without looking whether they cover the leaves."""
    item = Folder(place(folder).item_url)
    found = steps.read_manifest(item)
    assert found is not None
    data = item.read(found.parts[0].name) or b""
    read, costs = measured(
        "parse part",
        lambda: list(
            parts.parse_part(
                data,
                attempt=bytes.fromhex(found.attempt),
                rows=sizes.rows,
                packs=found.packs,
                words=found.word_sizes(),
            )
        ),
    )
    assert len(read) == sizes.rows
    return costs


def open_step(folder: pathlib.Path, sizes: Sizes) -> dict[str, float]:
    """Opens a step as a restore does, and makes of it what the next save builds on."""
    step, costs = measured("open step", lambda: steps.open_step(place(folder)))
    _, more = measured("base of step", step.as_base)
    return costs | more


def plan_prune(folder: pathlib.Path, sizes: Sizes) -> dict[str, float]:
    """Finds out that nothing of a root of STEPS steps is dead."""
    store = DeltaStore.open(Folder(str(folder)))
    assert store is not None
    planned, costs = measured("plan prune", lambda: prune.plan(store))
    assert not planned.dead
    return costs


MEASUREMENTS: dict[str, Callable[[pathlib.Path, Sizes], dict[str, float]]] = {
    "make": make,
    "open_step": open_step,
    "parse_manifest": parse_manifest,
    "plan_prune": plan_prune,
    "parse_part": parse_part,
}


# --- in the parent --------------------------------------------------------------------


def measure(sizes: Sizes, names: Sequence[str]) -> dict[str, float]:
    """Returns the costs of one point, each from a process of its own."""
    costs: dict[str, float] = {"rows": sizes.rows, "leaves": sizes.leaves}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            done = subprocess.run(
                [
                    *(sys.executable, __file__, "--measure", name),
                    *("--folder", folder, "--leaves", str(sizes.leaves)),
                    *("--rows", str(sizes.rows_per_leaf)),
                ],
                check=True,
                stdout=subprocess.PIPE,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            costs |= json.loads(done.stdout)
    return costs


def costs_table(title: str, unit: str, points: Sequence[dict[str, float]]) -> Table:
    """Returns seconds and bytes, in all and by row or by leaf."""
    table = Table(title=title)
    for column in ("what", unit):
        table.add_column(column, justify="left" if column == "what" else "right")
    for column in ("s", f"us / {unit}", "MB of memory", f"bytes / {unit}"):
        table.add_column(column, justify="right")
    names = [key.removesuffix(": s") for key in points[-1] if key.endswith(": s")]
    for name in names:
        for point in points:
            seconds, memory = point[f"{name}: s"], point[f"{name}: bytes"]
            count = point[unit]
            table.add_row(
                name,
                f"{int(count):,}",
                f"{seconds:.3f}",
                f"{1e6 * seconds / count:.2f}",
                f"{memory / 1e6:,.1f}",
                f"{memory / count:,.0f}",
            )
        table.add_section()
    return table


def files_table(points: Sequence[dict[str, float]]) -> Table:
    """Returns the sizes of the two files."""
    table = Table(title="Bytes on disk")
    for column in (
        "rows",
        "leaves",
        "packs",
        "part, MB",
        "bytes / row",
        "MANIFEST, kB",
    ):
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            *(f"{int(point[name]):,}" for name in ("rows", "leaves", "packs")),
            f"{point['part'] / 1e6:.2f}",
            f"{point['part'] / point['rows']:.1f}",
            f"{point['MANIFEST'] / 1e3:,.1f}",
        )
    return table


def plot(by_rows: Sequence[dict[str, float]], path: pathlib.Path) -> None:
    """Draws seconds and memory over rows, both axes logarithmic."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, unit in zip(figure.subplots(1, 2), ("s", "bytes"), strict=True):
        names = [key for key in by_rows[-1] if key.endswith(f": {unit}")]
        for name in names:
            # What fitted into memory that was free already is no point of a line.
            values = [point[name] or float("nan") for point in by_rows]
            counts = [point["rows"] for point in by_rows]
            axes.loglog(counts, values, "o-", label=name.partition(":")[0])
        axes.loglog(counts, [values[-1] * c / counts[-1] for c in counts], "k:")
        axes.set_xlabel("rows of the step (dotted: proportional)")
        axes.set_ylabel("seconds" if unit == "s" else "peak of memory, bytes")
        axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="*", type=int, default=ROW_COUNTS)
    parser.add_argument("--leaves", nargs="*", type=int, default=LEAF_COUNTS)
    parser.add_argument("--json", type=pathlib.Path, help="where to write all figures")
    parser.add_argument("--plot", type=pathlib.Path, help="where to write a PNG")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measures and prints, or does one measurement for the process that asked."""
    options = parse_arguments()
    if options.measure:
        sizes = Sizes(leaves=options.leaves[0], rows_per_leaf=options.rows[0])
        costs = MEASUREMENTS[options.measure](options.folder, sizes)
        sys.stdout.write(json.dumps(costs))
        return
    console, progress = Console(), Console(stderr=True)
    by_rows, by_leaves = [], []
    points = [
        (count // ROWS_PER_LEAF, ROWS_PER_LEAF, by_rows) for count in options.rows
    ]
    points += [(count, SHARDS, by_leaves) for count in options.leaves]
    for leaf_count, rows_per_leaf, found in points:
        sizes = Sizes(leaves=leaf_count, rows_per_leaf=rows_per_leaf)
        with progress.status(f"{sizes.rows:,} rows, {sizes.leaves:,} leaves"):
            found.append(measure(sizes, list(MEASUREMENTS)))
        if options.json:
            document = {"rows": by_rows, "leaves": by_leaves}
            options.json.write_text(json.dumps(document, indent=1))
    if by_rows:
        console.print(files_table(by_rows), costs_table("By rows", "rows", by_rows))
    if by_leaves:
        console.print(costs_table("By leaves", "leaves", by_leaves))
    if options.plot and by_rows:
        plot(by_rows, options.plot)


if __name__ == "__main__":
    main()
