"""Policies on functions: the same numbers, and what is kept is what was asked for."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rematted
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from rematted import (
    MODES,
    block,
    bytes_kept,
    fast,
    in_gradient,
    mode,
    params_of_block,
)

import remat_policies as rp
from remat_policies.linearized import linearize
from remat_policies.program import automatic_names

NAMES = ("hidden", "active", "means", "weights", "summed")


@pytest.fixture(params=MODES)
def either_remat(request):
    """Jax's `jax.checkpoint`, and the one that is to replace it."""
    with mode(request.param):
        yield request.param


def loss_of(fn):
    """A number to differentiate."""
    return lambda *args: sum(jnp.sum(one**2) for one in jax.tree.leaves(fn(*args)))


def gradients(fn, *args):
    """By the first argument, compiled."""
    return fast(jax.grad(loss_of(fn)))(*args)


def assert_close(found, wanted):
    """Equal but for the last bits: XLA may fuse, and so round, in another way."""
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-6, atol=2e-6 * np.abs(two).max())


def all_automatic(fn, *args):
    """Every name that a function's values get by themselves."""
    flat, tree = jax.tree.flatten((args, {}))
    return list(automatic_names(linearize(fn, flat, tree).program).values())


# --- numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "full", "minimal", "minimal_offloaded"])
def test_values_and_gradients_are_the_functions(either_remat, policy):
    """For every preset that needs no names."""
    params, x = params_of_block()
    rematted_block = rp.remat(block, policy)
    assert_close(fast(rematted_block)(params, x), fast(block)(params, x))
    assert_close(gradients(rematted_block, params, x), gradients(block, params, x))


@settings(max_examples=8)
@given(st.data())
def test_gradients_are_equal_whatever_is_kept(data):
    """Any set of a block's values, by its own names or automatic ones."""
    which = data.draw(st.sampled_from(MODES))
    with mode(which):
        params, x = params_of_block()
        there = [*NAMES, *all_automatic(block, params, x)]
        save = data.draw(st.sets(st.sampled_from(there), max_size=12))
        offload = data.draw(st.sets(st.sampled_from(there), max_size=3)) - save
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rp.RematWarning)
            kept = rp.remat(block, rp.names(save=save, offload=offload))
            assert_close(gradients(kept, params, x), gradients(block, params, x))


def test_second_derivatives_are_right(either_remat):
    """Forward over reverse and reverse over reverse, values kept and not."""

    def smooth(w, x):
        return jnp.tanh(checkpoint_name(jnp.tanh(x @ w), "inner") @ w)

    w = jax.random.normal(jax.random.key(0), (4, 4))
    x = jax.random.normal(jax.random.key(1), (3, 4))
    direction = jnp.ones_like(w)

    def twice(fn):
        slope = jax.grad(loss_of(fn))
        forward = jax.jvp(lambda w: slope(w, x), (w,), (direction,))[1]
        reverse = jax.grad(lambda w: jnp.vdot(slope(w, x), direction))(w)
        return forward, reverse

    for policy in (rp.names(save=["inner"]), "full", "minimal"):
        assert_close(twice(rp.remat(smooth, policy)), twice(smooth))


def test_vmap_of_a_policy_keeps_as_much_for_each(either_remat):
    """Names do not mind a batch axis, as `dots_with_no_batch_dims_saveable` does."""
    w, x = jnp.eye(4), jnp.ones((3, 2, 4))
    fn = rp.remat(lambda x, w: jnp.sin(jnp.tanh(x @ w)), "minimal")
    over = jax.vmap(fn, in_axes=(0, None))
    assert bytes_kept(over, x, w)[0] == 3 * bytes_kept(fn, x[0], w)[0] > 0


def test_shard_map_inside_and_outside(either_remat):
    """A block that is mapped by hand, and a map of a block."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    spec = PartitionSpec("data")
    shard = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
    )

    def plain(x, w):
        return jnp.tanh(checkpoint_name(x @ w, "query_proj")) @ w

    x, w = jnp.linspace(0, 1, 32).reshape(8, 4), jnp.eye(4) + 0.1
    wanted = gradients(plain, x, w)
    outside = shard(rp.remat(plain, "save_qkv_proj"))
    assert_close(gradients(outside, x, w), wanted)
    inside = rp.remat(shard(plain), "full")
    assert_close(gradients(inside, x, w), wanted)
    if jax.__version_info__ < (0, 11):
        # Why the new remat of this version is not used.
        with (
            mode("remat3"),
            pytest.raises(ValueError, match="pvary is a invariant->variant"),
        ):
            gradients(shard(jax.checkpoint(plain)), x, w)


# --- what is kept ---------------------------------------------------------------------


def test_a_name_after_an_activation_is_kept_and_not_computed_again(either_remat):
    """With jax alone it is both."""

    def fn(x, w):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "active"))

    x, w = jnp.ones((2, 4)), jnp.eye(4)
    policy = rp.names(save=["active"])
    alone = jax.checkpoint(fn, policy=policy.jax_policy())
    assert in_gradient(alone, "tanh", x, w) == 2
    assert in_gradient(rp.remat(fn, policy), "tanh", x, w) == 1
    assert bytes_kept(rp.remat(fn, policy), x, w) == (32, 0)


def test_a_use_before_the_name_is_the_same_value(either_remat):
    """What is computed from it before it is named needs it as much."""

    def fn(x, w):
        y = x @ w
        early = jnp.sin(y)
        return early * jnp.cos(checkpoint_name(y, "product"))

    x, w = jnp.ones((2, 4)), jnp.eye(4)
    policy = rp.names(save=["product"])
    assert in_gradient(rp.remat(fn, policy), "dot_general", x, w) == 2
    assert in_gradient(rp.remat(fn, rp.preset("full")), "dot_general", x, w) == 3


def test_two_names_of_a_value_keep_it_once(either_remat):
    """Jax alone keeps two copies."""

    def fn(x):
        y = checkpoint_name(checkpoint_name(x * 2, "one"), "two")
        return jnp.sin(y)

    x = jnp.ones(4)
    policy = rp.names(save=["one", "two"])
    assert bytes_kept(rp.remat(fn, policy), x) == (16, 0)


def test_the_other_results_of_a_kernel_are_kept_with_it(either_remat):
    """Else the kernel runs again for the smaller ones."""

    def fn(q, k):
        out, _ = fake_attention(q, k)
        return jnp.sin(checkpoint_name(out.reshape(2, -1), "context"))

    q = k = jnp.linspace(0.0, 1.0, 8).reshape(2, 2, 2)
    policy = rp.names(save=["context"])
    fn_kept = rp.remat(fn, policy)
    assert in_gradient(fn, "ffi_call", q, k) == 1
    assert in_gradient(rp.remat(fn, "full"), "ffi_call", q, k) == 2
    assert in_gradient(fn_kept, "ffi_call", q, k) == 1
    assert bytes_kept(fn_kept, q, k) == (32 + 16, 0)
    rows = rp.report(fn, q, k, policy=policy).residuals.rows
    assert [(row.nbytes, row.with_kernel) for row in rows] == [(32, False), (16, True)]


@jax.custom_vjp
def fake_attention(q, k):
    """A compiled kernel has no derivative by itself; this one is only traced."""
    return _kernel(q, k)


def _kernel(q, k):
    shapes = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(q.shape[:-1], q.dtype),
    )
    return jax.ffi.ffi_call("a_kernel_that_is_nowhere", shapes)(q, k)


def _kernel_forward(q, k):
    out, sums = _kernel(q, k)
    return (out, sums), (q, k, out, sums)


def _kernel_backward(kept, changes):
    q, k, out, sums = kept
    change = changes[0] + 0 * out + 0 * sums[..., None]
    return change * k, change * q


fake_attention.defvjp(_kernel_forward, _kernel_backward)


def test_a_name_inside_a_rule_that_calls_itself_is_found(either_remat):
    """Jax alone does not see it: the inner call is opaque."""
    policy = rp.names(save=["inside"])
    x = jnp.ones(4)
    assert bytes_kept(rp.remat(calls_itself, policy), x) == (16, 0)


@jax.custom_vjp
def calls_itself(x):
    """Its forward rule calls it, as that of some attention kernels."""
    return checkpoint_name(jnp.exp(x), "inside")


calls_itself.defvjp(
    lambda x: (calls_itself(x),) * 2, lambda kept, change: (change * kept,)
)


def test_what_only_a_frozen_argument_needs_is_not_kept(either_remat):
    """The product's input is for the weights alone; they are frozen."""

    def fn(w, frozen, x):
        return (checkpoint_name(jnp.sin(x @ w), "input")) @ frozen

    w, x = jnp.eye(4), jnp.ones((2, 4))
    policy = rp.names(save=["input"])
    kept = rp.remat(fn, policy)
    assert bytes_kept(lambda w, x: kept(w, w, x), w, x) == (32, 0)
    assert bytes_kept(lambda v, x: kept(w, v, x), w, x) == (32, 0)
    assert bytes_kept(lambda v, x: kept(v, w, x), w, x) == (0, 0)


@pytest.mark.parametrize("preset", ["layer_input_offloaded", "full"])
def test_the_input_of_a_layer_needs_no_name(either_remat, preset):
    """It is the argument that looks like the result."""
    fn = rp.remat(lambda w, x: x + jnp.tanh(x @ w), preset)
    kept = bytes_kept(fn, jnp.eye(4), jnp.ones((2, 4)))
    assert kept == ((0, 32) if preset == "layer_input_offloaded" else (0, 0))


def test_a_plan_of_patterns(either_remat):
    """`*` stands for any text; automatic names say what makes a value."""
    x, w = jnp.ones((2, 4)), jnp.eye(4)
    fn = rp.remat(lambda x, w: jnp.sin(x @ w) @ w, rp.names(save=["rp/matmul/*#0"]))
    assert bytes_kept(fn, x, w) == (32, 0)


# --- layers ---------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 3, "sqrt", 7, 20])
def test_segments_of_layers(either_remat, every):
    """The same numbers; only each segment's input is kept."""
    stack = jax.random.normal(jax.random.key(0), (7, 4, 4)) / 2
    x = jnp.linspace(0, 1, 12).reshape(3, 4)

    def body(carry, w):
        return jnp.tanh(carry @ w), carry.sum()

    def layers(stack, x):
        return rp.scan_layers(body, x, stack, "full", every=every)

    wanted = gradients(lambda stack, x: jax.lax.scan(body, x, stack), stack, x)
    assert_close(gradients(layers, stack, x), wanted)
    size = {"sqrt": 3, 20: 7}.get(every, every)
    segments = -(-7 // size)
    kept, _ = bytes_kept(layers, stack, x)
    assert kept - stack.nbytes <= 12 * 4 * (segments + 1)


def test_a_policy_inside_of_segments_is_kept_for_one_segment(either_remat):
    """Between the passes there are only the segments' inputs."""
    stack, x = jnp.ones((9, 4, 4)), jnp.ones((3, 4))

    def body(carry, w):
        return jnp.tanh(carry @ w), None

    def layers(every):
        return lambda s, x: rp.scan_layers(body, x, s, "minimal", every=every)

    whole, _ = bytes_kept(layers(1), stack, x)
    segments, _ = bytes_kept(layers("sqrt"), stack, x)
    assert whole == 9 * 2 * 48
    assert segments - stack.nbytes <= 4 * 48
    assert_close(gradients(layers(1), stack, x), gradients(layers("sqrt"), stack, x))


@pytest.mark.parametrize(
    ("layers", "every", "message"),
    [
        ({"a": jnp.ones((2, 1)), "b": jnp.ones((3, 1))}, 1, "the same leading axis"),
        (jnp.ones(()), 1, "the same leading axis"),
        (jnp.ones((0, 2)), 1, "the same leading axis"),
        (jnp.ones((2, 1)), 0, "at least one layer, or 'sqrt': 0"),
        (jnp.ones((2, 1)), "root", "at least one layer, or 'sqrt': 'root'"),
    ],
)
def test_layers_that_cannot_be_meant(layers, every, message):
    """Before anything is traced."""
    with pytest.raises(rp.InvalidInputError, match=message):
        rp.scan_layers(lambda c, w: (c, w), 0.0, layers, "full", every=every)


# --- calling --------------------------------------------------------------------------


def test_static_arguments_by_name(either_remat):
    """By position, by keyword and by default."""

    def fn(x, mode, scale=2, *, deep=False):
        y = jnp.sin(x) if mode == "sine" else jnp.cos(x)
        return y * scale if not deep else jnp.tanh(y)

    x = jnp.ones(3)
    kept = rp.remat(fn, "full", static=["mode", "deep"])
    for args, kwargs in [
        ((x, "sine"), {}),
        ((x,), {"mode": "cosine", "deep": True}),
        ((x, "sine", 3), {"deep": False}),
    ]:
        assert_close(kept(*args, **kwargs), fn(*args, **kwargs))
    with pytest.raises(rp.InvalidInputError, match="no argument is called 'made'"):
        rp.remat(fn, "full", static="made")


def test_random_keys_integers_and_no_arguments(either_remat):
    """Arguments without derivatives, and results too."""

    def fn(x, key, index):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, x, 0) * 2, index + 1

    key, index = jax.random.key(3), jnp.arange(2)
    kept = rp.remat(fn, "full")
    x = jnp.linspace(1, 2, 6)
    assert_close(kept(x, key, index), fn(x, key, index))
    slope = jax.grad(lambda x: kept(x, key, index)[0].sum())(x)
    assert_close(slope, jax.grad(lambda x: fn(x, key, index)[0].sum())(x))
    assert rp.remat(lambda: jnp.ones(2), "full")().shape == (2,)


def test_effects_still_happen(either_remat, capfd):
    """A debug print inside is printed, in the forward pass at least."""

    def fn(x):
        jax.debug.print("inside {}", x.sum())
        return jnp.sin(x)

    jax.block_until_ready(
        jax.grad(lambda x: rp.remat(fn, "full")(x).sum())(jnp.ones(2))
    )
    jax.effects_barrier()
    assert "inside 2.0" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (rp.names(save=["actve"]), rp.UnknownNameError, "did you mean 'active'"),
        (rp.names(save=["rp/x"]), rp.UnknownNameError, "no value called 'rp/x'"),
        (rp.names(save=["zz*"]), rp.UnknownNameError, "no value called"),
        ("save_qkv_proj", rp.UnknownNameError, "preset save_qkv_proj keeps"),
        (None, rp.InvalidInputError, "None is no policy"),
        (jax.checkpoint_policies.dots_saveable, rp.InvalidInputError, "names"),
    ],
)
def test_what_would_be_a_silent_no_op_is_an_error(policy, error, message):
    """Jax would recompute everything."""
    params, x = params_of_block()
    with pytest.raises(error, match=message):
        rp.remat(block, policy)(params, x)


def test_a_name_that_nobody_reads_is_a_warning(either_remat):
    """It keeps nothing, so it does not do what its writer believes."""

    def fn(x):
        return checkpoint_name(jnp.sin(x), "result")

    kept = rp.remat(fn, rp.names(save=["result"]))
    with pytest.warns(rp.RematWarning, match="'result' is kept for nothing"):
        kept(jnp.ones(3))


def test_check_grads_compares_real_numbers():
    """Equal here; a function that is different each time is found out."""
    params, x = params_of_block()
    found = rp.check_grads(block, "full", params, x)
    assert found.largest_error < 1e-5
    with pytest.raises(rp.InvalidInputError, match="no result is of floating-point"):
        rp.check_grads(lambda x: x > 0, "full", jnp.ones(3))
    with pytest.raises(rp.InvalidInputError, match="no argument is of floating-point"):
        rp.check_grads(lambda x: x * 1.5, "full", jnp.arange(3))
    calls = iter(range(100))
    with pytest.raises(
        rp.GradientMismatchError, match=r"argument \[0\]\[0\] differs by"
    ):
        rp.check_grads(lambda x: x * (next(calls) + 1.0), "full", jnp.ones(3))


def test_rematted_helper_counts(either_remat):
    """The tests' own measure sees what jax alone recomputes."""
    x, w = jnp.ones((2, 4)), jnp.eye(4)
    fn = jax.checkpoint(lambda x, w: jnp.sin(x @ w))
    assert rematted.in_gradient(fn, "dot_general", x, w) == 3


@pytest.mark.parametrize("policy", ["full", "minimal"])
def test_what_has_no_derivative_is_not_differentiated(either_remat, policy):
    """A mask that goes to a kernel: all is well until somebody asks for it."""

    def fn(x, w, mask):
        out, _ = test_kernel(mask, mask)
        return jnp.tanh(x @ w) * out.sum()

    test_kernel = functools.partial(_kernel)
    kept = rp.remat(fn, policy)
    x, w, mask = jnp.ones((2, 4)), jnp.eye(4), jnp.ones((2, 2))
    assert jax.eval_shape(kept, x, w, mask).shape == (2, 4)
    assert in_gradient(kept, "tanh", x, w, mask) == 2
    with pytest.raises(NotImplementedError, match="no derivative by array 2 of"):
        jax.make_jaxpr(jax.grad(lambda mask: kept(x, w, mask).sum()))(mask)


def test_a_function_that_cannot_be_traced_says_why():
    """Its own error, not one of ours."""

    def fn(x):
        return x @ jnp.ones((3, 3))

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        rp.remat(fn, "full")(jnp.ones((2, 4)))


def test_a_name_inside_of_a_loop_keeps_nothing_by_itself(either_remat):
    """Jax would keep what is in the loop as well, for nobody."""

    def fn(x, w):
        y = checkpoint_name(x @ w, "product")

        def body(carry, _):
            return checkpoint_name(jnp.sin(carry), "product"), None

        return jnp.cos(y) * jax.lax.scan(body, y, length=3)[0]

    x, w = jnp.ones((2, 4)), jnp.eye(4)
    policy = rp.names(save=["product"])
    said = rp.report(fn, x, w, policy=policy).residuals
    assert bytes_kept(rp.remat(fn, policy), x, w) == (said.device_bytes, 0)


# --- what a function closes over ------------------------------------------------------


def test_derivatives_by_what_is_closed_over(either_remat):
    """A layer's weights may come in by the back door, at any order, in any loop."""
    x, stack = jnp.linspace(0.1, 1, 12).reshape(3, 4), jnp.ones((3, 4, 4)) / 4

    def direct(wrap):
        return lambda s: wrap(lambda x: jnp.tanh(x * s))(x).sum()

    def nested(wrap):
        return lambda s: wrap(lambda x: wrap(lambda y: jnp.sin(y * s))(x) * s)(x).sum()

    def scanned(wrap):
        def run(s):
            def body(carry, w):
                return wrap(lambda carry: jnp.tanh(carry @ w * s))(carry), None

            return jax.lax.scan(body, x, stack)[0].sum()

        return run

    for make in (direct, nested, scanned):
        plain, kept = make(lambda f: f), make(lambda f: rp.remat(f, "full"))
        assert_close(jax.grad(kept)(2.0), jax.grad(plain)(2.0))
        assert_close(jax.jvp(kept, (2.0,), (1.0,)), jax.jvp(plain, (2.0,), (1.0,)))
        assert_close(jax.grad(jax.grad(kept))(2.0), jax.grad(jax.grad(plain))(2.0))

    def layers(wrap):
        return lambda s: wrap(lambda c, w: (jnp.tanh(c @ w * s), None)).sum()

    for every in (1, 2):
        found = jax.grad(
            layers(lambda b, e=every: rp.scan_layers(b, x, stack, "full", every=e)[0])
        )(2.0)
        assert_close(
            found, jax.grad(layers(lambda b: jax.lax.scan(b, x, stack)[0]))(2.0)
        )


def test_static_arguments_may_hold_what_is_traced(either_remat):
    """Such as a configuration with a learned scale in it."""

    def fn(x, config):
        return jnp.tanh(x * config["scale"])

    def loss(fn):
        return lambda s: fn(jnp.ones(3), {"scale": s}).sum()

    kept = rp.remat(fn, "full", static="config")
    assert_close(jax.grad(loss(kept))(2.0), jax.grad(loss(fn))(2.0))


def test_frozen_arguments_on_meshes(either_remat):
    """Zeros have the type of what they stand for: axes and shardings."""
    x, w = jnp.linspace(0, 1, 16).reshape(4, 4), jnp.eye(4)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")
    shard = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec
    )

    def fn(w, x):
        return jnp.tanh(x @ w) + w.sum()

    wanted = gradients(fn, w, x)
    assert_close(gradients(shard(rp.remat(fn, "full")), w, x), wanted)
    explicit = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit):
        placed = jax.device_put(x, PartitionSpec("d", None))

        def joined(x, w):
            return jnp.concatenate([jnp.tanh(x), jnp.sin(w)], 1)

        found = gradients(rp.remat(joined, "full"), placed, placed)
    assert_close(found, gradients(joined, x, x))


def test_reports_of_a_block_with_shard_map_inside():
    """Its operations are those of all devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    specs = (PartitionSpec("d"), PartitionSpec())

    def fn(x, w):
        inner = jax.shard_map(
            lambda x, w: jnp.tanh(x @ w), mesh=mesh, in_specs=specs, out_specs=specs[0]
        )
        return inner(checkpoint_name(jnp.sin(x), "q"), w) @ w

    x, w = jnp.ones((4, 4)), jnp.eye(4)
    found = rp.report(fn, x, w, policy=rp.names(save=["q"])).residuals
    # The mapped part is one step: what its derivative needs is made in there as well.
    assert 16 + 2 * (2 * 4**3) + 16 <= found.forward_flops < 400
    assert bytes_kept(rp.remat(fn, rp.names(save=["q"])), x, w)[0] == found.device_bytes


def test_symbolic_shapes_are_exported():
    """Names are checked without asking how large anything is."""
    (length,) = jax.export.symbolic_shape("b")
    kept = rp.remat(
        lambda w, x: jnp.tanh(checkpoint_name(x @ w, "q")) @ w, rp.names(save=["q"])
    )
    slope = jax.jit(jax.grad(lambda w, x: kept(w, x).sum()))
    x = jax.ShapeDtypeStruct((length, 4), jnp.float32)
    assert jax.export.export(slope)(jnp.eye(4), x).in_avals[1].shape == x.shape


def test_mutable_arrays_are_refused():
    """What is run again would change them again."""
    ref = jax.new_ref(jnp.zeros(()))

    def fn(x):
        ref[...] += x.sum()
        return jnp.sin(x)

    with pytest.raises(rp.InvalidInputError, match="a mutable array"):
        rp.remat(fn, "full")(jnp.ones(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rp.remat(jnp.sin, "full", static=1), "go by their names: 1"),
        (lambda: rp.remat(dict, "full"), "dict is a class"),
    ],
)
def test_calls_that_cannot_be_meant(call, message):
    """Before anything is traced."""
    with pytest.raises(rp.InvalidInputError, match=message):
        call()


def test_names_mean_themselves_whatever_signs_they_have():
    """Only `*` and `?` stand for other text, and not in a name that is there."""

    def fn(x):
        y = checkpoint_name(x * 2, "layer[0]")
        return jnp.sin(checkpoint_name(jnp.sin(y), "what?"))

    x = jnp.ones(4)
    for name in ("layer[0]", "what?", "layer[?]", "*[0]"):
        assert bytes_kept(rp.remat(fn, rp.names(save=[name])), x) == (16, 0)


def test_a_name_that_is_only_inside_of_a_loop():
    """Says where it is."""

    def fn(x):
        body = lambda c, _: (jnp.sin(checkpoint_name(c * 2, "inside")), None)  # noqa: E731
        return jax.lax.scan(body, x, length=3)[0]

    with pytest.raises(rp.UnknownNameError, match="'inside' is inside of a scan at"):
        rp.remat(fn, rp.names(save=["inside"]))(jnp.ones(3))
