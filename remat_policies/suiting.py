"""Which preset suits a device and a block, and why.

An estimate, made without compiling: `verify` tells the truth. Does not belong here:
policies other than presets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat_policies.budgets import (
    as_device,
    gigabytes,
    no_room,
    room,
    share_to_leave,
    whole_number,
)
from remat_policies.choosing import has_names
from remat_policies.devices import Device
from remat_policies.policies import Policy
from remat_policies.presets import PRESETS
from remat_policies.residuals import Residuals, residuals_of, split_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The preset that suits.

    Attributes:
        policy: The preset.
        reason: Why it, in words.
        kept_bytes: What all layers keep on the device, their inputs among them.
        available_bytes: What the device has for that.
        host_bytes: What all layers keep in the host's memory.
        recompute_flops: What a layer's backward pass runs again.
    """

    policy: Policy
    reason: str
    kept_bytes: int
    available_bytes: int
    host_bytes: int
    recompute_flops: float


def for_device(
    target: str | Device,
    block: Callable[..., Any],
    *avals: Any,
    layers: int,
    resident_bytes: int | None = None,
    headroom: float = 0.06,
) -> Choice:
    """Choose the preset that runs least again among those that fit.

    Beside what the layers keep, a device holds what is resident, and one layer's
    values without any policy while its backward pass runs. A preset that offloads
    counts only where a layer's bytes are copied to the host while that layer computes.

    Args:
        target: Name of a device, or a variant of one.
        block: One layer: a function of pytrees of arrays.
        *avals: Of the block, on one device: arrays or `jax.ShapeDtypeStruct`s.
        layers: How many there are, one after the other.
        resident_bytes: What else is there all the time: weights, gradients, optimizer
            state. None: the layers' weights and as much again for gradients.
        headroom: Share of the device's memory to leave free; see `verify`.

    Returns:
        The preset and the reason. For a plan between presets see `plan`.

    Raises:
        InvalidInputError: No such device, or fewer than one layer.
        OverBudgetError: Even `full` does not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
        >>> choice = for_device("v5e", lambda w, x: jnp.tanh(x @ w), w, w, layers=2)
        >>> choice.policy
        none
    """
    chosen = as_device(target)
    layers = whole_number(layers, "layers", least=1)
    share_to_leave(headroom)
    split = split_at(block, avals, {})
    there_is = room(
        chosen,
        split,
        layers,
        wanted=frozenset(split.residuals),
        resident_bytes=resident_bytes,
        headroom=headroom,
    )
    input_bytes, available = there_is.input_bytes, there_is.available_bytes
    there = {
        name: residuals_of(split, preset, frozenset(split.residuals), tokens=1)
        for name, preset in PRESETS.items()
        if has_names(split, preset)
    }
    whole = there["none"]
    layer_seconds = whole.forward_flops / chosen.matmul_flops_per_second
    hidden_bytes = int(chosen.host_bytes_per_second * layer_seconds)
    fitting = [
        name
        for name, one in there.items()
        if layers * (one.device_bytes + input_bytes) <= available
        and one.host_bytes <= hidden_bytes
    ]
    if not fitting:
        raise no_room(chosen, there_is, layers)
    order = list(PRESETS)
    best = min(
        fitting, key=lambda name: (there[name].recompute_flops, -order.index(name))
    )
    return Choice(
        policy=PRESETS[best],
        reason=_reason(chosen, there, best, layers, input_bytes, available),
        kept_bytes=layers * (there[best].device_bytes + input_bytes),
        available_bytes=available,
        host_bytes=layers * there[best].host_bytes,
        recompute_flops=there[best].recompute_flops,
    )


def _reason(
    chosen: Device,
    there: dict[str, Residuals],
    best: str,
    layers: int,
    input_bytes: int,
    available: int,
) -> str:
    """Why this one: what it takes, what there is, what the next better one takes."""

    def kept(name: str) -> int:
        return layers * (there[name].device_bytes + input_bytes)

    one = there[best]
    share = one.recompute_flops / one.forward_flops if one.forward_flops else 0.0
    words = (
        f"{best} keeps {gigabytes(kept(best))} of the {gigabytes(available)} that a"
        f" {chosen.name} has left for {layers} layers, and runs {share:.0%} of a"
        " forward pass again"
    )
    if one.host_bytes:
        words += (
            f"; {gigabytes(layers * one.host_bytes)} go to the host, a layer's share"
            " while that layer computes"
        )
    better = [
        name
        for name, other in there.items()
        if other.recompute_flops < one.recompute_flops and not other.host_bytes
    ]
    if better:
        least = min(better, key=kept)
        words += (
            f"; {least}, the next that runs less again, would keep"
            f" {gigabytes(kept(least))}"
        )
    return words + "."
