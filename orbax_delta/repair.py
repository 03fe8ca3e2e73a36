"""Repair: mend what the root itself can make good again; plan, then execute.

Chunks in damaged packs are stored anew, from their own records where these still
decode and from other lists with the same digest where not; lost files of a step come
from its kept base and the other way round; the small files are made anew. What cannot
be made good is left as it is.
"""

import dataclasses
import functools
import secrets
from collections.abc import Callable, Iterator, Sequence

from orbax_delta import bases, check, healing, owners, reader, rewriting, steps
from orbax_delta.background import pool
from orbax_delta.check import Examination
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    UnsupportedVersionError,
)
from orbax_delta.findings import Problem
from orbax_delta.listing import Item, Progress, no_progress
from orbax_delta.manifests import MANIFEST_NAME, PART_NAME
from orbax_delta.marks import Mark, parse_mark, read_marks
from orbax_delta.options import DeltaOptions
from orbax_delta.reader import Request
from orbax_delta.rewriting import Renewed, Written
from orbax_delta.steps import Step
from orbax_delta.store import COMMIT_MARKER, STORE_FILE, Folder, store_document


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """One thing that a repair does.

    Attributes:
        what: What, in words.
        file: The file or folder at fault, relative to the root.
        steps: Steps that it is about.
    """

    what: str
    file: str
    steps: tuple[str, ...] = ()


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


_Action = tuple[Mend, Callable[[], object]]


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
        NotFoundError: There is no such folder, or nothing of this package.
        UnsupportedVersionError: Something was written by a newer format.
        StorageError: The folder cannot be listed.
    """
    found = check.examine(url, progress=progress)
    _refuse_newer(found)
    mended: list[Mend] = []
    failed: list[Mend] = []
    # Each plan looks at what the one before it has mended.
    for planned in (_small_files, _lost_files, _damaged_records):
        if mended and not dry_run:
            found = check.examine(url, progress=progress)
        for mend, action in planned(found):
            try:
                if not dry_run:
                    action()
                mended.append(mend)
            except (DeltaError, FileNotFoundError) as error:
                what = f"{mend.what}: {error}"
                failed.append(dataclasses.replace(mend, what=what))
    after = check.examine(url, progress=progress) if mended and not dry_run else found
    return RepairReport(
        root=after.root.folder.url,
        dry_run=dry_run,
        mended=mended,
        failed=failed,
        problems=after.report().problems,
    )


def _refuse_newer(found: Examination) -> None:
    for error in (
        found.root.store_error,
        *(item.error for item in found.root.everything),
    ):
        if isinstance(error, UnsupportedVersionError):
            raise error


# --- small files ----------------------------------------------------------------------


def _small_files(found: Examination) -> Iterator[_Action]:
    """STORE.json, its marker, and marks that nobody can read."""
    store = found.root.store
    uuids = {
        item.manifest.store_uuid
        for item in found.root.everything
        if item.manifest and not item.manifest.self_contained
    }
    if len(uuids) == 1 and store.uuid not in uuids:
        (uuid,) = uuids
        yield (
            Mend(
                what="written anew with the identity that all MANIFESTs name",
                file=found.file(store.url + STORE_FILE),
            ),
            lambda: store.folder.replace(STORE_FILE, store_document(uuid)),
        )
    if uuids and store.folder.read(COMMIT_MARKER) != b"":
        yield (
            Mend(what="written anew", file=found.file(store.url + COMMIT_MARKER)),
            lambda: store.folder.replace(COMMIT_MARKER, b""),
        )
    for folder in (store.pins, store.condemned):
        for name in _unreadable_marks(folder):
            # A save whose pin goes fails and is repeated; no step is harmed.
            mend = Mend(
                what="deleted, for nobody can tell what it is about",
                file=found.file(folder.url + name),
            )
            yield mend, functools.partial(folder.delete, name)


def _unreadable_marks(folder: Folder) -> Iterator[str]:
    for name in folder.names():
        data = None if name[0] == "." else folder.read(name)
        try:
            if data is not None:
                parse_mark(data, where=folder.url + name)
        except UnsupportedVersionError:
            raise
        except (CorruptionError, FormatError):
            yield name


# --- files of a step that its base has, and the other way round -----------------------


def _lost_files(found: Examination) -> Iterator[_Action]:
    """MANIFESTs and parts that a copy of the same attempt can replace."""
    whole = {}
    for item in found.root.everything:
        if item.manifest is not None and _opens(item):
            whole[item.manifest.attempt] = item
    for item in found.root.everything:
        if item.lost_part or item.manifest is None or not _opens(item):
            source = whole.get(_attempt_of(item))
            if source is not None:
                yield _copy(found, source, item)
            elif item.is_base:
                yield _drop(found, item)


def _opens(item: Item) -> bool:
    try:
        steps.open_step(item.place)
    except DeltaError:
        return False
    return True


def _attempt_of(item: Item) -> str:
    """The attempt that wrote a step's files, by the name of its part if need be."""
    if item.manifest is not None:
        return item.manifest.attempt
    names = map(PART_NAME.fullmatch, Folder(item.place.item_url).names())
    attempts = {match[1] for match in names if match}
    return attempts.pop() if len(attempts) == 1 else ""


def _copy(found: Examination, source: Item, item: Item) -> _Action:
    def copy() -> None:
        origin, folder = Folder(source.place.item_url), Folder(item.place.item_url)
        step = steps.open_step(source.place)
        for name in (*(part.name for part in step.manifest.parts), MANIFEST_NAME):
            data = origin.read(name)
            if data is not None:
                folder.replace(name, data)

    what = f"files copied from {source.step}, which are of the same save"
    return Mend(what=what, file=item.key, steps=(item.step,)), copy


def _drop(found: Examination, item: Item) -> _Action:
    name = item.step.rpartition("/")[2]
    mend = Mend(what="base dropped: it does not restore", file=item.step)
    return mend, lambda: bases.release(found.root.store, name)


# --- chunks in damaged packs ----------------------------------------------------------


def _damaged_records(found: Examination) -> Iterator[_Action]:
    """Steps with chunks in damaged packs, and a warning to jobs about those packs."""
    damaged = found.damaged_packs(found.root.store.packs.url)
    written: Written = {}
    for item in found.root.everything:
        if item.manifest is None or item.manifest.self_contained or not _opens(item):
            continue
        step = steps.open_step(item.place)
        affected = [
            request
            for request in _requests(step)
            if found.fault(request)
            or any(ref.pack in damaged for ref in request.row.refs)
        ]
        if affected:
            yield from _renew(found, item, step, affected, written)
    known = {
        pack
        for mark in read_marks(found.root.store.condemned).values()
        if mark.owner == owners.NOBODY
        for pack in mark.packs
    }
    if damaged - known:
        yield (
            Mend(
                what=f"{len(damaged)} damaged packs condemned: jobs that run write "
                "anew what they hold, and `prune` deletes them",
                file=found.file(found.root.store.packs.url),
            ),
            lambda: _condemn(found, sorted(damaged)),
        )


def _requests(step: Step) -> list[Request]:
    leaves = step.manifest.leaves
    return [Request(leaf=leaves[row.leaf], row=row) for row in step.rows]


def _renew(
    found: Examination,
    item: Item,
    step: Step,
    affected: Sequence[Request],
    written: Written,
) -> Iterator[_Action]:
    failing = [request for request in affected if found.fault(request)]
    healed = healing.find(found.root, failing)
    lost = [r for r in failing if healing.wanted(r) not in healed]
    count = len(affected) - len(lost)
    if not count:
        return

    def contents() -> Iterator[Renewed]:
        sound = [request for request in affected if not found.fault(request)]
        with pool(DeltaOptions().worker_count) as executor:
            for got in reader.fetch(
                step.packs, sound, executor=executor, count=reader.ReadCount()
            ):
                if got.content is not None:
                    yield Renewed(request=got.request, content=got.content)
        for request in failing:
            one = healed.get(healing.wanted(request))
            if one is not None:
                yield Renewed(request=request, content=one.content)

    what = f"{count} chunks stored anew"
    if healed:
        sources = ", ".join(sorted({one.step for one in healed.values()}))
        what += f", {len(failing) - len(lost)} of them from records of {sources}"
    if lost:
        what += f"; {len(lost)} lost (first: {lost[0].where})"
    yield (
        Mend(what=what, file=item.key, steps=(item.step,)),
        lambda: rewriting.rewrite(
            found.root.store,
            step,
            contents(),
            as_base=item.is_base,
            written=written,
        ),
    )


def _condemn(found: Examination, packs: Sequence[str]) -> None:
    """Keep jobs from building on packs that are damaged; a prune removes the mark."""
    mark = Mark(owner=owners.NOBODY, packs=packs)
    found.root.store.condemned.write(secrets.token_hex(16), mark.encode())
