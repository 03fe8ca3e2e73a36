"""Repair: mend what the root itself can make good again; plan, then execute.

What is planned is looked up anew after each kind of mend, for one can bring another to
light. What cannot be made good is left as it is. Does not belong here: how (`mends`).
"""

import dataclasses
from collections.abc import Iterable, Sequence

from orbax_delta import check, mends
from orbax_delta.check import Examination
from orbax_delta.errors import DeltaError, NotFoundError, UnsupportedVersionError
from orbax_delta.findings import Problem
from orbax_delta.listing import Progress, no_progress
from orbax_delta.mends import Action, Mend
from orbax_delta.store import STORE_NAME

# What one round mends can show the next what else is to be done.
_MAX_ROUNDS = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair did, or would do.

    Attributes:
        root: The folder.
        dry_run: Whether nothing was changed.
        mended: What was made good.
        failed: What could not be, with the reason.
        problems: What a verification finds afterwards (of a dry run: now).
    """

    root: str
    dry_run: bool
    mended: Sequence[Mend]
    failed: Sequence[Mend]
    problems: Sequence[Problem]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong any more."""
        return not self.problems


def repair(
    url: str, *, dry_run: bool = False, progress: Progress = no_progress
) -> RepairReport:
    """Mend a root as far as it holds what is needed.

    No step loses anything by it. Best done while no job saves there: a save under way
    may fail with a ConflictError and has to be repeated.

    Args:
        url: A manager's root.
        dry_run: Only find out what would be done.
        progress: Told of MANIFESTs, packs and chunks done.

    Raises:
        NotFoundError: There is no such folder, nothing of this package, or its store
            lies in a folder above.
        UnsupportedVersionError: Something was written by a newer format.
        StorageError: The folder cannot be listed.
    """
    found = check.examine(url, progress=progress)
    _refuse_newer(found)
    _require_root(found)
    mended: list[Mend] = []
    failed: list[Mend] = []
    for _ in range(1 if dry_run else _MAX_ROUNDS):
        before, failed = len(mended), []
        # Each plan looks at what the one before it has mended.
        for planned in (
            mends.small_files,
            mends.lost_files,
            mends.damaged_records,
        ):
            done, not_done = _carry_out(planned(found), dry_run)
            mended += done
            failed += not_done
            if done and not dry_run:
                found = check.examine(url, progress=progress)
        if len(mended) == before:
            break
    return RepairReport(
        root=found.root.folder.url,
        dry_run=dry_run,
        mended=mended,
        failed=failed,
        problems=found.report().problems,
    )


def _carry_out(
    planned: Iterable[Action], dry_run: bool
) -> tuple[list[Mend], list[Mend]]:
    """What was mended, and what could not be."""
    mended, failed = [], []
    for mend, action in planned:
        try:
            if not dry_run:
                action()
            mended.append(mend)
        except (DeltaError, FileNotFoundError) as error:
            what = f"{mend.what}: {error}"
            failed.append(dataclasses.replace(mend, what=what))
    return mended, failed


def _refuse_newer(found: Examination) -> None:
    for error in (
        found.root.store_error,
        *(item.error for item in found.root.everything),
    ):
        if isinstance(error, UnsupportedVersionError):
            raise error


def _require_root(found: Examination) -> None:
    """A step's folder can be verified; only the one with its store can be mended."""
    url = found.root.folder.url
    inside = (url, found.root.store.url)
    for packs in map(mends.packs_of, found.root.everything):
        if packs is not None and not packs.url.startswith(inside):
            raise NotFoundError(
                f"{url} is not the folder that was given to CheckpointManager: its "
                f"packs lie in {packs.url}. Repair the folder that holds {STORE_NAME}"
            )
