"""A self-test: rematerialised gradients against the function's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from remat_policies.applying import remat
from remat_policies.errors import GradientMismatchError, InvalidInputError
from remat_policies.policies import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheck:
    """What `check_grads` found.

    Attributes:
        identical: All gradients are equal in every bit.
        largest_error: Of the gradients, the largest difference as a share of the
            largest entry of its array; 0 where all are equal.
        leaf: Path of the argument with it; empty where all are equal.
    """

    identical: bool
    largest_error: float
    leaf: str


def check_grads(
    fn: Callable[..., Any],
    policy: Policy | str,
    *args: Any,
    tolerance: float | None = None,
    **kwargs: Any,
) -> GradientCheck:
    """Compare the gradients of a function with and without a policy, on real numbers.

    The gradient is that of the sum of squares of all results, by every array of
    floating-point numbers among the arguments.

    Args:
        fn: Of pytrees of arrays.
        policy: A policy, or the name of a preset.
        *args: Of `fn`, with values.
        tolerance: The largest error accepted. None: that of rounding in the coarsest
            type of the function's arguments, since XLA may order sums otherwise.
        **kwargs: Of `fn`.

    Raises:
        InvalidInputError: No argument or no result has a derivative.
        GradientMismatchError: Gradients differ by more; the message names the worst
            argument.

    Example:
        >>> import jax.numpy as jnp
        >>> check_grads(jnp.tanh, "full", jnp.ones(3)).identical
        True
    """
    leaves, tree = jtu.tree_flatten((args, kwargs))
    flat = [jnp.asarray(leaf) for leaf in leaves]
    moving = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in flat]
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path((args, kwargs))]

    def gradients(fn: Callable[..., Any]) -> Any:
        def loss(changing: list[Any]) -> Any:
            rest = iter(changing)
            whole = [next(rest) if one else leaf for one, leaf in zip(moving, flat)]
            inner_args, inner_kwargs = jtu.tree_unflatten(tree, whole)
            results = jtu.tree_leaves(fn(*inner_args, **inner_kwargs))
            smooth = [one for one in results if jnp.issubdtype(one.dtype, jnp.inexact)]
            if not smooth:
                raise InvalidInputError(
                    "no result is of floating-point numbers: there is no gradient"
                )
            return sum(jnp.sum(jnp.abs(one.astype(jnp.float32)) ** 2) for one in smooth)

        return jax.jit(jax.grad(loss))([leaf for one, leaf in zip(moving, flat) if one])

    if not any(moving):
        raise InvalidInputError("no argument is of floating-point numbers")
    names = [path for one, path in zip(moving, paths) if one]
    pairs = zip(names, gradients(fn), gradients(remat(fn, policy)), strict=True)
    errors = [(_difference(plain, other), name) for name, plain, other in pairs]
    worst, leaf = max(errors, default=(0.0, ""))
    coarsest = max(
        (
            float(jnp.finfo(one.dtype).eps)
            for one in flat
            if jnp.issubdtype(one.dtype, jnp.floating)
        ),
        default=0.0,
    )
    allowed = 32 * coarsest if tolerance is None else tolerance
    if not worst <= allowed:
        raise GradientMismatchError(
            f"the gradient by argument {leaf} differs by {worst:.3g} of its largest"
            f" entry under {policy!r}; {allowed:.3g} is allowed. Is something in the"
            " function different each time that it runs (a random number without a key,"
            " a host callback, state that is changed)?"
        )
    return GradientCheck(
        identical=worst == 0, largest_error=worst, leaf=leaf if worst else ""
    )


def _difference(plain: Any, other: Any) -> float:
    one, two = np.asarray(plain, np.float64), np.asarray(other, np.float64)
    if np.array_equal(one, two, equal_nan=True):
        return 0.0
    return float(np.max(np.abs(one - two)) / (np.max(np.abs(one)) or 1.0))
