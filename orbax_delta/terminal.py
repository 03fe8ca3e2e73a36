"""What all commands share: their arguments, progress on stderr, JSON on stdout.

Does not belong here: any command, what tables hold (`views`).
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from orbax_delta import keys
from orbax_delta.listing import Progress


def _told(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    # Read when a step needs it: the variable may be set for other commands.
    if value is not None:
        keys.remember(value)


key_option = click.option(
    "--key-file",
    type=click.Path(),
    envvar="ORBAX_DELTA_KEY_FILE",
    show_envvar=True,
    expose_value=False,
    callback=_told,
    help="Keys of encrypted steps.",
)


def root_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """ROOT, and the keys of what is encrypted there."""
    return click.argument("root", metavar="ROOT")(key_option(command))


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."
)
prometheus_option = click.option(
    "--prometheus",
    "metrics",
    type=click.Path(path_type=Path),
    help="Write metrics here, for the textfile collector of node-exporter.",
)

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)", re.ASCII)


def seconds(text: str) -> float:
    """Seconds of a time such as `90`, `15m`, `12h` or `2.5d`: a type of an option.

    >>> seconds("1.5h")
    5400.0
    """
    found = _TIME.fullmatch(text)
    if found is None:
        raise click.BadParameter(
            f"{text!r} is no time; expected 90, 90s, 15m, 12h or 2.5d"
        )
    return float(found[1]) * _UNITS[found[2]]


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
