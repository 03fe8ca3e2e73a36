"""Plans as values: words, JSON, what they cost.

Does not belong here: finding them (see `planning`).
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from remat_policies.errors import InvalidInputError
from remat_policies.policies import Policy, from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to keep of a layer, and what that costs. Sizes in bytes on each device.

    Attributes:
        policy: An ordinary policy of names, for `remat_policies.remat`.
        layers: For how many layers.
        budget_bytes: What a layer may keep on the device beside its arguments.
        device_bytes: What it keeps; less than 0 if its input is offloaded.
        host_bytes: What it keeps in the host's memory.
        recompute_flops: What its backward pass runs again.
        forward_flops: Operations of its forward pass.
        gap: By how large a share a better plan could be better, in FLOPs and what
            kept bytes should be worth; 0 if none is.
    """

    policy: Policy
    layers: int
    budget_bytes: int
    device_bytes: int
    host_bytes: int
    recompute_flops: float
    forward_flops: float
    gap: float

    @property
    def recompute_share(self) -> float:
        """What is run again, as a share of a forward pass."""
        return self.recompute_flops / self.forward_flops if self.forward_flops else 0.0

    def explain(self) -> str:
        """What it keeps and runs again, in plain words."""
        words = (
            f"Keeps {len(self.policy.keeps)} values of each layer,"
            f" {self.device_bytes / 1e6:.2f} of {self.budget_bytes / 1e6:.2f} MB, and"
            f" runs {self.recompute_share:.1%} of a forward pass again"
        )
        if self.layers > 1:
            whole = self.layers * self.device_bytes
            words += f"; {whole / 1e9:.3f} GB for {self.layers} layers"
        if self.gap:
            words += f"; the solver's time was up: at best {self.gap:.1%} less"
        words += f". Kept: {', '.join(self.policy.save) or 'nothing'}."
        if self.policy.offload:
            moved = ", ".join(self.policy.offload)
            words += f" On the host, {self.host_bytes / 1e6:.2f} MB: {moved}."
        return words

    def to_json(self) -> str:
        """A JSON document that `load_plan` reads."""
        return json.dumps(_as_fields(self), indent=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Two plans for the layers of one model, so that no budget is left over.

    Attributes:
        segments: Plans in the order of their layers, each with how many layers.
    """

    segments: tuple[Plan, ...]

    @property
    def policies(self) -> tuple[tuple[Policy, int], ...]:
        """What `scan_layers` takes as its policy."""
        return tuple((one.policy, one.layers) for one in self.segments)

    @property
    def device_bytes(self) -> int:
        """What all layers keep on the device beside their arguments."""
        return sum(one.layers * one.device_bytes for one in self.segments)

    @property
    def host_bytes(self) -> int:
        """What all layers keep in the host's memory."""
        return sum(one.layers * one.host_bytes for one in self.segments)

    @property
    def recompute_flops(self) -> float:
        """What the backward passes of all layers run again."""
        return sum(one.layers * one.recompute_flops for one in self.segments)

    @property
    def forward_flops(self) -> float:
        """Operations of the forward passes of all layers."""
        return sum(one.layers * one.forward_flops for one in self.segments)

    @property
    def recompute_share(self) -> float:
        """What is run again, as a share of all forward passes."""
        return self.recompute_flops / self.forward_flops if self.forward_flops else 0.0

    def explain(self) -> str:
        """Each segment in plain words."""
        whole = f"{self.device_bytes / 1e9:.3f} GB for all layers"
        lines = [
            f"{whole}; {self.recompute_share:.1%} of the forward passes are run again."
        ]
        lines += [f"{one.layers} layers: {one.explain()}" for one in self.segments]
        return "\n".join(lines)

    def to_json(self) -> str:
        """A JSON document that `load_plan` reads."""
        return json.dumps([_as_fields(one) for one in self.segments], indent=1)


def load_plan(text: str) -> Plan | Mixture:
    """What `Plan.to_json` or `Mixture.to_json` wrote.

    Raises:
        InvalidInputError: The text is no such document.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"not a plan in JSON: {error}") from error
    if isinstance(found, list) and found:
        return Mixture(segments=tuple(map(_of_fields, found)))
    return _of_fields(found)


def _as_fields(plan: Plan) -> dict[str, Any]:
    return dataclasses.asdict(plan) | {"policy": json.loads(plan.policy.to_json())}


def _of_fields(fields: Any) -> Plan:
    kinds = {field.name: field.type for field in dataclasses.fields(Plan)}
    if not isinstance(fields, dict) or set(fields) != set(kinds):
        raise InvalidInputError(f"a plan has the fields {sorted(kinds)}: {fields!r}")
    for name, kind in kinds.items():
        allowed = (int,) if kind is int else (int, float)
        if kind is not Policy and type(fields[name]) not in allowed:
            raise InvalidInputError(f"{name} of a plan is a number: {fields[name]!r}")
    if fields["layers"] < 1 or not 0 <= fields["gap"] <= 1:
        raise InvalidInputError(f"a plan has layers, and a gap up to 1: {fields!r}")
    return Plan(**fields | {"policy": from_json(json.dumps(fields["policy"]))})
