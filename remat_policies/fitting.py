"""A plan for a whole training step on a device, checked by the device's compiler.

Reads from top to bottom: compile with nothing kept, see which block runs how often,
solve for what is left of the device, compile, correct, again. Does not belong here:
solving (see `planning`), compiling (see `verify`).
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

from remat_policies.budgets import as_device
from remat_policies.compiled import Compiled
from remat_policies.devices import Device
from remat_policies.errors import InvalidInputError
from remat_policies.fits import Attempt, Fit, policy_of
from remat_policies.frontiers import mixture_of, together
from remat_policies.linearized import Linearized
from remat_policies.planning import Layer, layer_of
from remat_policies.plans import Mixture
from remat_policies.policies import Policy
from remat_policies.program import automatic_names
from remat_policies.shards import bytes_if_spread
from remat_policies.verify import verify
from remat_policies.watching import Use, watched

MakeStep = Callable[[Any], Callable[..., Any]]
"""From a policy (or a tuple of segments, for `scan_layers`) to a training step."""

_numbers = itertools.count(1)

_MORE_THAN_COUNTED = 1.5
"""Bytes taken for each that a plan keeps: above that some layers were not counted."""

_CLOSE = 0.002
"""A share of the device's memory; what is left below that is worth no compilation."""


def fit(
    make_step: MakeStep,
    *avals: Any,
    device: str | Device,
    headroom: float = 0.06,
    layers: int | None = None,
    offload: bool = False,
    host_budget: int | str | None = None,
    mixed: bool = False,
    donate_argnums: int | tuple[int, ...] = (),
    shardings: Any = None,
    attempts: int = 5,
    seconds: float = 20.0,
) -> Fit:
    """Find the policy with which a training step runs least again and fits a device.

    The step is compiled with nothing kept; what it leaves of the device is the budget.
    Then plans are compiled, with less if one does not fit or XLA recomputes values on
    its own to make it fit, with more if there is room, until there is none.

    Args:
        make_step: From a policy to the step, which applies it to its layers by
            `remat`, `scan_layers` or those of `linen` and `nnx`. They are found while
            the step is traced: it is a whole model, optimizer included. Blocks of
            several kinds share one policy.
        *avals: Arguments of the step; see `verify`.
        device: Name of a device, or a variant of one. None has to be here.
        headroom: Share of its memory to leave free. XLA starts to recompute on its own
            at some 5 %.
        layers: How many times the block runs, instead of what was seen: for a loop
            of whose length nothing was said (`remat(..., in_scan=True)` without
            `length`), loops in loops, or a jitted layer that is called again.
        offload: Values may be kept on the host; see `plan`.
        host_budget: As for `plan`.
        mixed: Try two plans as well, each for a part of the layers, so that no memory
            is left over. The step has to give the policy to `scan_layers`.
        donate_argnums: As for `verify`.
        shardings: As for `verify`. Values of a layer are taken to be spread evenly
            over the devices, unless their types say more (explicit meshes).
        attempts: At most so many plans are compiled; with `mixed` as many mixtures.
        seconds: For the solver, for each plan.

    Returns:
        The best plan that fits; one that keeps nothing if no better one does.

    Raises:
        OverBudgetError: Even with nothing kept the step does not fit.
        InvalidInputError: The step applies the policy to no block, or in a loop of
            unknown length, or is the same whatever policy it is given.
        CompilerMissingError: The device's compiler is not installed.

    Example:
        >>> import jax, jax.numpy as jnp, remat_policies as rp
        >>> def make_step(policy):
        ...     def loss(w, x):
        ...         body = lambda x, w: (jnp.sin(x @ w), None)
        ...         return rp.scan_layers(body, x, w, policy)[0].sum()
        ...     return jax.grad(loss)
        >>> w = jax.ShapeDtypeStruct((4, 128, 128), jnp.float32)
        >>> x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        >>> found = fit(make_step, w, x, device="h100")
        >>> found.plan.recompute_flops, found.compiled.fits
        (0.0, True)
    """
    chosen = as_device(device)
    compiled_with = functools.partial(
        _compiled,
        make_step,
        avals,
        target=chosen,
        headroom=headroom,
        donate_argnums=donate_argnums,
        shardings=shardings,
    )
    # As `full`, but equal to no policy before: jax does not trace again what it knows,
    # and what is not traced is not seen.
    nothing = Policy(label=f"nothing kept ({next(_numbers)})")
    with watched(nothing) as uses:
        base = compiled_with(nothing)
    kinds = [
        layer_of(
            split,
            frozenset(split.residuals),
            layers=count,
            sizes=bytes_if_spread(split, base.device_count),
            device_count=base.device_count,
            rates=chosen if offload else None,
            host_budget=host_budget,
        )
        for split, count in _found(uses, layers)
    ]
    if mixed and len(kinds) > 1:
        raise InvalidInputError(
            f"the step has {len(kinds)} kinds of blocks: mixed=True is for one"
        )
    if not offload:
        base.require_fit()
    search = _Search(base, least_bytes=None if offload else 0)
    for solve in (_single, _mixture) if mixed else (_single,):
        search.begin()
        for _ in range(attempts):
            plan = solve(kinds, search.budget_bytes, seconds)
            if search.knows(plan):
                break
            search.take(plan, compiled_with(policy_of(plan)))
            if search.is_done:
                break
    if search.best is None:
        base.require_fit()
    return Fit(
        plan=search.best.plan if search.best else _single(kinds, 0, seconds),
        compiled=search.best.compiled if search.best else base,
        nothing_kept=base,
        attempts=tuple(search.tried),
    )


class _Search:
    """How many bytes the next plan may keep in all layers, from what others took."""

    def __init__(self, base: Compiled, *, least_bytes: int | None) -> None:
        self.base = base
        self._least = least_bytes  # None: the layers' inputs may make room
        self.tried: list[Attempt] = []
        self.best: Attempt | None = None
        self.budget_bytes = base.available_bytes - base.hbm_bytes
        self._per_byte = 1.0
        self._too_many: int | None = None  # bytes of the smallest plan that failed

    def begin(self) -> None:
        """Start with another way to solve, from the best that is known."""
        self._too_many = None
        if self.best is not None:
            self.budget_bytes = self.best.plan.device_bytes + _left(self.best.compiled)

    @property
    def is_done(self) -> bool:
        """Nothing is run again, or what is left is worth no compilation."""
        if self.best is None:
            return False
        more = self.budget_bytes - self.best.plan.device_bytes
        least = _CLOSE * self.base.available_bytes
        return self.best.plan.recompute_flops == 0 or more <= least

    def knows(self, plan: Mixture) -> bool:
        """Whether this plan was compiled before."""
        return any(plan.policies == one.plan.policies for one in self.tried)

    def take(self, plan: Mixture, compiled: Compiled) -> None:
        """Note what a plan took, and set the next budget."""
        hidden, before = compiled.hidden_remats or 0, self.base.hidden_remats or 0
        fits = compiled.fits and hidden <= before
        attempt = Attempt(
            plan=plan,
            predicted_bytes=self._predicted(plan),
            compiled=compiled,
            accepted=fits,
        )
        self.tried.append(attempt)
        self._heed(attempt)
        left = _left(compiled)
        if fits:
            if self.best is None or _again(attempt) < _again(self.best):
                self.best = attempt
        else:
            # Also where it fits, but only because XLA recomputes: a hundredth less.
            left = min(left, -compiled.available_bytes // 100)
            self._too_many = min(plan.device_bytes, self._too_many or plan.device_bytes)
        self.budget_bytes = plan.device_bytes + left
        if self._per_byte > _MORE_THAN_COUNTED:
            room = self.base.available_bytes - self.base.hbm_bytes
            self.budget_bytes = int(room / self._per_byte)
        if self._too_many is not None and self.budget_bytes >= self._too_many:
            least = self.best.plan.device_bytes if self.best else 0
            self.budget_bytes = (least + self._too_many) // 2
        if self._least is not None:
            self.budget_bytes = max(self.budget_bytes, self._least)

    def _heed(self, attempt: Attempt) -> None:
        """See what a kept byte takes in fact: more, if there are more layers."""
        kept = attempt.plan.device_bytes
        taken = attempt.compiled.hbm_bytes - self.base.hbm_bytes
        if kept > 0 and taken == 0 and attempt.compiled.flops == self.base.flops:
            raise InvalidInputError(
                f"the step takes {self.base.hbm_bytes} bytes whatever policy make_step"
                " is given: build the step anew at each call, with that policy"
            )
        if kept > 0:
            self._per_byte = max(taken / kept, 0.0)

    def _predicted(self, plan: Mixture) -> int:
        """What the compiled plan that is most like it takes, and the bytes between.

        What a step takes beside the values that are kept depends a little on which.
        """
        known = [(0, self.base.hbm_bytes)]
        known += [(one.plan.device_bytes, one.compiled.hbm_bytes) for one in self.tried]
        kept, taken = min(known, key=lambda one: abs(plan.device_bytes - one[0]))
        return taken + plan.device_bytes - kept


def _left(compiled: Compiled) -> int:
    return compiled.available_bytes - compiled.hbm_bytes


def _again(attempt: Attempt) -> float:
    return attempt.plan.recompute_flops


def _compiled(
    make_step: MakeStep, avals: tuple[Any, ...], policy: Any, **options: Any
) -> Compiled:
    return verify(make_step(policy), *avals, **options)


def _single(kinds: list[Layer], whole_bytes: int, seconds: float) -> Mixture:
    """The best plan for so many bytes of all layers; one for each kind of block."""
    if len(kinds) > 1:
        return together(kinds, whole_bytes, seconds)
    (layer,) = kinds
    return Mixture(segments=(layer.plan(whole_bytes // layer.layers, seconds),))


def _mixture(kinds: list[Layer], whole_bytes: int, seconds: float) -> Mixture:
    """The best mixture of two plans for so many bytes of all layers."""
    (layer,) = kinds
    return mixture_of(layer, whole_bytes // layer.layers, seconds)


def _found(uses: list[Use], layers: int | None) -> list[tuple[Linearized, int]]:
    """The kinds of blocks that the step applies its policy to, and how often each."""
    if not uses:
        raise InvalidInputError(
            "the step applies the policy that make_step is given to no block: wrap its"
            " layers by remat_policies.remat, scan_layers, linen.remat or nnx.remat"
            " with that policy, and build the step anew at each call"
        )
    kinds: dict[Any, list[Use]] = {}
    for use in uses:
        kinds.setdefault(_kind(use), []).append(use)
    if layers is not None and len(kinds) == 1:
        return [(uses[-1].split, layers)]
    return [(same[-1].split, _count(same)) for same in kinds.values()]


def _count(uses: list[Use]) -> int:
    """How many layers calls of the same block are."""
    # The body of a loop may be traced more than once; each call outside is a layer.
    lengths = [place.length for place in {use.place for use in uses} if place.in_scan]
    if None in lengths:
        raise InvalidInputError(
            "the block stands in a loop of unknown length: say length=40 beside"
            " in_scan=True, or give layers=40 to fit"
        )
    alone = sum(not use.place.in_scan for use in uses)
    return alone + sum(length or 0 for length in lengths)


def _kind(use: Use) -> tuple[Any, ...]:
    """Equal for calls of the same code at the same shapes."""
    program = use.split.program
    return tuple(
        (name, program.avals[value].shape, str(program.avals[value].dtype))
        for value, name in automatic_names(program).items()
    )
