"""Presets on Flax modules, scanned and not: numbers, bytes, state, names."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from rematted import MODES, bytes_kept, fast, mode

import remat_policies as rp
import remat_policies.linen
import remat_policies.nnx
from remat_policies.demo import (
    TINY,
    TINY_ENCODER,
    TINY_MOE,
    linen_blocks,
    nnx_blocks,
    pure,
)

LAYERS = 3
SMALL = {"d_model": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn_dim": 32}
DENSE = dataclasses.replace(TINY, **SMALL, dtype=jnp.float32)
BLOCKS = {
    "dense": DENSE,
    "moe": dataclasses.replace(TINY_MOE, **SMALL, dtype=jnp.float32),
    "encoder": dataclasses.replace(
        TINY_ENCODER, **{**SMALL, "kv_heads": 2}, dtype=jnp.float32
    ),
}
OF_EXPERTS = ("moe_save_experts",)
DENSE_PRESETS = [name for name in rp.PRESETS if name not in OF_EXPERTS]


def linen_model(policy, scanned):
    """Apply function of a linen stack."""
    wrap = functools.partial(remat_policies.linen.remat, policy=policy, in_scan=scanned)
    model = linen_blocks.Stack(DENSE, LAYERS, scanned, wrap)
    return lambda params, x: model.apply(linen_blocks.from_pure(params), x)


def nnx_model(policy, scanned):
    """Apply function of an NNX stack."""
    wrap = functools.partial(remat_policies.nnx.remat, policy=policy, in_scan=scanned)

    def apply(params, x):
        model = nnx_blocks.Stack(
            DENSE, LAYERS, scanned=scanned, wrap=wrap, rngs=nnx.Rngs(0)
        )
        nnx_blocks.load(model, params)
        return model(x)

    return apply


def stacked_params(scanned):
    """Parameters and an input of the dense block."""
    params = pure.init_stack(DENSE, jax.random.key(0), LAYERS)
    x = jax.random.normal(jax.random.key(1), (2, 8, DENSE.d_model))
    return (params if scanned else pure.apart(params)), x


def loss_of(apply):
    """A number to differentiate."""
    return lambda params, x: jnp.mean(apply(params, x) ** 2)


@pytest.fixture(scope="module")
def wanted():
    """Gradients of the stack without any policy."""
    params, x = stacked_params(scanned=True)
    plain = functools.partial(pure.stack, DENSE)
    return fast(jax.grad(loss_of(plain)))(params, x)


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("make", [linen_model, nnx_model], ids=["linen", "nnx"])
@pytest.mark.parametrize("policy", DENSE_PRESETS)
def test_gradients_and_bytes_of_presets(policy, make, scanned, wanted):
    """Gradients are those without a policy; bytes are those that `report` says."""
    params, x = stacked_params(scanned)
    apply = make(policy, scanned)
    found = fast(jax.grad(loss_of(apply)))(params, x)
    found = found if scanned else pure.stacked(found)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
    if policy != "none":  # without a policy jax may keep less than it says
        block = functools.partial(pure.apply, DENSE)
        layer = jax.tree.map(lambda leaf: leaf[0], params) if scanned else params[0]
        said = rp.report(block, layer, x, policy=policy).residuals
        inputs = 0 if policy == "layer_input_offloaded" else x.nbytes
        first = 0 if scanned or not inputs else x.nbytes  # the whole stack's argument
        kept = bytes_kept(apply, params, x)
        assert kept[0] == LAYERS * (said.device_bytes + inputs) - first
        assert kept[1] == LAYERS * said.host_bytes


@pytest.mark.parametrize("which", MODES)
@pytest.mark.parametrize("policy", rp.PRESETS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_reported_bytes_are_jax_s(kind, policy, which):
    """For each kind of block, byte for byte, and what a preset cannot name is said."""
    config = BLOCKS[kind]
    if policy == "none":  # jax alone counts a name of an argument as a value
        config = dataclasses.replace(config, names=False)
    block = functools.partial(pure.apply, config)
    avals = pure.avals(config, 3, 8)
    found = rp.report(block, *avals, policy=policy)
    if policy in OF_EXPERTS and kind != "moe":
        assert [one.kind for one in found.lints] == ["unknown-name"]
        return
    with mode(which):
        kept = bytes_kept(rp.remat(block, policy), *avals)
    said = found.residuals
    if policy == "none":
        assert kept[0] <= said.device_bytes
    else:
        assert kept == (said.device_bytes, said.host_bytes)


def test_presets_are_in_the_order_that_they_promise():
    """Each keeps no more, and runs no less again, than the one before it."""
    block = functools.partial(pure.apply, DENSE)
    avals = pure.avals(DENSE, 2, 64)
    names = [
        *("none", "selective", "minimal_with_context", "minimal"),
        *("save_dot_with_context_except_mlp", "save_dot_except_mlp"),
        *("save_qkv_proj", "save_out_proj", "full"),
    ]
    found = [rp.report(block, *avals, policy=name).residuals for name in names]
    sizes = [one.device_bytes for one in found]
    work = [one.recompute_flops for one in found]
    assert sizes == sorted(sizes, reverse=True)
    assert work == sorted(work)
    assert sizes[-1] == work[0] == 0


# --- state ----------------------------------------------------------------------------


class Stateful(nn.Module):
    """Dropout, a running mean and something sown."""

    @nn.compact
    def __call__(self, x, train=True):
        q = checkpoint_name(nn.Dense(8)(x), "query_proj")
        self.sow("intermediates", "mean", q.mean())
        q = nn.Dropout(0.3, deterministic=not train)(q)
        mean = self.variable("stats", "mean", jnp.zeros, ())
        mean.value = mean.value + q.mean()
        return x + nn.Dense(8)(nn.silu(q)), None


AXES = {"params": 0, "stats": 0, "intermediates": 0}
RNGS = {"params": True, "dropout": True}


def step_of_linen(model):
    """Gradients and all collections after one step."""
    x = jnp.linspace(0, 1, 24).reshape(3, 8)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = model.init(keys, x, True)

    def loss(params):
        (y, _), after = model.apply(
            {**variables, "params": params},
            x,
            True,
            rngs={"dropout": jax.random.key(2)},
            mutable=["intermediates", "stats"],
        )
        return (y**2).sum(), after

    return fast(jax.grad(loss, has_aux=True))(variables["params"])


@pytest.mark.parametrize("policy", ["none", "full", "minimal", "qkv_proj_offloaded"])
def test_linen_state_and_dropout(policy):
    """As with Flax's own: streams, collections, names of parameters."""
    scan = functools.partial(
        nn.scan, variable_axes=AXES, split_rngs=RNGS, length=3, in_axes=nn.broadcast
    )
    own = scan(nn.remat(Stateful, static_argnums=(2,), prevent_cse=False))()
    ours = remat_policies.linen.scan_layers(
        Stateful,
        policy,
        length=3,
        static="train",
        variable_axes=AXES,
        split_rngs=RNGS,
        in_axes=nn.broadcast,
    )()
    wanted, found = step_of_linen(own), step_of_linen(ours)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_linen_parameters_are_called_as_flax_calls_them():
    """A checkpoint of one opens in the other."""

    class Model(nn.Module):
        wrap: object

        @nn.compact
        def __call__(self, x):
            return self.wrap(nn.Dense)(3)(x)

    key, x = jax.random.key(0), jnp.ones((1, 2))
    ours = Model(functools.partial(remat_policies.linen.remat, policy="full"))
    assert jax.tree.structure(ours.init(key, x)) == jax.tree.structure(
        Model(nn.remat).init(key, x)
    )


def test_linen_methods_and_functions():
    """Other methods than `__call__`, and a function of a module."""

    class Two(nn.Module):
        def setup(self):
            self.dense = nn.Dense(2)

        def other(self, x, deep):
            return jnp.tanh(self.dense(x)) if deep else self.dense(x)

    wrapped = remat_policies.linen.remat(Two, "full", methods=["other"])
    x = jnp.ones((1, 2))
    variables = Two().init(jax.random.key(0), x, True, method="other")
    apply = functools.partial(wrapped().apply, variables, method="other")
    with pytest.raises(jax.errors.TracerBoolConversionError):
        apply(x, True)
    by_name = remat_policies.linen.remat(
        lambda module, x, deep: module.other(x, deep), "full", static="deep"
    )
    found = nn.apply(by_name, Two())(variables, x, deep=True)
    np.testing.assert_array_equal(
        found, Two().apply(variables, x, True, method="other")
    )
    with pytest.raises(rp.InvalidInputError, match="no argument is called 'train'"):
        remat_policies.linen.remat(Two, "full", static="train")


class Layer(nnx.Module):
    """Dropout and a counter."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.mean = nnx.Variable(jnp.zeros(()))

    def __call__(self, x, train=True):
        q = checkpoint_name(self.first(x), "query_proj")
        self.mean[...] = self.mean[...] + q.mean()
        return x + self.second(nnx.silu(self.drop(q, deterministic=not train)))


def step_of_nnx(layer, call):
    """Gradients and all state after one step."""
    x = jnp.linspace(0, 1, 24).reshape(3, 8)

    @nnx.jit
    def step(layer, x):
        return nnx.grad(lambda layer, x: (call(layer, x) ** 2).sum())(layer, x)

    found = step(layer, x)
    rest = nnx.state(layer, (nnx.RngCount, nnx.Variable))
    return [*jax.tree.leaves(found), *jax.tree.leaves(rest)]


def _is_key(leaf):
    return jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def as_numbers(leaves):
    """Random keys as the numbers they are made of."""
    return [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves]


@pytest.mark.parametrize("policy", ["none", "full", "minimal", "save_qkv_proj"])
def test_nnx_state_and_dropout(policy):
    """As with Flax's own: streams advance, variables are updated."""
    own = step_of_nnx(Layer(nnx.Rngs(0)), nnx.remat(lambda layer, x: layer(x)))
    ours = remat_policies.nnx.remat(lambda layer, x: layer(x), policy)
    found = step_of_nnx(Layer(nnx.Rngs(0)), ours)
    for one, two in zip(as_numbers(found), as_numbers(own), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_nnx_layers_scanned():
    """Stacked blocks, each with its own state."""

    def stack():
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Layer(rngs)

        return make(nnx.Rngs(0))

    def call(layer, x):
        return layer(x)

    own = nnx.scan(
        nnx.remat(call, prevent_cse=False),
        in_axes=(nnx.StateAxes({...: 0}), nnx.Carry),
        out_axes=nnx.Carry,
    )
    ours = remat_policies.nnx.scan_layers(call, "minimal", length=3)
    found, wanted = step_of_nnx(stack(), ours), step_of_nnx(stack(), own)
    for one, two in zip(as_numbers(found), as_numbers(wanted), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_nnx_methods_and_static_arguments():
    """A module, a bound method, an unbound one; `train` by name or place."""
    layer, x = Layer(nnx.Rngs(0)), jnp.ones((1, 8))
    layer.drop.deterministic = False
    wanted = layer(x, train=False)
    remat = remat_policies.nnx.remat
    for call in (
        lambda: remat(layer, "full", static="train")(x, train=False),
        lambda: remat(layer.__call__, "full", static=["train"])(x, False),
        lambda: remat(Layer.__call__, "full", static="train")(layer, x, False),
    ):
        np.testing.assert_allclose(call(), wanted, rtol=1e-6)
    assert float(layer.mean[...]) != 0
    with pytest.raises(rp.InvalidInputError, match="no argument is called 'trains'"):
        remat(layer, "full", static="trains")


def test_modules_that_are_closed_over():
    """As with Flax's own, their derivatives are there."""
    layer, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4))

    def loss(wrap):
        def run(layer):
            return (wrap(lambda x: jnp.tanh(layer(x)))(x) ** 2).sum()

        return run

    def ours(fn):
        return remat_policies.nnx.remat(fn, "minimal")

    found, wanted = nnx.grad(loss(ours))(layer), nnx.grad(loss(nnx.remat))(layer)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)

    class Scaled(nn.Module):
        scale: object

        @nn.compact
        def __call__(self, x):
            return jnp.tanh(x * self.scale)

    for wrap in (
        nn.remat,
        functools.partial(remat_policies.linen.remat, policy="full"),
    ):
        slope = jax.grad(lambda s, wrap=wrap: wrap(Scaled)(s).apply({}, x).sum())(0.5)
        np.testing.assert_allclose(slope, 8 * (1 - np.tanh(0.5) ** 2), rtol=1e-5)


def test_linen_layers_that_share_parameters():
    """`variable_broadcast`: they are created inside of the loop."""

    class Tied(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(nn.Dense(4)(x)), None

    def model(block):
        return nn.scan(
            block, variable_broadcast="params", split_rngs={"params": False}, length=3
        )()

    x = jnp.ones((2, 4))
    ours = model(remat_policies.linen.remat(Tied, "full", in_scan=True))
    params = ours.init(jax.random.key(0), x)
    wanted = model(nn.remat(Tied)).init(jax.random.key(0), x)
    for one, two in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_linen_methods_that_are_not_there():
    """By name, before anything is traced."""
    with pytest.raises(rp.InvalidInputError, match="no method 'nope'"):
        remat_policies.linen.remat(nn.Dense, "full", methods=["nope"])
