"""A policy applied to a function of arrays, and to a scan over layers.

Does not belong here: Flax.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from remat_policies import _compat
from remat_policies.choosing import choose
from remat_policies.errors import InvalidInputError
from remat_policies.linearized import linearize
from remat_policies.naming import named
from remat_policies.policies import Policy, lowered
from remat_policies.presets import full, preset
from remat_policies.watching import Place, saw

Function = Callable[..., Any]
Body = Callable[[Any, Any], tuple[Any, Any]]
Segments = list[tuple[Policy | str, int]] | tuple[tuple[Policy | str, int], ...]


def remat(
    fn: Function,
    policy: Policy | str,
    *,
    in_scan: bool = False,
    length: int | None = None,
    static: str | Iterable[str] = (),
) -> Function:
    """The same function, whose backward pass keeps what the policy says.

    Values and gradients are those of `fn`. The names of the policy may stand where they
    are useless to `jax.checkpoint`: on the result of an activation function or of an
    attention kernel; here they are kept and not computed again.

    Args:
        fn: Of pytrees of arrays.
        policy: A policy, or the name of a preset.
        in_scan: It is the body of a loop of more than one round (`jax.lax.scan`). XLA
            then cannot undo the policy by itself, and need not be kept from it, which
            costs memory. Outside a loop it would, in silence.
        length: Rounds of that loop, if it is known: `fit` counts layers by them.
        static: Names of arguments that are no arrays, as for `jax.jit`.

    Raises:
        UnknownNameError: When it is called: the function has no value of that name.
        InvalidInputError: There is no such preset, or no such argument.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> block = remat(lambda w, x: jnp.tanh(x @ w), "minimal")
        >>> w = jnp.eye(2)
        >>> jax.grad(lambda w: block(w, w).sum())(w).shape
        (2, 2)
    """
    chosen = as_policy(policy)
    if inspect.isclass(fn):
        raise InvalidInputError(
            f"{fn.__name__} is a class: for a Flax module take"
            " remat_policies.linen.remat or remat_policies.nnx.remat"
        )
    fixed = static_names(static)
    signature = inspect.signature(fn) if fixed else None
    place = Place(in_scan=in_scan, length=length)
    if signature is not None:
        check_static(signature, fixed)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if signature is None:
            return apply(fn, chosen, args, kwargs, place)
        held, rest = split_static(signature, fixed, args, kwargs)
        whole = functools.partial(call_by_name, signature, fn, held)
        return apply(whole, chosen, (rest,), {}, place)

    return run


def scan_layers(
    body: Body,
    init: Any,
    layers: Any,
    policy: Policy | str | Segments,
    *,
    every: int | Literal["sqrt"] = 1,
) -> tuple[Any, Any]:
    """`jax.lax.scan` over layers, each with a policy.

    With segments of k layers only each k-th layer's input is kept; the backward pass
    runs a segment forward once more, with the policy, and keeps it for that long. With
    k = sqrt(layers) memory grows with the root of their number, for one more forward
    pass (Chen et al. 2016, arXiv 1604.06174).

    Args:
        body: From (carry, one layer) to (carry, output), as for `jax.lax.scan`.
        init: The first layer's input.
        layers: Pytree of arrays with a leading axis of layers.
        policy: For each layer; a policy, or the name of a preset. Or several, each with
            the number of layers that it is for, such as `Mixture.policies`.
        every: Layers in a segment; `"sqrt"` is the root of their number.

    Returns:
        The last carry, and all outputs stacked.

    Raises:
        InvalidInputError: No layers, layers of different number, `every` < 1, or
            policies for another number of layers.
        UnknownNameError: As `remat`.

    Example:
        >>> import jax.numpy as jnp
        >>> body = lambda x, w: (jnp.tanh(x @ w), None)
        >>> out, _ = scan_layers(body, jnp.ones((1, 2)), jnp.ones((4, 2, 2)), "full")
        >>> out.shape
        (1, 2)
    """
    count = _layer_count(layers)
    if isinstance(policy, (list, tuple)):
        return _scan_segments(body, init, layers, policy, count, every)
    size = math.isqrt(count - 1) + 1 if every == "sqrt" else every
    if not isinstance(size, int) or size < 1:
        raise InvalidInputError(
            f"a segment has at least one layer, or 'sqrt': {every!r}"
        )
    size = min(size, count)
    rounds = count if size == 1 else size
    inner = remat(body, policy, in_scan=rounds > 1, length=rounds)
    if size == 1:
        return jax.lax.scan(inner, init, layers)
    segments, rest = divmod(count, size)

    def segment(carry: Any, some: Any) -> tuple[Any, Any]:
        return jax.lax.scan(inner, carry, some)

    # Plain jax.checkpoint: what the policy keeps is kept inside of a segment only.
    whole = jax.tree.map(
        lambda leaf: leaf[: segments * size].reshape(segments, size, *leaf.shape[1:]),
        layers,
    )
    loop = jax.checkpoint(segment, policy=lowered(full), prevent_cse=segments == 1)
    carry, outputs = jax.lax.scan(loop, init, whole)
    outputs = jax.tree.map(
        lambda leaf: leaf.reshape(segments * size, *leaf.shape[2:]), outputs
    )
    if not rest:
        return carry, outputs
    last = jax.tree.map(lambda leaf: leaf[segments * size :], layers)
    carry, more = jax.checkpoint(segment, policy=lowered(full))(carry, last)
    return carry, _joined([outputs, more])


def _scan_segments(
    body: Body,
    init: Any,
    layers: Any,
    policies: Segments,
    count: int,
    every: object,
) -> tuple[Any, Any]:
    """One scan after the other, each over its own layers with its own policy."""
    if not all(isinstance(one, tuple) and len(one) == 2 for one in policies):
        raise InvalidInputError(
            f"several policies are pairs of a policy and its layers: {policies!r}"
        )
    lengths = [length for _, length in policies]
    if (
        not all(type(length) is int for length in lengths)
        or every != 1
        or sum(lengths) != count
        or min(lengths, default=0) < 1
    ):
        raise InvalidInputError(
            f"policies are for {lengths} layers, each at least one, of {count}; `every`"
            " is for a single policy"
        )
    carry, outputs, start = init, [], 0
    for policy, length in policies:
        span = slice(start, start + length)
        some = jax.tree.map(lambda leaf, span=span: leaf[span], layers)
        carry, more = scan_layers(body, carry, some, policy)
        outputs.append(more)
        start += length
    return carry, _joined(outputs)


def _joined(outputs: Sequence[Any]) -> Any:
    """Stacked outputs of scans that follow each other, as of one."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def apply(
    fn: Function,
    policy: Policy,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    place: Place,
) -> Any:
    """Call a function of pytrees of arrays under a policy."""
    if not policy.remat:
        return fn(*args, **kwargs)
    leaves, in_tree = jtu.tree_flatten((args, dict(kwargs)))
    flat = [jnp.asarray(leaf) for leaf in leaves]
    with _compat.settled_remat():
        split = linearize(fn, flat, in_tree)
        saw(split, policy, place)
        kept = choose(split, policy)
        checkpointed = jax.checkpoint(
            named(split, kept.marks),
            policy=lowered(kept.policy),
            prevent_cse=not place.in_scan,
        )
        return jtu.tree_unflatten(split.out_tree, checkpointed(*split.outside, *flat))


def as_policy(policy: object) -> Policy:
    """A policy, or the preset of that name.

    Raises:
        InvalidInputError: It is neither; what to write instead of jax's own.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return preset(policy)
    if policy is None:
        raise InvalidInputError(
            "None is no policy: jax takes it for `full` (recompute everything), others"
            " for `none` (keep everything); write which one"
        )
    raise InvalidInputError(
        f"no policy of this package: {policy!r}. jax's new remat never calls a callable"
        " on some versions and recomputes everything: write names(save=[...]), the name"
        " of a preset, `.policy` of a plan or, for scan_layers, `.policies` of a"
        " mixture"
    )


def static_names(static: object) -> tuple[str, ...]:
    """One name or several, as a tuple.

    Raises:
        InvalidInputError: It is something else, such as a position.
    """
    names = (static,) if isinstance(static, str) else static
    if not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
        raise InvalidInputError(f"static arguments go by their names: {static!r}")
    return tuple(names)


def check_static(signature: inspect.Signature, static: tuple[str, ...]) -> None:
    """Raise InvalidInputError for a name that is no argument."""
    for name in static:
        if name not in signature.parameters:
            there = ", ".join(signature.parameters)
            raise InvalidInputError(
                f"no argument is called {name!r}: there are {there}"
            )


def split_static(
    signature: inspect.Signature,
    static: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a call by name: those that are static, and the others."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    rest = dict(bound.arguments)
    return {name: rest.pop(name) for name in static}, rest


def call_by_name(
    signature: inspect.Signature, fn: Function, held: Any, rest: Mapping[str, Any]
) -> Any:
    """Call a function with what `split_static` took apart."""
    bound = signature.bind_partial()
    given = {**held, **rest}
    bound.arguments.update({name: given[name] for name in signature.parameters})
    return fn(*bound.args, **bound.kwargs)


def _layer_count(layers: Any) -> int:
    counts = {leaf.shape[:1] for leaf in jax.tree.leaves(layers)}
    if len(counts) != 1 or counts == {()} or counts == {(0,)}:
        raise InvalidInputError(
            "each array of `layers` has the same leading axis, one entry for each"
            f" layer: found {sorted(counts)}"
        )
    ((count,),) = counts
    return int(count)
