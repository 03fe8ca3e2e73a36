"""A small real training run, in a process of its own, that can be stopped and go on.

`python resumable.py ROOT SETTINGS` trains a decoder on a mesh of 4 x 2 devices until
its last step, or until it is killed in the middle of a save. Each step says on the
standard output what it read and lost; the last state's bits go to `ROOT.npz`. Does not
belong here: judging what came out.
"""

import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import children
import flax.struct
import grain
import grain.checkpoint
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_delta
from orbax_delta.demo import model
from orbax_delta.demo.runs import DemoConfig
from orbax_delta.demo.training import leaf_bits

CONFIG = DemoConfig(steps=8, seed=5, width=32, layers=1, heads=2, context=16, batch=8)
WINDOWS = 20
"""Windows of text in an epoch: no multiple of the batch, so that batches straddle."""
EPOCHS = 8
MESH = {"fsdp": 4, "tp": 2}
SAVE_EVERY = 3
OPTIONS = {"chunk_bytes": 2048, "pack_bytes": 64 << 10}
EMA_DECAY = 0.9


@flax.struct.dataclass
class State:
    """All that a step depends on, but the place in the data.

    Attributes:
        step: int32[], steps done.
        master: float32 parameters.
        compute: bfloat16 copy of them, which gradients are taken of.
        average: float32 moving average of them.
        optimizer: Of AdamW with a schedule; first moments in bfloat16.
        key: Typed random key of the dropout, split at each step.
    """

    step: jax.Array
    master: Any
    compute: Any
    average: Any
    optimizer: optax.OptState
    key: jax.Array


def optimizer():
    """AdamW whose learning rate changes with every step."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 4, 40)
    return optax.adamw(rate, mu_dtype=jnp.bfloat16)


def fresh():
    """The state before the first step."""
    init_key, key = jax.random.split(jax.random.key(CONFIG.seed))
    tokens = jnp.zeros((1, CONFIG.context), jnp.int32)
    master = model.Decoder(CONFIG).init(init_key, tokens, train=False)["params"]
    return State(
        step=jnp.int32(0),
        master=master,
        compute=model.compute_copy(master),
        average=master,
        optimizer=optimizer().init(master),
        key=key,
    )


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, window):
    """One step of mixed-precision training; the old state's memory is given away."""
    key, next_key = jax.random.split(state.key)

    def loss_of(compute):
        logits = model.Decoder(CONFIG).apply(
            {"params": compute}, window[:, :-1], train=True, rngs={"dropout": key}
        )
        wanted = window[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.compute)
    gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
    updates, moments = optimizer().update(gradients, state.optimizer, state.master)
    master = optax.apply_updates(state.master, updates)
    average = optax.incremental_update(master, state.average, 1 - EMA_DECAY)
    next_state = State(
        step=state.step + 1,
        master=master,
        compute=model.compute_copy(master),
        average=average,
        optimizer=moments,
        key=next_key,
    )
    return next_state, loss


def placed(mesh, leaf):
    """Matrices are cut along both axes of the mesh, all else is on every device."""
    axes = zip(MESH.items(), leaf.shape) if leaf.ndim >= 2 else ()
    spec = [name if size % devices == 0 else None for (name, devices), size in axes]
    return NamedSharding(mesh, PartitionSpec(*spec))


def windows():
    """Shuffled anew in each epoch, changed at random, read ahead by threads."""
    text = np.asarray(model.read_text(WINDOWS))[:, : CONFIG.context + 1]

    def noisy(window, rng):
        return np.where(rng.random(window.shape) < 0.1, 32, window).astype(np.int32)

    return iter(
        grain.MapDataset.source(text)
        .seed(CONFIG.seed)
        .shuffle()
        .repeat(EPOCHS)
        .random_map(noisy)
        .batch(CONFIG.batch)
        .to_iter_dataset()
    )


def train(root, last_step, killed_at=None, operations=0):
    """Go on from the newest step, to the last one or to the middle of a save.

    After step `killed_at` the process has that many more operations of the store to
    live, of whichever save is under way.
    """
    children.without_disk_sync()
    devices = np.array(jax.devices()).reshape(*MESH.values())
    mesh = Mesh(devices, tuple(MESH))
    shapes = jax.eval_shape(fresh)
    shardings = jax.tree.map(functools.partial(placed, mesh), shapes)
    data = windows()
    with ocp.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(max_to_keep=2),
        handler_registry=orbax_delta.handler_registry(item="state", **OPTIONS),
    ) as manager:
        newest = manager.latest_step()
        if newest is None:
            state = jax.jit(fresh, out_shardings=shardings)()
        else:
            target = jax.tree.map(
                lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings
            )
            restored = manager.restore(
                newest,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(target),
                    data=grain.checkpoint.CheckpointRestore(data),
                    config=ocp.args.JsonRestore(),
                ),
            )
            state = restored.state
            assert restored.config == {"epochs": EPOCHS, "step": newest}
        children.say(start=int(state.step))
        spread = NamedSharding(mesh, PartitionSpec("fsdp"))
        for step in range(int(state.step) + 1, last_step + 1):
            batch = next(data)
            state, loss = train_step(state, jax.device_put(batch, spread))
            children.say(
                step=step,
                batch=hashlib.sha256(batch.tobytes()).hexdigest(),
                loss=np.asarray(loss).tobytes().hex(),
            )
            if step == killed_at:
                children.Fuse("before", operations).install()
            if step % SAVE_EVERY == 0:
                manager.save(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardSave(state),
                        data=grain.checkpoint.CheckpointSave(data),
                        config=ocp.args.JsonSave({"epochs": EPOCHS, "step": step}),
                    ),
                )
    # A process that is to be killed must not come so far.
    assert killed_at is None
    bits = leaf_bits(state)
    bits |= {
        f"{name} on": np.frombuffer(str(leaf.sharding).encode(), np.uint8)
        for name, leaf in zip(list(bits), jax.tree.leaves(state), strict=True)
    }
    np.savez(root.with_suffix(".npz"), **bits)
    forms = {}
    if manager.all_steps():
        newest = root / str(max(manager.all_steps())) / "state"
        forms = dict(orbax_delta.save_report(newest).chunks_by_form)
    children.say(place=json.dumps(data.get_state(), sort_keys=True), forms=forms)


if __name__ == "__main__":
    train(Path(sys.argv[1]), **json.loads(sys.argv[2]))
