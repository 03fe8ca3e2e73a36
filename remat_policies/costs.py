"""What an equation costs to run, in floating-point operations.

Counted as XLA's cost analysis counts: two for each multiply-add of a matrix product,
one for each element of arithmetic, none for moving data. XLA counts nothing for a
compiled kernel; here it counts what the kernel says of itself or, for attention, what
its shapes say. Does not belong here: what is run.
"""

import math
from typing import Any

from remat_policies import _compat

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


def _kernel_flops(equation: Any) -> float | None:
    """Of a compiled kernel; None for any other equation."""
    if equation.primitive.name == "pallas_call":
        stated = equation.params.get("cost_estimate")
        if stated is not None and stated.flops:
            return float(stated.flops)
        return _attention_flops(equation)
    if equation.primitive.name == "dot_product_attention_fwd_wrapper":
        return _attention_flops(equation)
    return None


def _attention_flops(equation: Any) -> float | None:
    """As if the first three large operands were queries, keys and values.

    Two products, over all pairs: a causal kernel that leaves out half of them is
    counted as if it did not.
    """
    large = [var.aval for var in equation.invars if len(var.aval.shape) >= 3]
    if len(large) < 2:
        return None
    query, key = large[0], large[1]
    if equation.primitive.name == "dot_product_attention_fwd_wrapper":
        pairs = query.shape[-3] * key.shape[-3]
        heads = math.prod(query.shape[:-3]) * query.shape[-2]
    else:
        pairs = query.shape[-2] * key.shape[-2]
        heads = math.prod(query.shape[:-2])
    return float(4 * heads * pairs * query.shape[-1])
