"""What `fit` found, as values: a table, words, the policy.

Does not belong here: finding it (see `fitting`).
"""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from remat_policies.compiled import Compiled
from remat_policies.plans import Mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One plan that was compiled.

    Attributes:
        plan: The plan.
        predicted_bytes: What the step was expected to need of a device.
        compiled: What it needs.
        accepted: It fits, and XLA recomputes nothing on its own to make it fit.
    """

    plan: Mixture
    predicted_bytes: int
    compiled: Compiled
    accepted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The best plan that fits, and how it was found. Printed by `rich`.

    Attributes:
        plan: The plan; of two segments where a mixture was best, or one for each kind
            of block.
        compiled: What the step needs with it.
        nothing_kept: What it needs with `full`.
        attempts: All plans that were compiled, in order.
    """

    plan: Mixture
    compiled: Compiled
    nothing_kept: Compiled
    attempts: tuple[Attempt, ...]

    @property
    def policy(self) -> Any:
        """What to make the step with."""
        return policy_of(self.plan)

    def explain(self) -> str:
        """What was found, in plain words."""
        return f"{self.compiled.explain()}\n{self.plan.explain()}"

    def __rich__(self) -> Table:
        table = Table(title=f"plans compiled for {self.compiled.target}")
        for heading in ("kept, GB", "run again", "predicted, GB", "compiled, GB"):
            table.add_column(heading, justify="right")
        table.add_column("verdict")
        base = self.nothing_kept
        rows = [(0, None, base.hbm_bytes, base, base.fits)] + [
            (one.plan.device_bytes, one.plan, one.predicted_bytes, one.compiled,
             one.accepted)
            for one in self.attempts
        ]  # fmt: skip
        for kept, plan, predicted, compiled, accepted in rows:
            table.add_row(
                f"{kept / 1e9:.3f}",
                f"{plan.recompute_share:.1%}" if plan else "all but nothing",
                f"{predicted / 1e9:.3f}" if plan else "",
                f"{compiled.hbm_bytes / 1e9:.3f}",
                _verdict(compiled, accepted),
            )
        return table


def policy_of(plan: Mixture) -> Any:
    """What to make the step with: a policy, or segments for `scan_layers`."""
    policies = {policy for policy, _ in plan.policies}
    return policies.pop() if len(policies) == 1 else plan.policies


def _verdict(compiled: Compiled, accepted: bool) -> str:
    if accepted:
        return "fits"
    if compiled.fits:
        return f"XLA recomputes {compiled.hidden_remats} values on its own"
    return "does not fit"
