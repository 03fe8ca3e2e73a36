"""Peak of memory of a loop that trains and saves, in a process of its own.

The loop gives its buffers away at each step, as training does, and goes to and fro
between two states of a real run: what changes is theirs, and nothing but the loop and
the save needs memory. A loop that saves nothing is measured beside the handlers.

Linux alone: the peak is read from and reset in /proc.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from contenders import HANDLERS, Manager
from counting import State, bits
from sidebyside import changed_share

NOTHING = "no saves"
LOOPS = (NOTHING, *HANDLERS)
WARM_UP_SAVES = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Memory of one loop, in bytes of resident set.

    Attributes:
        before_bytes: Of the process with one state, when the measured part began.
        peak_bytes: The most during the measured part.
    """

    before_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryResult:
    """The peaks of one workload.

    Attributes:
        where: Workload and scale.
        changed: Share of the elements that a step changes.
        peaks: By name of the loop.
    """

    where: str
    changed: float
    peaks: Mapping[str, Peak]


def measure_memory(
    where: str, states: Sequence[State], folder: pathlib.Path, saves: int
) -> MemoryResult:
    """Runs the loop without saves and with each handler.

    Args:
        where: Workload and scale, for the result.
        states: Two states of a run.
        folder: Where the states and then the roots are put; all is removed again.
        saves: Saves in the measured part.

    Raises:
        subprocess.CalledProcessError: A loop failed; it said why on standard error.
    """
    given = folder / "states"
    given.mkdir()
    _write(states, given)
    peaks = {}
    for loop in LOOPS:
        done = subprocess.run(
            [
                *(sys.executable, __file__, "--loop", loop, "--saves", str(saves)),
                *("--states", given, "--root", folder / "root"),
            ],
            check=True,
            stdout=subprocess.PIPE,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        peaks[loop] = Peak(**json.loads(done.stdout))
        shutil.rmtree(folder / "root", ignore_errors=True)
    shutil.rmtree(given)
    changed = changed_share(states)
    return MemoryResult(where=where, changed=changed, peaks=peaks)


def _write(states: Sequence[State], folder: pathlib.Path) -> None:
    """Writes each leaf of the first state, and what turns it into the second's."""
    first, second = map(jtu.tree_leaves, states)
    for index, (old, new) in enumerate(zip(first, second, strict=True)):
        np.save(folder / f"{index:05d}-first", bits(old))
        np.save(folder / f"{index:05d}-change", bits(old) ^ bits(new))
    kinds = [(str(leaf.dtype), leaf.shape) for leaf in first]
    (folder / "kinds.json").write_text(json.dumps(kinds))


# ------------------------------------------------------------------------- in the child


class Loop:
    """A state, and a step that turns it into the next one in its own buffers.

    Attributes:
        state: The leaves by name.
    """

    def __init__(self, given: pathlib.Path) -> None:
        """Reads the first state leaf by leaf."""
        self._given = given
        kinds = json.loads((given / "kinds.json").read_text())
        self._kinds = {f"{i:05d}": kind for i, kind in enumerate(kinds)}
        self.state: dict[str, jax.Array] = {}
        for name, (dtype, shape) in self._kinds.items():
            row = np.load(given / f"{name}-first.npy").view(jnp.dtype(dtype))
            self.state[name] = jnp.array(row.reshape(shape), copy=True)

    def step(self) -> None:
        """The next state; only the change of one leaf is in memory beside it."""
        for name, (dtype, shape) in self._kinds.items():
            change = np.load(self._given / f"{name}-change.npy").reshape(shape)
            old = self.state.pop(name)
            self.state[name] = _changed(old, change, jnp.dtype(dtype))
            self.state[name].block_until_ready()


def _change(old: jax.Array, change: jax.Array, dtype: jnp.dtype) -> jax.Array:
    words = jax.lax.bitcast_convert_type(old, change.dtype)
    return jax.lax.bitcast_convert_type(words ^ change, dtype)


_changed = jax.jit(_change, static_argnums=2, donate_argnums=0)


def own_memory() -> Mapping[str, int]:
    """Returns `VmRSS` and `VmHWM` of this process, in bytes."""
    text = pathlib.Path("/proc/self/status").read_text()
    fields = (line.split() for line in text.splitlines())
    return {
        field[0][:-1]: int(field[1]) << 10
        for field in fields
        if field[0] in ("VmRSS:", "VmHWM:")
    }


def reset_peak() -> None:
    """Lets the peak of this process start from what it has now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def run_loop(loop: str, given: pathlib.Path, root: pathlib.Path, saves: int) -> Peak:
    """Trains and saves, and measures after `WARM_UP_SAVES` saves."""
    training = Loop(given)
    training.step()
    before = own_memory()["VmRSS"]
    with contextlib.ExitStack() as stack:
        manager = None
        if loop != NOTHING:
            manager = Manager(loop, root, max_to_keep=3)
            stack.callback(manager.close)
        for step in range(WARM_UP_SAVES + saves):
            if step == WARM_UP_SAVES:
                reset_peak()
            if manager:
                manager.start(step, training.state)
            training.step()
        if manager:
            manager.wait()
        return Peak(before_bytes=before, peak_bytes=own_memory()["VmHWM"])


def main() -> None:
    """Runs one loop for the process that asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loop", choices=LOOPS, required=True)
    parser.add_argument("--states", type=pathlib.Path, required=True)
    parser.add_argument("--root", type=pathlib.Path, required=True)
    parser.add_argument("--saves", type=int, required=True)
    options = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)
    peak = run_loop(options.loop, options.states, options.root, options.saves)
    sys.stdout.write(json.dumps(dataclasses.asdict(peak)))


if __name__ == "__main__":
    main()
