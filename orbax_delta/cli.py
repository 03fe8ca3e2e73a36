"""The command line: `orbax-delta ls|show|verify|repair|prune|forget|moved|demo|...`.

Tables on a terminal, plain columns in a pipe, one JSON document with `--json`;
progress on stderr. Starts without jax for everything but `demo` and what `exchanging`
adds. Does not belong here: what a table holds (`views`), anything that reads a step,
what costs (`costcommands`), archives (`archivecommands`).
"""

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from orbax_delta import (
    archivecommands,
    check,
    costcommands,
    documents,
    errors,
    exchanging,
    forgetting,
    keys,
    listing,
    moving,
    prune,
    registry,
    repair,
    views,
)
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    InvalidInputError,
    NotFoundError,
)
from orbax_delta.keys import Encryption
from orbax_delta.listing import Item, url_of
from orbax_delta.steps import Step, open_step
from orbax_delta.store import DeltaStore, Folder
from orbax_delta.storefiles import STORE_FILE, UUID
from orbax_delta.terminal import (
    bars,
    json_option,
    key_option,
    print_json,
    root_argument,
)

EXIT_CODES: Mapping[int, str] = {
    0: "done; nothing is wrong",
    1: "another error",
    InvalidInputError.exit_code: "the command or an option is wrong",
    NotFoundError.exit_code: "no such root, step or store",
    errors.ConflictError.exit_code: "another process was in the way",
    errors.WrongKeyError.exit_code: "a key is missing or wrong",
    errors.FormatError.exit_code: "a file is not what its name says",
    errors.UnsupportedVersionError.exit_code: "a file is of a newer format",
    CorruptionError.exit_code: "damage found",
    errors.StorageError.exit_code: "the storage failed",
    130: "interrupted by Ctrl-C",
}
_INTERRUPTED = 130
_EPILOG = "\b\nExit codes:\n" + "\n".join(
    f"{code:>5}  {meaning}" for code, meaning in EXIT_CODES.items()
)


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="orbax-delta", prog_name="orbax-delta")
@key_option
def commands() -> None:
    """Look at, verify and tidy delta checkpoints written through Orbax.

    ROOT is the folder that was given to CheckpointManager: a path, or a URL such as
    gs://bucket/run. Nothing but repair, prune, forget, moved, archive, import and demo
    changes anything in it.
    """


costcommands.add_to(commands)
exchanging.add_to(commands)
archivecommands.add_to(commands)


@commands.command()
@root_argument
@click.option("--bases", is_flag=True, help="List the states that the store keeps.")
@json_option
def ls(root: str, bases: bool, as_json: bool) -> int:
    """List the steps of ROOT; reads nothing but their MANIFESTs."""
    with bars() as progress:
        found = listing.read_root(url_of(root), progress)
    packs = found.store.packs.names()
    document = documents.of_root(found, _sizes(found.store.packs, packs), packs)
    if as_json:
        print_json(document)
    else:
        out = views.console()
        table = views.bases_table if bases else views.steps_table
        views.show(out, table(document))
        views.say(out, *views.store_lines(document, bases=bases))
    damaged = [found.store_error, *(item.error for item in found.everything)]
    return next((error.exit_code for error in damaged if error), 0)


@commands.command()
@root_argument
@click.argument("step", metavar="STEP")
@json_option
def show(root: str, step: str, as_json: bool) -> int:
    """Show what STEP of ROOT holds, leaf by leaf."""
    with bars() as progress:
        items = listing.read_root(url_of(root), progress).select([step])
        shown = [documents.of_step(item, _open(item)) for item in items]
    if as_json:
        print_json({"items": shown})
        return 0
    out = views.console()
    for document in shown:
        views.show(out, views.facts_table(document))
        views.say(out, "")
        views.show(out, views.leaves_table(document))
        errors = views.errors_table(document)
        if errors is not None:
            views.say(out, "")
            views.show(out, errors)
    return 0


def _open(item: Item) -> Step:
    if item.error is not None:
        raise item.error
    return open_step(item.place)


@commands.command()
@root_argument
@click.argument("names", nargs=-1, metavar="[STEP]...")
@json_option
def verify(root: str, names: tuple[str, ...], as_json: bool) -> int:
    """Read and decode everything that the steps of ROOT need.

    Changes nothing. With STEPs, only what these need is looked at.
    """
    with bars() as progress:
        report = check.verify(url_of(root), names, progress=progress)
    document = documents.of_verification(report)
    if as_json:
        print_json(document)
    else:
        out = views.console()
        views.say(out, *views.problem_lines(document), *views.verify_lines(document))
    return 0 if report.ok else CorruptionError.exit_code


@commands.command("repair")
@root_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be mended.")
@json_option
def repair_(root: str, dry_run: bool, as_json: bool) -> int:
    """Mend what ROOT itself can make good again.

    Damaged chunks whose content other records hold, files that a kept base or its step
    has, STORE.json, unreadable pins. Best done while no job saves to ROOT: a save under
    way may have to be repeated.
    """
    with bars() as progress:
        report = repair.repair(url_of(root), dry_run=dry_run, progress=progress)
    document = documents.of_repair(report)
    if as_json:
        print_json(document)
    else:
        views.say(views.console(), *views.repair_lines(document))
    return 0 if report.ok else CorruptionError.exit_code


@commands.command("prune")
@root_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option(
    "--break-pins",
    is_flag=True,
    help="Take pins of other hosts for left behind. A save under way there fails.",
)
@json_option
def prune_(root: str, dry_run: bool, break_pins: bool, as_json: bool) -> int:
    """Delete packs of ROOT that no step needs any more.

    ROOT can be a shared store, too. A prune of one needs all roots that use it.
    """
    with _spinner("reading MANIFESTs") as say:
        store = _open_store(url_of(root))
        known: prune.Known = {}
        plan = prune.plan(store, break_pins=break_pins, known=known)
        sizes = _sizes(store.packs, [*plan.dead, *plan.live])
        deleted: Sequence[str] = ()
        if not dry_run:
            say(f"deleting {len(plan.dead)} packs")
            deleted = prune.execute(store, plan, known=known)
    document = documents.of_prune(plan, deleted, sizes, dry_run=dry_run)
    if as_json:
        print_json(document)
        return 0
    out = views.console()
    if plan.dead:
        views.show(out, views.packs_table(document))
    views.say(out, *views.prune_lines(document))
    return 0


@commands.command()
@root_argument
@click.option(
    "--store",
    "where",
    required=True,
    help="The shared store that ROOT has used, or another root that uses it.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def forget(root: str, where: str, yes: bool, as_json: bool) -> int:
    """Remove ROOT from the registry of a shared store.

    For a root that is gone for good: until then a prune of the store refuses to run.
    Bases that the store keeps of it go too, and the next prune deletes the packs that
    only it needed. ROOT is its folder, or the identity that a message names.
    """
    _refuse_to_ask(yes, as_json)
    store = _open_shared(url_of(where))
    found = forgetting.plan(store, root if UUID.fullmatch(root) else url_of(root))
    document = documents.of_forget(found)
    if not yes:
        views.say(views.console(), *views.forget_lines(document, done=False))
        click.confirm("Forget it?", abort=True)
    forgetting.execute(store, found)
    return _done(document, views.forget_lines(document, done=True), as_json)


def _refuse_to_ask(yes: bool, as_json: bool) -> None:
    if as_json and not yes:
        raise InvalidInputError("--json asks no questions; add --yes")


def _done(document: Mapping[str, Any], lines: Sequence[str], as_json: bool) -> int:
    if as_json:
        print_json(document)
    else:
        views.say(views.console(), *lines)
    return 0


def _open_shared(url: str) -> DeltaStore:
    link = DeltaStore.read_link(Folder(url))
    return registry.open_shared(url if link is None else link.store)


@commands.command()
@root_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def moved(root: str, yes: bool, as_json: bool) -> int:
    """Tell the shared store of ROOT where ROOT is now.

    Only for a folder that has moved and lies nowhere else any more: what is left in the
    old place counts no more.
    """
    _refuse_to_ask(yes, as_json)
    store = _open_store(url_of(root))
    planned = moving.plan(store)
    document = documents.of_move(planned)
    if not yes and planned.before is not None:
        views.say(views.console(), *views.move_lines(document, done=False))
        click.confirm("Has it moved?", abort=True)
    moving.execute(store, planned)
    return _done(document, views.move_lines(document, done=True), as_json)


def _open_store(url: str) -> DeltaStore:
    store = DeltaStore.open(Folder(url))
    if store is None:
        with contextlib.suppress(NotFoundError):
            return registry.open_shared(url)
        found = listing.read_root(url)  # says what is wrong if nothing of ours is here
        if found.store.packs.names():
            raise CorruptionError(
                f"{found.store.url} holds packs but no {STORE_FILE}; nothing was "
                "deleted. `orbax-delta repair` writes it anew"
            )
        raise NotFoundError(f"{url} has no store, so there is nothing to prune")
    return store


@commands.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def new_key(file: Path, as_json: bool) -> int:
    """Make FILE with a new random key.

    For DeltaOptions(encryption=FILE). Keep a copy of it elsewhere: without it nobody
    reads what was encrypted with it.
    """
    made = Encryption(key=keys.new_key_file(file)).writing_key()
    lines = [f"{file} holds key {made.id}, readable by you alone. Keep a copy of it"]
    return _done({"file": str(file), "key_id": made.id}, lines, as_json)


@commands.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Keep everything here.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write the plot here.")
@click.option("--steps", default=60, show_default=True, help="Training steps.")
@click.option("--seed", default=0, show_default=True, help="Seed of the training.")
@json_option
def demo(
    folder: Path | None, plot: Path | None, steps: int, seed: int, as_json: bool
) -> int:
    """Train, be killed in a save, go on, compare every bit."""
    from orbax_delta import demo as main_job  # the only command that needs jax

    console = Console(stderr=True) if as_json else Console()
    result = main_job.run(
        folder=folder, plot=plot, steps=steps, seed=seed, console=console
    )
    if as_json:
        print_json(dataclasses.asdict(result))
    return 0 if result.exact else CorruptionError.exit_code


def _sizes(folder: Folder, names: Sequence[str]) -> dict[str, int]:
    """Sizes of files on a local disk; what is elsewhere or gone is left out."""
    sizes = {}
    if "://" not in folder.url:
        for name in names:
            with contextlib.suppress(OSError):
                sizes[name] = os.stat(folder.url + name).st_size
    return sizes


@contextlib.contextmanager
def _spinner(what: str) -> Iterator[Any]:
    """A sign of life on stderr, if that is a terminal; the value changes its text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(what) as status:
        yield status.update


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    # A key of a tree may hold what the terminal's encoding cannot show.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = commands.main(given, prog_name="orbax-delta", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        if as_json:
            _print_error("usage", error.format_message())
        return InvalidInputError.exit_code
    except DeltaError as error:
        click.echo(views.plain(f"orbax-delta: {error}"), err=True)
        if as_json:
            _print_error(error.kind, str(error))
        return error.exit_code
    except OSError as error:  # of a root it would be a StorageError
        click.echo(f"orbax-delta: could not write what was found: {error}", err=True)
        return errors.StorageError.exit_code
    except click.Abort:
        click.echo("orbax-delta: interrupted", err=True)
        return _INTERRUPTED
    return code or 0


def _print_error(kind: str, message: str) -> None:
    print_json(documents.of_error(kind, message))
