"""A root of a shared store that has moved: its entry follows; plan, execute.

Only a person can know that a root has moved and is no copy. Does not belong here:
moving any file.
"""

import contextlib
import dataclasses

from orbax_delta import registry, storefiles
from orbax_delta.errors import InvalidInputError, NotFoundError
from orbax_delta.store import DeltaStore
from orbax_delta.storefiles import Registered


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A root that lies elsewhere than the registry says.

    Attributes:
        store: Location of the shared store.
        before: Where the registry says it is; None if it knows no other place.
        entry: What it is to say.
    """

    store: str
    before: str | None
    entry: Registered


def plan(store: DeltaStore) -> Move:
    """What registering a root where it is now would change; changes nothing.

    Raises:
        InvalidInputError: It is a copy, or it has no shared store.
        StorageError: What is in the old place cannot be read.
        CorruptionError: The same.
        FormatError: The same.
    """
    here = registry.location(store.root)
    if store.link is None:
        raise InvalidInputError(
            f"{here} does not use a shared store; its own one moves along with it"
        )
    entry = Registered(root=here, root_uuid=store.root_uuid)
    known = registry.entry_of(store)
    if known is None or registry.is_same_place(known.root, here):
        return Move(store=store.url, before=None, entry=entry)
    with contextlib.suppress(NotFoundError):
        registry.reach(store, known)
        raise InvalidInputError(
            f"{here} is a copy of {known.root}, which is there still; nothing was "
            "changed. Save to a new root instead: what the two have in common is "
            "stored once"
        )
    return Move(store=store.url, before=known.root, entry=entry)


def execute(store: DeltaStore, planned: Move) -> None:
    """Carry it out: from the old entry to the new one in one write."""
    entry = storefiles.entry_document(planned.entry)
    store.roots.replace(planned.entry.root_uuid, entry)
