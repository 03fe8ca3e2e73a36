"""Policies on functions and methods of Flax NNX modules.

Does not belong here: what a policy does.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx
from flax.nnx.transforms import general

from remat_policies.applying import (
    apply,
    as_policy,
    call_by_name,
    check_static,
    split_static,
    static_names,
)
from remat_policies.policies import Policy
from remat_policies.watching import Place

_TAG = "remat_policies"


def remat(
    fn: Callable[..., Any],
    policy: Policy | str,
    *,
    in_scan: bool = False,
    length: int | None = None,
    static: str | Iterable[str] = (),
) -> Callable[..., Any]:
    """`flax.nnx.remat` with a policy of this package.

    Changes to the state of modules among the arguments (dropout streams, batch
    statistics, `sow`) are seen afterwards, as with Flax's own.

    Args:
        fn: A function of modules and arrays, a method, or a module to be called.
        policy: A policy, or the name of a preset.
        in_scan: It is the body of `nnx.scan` with more than one round; see
            `remat_policies.remat`.
        length: Rounds of that loop, if it is known: `fit` counts layers by them.
        static: Names of arguments that are no arrays, such as `train`.

    Raises:
        UnknownNameError: When it is called: the function has no value of that name.
        InvalidInputError: There is no such preset or argument.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> remat(layer, "minimal")(jnp.ones((1, 2))).shape
        (1, 3)
    """
    chosen = as_policy(policy)
    fixed = static_names(static)
    if isinstance(fn, nnx.Module):
        fn = fn.__call__
    owner = getattr(fn, "__self__", None)
    bound = isinstance(owner, nnx.Module)
    unbound = getattr(fn, "__func__") if bound else fn  # noqa: B009
    signature = inspect.signature(unbound)
    check_static(signature, fixed)
    place = Place(in_scan=in_scan, length=length)

    @functools.wraps(unbound)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = (owner, *args) if bound else args
        held, rest = split_static(signature, fixed, given, kwargs)

        by_name = functools.partial(call_by_name, signature, unbound, held)
        merged = general.merge_inputs(by_name, ctxtag=_TAG)

        def checkpointed(*args: Any) -> Any:
            return apply(merged, chosen, args, {}, place)

        through = general.split_inputs(checkpointed, ctxtag=_TAG)
        return nnx.update_context(_TAG)(through)(rest)

    return run


def scan_layers(
    fn: Callable[[Any, Any], Any], policy: Policy | str, *, length: int
) -> Callable[[Any, Any], Any]:
    """From (stacked blocks, first input) to the last output, each with a policy.

    Args:
        fn: From (block, carry) to carry.
        policy: For each block; a policy, or the name of a preset.
        length: How many blocks there are.
    """
    body = remat(fn, policy, in_scan=length > 1, length=length)
    axes = (nnx.StateAxes([(..., 0)]), nnx.Carry)
    return nnx.scan(body, in_axes=axes, out_axes=nnx.Carry)
