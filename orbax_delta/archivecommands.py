"""The command `archive`, for `cli` to add to its own.

Like all of `cli` it starts without jax. Does not belong here: what it does
(`archives`).
"""

from collections.abc import Sequence
from typing import Any

import click
from rich.table import Table

from orbax_delta import archiveplans, archives, documents, views
from orbax_delta.archivechoices import Choice
from orbax_delta.archiveplans import ArchivePlan, StepPlan
from orbax_delta.archives import ArchivedStep, ArchiveReport
from orbax_delta.documents import Document
from orbax_delta.listing import url_of
from orbax_delta.reports import human_bytes
from orbax_delta.terminal import bars, json_option, print_json, root_argument, seconds


def add_to(commands: click.Group) -> None:
    """Add the command to the others."""
    commands.add_command(archive)


@click.command()
@root_argument
@click.argument("target", metavar="TARGET")
@click.option(
    "--steps",
    "names",
    multiple=True,
    metavar="STEP[,STEP]...",
    help="These steps; may be given several times.",
)
@click.option(
    "--older-than",
    type=seconds,
    metavar="TIME",
    help="Steps saved longer ago, as 12h or 7d, but for the newest of ROOT.",
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=1),
    metavar="K",
    help="Of these, or of all but the newest: steps whose number is a multiple of K.",
)
@click.option(
    "--move",
    is_flag=True,
    help="Delete them from ROOT once TARGET has them; a link is left, so that they are "
    "listed and restored as before.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be copied.")
@json_option
def archive(
    root: str,
    target: str,
    names: tuple[str, ...],
    older_than: float | None,
    keep_every: int | None,
    move: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Copy or move steps of ROOT to TARGET, with all that they need.

    TARGET is a folder or bucket, and becomes a ROOT for every command. Everything is
    checked as it is copied. Run it again after a failure: it goes on where it ended.
    With ROOT and TARGET exchanged it brings steps back.
    """
    pieces = (name.strip() for text in names for name in text.split(","))
    wanted = [name for name in pieces if name]
    choice = Choice(steps=wanted, older_than=older_than, keep_every=keep_every)
    with bars() as progress:
        planned = archiveplans.plan(url_of(root), url_of(target), choice, progress)
        if dry_run:
            shown = _show(_of_plan(planned, move=move), as_json)
            return shown or _exit_code(planned.steps)
        report = archives.execute(planned, move=move, progress=progress)
    return _show(_of_report(report), as_json) or _exit_code(report.steps)


def _exit_code(steps: Sequence[StepPlan | ArchivedStep]) -> int:
    errors = [step.error for step in steps if step.error is not None]
    return errors[0].exit_code if errors else 0


def _of_plan(planned: ArchivePlan, *, move: bool) -> Document:
    return {
        "dry_run": True,
        "root": planned.root.folder.url,
        "archive": planned.target.url,
        "steps": [
            {
                "step": step.name,
                "outcome": _intent(step),
                "moved": step.error is None and (move or step.is_moved),
                "packs_copied": step.copies,
                "packs_there": step.there + len(step.missing) - step.copies,
                "written_bytes": step.copied_bytes,
            }
            | _error(step.error)
            for step in planned.steps
        ],
    }


def _intent(step: StepPlan) -> str:
    if step.error is not None:
        return "would fail"
    return "there" if step.is_there else "copy"


def _of_report(report: ArchiveReport) -> Document:
    return {
        "dry_run": False,
        "root": report.root,
        "archive": report.archive,
        "steps": [_of_step(step) for step in report.steps],
        "total_seconds": report.total_seconds,
        "ok": report.ok,
    }


def _of_step(step: ArchivedStep) -> Document:
    document = {
        "step": step.step,
        "outcome": step.outcome,
        "moved": step.moved,
        "packs_copied": step.packs_copied,
        "packs_there": step.packs_there,
        "written_bytes": step.written_bytes,
        "total_seconds": step.total_seconds,
    }
    return document | _error(step.error)


def _error(error: Any) -> Document:
    return documents.of_error(error.kind, str(error)) if error is not None else {}


def _show(document: Document, as_json: bool) -> int:
    if as_json:
        print_json(document)
        return 0
    out = views.console()
    if document["steps"]:
        views.show(out, _table(document))
    views.say(out, *_lines(document))
    return 0


def _table(document: Document) -> Table:
    right = ["packs copied", "packs there", "bytes"]
    if not document["dry_run"]:
        right.append("seconds")
    table = views.columns_table(["step", ""], right)
    for step in document["steps"]:
        moved = ", moved" if step["moved"] else ""
        cells = [
            step["step"],
            f"{step['outcome']}{moved}",
            str(step["packs_copied"]),
            str(step["packs_there"]),
            human_bytes(step["written_bytes"]),
        ]
        if not document["dry_run"]:
            cells.append(f"{step['total_seconds']:.1f}")
        table.add_row(*cells)
    return table


def _lines(document: Document) -> list[str]:
    if not document["steps"]:
        return [f"No step of {document['root']} fits; nothing was copied."]
    total = human_bytes(sum(step["written_bytes"] for step in document["steps"]))
    errors = [s["error"]["message"] for s in document["steps"] if "error" in s]
    if document["dry_run"]:
        verdict = (
            f"{total} of packs to copy to {document['archive']}. Nothing was done."
        )
    else:
        verdict = f"{total} written to {document['archive']}."
    return [*errors, verdict]
