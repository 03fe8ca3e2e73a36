"""Restoring: from a MANIFEST to the tree that the caller wants, top to bottom.

Read the MANIFEST, match target and stored leaves, read the rows, fetch only the chunks
that lie in wanted regions, and make each leaf as soon as its last chunk is there. What
a live tree has is not read; what is damaged is looked for in other lists of records.
"""

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
from orbax_delta.background import Pool, ordered_map, pool
from orbax_delta.base import Base
from orbax_delta.errors import (
    CorruptionError,
    FormatError,
    OutOfMemoryError,
    StructureError,
)
from orbax_delta.filling import Filling
from orbax_delta.live import Live, Survey
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


def run(
    place: Place,
    target: Target | None,
    settings: DeltaOptions,
    live: Live | None = None,
) -> Restored:
    """Restore one item of one step.

    Args:
        place: The item of the step.
        target: What to make of it; None: everything as it was saved.
        settings: Options in force.
        live: What need not be read, where its digests say so.

    Raises:
        NotFoundError: There is no MANIFEST, or its store is gone.
        StructureError: The target does not fit the step.
        CorruptionError: A chunk is damaged and cannot be healed; nothing is returned.
        FormatError: A file of the step is not what it should be.
        OutOfMemoryError: There is no room for it.
        StorageError: The storage did not give something; nothing is returned.
    """
    with _named(place):
        return _run(place, target, settings, live)


def _run(
    place: Place, target: Target | None, settings: DeltaOptions, live: Live | None
) -> Restored:
    started = time.perf_counter()
    step = steps.open_step(place)
    moved: list[str] = []
    plans = [
        assemble.plan_leaf(entry, wanted, moved=moved)
        for entry, wanted in _matched(step.manifest, target, place)
    ]
    _warn_moved(moved, place)
    wanted = _wanted_rows(step, plans)
    filling = Filling(plans, wanted)
    with pool(settings.worker_count) as executor:
        survey = Survey(live, wanted, executor) if live else None
        window = 2 * settings.worker_count
        reused = _reuse(filling, survey, executor, window) if survey else []
        taken = set(map(id, reused))
        rest = [request for request in wanted if id(request) not in taken]
        count = reader.ReadCount()
        healed = _read(step, filling, rest, survey, count, executor)
    values = filling.values
    lossy = [p.entry.name for p in plans if p.entry.name in step.manifest.lossy]
    report = dataclasses.replace(
        _report(step, wanted, reused, count, healed, started),
        lossy_leaves=tuple(lossy),
    )
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
    of_leaf = [regions.get(leaf.path, []) for leaf in leaves]
    whole = [
        any(chunks.contains(region, chunks.whole(leaf.shape)) for region in found)
        for leaf, found in zip(leaves, of_leaf, strict=True)
    ]
    return [
        reader.Request(leaf=leaves[row.leaf], row=row)
        for row in step.rows
        if whole[row.leaf]
        or any(
            chunks.intersect(row.box, region) is not None
            for region in of_leaf[row.leaf]
        )
    ]


def _reuse(
    filling: Filling, survey: Survey, executor: Pool, window: int
) -> Sequence[reader.Request]:
    """Take what is at hand: whole arrays as they are, of others the chunks.

    At most `window` chunks are copied ahead of what is filled.
    """
    by_leaf: dict[trees.Path, list[reader.Request]] = {}
    for request in survey.same:
        by_leaf.setdefault(request.leaf.path, []).append(request)
    reused: list[reader.Request] = []
    parts: list[reader.Request] = []
    for path, requests in by_leaf.items():
        value = survey.value(path)
        complete = filling.missing(path) == len(requests)
        if complete and filling.plan(path).is_made(value):
            filling.replace(path, value)
            reused += requests
        else:
            parts += requests
    copies = ordered_map(executor, survey.content, parts, window=window)
    for request, content in zip(parts, copies, strict=True):
        if content is not None:
            filling.put(request, content)
            reused.append(request)
    return reused


def _read(
    step: Step,
    filling: Filling,
    wanted: Sequence[reader.Request],
    survey: Survey | None,
    count: reader.ReadCount,
    executor: Pool,
) -> list[reader.Request]:
    """Read chunks and make each leaf; returns those that had to be healed."""
    failing = list(wanted)
    # With what is at hand first; where that has changed meanwhile, without it.
    for seeds in (survey.seeds, None) if survey else (None,):
        fetched = reader.fetch(
            step.packs,
            failing,
            executor=executor,
            count=count,
            into=filling.window,
            seeds=seeds,
        )
        damaged = []
        for got in fetched:
            if got.content is None:
                damaged.append(got)
            else:
                filling.put(got.request, got.content, placed=got.placed)
        failing = [got.request for got in damaged]
    if damaged:
        found = healing.heal(step, damaged)
        for request in failing:
            filling.put(request, found[healing.wanted(request)].read())
    return failing


def _report(
    step: Step,
    wanted: Sequence[reader.Request],
    reused: Sequence[reader.Request],
    count: reader.ReadCount,
    healed: Sequence[reader.Request],
    started: float,
) -> RestoreReport:
    mean, longest = chain_lengths([len(r.row.refs) for r in wanted])
    return RestoreReport(
        step=step.place.step_name,
        item=step.place.item,
        restored_bytes=sum(request.content_bytes for request in wanted),
        reused_bytes=sum(request.content_bytes for request in reused),
        read_bytes=count.bytes,
        read_requests=count.requests,
        records_read=count.records,
        chunks=len(wanted),
        chunks_in_step=len(step.rows),
        chunks_reused=len(reused),
        chunks_healed=len(healed),
        records_per_chunk_mean=mean,
        records_per_chunk_max=longest,
        total_seconds=time.perf_counter() - started,
    )
