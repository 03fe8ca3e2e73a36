"""What a save keeps training waiting for where arrays live on GPUs or TPUs.

    python benchmarks/device.py --megabytes 4096 --saves 7 --json device.json

First the programs are checked on the devices that are here, bit for bit against numpy,
and timed. Then states of one size, of which a part changes from save to save, are saved
in turn by orbax_delta comparing on the devices, by orbax_delta comparing on the host,
and by Orbax's own handler; after each save the state is donated to the next step. The
table has medians: seconds that `save()` kept the caller, seconds until all was on disk,
bytes that were copied from the devices. The last step of each run is restored and
compared bit for bit; a difference ends the run with an error.

On CPUs it runs as well, but shows nothing: there a copy costs less than a digest.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import orbax_delta
from orbax_delta import device, digests, dtypes

LEAVES = 16
COLUMNS = 1024
HANDLERS = ("orbax_delta, device", "orbax_delta, host", "orbax")
FIRST_TIMED = 2
"""The first two saves copy everything and have the programs compiled."""

CHECKED_DTYPES = ("float32", "bfloat16", "float16", "int8", "bool", "float8_e4m3fn")
CHECKED_SHAPES = ((300, 7), (512, 1024), (3, 40, 128), (64, 128256), (262272,))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Medians of one handler on one workload.

    Attributes:
        workload: Name of the workload.
        handler: One of `HANDLERS`.
        state_bytes: Bytes of the state.
        blocking_seconds: What `save()` kept the caller.
        total_seconds: Until the step was on disk.
        copied_bytes: Brought to the host; None: not counted.
    """

    workload: str
    handler: str
    state_bytes: int
    blocking_seconds: float
    total_seconds: float
    copied_bytes: int | None


# ---------------------------------------------------------------------------- checks


def random_bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns any bits, of NaNs too."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    top = 2 if dtype == "bool" else 256
    raw = np.random.default_rng(0).integers(0, top, (*shape, kind.itemsize), np.uint8)
    return raw.view(kind)[..., 0]


def bundle(array: np.ndarray) -> tuple[device.Shards, jax.Array]:
    """Returns the same array on each local device, as the programs take it."""
    places = tuple(jax.local_devices())
    shards = device.Shards(devices=places, shape=array.shape, dtype=array.dtype)
    return shards, shards.bundled([jax.device_put(array, one) for one in places])


def check(dtype: str, shape: tuple[int, ...]) -> None:
    """Raises AssertionError unless digests and copies are right, bit for bit."""
    array = random_bits(dtype, shape)
    shards, on_devices = bundle(array)
    count = len(shards.devices)
    expected = digests.block_digests(array, dtypes.element_type(array.dtype)).T
    detect = device.Detect(shards=shards)
    size = tuple(max(1, side // 2) for side in shape)
    gather = device.Gather(shards=shards, size=size, count=2)
    device.compile_all([detect, gather])
    kept = np.repeat(expected[None], count, axis=0)
    kept[-1, 0, 0] ^= 1
    found, changed = device.run(detect, on_devices, device.put(shards, kept))
    for digest in jax.device_get(found):
        np.testing.assert_array_equal(digest, expected, f"{dtype}{list(shape)}")
    assert np.argwhere(jax.device_get(changed)).tolist() == [[count - 1, 0]]
    starts = np.zeros((count, 2, len(shape)), np.int32)
    starts[:, 1] = np.subtract(shape, size)
    boxes = jax.device_get(device.run(gather, on_devices, device.put(shards, starts)))
    for number, box in enumerate(boxes):
        first = starts[number // 2, number % 2]
        place = tuple(slice(a, a + side) for a, side in zip(first, size, strict=True))
        assert box.tobytes() == array[place].tobytes(), f"{dtype}{list(shape)}"


def digest_speed(megabytes: int) -> float:
    """Returns the bytes per second of digests of fp32 on each device, in GB/s."""
    rows = max(1, megabytes * 1_000_000 // LEAVES // (4 * COLUMNS))
    shards, on_devices = bundle(np.ones((rows, COLUMNS), np.float32))
    program = device.Detect(shards=shards)
    device.compile_all([program])
    blocks = (len(shards.devices), digests.LANES, shards.blocks)
    kept = device.put(shards, np.zeros(blocks, np.uint32))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(device.run(program, on_devices, kept))
        seconds.append(time.perf_counter() - start)
    return rows * COLUMNS * 4 / statistics.median(seconds) / 1e9


# ---------------------------------------------------------------------------- states


def first_state(megabytes: int) -> dict[str, jax.Array]:
    """Returns leaves of fp32, spread over all devices."""
    count = jax.device_count()
    rows = max(1, megabytes * 1_000_000 // LEAVES // (4 * COLUMNS * count)) * count
    mesh = Mesh(np.array(jax.devices()), ("x",))
    layout = NamedSharding(mesh, PartitionSpec("x"))

    @functools.partial(jax.jit, out_shardings=layout)
    def make(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (rows, COLUMNS))

    keys = jax.random.split(jax.random.key(0), LEAVES)
    return {f"w{number}": make(key) for number, key in enumerate(keys)}


def _some_leaves(state: Any, step: jax.Array) -> Any:
    changed = {f"w{number}": state[f"w{number}"] * 1.001 for number in (3, 11)}
    return {**state, **changed}


def _some_rows(state: Any, step: jax.Array) -> Any:
    def update(leaf: jax.Array) -> jax.Array:
        rows = jnp.arange(leaf.shape[0])
        return jnp.where((rows % 4096 == step)[:, None], leaf + 1, leaf)

    return jtu.tree_map(update, state)


def _everything(state: Any, step: jax.Array) -> Any:
    return jtu.tree_map(lambda leaf: leaf * 1.001, state)


WORKLOADS: dict[str, Callable[[Any, jax.Array], Any]] = {
    "2 of 16 leaves": _some_leaves,
    "1 row in 4096": _some_rows,
    "everything": _everything,
}


# ---------------------------------------------------------------------------- saving


def manager_of(root: pathlib.Path, handler: str) -> ocp.CheckpointManager:
    """Returns a manager that saves with one of `HANDLERS`."""
    registry = None
    if handler != "orbax":
        compare_on = handler.rpartition(" ")[2]
        registry = orbax_delta.handler_registry(compare_on=compare_on)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    return ocp.CheckpointManager(root, options=options, handler_registry=registry)


def runs(megabytes: int, workload: str, saves: int) -> Iterator[Result]:
    """Saves a run with each of `HANDLERS` in turn; yields what each took."""
    advance = jax.jit(WORKLOADS[workload], donate_argnums=0)
    state = first_state(megabytes)
    size = sum(leaf.nbytes for leaf in state.values())
    times: dict[str, list[tuple[float, float, int | None]]] = {h: [] for h in HANDLERS}
    with tempfile.TemporaryDirectory() as folder:
        roots = {name: pathlib.Path(folder) / str(i) for i, name in enumerate(HANDLERS)}
        managers = {name: manager_of(roots[name], name) for name in HANDLERS}
        for step in range(saves + FIRST_TIMED):
            for name, manager in managers.items():
                jax.block_until_ready(state)
                start = time.perf_counter()
                manager.save(step, args=ocp.args.StandardSave(state))
                blocked = time.perf_counter() - start
                manager.wait_until_finished()
                total = time.perf_counter() - start
                copied = None
                if name != "orbax":
                    report = orbax_delta.save_report(roots[name] / str(step))
                    copied = report.copied_bytes
                if step >= FIRST_TIMED:
                    times[name].append((blocked, total, copied))
            saved = jax.device_get(state)
            state = advance(state, jnp.int32(step))
        for manager in managers.values():
            restored = manager.restore(step, args=ocp.args.StandardRestore(state))
            for key, leaf in restored.items():
                assert np.asarray(leaf).tobytes() == saved[key].tobytes(), key
            manager.close()
    for name, rows in times.items():
        copies = [copied for _, _, copied in rows if copied is not None]
        yield Result(
            workload=workload,
            handler=name,
            state_bytes=size,
            blocking_seconds=statistics.median(row[0] for row in rows),
            total_seconds=statistics.median(row[1] for row in rows),
            copied_bytes=int(statistics.median(copies)) if copies else None,
        )


def table_of(results: list[Result]) -> Table:
    """Returns the results for people."""
    table = Table(title="Medians of a save")
    for column in ("workload", "handler"):
        table.add_column(column)
    for column in ("state, MB", "copied, MB", "blocking, ms", "total, ms"):
        table.add_column(column, justify="right")
    for one in results:
        copied = "-" if one.copied_bytes is None else f"{one.copied_bytes / 1e6:,.1f}"
        table.add_row(
            one.workload,
            one.handler,
            f"{one.state_bytes / 1e6:,.0f}",
            copied,
            f"{1e3 * one.blocking_seconds:,.1f}",
            f"{1e3 * one.total_seconds:,.0f}",
        )
    return table


def main() -> None:
    """Checks, times, saves, prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the state")
    parser.add_argument("--saves", type=int, default=5, help="timed saves of each run")
    parser.add_argument("--json", type=pathlib.Path, help="where results go as JSON")
    arguments = parser.parse_args()
    console = Console(width=110)
    for dtype in CHECKED_DTYPES:
        for shape in CHECKED_SHAPES:
            check(dtype, shape)
    checked = len(CHECKED_DTYPES) * len(CHECKED_SHAPES)
    kind = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    speed = digest_speed(arguments.megabytes)
    console.print(f"{kind}: {checked} programs right; digests {speed:.1f} GB/s each")
    results = [
        result
        for workload in WORKLOADS
        for result in runs(arguments.megabytes, workload, arguments.saves)
    ]
    console.print(table_of(results))
    if arguments.json:
        document = {
            "devices": kind,
            "digest_gigabytes_per_second": speed,
            "results": [dataclasses.asdict(result) for result in results],
        }
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
