"""What all commands share: their arguments, progress on stderr, JSON on stdout.

Does not belong here: any command, what tables hold (`views`).
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from orbax_delta.listing import Progress

root_argument = click.argument("root", metavar="ROOT")
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."
)


def print_json(document: Any) -> None:
    """One document on stdout."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


@contextlib.contextmanager
def bars() -> Iterator[Progress]:
    """Bars on stderr, one for each thing counted, if that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    shown = Bars(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )
    tasks = {}

    def show_progress(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = shown.add_task(what, total=total)
        shown.update(tasks[what], completed=done)

    with shown:
        yield show_progress
