"""What keeps a prune of the archive from the packs of a step that is being copied.

The same signs as those of a save: a pin, and only then a look at what prunes are about
to delete. The pin has a name that one process at a time can have. In the store that the
step is copied from nothing is written: as long as its MANIFEST is there that keeps the
packs, and without it the copy fails. Does not belong here: copying.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence

from orbax_delta import marks, owners
from orbax_delta.archiveplans import StepPlan
from orbax_delta.errors import ConflictError, StorageError
from orbax_delta.marks import Mark
from orbax_delta.store import DeltaStore

_logger = logging.getLogger("orbax_delta")

# Pins of this process that the storage would not delete.
_abandoned: set[str] = set()


@contextlib.contextmanager
def held(there: DeltaStore | None, step: StepPlan) -> Iterator[None]:
    """Pin the packs of a step in the store of the archive.

    Args:
        there: That store; None where nothing needs one.
        step: The step.

    Raises:
        ConflictError: Another process copies that step to the archive, or a prune of
            that is about to delete a pack.
    """
    if there is None or step.is_moved:
        yield
        return
    packs = [*dict.fromkeys(p for item in step.items for p in item.in_force.packs)]
    mark = Mark(owner=owners.this_process(), packs=packs).encode()
    own: list[str] = []
    try:
        for pin in _names(step):
            _take(there, pin, mark)
            own.append(pin)
        _refuse_condemned(there, packs)
        yield
    finally:
        for pin in own:
            try:
                there.pins.delete(pin)
            except StorageError as error:
                # It goes with a prune that finds this process dead.
                _logger.warning("a pin was left behind: %s", error)
                _abandoned.add(there.pins.url + pin)


def require_packs(there: DeltaStore | None, step: StepPlan) -> None:
    """Whether a prune that was told to break pins has taken this process for dead.

    Raises:
        ConflictError: It has, and packs are gone.
    """
    if there is None or all(there.pins.read(pin) for pin in _names(step)):
        return
    needed = {
        pack
        for item in step.items
        for pack in item.in_force.packs
        if not item.in_force.self_contained
    }
    if not needed <= marks.usable_packs(there):
        raise ConflictError(
            f"a prune of {there.root.url} has removed the pin of this process, and "
            "packs with it; nothing of the step was left there. Archive it again"
        )


def _names(step: StepPlan) -> list[str]:
    return [
        marks.copying_pin(item.manifest.attempt)
        for item in step.items
        if item.manifest is not None
    ]


def _take(store: DeltaStore, pin: str, mark: bytes) -> None:
    """Write the pin of whoever copies a step, of whom there is one at a time.

    Raises:
        ConflictError: Another process has it.
    """
    while not store.pins.create(pin, mark):
        data = store.pins.read(pin)
        if data is None:
            continue
        owner = marks.parse_mark(data, where=store.pins.url + pin).owner
        if not owner.known_dead and store.pins.url + pin not in _abandoned:
            raise ConflictError(
                f"process {owner.pid} on {owner.host_name} is copying the step to "
                f"{store.root.url} too. If it runs no more, `orbax-delta prune "
                f"--break-pins {store.root.url}` removes what it has left"
            )
        store.pins.delete(pin)


def _refuse_condemned(store: DeltaStore, packs: Sequence[str]) -> None:
    """What a prune is about to delete cannot be counted on, nor written again."""
    condemned = marks.read_marks(store.condemned).values()
    at_work = [m for m in condemned if m.owner != owners.NOBODY]
    doomed = {p for m in at_work if not m.owner.known_dead for p in m.packs}
    if doomed.intersection(packs):
        raise ConflictError(
            f"a prune of {store.root.url} is deleting {len(doomed)} packs, of which "
            "the step needs some. Archive it again when that has ended; if it runs no "
            f"more, `orbax-delta prune --break-pins {store.root.url}` says so"
        )
