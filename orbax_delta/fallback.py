"""What to restore when a step is damaged past healing: the newest state that is whole.

Either the error says which one that is, or it is restored instead, loudly. States are
the finished steps of the root and the bases that its store keeps. The processes of a
job look for it together: what one cannot restore none of them does.
"""

import logging
import math
from collections.abc import Iterator
from typing import Literal

from orbax_delta import healing, listing, reader, restore, steps
from orbax_delta.background import pool
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from orbax_delta.hosts import ALONE, Job, Round
from orbax_delta.listing import Item, Root
from orbax_delta.live import Live
from orbax_delta.options import DeltaOptions
from orbax_delta.places import Place
from orbax_delta.restore import Restored, Target
from orbax_delta.store import DeltaStore, Folder

_logger = logging.getLogger("orbax_delta")

OnCorruption = Literal["raise", "fallback"]


def damage(root_url: str) -> tuple[type[DeltaError], ...]:
    """Errors that say that a step of a root does not restore, now or later."""
    found = (CorruptionError, FormatError, NotFoundError)
    # On a local disk a read that fails is a bad sector, which does not heal by waiting;
    # a bucket that does not answer has lost nothing.
    remote = "://" in root_url or "://" in DeltaStore.unidentified(Folder(root_url)).url
    return found if remote else (*found, StorageError)


def run(
    place: Place,
    target: Target | None,
    settings: DeltaOptions,
    *,
    on_corruption: OnCorruption = "raise",
    job: Job = ALONE,
    live: Live | None = None,
) -> Restored:
    """Restore one item of one step, or what stands in for it.

    Args:
        place: The item of the step.
        target: What to make of it; None: everything as it was saved.
        settings: Options in force.
        on_corruption: `"raise"`: an error that names the newest state that restores.
            `"fallback"`: the newest state that restores and is not newer than the
            step; its RestoreReport names it. On a local disk a failing read counts as
            damage too.
        job: The processes that restore it together.
        live: What this process need not read.

    Raises:
        StructureError: The target does not fit what is restored.
        CorruptionError: The step is damaged, and no state stands in for it.
        StorageError: The storage did not give something.
        PeerError: Another process did not answer.
        DisagreementError: Another process restores something else.
        DeltaError: What another process failed with, of the class that it had there.
    """
    try:
        return together(
            place, target, settings, job=job, what=place.step_name, live=live
        )
    except damage(place.root_url or place.item_url) as error:
        if not _is_damage(place, error):
            raise
        if on_corruption == "fallback":
            return _instead(place, target, settings, error, job, live)
        if isinstance(error, StorageError):
            raise  # the storage may be out of order altogether
        raise _explained(place, error, settings) from error


def together(
    place: Place,
    target: Target | None,
    settings: DeltaOptions,
    *,
    job: Job,
    what: str,
    live: Live | None = None,
) -> Restored:
    """Restore one state, if every process of a job can restore what it wants of it.

    Otherwise some would hold an older state than others, and nobody would know.

    Args:
        place: The state.
        target: What to make of it.
        settings: Options in force.
        job: The processes.
        what: A name for the state that is the same on all of them.
        live: What this process need not read; others may have other arrays, or none.

    Raises:
        DeltaError: What `restore.run` has raised, here or on another process.
    """
    agreed = Round(job, place.item, timeout=settings.vote_timeout, deed="restore")
    return agreed.unanimous(what, lambda: restore.run(place, target, settings, live))


def _is_damage(place: Place, error: DeltaError) -> bool:
    """Whether the step is there and broken, and older ones could be whole."""
    if place.root_url is None or isinstance(error, UnsupportedVersionError):
        return False
    return not isinstance(error, NotFoundError) or bool(place.folder.names())


def _explained(place: Place, error: DeltaError, settings: DeltaOptions) -> DeltaError:
    try:
        whole = _newest_whole(place, settings)
    except DeltaError as other:
        # The root cannot be listed: that must not hide what was found first.
        return type(error)(f"{error}. What else restores is not known: {other}")
    if whole is None:
        return type(error)(
            f"{error}. No other step or base that orbax_delta saved here restores"
        )
    told = type(error)(
        f"{error}. The newest state that restores is {_name(whole)}; "
        'restore_latest_good() and DeltaRestore(on_corruption="fallback") look for one '
        "themselves"
    )
    told.restorable = None if whole.is_base else whole.place.step
    return told


def _instead(
    place: Place,
    target: Target | None,
    settings: DeltaOptions,
    error: DeltaError,
    job: Job,
    live: Live | None,
) -> Restored:
    _logger.error("%s does not restore: %s", place.label, error)
    for item in _states(_root(place), place, not_after=place.step):
        try:
            restored = together(
                item.place, target, settings, job=job, what=item.step, live=live
            )
        except damage(place.root_url or place.item_url) as other:
            _logger.error("%s does not restore either: %s", _name(item), other)
            continue
        _logger.error("restored %s instead of %s", _name(item), place.label)
        return restored
    raise type(error)(
        f"{error}. No step or base before it that orbax_delta saved restores either"
    ) from error


def _root(place: Place) -> Root:
    return listing.read_root(place.root_url or place.item_url)


def _newest_whole(place: Place, settings: DeltaOptions) -> Item | None:
    root = _root(place)
    lost: set[healing.Wanted] = set()
    for item in _states(root, place):
        if _is_whole(item, root, lost, settings):
            return item
    return None


def _states(
    root: Root, place: Place, *, not_after: int | None = None
) -> Iterator[Item]:
    """Other states of the same item, newest first; a step before its own base."""
    for item in sorted(root.everything, key=_age, reverse=True):
        early = not_after is None or _last_step(item) <= not_after
        other = item.place.item_url.rstrip("/") != place.item_url.rstrip("/")
        if early and other and item.finished and _is_of(item, place.item):
            yield item


def _is_of(item: Item, name: str) -> bool:
    """Whether a state is of an item, by its folder and by its MANIFEST."""
    return item.place.item == name and (
        item.manifest is None or item.manifest.item == name
    )


def _last_step(item: Item) -> float:
    """The later of the steps that its folder and its MANIFEST say it is."""
    said = [item.place.step, item.manifest.step if item.manifest else None]
    return max((step for step in said if step is not None), default=math.inf)


def _age(item: Item) -> tuple[int, bool]:
    return -1 if item.place.step is None else item.place.step, not item.is_base


def _is_whole(
    item: Item, root: Root, lost: set[healing.Wanted], settings: DeltaOptions
) -> bool:
    """Whether every chunk of a state decodes, healed ones included; reads it all.

    Args:
        item: The state.
        root: Where it lies.
        lost: What no list of the root yields; what is found out is added, so that
            damage that many steps share is looked for once.
        settings: Options in force.
    """
    try:
        step = steps.open_step(item.place)
        leaves = step.manifest.leaves
        requests = [reader.Request(leaf=leaves[r.leaf], row=r) for r in step.rows]
        if not lost.isdisjoint(map(healing.wanted, requests)):
            return False
        with pool(settings.worker_count) as executor:
            fetched = reader.fetch(
                step.packs, requests, executor=executor, count=reader.ReadCount()
            )
            failing = [got.request for got in fetched if got.content is None]
        healed = healing.find(root, failing) if failing else {}
    except DeltaError:
        return False  # the caller goes on to the next; verify tells why
    lost.update(set(map(healing.wanted, failing)) - healed.keys())
    return lost.isdisjoint(map(healing.wanted, failing))


def _name(item: Item) -> str:
    if item.is_base:
        return f"the kept base of step {item.place.step_name} ({item.step})"
    return f"step {item.place.step_name}"
