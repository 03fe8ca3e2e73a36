"""What the tests of remat_policies share: modes of jax, blocks, what jax itself keeps.

Does not belong here: judging.
"""

import contextlib
from collections import Counter

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

MODES = ("remat", "remat3")
"""jax's implementation of `jax.checkpoint`, and the one that is to replace it."""


UNOPTIMISED = {"xla_backend_optimization_level": 0}
"""Options of XLA: compiling takes most of these tests' time, and this a fifth of it."""
if jax.__version_info__ < (0, 11):  # later versions know no other way to fuse
    UNOPTIMISED["xla_cpu_use_fusion_emitters"] = False


def fast(function):
    """Like `jax.jit`, but compiled in a hurry."""
    return jax.jit(function, compiler_options=UNOPTIMISED)


@contextlib.contextmanager
def mode(name):
    """Jax as if it had been started with `JAX_REMAT3` set, or not."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", name == "remat3")
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


def bytes_kept(fn, *args):
    """(device, host) bytes that jax keeps between the passes, arguments left out."""
    closed = jax.make_jaxpr(lambda *args: jax.vjp(fn, *args))(*args)
    results = len(jax.tree.leaves(jax.eval_shape(fn, *args)))
    arguments = {*closed.jaxpr.invars, *closed.jaxpr.constvars}
    kept = {
        var
        for var in closed.jaxpr.outvars[results:]
        if not isinstance(var, jex.Literal) and var not in arguments
    }
    totals = Counter()
    for var in kept:
        host = "host" in str(var.aval.memory_space).lower()
        totals[host] += var.aval.size * var.aval.dtype.itemsize
    return totals[False], totals[True]


def count(jaxpr, primitive):
    """How often a primitive stands in a program, its inner programs included.

    Not where nobody reads what it makes: jax leaves a dead Pallas kernel in, XLA not.
    """
    found, whole = 0, getattr(jaxpr, "jaxpr", jaxpr)
    read = {id(var) for equation in whole.eqns for var in equation.invars}
    read |= {id(var) for var in whole.outvars}
    for equation in whole.eqns:
        alive = any(id(var) in read for var in equation.outvars)
        found += equation.primitive.name == primitive and alive
        params = dict(equation.params)
        inner = params.pop("_prim", None)
        if inner is not None and hasattr(inner, "jaxpr"):
            params["jaxpr"] = inner.jaxpr
        for value in params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
                    found += count(one, primitive)
    return found


def in_gradient(fn, primitive, *args):
    """How often a primitive stands in the gradient by the first argument."""

    def loss(*args):
        results = jax.tree.leaves(fn(*args))
        return sum(jnp.sum(one**2) for one in results)

    return count(jax.make_jaxpr(jax.grad(loss))(*args), primitive)


@jax.custom_vjp
def kernel(x):
    """Stands for an attention kernel: its backward reads its result and one more."""
    return jnp.cumsum(jnp.exp(x))


def _forward(x):
    y = jnp.cumsum(jnp.exp(x))
    return y, (x, y, jnp.sin(x))


def _backward(residuals, change):
    x, y, extra = residuals
    back = jax.lax.cumsum(change, reverse=True) * jnp.exp(x)
    return (back + 0 * y * extra,)


kernel.defvjp(_forward, _backward)


def block(params, x):
    """Of everything a little: products, activations, a loop, a kernel, indices."""
    h = checkpoint_name(x @ params["in"], "hidden")
    h = checkpoint_name(jnp.tanh(h), "active")
    h = jax.nn.silu(h) * jax.nn.gelu(h)

    def body(carry, scale):
        carry = jnp.tanh(carry * scale)
        return carry, checkpoint_name(carry.mean(), "means")

    h, means = jax.lax.scan(body, h, jnp.arange(3.0) + h.mean())
    h = checkpoint_name(jax.nn.softmax(h), "weights") @ params["out"]
    h = h[jnp.array([1, 0, 1])] + params["frozen"] * h[:3] ** 2
    return checkpoint_name(kernel(h.ravel()), "summed") + means.sum()


def params_of_block():
    """Arguments of `block`."""
    one, two, three = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(one, (8, 6)),
        "out": jax.random.normal(two, (6, 4)),
        "frozen": jnp.linspace(0.5, 1, 4),
    }
    return params, jax.random.normal(three, (5, 8))
