"""What the command line knows, as JSON documents (dict, list, str, int, float, None).

Pure functions from values of the flows; `--json` prints what they return and `views`
makes tables of it. Does not belong here: reading anything, wording.
"""

import collections
import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orbax_delta.check import VerifyReport
from orbax_delta.dtypes import Rule
from orbax_delta.errors import DeltaError
from orbax_delta.forgetting import ForgetPlan
from orbax_delta.listing import Item, Root
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.moving import Move
from orbax_delta.parts import Row
from orbax_delta.prune import PrunePlan
from orbax_delta.repair import RepairReport
from orbax_delta.reports import SaveReport, chain_lengths
from orbax_delta.steps import Step

Document = dict[str, Any]


def of_error(kind: str, message: str) -> Document:
    """An error as every command prints it."""
    return {"error": {"kind": kind, "message": message}}


def _of_delta_error(error: DeltaError) -> Document:
    return of_error(error.kind, str(error))


def of_root(root: Root, sizes: Mapping[str, int], packs: Sequence[str]) -> Document:
    """What `ls` shows.

    Args:
        root: The root.
        sizes: Bytes of those packs whose size is known.
        packs: All packs of the store.
    """
    store: Document = {
        "url": root.store.url,
        "uuid": root.store.uuid or None,
        "shared": root.store.shared,
        "packs": len(packs),
        "bytes": _total(packs, sizes),
    }
    if root.store_error:
        store |= _of_delta_error(root.store_error)
    return {
        "root": root.folder.url,
        "store": store,
        "steps": [of_item(item) for item in root.items],
        "bases": [of_item(item) for item in root.bases],
        "other_steps": list(root.others),
    }


def of_item(item: Item) -> Document:
    """One item of a step, from its MANIFEST."""
    document: Document = {
        "step": item.step,
        "number": item.place.step,
        "item": item.place.item,
        "finished": item.finished,
    }
    manifest, report = item.manifest, item.report
    if item.archived is not None:
        saved_at = _time(item.archived.saved_us / 1e6)
        document |= {"saved_at": saved_at, "archive": item.archived.archive}
    if manifest is None or report is None:
        return document | (_of_delta_error(item.error) if item.error else {})
    return document | {
        "saved_at": _time(manifest.wall_time),
        "full_bytes": manifest.full_bytes,
        "written_bytes": report.written_bytes,
        "times_smaller": report.times_smaller,
        "packs": len(manifest.packs),
        "self_contained": manifest.self_contained,
        "records_per_chunk_mean": report.records_per_chunk_mean,
        "records_per_chunk_max": report.records_per_chunk_max,
        "predecessor": (manifest.predecessor or {}).get("step"),
    }


def _time(seconds: float) -> str:
    """A time since 1970 on the clock of this machine."""
    return dt.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def of_step(item: Item, step: Step) -> Document:
    """What `show` shows: one item of a step with its leaves."""
    manifest = step.manifest
    if item.archived is not None:
        where = f"{step.place.item_url}/{MANIFEST_NAME}"
        report = SaveReport.from_document(manifest.report, where=where)
        item = dataclasses.replace(item, manifest=manifest, report=report)
    return of_item(item) | {
        "attempt": manifest.attempt,
        "save_index": manifest.save_index,
        "predecessor": manifest.predecessor,
        "store_uuid": manifest.store_uuid or None,
        "packs_url": step.packs.url,
        "pack_names": list(manifest.packs),
        "required_features": list(manifest.required_features),
        "key_id": manifest.encryption.get("key_id"),
        "options": dict(manifest.options),
        "versions": dict(manifest.versions),
        "custom_metadata": manifest.custom_metadata,
        "report": dict(manifest.report),
        "leaves": _of_leaves(step),
    }


def _of_leaves(step: Step) -> list[Document]:
    rows: dict[int, list[Row]] = collections.defaultdict(list)
    for row in step.rows:
        rows[row.leaf].append(row)
    documents = []
    for index, leaf in enumerate(step.manifest.leaves):
        mean, longest = chain_lengths([len(row.refs) for row in rows[index]])
        refs = {ref for row in rows[index] for ref in row.refs}
        documents.append(
            {
                "path": leaf.name,
                "kind": leaf.kind,
                "dtype": leaf.dtype,
                "shape": list(leaf.shape),
                "chunks": len(rows[index]),
                "records_per_chunk_mean": mean,
                "records_per_chunk_max": longest,
                "stored_bytes": sum(ref.length for ref in refs),
                "forms": _forms(rows[index]),
                "lossy": step.manifest.lossy.get(leaf.name),
            }
        )
    return documents


def _forms(rows: Iterable[Row]) -> dict[str, int]:
    """Records by form; a chunk that is cast from another counts as `derived`."""
    counts: collections.Counter[str] = collections.Counter()
    for row in rows:
        if row.rule is Rule.NONE:
            counts.update(ref.form.name.lower() for ref in row.refs)
        else:
            counts["derived"] += 1
    return dict(sorted(counts.items()))


def of_verification(report: VerifyReport) -> Document:
    """What `verify` shows: the report, with what follows from it."""
    return dataclasses.asdict(report) | {
        "ok": report.ok,
        "newest_whole": report.newest_whole,
    }


def of_repair(report: RepairReport) -> Document:
    """What `repair` did, or would do."""
    return dataclasses.asdict(report) | {"ok": report.ok}


def of_prune(
    plan: PrunePlan, deleted: Sequence[str], sizes: Mapping[str, int], *, dry_run: bool
) -> Document:
    """What a prune would do or did; `sizes` holds those that are known."""
    return {
        "dry_run": dry_run,
        "dead": _of_packs(plan.dead, sizes),
        "dead_bytes": _total(plan.dead, sizes),
        "deleted": _of_packs(deleted, sizes),
        "deleted_bytes": _total(deleted, sizes),
        "live": len(plan.live),
        "live_bytes": _total(plan.live, sizes),
        "manifests": list(plan.manifests),
        "pins": list(plan.pins),
        "hosts": list(plan.hosts),
        "stale": list(plan.stale),
    }


def of_move(planned: Move) -> Document:
    """What `moved` changes."""
    return {
        "store": planned.store,
        "uuid": planned.entry.root_uuid,
        "from": planned.before,
        "to": planned.entry.root,
    }


def of_forget(plan: ForgetPlan) -> Document:
    """What `forget` removes."""
    return {
        "store": plan.store,
        "roots": [
            {
                "root": root.entry.root or None,
                "uuid": root.entry.root_uuid,
                "steps": root.steps,
                "bases": len(root.bases),
            }
            for root in plan.roots
        ],
    }


def _of_packs(names: Sequence[str], sizes: Mapping[str, int]) -> list[Document]:
    return [{"pack": name, "bytes": sizes.get(name)} for name in names]


def _total(names: Sequence[str], sizes: Mapping[str, int]) -> int | None:
    """Their size, or None where that of one is not known."""
    if any(name not in sizes for name in names):
        return None
    return sum(sizes[name] for name in names)
