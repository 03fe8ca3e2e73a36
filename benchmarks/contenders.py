"""The three handlers that are compared under CheckpointManager, and what each costs.

Seconds are those of the calls that a training loop makes. Bytes are counted on disk,
and every restored leaf is compared bit for bit.
"""

import dataclasses
import gc
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
import orbax.checkpoint as ocp
import pagecache
from counting import State, added_bytes, files_on_disk, require_equal_bits

import orbax_delta

DELTA, ORBAX, RAW = "orbax_delta", "Orbax", "Orbax uncompressed"
HANDLERS = (DELTA, ORBAX, RAW)
SEALED = "orbax_delta, encrypted"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """One save.

    Attributes:
        added_bytes: Bytes of files that are new in the root or were written anew.
        blocking_seconds: Until `save()` came back.
        total_seconds: Until the step was there, of which `blocking_seconds` are part.
    """

    added_bytes: int
    blocking_seconds: float
    total_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One repetition: a few saves into a new root, then restores of the last one.

    Attributes:
        saves: All saves in order, the first one of the root included.
        restore_seconds: With the files in the page cache, in a manager newly made.
        cold_seconds: The same after the files were dropped from it; None where that is
            not possible, as in a file system without a disk.
        warm_seconds: By a follower that has the state before in memory; None for
            handlers that cannot use it.
    """

    saves: tuple[Saving, ...]
    restore_seconds: float
    cold_seconds: float | None
    warm_seconds: float | None


class Manager:
    """A folder of checkpoints under a CheckpointManager with one of the handlers."""

    def __init__(
        self, handler: str, path: pathlib.Path, *, max_to_keep: int | None = None
    ):
        """Opens the manager; a folder that is there already is read on."""
        self.path = path
        self._uncompressed = handler == RAW
        self._manager = ocp.CheckpointManager(
            path,
            options=ocp.CheckpointManagerOptions(max_to_keep=max_to_keep),
            handler_registry=_registry(handler),
        )

    def start(self, step: int, state: State) -> None:
        """Saves in the background, as a training loop does."""
        if self._uncompressed:
            args = ocp.args.PyTreeSave(state)
        else:
            args = ocp.args.StandardSave(state)
        self._manager.save(step, args=args)

    def wait(self) -> None:
        """Waits for the save under way."""
        self._manager.wait_until_finished()

    def save(self, step: int, state: State) -> Saving:
        """Saves and waits; says what that cost."""
        before = files_on_disk(self.path)
        begin = time.perf_counter()
        self.start(step, state)
        blocking = time.perf_counter() - begin
        self.wait()
        total = time.perf_counter() - begin
        return Saving(
            added_bytes=added_bytes(before, files_on_disk(self.path)),
            blocking_seconds=blocking,
            total_seconds=total,
        )

    def restore(self, step: int, like: State) -> tuple[State, float]:
        """Restores onto the shapes and shardings of a state; returns the seconds."""
        target = jtu.tree_map(ocp.utils.to_shape_dtype_struct, like)
        if self._uncompressed:
            args = ocp.args.PyTreeRestore(
                target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            )
        else:
            args = ocp.args.StandardRestore(target)
        return self._timed(step, args)

    def follow(self, step: int, live: State) -> tuple[State, float]:
        """Restores a step from what it has in common with a live tree."""
        target = jtu.tree_map(ocp.utils.to_shape_dtype_struct, live)
        return self._timed(step, orbax_delta.DeltaRestore(target, base=live))

    def _timed(self, step: int, args: Any) -> tuple[State, float]:
        begin = time.perf_counter()
        # Leaves may still be on their way when the call comes back.
        restored = jtu.tree_map(_ready, self._manager.restore(step, args=args))
        return restored, time.perf_counter() - begin

    def close(self) -> None:
        """Ends the manager; the folder stays."""
        self._manager.close()


def _ready(leaf: Any) -> Any:
    return leaf.block_until_ready() if hasattr(leaf, "block_until_ready") else leaf


def _secret(_: str) -> bytes:
    return bytes(range(32))


def _registry(handler: str) -> Any:
    if handler == DELTA:
        return orbax_delta.handler_registry()
    if handler == SEALED:
        key = orbax_delta.Encryption(key=_secret, key_id="of the benchmark")
        return orbax_delta.handler_registry(encryption=key)
    if handler == ORBAX:
        return None
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    raw = ocp.PyTreeCheckpointHandler(use_compression=False)
    registry.add("default", ocp.args.PyTreeSave, raw)
    registry.add("default", ocp.args.PyTreeRestore, raw)
    return registry


# --------------------------------------------------------------------------- measuring


def sample(handler: str, states: Sequence[State], folder: pathlib.Path) -> Sample:
    """Saves successive states into a new root and restores the last one.

    Args:
        handler: One of `HANDLERS`.
        states: States in order; the first save of a root is one of its own kind.
        folder: Where the root is made; it is removed again.

    Raises:
        AssertionError: A restored state differs from the saved one.
    """
    root = folder / handler.replace(" ", "_")
    manager = Manager(handler, root)
    saves = tuple(manager.save(step, state) for step, state in enumerate(states))
    manager.close()
    last = len(states) - 1
    restore = _restore_seconds(handler, root, last, states[last])
    cold = None
    if not pagecache.in_memory(folder) and pagecache.drop(root):
        cold = _restore_seconds(handler, root, last, states[last])
    warm = None
    if handler in (DELTA, SEALED) and last:
        warm = _follow_seconds(handler, root, last, states)
    shutil.rmtree(root)
    gc.collect()
    return Sample(
        saves=saves, restore_seconds=restore, cold_seconds=cold, warm_seconds=warm
    )


def _restore_seconds(
    handler: str, root: pathlib.Path, step: int, state: State
) -> float:
    manager = Manager(handler, root)
    restored, seconds = manager.restore(step, state)
    require_equal_bits(restored, state, f"{handler}, step {step}")
    manager.close()
    return seconds


def _follow_seconds(
    handler: str, root: pathlib.Path, step: int, states: Sequence[State]
) -> float:
    """A follower has restored the step before, and now takes this one."""
    manager = Manager(handler, root)
    live, _ = manager.restore(step - 1, states[step - 1])
    restored, seconds = manager.follow(step, live)
    require_equal_bits(restored, states[step], f"follower, step {step}")
    manager.close()
    return seconds


def alternate(
    states: Sequence[State],
    folder: pathlib.Path,
    repetitions: int,
    handlers: Sequence[str] = HANDLERS,
) -> Iterator[tuple[str, Sample]]:
    """Measures the handlers in turn, another one first each time.

    One round that is thrown away comes first where there are several, because the first
    use of each handler loads libraries and compiles.

    Yields:
        Handler and sample, as they become known.
    """
    if repetitions > 1:
        for handler in handlers:
            sample(handler, [_small(state) for state in states[:2]], folder)
    for repetition in range(repetitions):
        first = repetition % len(handlers)
        for handler in (*handlers[first:], *handlers[:first]):
            yield handler, sample(handler, states, folder)


def _small(state: State) -> Mapping[str, Any]:
    leaves = jtu.tree_leaves(state)
    smallest = min(leaves, key=lambda leaf: leaf.nbytes)
    return {"leaf": smallest}
