"""What an equation costs to run, in floating-point operations.

Counted as XLA's cost analysis counts: two for each multiply-add of a matrix product,
one for each element of arithmetic, none for moving data. XLA counts nothing for a
compiled kernel; here it counts what the kernel says of itself or, for attention, what
its shapes and its mask say. Does not belong here: what is run.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from remat_policies import _compat
from remat_policies.program import Program, Step

_MOVES = frozenset(
    {
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "device_put",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "iota",
        "optimization_barrier",
        "pad",
        "reduce_precision",
        "reshape",
        "rev",
        "select_n",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)
"""Primitives that compute nothing."""


def step_flops(program: Program, step: Step) -> float:
    """Operations of one step; of attention only those that its mask leaves."""
    if step.kind == "kernel":
        constants = [program.constants.get(value) for value in step.inputs]
        estimate = _kernel_flops(step.equation, constants)
        if estimate is not None:
            return estimate
    return flops(step.equation)


def flops(equation: _compat.Equation) -> float:
    """Operations of one equation; of a loop, of all its rounds.

    A `while` loop counts one round, because nobody knows how many there will be.
    """
    name = equation.primitive.name
    if name == "dot_general":
        return _product_flops(equation)
    if name.startswith("ragged_dot"):
        # Each row meets one group's matrix: the work of one product of that depth.
        rows, depth = equation.invars[0].aval.shape[-2:]
        return float(2 * rows * depth * equation.outvars[0].aval.shape[-1])
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    if name == "cond":
        branches = equation.params["branches"]
        return max(_program_flops(_compat.opened(one)[0]) for one in branches)
    if name in _MOVES:
        return 0.0
    estimate = _kernel_flops(equation)
    if estimate is not None:
        return estimate
    inner = list(_compat.inner_jaxprs(equation))
    if inner and not name.startswith("reduce"):
        rounds = equation.params["length"] if name == "scan" else 1
        devices = _shard_count(equation)
        return float(rounds * devices * sum(_program_flops(one) for one in inner))
    if name.startswith(("reduce", "arg", "cum")):
        return float(sum(var.aval.size for var in equation.invars))
    return float(sum(_size(var) for var in equation.outvars))


def _program_flops(jaxpr: Any) -> float:
    return math.fsum(flops(equation) for equation in jaxpr.eqns)


def _size(var: Any) -> int:
    return int(getattr(var.aval, "size", 0))


def _product_flops(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval
    depth = math.prod(left.shape[axis] for axis in contracted)
    return float(2 * equation.outvars[0].aval.size * depth)


def _convolution_flops(equation: Any) -> float:
    kernel = equation.invars[1].aval
    features = equation.params["dimension_numbers"].rhs_spec[0]
    rounds = kernel.size / kernel.shape[features]
    return float(2 * equation.outvars[0].aval.size * rounds)


def _shard_count(equation: Any) -> int:
    """How many devices run the body of a `shard_map`."""
    if equation.primitive.name != "shard_map":
        return 1
    mesh = equation.params["mesh"]
    manual = equation.params.get("newly_manual_axes", mesh.axis_names)
    return math.prod(size for axis, size in mesh.shape.items() if axis in manual)


def _kernel_flops(equation: Any, constants: Sequence[Any] = ()) -> float | None:
    """Of a compiled kernel; None for any other equation."""
    if equation.primitive.name == "pallas_call":
        stated = equation.params.get("cost_estimate")
        if stated is not None and stated.flops:
            return float(stated.flops)
        return _attention_flops(equation, _splash_share(equation, constants))
    if equation.primitive.name == "dot_product_attention_fwd_wrapper":
        return _attention_flops(equation, _cudnn_share(equation))
    return None


def _attention_flops(equation: Any, share: float) -> float | None:
    """As if the first two large operands were queries and keys.

    Two products, over the share of all pairs that the mask leaves.
    """
    large = [
        var.aval
        for var in equation.invars
        if len(var.aval.shape) >= 3 and jnp.issubdtype(var.aval.dtype, jnp.inexact)
    ]
    if len(large) < 2:
        return None
    query, key = large[0], large[1]
    if equation.primitive.name == "dot_product_attention_fwd_wrapper":
        pairs = query.shape[-3] * key.shape[-3]
        heads = math.prod(query.shape[:-3]) * query.shape[-2]
    else:
        pairs = query.shape[-2] * key.shape[-2]
        heads = math.prod(query.shape[:-2])
    return float(4 * heads * pairs * share * query.shape[-1])


def _splash_share(equation: Any, constants: Sequence[Any]) -> float:
    """Of the blocks of queries and keys, those that splash attention computes.

    Its first operands are tables of int8, one entry for each block: where its data are,
    and whether it is left out (0), masked (1) or whole (2).
    """
    if not str(equation.params.get("name", "")).startswith("splash"):
        return 1.0
    tables = [
        np.asarray(one)
        for one in constants
        if one is not None and jnp.result_type(one) == jnp.int8 and jnp.ndim(one) == 3
    ]
    return float(np.mean(tables[1] != 0)) if len(tables) > 1 else 1.0


def _cudnn_share(equation: Any) -> float:
    """Of the pairs of queries and keys, those that cuDNN's mask leaves."""
    mask = str(equation.params.get("mask_type", ""))
    return 0.5 if "CAUSAL" in mask.upper() else 1.0
