"""Which blocks a step applies a policy to, seen while it is traced.

Does not belong here: what to do with them (see `fitting`).
"""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

from remat_policies.linearized import Linearized
from remat_policies.policies import Policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Where one rematerialised function stands; itself and no other, even if equal.

    Attributes:
        in_scan: In a loop of more than one round.
        length: Rounds of that loop, if they are known.
    """

    in_scan: bool
    length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One call of a block under the policy that is watched for.

    Attributes:
        split: The block at the call's shapes.
        place: Where the call stands.
    """

    split: Linearized
    place: Place


@dataclass(frozen=True, slots=True)
class _Watch:
    policy: Policy
    seen: list[Use]


_watch: contextvars.ContextVar[_Watch | None] = contextvars.ContextVar(
    "watch", default=None
)


@contextlib.contextmanager
def watched(policy: Policy) -> Iterator[list[Use]]:
    """Collect the calls under a policy, from what is traced inside."""
    seen: list[Use] = []
    token = _watch.set(_Watch(policy, seen))
    try:
        yield seen
    finally:
        _watch.reset(token)


def saw(split: Linearized, policy: Policy, place: Place) -> None:
    """Tell whoever watches that a block runs under a policy."""
    watch = _watch.get()
    if watch is not None and policy == watch.policy:
        watch.seen.append(Use(split=split, place=place))
