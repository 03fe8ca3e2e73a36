"""Forgetting a root of a shared store: it and its bases count no more; plan, execute.

Only a person can know that a root is gone for good, and not just out of reach from
here. Does not belong here: deleting packs, which the next prune does.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

from orbax_delta import bases, prune, registry
from orbax_delta.errors import DeltaError
from orbax_delta.store import DeltaStore
from orbax_delta.storefiles import Registered


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """One root.

    Attributes:
        entry: Its entry in the registry; without location where that is unreadable.
        steps: MANIFESTs that lie in it; None where it cannot be reached.
        bases: Attempts of the bases that the store keeps of it.
    """

    entry: Registered
    steps: int | None
    bases: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForgetPlan:
    """What is to be forgotten.

    Attributes:
        store: Location of the store.
        roots: The roots; several where one folder was registered again and again.
    """

    store: str
    roots: Sequence[Forgotten]


def plan(store: DeltaStore, name: str) -> ForgetPlan:
    """Find a root; changes nothing.

    Where a location has had several roots, those that are there no more are meant, and
    the one that is stays; its identity names it too.

    Args:
        store: The shared store.
        name: Location or identity of the root.

    Raises:
        NotFoundError: No such root is registered.
    """
    kept = bases.read_bases(store, {})
    orphans = {base.root_uuid for base in kept.values()}.difference(store.roots.names())
    # One that has lost its entry goes by the identity that its bases have.
    lost = [Registered(root="", root_uuid=name)] if name in orphans else []
    roots = [
        Forgotten(
            entry=entry,
            steps=_steps(store, entry),
            bases=sorted(
                attempt
                for attempt, base in kept.items()
                if base.root_uuid == entry.root_uuid
            ),
        )
        for entry in lost or registry.find(store, name)
    ]
    gone = [root for root in roots if root.steps is None]
    return ForgetPlan(store=store.url, roots=gone or roots)


def _steps(store: DeltaStore, entry: Registered) -> int | None:
    with contextlib.suppress(DeltaError):
        return len(prune.step_keys(registry.reach(store, entry)))
    return None


def execute(store: DeltaStore, planned: ForgetPlan) -> None:
    """Release the bases, then remove the entries; may be done again after a crash."""
    for root in planned.roots:
        for attempt in root.bases:
            bases.release(store, attempt)
        registry.forget(store, root.entry)
