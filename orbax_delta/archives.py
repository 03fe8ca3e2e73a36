"""Archiving: steps copied or moved to another root, with all that they need.

An archive is a root like others, whose store has the identity of the root's own: a step
finds its packs there as it did here. Packs are copied whole and under their names, so
several steps share them there too, and what a killed run has copied is not copied
again. Reads top to bottom. Does not belong here: which steps (`archivechoices`).
"""

import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Sequence

from orbax_delta import (
    archivepins,
    archiveplans,
    leaving,
    listing,
    marks,
    registry,
    stepcopies,
    storefiles,
)
from orbax_delta.archivechoices import Choice
from orbax_delta.archiveplans import ArchivePlan, ItemPlan, StepPlan
from orbax_delta.errors import (
    ConflictError,
    CorruptionError,
    DeltaError,
    FormatError,
    NotFoundError,
)
from orbax_delta.listing import Progress, url_of
from orbax_delta.packcopies import PackCopier, Span
from orbax_delta.stepcopies import StepFiles, copy_own_packs, needed_records
from orbax_delta.store import COMMIT_MARKER, STORE_NAME, DeltaStore, Folder
from orbax_delta.storefiles import ARCHIVED_FILE, STORE_FILE

_logger = logging.getLogger("orbax_delta")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedStep:
    """What became of one step.

    Attributes:
        step: Its folder.
        outcome: `copied`; `there`: it had been copied before; or `failed`.
        moved: Whether only a link to the archive is left of it in the root.
        packs_copied: Packs that were copied.
        packs_there: Packs that the archive had.
        written_bytes: Size of what was written to the archive.
        total_seconds: Time it took.
        error: Why it failed; None if it did not.
    """

    step: str
    outcome: str
    moved: bool
    packs_copied: int
    packs_there: int
    written_bytes: int
    total_seconds: float
    error: DeltaError | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveReport:
    """What became of the steps that were chosen.

    Attributes:
        root: The root.
        archive: The archive.
        steps: The steps, oldest first.
        total_seconds: Time it took.
    """

    root: str
    archive: str
    steps: Sequence[ArchivedStep]
    total_seconds: float

    @property
    def ok(self) -> bool:
        """Whether every step that was chosen is in the archive."""
        return not any(step.error for step in self.steps)

    @property
    def written_bytes(self) -> int:
        """Size of what was written."""
        return sum(step.written_bytes for step in self.steps)


def archive(
    root: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    steps: Sequence[int | str] = (),
    older_than: float | None = None,
    keep_every: int | None = None,
    move: bool = False,
    progress: Progress = listing.no_progress,
) -> ArchiveReport:
    """Copy or move steps to another folder or bucket, with all that they need.

    The archive is a root: a `CheckpointManager` with `handler_registry()` opens it, and
    every command works on it. What is copied is checked before it is written and read
    back after it. Running it again goes on where it ended. The other way round it
    brings steps back: `archive(target, root, steps=[...])`.

    A step that fails is in the report with its error, and logged; the others go on.

    Args:
        root: Folder of the manager, or with self-contained checkpoints.
        target: Folder of the archive; it need not be there.
        steps: Numbers or names of steps.
        older_than: Instead of names: steps saved more than so many seconds ago.
        keep_every: Instead of names, or of those older steps: only steps whose number
            is a multiple of it. Neither picks the newest step of the root.
        move: Delete each step from the root when the archive has it. Its folder stays,
            with its other items and a small file that leads to the archive: a manager
            lists and restores the step as before.
        progress: Told of packs.

    Raises:
        NotFoundError: There is no such root or step, or it is of another handler.
        InvalidInputError: No step is chosen; the two places are not apart; the archive
            is that of another run, or has another step of that name. Nothing was
            written.
        CorruptionError: A file of the archive is damaged.
        StorageError: The storage failed before any step was looked at.

    Example:
        >>> report = archive(root, exports / "cold", steps=[3], move=True)
        >>> [(step.step, step.outcome, step.moved) for step in report.steps]
        [('3', 'copied', True)]
        >>> archive(exports / "cold", root, steps=[3]).ok
        True
    """
    names = steps if isinstance(steps, str) else tuple(steps)
    choice = Choice(steps=names, older_than=older_than, keep_every=keep_every)
    planned = archiveplans.plan(url_of(root), url_of(target), choice)
    return execute(planned, move=move, progress=progress)


def execute(
    planned: ArchivePlan, *, move: bool, progress: Progress = listing.no_progress
) -> ArchiveReport:
    """Carry a plan out; errors as for `archive`."""
    started = time.perf_counter()
    store = _store_of_archive(planned)
    archiving = _Archiving(planned, store, move, progress)
    done = [archiving.run(step) for step in planned.steps]
    return ArchiveReport(
        root=planned.root.folder.url,
        archive=planned.target.url,
        steps=done,
        total_seconds=time.perf_counter() - started,
    )


def _store_of_archive(planned: ArchivePlan) -> DeltaStore | None:
    """The store of the archive, made if there is none and steps need one."""
    if not planned.needs_store:
        return planned.store
    if planned.store is not None:
        if planned.store.link is not None:
            # Else no prune of the shared store would count with what comes here.
            registry.register(planned.store)
        return planned.store
    uuid = planned.root.store.uuid
    below = planned.target.child(STORE_NAME)
    below.write(COMMIT_MARKER, b"")
    below.create(STORE_FILE, storefiles.store_document(uuid))
    made = DeltaStore.open(planned.target)
    if made is None or made.uuid != uuid:
        raise ConflictError(
            f"another process gave {planned.target.url} another store just now; choose "
            "another folder for the archive"
        )
    return made


class _Archiving:
    """One run.

    Args:
        planned: What is to be done.
        store: Store of the archive.
        move: Whether steps leave the root.
        progress: Told of packs.
    """

    def __init__(
        self,
        planned: ArchivePlan,
        store: DeltaStore | None,
        move: bool,
        progress: Progress,
    ) -> None:
        self._root = planned.root
        self._target = planned.target
        self._store = store
        self._move = move
        self._progress = progress
        self._packs_done = 0
        self._packs_in_all = sum(len(s.missing) + s.there for s in planned.steps)
        distrusted = marks.warned_of(store.condemned) if store else set()
        there = store.packs if store else self._target
        self._copier = PackCopier(self._root.store.packs, there, distrusted)

    def run(self, step: StepPlan) -> ArchivedStep:
        """Copy or move one step; what is wrong with it is in the result."""
        started = time.perf_counter()
        packs: list[int] = []
        outcome, error, other_bytes, moved = "failed", None, 0, False
        deed = "archived"
        try:
            if step.error is not None:
                raise step.error
            other_bytes = self._copy(step, packs)
            if self._move:
                deed = "moved"
                leaving.leave(step, self._target)
            outcome = "there" if step.is_there else "copied"
            moved = self._move or step.is_moved
        except DeltaError as caught:
            error = _explained(self._root.folder, self._target, step, deed, caught)
            _logger.error("%s", error)
        return ArchivedStep(
            step=step.name,
            outcome=outcome,
            moved=moved,
            packs_copied=sum(map(bool, packs)),
            packs_there=len(packs) - sum(map(bool, packs)),
            written_bytes=sum(packs) + other_bytes,
            total_seconds=time.perf_counter() - started,
            error=error,
        )

    # --- copying ----------------------------------------------------------------------

    def _copy(self, step: StepPlan, packs: list[int]) -> int:
        """Bring a step to the archive; returns the bytes of what is no pack.

        Args:
            step: The step.
            packs: Gets the bytes written of each of its packs, 0 for those there.
        """
        if step.is_there and (step.is_moved or not self._move):
            packs += [0] * step.there
            self._count(step.there)
            self._unlink(step)
            return 0
        with archivepins.held(self._store, step):
            leaving.require_unchanged(step)
            packs += self._bring_packs(step)
            written = self._copy_files(step)
            self._unlink(step)
            return written

    def _copy_files(self, step: StepPlan) -> int:
        here, there = self._root.folder, self._target
        all_items = {item.path: item.in_force for item in step.items}
        absent = {
            item.path: item.manifest
            for item in step.items
            if item.manifest is not None and item.there is None
        }
        if absent:
            return stepcopies.copy(
                here,
                there,
                StepFiles.of(here, step.name, absent),
                confirm=lambda: archivepins.require_packs(self._store, step),
            )
        archivepins.require_packs(self._store, step)
        if step.unmarked:
            stepcopies.mark(here, there, StepFiles.of(here, step.name, all_items))
        return 0

    def _unlink(self, step: StepPlan) -> None:
        """Remove links from where the step has come back to."""
        for item in step.items:
            if item.linked_there:
                self._there(step, item).delete(ARCHIVED_FILE)

    def _there(self, step: StepPlan, item: ItemPlan) -> Folder:
        return self._target.child(f"{step.name}/{item.path}".rstrip("/"))

    def _bring_packs(self, step: StepPlan) -> Iterator[int]:
        needed: dict[str, set[Span]] = {}
        for item in step.items:
            # What the archive has is what counts: it may have been repaired since.
            folder = self._there(step, item) if item.there else item.source
            found = needed_records(item.in_force, folder)
            if not item.in_force.self_contained:
                for pack, spans in found.items():
                    needed.setdefault(pack, set()).update(spans)
            elif item.there:
                copy_own_packs(item.source, folder, found, strict=self._move)
        for written in self._copier.bring(needed, strict=self._move) if needed else ():
            self._count(1)
            yield written

    def _count(self, packs: int) -> None:
        self._packs_done += packs
        if packs:
            self._progress("packs", self._packs_done, self._packs_in_all)


def _explained(
    root: Folder, target: Folder, step: StepPlan, deed: str, error: DeltaError
) -> DeltaError:
    """An error with its step, and what can be done."""
    if isinstance(error, CorruptionError | FormatError | NotFoundError):
        try:
            leaving.require_unchanged(step)
        except DeltaError as other:
            error = other  # what is missing was deleted, not damaged
    remedy = ""
    if isinstance(error, CorruptionError | FormatError):
        place = target.url if target.url in str(error) else root.url
        remedy = f". `orbax-delta repair {place}` mends what can be mended there"
    return type(error)(f"step {step.name} was not {deed}: {error}{remedy}")
