"""The README's loop in a process of its own, which can be told of a preemption.

`python recipe_runs.py ROOT SETTINGS` trains as the loop does and says every step on its
standard output. The bits of what it begins with and ends with go to npz files. Does not
belong here: judging them.
"""

import json
import os
import sys
from pathlib import Path

import children
import jax
import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp
import readme
from jax.sharding import Mesh, PartitionSpec

LOOP = readme.run(readme.recipes()[readme.LOOP])
"""What the README's loop defines."""


def bits(state):
    """Bits of every leaf as numpy arrays, by path."""

    def raw(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    leaves = jtu.tree_leaves_with_path(state)
    return {name_of(path): raw(leaf) for path, leaf in leaves}


def name_of(path):
    """Alike for a tree as it was and as it is restored without a target."""
    return jtu.keystr(path, simple=True, separator="/")


def undisturbed(last_step, target, start=None):
    """Bits after each step of a run that neither saves nor restores.

    Args:
        last_step: Last step.
        target: Shardings of the state.
        start: Bits to begin with, of another mesh; None: the loop's fresh state.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    if start is None:
        state = jax.jit(LOOP["fresh_state"], out_shardings=shardings)()
    else:

        def leaf(path, like, sharding):
            array = start[name_of(path)]
            is_key = jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key)
            value = jax.random.wrap_key_data(array) if is_key else array
            return jax.device_put(value, sharding)

        state = jtu.tree_map_with_path(leaf, target, shardings)
    data = LOOP["batches"]()
    found = {}
    for step in range(1, last_step + 1):
        batch = next(data)
        if step > int(state["step"]):
            state, _ = LOOP["train_step"](state, batch)
            found[step] = bits(state)
    return found


def saying_steps():
    """Let the loop say each step that it has done."""
    real = LOOP["train_step"]

    def train_step(state, batch):
        done = real(state, batch)
        children.say(step=int(done[0]["step"]))
        return done

    LOOP["train_step"] = train_step


def main(root, last_step, port=None, interval=10, mesh=None, cut=("fsdp",), start=None):
    """Train to a last step, or until preempted.

    Args:
        root: Root of the run.
        last_step: Last step.
        port: Of the coordinator, which waits for SIGTERM; None: there is none.
        interval: Steps between saves.
        mesh: Name of its only axis; None: the loop's own mesh.
        cut: Axes along which matrices are cut.
        start: Step that another mesh ended with; its bits are in `ROOT-STEP.npz`.
    """
    children.die_with_parent()
    children.without_disk_sync()
    if port is not None:
        jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    mesh = Mesh(jax.devices(), (mesh or "fsdp",))
    cut = PartitionSpec(*cut)
    target = LOOP["placed"](mesh, cut)
    options = ocp.CheckpointManagerOptions(save_interval_steps=interval, max_to_keep=3)
    if start is not None:
        began = LOOP["train"](root, start, options, mesh, cut)
        leaves = zip(jax.tree.leaves(began), jax.tree.leaves(target), strict=True)
        assert all(leaf.sharding == like.sharding for leaf, like in leaves)
        np.savez(f"{root}-{start}-restored.npz", **bits(began))
        before = np.load(f"{root}-{start}.npz")
        wanted = undisturbed(last_step, target, before)[last_step]
        np.savez(f"{root}-{last_step}-wanted.npz", **wanted)
    saying_steps()
    state = LOOP["train"](root, last_step, options, mesh, cut)
    np.savez(f"{root}-{int(state['step'])}.npz", **bits(state))
    children.say(end=int(state["step"]), devices=jax.device_count())


if __name__ == "__main__":
    # Libraries print to standard output too: what we say goes where only we write.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
