"""Plans: the best there is, in bytes that are jax's, never worse than a preset."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import test_remat_applying
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo
from jax.ad_checkpoint import checkpoint_name
from rematted import bytes_kept, in_gradient

import remat_policies as rp
from remat_policies import _compat, costs, frontiers, planning
from remat_policies.demo import D2048, TINY, TINY_ENCODER, TINY_MOE, pure, values
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
    found = rp.plan(fn, x, budget=budget, least_bytes=0, worth=0)
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
        found = rp.plan(block, *avals, budget=preset.device_bytes, worth=0)
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
    found = rp.plan(block, *avals, budget=budget)
    assert found.recompute_flops < 0.8 * less.recompute_flops
    assert found.device_bytes <= budget


def test_more_bytes_are_never_more_work():
    """And with enough of them there is none."""
    block, avals = of_block("dense")
    most = rp.report(block, *avals, policy="none").residuals.device_bytes
    budgets = [most * part // 8 for part in range(9)]
    found = rp.frontier(block, *avals, budgets=budgets, least_bytes=0, worth=0).plans
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
    found = rp.plan(stack, layers, x, budget=8 * 700_000)
    assert found.gap == 0
    assert 0 < found.recompute_flops < 8 * one.residuals.recompute_flops


def test_results_of_a_kernel_are_kept_together():
    """The smaller one counts in the budget too."""

    def fn(q, k):
        out, _ = test_remat_applying.fake_attention(q, k)
        return jnp.sin(out)

    q = k = jnp.linspace(0.0, 1.0, 8).reshape(2, 2, 2)
    too_little = rp.plan(fn, q, k, budget=47, least_bytes=0, worth=0)
    enough = rp.plan(fn, q, k, budget=48, least_bytes=0, worth=0)
    assert in_gradient(rp.remat(fn, too_little.policy), "ffi_call", q, k) == 2
    assert in_gradient(rp.remat(fn, enough.policy), "ffi_call", q, k) == 1
    assert enough.device_bytes == 48


@pytest.fixture
def with_cudnn(monkeypatch):
    """Without the library: jax asks for cuDNN's version before it traces."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


@pytest.mark.parametrize(
    ("attention", "kernel"),
    [("splash", "pallas_call"), ("cudnn", "dot_product_attention_fwd_wrapper")],
)
def test_attention_kernels_run_once(attention, kernel, with_cudnn):
    """In plans that have the bytes; what the mask leaves out is not counted."""
    config = dataclasses.replace(TINY, attention=attention)
    block, avals = functools.partial(pure.apply, config), pure.avals(config, 1, 1024)
    assert attention_flops(config) == (
        # cuDNN: half; splash: three of four blocks of 512
        (0.5 if attention == "cudnn" else 0.75) * 4 * 128 * 4 * 1024 * 1024
    )
    encoder = dataclasses.replace(TINY_ENCODER, attention=attention)
    assert attention_flops(encoder) == 4 * 128 * 4 * 1024 * 1024
    without = rp.plan(block, *avals, budget=0)
    budget = 1024 * config.heads * (2 * config.head_dim + 4)
    found = rp.plan(block, *avals, budget=budget + 10_000)
    assert in_gradient(rp.remat(block, without.policy), kernel, *avals) == (
        2 if attention == "cudnn" else 4  # splash has two backward kernels
    )
    assert in_gradient(rp.remat(block, found.policy), kernel, *avals) == (
        1 if attention == "cudnn" else 3
    )


def attention_flops(config):
    """What the kernel of a block is counted as, for one sequence of 1024 tokens."""
    block = functools.partial(pure.apply, config)
    program = split_at(block, pure.avals(config, 1, 1024), {}).program
    (step,) = (step for step in program.steps if step.kind == "kernel")
    return costs.step_flops(program, step)


def test_values_are_kept_as_they_were_before_a_reshape():
    """A loop would stack [.., groups, heads, width] in a layout of its own."""
    block = functools.partial(pure.apply, D2048)
    avals = pure.avals(D2048, 2, 2048)
    bytes_of = rp.report(block, *avals, policy="save_qkv_proj").residuals.device_bytes
    found = rp.plan(block, *avals, budget=bytes_of)
    assert set(found.policy.save) == {"query_proj", "key_proj", "value_proj"}


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
    found = rp.plan(attention, q, k, budget=32, least_bytes=0, worth=0)
    assert found.device_bytes == 32
    assert in_gradient(rp.remat(attention, found.policy), "ffi_call", q, k) == 1


def test_frozen_arguments_need_nothing():
    """The product's input is for the weights, which are frozen."""
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def fn(frozen, x):
        return (x * 2) @ frozen

    assert rp.plan(fn, w, w, budget=0, wrt=[1]).recompute_flops == 0
    assert rp.plan(fn, w, w, budget=0).recompute_flops == 64 * 64


def test_names_of_the_block_are_used_where_they_mean_one_value():
    """Others are automatic; small values count where the block names them."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def fn(x):
        y = checkpoint_name(jnp.exp(x), "mine")
        z = checkpoint_name(jnp.sin(y.sum(0)), "small")
        return jnp.cos(y).sum() * jnp.exp(z).sum()

    found = rp.plan(fn, x, budget=1 << 20, worth=0)
    assert "mine" in found.policy.save
    twice = rp.plan(lambda x: fn(fn(x) * x), x, budget=1 << 20, worth=0)
    assert "mine" not in twice.policy.save
    assert any(name.startswith("rp/") for name in twice.policy.save)


def test_a_plan_is_words_and_json():
    """And the same plan again."""
    block, avals = of_block("dense")
    found = rp.plan(block, *avals, budget=10**6)
    assert rp.load_plan(found.to_json()) == found
    for part in ("Keeps", "of 1.00 MB", "of a forward pass again", "Kept: "):
        assert part in found.explain()
    worse = json.loads(found.to_json())
    with pytest.raises(rp.InvalidInputError, match="a plan has the fields"):
        rp.load_plan(json.dumps(worse | {"more": 1}))
    with pytest.raises(rp.InvalidInputError, match="not a plan in JSON"):
        rp.load_plan("{")
    with pytest.raises(
        rp.InvalidInputError,
        match="a budget that is no text or device is a whole number from 0: -1",
    ):
        rp.plan(block, *avals, budget=-1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_solver_without_time_says_how_far_off_it_may_be(kind):
    """The relaxation is solved all the same: a plan within the gap of the best."""
    block, avals = of_block(kind)
    most = rp.report(block, *avals, policy="none").residuals.device_bytes
    for part in (0, 5, 20, 60):
        budget = most * part // 100
        asked = {"budget": budget, "worth": 0}
        hasty = rp.plan(block, *avals, **asked, seconds=0.0)
        best = rp.plan(block, *avals, **asked)
        assert hasty.device_bytes <= budget
        assert best.gap == 0
        assert best.recompute_flops >= hasty.recompute_flops * (1 - hasty.gap - 1e-5)
        if hasty.gap:
            assert "the solver's time was up" in hasty.explain()


def test_what_is_quicker_to_compute_than_to_read_is_not_kept():
    """Eight FLOPs for each byte, or as many as asked for."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def fn(x, w):
        return jnp.sin(jnp.cos(x) @ w)

    found = rp.plan(fn, x, x, budget=1 << 20)
    assert found.device_bytes == 64 * 64 * 4  # the product, which sin's slope reads
    assert 0 < found.recompute_flops < 3 * 64 * 64
    everything = rp.plan(fn, x, x, budget=1 << 20, worth=0)
    assert everything.recompute_flops == 0
    assert rp.plan(fn, x, x, budget=1 << 20, worth=100).device_bytes == 0


def test_small_results_of_large_values_are_kept():
    """They are dear to make again."""
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)

    def fn(x):
        return jnp.sin((x @ x).sum()) * jnp.ones(4)

    assert rp.plan(fn, x, budget=64).recompute_flops < 10


def test_budgets_are_bytes_texts_and_devices():
    """For each layer, for all together, and what a device has left."""
    block, avals = of_block("dense")
    each = rp.plan(block, *avals, budget=500_000)
    whole = rp.plan(block, *avals, budget="2 MB", layers=4)
    assert (each.policy, each.device_bytes) == (whole.policy, whole.device_bytes)
    assert "for 4 layers" in whole.explain()
    assert rp.plan(block, *avals, budget="1MiB").budget_bytes == 1 << 20
    roomy = rp.plan(block, *avals, budget="v5e", layers=4)
    assert roomy == rp.plan(block, *avals, budget=rp.device("v5e"), layers=4)
    small = dataclasses.replace(rp.device("v5e"), hbm_bytes=int(17e6))
    tight = rp.plan(block, *avals, budget=small, layers=4)
    assert 0 <= tight.budget_bytes < 10**6 < roomy.budget_bytes
    assert tight.recompute_flops > roomy.recompute_flops
    with pytest.raises(rp.OverBudgetError, match="even `full` does not fit a v5e"):
        rp.plan(block, *avals, budget=small, layers=4, resident_bytes=16 * 10**6)
    for bad, text in {
        "12 parsecs": "is no size: write one like '12GB'",
        "v9": "is no size.*or the name of a device",
        1.5: "a whole number from 0: 1.5",
    }.items():
        with pytest.raises(rp.InvalidInputError, match=text):
            rp.plan(block, *avals, budget=bad)
    with pytest.raises(
        rp.InvalidInputError, match="layers is a whole number from 1: 0"
    ):
        rp.plan(block, *avals, budget=1, layers=0)
    with pytest.raises(rp.InvalidInputError, match="'all' values or those 'named'"):
        rp.plan(block, *avals, budget=1, candidates="mine")


def test_only_named_values_where_that_is_asked_for():
    """For a model that has its own names, and keeps them."""
    block, avals = of_block("dense")
    found = rp.plan(block, *avals, budget=10**7, candidates="named")
    assert found.policy.save
    assert set(found.policy.save) <= set(values.names(TINY))
    assert found.recompute_flops > rp.plan(block, *avals, budget=10**7).recompute_flops


def test_values_go_to_the_host_as_long_as_the_link_hides_it():
    """No more than is copied while a layer computes, nor than the host has."""
    config = dataclasses.replace(TINY, ffn_dim=4096)
    block, avals = functools.partial(pure.apply, config), pure.avals(config, 4, 512)
    device = dataclasses.replace(rp.device("v5e"), host_bytes_per_second=1e12)
    asked = {"budget": 0, "layers": 4, "device": device}
    without = rp.plan(block, *avals, budget=0)
    found = rp.plan(block, *avals, offload=True, **asked)
    assert found.policy.offload
    assert found.recompute_flops < without.recompute_flops
    assert found.device_bytes <= 0 < found.host_bytes
    seconds = found.forward_flops / device.matmul_flops_per_second
    assert found.host_bytes <= seconds * device.host_bytes_per_second
    with _compat.settled_remat():
        kept = bytes_kept(rp.remat(block, found.policy), *avals)
    x = avals[1].size * avals[1].dtype.itemsize
    assert kept == (0, found.host_bytes - x) or kept == (0, found.host_bytes)
    for limit in ("0 MB", 0):
        none = rp.plan(block, *avals, offload=True, host_budget=limit, **asked)
        assert none.policy == without.policy
    slow = dataclasses.replace(device, host_bytes_per_second=1.0)
    assert not rp.plan(
        block, *avals, budget=0, offload=True, device=slow
    ).policy.offload
    with pytest.raises(rp.InvalidInputError, match="give device='v5e'"):
        rp.plan(block, *avals, budget=0, offload=True)


def test_an_input_on_the_host_makes_room():
    """Where not even the inputs of all layers fit."""
    block, avals = of_block("dense")
    x = avals[1].size * avals[1].dtype.itemsize
    device = dataclasses.replace(rp.device("v5e"), host_bytes_per_second=1e12)
    layer, _ = planning.asked_of(block, avals, 0, offload=True, device=device)
    found = layer.plan(-x, 20.0)
    assert "decoder_layer_input" in found.policy.offload
    assert found.device_bytes <= -x
    with pytest.raises(rp.OverBudgetError, match="the least that the block can keep"):
        layer.plan(-x - 1, 20.0)


def test_a_mixture_leaves_no_budget_over():
    """Less than one layer's step is unused, and it runs less again than one plan."""
    block, avals = of_block("dense")
    layers, better = 12, 0
    most = rp.report(block, *avals, policy="minimal").residuals.device_bytes
    for part in range(1, 10):
        asked = {"budget": most * part // 10, "layers": layers}
        one = rp.plan(block, *avals, **asked)
        found = rp.mix(block, *avals, **asked)
        assert sum(each.layers for each in found.segments) == layers
        assert found.device_bytes <= layers * asked["budget"]
        assert found.recompute_flops <= layers * one.recompute_flops * (1 + 1e-5)
        better += found.recompute_flops < 0.98 * layers * one.recompute_flops
    assert better >= 3
    assert "12 layers" in rp.mix(block, *avals, budget=0, layers=12).explain()


def test_a_mixture_runs_in_two_scans():
    """Gradients are those of the layers, bytes those that were promised."""
    config = dataclasses.replace(TINY, dtype=jnp.float32)
    block = functools.partial(pure.apply, config)
    params = pure.init_stack(config, jax.random.key(0), 5)
    x = jax.random.normal(jax.random.key(1), (2, 64, config.d_model))
    found = rp.mix(block, *pure.avals(config, 2, 64), budget=600_000, layers=5)
    assert len(found.segments) == 2

    def body(x, w):
        return block(w, x), x.sum()

    def loss(policy, params, x):
        y, sums = rp.scan_layers(body, x, params, policy)
        return (y**2).mean() + sums.mean()

    assert rp.load_plan(found.to_json()) == found
    wanted = jax.jit(jax.grad(functools.partial(loss, "none")))(params, x)
    got = jax.jit(jax.grad(functools.partial(loss, found.policies)))(params, x)
    for left, right in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        assert jnp.abs(left - right).max() <= 1e-4 * jnp.abs(left).max()
    for wrong in ([("full", 4)], [("full", 5), ("none", 0)], []):
        with pytest.raises(rp.InvalidInputError, match=r"policies are for .* of 5"):
            loss(wrong, params, x)
    with pytest.raises(rp.InvalidInputError, match="`every` is for a single policy"):
        rp.scan_layers(body, x, params, found.policies, every=2)


def test_a_frontier_is_a_table_a_picture_and_json(tmp_path):
    """With the presets that the block has."""
    block, avals = of_block("dense")
    curve = rp.frontier(block, *avals)
    budgets = [one.budget_bytes for one in curve.plans]
    assert budgets == sorted(budgets)
    assert len(budgets) > 24
    for name, preset in curve.presets.items():
        if preset.host_bytes or preset.device_bytes not in budgets:
            continue
        plan = curve.plans[budgets.index(preset.device_bytes)]
        assert plan.recompute_flops <= preset.recompute_flops * 1.05, name
    assert "moe_save_experts" not in curve.presets
    assert curve.best_preset(0) == "full"
    assert "save_qkv_proj" in str(curve)
    read = json.loads(curve.to_json())
    assert len(read["plans"]) == len(budgets)
    assert read["presets"]["full"]["device_bytes"] == 0
    picture = curve.plot(tmp_path / "curve.png")
    assert matplotlib.image.imread(picture).std() > 0.01


def test_bytes_of_sharded_blocks_are_those_on_each_device():
    """As XLA's partitioner spreads the values in the middle."""
    devices = jax.devices()[:4]
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), auto, devices=devices)
    place = functools.partial(jax.NamedSharding, mesh)
    rows, columns = jax.P(None, "model"), jax.P("model", None)

    def block(x, up, down):
        return x + jnp.tanh(x @ up) @ down

    def of(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(spec))

    avals = (
        of((64, 128), jax.P("data", None)),
        of((128, 512), rows),
        of((512, 128), columns),
    )
    found = rp.plan(block, *avals, budget=10**6)
    assert found.device_bytes == 64 * 512 * 4 // 4
    whole = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in avals]
    assert rp.plan(block, *whole, budget=10**6).device_bytes == 64 * 512 * 4
    assert rp.plan(block, *avals, budget=64 * 512).device_bytes == 64 * 512
    assert rp.plan(block, *whole, budget=64 * 512).device_bytes == 0


def test_a_byte_less_than_a_choice_takes():
    """A solver that keeps limits to a millionth does not overstep by a value."""
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)

    def fn(x, a, b):
        return jnp.sin(jnp.sin(x @ a) @ b)

    for less, kept in ((0, 2), (1, 1), (50, 1), (1000, 1)):
        found = rp.plan(fn, w, w, w, budget=kept_bytes(2) - less)
        assert found.device_bytes == kept_bytes(kept)
        assert len(found.policy.save) == kept


def kept_bytes(count):
    """Of matrices of 4096 x 4096 in float32."""
    return count * 4096 * 4096 * 4


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=5),
    st.integers(-2, 8),
    st.integers(0, 6),
    st.sampled_from([0.0, 20.0]),
)
def test_offloading_keeps_both_limits(widths, budget, host, seconds):
    """Plans, neighbours and mixtures; in whole numbers, with or without time."""
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    unit = 1024 * 256 * 4
    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * len(widths)

    def fn(x, *weights):
        for weight, width in zip(weights, widths, strict=True):
            for _ in range(width):
                x = jnp.tanh(x @ weight)
        return x

    device = dataclasses.replace(rp.device("v5e"), host_bytes_per_second=1e18)
    limit = host * unit + unit // 2
    layer, _ = planning.asked_of(
        fn, (x, *weights), 0, offload=True, device=device, host_budget=limit, worth=0
    )
    room = budget * unit // 2
    if room < -unit or (room < 0 and limit < unit):
        with pytest.raises(rp.OverBudgetError, match="the least that the block can"):
            layer.plan(room, seconds)
        return
    found = layer.plan(room, seconds)
    best = layer.plan(room, 20.0)
    assert found.host_bytes <= limit
    assert found.device_bytes <= room
    assert best.gap == 0
    assert found.recompute_flops * (1 - found.gap) <= best.recompute_flops * 1.0001
    for one in frontiers.mixture_of(
        dataclasses.replace(layer, layers=5), room, 20.0
    ).segments:
        assert one.host_bytes <= limit


def test_types_that_jax_cannot_keep_as_they_are_are_not_kept():
    """Complex numbers, and 8-bit floating point of which it would make NaN."""
    w = jnp.full((128, 128), 1.3)
    x = jnp.full((64, 128), 2.0)

    def narrow(x, w):
        y = (x @ w).astype(jnp.float8_e4m3fn)
        return jnp.tanh(y.astype(jnp.float32) / 500) @ w

    def complex_product(x, w):
        return jnp.abs(jnp.sin(((x + 1j * x) @ w) * 1e-3))

    for fn in (narrow, complex_product):
        found = rp.plan(fn, x, w, budget="1 GB", worth=0)
        got = jax.grad(lambda x, fn=fn, p=found.policy: rp.remat(fn, p)(x, w).sum())(x)
        wanted = jax.grad(lambda x, fn=fn: fn(x, w).sum())(x)
        assert jnp.allclose(got, wanted, rtol=1e-5)


def test_jax_cannot_keep_complex_numbers_by_their_names():
    """If it can one day, plans may keep them."""
    policy = jax.checkpoint_policies.save_only_these_names("y")

    @functools.partial(jax.checkpoint, policy=policy)
    def named(x):
        return jnp.sin(checkpoint_name(jnp.exp(1j * x), "y")).real.sum()

    with pytest.raises(TypeError, match="reduce_precision does not accept"):
        jax.grad(named)(jnp.ones(3))


def test_an_own_name_like_an_automatic_one_is_not_used():
    """It would mean two values."""
    x = w = jnp.ones((16, 16))

    def of(name):
        return lambda x: jnp.sin(checkpoint_name(jnp.tanh(x @ w), name) @ w) @ w

    for name in rp.plan(
        of("mine"), x, budget="1 MB", worth=0, least_bytes=0
    ).policy.save:
        fn = of(name if name.startswith("rp/") else "rp/other")
        found = rp.plan(fn, x, budget=3 * 1024, worth=0, least_bytes=0)
        assert bytes_kept(rp.remat(fn, found.policy), x)[0] == found.device_bytes


def test_what_is_asked_wrongly():
    """Each names what was given."""
    block, avals = of_block("dense")
    ask = functools.partial(rp.plan, block, *avals)
    for asked, text in {
        "headroom": (7, "headroom is a share"),
        "worth": (-1, "worth is a number of FLOPs"),
        "seconds": (-1, "seconds for the solver"),
        "layers": (1.5, r"layers is a whole number from 1: 1\.5"),
        "device": ("nonsense", "no device is called 'nonsense'"),
        "host_budget": ("bla", "'bla' is no size"),
        "wrt": ([7], r"wrt is a list of positions .* to 1, .*\[7\]"),
    }.items():
        value, message = text
        with pytest.raises(rp.InvalidInputError, match=message):
            ask(budget=0, **{asked: value})
    with pytest.raises(rp.InvalidInputError, match="wrt is a list of positions"):
        ask(budget=0, wrt=[])
    with pytest.raises(rp.InvalidInputError, match="resident_bytes is a whole number"):
        ask(budget="v5e", resident_bytes=-1)
    for bad in (True, 1.5):
        with pytest.raises(rp.InvalidInputError, match="is a whole number from 0"):
            ask(budget=bad)
        with pytest.raises(rp.InvalidInputError, match="each budget is a whole number"):
            rp.frontier(block, *avals, budgets=[bad])
    with pytest.raises(rp.InvalidInputError, match="there is no budget among"):
        rp.frontier(block, *avals, budgets=[])
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)
    with pytest.raises(rp.InvalidInputError, match="some are symbolic"):
        rp.plan(jnp.sin, symbolic, budget=0)
    with pytest.raises(rp.InvalidInputError, match=r"`.policies` of a mixture"):
        rp.remat(block, ask(budget=0))
    with pytest.raises(rp.InvalidInputError, match="pairs of a policy and its layers"):
        rp.scan_layers(lambda x, w: (x, None), 0.0, jnp.ones(2), ["full", "none"])
    numbers = ask(budget=np.int64(10**6), layers=np.int32(2))
    assert rp.load_plan(numbers.to_json()) == numbers
    assert ask(budget="v5e", layers=4, resident_bytes=0).budget_bytes < 16e9


def test_a_curve_of_a_sharded_block_is_of_one_device():
    """Presets too."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), auto, devices=jax.devices()[:4])
    x, w = (
        jax.ShapeDtypeStruct(
            (64, 64), jnp.float32, sharding=jax.NamedSharding(mesh, spec)
        )
        for spec in (jax.P("data"), jax.P())
    )
    curve = rp.frontier(lambda x, w: jnp.sin(x @ w), x, w)
    assert curve.presets["minimal"].device_bytes == 64 * 64 * 4 // 4
    other = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    moved = jax.ShapeDtypeStruct(
        (64, 64), jnp.float32, sharding=jax.NamedSharding(other, jax.P("data"))
    )
    with pytest.raises(rp.InvalidInputError, match="sharded over several meshes"):
        rp.plan(lambda x, w: jnp.sin(x @ w), x, moved, budget=0)


def test_plans_that_were_written_wrong_are_refused():
    """Each figure is a number."""
    block, avals = of_block("dense")
    fields = json.loads(rp.plan(block, *avals, budget=0).to_json())
    for name, value in {"layers": 1.5, "gap": "0", "device_bytes": True}.items():
        with pytest.raises(rp.InvalidInputError, match=f"{name} of a plan is a number"):
            rp.load_plan(json.dumps(fields | {name: value}))
