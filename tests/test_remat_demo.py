"""The demo's blocks: one mathematics, three ways to call it, names where they pay."""

import collections
import dataclasses
import functools
import json
import subprocess
import sys

import aot_blocks
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from rematted import fast

from remat_policies import demo
from remat_policies.demo import attention, linen_blocks, maths, nnx_blocks, pure, values

LAYERS, BATCH, SEQ = 2, 2, 16
BF16 = {
    "decoder": demo.TINY,
    "moe": demo.TINY_MOE,
    "encoder": demo.TINY_ENCODER,
}
KINDS = {
    name: dataclasses.replace(config, dtype=jnp.float32)
    for name, config in BF16.items()
}
SAVING = jax.checkpoint_policies.save_only_these_names("out_proj")


def filled(avals, seed=0):
    """Arrays of small random values."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(
            generator.normal(0, 0.06, leaf.shape).astype(leaf.dtype)
        ),
        avals,
    )


def mean_square(y):
    """The loss, with the output beside it."""
    return jnp.mean(y**2), y


def assert_close(found, expected):
    """Equal within few ulps of each array's largest value."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        scale = float(jnp.abs(other).max())
        assert scale > 0
        np.testing.assert_allclose(one, other, rtol=0, atol=4e-6 * scale)


@functools.cache
def reference(kind):
    """Stacked parameters, x, and the pure scan's gradients and output."""
    config = KINDS[kind]
    params, x = filled(pure.avals(config, BATCH, SEQ, layers=LAYERS))

    def loss(params, x):
        return mean_square(pure.stack(config, params, x))

    return params, x, *fast(jax.grad(loss, has_aux=True))(params, x)


# --- one mathematics ------------------------------------------------------------------

WAYS = [("decoder", True), ("moe", True), ("encoder", False)]


@pytest.mark.parametrize(("kind", "scanned"), WAYS)
def test_linen_equals_pure(kind, scanned):
    """Outputs and gradients, rematerialised."""
    params, x, grads, y = reference(kind)
    wrap = functools.partial(nn.remat, policy=SAVING, prevent_cse=not scanned)
    model = linen_blocks.Stack(KINDS[kind], LAYERS, scanned, wrap)

    def loss(variables, x):
        return mean_square(model.apply(variables, x))

    given = params if scanned else pure.apart(params)
    found = fast(jax.grad(loss, has_aux=True))(linen_blocks.from_pure(given), x)
    expected = grads if scanned else pure.apart(grads)
    assert_close((linen_blocks.to_pure(found[0]), found[1]), (expected, y))


@pytest.mark.parametrize(("kind", "scanned"), WAYS)
def test_nnx_equals_pure(kind, scanned):
    """Outputs and gradients, rematerialised."""
    params, x, grads, y = reference(kind)
    wrap = functools.partial(nnx.remat, policy=SAVING, prevent_cse=not scanned)

    def run(params, x):
        model = nnx_blocks.Stack(
            KINDS[kind], LAYERS, scanned=scanned, wrap=wrap, rngs=nnx.Rngs(0)
        )
        nnx_blocks.load(model, params)
        grads, y = nnx.grad(lambda model: mean_square(model(x)), has_aux=True)(model)
        return nnx_blocks.to_pure(grads), y

    found = fast(run)(params if scanned else pure.apart(params), x)
    assert_close(found, (grads if scanned else pure.apart(grads), y))


@pytest.mark.parametrize("kind", KINDS)
def test_scanned_equals_unrolled(kind):
    """Gradients of the pure loss; an encoder's with dropout, of the same keys."""
    config, key = KINDS[kind], None
    params, x, grads, _ = reference(kind)
    if kind == "encoder":
        config, key = dataclasses.replace(config, dropout=0.1), jax.random.key(5)
        loss = functools.partial(pure.loss, config)
        grads = fast(jax.grad(loss))(params, x, key)
    loss = functools.partial(pure.loss, config, wrap=jax.checkpoint)
    found = fast(jax.grad(loss))(pure.apart(params), x, key)
    assert_close(pure.stacked(found), grads)


# --- parameters -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_the_same_everywhere(kind):
    """Shapes, dtypes and names, of both Flax libraries and of the abstract ones."""
    config = BF16[kind]
    for scanned in (True, False):
        expected, x = pure.avals(config, BATCH, SEQ, layers=LAYERS)
        if not scanned:
            expected = tuple(pure.avals(config, BATCH, SEQ)[0] for _ in range(LAYERS))
        module = linen_blocks.Stack(config, LAYERS, scanned)
        variables = jax.eval_shape(module.init, jax.random.key(0), x)
        assert linen_blocks.to_pure(variables) == expected

        def state(scanned=scanned):
            model = nnx_blocks.Stack(
                config, LAYERS, scanned=scanned, rngs=nnx.Rngs(params=0)
            )
            return nnx_blocks.to_pure(nnx.state(model, nnx.Param))

        assert jax.eval_shape(state) == expected


def test_first_parameters_keep_the_scale_of_what_they_multiply():
    """Scales are one, biases zero, matrices normal by the inputs they sum over."""
    config = KINDS["encoder"]
    params = fast(functools.partial(pure.init, config))(jax.random.key(0))
    inputs = {"out": config.heads * config.head_dim, "wo": config.ffn_dim}
    for name, value in params.items():
        if name.endswith(("_norm", "_bias")):
            assert (value == name.endswith("_norm")).all()
        else:
            expected = inputs.get(name, config.d_model) ** -0.5
            np.testing.assert_allclose(value.std(), expected, rtol=0.02)
            assert abs(value.mean()) < 0.02 * expected


def test_nnx_draws_the_same_scanned_or_not():
    """Of equal generators, so that the two can be compared without a copy."""
    config = dataclasses.replace(KINDS["decoder"], d_model=8, ffn_dim=8)

    @fast
    def draw():
        return tuple(
            nnx_blocks.to_pure(
                nnx.state(
                    nnx_blocks.Stack(
                        config, LAYERS, scanned=scanned, rngs=nnx.Rngs(params=7)
                    ),
                    nnx.Param,
                )
            )
            for scanned in (True, False)
        )

    scanned, unrolled = draw()
    assert_close(pure.apart(scanned), unrolled)
    assert (scanned["wi_0"][0] != scanned["wi_0"][1]).any()


@pytest.mark.parametrize(
    ("config", "vocabulary", "published"),
    [
        (demo.LLAMA_8B, 128_256, 8_030_261_248),
        (demo.MIXTRAL_8X7B, 32_000, 46_702_792_704),
    ],
)
def test_sizes_are_those_of_the_published_models(config, vocabulary, published):
    """32 blocks, two embeddings and the last norm make up the models."""
    block = sum(map(np.prod, values.shapes(config).values()))
    d = config.d_model
    assert 32 * block + 2 * vocabulary * d + d == published


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "heads=4 is no multiple of kv_heads=3"),
        ({"head_dim": 127}, "head_dim=127 is odd"),
        ({"kind": "encoder", "experts": 2}, "only a decoder has experts"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token=3 is not in 1..2"),
        ({"dropout": 1.0}, r"dropout=1.0 is not in \[0, 1\)"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    """With what is wrong, and the value that is."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(demo.TINY, **change)


# --- names ----------------------------------------------------------------------------


def equations(jaxpr):
    """Names, parameters and results of all equations, of inner jaxprs too."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "call_hi_primitive":  # of JAX_REMAT3: what is called says what it is
            name, params = type(params["_prim"]).__name__, params["_prim"].params
        yield name, params, equation.outvars
        inner = jax.tree.leaves(params, is_leaf=lambda leaf: hasattr(leaf, "eqns"))
        for value in inner:
            if hasattr(value, "eqns"):
                yield from equations(getattr(value, "jaxpr", value))


def named_values(function, *args):
    """Names and dtypes of the named values in a function, in the order of tracing."""
    return [
        (params["name"], results[0].aval.dtype)
        for name, params, results in equations(jax.make_jaxpr(function)(*args).jaxpr)
        if name in {"name", "CheckpointName"}
    ]


def operations(function, *args):
    """How many equations of each primitive a function has."""
    traced = jax.make_jaxpr(function)(*args)
    return collections.Counter(name for name, *_ in equations(traced.jaxpr))


@pytest.mark.parametrize("kind", BF16)
@pytest.mark.parametrize("used", ["xla", "splash"])
def test_each_name_is_given_once(kind, used):
    """In the narrow dtype; router logits alone are float32."""
    config = dataclasses.replace(BF16[kind], attention=used)
    params, x = pure.avals(config, BATCH, 128)
    found = named_values(functools.partial(pure.apply, config), params, x)
    assert tuple(name for name, _ in found) == values.names(config)
    wide = {name for name, dtype in found if dtype != jnp.bfloat16}
    assert wide == ({"moe_router"} if kind == "moe" else set())


@pytest.mark.parametrize("used", ["xla", "splash"])
def test_names_can_be_left_out(used):
    """For functions that are named by other means."""
    config = dataclasses.replace(demo.TINY, attention=used, names=False)
    args = pure.avals(config, BATCH, 128)
    assert named_values(functools.partial(pure.apply, config), *args) == []


@pytest.mark.parametrize("scanned", [True, False])
def test_flax_modules_carry_the_names(scanned):
    """Once for a loop's body, else once for each layer."""
    config = demo.TINY
    params, x = pure.avals(config, BATCH, SEQ, layers=LAYERS)
    if not scanned:
        params = (pure.avals(config, BATCH, SEQ)[0],) * LAYERS
    expected = list(values.names(config)) * (1 if scanned else LAYERS)
    linen = linen_blocks.Stack(config, LAYERS, scanned, nn.remat)
    found = named_values(linen.apply, linen_blocks.from_pure(params), x)
    assert [name for name, _ in found] == expected

    def run(x):
        model = nnx_blocks.Stack(
            config, LAYERS, scanned=scanned, wrap=nnx.remat, rngs=nnx.Rngs(params=0)
        )
        return model(x)

    assert [name for name, _ in named_values(run, x)] == expected


@pytest.mark.parametrize(
    ("kind", "recomputed"),
    [
        # The logits' product has no name: it alone is repeated where names are saved.
        # Without, all but the last product of the block are.
        ("decoder", {"dot_general": (1, 8)}),
        ("encoder", {"dot_general": (1, 7)}),
        # The router is the seventh; the experts' last product is needed by the weights.
        ("moe", {"dot_general": (1, 7), "ragged_dot_general": (0, 3)}),
    ],
)
def test_saving_the_names_saves_the_products(kind, recomputed):
    """Each stands where the backward pass, or what it recomputes, reads it."""
    config = BF16[kind]
    args = pure.avals(config, BATCH, SEQ, layers=LAYERS)
    policies = jax.checkpoint_policies

    def counts(wrap):
        loss = functools.partial(pure.loss, config, wrap=wrap)
        return operations(jax.grad(loss, argnums=(0, 1)), *args)

    def saving(names):
        policy = policies.save_only_these_names(*names)
        return counts(functools.partial(jax.checkpoint, policy=policy))

    plain, named, none = counts(None), saving(values.names(config)), saving(())
    for product, (with_names, without) in recomputed.items():
        assert named[product] - plain[product] == with_names
        assert none[product] - plain[product] == without


# --- attention ------------------------------------------------------------------------


def turned(x, theta):
    """RoPE by complex numbers: x is [seq, heads, head_dim]."""
    seq, _, head_dim = x.shape
    half = head_dim // 2
    angles = np.outer(np.arange(seq), theta ** (-np.arange(half) / half))
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def attended(config, params, x):
    """Self-attention, one head at a time, in float64: x is [seq, d_model]."""
    query, key, value = (
        np.einsum("sd,dhk->shk", x, params[name]) for name in ("query", "key", "value")
    )
    if config.kind == "decoder":
        query, key = turned(query, config.rope_theta), turned(key, config.rope_theta)
    out = 0
    for head in range(config.heads):
        shared = head * config.kv_heads // config.heads
        logits = query[:, head] @ key[:, shared].T / np.sqrt(config.head_dim)
        if config.kind == "decoder":
            logits = np.where(np.tri(len(x), dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = out + weights @ value[:, shared] @ params["out"][head]
    return out


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_attention_equals_a_loop_over_heads(kind):
    """With grouped keys and RoPE, causal in a decoder and both ways in an encoder."""
    config = KINDS[kind]
    params, _ = filled(pure.avals(config, BATCH, SEQ))
    x = filled(jnp.zeros((BATCH, SEQ, config.d_model))) * 16  # no near-uniform weights
    found = fast(functools.partial(maths.self_attention, config))(params, x)
    wide = {name: np.asarray(value, np.float64) for name, value in params.items()}
    expected = np.stack([attended(config, wide, np.asarray(one)) for one in x])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * abs(expected).max())


def test_rope_depends_on_distance_alone():
    """Products of turned vectors are equal at equal distances."""
    one, other = (filled(jnp.zeros((1, 1, 1, 32)), seed) for seed in (1, 2))
    turn = fast(functools.partial(attention.rope, theta=10_000.0))
    one, other = (turn(jnp.tile(x, (1, SEQ, 1, 1)))[0, :, 0] for x in (one, other))
    products = np.asarray(one @ other.T)
    for distance in range(-3, 4):
        diagonal = products.diagonal(distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert abs(products[0] - products[0, 0]).max() > 1e-3


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_splash_equals_xla(kind):
    """By the kernel's interpreter."""
    splash = dataclasses.replace(KINDS[kind], attention="splash")
    heads = (
        (BATCH, 128, count, 128) for count in (4, splash.kv_heads, splash.kv_heads)
    )
    args = [filled(jnp.zeros(shape), seed) * 16 for seed, shape in enumerate(heads)]
    with pltpu.force_tpu_interpret_mode():
        found = fast(functools.partial(attention.attend, splash))(*args)
    expected = fast(functools.partial(attention.attend, KINDS[kind]))(*args)
    assert_close(found, expected)


# --- experts and dropout --------------------------------------------------------------


def test_experts_are_those_of_the_highest_logits():
    """Every token goes to as many different ones as configured; weights sum to 1."""
    config = dataclasses.replace(KINDS["moe"], experts=5, experts_per_token=3)
    router, tokens = filled([jnp.zeros((256, 5)), jnp.zeros((64, 256))])
    experts, weights = fast(functools.partial(maths.route, config))(router, tokens)
    assert experts.shape == weights.shape == (64, 3)
    logits = np.asarray(tokens) @ np.asarray(router)
    np.testing.assert_array_equal(experts, np.argsort(-logits)[:, :3])
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    assert (np.diff(weights) <= 0).all()
    assert set(np.unique(experts)) == set(range(5))


def test_moe_equals_a_loop_over_experts():
    """In output and gradients, where an expert without a token is among them."""
    config = dataclasses.replace(KINDS["moe"], names=False)
    params, x = filled(pure.avals(config, BATCH, SEQ))
    x = jnp.abs(x)
    params["router"] = params["router"].at[:, 2].set(-1.0)  # below all others

    def loop(params, x):
        tokens = x.reshape(-1, config.d_model)
        experts, weights = maths.route(config, params["router"], tokens)
        out = jnp.zeros_like(tokens)
        for expert in range(config.experts):
            chosen = {name: params[name][expert] for name in ("wi_0", "wi_1", "wo")}
            share = jnp.where(experts == expert, weights, 0).sum(-1, keepdims=True)
            out += share * maths.swiglu(config, chosen, tokens)
        return out.reshape(x.shape)

    def grads(function):
        grad = jax.grad(
            lambda params, x: mean_square(function(params, x)), (0, 1), True
        )
        return fast(grad)(params, x)

    (found, found_x), y = grads(functools.partial(maths.moe, config))
    (expected, expected_x), expected_y = grads(loop)
    assert (found["wi_0"][2] == 0).all()
    used = ("router", "wi_0", "wi_1", "wo")
    assert_close(
        ({name: found[name] for name in used}, found_x, y),
        ({name: expected[name] for name in used}, expected_x, expected_y),
    )


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    """Differs by key; off without one or at rate 0."""
    ones = jnp.ones((64, 256))
    drop = functools.partial(maths.dropout, ones, 0.25)
    one, other = drop(jax.random.key(1)), drop(jax.random.key(2))
    assert abs(float((one == 0).mean()) - 0.25) < 0.02
    np.testing.assert_allclose(one[one != 0], 1 / 0.75, rtol=1e-6)
    assert (one != other).any()
    assert drop(None) is ones
    assert maths.dropout(ones, 0.0, jax.random.key(1)) is ones


def test_flax_blocks_drop_by_their_own_generators():
    """As the pure block does by the key that each draws; off without, or by `eval`."""
    config = dataclasses.replace(KINDS["encoder"], dropout=0.5)
    params, x = filled(pure.avals(config, BATCH, SEQ))
    plain = fast(functools.partial(pure.apply, config))
    linen = linen_blocks.Block(config)
    rngs = {"dropout": jax.random.key(3)}
    key = linen.apply({}, rngs=rngs, method=lambda block: block.make_rng("dropout"))
    run = fast(linen.apply)
    with_key = plain(params, x, key)
    assert_close(run({"params": params}, x, rngs=rngs), with_key)
    assert_close(run({"params": params}, x), plain(params, x))
    assert (with_key != plain(params, x)).any()

    def twice(evaluate, params, x):
        model = nnx_blocks.Stack(
            config, 1, scanned=False, rngs=nnx.Rngs(params=0, dropout=1)
        )
        nnx_blocks.load(model, [params])
        if evaluate:
            model.eval()
        key = model.blocks[0].dropout.key[...]
        return jax.random.fold_in(key, 0), model(x), model(x)

    key, first, second = fast(functools.partial(twice, False))(params, x)
    assert_close(first, plain(params, x, key))
    assert (first != second).any()
    _, first, _ = fast(functools.partial(twice, True))(params, x)
    assert_close(first, plain(params, x))


# --- devices that are not here --------------------------------------------------------


def compiled(kind):
    """Rows of `aot_blocks.py`, by the program's name."""
    done = subprocess.run(
        [sys.executable, aot_blocks.__file__, kind],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"needs the extra `aot`: {done.stderr[-3000:]}"
    rows = {row["program"]: row for row in json.loads(done.stdout.splitlines()[-1])}
    assert list(rows) == list(aot_blocks.PROGRAMS[kind])
    return rows


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_blocks_compile_for_devices(kind):
    """Gradients of dense and of sparse blocks, and splash on a TPU."""
    rows = compiled(kind)
    # More than the block's saved input, and far less than a device has.
    assert 2 * 2048 * 2048 * 2 < rows["dense"]["temp_bytes"] < 2 << 30
    assert rows["moe"]["temp_bytes"] < 1 << 28
    assert rows["dense"]["kernel_calls"] == rows["moe"]["kernel_calls"] == 0
    if kind == "tpu":
        # Forward, again for the backward pass, two derivatives; with names one less.
        assert rows["splash"]["kernel_calls"] == 4
        assert rows["splash, names saved"]["kernel_calls"] == 3


@pytest.mark.long
def test_cudnn_is_called():
    """Forward, again, backward: saving the names spares no call for its bytes."""
    pytest.importorskip("nvidia.cudnn", reason="needs nvidia-cudnn-cu12")
    rows = compiled("cudnn")
    assert [row["kernel_calls"] for row in rows.values()] == [3, 3, 3, 3]
