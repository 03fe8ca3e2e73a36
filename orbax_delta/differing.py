"""Which leaves differ between two steps, and by how much.

Chunks that both steps cut alike are compared by their digests first, and only those
that differ are read. Elements are compared by their bits; of floats the size of the
change is measured too. About 200 MB are held at a time, whatever the size of the steps.
Does not belong here: restoring, what `verify` does.
"""

import dataclasses
import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from orbax_delta import chunks, listing, reader, steps
from orbax_delta.background import Pool, batches, pool
from orbax_delta.chunks import Box
from orbax_delta.codecs import Bytes
from orbax_delta.deviations import Deviation
from orbax_delta.errors import DeltaError, NotFoundError
from orbax_delta.listing import Item, Progress, no_progress
from orbax_delta.manifests import ARRAY_KINDS, LeafEntry
from orbax_delta.options import DeltaOptions
from orbax_delta.parts import Row
from orbax_delta.ranges import ReadCount
from orbax_delta.reader import Request
from orbax_delta.steps import Step

_GROUP_BYTES = 16 << 20
_ARRAYS = frozenset({"jax", "numpy", "numpy_scalar"})

Status = Literal["same", "changed", "added", "removed", "reshaped", "retyped"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafDiff:
    """How a leaf differs between two steps.

    Attributes:
        path: Its path.
        status: `same` bits, `changed` bits, `added` or `removed`, `reshaped` or
            `retyped`: of another shape, or of another kind or type, which is not
            compared further.
        before: Kind or type and shape in the first step, as text; empty where added.
        after: The same of the second step; empty where removed.
        elements: Elements that were compared; of values in the MANIFEST one.
        changed: Of these, how many have other bits.
        largest: Largest absolute change of floats; None of other types, and where
            nothing changed between two finite numbers.
        mean: Their absolute changes over all elements of the leaf; None likewise.
        not_finite: Changed elements that are infinite or no number in one of the steps,
            of which `largest` and `mean` know nothing.
        error: Why it could not be compared, or not all of it; empty if it was.
    """

    path: str
    status: Status
    before: str = ""
    after: str = ""
    elements: int = 0
    changed: int = 0
    largest: float | None = None
    mean: float | None = None
    not_finite: int = 0
    error: str = ""

    @property
    def share(self) -> float:
        """Changed elements over all."""
        return self.changed / max(self.elements, 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepDiff:
    """How two steps differ, one item of them.

    Attributes:
        item: The item.
        leaves: All leaves of both, in order of the second step; removed ones last.
        chunks: Chunks of the second step that were compared.
        chunks_read: Of these, how many had to be read.
        read_bytes: Bytes read from packs, of both steps.
        exit_code: Of the first leaf that could not be compared; 0: there is none.
    """

    item: str
    leaves: Sequence[LeafDiff]
    chunks: int
    chunks_read: int
    read_bytes: int
    exit_code: int = 0

    @property
    def damaged(self) -> Sequence[LeafDiff]:
        """Leaves that could not be compared to their end."""
        return [leaf for leaf in self.leaves if leaf.error]


def between(
    url: str, before: str, after: str, *, progress: Progress = no_progress
) -> Sequence[StepDiff]:
    """Compare two steps of a root, item by item.

    Args:
        url: The root.
        before: The first step, as `orbax-delta ls` names it; also a kept base.
        after: The second one.
        progress: Told of every leaf.

    Returns:
        One comparison for each item that one of the steps has.

    Raises:
        NotFoundError: There is no such root or step, or one went away meanwhile.
        CorruptionError: A MANIFEST or part is damaged; of records `LeafDiff.error`
            tells.
        FormatError: The same.
        StorageError: The storage failed.

    Example:
        >>> between("/checkpoints/run", "3", "4")[0].read_bytes  # doctest: +SKIP
        1048
    """
    root = listing.read_root(url, progress)
    old, new = (_by_item(root.select([name])) for name in (before, after))
    found = []
    for item in dict.fromkeys((*new, *old)):
        sides = [side[item] for side in (old, new) if item in side]
        try:
            opened = {one.key: _open(one) for one in sides}
            diff = compare(
                opened[old[item].key] if item in old else None,
                opened[new[item].key] if item in new else None,
                progress=progress,
            )
        except DeltaError:
            _require_there(sides)
            raise
        if diff.damaged:
            _require_there(sides)
        found.append(diff)
    return found


def _by_item(items: Sequence[Item]) -> Mapping[str, Item]:
    return {item.place.item: item for item in reversed(items)}


def _open(item: Item) -> Step:
    if item.error is not None:
        raise item.error
    return steps.open_step(item.place)


def _require_there(items: Sequence[Item]) -> None:
    """What a live run has deleted is not damaged.

    Raises:
        NotFoundError: A step has gone, or was saved again.
    """
    steps.let_deletions_end()
    for item in items:
        if item.manifest is None:
            continue
        if steps.is_gone(item.place.folder, item.manifest.attempt):
            raise NotFoundError(
                f"step {item.step} went away while it was compared; a run that saves "
                "to this root deletes steps"
            )


def compare(
    before: Step | None, after: Step | None, *, progress: Progress = no_progress
) -> StepDiff:
    """Compare an item of two steps, leaf by leaf.

    Args:
        before: The first; None: all leaves are added.
        after: The second, of any sharding, structure and types; None: all are removed.
        progress: Told of every leaf.

    Raises:
        StorageError: The storage failed.

    Example:
        >>> compare(step_3, step_4).leaves[0].share  # doctest: +SKIP
        0.0094
    """
    old, new = _Side(before), _Side(after)
    with pool(DeltaOptions().worker_count) as executor:
        comparing = _Comparing(old, new, executor)
        diffs = []
        for done, path in enumerate(new.leaves):
            diffs.append(comparing.leaf(path))
            progress("leaves", done + 1, len(new.leaves))
    diffs += [
        LeafDiff(path=path, status="removed", before=_text(old.leaves[path]))
        for path in old.leaves
        if path not in new.leaves
    ]
    step = after or before
    return StepDiff(
        item=step.manifest.item if step else "",
        leaves=diffs,
        chunks=len(after.rows) if after else 0,
        chunks_read=comparing.chunks_read,
        read_bytes=comparing.count.bytes,
        exit_code=comparing.exit_code,
    )


class _Side:
    """One of the two steps, its leaves and rows by path."""

    def __init__(self, step: Step | None) -> None:
        self.step = step
        self.leaves: dict[str, LeafEntry] = {}
        self.rows: dict[str, dict[Box, Row]] = {}
        if step is not None:
            entries = step.manifest.leaves
            self.leaves = {entry.name: entry for entry in entries}
            self.rows = {name: {} for name in self.leaves}
            for row in step.rows:
                self.rows[entries[row.leaf].name][row.box] = row


def _text(entry: LeafEntry) -> str:
    """Kind or type and shape of a leaf, as one word."""
    if entry.kind not in ARRAY_KINDS:
        return entry.kind
    shape = ",".join(map(str, entry.shape))
    if entry.kind in _ARRAYS:
        return f"{entry.dtype}[{shape}]"
    return f"{entry.kind}{f'<{entry.value}>' if entry.value else ''}[{shape}]"


_Group = tuple[Sequence[Row], Sequence[Row]]
"""Chunks of the first step and those of the second that are held against them."""


class _Comparing:
    """The comparison of two steps under way.

    Attributes:
        count: What is read.
        chunks_read: Chunks of the second step that were read.
        exit_code: Of the first chunk that could not be; 0: there is none.
    """

    def __init__(self, old: _Side, new: _Side, executor: Pool) -> None:
        self._old = old
        self._new = new
        self._executor = executor
        self.count = ReadCount()
        self.chunks_read = 0
        self.exit_code = 0

    def leaf(self, path: str) -> LeafDiff:
        """How one leaf of the second step differs from that of the first."""
        after = self._new.leaves[path]
        before = self._old.leaves.get(path)
        if before is None:
            return LeafDiff(path=path, status="added", after=_text(after))
        same = LeafDiff(
            path=path, status="same", before=_text(before), after=_text(after)
        )
        if _type(before) != _type(after):
            return dataclasses.replace(same, status="retyped")
        if before.shape != after.shape:
            return dataclasses.replace(same, status="reshaped")
        if after.kind not in ARRAY_KINDS:
            return _of_values(same, before, after)
        elements = math.prod(after.shape)
        found, errors = self._deviation(path, max(elements, 1))
        return dataclasses.replace(
            same,
            status="changed" if found.changed or errors else "same",
            elements=elements,
            changed=found.changed,
            largest=found.largest,
            mean=None if found.largest is None else found.total,
            not_finite=found.not_finite,
            error="; ".join(dict.fromkeys(errors)),
        )

    def _deviation(self, path: str, unit: int) -> tuple[Deviation, list[str]]:
        entry = self._new.leaves[path]
        found = Deviation()
        errors: list[str] = []
        for old, new in self._groups(path):
            contents = self._contents(path, old, new, errors)
            for row in new:
                for other in old:
                    box = chunks.intersect(row.box, other.box)
                    if box is None or not {id(row), id(other)} <= contents.keys():
                        continue
                    arrays = (
                        entry.element.from_content(
                            contents[id(one)], chunks.box_shape(one.box)
                        )[chunks.slices(box, one.box)]
                        for one in (other, row)
                    )
                    found.add(entry.element, *arrays, unit=unit)
        return found, errors

    def _groups(self, path: str) -> Iterator[_Group]:
        """Chunks to read together: those that both cut alike in pairs, others by turns.

        Of chunks that are cut otherwise, a group of the second step is held against
        all that overlap it of the first, group by group, so that memory stays bounded
        whatever the two layouts are.
        """
        entry = self._new.leaves[path]
        old, new = self._old.rows[path], self._new.rows[path]

        def weigh(row: Row) -> int:
            return entry.element.content_bytes(chunks.element_count(row.box))

        alike = [
            row
            for box, row in new.items()
            if box in old and old[box].digest != row.digest
        ]
        self.chunks_read += len(alike)
        for group in batches(alike, weigh, least=_GROUP_BYTES):
            yield [old[row.box] for row in group], group
        fresh = [row for box, row in new.items() if box not in old]
        gone = [row for box, row in old.items() if box not in new]
        self.chunks_read += len(fresh)
        for group in batches(fresh, weigh, least=_GROUP_BYTES):
            near = [
                row
                for row in gone
                if any(chunks.intersect(row.box, other.box) for other in group)
            ]
            for others in batches(near, weigh, least=_GROUP_BYTES):
                yield others, group

    def _contents(
        self, path: str, old: Sequence[Row], new: Sequence[Row], errors: list[str]
    ) -> Mapping[int, Bytes]:
        """Contents by the identity of rows; why there is none goes to `errors`."""
        wanted: dict[str, list[Request]] = {}
        folders = {}
        for side, rows in ((self._old, old), (self._new, new)):
            if side.step is not None:
                folders[side.step.packs.url] = side.step.packs
                # Both in one reading where they can be: a list that continues another
                # needs the records of that only once.
                wanted.setdefault(side.step.packs.url, []).extend(
                    Request(leaf=side.leaves[path], row=row) for row in rows
                )
        contents = {}
        for url, requests in wanted.items():
            for fetched in reader.fetch(
                folders[url], requests, executor=self._executor, count=self.count
            ):
                if fetched.content is None:
                    errors.append(str(fetched.error))
                    found = getattr(fetched.error, "exit_code", DeltaError.exit_code)
                    self.exit_code = self.exit_code or found
                else:
                    contents[id(fetched.request.row)] = fetched.content
        return contents


def _type(entry: LeafEntry) -> tuple[object, ...]:
    """What must be equal for two leaves to be compared element by element."""
    if entry.kind in _ARRAYS:
        return ("array", entry.dtype)
    return entry.kind, entry.dtype, entry.value if entry.kind == "key" else None


def _of_values(same: LeafDiff, before: LeafEntry, after: LeafEntry) -> LeafDiff:
    """Two values that stand in the MANIFESTs; JSON holds their bits."""
    same = dataclasses.replace(same, elements=1)
    if before.value == after.value:
        return same
    largest = None
    if after.kind == "float":
        old, new = (
            struct.unpack(">d", bytes.fromhex(str(entry.value)))[0]
            for entry in (before, after)
        )
        if math.isfinite(old) and math.isfinite(new):
            largest = min(abs(new - old), sys.float_info.max)
    return dataclasses.replace(
        same,
        status="changed",
        changed=1,
        largest=largest,
        mean=largest,
        not_finite=int(after.kind == "float" and largest is None),
    )
