"""The commands `export` and `import`, for `cli` to add to its own.

Does not belong here: what they do (`exports`, `imports`), which are loaded when a
command runs: they need jax.
"""

import dataclasses
import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from orbax_delta import views
from orbax_delta.errors import InvalidInputError
from orbax_delta.reports import human_bytes
from orbax_delta.terminal import bars, json_option, print_json, root_argument

_FORMS = ("delta", "orbax", "safetensors")

_EXPORTS = """\b
Examples:
  orbax-delta export run 1000 alone --to delta
  orbax-delta export run 1000 weights --to safetensors --include "params/*"
"""
_IMPORTS = """\b
Examples:
  orbax-delta import checkpoints/1000/default run 0
  orbax-delta import model.safetensors run 0 --include "layers/*"
"""

_include = click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Only leaves whose path fits, as params/*; may be given several times.",
)


def add_to(commands: click.Group) -> None:
    """Add these commands to the others."""
    for command in (export, import_):
        commands.add_command(command)


@click.command(epilog=_EXPORTS)
@root_argument
@click.argument("step", metavar="STEP")
@click.argument("target", metavar="TARGET")
@click.option(
    "--to", "form", type=click.Choice(_FORMS), required=True, help="What to write."
)
@click.option("--item", help="Which item of the step, if it has several.")
@_include
@click.option(
    "--shard-bytes",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Safetensors: most bytes of a file. Otherwise 5,000,000,000.",
)
@click.option(
    "--names",
    metavar="MODULE:FUNCTION",
    help="Safetensors: makes a tensor's name of a path, a tuple of texts. "
    "Otherwise the path with dots.",
)
@json_option
def export(
    root: str,
    step: str,
    target: str,
    form: str,
    item: str | None,
    include: tuple[str, ...],
    shard_bytes: int | None,
    names: str | None,
    as_json: bool,
) -> int:
    """Write STEP of ROOT to the folder TARGET, for somewhere else.

    As a delta folder that needs no store, as a plain Orbax checkpoint, or as
    safetensors in the layout of Hugging Face. TARGET must not be there, and is on this
    machine; ROOT may be a bucket. STEP is as `orbax-delta ls` names it, or the folder
    of a kept base.
    """
    _stay_on_host()
    from orbax_delta import exports

    extra: dict[str, Any] = {}
    if shard_bytes is not None:
        extra["shard_bytes"] = shard_bytes
    if names is not None:
        extra["name"] = _function(names)
    if extra and form != "safetensors":
        raise InvalidInputError(
            "--shard-bytes and --names are for --to safetensors; leave them out"
        )
    run = getattr(exports, f"export_{form}")
    with bars() as progress:
        report = run(
            root,
            step,
            target,
            item=item,
            include=include,
            progress=progress,
            **extra,
        )
    return _done(report, "Wrote", as_json)


@click.command("import", epilog=_IMPORTS)
@click.argument("path", metavar="SOURCE")
@root_argument
@click.argument("step", metavar="STEP", type=click.IntRange(min=0))
@click.option(
    "--item", default="default", show_default=True, help="Name of the new item."
)
@_include
@click.option(
    "--encrypt", type=click.Path(), metavar="FILE", help="With the first key of FILE."
)
@json_option
def import_(
    path: str,
    root: str,
    step: int,
    item: str,
    include: tuple[str, ...],
    encrypt: str | None,
    as_json: bool,
) -> int:
    """Save SOURCE as STEP of ROOT.

    A run can then go on from it with deltas. SOURCE is a plain Orbax checkpoint, a
    safetensors file or a folder of them, or the item's folder of a delta step, on this
    machine. STEP is a number that must not be there; ROOT may be there or not, and may
    be a bucket.
    """
    _stay_on_host()
    from orbax_delta import imports

    with bars() as progress:
        report = imports.import_checkpoint(
            path,
            root,
            step,
            item=item,
            include=include,
            encryption=encrypt,
            progress=progress,
        )
    return _done(report, "Saved", as_json)


def _done(report: Any, verb: str, as_json: bool) -> int:
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        views.say(
            views.console(),
            f"{verb} {report.target}: {report.leaves} leaves of {report.source}, "
            f"{human_bytes(report.state_bytes)}, in "
            f"{human_bytes(report.written_bytes)}, {report.total_seconds:.1f} s.",
        )
    return 0


def _stay_on_host() -> None:
    """Nothing is computed here, and an accelerator may be somebody else's.

    What Orbax logs of a failure is what the command says, with a stack for each thread.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def _function(text: str) -> Callable[[tuple[str, ...]], str]:
    """What `MODULE:FUNCTION` names; modules in the current folder count."""
    module, _, name = text.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found: Callable[[tuple[str, ...]], str] = getattr(
            importlib.import_module(module), name
        )
        if not callable(found):
            raise TypeError(f"{name} is a {type(found).__name__}")
    except Exception as error:  # a module of somebody else is run
        raise InvalidInputError(
            f"--names {text}: there is no such function ({type(error).__name__}: "
            f"{error}); expected MODULE:FUNCTION, as mapping:to_hugging_face"
        ) from error
    return found
