"""The policy that runs least again within a memory budget.

Does not belong here: the problem and its solution (see `solving`), curves and mixtures
of plans (see `frontiers`), compilers (see `fitting`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from remat_policies.budgets import (
    as_device,
    device_named,
    no_room,
    parse_bytes,
    room,
    share_to_leave,
    whole_number,
)
from remat_policies.choosing import choose
from remat_policies.devices import Device
from remat_policies.errors import InvalidInputError
from remat_policies.linearized import Linearized
from remat_policies.plans import Plan
from remat_policies.policies import Policy, names
from remat_policies.residuals import asked_for, split_at
from remat_policies.schedule import needed, schedule
from remat_policies.shards import bytes_on_each, device_count
from remat_policies.solving import Kept, Limits, Problem

WORTH = 8.0
"""FLOPs that a kept byte saves at least. In the time in which an accelerator reads or
writes a byte it does some 250: what saves fewer is quicker to compute again, in one go
with what reads it, than to keep."""

Budget = int | str | Device
"""Bytes for each layer; "12GB" for all layers together; a device, or its name."""


class Asked(TypedDict, total=False):
    """What can be asked of a plan beside its budget: arguments of `plan`."""

    layers: int
    offload: bool
    device: str | Device | None
    host_budget: int | str | None
    candidates: Literal["all", "named"]
    wrt: Sequence[int] | None
    resident_bytes: int | None
    headroom: float
    least_bytes: int
    worth: float


def plan(
    block: Callable[..., Any],
    *avals: Any,
    budget: Budget,
    layers: int = 1,
    offload: bool = False,
    device: str | Device | None = None,
    host_budget: int | str | None = None,
    candidates: Literal["all", "named"] = "all",
    wrt: Sequence[int] | None = None,
    resident_bytes: int | None = None,
    headroom: float = 0.06,
    least_bytes: int = 4096,
    worth: float = WORTH,
    seconds: float = 20.0,
) -> Plan:
    """Choose what a block keeps so that it runs least again within a budget.

    Args:
        block: One layer, a function of pytrees of arrays; nothing of it is computed.
        *avals: Of the block: arrays or `jax.ShapeDtypeStruct`s. If they are sharded,
            bytes are those on each device.
        budget: What layers may keep beside their arguments: bytes for each; a text
            such as "12GB" for all together; or a device, of which an estimate is made
            as in `for_device` (`fit` asks the compiler).
        layers: How many layers there are, one after the other.
        offload: Values may be kept on the host, as many as are copied there while the
            layer computes: a device's host link times a layer's forward time.
        device: Whose rates count for that; None: those of `budget`.
        host_budget: What all layers may take of the host's memory; None: no limit.
        candidates: "all" values, or only those "named" by the block.
        wrt: Positions of the arguments by which the derivative is taken; None: all.
        resident_bytes: With a device: what else is there all the time. None: the
            layers' weights and as much again for gradients.
        headroom: With a device: share of its memory to leave free.
        least_bytes: Smaller values are kept only where the block names them or where
            they are made of larger ones.
        worth: FLOPs that each byte kept has to save. 0 finds the least work whatever
            it keeps, such as tables of cosines and masks.
        seconds: After that the best plan found so far is given, with its gap.

    Returns:
        The plan; its policy is for the same block at the same shapes.

    Raises:
        InvalidInputError: A negative or unreadable budget, no device to offload from.
        OverBudgetError: Even with nothing kept the device has no room.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> found = plan(lambda x, w: jnp.sin(x @ w), w, w, budget=16384)
        >>> found.device_bytes, found.recompute_flops
        (16384, 0.0)
    """
    layer, budget_bytes = asked_of(
        block,
        avals,
        budget,
        layers=layers,
        offload=offload,
        device=device,
        host_budget=host_budget,
        candidates=candidates,
        wrt=wrt,
        resident_bytes=resident_bytes,
        headroom=headroom,
        least_bytes=least_bytes,
        worth=worth,
    )
    return layer.plan(budget_bytes, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A block with what is asked of it: a problem to be solved for any budget.

    Attributes:
        problem: The block's.
        layers: How many there are of it.
        forward_flops: Operations of its forward pass.
        host_bytes: What each may keep on the host.
    """

    problem: Problem
    layers: int
    forward_flops: float
    host_bytes: int

    def plan(self, budget_bytes: int, seconds: float) -> Plan:
        """The best plan for so many bytes of a layer."""
        if not 0 <= seconds < math.inf:
            raise InvalidInputError(f"seconds for the solver are from 0: {seconds}")
        limits = Limits(device_bytes=budget_bytes, host_bytes=self.host_bytes)
        kept, gap = self.problem.best(limits, seconds)
        return self.plan_of(kept, budget_bytes, gap)

    def neighbours(self, budget_bytes: int) -> tuple[Plan, Plan]:
        """The plans on the convex hull below and above so many bytes of a layer."""
        limits = Limits(device_bytes=budget_bytes, host_bytes=self.host_bytes)
        _, *found = self.problem.hull(limits)
        found = [self.problem.unshaped(one) for one in found]
        below, above = (self.plan_of(one, one.device_bytes, 0.0) for one in found)
        return below, above

    @property
    def dearest_byte(self) -> float:
        """A price, in FLOPs, at which no value is worth its bytes."""
        return 2 * self.problem.kept(()).flops

    def at_price(self, price: float) -> Plan:
        """The best plan if each byte of the device costs so many FLOPs more."""
        limits = Limits(device_bytes=math.inf, host_bytes=self.host_bytes)
        kept = self.problem.at_price(price, limits)
        return self.plan_of(kept, kept.device_bytes, 0.0)

    def under(self, policy: Policy) -> Plan:
        """What a policy, of this block and perhaps of others too, means for this."""
        if policy.remat:
            chosen = choose(self.problem.split, policy)
            kept = self.problem.kept(chosen.save, chosen.offload)
        else:
            kept = self.problem.kept(self.problem.made)
        return self.plan_of(kept, kept.device_bytes, 0.0, policy=policy)

    def plan_of(
        self, kept: Kept, budget_bytes: int, gap: float, policy: Policy | None = None
    ) -> Plan:
        """A choice of values as a plan; the policy is one of their names."""
        called = self.problem.names
        return Plan(
            policy=policy
            or names(
                save=[called[value] for value in sorted(kept.save)],
                offload=[called[value] for value in sorted(kept.offload)],
            ),
            layers=self.layers,
            budget_bytes=budget_bytes,
            device_bytes=kept.device_bytes,
            host_bytes=kept.host_bytes,
            recompute_flops=kept.flops,
            forward_flops=self.forward_flops,
            gap=gap,
        )


def asked_of(
    block: Callable[..., Any],
    avals: Sequence[Any],
    budget: Budget,
    *,
    layers: int = 1,
    offload: bool = False,
    device: str | Device | None = None,
    host_budget: int | str | None = None,
    candidates: Literal["all", "named"] = "all",
    wrt: Sequence[int] | None = None,
    resident_bytes: int | None = None,
    headroom: float = 0.06,
    least_bytes: int = 4096,
    worth: float = WORTH,
) -> tuple[Layer, int]:
    """A block as a problem, and its budget in bytes; arguments as for `plan`."""
    if candidates not in ("all", "named"):
        raise InvalidInputError(
            f"candidates are 'all' values or those 'named', not {candidates!r}"
        )
    share_to_leave(headroom)
    layers = whole_number(layers, "layers", least=1)
    rates = None if device is None else as_device(device)
    split = split_at(block, avals, {})
    wanted = needed(split, asked_for(avals, {}, wrt))
    sizes = bytes_on_each(split, avals)
    target = device_named(budget)
    layer = layer_of(
        split,
        wanted,
        layers=layers,
        sizes=sizes,
        device_count=device_count(avals),
        rates=_rates(rates or target) if offload else None,
        host_budget=host_budget,
        named_only=candidates == "named",
        least_bytes=least_bytes,
        worth=worth,
    )
    if target is None:
        return layer, _for_each(budget, layers)
    there_is = room(
        target,
        split,
        layers,
        wanted=wanted,
        resident_bytes=resident_bytes,
        headroom=headroom,
        sizes=sizes,
    )
    budget_bytes = there_is.available_bytes // layers - there_is.input_bytes
    if budget_bytes < 0 and not offload:
        raise no_room(target, there_is, layers)
    return layer, budget_bytes


def layer_of(
    split: Linearized,
    wanted: frozenset[int],
    *,
    layers: int,
    sizes: Mapping[int, int],
    device_count: int,
    rates: Device | None,
    host_budget: int | str | None,
    named_only: bool = False,
    least_bytes: int = 4096,
    worth: float = WORTH,
) -> Layer:
    """A split block as a problem.

    Args:
        split: The block.
        wanted: Numbers of the values that its backward pass reads.
        layers: How many there are of it.
        sizes: Bytes of values on each device, where they are not whole there.
        device_count: Over how many devices a layer's work is spread.
        rates: Whose host link values may be offloaded by; None: they may not.
        host_budget: As for `plan`.
        named_only: Only values that the block names are candidates.
        least_bytes: As for `plan`.
        worth: As for `plan`.
    """
    if not 0 <= worth < math.inf:
        raise InvalidInputError(f"worth is a number of FLOPs from 0: {worth}")
    shapes = {aval.shape for aval in split.program.avals}
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        raise InvalidInputError("a plan is for certain sizes, and some are symbolic")
    limit = None if host_budget is None else _for_each(host_budget, layers)
    forward = schedule(split, (), split.outputs).flops
    host_bytes = 0
    if rates is not None:
        # What the link takes while the layer computes, at its fastest.
        seconds = forward / device_count / rates.matmul_flops_per_second
        host_bytes = int(rates.host_bytes_per_second * seconds)
        host_bytes = host_bytes if limit is None else min(host_bytes, limit)
    problem = Problem(
        split,
        wanted,
        least_bytes=least_bytes,
        worth=worth,
        named_only=named_only,
        offload=rates is not None,
        sizes=sizes,
    )
    return Layer(
        problem=problem, layers=layers, forward_flops=forward, host_bytes=host_bytes
    )


def _rates(device: Device | None) -> Device:
    """The device by whose rates values are offloaded."""
    if device is None:
        raise InvalidInputError(
            "how much can be offloaded depends on the link to the host: give"
            " device='v5e' (or another) with offload=True"
        )
    return device


def _for_each(budget: object, layers: int) -> int:
    """Bytes for each layer: a number is that, a text is for all together."""
    if isinstance(budget, str):
        return parse_bytes(budget) // layers
    return whole_number(budget, "a budget that is no text or device", least=0)
