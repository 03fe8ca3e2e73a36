"""A trainer, an evaluator that follows it, and a run that goes back after a loss spike.

`python followers.py ROLE ROOT SETTINGS`; the trainer takes a step for each line on its
standard input. Each says on its standard output what it did, a JSON document a line.
Does not belong here: judging what came out.
"""

import functools
import hashlib
import json
import math
import sys
import time
from pathlib import Path

import children
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import orbax_delta
from orbax_delta.errors import CorruptionError, NotFoundError

KEPT_STEPS = 2
SAVE_EVERY = 3
SPIKE = 4.0
"""A loss this many times the mean of those before it is a spike."""

_POLL_SECONDS = 0.02


def fresh():
    """A fine-tuned head on a frozen body, with the momentum of its optimizer."""
    body, inner, outer = jax.random.split(jax.random.key(0), 3)
    head = {
        "inner": jax.random.normal(inner, (64, 32)) / 8,
        "outer": jax.random.normal(outer, (32,)) / 6,
    }
    return {
        "body": jax.random.normal(body, (16, 64), jnp.bfloat16),
        "head": head,
        "momentum": jax.tree.map(jnp.zeros_like, head),
        "step": jnp.int32(0),
    }


def batch_of(number):
    """What step `number` learns from."""
    rng = np.random.default_rng(number)
    x = rng.standard_normal((64, 16)).astype(np.float32)
    return x, np.tanh(x[:, 0] + x[:, 1] * x[:, 2])


def loss_of(head, body, batch):
    """Mean square error."""
    x, wanted = batch
    hidden = jnp.tanh(jnp.tanh(x @ body.astype(jnp.float32)) @ head["inner"])
    return jnp.mean((hidden @ head["outer"] - wanted) ** 2)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    """One step of gradient descent; the old state's memory is given away."""
    loss, gradient = jax.value_and_grad(loss_of)(state["head"], state["body"], batch)
    momentum = jax.tree.map(
        lambda old, new: 0.9 * old + new, state["momentum"], gradient
    )
    head = jax.tree.map(lambda w, m: w - 0.05 * m, state["head"], momentum)
    advanced = {"head": head, "momentum": momentum, "step": state["step"] + 1}
    return {**state, **advanced}, loss


def name_of(tree):
    """A digest of all bits."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def _manager(root, **options):
    registry = orbax_delta.handler_registry(chunk_bytes=1024, full_every=100)
    manager = ocp.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(**options),
        handler_registry=registry,
    )
    return manager, registry.get("default", orbax_delta.DeltaRestore)


def trainer(root):
    """Save every step, and keep the newest few."""
    manager, _ = _manager(root, max_to_keep=KEPT_STEPS)
    state = fresh()
    for _ in sys.stdin:
        state, loss = train_step(state, batch_of(int(state["step"])))
        step = int(state["step"])
        manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        children.say(step=step, head=name_of(state["head"]), loss=float(loss))
    manager.close()


def follower(root, last_step):
    """Evaluate each step that is the newest when one is looked for.

    It holds body and head alone; what has not changed is neither read nor copied.
    """
    manager, handler = _manager(root, read_only=True)
    shapes = jax.eval_shape(fresh)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {
        name: jax.tree.map(lambda leaf: leaf.update(sharding=here), shapes[name])
        for name in ("body", "head")
    }
    held, seen, failures = None, 0, 0
    while seen < last_step:
        try:
            manager.reload()
            step = manager.latest_step()
            if step in (None, seen):
                time.sleep(_POLL_SECONDS)
                continue
            args = orbax_delta.DeltaRestore(target, base=held, partial_restore=True)
            found = manager.restore(step, args=args)
        except (OSError, ValueError, NotFoundError, CorruptionError):
            failures += 1  # the trainer may delete the step at any moment
            if failures == 5:
                raise
            time.sleep(_POLL_SECONDS)
            continue
        failures = 0
        report = handler.last_restore_report
        loss = loss_of(found["head"], found["body"], batch_of(0))
        children.say(
            step=step,
            head=name_of(found["head"]),
            loss=float(loss),
            same_body=held is not None and found["body"] is held["body"],
            chunks=report.chunks,
            reused=report.chunks_reused,
            read=report.read_bytes,
        )
        held, seen = found, step
    manager.close()


def spiking(root, last_step, bad):
    """Train; after a spike go back to the newest save, and leave out what caused it.

    Args:
        root: Folder of the run.
        last_step: Steps to take.
        bad: Number of a batch that is spoilt.
    """
    manager, handler = _manager(root)
    state, losses, left_out = fresh(), [], set()
    manager.save(0, args=ocp.args.StandardSave(state))
    number = 0
    while int(state["step"]) < last_step:
        x, wanted = batch_of(number)
        if number == bad:
            wanted = wanted + 1000
        if number not in left_out:
            state, loss = train_step(state, (x, wanted))
            losses.append(float(loss))
        number += 1
        if len(losses) > 3 and losses[-1] > SPIKE * math.fsum(losses[:-1]) / len(
            losses[:-1]
        ):
            manager.wait_until_finished()
            good = manager.latest_step()
            args = orbax_delta.DeltaRestore(state, base=state)
            back = manager.restore(good, args=args)
            report = handler.last_restore_report
            children.say(
                spike=losses[-1],
                back=good,
                same_body=back["body"] is state["body"],
                chunks=report.chunks,
                reused=report.chunks_reused,
            )
            left_out.add(number - 1)
            state, number, losses = back, good, losses[:good]
        elif int(state["step"]) % SAVE_EVERY == 0:
            manager.save(int(state["step"]), args=ocp.args.StandardSave(state))
    manager.close()
    children.say(end=name_of(state), left_out=sorted(left_out))


if __name__ == "__main__":
    children.without_disk_sync()
    role, folder, settings = sys.argv[1:]
    globals()[role](Path(folder), **json.loads(settings))
