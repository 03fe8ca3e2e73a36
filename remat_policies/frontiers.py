"""Plans for many budgets at once: a curve, and a mixture of two of its points.

Does not belong here: one plan (see `planning`).
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console
from rich.table import Table

from remat_policies.budgets import whole_number
from remat_policies.choosing import has_names
from remat_policies.errors import InvalidInputError
from remat_policies.planning import Asked, Budget, Layer, asked_of
from remat_policies.plans import Mixture, Plan
from remat_policies.policies import any_of
from remat_policies.presets import PRESETS

_ROUNDS = 10
"""So often less is tried, where kinds of blocks share names."""

_HALVINGS = 40
"""After which the price of a byte is known well enough."""

_POINTS = 24
"""Budgets of a curve for which nobody asked for certain ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What is run again for how many bytes: plans, and presets to compare with.

    Printed by `rich`, or `str()` for plain text.

    Attributes:
        plans: One for each budget, from the smallest.
        presets: What a preset keeps and runs again, by name; those that the block has.
    """

    plans: tuple[Plan, ...]
    presets: dict[str, Plan]

    def best_preset(self, budget_bytes: int) -> str | None:
        """The preset within so many bytes that runs least again; None if none is."""
        fitting = {
            name: one.recompute_flops
            for name, one in self.presets.items()
            if one.device_bytes <= budget_bytes and not one.host_bytes
        }
        return min(fitting, key=fitting.__getitem__, default=None)

    def __rich__(self) -> Table:
        table = Table(title="least that is run again within a budget for each layer")
        for heading in ("budget, MB", "kept, MB", "host, MB", "run again"):
            table.add_column(heading, justify="right")
        table.add_column("best preset that fits")
        table.add_column("it runs again", justify="right")
        for one in self.plans:
            name = self.best_preset(one.budget_bytes)
            again = self.presets[name].recompute_flops if name else 0.0
            table.add_row(
                f"{one.budget_bytes / 1e6:.2f}",
                f"{one.device_bytes / 1e6:.2f}",
                f"{one.host_bytes / 1e6:.2f}",
                f"{one.recompute_share:.1%}",
                name or "none",
                f"{again / one.forward_flops:.1%}" if name else "",
            )
        return table

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def to_json(self) -> str:
        """A JSON document of all plans and of what presets take."""
        return json.dumps(
            {
                "plans": [json.loads(one.to_json()) for one in self.plans],
                "presets": {
                    name: {
                        "device_bytes": one.device_bytes,
                        "host_bytes": one.host_bytes,
                        "recompute_flops": one.recompute_flops,
                    }
                    for name, one in self.presets.items()
                },
            },
            indent=1,
        )

    def draw(self, axes: Any) -> None:
        """Draw the curve and the presets on matplotlib axes."""
        forward = self.plans[0].forward_flops or 1.0
        budgets = [one.budget_bytes / 1e6 for one in self.plans]
        again = [100 * one.recompute_share for one in self.plans]
        axes.step(budgets, again, where="post", label="plans")
        points: dict[tuple[float, float], str] = {}
        for name, one in self.presets.items():
            at = (one.device_bytes / 1e6, 100 * one.recompute_flops / forward)
            if at[0] <= budgets[-1] and not one.host_bytes:
                points.setdefault(at, name)  # of those that are the same, the first
        for number, (at, name) in enumerate(sorted(points.items())):
            axes.plot(*at, "o", color="tab:orange")
            above = (4, 4 if number % 2 else 14)  # neighbours are at two heights
            axes.annotate(name, at, above, textcoords="offset points", fontsize=8)
        axes.set_xlabel("kept for each layer, MB")
        axes.set_ylabel("run again, % of a forward pass")
        axes.margins(y=0.12)
        axes.legend()

    def plot(self, path: str | Path) -> Path:
        """Draw it into a file; the format is that of the suffix."""
        # Imported here: matplotlib is an extra, and takes a second to start.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        self.draw(figure.subplots())
        figure.savefig(path, dpi=120)
        return Path(path)


def frontier(
    block: Callable[..., Any],
    *avals: Any,
    budgets: Sequence[int] | None = None,
    seconds: float = 20.0,
    **asked: Unpack[Asked],
) -> Frontier:
    """A plan for each budget: how much less is run again for how many more bytes.

    Args:
        block: As for `plan`.
        *avals: Of the block.
        budgets: Bytes for each layer. None: evenly from nothing to where nothing is
            run again, and those of presets.
        seconds: For each budget.
        **asked: As for `plan`.

    Raises:
        InvalidInputError: As for `plan`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> curve = frontier(lambda x, w: jnp.sin(x @ w), w, w, budgets=[0, 16384])
        >>> [one.recompute_flops > 0 for one in curve.plans]
        [True, False]
    """
    layer, _ = asked_of(block, avals, 0, **asked)
    presets = _presets(layer)
    if budgets is not None:
        budgets = [whole_number(one, "each budget", least=0) for one in budgets]
        if not budgets:
            raise InvalidInputError("there is no budget among `budgets`")
    else:
        least, most = (layer.plan(one, seconds).device_bytes for one in (0, 1 << 62))
        spread = {least + (most - least) * at // _POINTS for at in range(_POINTS + 1)}
        own = {one.device_bytes for one in presets.values() if not one.host_bytes}
        budgets = sorted(spread | {one for one in own if least <= one <= most})
    return Frontier(
        plans=tuple(layer.plan(one, seconds) for one in sorted(budgets)),
        presets=presets,
    )


def mix(
    block: Callable[..., Any],
    *avals: Any,
    budget: Budget,
    seconds: float = 20.0,
    **asked: Unpack[Asked],
) -> Mixture:
    """Two plans for the layers of a scan, so that no budget is left over.

    What a layer keeps comes in steps, so that one plan for all layers leaves up to a
    step for each of them unused. Two plans that are neighbours on the convex hull of
    all, the larger one for as many layers as fit, leave less than one step of one.

    Args:
        block: As for `plan`.
        *avals: Of the block.
        budget: As for `plan`; bytes for each layer mean those on average.
        seconds: For each of a few plans.
        **asked: As for `plan`; `layers` above all.

    Returns:
        Never worse than `plan`; a single segment where one plan is best.

    Raises:
        InvalidInputError: As for `plan`.
        OverBudgetError: As for `plan`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> found = mix(lambda x, w: jnp.sin(x @ w), w, w, budget="50kB", layers=4)
        >>> [one.layers for one in found.segments]
        [1, 3]
    """
    layer, budget_bytes = asked_of(block, avals, budget, **asked)
    return mixture_of(layer, budget_bytes, seconds)


def mixture_of(layer: Layer, budget_bytes: int, seconds: float) -> Mixture:
    """The best of one plan and of a few mixtures of two."""
    layers = layer.layers
    whole = layers * budget_bytes
    found = [Mixture(segments=(layer.plan(budget_bytes, seconds),))]
    below, above = layer.neighbours(budget_bytes)
    step = above.device_bytes - below.device_bytes
    fitting = (whole - layers * below.device_bytes) // step if step else 0
    for many in (fitting, fitting + 1):
        few = layers - many
        if not 0 < many < layers:
            continue
        # What is left over goes to one segment or to the other.
        richer = (whole - few * below.device_bytes) // many
        found.append(_joined((below, few), (layer.plan(richer, seconds), many)))
        if many == fitting:
            rest = (whole - many * above.device_bytes) // few
            found.append(_joined((layer.plan(rest, seconds), few), (above, many)))
    return min(found, key=lambda one: (one.recompute_flops, len(one.segments)))


def together(layers: Sequence[Layer], whole_bytes: int, seconds: float) -> Mixture:
    """Plans for a model of several kinds of blocks, under one policy.

    Each byte has the same price everywhere: that at which the plans of all kinds
    together take what there is. What is left over goes to one kind after the other. A
    name that two kinds have is kept in both.

    Args:
        layers: One for each kind.
        whole_bytes: What all layers of all kinds may keep.
        seconds: For each plan.
    """
    target = whole_bytes
    for _ in range(_ROUNDS):
        found = _at_one_price(layers, target, seconds)
        if found.device_bytes <= whole_bytes:
            return found
        # Names that kinds share keep more than each asked for.
        target -= found.device_bytes - whole_bytes
        target = max(target, min(whole_bytes, 0))
    return _at_one_price(layers, 0, seconds)


def _at_one_price(layers: Sequence[Layer], whole_bytes: int, seconds: float) -> Mixture:
    """The plans at the price at which they take so many bytes; the rest is spent."""
    low, high = 0.0, max(layer.dearest_byte for layer in layers)
    found = [layer.at_price(high) for layer in layers]
    for _ in range(_HALVINGS):
        price = (low + high) / 2
        tried = [layer.at_price(price) for layer in layers]
        if sum(one.layers * one.device_bytes for one in tried) <= whole_bytes:
            found, high = tried, price
        else:
            low = price
    for at, layer in enumerate(layers):
        taken = sum(one.layers * one.device_bytes for one in found)
        own = found[at].device_bytes + (whole_bytes - taken) // layer.layers
        found[at] = layer.plan(own, seconds)
    policy = any_of(*(one.policy for one in found)).relaxed()
    return Mixture(
        segments=tuple(
            dataclasses.replace(
                layer.under(policy), budget_bytes=one.budget_bytes, gap=one.gap
            )
            for layer, one in zip(layers, found, strict=True)
        )
    )


def _joined(*segments: tuple[Plan, int]) -> Mixture:
    """Plans, each for its number of layers."""
    return Mixture(
        segments=tuple(
            dataclasses.replace(plan, layers=count) for plan, count in segments
        )
    )


def _presets(layer: Layer) -> dict[str, Plan]:
    """What each preset takes of a layer, where it has the preset's names."""
    return {
        name: layer.under(preset)
        for name, preset in PRESETS.items()
        if has_names(layer.problem.split, preset)
    }
