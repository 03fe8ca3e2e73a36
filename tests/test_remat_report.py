"""What a report says, and each trap that jax is silent about."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.image
import pytest
import test_remat_applying
from jax.ad_checkpoint import checkpoint_name
from rematted import bytes_kept, in_gradient, kernel, mode

import remat_policies as rp
from remat_policies import costs

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)


def kinds(fn, *avals, policy=None):
    """The traps found, by name of the kind."""
    return [found.kind for found in rp.lint(fn, *avals, policy=policy)]


def block(w, x):
    """A block with two names."""
    hidden = checkpoint_name(x @ w, "hidden")
    return checkpoint_name(jnp.sin(hidden) @ w, "result")


# --- the report -----------------------------------------------------------------------


def test_a_report_has_a_row_for_each_value():
    """With its place in the source, its bytes and what it is worth."""
    found = rp.report(block, W, X, policy=rp.names(save=["hidden"]))
    (row,) = found.residuals.rows
    assert (row.name, row.shape, row.dtype, row.nbytes) == (
        *("hidden", (2, 3, 4), "float32", 96),
    )
    assert row.source.endswith(f"{__file__}:28")
    assert (row.place, row.needed, row.with_kernel) == ("device", True, False)
    assert row.saves_flops == 2 * 6 * 4 * 4
    assert found.residuals.tokens == 6
    assert found.residuals.argument_bytes == 64 + 96
    assert found.residuals.forward_flops == 2 * (2 * 6 * 4 * 4) + 24
    assert found.residuals.recompute_flops == 24 + 24  # sin again, and cos
    assert found.lints == ()


def test_a_report_as_text_and_json():
    """A table in plain words; the same figures for machines."""
    found = rp.report(block, W, X, policy=rp.names(save=["hidden"]))
    text = str(found)
    for part in ("hidden", "96 B", "192 FLOP", "16 B a token", "run again"):
        assert part in text
    document = json.loads(found.to_json())
    assert document["device_bytes"] == 96
    assert document["residuals"][0]["name"] == "hidden"
    assert document["lints"] == []


def test_a_report_as_a_picture(tmp_path):
    """A bar for each value that is read."""
    found = rp.report(block, W, X, policy=rp.names(save=["hidden"]))
    picture = matplotlib.image.imread(found.plot(tmp_path / "kept.png"))
    assert picture.std() > 0.05
    with pytest.raises(rp.InvalidInputError, match="there is nothing to draw"):
        rp.report(block, W, X, policy="full").plot(tmp_path / "none.png")


def test_only_derivatives_that_are_asked_for_keep_values():
    """With frozen weights nobody reads the input of the second product."""

    def fn(frozen, x):
        return checkpoint_name(jnp.tanh(x @ frozen), "input") @ frozen

    policy = rp.names(save=["input"])
    everything = rp.report(fn, W, X, policy=policy).residuals
    of_x = rp.report(lambda f, x: jnp.exp(x) @ f, W, X, policy="none", wrt=[1])
    of_w = rp.report(lambda f, x: jnp.exp(x) @ f, W, X, policy="none", wrt=[0])
    assert everything.device_bytes == 96
    assert of_x.residuals.device_bytes == 96  # exp's own derivative
    assert of_w.residuals.device_bytes == 96  # the product's input
    linear = rp.report(lambda f, x: (x * 2) @ f, W, X, policy="none", wrt=[1])
    assert linear.residuals.device_bytes == 0


def test_tokens_can_be_given():
    """Where the result's leading axes are not the tokens."""
    found = rp.report(block, W, X, policy="minimal", tokens=3)
    assert "32 B a token" in str(found)


def test_a_block_without_results_or_derivatives():
    """There is nothing to keep, and nothing to divide by."""
    x = jax.ShapeDtypeStruct((3,), jnp.int32)
    for fn in (lambda x: None, lambda x: x + 1):
        assert rp.report(fn, x, policy="none").residuals.rows == ()
        assert "0 B on the device" in str(rp.report(fn, x, policy="full"))


# --- costs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "args", "wanted"),
    [
        (lambda a, b: a @ b, (jnp.ones((3, 4)), jnp.ones((4, 5))), 2 * 3 * 4 * 5),
        (
            lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
            (jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))),
            2 * 2 * 3 * 4 * 5,
        ),
        (lambda a: jnp.sin(a).reshape(-1), (jnp.ones((3, 4)),), 12),
        (lambda a: a.sum(), (jnp.ones((3, 4)),), 12),
        (
            lambda a: jax.lax.scan(lambda c, x: (c * x, None), a, jnp.ones((5, 3)))[0],
            (jnp.ones(3),),
            15,
        ),
        (
            lambda a: jax.lax.cond(a.sum() > 0, jnp.sin, lambda a: a, a),
            (jnp.ones(7),),
            7 + 7 + 1,
        ),
        (
            lambda a, k: jax.lax.conv_general_dilated(a, k, (1, 1), "SAME"),
            (jnp.ones((1, 2, 8, 8)), jnp.ones((5, 2, 3, 3))),
            2 * 5 * 8 * 8 * 2 * 9,
        ),
        (
            lambda a, b: jax.lax.ragged_dot(a, b, jnp.array([2, 4])),
            (jnp.ones((6, 4)), jnp.ones((2, 4, 5))),
            2 * 6 * 4 * 5,
        ),
    ],
)
def test_operations_are_counted_as_xla_counts(fn, args, wanted):
    """By hand, for each kind of equation that costs something."""
    closed = jax.make_jaxpr(fn)(*args)
    found = sum(costs.flops(equation) for equation in closed.jaxpr.eqns)
    assert abs(found - wanted) <= 1  # a comparison more or less


# --- traps ----------------------------------------------------------------------------


def test_a_name_that_does_not_exist():
    """Jax recomputes everything."""
    policy = rp.names(save=["hiden", "result"])
    assert bytes_kept(jax.checkpoint(block, policy=policy.jax_policy()), W, X)[0] <= 96
    found = rp.lint(block, W, X, policy=policy)
    assert [one.kind for one in found] == ["unknown-name", "unused-name"]
    assert "'hiden'" in found[0].message
    assert "hidden" in found[0].instead


def test_a_preset_of_which_the_block_has_no_name():
    """As above: not one of many, but none."""
    (found,) = rp.lint(block, W, X, policy=rp.preset("save_qkv_proj"))
    assert found.kind == "unknown-name"
    assert rp.report(block, W, X, policy="save_qkv_proj").residuals.rows == ()


def test_a_name_that_nobody_reads():
    """The block's result: with and without it the program is the same."""
    policy = rp.names(save=["result"])
    assert bytes_kept(jax.checkpoint(block, policy=policy.jax_policy()), W, X) == (0, 0)
    assert kinds(block, W, X, policy=policy) == ["unused-name"]


@pytest.mark.parametrize(
    "act",
    [
        *(jnp.exp, jnp.tanh, jax.nn.sigmoid, jax.nn.silu, jax.nn.gelu),
        *(jax.nn.relu, jax.nn.softmax, jnp.sqrt),
    ],
    ids=lambda act: getattr(act, "__name__", "act"),
)
def test_a_name_after_an_activation(act):
    """Kept, and the product before it is done again: named in vain."""

    def fn(w, x):
        return checkpoint_name(act(x @ w), "active") @ w

    policy = rp.names(save=["active"])
    alone = jax.checkpoint(fn, policy=policy.jax_policy())
    args = jnp.eye(4), jnp.ones((2, 3, 4))
    again = in_gradient(alone, "dot_general", *args)
    assert again == in_gradient(jax.checkpoint(fn), "dot_general", *args)
    # The others read their own input: nothing is wrong with the name, it is not enough.
    reads_result = act in (jnp.exp, jnp.tanh, jax.nn.sigmoid, jnp.sqrt)
    wanted = ["kept-and-computed"] if reads_result else []
    assert kinds(fn, W, X, policy=policy) == wanted


def test_a_name_outside_a_kernel():
    """The kernel runs twice and its result is kept twice."""

    def fn(x):
        return checkpoint_name(kernel(x), "summed").sum() ** 2

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert kinds(fn, x, policy=rp.names(save=["summed"])) == ["kept-and-computed"]


def test_a_name_after_a_compiled_kernel():
    """Rearranged first: still the kernel's own result is what its backward reads."""

    def fn(q, k):
        out, _ = test_remat_applying.fake_attention(q, k)
        return jnp.sin(checkpoint_name(out.reshape(2, -1), "context"))

    q = jax.ShapeDtypeStruct((2, 2, 2), jnp.float32)
    (found,) = rp.lint(fn, q, q, policy=rp.names(save=["context"]))
    assert found.kind == "kept-and-computed"
    assert "a kernel" in found.message


def test_a_name_in_a_rule_that_calls_itself():
    """No policy of jax sees it."""
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    found = kinds(test_remat_applying.calls_itself, x, policy=rp.names(save=["inside"]))
    assert "hidden-name" in found


def test_a_value_with_two_names():
    """Two copies, if both are kept."""

    def fn(x):
        return jnp.sin(checkpoint_name(checkpoint_name(x * 2, "one"), "two"))

    policy = rp.names(save=["one", "two"])
    alone = jax.checkpoint(fn, policy=policy.jax_policy())
    assert "named-twice" in kinds(fn, X, policy=policy)
    assert bytes_kept(alone, X)[0] >= 96


def test_a_use_without_the_name():
    """The product is done again for it."""

    def fn(w, x):
        y = x @ w
        early = jnp.sin(y)
        return early * jnp.cos(checkpoint_name(y, "product"))

    policy = rp.names(save=["product"])
    alone = jax.checkpoint(fn, policy=policy.jax_policy())
    args = jnp.eye(4), jnp.ones((2, 3, 4))
    assert in_gradient(alone, "dot_general", *args) == 3
    assert in_gradient(rp.remat(fn, policy), "dot_general", *args) == 2
    assert kinds(fn, W, X, policy=policy) == ["kept-and-computed"]


def test_prevent_cse_outside_of_a_loop():
    """XLA sees that it computes twice; in a loop it cannot."""
    outside = jax.checkpoint(block, prevent_cse=False)
    assert kinds(outside, W, X) == ["undone-by-cse"]
    assert kinds(jax.checkpoint(block), W, X) == []

    def layers(w, x, length):
        stack = jnp.stack([w] * length)
        return jax.lax.scan(lambda x, w: (outside(w, x), None), x, stack)[0]

    assert kinds(lambda w, x: layers(w, x, 3), W, X) == []
    assert kinds(lambda w, x: layers(w, x, 1), W, X) == ["undone-by-cse"]
    assert kinds(rp.remat(block, "minimal"), W, X) == []


def test_products_with_batch_axes_alone():
    """Under vmap `dots_with_no_batch_dims_saveable` keeps nothing."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    kept = jax.checkpoint(lambda w, x: jnp.sin(x @ w), policy=policy)
    over = jax.vmap(kept, in_axes=(0, 0))
    stack = jax.ShapeDtypeStruct((5, 4, 4), jnp.float32)
    many = jax.ShapeDtypeStruct((5, 2, 4), jnp.float32)
    assert bytes_kept(kept, W, X)[0] > 0
    assert bytes_kept(over, stack, many) == (0, 0)
    assert kinds(kept, W, X) == []
    assert kinds(over, stack, many) == ["all-products-batched"]


def test_save_anything_except():
    """It keeps what it says that it does not."""
    policy = jax.checkpoint_policies.save_anything_except_these_names("hidden")
    kept = jax.checkpoint(block, policy=policy)
    assert kinds(kept, W, X) == ["keeps-everything"]


def test_remat_scan_of_one_axis():
    """Flax's nested scan needs two; with one nothing is recomputed."""

    def model(lengths):
        return nn.remat_scan(nn.Dense, lengths=lengths)(4)

    x = jnp.ones((3, 4))
    for lengths, wanted in (((4,), ["remat-scan-of-one-axis"]), ((2, 2), [])):
        params = model(lengths).init(jax.random.key(0), x)
        found = kinds(model(lengths).apply, params, x)
        assert [kind for kind in found if kind != "nested-remat"] == wanted


def test_offloading_a_block_s_output():
    """In a scan it is the next layer's input, and stays."""

    def fn(w, x):
        return checkpoint_name(x + jnp.sin(x @ w), "result")

    assert "offloaded-output" in kinds(fn, W, X, policy=rp.names(offload=["result"]))
    kept = bytes_kept(rp.remat(fn, "layer_input_offloaded"), W, X)
    assert kept == (0, 96)


def test_remat_inside_of_remat():
    """Of two policies the outer one counts."""

    def fn(w, x):
        return jax.checkpoint(block)(w, x) @ w

    assert kinds(jax.checkpoint(fn), W, X) == ["nested-remat"]
    assert kinds(fn, W, X) == []


def test_a_policy_that_is_a_function():
    """Jax's new remat recomputes everything; on 0.10 it does not even call it."""

    def policy(primitive, *_, **__):
        return primitive.name == "dot_general"

    kept = jax.checkpoint(block, policy=policy)
    assert kinds(kept, W, X) == ["callable-policy"]
    assert bytes_kept(kept, W, X)[0] > 0
    with mode("remat3"):
        if jax.__version_info__ < (0, 11):
            assert bytes_kept(jax.checkpoint(block, policy=policy), W, X) == (0, 0)
        assert kinds(jax.checkpoint(block, policy=policy), W, X) == ["callable-policy"]


def test_none_means_two_things():
    """Keep everything, recompute everything: one has to say which."""
    with pytest.raises(rp.InvalidInputError, match="None is no policy"):
        rp.report(block, W, X, policy=None)


def test_traps_inside_of_a_step_are_found():
    """In the middle of loops, branches and compiled functions."""

    @jax.jit
    def step(w, x):
        return jax.lax.cond(
            x.sum() > 0,
            lambda: jax.grad(
                lambda w: jax.checkpoint(block, prevent_cse=False)(w, x).sum()
            )(w),
            lambda: w,
        )

    found = rp.lint(step, W, X)
    assert found
    assert {one.kind for one in found} == {"undone-by-cse"}
    assert __file__ in found[0].about
