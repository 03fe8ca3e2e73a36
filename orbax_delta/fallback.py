"""What to restore when a step is damaged past healing: the newest state that is whole.

Either the error says which one that is, or it is restored instead, loudly. States are
the finished steps of the root and the bases that its store keeps.
"""

import logging
from collections.abc import Iterator
from typing import Literal

from orbax_delta import healing, listing, reader, restore, steps
from orbax_delta.background import pool
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    NotFoundError,
    UnsupportedVersionError,
)
from orbax_delta.listing import Item
from orbax_delta.options import DeltaOptions
from orbax_delta.places import Place
from orbax_delta.restore import Restored, Target
from orbax_delta.store import Folder

_logger = logging.getLogger("orbax_delta")

OnCorruption = Literal["raise", "fallback"]

DAMAGE = (CorruptionError, FormatError, NotFoundError)
"""What says that a step cannot be restored, now or later."""


def run(
    place: Place,
    target: Target | None,
    settings: DeltaOptions,
    *,
    on_corruption: OnCorruption = "raise",
) -> Restored:
    """Restore one item of one step, or what stands in for it.

    Args:
        place: The item of the step.
        target: What to make of it; None: everything as it was saved.
        settings: Options in force.
        on_corruption: `"raise"`: an error that names the newest state that restores.
            `"fallback"`: the newest state that restores and is not newer than the
            step; its RestoreReport names it.

    Raises:
        StructureError: The target does not fit what is restored.
        CorruptionError: The step is damaged, and no state stands in for it.
        StorageError: The storage did not give something.
    """
    try:
        return restore.run(place, target, settings)
    except DAMAGE as error:
        if not _is_damage(place, error):
            raise
        if on_corruption == "raise":
            raise _explained(place, error, settings) from error
        return _instead(place, target, settings, error)


def _is_damage(place: Place, error: DeltaError) -> bool:
    """Whether the step is there and broken, and older ones could be whole."""
    if place.root_url is None or isinstance(error, UnsupportedVersionError):
        return False
    return not isinstance(error, NotFoundError) or bool(Folder(place.item_url).names())


def _explained(place: Place, error: DeltaError, settings: DeltaOptions) -> DeltaError:
    try:
        whole = next((one for one in states(place) if is_whole(one, settings)), None)
    except DeltaError as other:
        # The root cannot be listed: that must not hide what was found first.
        return type(error)(f"{error}. What else restores is not known: {other}")
    if whole is None:
        return type(error)(f"{error}. No other step or base of this root restores")
    told = type(error)(
        f"{error}. The newest state that restores is {_name(whole)}; "
        'restore_latest_good() and DeltaRestore(on_corruption="fallback") look for one '
        "themselves"
    )
    told.restorable = None if whole.is_base else whole.place.step
    return told


def _instead(
    place: Place, target: Target | None, settings: DeltaOptions, error: DeltaError
) -> Restored:
    _logger.error("%s does not restore: %s", place.label, error)
    for item in states(place, not_after=place.step):
        try:
            restored = restore.run(item.place, target, settings)
        except DAMAGE as other:
            _logger.error("%s does not restore either: %s", _name(item), other)
            continue
        _logger.error("restored %s instead of %s", _name(item), place.label)
        return restored
    raise type(error)(f"{error}. No step or base before it restores either") from error


def states(place: Place, *, not_after: int | None = None) -> Iterator[Item]:
    """Other states of the same item, newest first; a step before its own base."""
    if place.root_url is None:
        return
    found = listing.read_root(place.root_url).everything
    for item in sorted(found, key=_age, reverse=True):
        step = item.place.step
        early = not_after is None or (step is not None and step <= not_after)
        other = item.place.item_url.rstrip("/") != place.item_url.rstrip("/")
        if early and other and item.finished and item.place.item == place.item:
            yield item


def _age(item: Item) -> tuple[int, bool]:
    return -1 if item.place.step is None else item.place.step, not item.is_base


def is_whole(item: Item, settings: DeltaOptions) -> bool:
    """Whether every chunk of a state decodes, healed ones included; reads it all."""
    try:
        step = steps.open_step(item.place)
        leaves = step.manifest.leaves
        requests = [reader.Request(leaf=leaves[r.leaf], row=r) for r in step.rows]
        with pool(settings.worker_count) as executor:
            fetched = reader.fetch(
                step.packs, requests, executor=executor, count=reader.ReadCount()
            )
            failing = [got for got in fetched if got.content is None]
        if failing:
            healing.heal(item.place, failing)
    except DeltaError:
        return False  # the caller goes on to the next; verify tells why
    return True


def _name(item: Item) -> str:
    if item.is_base:
        return f"the kept base of step {item.place.step_name} ({item.step})"
    return f"step {item.place.step_name}"
