"""Plans for whole steps, and batches, by real compilers; no accelerator is here."""

import dataclasses
import functools

import compilers
import jax
import jax.numpy as jnp
import language_model
import pytest
import rich
from flax import nnx
from language_model import CONFIG, LAYERS, SHAPE

import remat_policies as rp
import remat_policies.linen
import remat_policies.nnx
from remat_policies import fitting, watching
from remat_policies.demo import TINY, linen_blocks, nnx_blocks, pure


def with_room_for(target, kept_bytes):
    """A device on which all layers together may keep so many bytes, and no more."""
    base = rp.verify(
        language_model.make_step("full"), *language_model.avals(), target=target
    )
    memory = int((base.hbm_bytes + kept_bytes) / 0.94) + 1000
    return dataclasses.replace(rp.device(target), hbm_bytes=memory)


def preset_bytes(name):
    """What all layers keep under a preset."""
    block = functools.partial(pure.apply, CONFIG)
    found = rp.report(block, *pure.avals(CONFIG, *SHAPE), policy=name).residuals
    return LAYERS * found.device_bytes


@pytest.mark.parametrize("target", compilers.BOTH)
def test_a_whole_model_gets_the_best_plan_that_fits(target):
    """As predicted, nothing recomputed by XLA, better than presets that fit."""
    between = (preset_bytes("save_dot_except_mlp") + preset_bytes("minimal")) // 2
    device = with_room_for(target, between)
    found = rp.fit(
        language_model.make_step, *language_model.avals(), device=device, attempts=2
    )
    assert found.compiled.fits
    assert found.compiled.hidden_remats <= found.nothing_kept.hidden_remats
    # A v5e keeps some of so small a model on chip: README has figures of larger ones.
    most = 0.03 if target == "h100" else 0.2
    for one in found.attempts:
        off = one.predicted_bytes / one.compiled.hbm_bytes - 1
        assert abs(off) < most, (one.plan.device_bytes, off)
    assert found.plan.segments[0].layers == LAYERS
    # The same budget, by a preset.
    block = functools.partial(pure.apply, CONFIG)
    curve = rp.frontier(block, *pure.avals(CONFIG, *SHAPE), budgets=[0])
    best = curve.presets[curve.best_preset(between // LAYERS)]
    assert found.plan.segments[0].recompute_flops < 0.9 * best.recompute_flops
    assert "fits" in found.explain()
    rich.print(found)


def uses_in(make_step, *avals):
    """What `fit` would see of a step, as kinds: how many layers of each."""
    nothing = rp.Policy(label="nothing kept")
    with watching.watched(nothing) as uses:
        jax.make_jaxpr(make_step(nothing))(*avals)
    return [count for _, count in fitting._found(uses, None)]


def test_layers_are_counted_in_loops_and_outside():
    """By pure functions, linen and nnx."""
    block = functools.partial(pure.apply, CONFIG)
    params, x = pure.avals(CONFIG, *SHAPE, layers=5)

    def unrolled(policy):
        wrap = functools.partial(rp.remat, policy=policy)
        return jax.grad(
            lambda params, x: pure.loss(CONFIG, pure.apart(params), x, wrap=wrap)
        )

    def in_own_scan(policy, **said):
        body = rp.remat(lambda x, w: (block(w, x), None), policy, in_scan=True, **said)
        return jax.grad(lambda params, x: jax.lax.scan(body, x, params)[0].sum())

    def in_segments(policy):
        body = rp.remat(lambda x, w: (block(w, x), None), policy)

        def loss(params, x):
            y, _ = rp.scan_layers(
                lambda x, w: (block(w, x), None), x, params, policy, every=2
            )
            return body(y, jax.tree.map(lambda leaf: leaf[0], params))[0].sum()

        return jax.grad(loss)

    assert uses_in(unrolled, params, x) == [5]
    said = functools.partial(in_own_scan, length=5)
    assert uses_in(said, params, x) == [5]
    # Within a segment two layers keep values at a time.
    assert sum(uses_in(in_segments, params, x)) == 3
    with pytest.raises(rp.InvalidInputError, match="loop of unknown length"):
        uses_in(in_own_scan, params, x)
    with pytest.raises(rp.InvalidInputError, match="to no block"):
        uses_in(lambda policy: jax.grad(lambda x: (x * x).sum()), jnp.ones(3))


WIDE = {"layers": 8, "width": 256, "rows": 2048}
"""A model of sines of products, which compiles in a second."""


def sines(policy, length=None):
    """From (weights, x) to the gradient of a scan of sines, in a scan if asked."""

    def loss(weights, x):
        def body(x, w):
            return jnp.sin(jnp.sin(x @ w) @ w), None

        def outer(x, some):
            return rp.scan_layers(body, x, some, policy)

        if length is None:
            return outer(x, weights)[0].sum()
        grouped = weights.reshape(-1, length, *weights.shape[1:])
        return jax.lax.scan(outer, x, grouped)[0].sum()

    return jax.grad(loss)


def sines_avals():
    """Weights and x."""
    weights = (WIDE["layers"], WIDE["width"], WIDE["width"])
    return (
        jax.ShapeDtypeStruct(weights, jnp.float32),
        jax.ShapeDtypeStruct((WIDE["rows"], WIDE["width"]), jnp.float32),
    )


def with_values(count):
    """An H100 on which each layer may keep so many values of the size of x."""
    base = rp.verify(sines("full"), *sines_avals(), target="h100")
    kept = count * WIDE["layers"] * WIDE["rows"] * WIDE["width"] * 4
    return dataclasses.replace(
        rp.device("h100"), hbm_bytes=int((base.hbm_bytes + kept) / 0.94) + 10_000
    )


@compilers.needs_gpu_compiler
def test_two_segments_use_what_one_leaves_over():
    """The step gives its policy to scan_layers, which takes several."""
    fit = functools.partial(rp.fit, sines, *sines_avals(), device=with_values(1.6))
    one, two = fit(), fit(mixed=True)
    assert two.compiled.fits
    assert two.plan.recompute_flops <= one.plan.recompute_flops
    assert sum(each.layers for each in two.plan.segments) == WIDE["layers"]
    assert any(len(each.plan.segments) == 2 for each in two.attempts)


@compilers.needs_gpu_compiler
def test_nothing_is_kept_where_there_is_room_for_nothing():
    """And below that an error says what is missing."""
    found = rp.fit(sines, *sines_avals(), device=with_values(0))
    assert found.plan.device_bytes == 0
    assert found.policy.save == ()
    with pytest.raises(rp.OverBudgetError, match="does not fit"):
        rp.fit(sines, *sines_avals(), device=with_values(-0.5))


@compilers.needs_gpu_compiler
def test_several_kinds_of_blocks_share_a_policy():
    """Layers of two widths, from the same code: each name is kept in both."""

    def make_step(policy):
        def body(x, layer):
            return jnp.sin(jnp.sin(x @ layer[0]) @ layer[1]), None

        def loss(weights, x):
            for group in weights:
                x, _ = rp.scan_layers(body, x, group, policy)
            return x.sum()

        return jax.grad(loss)

    def group(layers, width):
        up = jax.ShapeDtypeStruct((layers, 256, width), jnp.float32)
        return up, jax.ShapeDtypeStruct((layers, width, 256), jnp.float32)

    _, x = sines_avals()
    weights = (group(6, 512), group(10, 128))
    base = rp.verify(make_step("full"), weights, x, target="h100")
    room = 6 * WIDE["rows"] * 512 * 4 * 2
    device = dataclasses.replace(
        rp.device("h100"), hbm_bytes=int((base.hbm_bytes + room) / 0.94)
    )
    found = rp.fit(make_step, weights, x, device=device)
    assert found.compiled.fits
    assert [one.layers for one in found.plan.segments] == [6, 10]
    assert isinstance(found.policy, rp.Policy)
    assert all(one.device_bytes > 0 for one in found.plan.segments)
    with pytest.raises(rp.InvalidInputError, match="mixed=True is for one"):
        rp.fit(make_step, weights, x, device=device, mixed=True)


@compilers.needs_gpu_compiler
def test_the_largest_batch_is_the_largest():
    """One more does not fit; presets that keep more take fewer."""
    memory = 1 << 28
    device = dataclasses.replace(rp.device("h100"), hbm_bytes=memory)
    weights, _ = sines_avals()

    def avals_at(batch):
        return weights, jax.ShapeDtypeStruct((256 * batch, 256), jnp.float32)

    find = functools.partial(
        rp.largest_batch, avals_at=avals_at, device=device, start=8
    )
    found = {name: find(sines(name)) for name in ("none", "full")}
    assert 0 < found["none"].batch < found["full"].batch
    for one in found.values():
        assert one.compiled.fits
        assert one.tried[one.batch + 1] > memory * 0.94 >= one.tried[one.batch]
    fours = find(sines("full"), multiple_of=4)
    assert fours.batch == found["full"].batch // 4 * 4


@compilers.needs_gpu_compiler
def test_layers_that_nobody_counted_are_heeded():
    """Loops in loops are seen as one round of the outer one; the compiler knows."""
    device = with_values(1.2)
    make_step = functools.partial(sines, length=2)
    found = rp.fit(make_step, *sines_avals(), device=device)
    assert found.plan.segments[0].layers == 2
    assert found.compiled.fits
    said = rp.fit(make_step, *sines_avals(), device=device, layers=8)
    assert said.plan.segments[0].layers == 8
    assert said.compiled.fits


@compilers.needs_gpu_compiler
def test_a_model_that_jax_has_traced_before():
    """Is traced again for the next fit, and seen."""

    @functools.partial(jax.jit, static_argnames="policy")
    def model(weights, x, policy):
        def body(x, w):
            return jnp.sin(jnp.sin(x @ w) @ w), None

        return rp.scan_layers(body, x, weights, policy)[0].sum()

    def make_step(policy):
        return jax.jit(jax.grad(functools.partial(model, policy=policy)))

    for count in (1.2, 2.2):
        found = rp.fit(make_step, *sines_avals(), device=with_values(count))
        assert len(found.policy.save) == int(count)


@compilers.needs_gpu_compiler
def test_a_step_that_ignores_its_policy():
    """Such as one that was built before."""
    step = sines("full")

    def make_step(policy):
        sines(policy)
        return step

    with pytest.raises(rp.InvalidInputError, match="to no block"):
        rp.fit(make_step, *sines_avals(), device="h100")
    asked = []

    def late(policy):
        asked.append(policy)
        return sines(asked[0])

    with pytest.raises(rp.InvalidInputError, match="whatever policy make_step"):
        rp.fit(late, *sines_avals(), device="h100")


@compilers.needs_gpu_compiler
def test_a_kind_of_block_may_keep_nothing_of_the_others_plan():
    """The policy they share has no name of it."""

    def make_step(policy):
        def dear(x, w):
            return jnp.sin(x @ w @ w @ w), None

        def cheap(x, w):
            return jnp.cos(x * w[0]) * x, None

        def loss(weights, x):
            x, _ = rp.scan_layers(dear, x, weights, policy)
            return rp.scan_layers(cheap, x, weights, policy)[0].sum()

        return jax.grad(loss)

    found = rp.fit(make_step, *sines_avals(), device=with_values(1.5))
    assert [len(one.policy.save) > 0 for one in found.plan.segments] == [True, True]
    assert found.plan.segments[0].device_bytes > 0
    assert found.plan.segments[1].device_bytes == 0
    assert found.compiled.fits


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_layers_of_flax_modules_are_counted(flavour, scanned):
    """Scanned ones by the length that is said, others one by one."""
    config, layers = dataclasses.replace(TINY, dtype=jnp.float32), 3
    said = {"in_scan": True, "length": layers} if scanned else {}

    def linen_step(policy):
        wrap = functools.partial(remat_policies.linen.remat, policy=policy, **said)
        model = linen_blocks.Stack(config, layers, scanned, wrap)

        def loss(params, x):
            return model.apply(linen_blocks.from_pure(params), x).sum()

        return jax.grad(loss)

    def nnx_step(policy):
        wrap = functools.partial(remat_policies.nnx.remat, policy=policy, **said)

        def loss(params, x):
            model = nnx_blocks.Stack(
                config, layers, scanned=scanned, wrap=wrap, rngs=nnx.Rngs(0)
            )
            nnx_blocks.load(model, params)
            return model(x).sum()

        return jax.grad(loss)

    params, x = pure.avals(config, 2, 16, layers=layers)
    params = params if scanned else jax.eval_shape(pure.apart, params)
    make_step = linen_step if flavour == "linen" else nnx_step
    assert uses_in(make_step, params, x) == [layers]


@compilers.needs_gpu_compiler
def test_memory_that_grows_in_steps():
    """Is found by halving, not one by one."""
    device = dataclasses.replace(rp.device("h100"), hbm_bytes=10**9)

    def avals_at(batch):
        return (jax.ShapeDtypeStruct((-(-batch // 64) * 64, 10**5), jnp.float32),)

    found = rp.largest_batch(lambda x: x * 2, avals_at, device=device)
    assert found.batch == 1152  # 18 times 64, of 0.8 MB each
    assert found.tried[1153] > 0.94e9 >= found.tried[1152]
    assert len(found.tried) < 20


@compilers.needs_gpu_compiler
def test_batches_that_make_no_sense():
    """None fits, none is too large, or there is none to start from."""
    device = dataclasses.replace(rp.device("h100"), hbm_bytes=1 << 20)
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def step(x, batch):
        return (x @ x).sum() + batch.sum()

    def avals_at(batch):
        return x, jax.ShapeDtypeStruct((batch,), jnp.float32)

    none = rp.largest_batch(step, avals_at, device=device)
    assert none.batch == 0
    assert not none.compiled.fits
    with pytest.raises(rp.InvalidInputError, match="does not grow with its batch"):
        rp.largest_batch(lambda x: x * 2, lambda batch: (x,), device="h100")
    with pytest.raises(rp.InvalidInputError, match="start is a whole number from 1: 0"):
        rp.largest_batch(step, avals_at, device=device, start=0)
