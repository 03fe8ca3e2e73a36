"""Policies on Flax linen modules.

Does not belong here: what a policy does.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import flax.linen as nn
from flax.core import lift

from remat_policies.applying import (
    apply,
    as_policy,
    check_static,
    split_static,
    static_names,
)
from remat_policies.errors import InvalidInputError
from remat_policies.policies import Policy
from remat_policies.watching import Place


def remat(
    target: Any,
    policy: Policy | str,
    *,
    in_scan: bool = False,
    length: int | None = None,
    static: str | Iterable[str] = (),
    methods: Iterable[str] | None = None,
) -> Any:
    """`flax.linen.remat` with a policy of this package.

    Dropout streams, mutable collections, `sow` and `nn.scan` around it work as with
    Flax's own.

    Args:
        target: A Module class, or a function that takes a module first.
        policy: A policy, or the name of a preset.
        in_scan: `nn.scan` with more than one round is put around it; see
            `remat_policies.remat`.
        length: Rounds of that loop, if it is known: `fit` counts layers by them.
        static: Names of arguments that are no arrays, such as `train`. (Flax's own
            counts positions, `self` included.)
        methods: Names of the methods meant; None is `__call__` alone.

    Raises:
        UnknownNameError: When it is called: the module has no value of that name.
        InvalidInputError: There is no such preset, argument or method.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> Block = remat(nn.Dense, "minimal")
        >>> model = Block(features=3)
        >>> params = model.init(jax.random.key(0), jnp.ones((1, 2)))
        >>> model.apply(params, jnp.ones((1, 2))).shape
        (1, 3)
    """
    fixed = static_names(static)
    for name in methods or ():
        if not hasattr(target, name):
            raise InvalidInputError(f"{target} has no method {name!r}")
    return nn.transforms.lift_transform(
        checkpoint,
        target,
        policy=as_policy(policy),
        place=Place(in_scan=in_scan, length=length),
        signature=_signature(target, fixed),
        static=fixed,
        methods=None if methods is None else tuple(methods),
    )


def scan_layers(
    block: Any,
    policy: Policy | str,
    *,
    length: int,
    static: str | Iterable[str] = (),
    variable_axes: Mapping[Any, Any] | None = None,
    split_rngs: Mapping[Any, bool] | None = None,
    **options: Any,
) -> Any:
    """A Module class that runs `length` blocks one after the other, each with a policy.

    Args:
        block: Module class whose `__call__` maps (carry, ...) to (carry, output).
        policy: For each block.
        length: How many.
        static: Names of arguments of the block that are no arrays.
        variable_axes: As for `nn.scan`; parameters are stacked on axis 0 by default.
        split_rngs: As for `nn.scan`; by default each layer has its own streams.
        **options: Others of `nn.scan`.
    """
    return nn.scan(
        remat(block, policy, in_scan=length > 1, length=length, static=static),
        variable_axes={"params": 0} if variable_axes is None else variable_axes,
        split_rngs={True: True} if split_rngs is None else split_rngs,
        length=length,
        **options,
    )


def _signature(target: Any, static: tuple[str, ...]) -> inspect.Signature | None:
    if not static:
        return None
    is_class = inspect.isclass(target)
    whole = inspect.signature(target.__call__ if is_class else target)
    _, *own = whole.parameters.values()  # the module itself is not an argument here
    signature = whole.replace(parameters=own)
    check_static(signature, static)
    return signature


# Flax puts this name before that of the class: modules, and so the paths of parameters,
# are called as with Flax's own.
def checkpoint(
    fn: Any,
    *,
    policy: Policy,
    place: Place,
    signature: inspect.Signature | None,
    static: tuple[str, ...],
) -> Any:
    """Flax's `lift.checkpoint`, with a function that knows its names."""

    def inner(
        scope_fn: Any,
        repack_fn: Any,
        variables: Any,
        rngs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        held: Mapping[str, Any] = {}
        if signature is not None:
            held, kwargs = split_static(signature, static, args, kwargs)
            args = ()

        def pure(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            scope = scope_fn(variables, rngs)
            y = fn(scope, *args, **kwargs, **held)
            return y, repack_fn(scope)

        return apply(pure, policy, (variables, rngs, *args), kwargs, place)

    return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)
