"""Checkpoints in both senses in one run: activations by a preset, states by deltas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from rematted import fast

import orbax_delta
import remat_policies.linen
from remat_policies.demo import TINY, linen_blocks, pure

CONFIG = dataclasses.replace(
    TINY, d_model=32, heads=2, kv_heads=1, head_dim=16, ffn_dim=64, dtype=jnp.float32
)
LAYERS, STEPS, STOPPED_AT = 3, 6, 3
OPTIMIZER = optax.adamw(1e-2)


def model_under(policy):
    """The stack of blocks, scanned, each with a preset."""
    wrap = functools.partial(
        remat_policies.linen.remat, policy=policy, in_scan=LAYERS > 1
    )
    return linen_blocks.Stack(CONFIG, LAYERS, scanned=True, wrap=wrap)


def step_under(policy):
    """One step of training: what it learns depends on the step's number alone."""
    model = model_under(policy)

    def loss(params, number):
        key = jax.random.fold_in(jax.random.key(7), number)
        x = jax.random.normal(key, (2, 8, CONFIG.d_model))
        return jnp.mean((model.apply(params, x) - jnp.roll(x, 1, axis=1)) ** 2)

    def step(state):
        slopes = jax.grad(loss)(state["params"], state["step"])
        changes, optimizer = OPTIMIZER.update(
            slopes, state["optimizer"], state["params"]
        )
        params = optax.apply_updates(state["params"], changes)
        return {"params": params, "optimizer": optimizer, "step": state["step"] + 1}

    return fast(step)


def fresh():
    """Parameters, optimizer state and step at the beginning."""
    params = linen_blocks.from_pure(pure.init_stack(CONFIG, jax.random.key(0), LAYERS))
    return {
        "params": params,
        "optimizer": OPTIMIZER.init(params),
        "step": jnp.int32(0),
    }


def saved(root):
    """A manager that writes deltas."""
    return ocp.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(max_to_keep=2),
        handler_registry=orbax_delta.handler_registry(),
    )


@pytest.mark.parametrize("policy", ["minimal", "full"])
def test_a_rematerialised_run_resumes_exactly(root, policy):
    """Bit for bit the run that was never stopped, each save but the first a delta."""
    step = step_under(policy)
    wanted = fresh()
    for _ in range(STEPS):
        wanted = step(wanted)

    state = fresh()
    with saved(root) as manager:
        for number in range(1, STOPPED_AT + 1):
            state = step(state)
            manager.save(number, args=ocp.args.StandardSave(state))
    with saved(root) as manager:
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh())
        args = ocp.args.StandardRestore(target)
        state = manager.restore(manager.latest_step(), args=args)
        assert int(state["step"]) == STOPPED_AT
        for number in range(STOPPED_AT + 1, STEPS + 1):
            state = step(state)
            manager.save(number, args=ocp.args.StandardSave(state))
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True)
    for one, two in pairs:
        np.testing.assert_array_equal(one, two)


def test_a_run_goes_on_under_another_preset(root):
    """A state knows nothing of policies: a larger machine may keep more."""
    state = fresh()
    with saved(root) as manager:
        state = step_under("full")(state)
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh())
        again = manager.restore(1, args=ocp.args.StandardRestore(target))
    pairs = zip(
        jax.tree.leaves(step_under("none")(again)),
        jax.tree.leaves(step_under("full")(state)),
        strict=True,
    )
    for one, two in pairs:
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
