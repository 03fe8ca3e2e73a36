"""What the demo's processes do: train with saves, and measure both handlers.

Run as `python -m orbax_delta.demo.training ROLE ...` by `runs`, one process
for each training run, so that one can be killed and its successor starts from nothing
but the files on disk. Every process appends JSON lines to a log, which is all that the
parent reads while it runs. Does not belong here: judging or showing what came out.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp

import orbax_delta
from orbax_delta.demo.model import (
    TrainState,
    initial_state,
    read_text,
    train_step,
)
from orbax_delta.demo.runs import KEPT_STEPS, UNINTERRUPTED, DemoConfig, file_sizes

Log = Callable[[dict[str, Any]], None]


def abstract_state(config: DemoConfig) -> TrainState:
    """Describe the state without computing it: shapes, dtypes and the device."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(functools.partial(initial_state, config))
    described: TrainState = jax.tree.map(
        lambda leaf: leaf.update(sharding=device), shapes
    )
    return described


def leaf_bits(state: TrainState) -> dict[str, np.ndarray]:
    """Give the bytes of every leaf.

    Args:
        state: Any state whose leaves are arrays or typed random keys.

    Returns:
        By leaf path, dtype and shape: uint8[bytes of the leaf].
    """
    bits = {}
    for path, leaf in jtu.tree_leaves_with_path(state):
        name = f"{jtu.keystr(path)} {leaf.dtype}{list(leaf.shape)}"
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        values = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        bits[name] = np.frombuffer(values.tobytes(), np.uint8)
    return bits


def same_bits(left: TrainState, right: TrainState) -> bool:
    """Whether two states agree in every leaf's path, dtype, shape and bytes."""
    left_bits, right_bits = leaf_bits(left), leaf_bits(right)
    return left_bits.keys() == right_bits.keys() and all(
        np.array_equal(left_bits[name], right_bits[name]) for name in left_bits
    )


def open_manager(root: Path, kind: str, keep: int | None) -> ocp.CheckpointManager:
    """Open Orbax's CheckpointManager, as in any training script.

    Args:
        root: Folder of the checkpoints.
        kind: "orbax_delta" for this package's handler, "orbax" for Orbax's Standard.
        keep: How many steps Orbax keeps; None keeps all.
    """
    registry = orbax_delta.handler_registry() if kind == "orbax_delta" else None
    options = ocp.CheckpointManagerOptions(max_to_keep=keep)
    return ocp.CheckpointManager(root, options=options, handler_registry=registry)


def train(config: DemoConfig, folder: Path, name: str, log: Log) -> None:
    """Train from the newest whole step, or from nothing, to the last step.

    Args:
        config: Sizes, steps and seed.
        folder: The demo's folder; the run saves into `folder / name` and leaves the
            bytes of its last state in `folder / (name + ".npz")`.
        name: The run's name.
        log: Receives one "start" line, then one "loss" line a step.
    """
    text = read_text(config.batch)
    with open_manager(folder / name, "orbax_delta", KEPT_STEPS) as manager:
        newest = manager.latest_step()
        if newest is None:
            # A restored state is bound to its device. With this one bound as well both
            # are trained by the same compiled program.
            fresh = jax.jit(initial_state, static_argnums=0)(config)
            state = jax.device_put(fresh, jax.devices()[0])
        else:
            target = ocp.args.StandardRestore(abstract_state(config))
            state = manager.restore(newest, args=target)
        start_step = int(state.step)
        log({"kind": "start", "found": manager.all_steps(), "step": start_step})
        for step in range(start_step + 1, config.steps + 1):
            state, loss = train_step(config, state, text)
            loss_bits = int(np.asarray(loss).view(np.uint32))
            log({"kind": "loss", "step": step, "bits": loss_bits, "loss": float(loss)})
            if step % config.save_every == 0 or step == config.steps:
                manager.save(step, args=ocp.args.StandardSave(state))
    bits: dict[str, Any] = leaf_bits(state)
    np.savez(folder / f"{name}.npz", **bits)


def measure(config: DemoConfig, folder: Path, name: str, log: Log) -> None:
    """Save and restore the same states through both handlers, taking turns.

    Training goes on from the last state of the uninterrupted run. Nothing is deleted
    between the saves, so that growth of the files is what a save wrote.

    Args:
        config: Sizes, steps and seed.
        folder: The demo's folder; the checkpoints go below `folder / name`.
        name: The measurement's name.
        log: Receives a "start" line, a "save" or "restore" line for each, and a
            last "report" line.
    """
    text = read_text(config.batch)
    target = ocp.args.StandardRestore(abstract_state(config))
    with open_manager(folder / UNINTERRUPTED, "orbax_delta", KEPT_STEPS) as manager:
        state = manager.restore(manager.latest_step(), args=target)
    with np.load(folder / f"{UNINTERRUPTED}.npz") as expected:
        bits = leaf_bits(state)
        identical = set(expected) == set(bits) and all(
            np.array_equal(expected[leaf], bits[leaf]) for leaf in bits
        )
    log({"kind": "start", "identical": identical, **state_sizes(state)})
    roots = {kind: folder / name / kind for kind in ("orbax", "orbax_delta")}
    managers = {kind: open_manager(root, kind, None) for kind, root in roots.items()}
    for turn in range(config.measured_saves):
        for _ in range(config.save_every):
            state, _ = train_step(config, state, text)
        for kind in alternate(roots, turn):
            log(measure_save(managers[kind], roots[kind], kind, state))
    for turn in range(config.measured_restores):
        for kind in alternate(roots, turn):
            start = time.perf_counter()
            restored = managers[kind].restore(int(state.step), args=target)
            wait_until_ready(restored)
            seconds = time.perf_counter() - start
            identical = same_bits(restored, state)
            line = {"seconds": seconds, "identical": identical}
            log({"kind": "restore", "handler": kind, **line})
    for manager in managers.values():
        manager.close()
    report = orbax_delta.save_report(roots["orbax_delta"] / str(int(state.step)))
    log({"kind": "report", "changed_share": report.elements_changed / report.elements})


def wait_until_ready(state: TrainState) -> None:
    """Wait until every leaf has been computed or read."""
    for leaf in jax.tree.leaves(state):
        leaf.block_until_ready()


def alternate(kinds: dict[str, Path], turn: int) -> list[str]:
    """Order the handlers so that each goes first every other turn."""
    return list(kinds) if turn % 2 else list(reversed(kinds))


def measure_save(
    manager: ocp.CheckpointManager, root: Path, kind: str, state: TrainState
) -> dict[str, Any]:
    """Save one state and give the log line of what it cost.

    Args:
        manager: Where to save.
        root: The manager's folder, whose growth is measured.
        kind: The handler's name, for the line.
        state: What to save.
    """
    wait_until_ready(state)
    step = int(state.step)
    before_bytes = sum(file_sizes(root).values())
    start = time.perf_counter()
    manager.save(step, args=ocp.args.StandardSave(state))
    blocked = time.perf_counter()
    manager.wait_until_finished()
    end = time.perf_counter()
    return {
        "kind": "save",
        "handler": kind,
        "step": step,
        "written_bytes": sum(file_sizes(root).values()) - before_bytes,
        "blocking_seconds": blocked - start,
        "total_seconds": end - start,
    }


def state_sizes(state: TrainState) -> dict[str, int]:
    """Count what a state holds: leaves, parameters and raw bytes."""
    bits = leaf_bits(state)
    return {
        "leaves": len(bits),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.master)),
        "state_bytes": sum(leaf.nbytes for leaf in bits.values()),
    }


def main() -> None:
    """Do what the parent process asks for, and log it."""
    parser = argparse.ArgumentParser(prog="orbax_delta.demo.training")
    parser.add_argument("role", choices=("train", "measure"))
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("config", help="DemoConfig as JSON")
    arguments = parser.parse_args()
    config = DemoConfig(**json.loads(arguments.config))
    role = {"train": train, "measure": measure}[arguments.role]
    with open(arguments.folder / f"{arguments.name}.jsonl", "a") as lines:

        def log(line: dict[str, Any]) -> None:
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        role(config, arguments.folder, arguments.name, log)


if __name__ == "__main__":
    main()
