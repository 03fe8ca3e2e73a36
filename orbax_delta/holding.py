"""Which contents stay in memory from save to save (option `base`).

A copy is worth its memory while deltas against it are small and made at every save.
What is not held is read back from the store, decoded and checked, when a delta against
it is wanted. Does not belong here: the copies themselves (`base`), reading (`recall`).
"""

import dataclasses

from orbax_delta.base import Entry
from orbax_delta.options import DeltaOptions
from orbax_delta.parts import Row

UNPAID_SHARE = 0.95
"""A delta of this share of a full record is not worth a copy of what it builds on."""

_MOST_IDLE = 1_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What becomes of the content of a chunk that a save writes.

    Attributes:
        hold: Whether to keep a copy.
        grace: For the entry.
        skip: For the entry.
    """

    hold: bool
    grace: int = 0
    skip: int = 0


def written(
    stored: Entry | None,
    options: DeltaOptions,
    *,
    recalled: bool,
    unpaid: bool,
    always: bool = False,
) -> Outlook:
    """Of a changed chunk.

    Args:
        stored: What was stored of it.
        options: Options in force.
        recalled: Whether its old content had to be read back.
        unpaid: Whether the delta that was tried was no smaller than `UNPAID_SHARE`.
        always: Whether its policy needs the copy, whatever the option says.
    """
    if options.base == "keep" or always:
        return Outlook(hold=True)
    if not options.full_every or options.max_chain < 2:
        return Outlook(hold=False)  # there will be no deltas
    if unpaid:
        return Outlook(hold=False, skip=options.full_every)
    skip = max(0, stored.skip - 1) if stored else 0
    grace = options.full_every if recalled else stored.grace if stored else 0
    return Outlook(hold=options.base == "auto" and not skip, grace=grace, skip=skip)


def renewed(options: DeltaOptions, *, always: bool = False) -> Outlook:
    """Of a chunk that is written anew though it has not changed."""
    return Outlook(hold=options.base == "keep" or always)


def unchanged(
    stored: Entry, row: Row, options: DeltaOptions, *, always: bool = False
) -> Entry:
    """The next entry of a chunk that has not changed.

    One that was read back before stays for some saves without a change, so that what
    changes now and then is not read each time.
    """
    held = options.base == "keep" or always
    if options.base == "auto":
        held = held or stored.idle < stored.grace
    return Entry(
        row=row,
        content=stored.content if held else None,
        idle=min(stored.idle + 1, _MOST_IDLE),
        grace=stored.grace,
        skip=stored.skip,
    )
