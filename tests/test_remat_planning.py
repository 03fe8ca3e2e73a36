"""Plans: the best there is, in bytes that are jax's, never worse than a preset."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import pytest
import test_remat_applying
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from rematted import bytes_kept, in_gradient

import remat_policies as rp
from remat_policies.demo import TINY, TINY_ENCODER, TINY_MOE, pure
from remat_policies.residuals import split_at
from remat_policies.schedule import schedule

BLOCKS = {"dense": TINY, "moe": TINY_MOE, "encoder": TINY_ENCODER}
OPERATIONS = (jnp.sin, jnp.tanh, jnp.exp, lambda x: x * x, lambda x: x + 1)


def of_block(kind):
    """A demo block and the shapes of its arguments."""
    config = BLOCKS[kind]
    return functools.partial(pure.apply, config), pure.avals(config, 2, 64)


@st.composite
def programs(draw):
    """A function of a vector: some operations on what came before."""
    steps = draw(
        st.lists(
            st.tuples(st.integers(0, 6), st.integers(0, 99), st.integers(0, 99)),
            min_size=1,
            max_size=5,
        )
    )

    def fn(x):
        values = [x]
        for kind, one, two in steps:
            first = values[one % len(values)]
            if kind < len(OPERATIONS):
                values.append(OPERATIONS[kind](first))
            elif kind == len(OPERATIONS):
                values.append(first * values[two % len(values)])
            else:
                values.append(jnp.concatenate([first, first])[: 8 + 8 * (two % 2)])
                values[-1] = values[-1][:8]
        return values[-1]

    return fn


@settings(max_examples=60)
@given(programs(), st.integers(0, 200))
def test_no_choice_is_better(fn, budget):
    """Against all choices there are, one by one."""
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    found = rp.plan(fn, x, budget_bytes=budget, least_bytes=0)
    split = split_at(fn, (x,), {})
    wanted = frozenset(split.residuals)
    made = sorted(split.program.producers())
    if len(made) > 14:
        made = made[:14]  # all choices of more would take minutes
    best = min(
        schedule(split, kept, wanted).flops
        for count in range(len(made) + 1)
        for kept in itertools.combinations(made, count)
        if sum(map(split.program.nbytes, kept)) <= budget
    )
    assert found.recompute_flops <= best
    assert found.device_bytes <= budget
    assert found.gap == 0
    if found.policy.save:
        kept = bytes_kept(rp.remat(fn, found.policy), jnp.ones(8))
        assert kept == (found.device_bytes, 0)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_plan_is_never_worse_than_a_preset(kind):
    """At each preset's bytes, and the bytes are what jax keeps."""
    block, avals = of_block(kind)
    for name in ("full", "save_qkv_proj", "save_dot_except_mlp", "minimal"):
        preset = rp.report(block, *avals, policy=name).residuals
        found = rp.plan(block, *avals, budget_bytes=preset.device_bytes)
        assert found.recompute_flops <= preset.recompute_flops
        assert found.device_bytes <= preset.device_bytes
        kept = bytes_kept(rp.remat(block, found.policy), *avals)
        assert kept == (found.device_bytes, 0)


def test_between_presets_a_plan_is_better():
    """Presets are few; budgets are not."""
    block, avals = of_block("dense")
    less, more = (
        rp.report(block, *avals, policy=name).residuals
        for name in ("save_dot_with_context_except_mlp", "minimal_with_context")
    )
    budget = (less.device_bytes + more.device_bytes) // 2
    found = rp.plan(block, *avals, budget_bytes=budget)
    assert found.recompute_flops < 0.8 * less.recompute_flops
    assert found.device_bytes <= budget


def test_more_bytes_are_never_more_work():
    """And with enough of them there is none."""
    block, avals = of_block("dense")
    most = rp.report(block, *avals, policy="none").residuals.device_bytes
    budgets = [most * part // 8 for part in range(9)]
    found = rp.frontier(block, *avals, budgets=budgets, least_bytes=0)
    work = [one.recompute_flops for one in found]
    assert work == sorted(work, reverse=True)
    assert work[0] > 0 == work[-1]
    assert [one.budget_bytes for one in found] == budgets


def test_eight_layers_unrolled_are_one_problem():
    """Of a thousand steps, solved to the end."""
    config = BLOCKS["dense"]
    layers = [pure.avals(config, 2, 64)[0]] * 8
    _, x = pure.avals(config, 2, 64)
    stack = functools.partial(pure.stack, config)
    one = rp.report(functools.partial(pure.apply, config), layers[0], x, policy="full")
    found = rp.plan(stack, layers, x, budget_bytes=8 * 700_000)
    assert found.gap == 0
    assert 0 < found.recompute_flops < 8 * one.residuals.recompute_flops


def test_results_of_a_kernel_are_kept_together():
    """The smaller one counts in the budget too."""

    def fn(q, k):
        out, _ = test_remat_applying.fake_attention(q, k)
        return jnp.sin(out)

    q = k = jnp.linspace(0.0, 1.0, 8).reshape(2, 2, 2)
    too_little = rp.plan(fn, q, k, budget_bytes=47, least_bytes=0)
    enough = rp.plan(fn, q, k, budget_bytes=48, least_bytes=0)
    assert in_gradient(rp.remat(fn, too_little.policy), "ffi_call", q, k) == 2
    assert in_gradient(rp.remat(fn, enough.policy), "ffi_call", q, k) == 1
    assert enough.device_bytes == 48


def test_a_kernel_of_which_one_result_is_read():
    """The other one is not paid for."""

    @jax.custom_vjp
    def attention(q, k):
        return test_remat_applying.fake_attention(q, k)[0]

    def forward(q, k):
        out = test_remat_applying.fake_attention(q, k)[0]
        return out, (q, k, out)

    def backward(kept, change):
        q, k, out = kept
        return change * k * out, change * q

    attention.defvjp(forward, backward)
    q = k = jnp.linspace(0.0, 1.0, 8).reshape(2, 2, 2)
    found = rp.plan(attention, q, k, budget_bytes=32, least_bytes=0)
    assert found.device_bytes == 32
    assert in_gradient(rp.remat(attention, found.policy), "ffi_call", q, k) == 1


def test_frozen_arguments_need_nothing():
    """The product's input is for the weights, which are frozen."""
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def fn(frozen, x):
        return (x * 2) @ frozen

    assert rp.plan(fn, w, w, budget_bytes=0, wrt=[1]).recompute_flops == 0
    assert rp.plan(fn, w, w, budget_bytes=0).recompute_flops == 64 * 64


def test_names_of_the_block_are_used_where_they_mean_one_value():
    """Others are automatic; small values count where the block names them."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def fn(x):
        y = checkpoint_name(jnp.sin(x), "mine")
        z = checkpoint_name(jnp.sin(y.sum(0)), "small")
        return jnp.cos(y).sum() * jnp.exp(z).sum()

    found = rp.plan(fn, x, budget_bytes=1 << 20, least_bytes=1 << 12)
    assert "mine" in found.policy.save
    twice = rp.plan(lambda x: fn(fn(x) * x), x, budget_bytes=1 << 20)
    assert "mine" not in twice.policy.save
    assert any(name.startswith("rp/") for name in twice.policy.save)


def test_a_plan_is_words_and_json():
    """And the same plan again."""
    block, avals = of_block("dense")
    found = rp.plan(block, *avals, budget_bytes=10**6)
    assert rp.load_plan(found.to_json()) == found
    for part in ("Keeps", "of 1.00 MB", "of a forward pass again", "Kept: "):
        assert part in found.explain()
    worse = json.loads(found.to_json())
    with pytest.raises(rp.InvalidInputError, match="a plan has the fields"):
        rp.load_plan(json.dumps(worse | {"more": 1}))
    with pytest.raises(rp.InvalidInputError, match="not a plan in JSON"):
        rp.load_plan("{")
    with pytest.raises(rp.InvalidInputError, match="0 bytes or more, not -1"):
        rp.plan(block, *avals, budget_bytes=-1)


def test_a_solver_without_time_says_so():
    """What it found by then, and how much better it could be."""
    block, avals = of_block("dense")
    found = rp.plan(block, *avals, budget_bytes=10**6, seconds=0.0)
    assert found.device_bytes <= 10**6
    if found.gap:
        assert "the solver's time was up" in found.explain()
