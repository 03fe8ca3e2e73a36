"""Verification: every file of a root is read, every chunk decoded, nothing changed.

Each pack is read whole once and looked at record by record; each distinct list of
records is decoded once, whatever number of steps and leaves share it. Whatever is
found, the rest is still looked at. Does not belong here: repair, how it is shown.
"""

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence

from orbax_delta import healing, identity, listing, prune, reader, records, steps
from orbax_delta.background import Pool, ordered_map, pool
from orbax_delta.chunks import Box
from orbax_delta.errors import (
    ConflictError,
    CorruptionError,
    DeltaError,
    FormatError,
)
from orbax_delta.findings import Findings, Problem, step_names
from orbax_delta.inspection import (
    Fault,
    PackState,
    identity_file,
    inspect_pack,
    store_faults,
)
from orbax_delta.listing import Item, Progress, Root, is_base, no_progress
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.marks import read_marks, warned_of
from orbax_delta.options import DeltaOptions
from orbax_delta.ranges import Packs
from orbax_delta.reader import Request
from orbax_delta.steps import Step
from orbax_delta.store import Folder

_logger = logging.getLogger("orbax_delta")

_PACKS_IN_FLIGHT = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification looked at and what it found.

    Attributes:
        root: The folder.
        steps: Steps looked at, in order.
        whole_steps: Those among them that restore. A step can be whole although a pack
            that it names is damaged: in records that it does not need, or whose content
            others hold too.
        bases: Kept bases looked at, as their folders, oldest first.
        whole_bases: Those among them that restore.
        vanished: Steps that were deleted, renamed or replaced meanwhile; nothing is
            said of them.
        others: Steps of other handlers, unless steps were named; nothing is said of
            them either.
        archived: Steps that were moved, with their archive: what is there is not looked
            at.
        chunks: Chunks of all steps.
        chunks_decoded: Distinct ones among them that were read and decoded.
        packs: Packs read: those that steps and bases name, and pins of running jobs.
        pack_bytes: Their size.
        unnamed_packs: Packs of the store that no MANIFEST names: garbage that `prune`
            removes, or of a save under way; none where a root that shares the store
            cannot be reached.
        problems: Everything wrong, in order of discovery.
        total_seconds: Time it took.
    """

    root: str
    steps: Sequence[str]
    whole_steps: Sequence[str]
    bases: Sequence[str]
    whole_bases: Sequence[str]
    vanished: Sequence[str]
    others: Sequence[str]
    archived: Mapping[str, str]
    chunks: int
    chunks_decoded: int
    packs: int
    pack_bytes: int
    unnamed_packs: Sequence[str]
    problems: Sequence[Problem]
    total_seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def newest_whole(self) -> str | None:
        """The newest step that restores; the newest base if no step does."""
        return next(reversed(self.whole_steps or self.whole_bases), None)


def verify(
    url: str,
    wanted: Sequence[str] = (),
    *,
    progress: Progress = no_progress,
    threads: int | None = None,
) -> VerifyReport:
    """Check every step of a root, or some of them, down to the last bit.

    A step that a running job deletes or replaces meanwhile is left out of the findings.

    Args:
        url: A manager's root, or a folder with self-contained checkpoints.
        wanted: Names or numbers of steps; none: all.
        progress: Told of MANIFESTs, packs and chunks done.
        threads: Worker threads; None: as many as a save would take.

    Raises:
        NotFoundError: There is no such folder or step, or nothing of this package.
        WrongKeyError: A step is encrypted, and this process does not know its key.
        StorageError: The folder cannot be listed.
    """
    return examine(url, wanted, progress=progress, threads=threads).report()


def examine(
    url: str,
    wanted: Sequence[str] = (),
    *,
    progress: Progress = no_progress,
    threads: int | None = None,
) -> "Examination":
    """As `verify`, with what a repair needs to know."""
    started = time.perf_counter()
    root = listing.read_root(url, progress)
    found = Examination(root, root.select(wanted), progress, started)
    found.require_keys()
    found.check_store()
    found.check_names()
    with pool(DeltaOptions(threads=threads).worker_count) as executor:
        found.check_packs(executor)
        found.check_steps(executor)
    found.check_healing()
    return found


class Examination:
    """What is known of a root while and after it is verified.

    Attributes:
        root: The root.
    """

    def __init__(
        self, root: Root, items: Sequence[Item], progress: Progress, started: float
    ) -> None:
        self.root = root
        self._started = started
        self._items = items
        self._progress = progress
        self._findings = Findings(root.store)
        self._packs_of: dict[str, Folder] = {}
        self._packs: dict[tuple[str, str], PackState] = {}
        # One entry for each distinct list: None if it decodes.
        self._outcomes: dict[bytes, Fault | None] = {}
        self._failing: list[tuple[Item, Request, Fault]] = []
        self._chunks = 0

    def file(self, url: str) -> str:
        """A file as reports name it."""
        return url.removeprefix(self.root.folder.url)

    def is_there(self, item: Item) -> bool:
        """Whether what was found of an item has not been deleted since."""
        return self._findings.is_there(item)

    def require_keys(self) -> None:
        """See that every step can be opened: a missing key is no damage.

        Raises:
            WrongKeyError: One cannot.
        """
        for item in self._items:
            if item.manifest is not None:
                steps.key_of(item.manifest, item.place.folder)

    def check_store(self) -> None:
        """STORE.json, the marker, pins, marks and names of packs."""
        wanted = {
            item.manifest.store_uuid
            for item in self.root.everything
            if item.manifest and not item.manifest.self_contained
        }
        for fault in store_faults(self.root.store, self.root.store_error, wanted):
            self._findings.add(Problem(what=fault.what, file=self.file(fault.file)))

    def check_names(self) -> None:
        """Whether each step is the one that its folder says, and no copy."""
        for what, items in identity.findings(self._items):
            # A folder that was renamed while it was listed can be there twice.
            if all(map(self._findings.is_there, items)):
                (first, *_) = items
                problem = Problem(what=what, file=first.key, item=first.place.item)
                self._findings.add(problem, *items)

    def check_packs(self, executor: Pool) -> None:
        """Read every pack that a step or a pin names, and look at each record."""
        needed: dict[tuple[str, str], list[Item]] = {}
        folders: dict[str, Folder] = {}
        for item in self._items:
            folder = self._open_packs(item)
            if folder is None or item.manifest is None:
                continue
            self._packs_of[item.key] = folders.setdefault(folder.url, folder)
            for name in item.manifest.packs:
                needed.setdefault((folder.url, name), []).append(item)
        # A job goes on from these although their step may have been deleted.
        store = self.root.store
        for name in self._pinned_packs():
            folders.setdefault(store.packs.url, store.packs)
            needed.setdefault((store.packs.url, name), [])
        keys = sorted(needed)
        states = ordered_map(
            executor,
            lambda key: inspect_pack(folders[key[0]], key[1]),
            keys,
            window=_PACKS_IN_FLIGHT,
        )
        for done, (key, state) in enumerate(zip(keys, states, strict=True)):
            self._progress("packs", done + 1, len(keys))
            if not (needed[key] or state.readable):
                continue  # pinned no more, and pruned
            self._packs[key] = state
            for what in state.faults:
                self._findings.add(
                    Problem(what=what, file=self.file("".join(key))), *needed[key]
                )

    @property
    def _looks_at_all(self) -> bool:
        return len(self._items) == len(self.root.everything)

    def _pinned_packs(self) -> set[str]:
        """Packs that a running job may build on, where all steps are looked at."""
        store = self.root.store
        # In a shared store nobody can tell which root a pin is of.
        if store.shared or not self._looks_at_all:
            return set()
        try:
            pins = read_marks(store.pins)
        except (CorruptionError, FormatError):
            return set()  # check_store tells of a pin that cannot be read
        # What a process that died was working on is garbage, whatever is wrong with it.
        running = (pin for pin in pins.values() if not pin.owner.known_dead)
        named = {pack for pin in running for pack in pin.packs}
        return named.intersection(store.packs.names()) - warned_of(store.condemned)

    def _open_packs(self, item: Item) -> Folder | None:
        if item.error is not None and item.manifest is not None:
            # Only its report is damaged, which no restore needs.
            self._findings.add(Problem(what=str(item.error), file=item.key), item)
        elif item.error is not None:
            self._add_to_item(item, item.error, item.key)
        if item.manifest is None:
            return None
        try:
            return steps.packs_of(item.manifest, item.place)
        except DeltaError as error:
            linked = bool(item.manifest.root_uuid)
            file = self.file(identity_file(self.root.store, linked=linked))
            self._add_to_item(item, error, file)
        return None

    def _add_to_item(self, item: Item, error: DeltaError, file: str) -> None:
        problem = Problem(what=str(error), file=file, item=item.place.item)
        self._findings.add_damage(item, problem)

    def check_steps(self, executor: Pool) -> None:
        """Decode every chunk of every step whose packs were found."""
        items = [item for item in self._items if item.key in self._packs_of]
        total = sum(
            part.rows for item in items if item.manifest for part in item.manifest.parts
        )
        for item in items:
            try:
                step = steps.open_step(item.place)
                if item.manifest and step.manifest.attempt != item.manifest.attempt:
                    raise ConflictError("it was saved again or repaired meanwhile")
                self._check_step(item, step, executor, total)
            except DeltaError as error:
                self._add_to_item(item, error, _file_of_rows(item, error))

    def _check_step(self, item: Item, step: Step, executor: Pool, total: int) -> None:
        fresh: dict[bytes, list[Request]] = {}
        for row in step.rows:
            request = Request(leaf=step.manifest.leaves[row.leaf], row=row)
            mark = _list_mark(step.packs, request)
            if mark not in self._outcomes:
                fault = self._unreadable(step.packs, request)
                if fault is None:
                    fresh.setdefault(mark, []).append(request)
                    continue
                self._outcomes[mark] = fault
            self._settle(item, [request], self._outcomes[mark], total)
        decoded = reader.fetch(
            step.packs,
            [requests[0] for requests in fresh.values()],
            executor=executor,
            count=reader.ReadCount(),
        )
        for got in decoded:
            mark = _list_mark(step.packs, got.request)
            self._outcomes[mark] = self._fault(step.packs, got)
            self._settle(item, fresh[mark], self._outcomes[mark], total)

    def _unreadable(self, packs: Packs, request: Request) -> Fault | None:
        """The first pack of a list that is not there to be read from."""
        for ref in request.row.refs:
            state = self._packs.get((packs.url, ref.pack))
            if state is not None and not state.readable:
                return Fault(
                    what=f"its pack cannot be read: {state.faults[0]}",
                    file=self.file(packs.url + ref.pack),
                )
        return None

    def _fault(self, packs: Packs, got: reader.Fetched) -> Fault | None:
        if got.error is None:
            return None
        names = [ref.pack for ref in got.request.row.refs if ref.pack]
        damaged = [name for name in names if self._packs[packs.url, name].faults]
        blamed = (damaged or names or [""])[0]
        what = str(got.error).removeprefix(f"{got.request.where}: ")
        return Fault(what=what, file=self.file(packs.url + blamed))

    def _settle(
        self, item: Item, requests: Sequence[Request], fault: Fault | None, total: int
    ) -> None:
        self._chunks += len(requests)
        self._progress("chunks", self._chunks, total)
        if fault is None:
            return
        self._failing += [(item, request, fault) for request in requests]

    def check_healing(self) -> None:
        """Whether chunks that fail restore all the same, from other records."""
        failing = [
            request
            for item, request, _ in self._failing
            if item.place.root_url is not None
        ]
        healed = healing.find(self.root, failing) if failing else {}
        for item, request, fault in self._failing:
            source = healed.get(healing.wanted(request))
            problem = Problem(
                what=fault.what,
                file=fault.file,
                item=item.place.item,
                leaf=request.leaf.name,
                chunk=_box_text(request.row.box),
                healed_by=source.step if source else "",
            )
            if source is None:
                self._findings.add_damage(item, problem)
            else:
                self._findings.add(problem, item)

    def fault(self, packs: Packs, request: Request) -> Fault | None:
        """Why a chunk's own list does not yield it; None if it does."""
        return self._outcomes.get(_list_mark(packs, request))

    def damaged_packs(self, url: str) -> set[str]:
        """Packs of a folder that are missing or in which something is wrong."""
        return {
            name
            for (folder, name), state in self._packs.items()
            if folder == url and state.faults
        }

    def report(self) -> VerifyReport:
        """Everything found, less what concerns steps that have gone meanwhile."""
        gone = self._findings.gone()
        named = {
            pack
            for item in self.root.everything
            if item.manifest
            for pack in item.manifest.packs
        }
        judged = step_names(
            item
            for item in self._items
            if item.key not in gone and item.archived is None
        )
        whole = [name for name in judged if name not in self._findings.damaged]
        return VerifyReport(
            root=self.root.folder.url,
            steps=tuple(name for name in judged if not is_base(name)),
            whole_steps=[name for name in whole if not is_base(name)],
            bases=tuple(name for name in judged if is_base(name)),
            whole_bases=[name for name in whole if is_base(name)],
            vanished=step_names(item for item in self._items if item.key in gone),
            others=self.root.others if self._looks_at_all else (),
            archived={
                item.step: item.archived.archive
                for item in self._items
                if item.archived is not None
            },
            chunks=self._chunks,
            chunks_decoded=len(self._outcomes),
            packs=len(self._packs),
            pack_bytes=sum(state.size_bytes for state in self._packs.values()),
            unnamed_packs=self._unnamed(named),
            problems=self._findings.problems(gone),
            total_seconds=time.perf_counter() - self._started,
        )

    def _unnamed(self, named: set[str]) -> Sequence[str]:
        """Packs that no MANIFEST names; of a shared store, of all roots, if known."""
        try:
            if self.root.store.shared:
                named = named.union(*prune.named_packs(self.root.store))
        except DeltaError as error:
            _logger.warning("which packs are garbage is not known: %s", error)
            return ()
        return sorted(set(self.root.store.packs.names()) - named)


def _file_of_rows(item: Item, error: DeltaError) -> str:
    """The part that an error speaks of, else the MANIFEST."""
    parts = [part.name for part in item.manifest.parts] if item.manifest else []
    name = next((name for name in parts if name in str(error)), MANIFEST_NAME)
    return item.key.removesuffix(MANIFEST_NAME) + name


def _box_text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _list_mark(packs: Packs, request: Request) -> bytes:
    """Equal for chunks that decode from the same records to the same content."""
    row = request.row
    # Copies of a self-contained checkpoint have packs of the same names.
    fields = [packs.url]
    fields += [
        f"{ref.form:d} {ref.pack} {ref.offset} {ref.length} {ref.word.hex()}"
        for ref in row.refs
    ]
    fields.append(f"{row.rule:d} {row.digest.hex()} {request.content_bytes}")
    fields.append(f"{request.leaf.element.word_bytes}")
    return records.digest(";".join(fields).encode())
