"""One point of growth in a process of its own: a state is made, changed, saved, read.

States are random numbers: it is their size and count that is looked at, not how well
they are coded. Seconds of the processor stand beside those of the clock, because other
programs do not lengthen them. Linux alone: peaks of memory are read from /proc.
"""

import argparse
import dataclasses
import gc
import json
import logging
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from contenders import DELTA, Manager
from counting import State, added_bytes, files_on_disk
from memory import own_memory, reset_peak

import orbax_delta

FEW = 0.01
"""Share of the elements that the smaller of two changes touches."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One save or restore.

    Attributes:
        what: "first save", "few changed", "all changed" or "restore".
        wall_seconds: By the clock.
        cpu_seconds: Of all threads of the process.
        blocking_seconds: Until `save()` came back; of a restore all of it.
        disk_bytes: Bytes that a save added; of a restore nothing.
        memory_bytes: Peak of resident memory above what the process had with the state
            alone, or before a restore.
        chunks: Chunks of the state.
        records_mean: Mean length of a chunk's list of records.
    """

    what: str
    wall_seconds: float
    cpu_seconds: float
    blocking_seconds: float
    disk_bytes: int
    memory_bytes: int
    chunks: int
    records_mean: float


def make_state(leaves: int, state_bytes: int) -> State:
    """Returns leaves of fp32 noise, all of one size."""
    count = max(1, state_bytes // 4 // leaves)
    rng = np.random.default_rng(0)
    return {
        f"{index:05d}": jnp.asarray(rng.standard_normal(count, np.float32))
        for index in range(leaves)
    }


def change(state: State, share: float, seed: int) -> None:
    """Changes about a share of the elements of each leaf, one leaf after the other."""
    rng = np.random.default_rng(seed)
    for name in list(state):
        leaf = np.array(state.pop(name), copy=True)
        if share < 1:
            leaf[rng.integers(0, leaf.size, max(1, int(share * leaf.size)))] *= 1.001
        else:
            leaf *= np.float32(1.001)
        state[name] = jnp.asarray(leaf)


def digests(state: State) -> dict[str, str]:
    """Returns a digest of the bits of each leaf."""
    return {
        name: xxhash.xxh3_128_hexdigest(np.asarray(leaf).view(np.uint8))
        for name, leaf in state.items()
    }


class _Watch:
    """What passes while something is done."""

    def __init__(self, idle_bytes: int) -> None:
        self._idle = idle_bytes

    def __enter__(self) -> "_Watch":
        gc.collect()
        reset_peak()
        self._begun = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._begun
        self.wall_seconds = time.perf_counter() - wall
        self.cpu_seconds = time.process_time() - cpu
        self.memory_bytes = max(0, own_memory()["VmHWM"] - self._idle)


def _costs(what: str, watch: _Watch, **more: Any) -> Cost:
    return Cost(
        what=what,
        wall_seconds=watch.wall_seconds,
        cpu_seconds=watch.cpu_seconds,
        memory_bytes=watch.memory_bytes,
        **more,
    )


def _save(manager: Manager, step: int, state: State, what: str, idle: int) -> Cost:
    before = files_on_disk(manager.path)
    with _Watch(idle) as watch:
        begin = time.perf_counter()
        manager.start(step, state)
        blocking = time.perf_counter() - begin
        manager.wait()
    report = orbax_delta.save_report(manager.path / str(step))
    return _costs(
        what,
        watch,
        blocking_seconds=blocking,
        disk_bytes=added_bytes(before, files_on_disk(manager.path)),
        chunks=report.chunks,
        records_mean=report.records_per_chunk_mean,
    )


def save_sizes(folder: pathlib.Path, leaves: int, state_bytes: int) -> list[Cost]:
    """Saves a state, then with few and with all elements changed."""
    # What the first save of a process loads and compiles is no part of growth.
    trial = Manager(DELTA, folder / "trial")
    trial.save(0, {"leaf": jnp.ones(1000)})
    trial.close()
    state = make_state(leaves, state_bytes)
    idle = own_memory()["VmRSS"]
    manager = Manager(DELTA, folder / "root")
    costs = [_save(manager, 0, state, "first save", idle)]
    for step, (what, share) in enumerate([("few changed", FEW), ("all changed", 1)], 1):
        change(state, share, step)
        costs.append(_save(manager, step, state, what, idle))
    (folder / "digests.json").write_text(json.dumps(digests(state)))
    manager.close()
    return costs


def restore_sizes(folder: pathlib.Path, leaves: int, state_bytes: int) -> list[Cost]:
    """Restores what `save_sizes` left, after a small restore of the same kind.

    Raises:
        AssertionError: A leaf came back changed.
    """
    trial = Manager(DELTA, folder / "trial")
    trial.restore(0, {"leaf": jnp.ones(1000)})
    trial.close()
    manager = Manager(DELTA, folder / "root")
    leaf = jax.ShapeDtypeStruct(
        (max(1, state_bytes // 4 // leaves),),
        jnp.float32,
        sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    like = {f"{index:05d}": leaf for index in range(leaves)}
    with _Watch(own_memory()["VmRSS"]) as watch:
        restored, seconds = manager.restore(2, like)
    if digests(restored) != json.loads((folder / "digests.json").read_text()):
        raise AssertionError("restored leaves differ from the saved ones")
    report = orbax_delta.save_report(folder / "root" / "2")
    manager.close()
    return [
        _costs(
            "restore",
            watch,
            blocking_seconds=seconds,
            disk_bytes=0,
            chunks=report.chunks,
            records_mean=report.records_per_chunk_mean,
        )
    ]


def save_often(folder: pathlib.Path, saves: int, state_bytes: int) -> list[Cost]:
    """Saves a state again and again with few elements changed, `max_to_keep=3`.

    The bytes are those of the whole root after each save.
    """
    state = make_state(4, state_bytes)
    idle = own_memory()["VmRSS"]
    manager = Manager(DELTA, folder / "root", max_to_keep=3)
    costs = []
    for step in range(saves):
        cost = _save(manager, step, state, "save", idle)
        size = sum(size for _, _, size in files_on_disk(manager.path).values())
        costs.append(dataclasses.replace(cost, disk_bytes=size))
        change(state, FEW, step)
    manager.close()
    return costs


KINDS: dict[str, Callable[[pathlib.Path, int, int], list[Cost]]] = {
    "save": save_sizes,
    "restore": restore_sizes,
    "often": save_often,
}


def main() -> None:
    """Measures one point for the process that asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("count", type=int)
    parser.add_argument("state_bytes", type=int)
    options = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)
    measure = KINDS[options.kind]
    found = measure(options.folder, options.count, options.state_bytes)
    sys.stdout.write(json.dumps(list(map(dataclasses.asdict, found))))


if __name__ == "__main__":
    main()
