"""The command `orbax-delta watch`.

Does not belong here: reading again and again (`watching`), what a save looks like
(`costviews`).
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import click
import rich.box
from rich.console import Group
from rich.live import Live
from rich.text import Text

from orbax_delta import (
    costdocuments,
    costs,
    costviews,
    prometheus,
    terminal,
    views,
    watching,
)
from orbax_delta.costs import Costs
from orbax_delta.documents import Document
from orbax_delta.errors import DeltaError
from orbax_delta.listing import url_of
from orbax_delta.terminal import prometheus_option, root_argument

_WATCHED_SAVES = 15
_LEAST_INTERVAL, _LONGEST_INTERVAL = 0.1, 86400.0


def _interval(text: str) -> float:
    """Seconds between two looks."""
    seconds = terminal.seconds(text)
    if not _LEAST_INTERVAL <= seconds <= _LONGEST_INTERVAL:
        raise click.BadParameter(f"{text!r} is not from {_LEAST_INTERVAL}s to 1d")
    return seconds


@click.command()
@root_argument
@click.option(
    "--interval",
    type=_interval,
    metavar="TIME",
    default="5s",
    show_default=True,
    help="Time between two looks, from 0.1s to 1d.",
)
@prometheus_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object a line for each save.",
)
def watch(root: str, interval: float, metrics: Path | None, as_json: bool) -> int:
    """Follow the saves to ROOT until Ctrl-C.

    On a terminal a table that is kept up to date, elsewhere a line for each save. ROOT
    need not be there yet.
    """
    out = views.console()
    live = None if as_json or not out.is_terminal else Live(console=out)
    follower = _Follower(root, as_json=as_json)
    if metrics:
        prometheus.require_folder(metrics)
    text = ""
    try:
        with live or contextlib.nullcontext():
            for found in watching.follow(url_of(root), seconds=interval):
                if live:
                    live.update(_picture(root, found, out.width), refresh=True)
                else:
                    follower.tell(found)
                # Steps that go change it too.
                if metrics and isinstance(found, Costs):
                    before, text = text, prometheus.exposition(found)
                    if text != before:
                        prometheus.write(metrics, found)
    except KeyboardInterrupt:
        pass  # how one leaves it
    return 0


class _Follower:
    """What is printed where there is no terminal: each save once.

    What is wrong goes to standard error, once for as long as it lasts: a pipe that says
    nothing looks as if nothing was saved.
    """

    def __init__(self, root: str, *, as_json: bool) -> None:
        self._root = root
        self._as_json = as_json
        self._seen: set[tuple[str, str, int]] = set()
        self._told: Sequence[str] = ()

    def tell(self, found: Costs | DeltaError | None) -> None:
        """Print what is new in what was read."""
        if isinstance(found, Costs):
            self._complain(found.damaged)
            for save in found.saves:
                if save.identity not in self._seen:
                    self._seen.add(save.identity)
                    self._print(costdocuments.of_save(save))
        else:
            self._complain([_why_nothing(self._root, found)])

    def _complain(self, lines: Sequence[str]) -> None:
        for line in lines:
            if line not in self._told:
                click.echo(views.plain(f"orbax-delta: {line}"), err=True)
        self._told = tuple(lines)

    def _print(self, save: Document) -> None:
        line = json.dumps(save, allow_nan=False) if self._as_json else None
        click.echo(line or views.plain(costviews.save_line(save)))


def _why_nothing(root: str, found: DeltaError | None) -> str:
    return str(found) if found else f"Nothing has been saved to {root} yet."


def _picture(root: str, found: Costs | DeltaError | None, width: int) -> Group:
    """What the terminal shows after one look."""
    if not isinstance(found, Costs):
        text = views.plain(_why_nothing(root, found))
        return Group(Text(text, style="red" if found else ""))
    document = costdocuments.of_history(found, costs.forecast(found))
    table = costviews.history_table(document["saves"][-_WATCHED_SAVES:], width)
    table.box = rich.box.SIMPLE_HEAD
    lines = [
        *costviews.restore_lines(document),
        *costviews.forecast_lines(document["forecast"]),
        *document["problems"],
        f"Saves known: {len(document['saves'])}. Ctrl-C ends.",
    ]
    return Group(table, *(Text(views.plain(line)) for line in lines))
