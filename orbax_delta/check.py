"""Verification: every file of a root is read, every chunk decoded, nothing changed.

Each pack is read whole once and looked at record by record; each distinct list of
records is decoded once, whatever number of steps and leaves share it. Whatever is
found, the rest is still looked at. Does not belong here: repair, how it is shown.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence

from orbax_delta import listing, reader, records, steps
from orbax_delta.background import Pool, ordered_map, pool
from orbax_delta.chunks import Box
from orbax_delta.errors import DeltaError, StorageError
from orbax_delta.inspection import Fault, PackState, inspect_pack, store_faults
from orbax_delta.listing import Item, Progress, Root, no_progress
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.options import DeltaOptions
from orbax_delta.reader import Request
from orbax_delta.steps import Step
from orbax_delta.store import STORE_FILE, Folder

_PACKS_IN_FLIGHT = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: What was found and what was expected.
        file: The file at fault, relative to the root where it lies below it.
        steps: Of the steps looked at those that need it; empty: it concerns the store.
        item: Item of the steps; empty where it concerns no single one.
        leaf: Leaf that does not restore; empty where it concerns no single one.
        chunk: Chunk of the leaf, as `[0:16, 0:32]`.
    """

    what: str
    file: str
    steps: tuple[str, ...] = ()
    item: str = ""
    leaf: str = ""
    chunk: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification looked at and what it found.

    Attributes:
        root: The folder.
        steps: Steps looked at, in order.
        whole_steps: Those among them that restore. A step can be whole although a pack
            that it names is damaged: in records that it does not need.
        vanished: Steps that were deleted or renamed meanwhile; nothing is said of them.
        chunks: Chunks of all steps.
        chunks_decoded: Distinct ones among them that were read and decoded.
        packs: Packs read.
        pack_bytes: Their size.
        unnamed_packs: Packs of the store that no MANIFEST names: garbage that `prune`
            removes, or of a save under way.
        problems: Everything wrong, in order of discovery.
        total_seconds: Time it took.
    """

    root: str
    steps: Sequence[str]
    whole_steps: Sequence[str]
    vanished: Sequence[str]
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


def verify(
    url: str,
    wanted: Sequence[str] = (),
    *,
    progress: Progress = no_progress,
    threads: int | None = None,
) -> VerifyReport:
    """Check every step of a root, or some of them, down to the last bit.

    A step that a running job deletes meanwhile is left out of the findings.

    Args:
        url: A manager's root, or a folder with self-contained checkpoints.
        wanted: Names or numbers of steps; none: all.
        progress: Told of MANIFESTs, packs and chunks done.
        threads: Worker threads; None: as many as a save would take.

    Raises:
        NotFoundError: There is no such folder or step, or nothing of this package.
        StorageError: The folder cannot be listed.
    """
    started = time.perf_counter()
    root = listing.read_root(url, progress)
    found = _Verification(root, root.select(wanted), progress)
    found.check_store()
    with pool(DeltaOptions(threads=threads).worker_count) as executor:
        found.check_packs(executor)
        found.check_steps(executor)
    return found.report(started)


class _Verification:
    def __init__(self, root: Root, items: Sequence[Item], progress: Progress) -> None:
        self._root = root
        self._items = items
        self._progress = progress
        self._found: dict[Problem, list[Item]] = {}
        self._damaged: set[str] = set()
        self._packs_of: dict[str, Folder] = {}
        self._packs: dict[tuple[str, str], PackState] = {}
        # One entry for each distinct list: None if it decodes.
        self._outcomes: dict[bytes, Fault | None] = {}
        self._chunks = 0

    def _add(self, problem: Problem, *items: Item) -> None:
        needing = self._found.setdefault(problem, [])
        needing += [item for item in items if item not in needing[-1:]]

    def _add_damage(self, item: Item, problem: Problem) -> None:
        """A problem for which a step does not restore."""
        self._damaged.add(item.step)
        self._add(problem, item)

    def _file(self, url: str) -> str:
        return url.removeprefix(self._root.folder.url)

    def check_store(self) -> None:
        """STORE.json, the marker, pins, marks and names of packs."""
        wanted = {
            item.manifest.store_uuid
            for item in self._root.items
            if item.manifest and not item.manifest.self_contained
        }
        for fault in store_faults(self._root.store, self._root.store_error, wanted):
            self._add(Problem(what=fault.what, file=self._file(fault.file)))

    def check_packs(self, executor: Pool) -> None:
        """Read every pack that a step names, whole, and look at each record."""
        needed: dict[tuple[str, str], list[Item]] = {}
        folders: dict[str, Folder] = {}
        for item in self._items:
            folder = self._open_packs(item)
            if folder is None or item.manifest is None:
                continue
            self._packs_of[item.key] = folders.setdefault(folder.url, folder)
            for name in item.manifest.packs:
                needed.setdefault((folder.url, name), []).append(item)
        keys = sorted(needed)
        states = ordered_map(
            executor,
            lambda key: inspect_pack(folders[key[0]], key[1]),
            keys,
            window=_PACKS_IN_FLIGHT,
        )
        for done, (key, state) in enumerate(zip(keys, states, strict=True)):
            self._packs[key] = state
            for what in state.faults:
                self._add(
                    Problem(what=what, file=self._file("".join(key))), *needed[key]
                )
            self._progress("packs", done + 1, len(keys))

    def _open_packs(self, item: Item) -> Folder | None:
        if item.error is not None and item.manifest is not None:
            # Only its report is damaged, which no restore needs.
            self._add(Problem(what=str(item.error), file=item.key), item)
        elif item.error is not None:
            self._add_to_item(item, item.error, item.key)
        if item.manifest is None:
            return None
        try:
            return steps.packs_of(item.manifest, Folder(item.place.item_url))
        except DeltaError as error:
            file = self._file(self._root.store.url + STORE_FILE)
            self._add_to_item(item, error, file)
        return None

    def _add_to_item(self, item: Item, error: DeltaError, file: str) -> None:
        problem = Problem(what=str(error), file=file, item=item.place.item)
        self._add_damage(item, problem)

    def check_steps(self, executor: Pool) -> None:
        """Decode every chunk of every step whose packs were found."""
        items = [item for item in self._items if item.key in self._packs_of]
        total = sum(
            part.rows for item in items if item.manifest for part in item.manifest.parts
        )
        for item in items:
            try:
                self._check_step(item, steps.open_step(item.place), executor, total)
            except DeltaError as error:
                self._add_to_item(item, error, _file_of_rows(item, error))

    def _check_step(self, item: Item, step: Step, executor: Pool, total: int) -> None:
        fresh: dict[bytes, list[Request]] = {}
        for row in step.rows:
            request = Request(leaf=step.manifest.leaves[row.leaf], row=row)
            mark = _list_mark(request)
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
            mark = _list_mark(got.request)
            self._outcomes[mark] = self._fault(step.packs, got)
            self._settle(item, fresh[mark], self._outcomes[mark], total)

    def _unreadable(self, packs: Folder, request: Request) -> Fault | None:
        """The first pack of a list that is not there to be read from."""
        for ref in request.row.refs:
            state = self._packs.get((packs.url, ref.pack))
            if state is not None and not state.readable:
                return Fault(
                    what=f"its pack cannot be read: {state.faults[0]}",
                    file=self._file(packs.url + ref.pack),
                )
        return None

    def _fault(self, packs: Folder, got: reader.Fetched) -> Fault | None:
        if got.error is None:
            return None
        names = [ref.pack for ref in got.request.row.refs if ref.pack]
        damaged = [name for name in names if self._packs[packs.url, name].faults]
        blamed = (damaged or names or [""])[0]
        what = str(got.error).removeprefix(f"{got.request.where}: ")
        return Fault(what=what, file=self._file(packs.url + blamed))

    def _settle(
        self, item: Item, requests: Sequence[Request], fault: Fault | None, total: int
    ) -> None:
        self._chunks += len(requests)
        self._progress("chunks", self._chunks, total)
        if fault is None:
            return
        for request in requests:
            problem = Problem(
                what=fault.what,
                file=fault.file,
                item=item.place.item,
                leaf=request.leaf.name,
                chunk=_box_text(request.row.box),
            )
            self._add_damage(item, problem)

    def report(self, started: float) -> VerifyReport:
        """Everything found, less what concerns steps that have gone meanwhile."""
        gone = self._gone()
        problems = []
        for problem, items in self._found.items():
            left = _step_names(item for item in items if item.key not in gone)
            if left or not items:
                problems.append(dataclasses.replace(problem, steps=left))
        named = {
            pack
            for item in self._root.items
            if item.manifest
            for pack in item.manifest.packs
        }
        judged = _step_names(item for item in self._items if item.key not in gone)
        return VerifyReport(
            root=self._root.folder.url,
            steps=judged,
            whole_steps=[step for step in judged if step not in self._damaged],
            vanished=_step_names(item for item in self._items if item.key in gone),
            chunks=self._chunks,
            chunks_decoded=len(self._outcomes),
            packs=len(self._packs),
            pack_bytes=sum(state.size_bytes for state in self._packs.values()),
            unnamed_packs=sorted(set(self._root.store.packs.names()) - named),
            problems=problems,
            total_seconds=time.perf_counter() - started,
        )

    def _gone(self) -> set[str]:
        """Keys of MANIFESTs with a problem that are not there any more."""
        keys = {item.key for items in self._found.values() for item in items}
        return {key for key in keys if not self._is_there(key)}

    def _is_there(self, key: str) -> bool:
        try:
            return self._root.folder.read(key) is not None
        except StorageError:
            return True  # what cannot be read has not gone


def _file_of_rows(item: Item, error: DeltaError) -> str:
    """The part that an error speaks of, else the MANIFEST."""
    parts = [part.name for part in item.manifest.parts] if item.manifest else []
    name = next((name for name in parts if name in str(error)), MANIFEST_NAME)
    return item.key.removesuffix(MANIFEST_NAME) + name


def _step_names(items: Iterable[Item]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.step for item in items))


def _box_text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _list_mark(request: Request) -> bytes:
    """Equal for chunks that decode from the same records to the same content."""
    row = request.row
    fields = [
        f"{ref.form:d} {ref.pack} {ref.offset} {ref.length} {ref.word.hex()}"
        for ref in row.refs
    ]
    fields.append(f"{row.rule:d} {row.digest.hex()} {request.content_bytes}")
    fields.append(f"{request.leaf.element.word_bytes}")
    return records.digest(";".join(fields).encode())
