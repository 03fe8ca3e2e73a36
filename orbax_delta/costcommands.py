"""The commands about costs: `orbax-delta history|du|diff|advise`, and `watch`.

Like all of `cli` they start without jax. Does not belong here: what they show
(`costviews`, `costdocuments`), anything that is worked out, following a run
(`watchcommand`).
"""

from pathlib import Path

import click

from orbax_delta import (
    advice,
    costdocuments,
    costplots,
    costs,
    costviews,
    differing,
    prometheus,
    usage,
    views,
)
from orbax_delta.errors import InvalidInputError
from orbax_delta.listing import url_of
from orbax_delta.terminal import (
    bars,
    json_option,
    print_json,
    prometheus_option,
    root_argument,
    seconds,
)
from orbax_delta.watchcommand import watch

_ADVICE = """\b
Examples:
  orbax-delta advise run --mtbf 12h
  orbax-delta advise run --hosts 64 --host-mtbf 20d --restart 5m
"""
_MOST_HOSTS = 10**9

_plot = click.option(
    "--plot", type=click.Path(path_type=Path), help="Write a PNG here."
)


def add_to(commands: click.Group) -> None:
    """Add these commands to the others."""
    for command in (history, du, diff, watch, advise):
        commands.add_command(command)


@click.command()
@root_argument
@_plot
@prometheus_option
@json_option
def history(root: str, plot: Path | None, metrics: Path | None, as_json: bool) -> int:
    """Show what each save to ROOT has cost.

    Also saves of steps that are gone, the last restore, and what storage the next saves
    will take. Times are in seconds, kB and MB are thousands and millions of bytes.
    """
    if plot:
        costplots.require_matplotlib()
    with bars() as progress:
        known = costs.read(url_of(root), progress)
    if metrics:
        prometheus.write(metrics, known)
    # Before anything is printed, so that JSON is one document if it fails.
    if plot and known.saves:
        costplots.draw_history(costs.by_step(known.saves), plot)
    document = costdocuments.of_history(known, costs.forecast(known))
    if as_json:
        print_json(document)
    else:
        out = views.console()
        views.show(out, costviews.history_table(document["saves"], out.width))
        views.say(
            out,
            *costviews.restore_lines(document),
            *costviews.forecast_lines(document["forecast"]),
            *document["problems"],
        )
    return known.exit_code


@click.command()
@root_argument
@click.option("--leaves", is_flag=True, help="List leaves, the dearest first.")
@json_option
def du(root: str, leaves: bool, as_json: bool) -> int:
    """Show where the bytes of ROOT are.

    What each step and kept base needs alone and what it shares. The figures add up to
    the bytes of the files. Reads MANIFESTs and parts, no data.
    """
    with bars() as progress:
        known = costs.read(url_of(root), progress)
        used = usage.measure(known.root, progress)
    forecast = costs.forecast(known)
    document = costdocuments.of_usage(known.root.folder.url, used, forecast)
    if as_json:
        print_json(document)
        return used.exit_code
    out = views.console()
    if leaves:
        views.show(out, costviews.leaves_table(document))
    else:
        views.show(out, costviews.owners_table(document))
        views.say(out, "")
        views.show(out, costviews.usage_table(document))
        views.say(
            out,
            *costviews.elsewhere_lines(document),
            *costviews.forecast_lines(document["forecast"]),
        )
    views.say(out, *document["problems"])
    return used.exit_code


@click.command()
@root_argument
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@json_option
def diff(root: str, before: str, after: str, as_json: bool) -> int:
    """Show which leaves differ between two steps of ROOT.

    How many elements of which leaves have other bits in step B than in step A, and of
    floats by how much. Chunks with equal digests are not read. A step is as
    `orbax-delta ls` names it; also the folder of a kept base.
    """
    with bars() as progress:
        found = differing.between(url_of(root), before, after, progress=progress)
    document = costdocuments.of_diff(before, after, found)
    if as_json:
        print_json(document)
    else:
        out = views.console()
        for item in document["items"]:
            table = costviews.diff_table(item)
            if table.row_count:
                views.show(out, table)
            views.say(out, *costviews.diff_lines(item))
    return next((item.exit_code for item in found if item.exit_code), 0)


@click.command(epilog=_ADVICE)
@root_argument
@click.option(
    "--mtbf",
    type=seconds,
    metavar="TIME",
    help="Mean time between failures of the job.",
)
@click.option("--hosts", type=click.IntRange(1, _MOST_HOSTS), help="Hosts of the job.")
@click.option(
    "--host-mtbf",
    type=seconds,
    metavar="TIME",
    help="Mean time between failures of one host.",
)
@click.option(
    "--restart",
    type=seconds,
    metavar="TIME",
    default="0s",
    show_default=True,
    help="From a failure until the restore begins.",
)
@click.option(
    "--restore",
    type=seconds,
    metavar="TIME",
    help="Time of a restore; without it as measured.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    help="Steps that are kept; without it as many as now.",
)
@_plot
@json_option
def advise(
    root: str,
    mtbf: float | None,
    hosts: int | None,
    host_mtbf: float | None,
    restart: float,
    restore: float | None,
    keep: int | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Say how often to save to ROOT.

    By what its saves and restores have cost. Times are such as 90s, 15m, 12h or 20d.
    Give --mtbf of the job, or --hosts and --host-mtbf: many hosts fail as often as all
    of them together.
    """
    if plot:
        costplots.require_matplotlib()
    if (mtbf is None) == (hosts is None or host_mtbf is None):
        raise InvalidInputError(
            "advise needs to know how often the job fails: give either --mtbf, or both "
            "--hosts and --host-mtbf"
        )
    if mtbf is None and hosts and host_mtbf is not None:
        mtbf = host_mtbf / hosts
    with bars() as progress:
        known = costs.read(url_of(root), progress)
    found = advice.advise(
        known,
        mtbf=mtbf or 0.0,
        held_bytes=usage.held_bytes(known.root),
        restart=restart,
        restore=restore,
        keep=keep,
    )
    if plot:
        costplots.draw_advice(found, plot)
    document = costdocuments.of_advice(known.root.folder.url, found)
    if as_json:
        print_json(document)
    else:
        out = views.console()
        views.show(out, costviews.advice_table(document))
        views.say(out, *costviews.advice_lines(document), *known.damaged)
    return known.exit_code
