"""Restoring: from a MANIFEST to the tree that the caller wants, top to bottom.

Read the MANIFEST, match target and stored leaves, read the rows, fetch only the chunks
that lie in wanted regions, and make each leaf as soon as its last chunk is there. What
is damaged is looked for in other lists of records.
"""

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from orbax_delta import assemble, chunks, healing, reader, steps, trees
from orbax_delta.assemble import LeafPlan
from orbax_delta.background import pool
from orbax_delta.base import Base
from orbax_delta.codecs import Bytes
from orbax_delta.errors import (
    CorruptionError,
    FormatError,
    OutOfMemoryError,
    StructureError,
)
from orbax_delta.manifests import LeafEntry, Manifest, path_name
from orbax_delta.options import DeltaOptions
from orbax_delta.places import Place
from orbax_delta.reports import RestoreReport, chain_lengths
from orbax_delta.steps import Step
from orbax_delta.targets import AS_SAVED, Make, Wanted

_logger = logging.getLogger("orbax_delta")

_MAX_NAMED = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a caller wants of a step.

    Attributes:
        treedef: Structure to return.
        leaves: What to make of each path, in the order of the structure.
        partial: Whether leaves of the step may be left out.
    """

    treedef: Any
    leaves: Mapping[trees.Path, Wanted]
    partial: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A restored tree, how it was read, and the base that it leaves behind."""

    tree: Any
    report: RestoreReport
    base: Base


@contextlib.contextmanager
def _named(place: Place) -> Iterator[None]:
    """Errors of what is stored say in which step."""
    try:
        yield
    except (CorruptionError, FormatError, OutOfMemoryError) as error:
        if place.item_url in str(error):
            raise
        raise type(error)(f"{place.label}: {error}") from error


def run(place: Place, target: Target | None, settings: DeltaOptions) -> Restored:
    """Restore one item of one step.

    Raises:
        NotFoundError: There is no MANIFEST, or its store is gone.
        StructureError: The target does not fit the step.
        CorruptionError: A chunk is damaged and cannot be healed; nothing is returned.
        FormatError: A file of the step is not what it should be.
        OutOfMemoryError: There is no room for it.
        StorageError: The storage did not give something; nothing is returned.
    """
    with _named(place):
        return _run(place, target, settings)


def _run(place: Place, target: Target | None, settings: DeltaOptions) -> Restored:
    started = time.perf_counter()
    step = steps.open_step(place)
    moved: list[str] = []
    plans = [
        assemble.plan_leaf(entry, wanted, moved=moved)
        for entry, wanted in _matched(step.manifest, target, place)
    ]
    _warn_moved(moved, place)
    wanted_rows = _wanted_rows(step, plans)
    count = reader.ReadCount()
    values, healed = _fill(step, plans, wanted_rows, count, settings)
    report = _report(step, wanted_rows, count, healed, started)
    _logger.info("%s", report.line())
    if target is None:
        paths = [leaf.path for leaf in step.manifest.leaves]
        tree = trees.rebuild(step.manifest.tree, values, paths=paths, where=place.label)
    else:
        tree = jtu.tree_unflatten(target.treedef, values)
    base = step.as_base()
    for request in healed:
        # The next save must not build on a damaged list, nor name it again.
        base.forget(request.leaf, request.row.box)
    return Restored(tree=tree, report=report, base=base)


def _matched(
    manifest: Manifest, target: Target | None, place: Place
) -> list[tuple[LeafEntry, Wanted]]:
    """Stored leaves with what is wanted of them, in the order of the result."""
    if target is None:
        return [(entry, AS_SAVED) for entry in manifest.leaves]
    stored = {entry.path: entry for entry in manifest.leaves}
    absent = [
        path
        for path, wanted in target.leaves.items()
        if path not in stored and wanted.make is not Make.NOTHING
    ]
    extra = [] if target.partial else [p for p in stored if p not in target.leaves]
    if absent or extra:
        raise StructureError(_difference(place, stored, absent, extra))
    return [
        (stored.get(path) or LeafEntry(path=path, kind="int"), wanted)
        for path, wanted in target.leaves.items()
    ]


def _difference(
    place: Place,
    stored: Mapping[trees.Path, LeafEntry],
    absent: Sequence[trees.Path],
    extra: Sequence[trees.Path],
) -> str:
    lines = [f"the target does not fit {place.label}:"]
    for paths, what in ((absent, "not in the step"), (extra, "not in the target")):
        for path in paths[:_MAX_NAMED]:
            entry = stored.get(path)
            kind = f" ({entry.dtype or entry.kind} {entry.shape})" if entry else ""
            lines.append(f"  {path_name(path)}{kind}: {what}")
        if len(paths) > _MAX_NAMED:
            lines.append(f"  and {len(paths) - _MAX_NAMED} more that are {what}")
    if extra and not absent:
        lines.append(
            "To leave leaves out, use DeltaRestore(target, partial_restore=True), or "
            "`...` in their place"
        )
    return "\n".join(lines)


def _warn_moved(moved: Sequence[str], place: Place) -> None:
    if moved:
        _logger.warning(
            "%s: the devices or number widths that %d leaves were saved with are not "
            "here (first: %s); without a sharding in the target they come back as "
            "numpy, or on the default device. This process has %d devices",
            place.label,
            len(moved),
            moved[0],
            jax.device_count(),
        )


def _wanted_rows(step: Step, plans: Sequence[LeafPlan]) -> list[reader.Request]:
    """The chunks that overlap a wanted region."""
    regions = {plan.entry.path: list(plan.buffers) for plan in plans}
    leaves = step.manifest.leaves
    return [
        reader.Request(leaf=leaves[row.leaf], row=row)
        for row in step.rows
        if any(
            chunks.intersect(row.box, region) is not None
            for region in regions.get(leaves[row.leaf].path, ())
        )
    ]


def _fill(
    step: Step,
    plans: Sequence[LeafPlan],
    wanted_rows: Sequence[reader.Request],
    count: reader.ReadCount,
    settings: DeltaOptions,
) -> tuple[list[Any], list[reader.Request]]:
    """Read what is wanted and make each leaf; also which chunks were healed."""
    filling = _Filling(plans, wanted_rows)
    failing = []
    with pool(settings.worker_count) as executor:
        for got in reader.fetch(
            step.packs, wanted_rows, executor=executor, count=count
        ):
            if got.content is None:
                failing.append(got)
            else:
                filling.put(got.request, got.content)
    if failing:
        found = healing.heal(step, failing)
        for got in failing:
            filling.put(got.request, found[healing.wanted(got.request)].read())
    return filling.values, [got.request for got in failing]


class _Filling:
    """Leaves of the result, each made when its last chunk has come.

    Attributes:
        values: What is made of each plan, in order.
    """

    def __init__(
        self, plans: Sequence[LeafPlan], wanted_rows: Sequence[reader.Request]
    ) -> None:
        self._plans = plans
        self._position = {plan.entry.path: index for index, plan in enumerate(plans)}
        self._missing = collections.Counter(r.leaf.path for r in wanted_rows)
        self.values: list[Any] = [
            None if self._missing[plan.entry.path] else plan.finish() for plan in plans
        ]

    def put(self, request: reader.Request, content: Bytes) -> None:
        """A chunk has come."""
        path = request.leaf.path
        plan = self._plans[self._position[path]]
        for region, buffer in plan.buffers.items():
            reader.place(content, request, region, buffer)
        self._missing[path] -= 1
        if not self._missing[path]:
            self.values[self._position[path]] = plan.finish()
            plan.buffers = {}


def _report(
    step: Step,
    wanted_rows: Sequence[reader.Request],
    count: reader.ReadCount,
    healed: Sequence[reader.Request],
    started: float,
) -> RestoreReport:
    mean, longest = chain_lengths([len(r.row.refs) for r in wanted_rows])
    return RestoreReport(
        step=step.place.step_name,
        item=step.place.item,
        restored_bytes=sum(request.content_bytes for request in wanted_rows),
        read_bytes=count.bytes,
        read_requests=count.requests,
        chunks=len(wanted_rows),
        chunks_in_step=len(step.rows),
        chunks_healed=len(healed),
        records_per_chunk_mean=mean,
        records_per_chunk_max=longest,
        total_seconds=time.perf_counter() - started,
    )
