"""Whether a step is the one that its folder's name says.

Every save has an attempt of its own, and its MANIFEST says which step and item it is:
a folder that was copied, renamed or swapped still restores, as another step than its
name says. Does not belong here: whether it restores.
"""

import collections
import os
from collections.abc import Iterator, Sequence

from orbax_delta.listing import Item

Finding = tuple[str, list[Item]]
"""What is wrong, in words, and with which items."""


def findings(items: Sequence[Item]) -> Iterator[Finding]:
    """Items under another number or name than they were saved, and copies.

    Left out are steps that are still written, steps that Orbax moved to a folder of its
    own, self-contained ones (anybody may copy these), and kept bases, which are copies.
    """
    ours = [item for item in items if _is_named(item)]
    for item in ours:
        yield from ((what, [item]) for what in _misnamed(item))
    yield from _copies(ours)


def _is_named(item: Item) -> bool:
    return (
        item.finished
        and item.manifest is not None
        and not item.manifest.self_contained
        and not item.is_base
        and "/" not in item.step
    )


def _misnamed(item: Item) -> Iterator[str]:
    place, manifest = item.place, item.manifest
    if manifest is None or place.root_url is None:
        return
    if None not in (place.step, manifest.step) and place.step != manifest.step:
        yield (
            f"by its MANIFEST it is step {manifest.step}, saved as attempt "
            f"{manifest.attempt}; the folder was renamed, or another step was copied "
            f"over it. It restores, as what step {manifest.step} was. Give the folder "
            "its right name, or delete it"
        )
    if place.item != manifest.item:
        yield (
            f"by its MANIFEST it is item {manifest.item!r}, not {place.item!r}; the "
            "folder was renamed, or another item was copied over it. Give the folder "
            "its right name, or delete it"
        )


def _copies(items: Sequence[Item]) -> Iterator[Finding]:
    by_attempt: dict[str, dict[str, Item]] = collections.defaultdict(dict)
    for item in items:
        if item.manifest is not None:
            # A link to a step, as `latest`, is no copy.
            where = item.place.item_url
            where = where if "://" in where else os.path.realpath(where)
            by_attempt[item.manifest.attempt].setdefault(where, item)
    for attempt, found in by_attempt.items():
        if len(found) > 1:
            names = ", ".join(item.key.rpartition("/")[0] for item in found.values())
            what = (
                f"{names} are one save (attempt {attempt}): a folder was copied. "
                "Delete the copies"
            )
            yield what, list(found.values())
