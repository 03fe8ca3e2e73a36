"""Import of checkpoints of other forms, as a step of a root.

Nothing here holds a whole state: a save reads its chunks as it writes them. Does not
belong here: how a form is read.
"""

import operator
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from orbax_delta import orbaxsources, sources, tensorsources
from orbax_delta.errors import (
    DeltaError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from orbax_delta.exports import ExportReport
from orbax_delta.handler import DEFAULT_ITEM, DeltaSave, handler_registry
from orbax_delta.keys import Encryption
from orbax_delta.listing import Progress, no_progress, url_of
from orbax_delta.manifests import MANIFEST_NAME, leaf_problem
from orbax_delta.options import DeltaOptions
from orbax_delta.places import MAX_STEP, locate
from orbax_delta.reports import SaveReport
from orbax_delta.sources import Source
from orbax_delta.tensorsources import Split

# The item that a manager saves the metrics of a step in.
_METRICS = "metrics"


def import_checkpoint(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    step: int,
    *,
    item: str = DEFAULT_ITEM,
    include: Sequence[str] = (),
    split: Split | None = None,
    encryption: Encryption | str | os.PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> ExportReport:
    """Save a checkpoint of another form as a step of a root.

    A run that restores that step goes on from it with deltas. What this package has
    exported becomes the same tree again; of others leaves are numpy arrays, and a
    target of the run's own tree makes of them what it asks for.

    Args:
        path: A plain Orbax checkpoint, a safetensors file or a folder of them, or a
            delta step's item.
        root: Folder of the manager; made if it is not there.
        step: Number of the new step.
        item: Name of the item.
        include: Patterns of paths; leaves that fit none stay out.
        split: From the name of a tensor to the path of its leaf; None: as exported,
            otherwise at the dots.
        encryption: As of `DeltaOptions`.
        progress: Told of chunks.

    Raises:
        NotFoundError: There is nothing at `path`.
        InvalidInputError: It is none of these, the step is there, paths collide, a leaf
            is of a shape that no step can hold, or `split` fails.
        WrongKeyError: There is no key to encrypt with, or none for an encrypted source.
        FormatError: A file is not what it should be.
        CorruptionError: It is damaged.
        StorageError: The storage refused something; there is no such step.

    Example:
        >>> report = import_checkpoint(exports / "orbax", exports / "run", 0)
        >>> with ocp.CheckpointManager(
        ...     exports / "run", handler_registry=handler_registry()
        ... ) as manager:
        ...     manager.restore(0)["params"]["w"].shape
        (4, 2)
    """
    started = time.perf_counter()
    number = _number(step)
    _require_item(item)
    # Here nothing has begun that would have to end.
    DeltaOptions(encryption=encryption).writing_key()
    try:
        source = _opened(os.fspath(path), split).select(include)
        _require_storable(source)
        _require_writable(url_of(root))
        saved = _save(source.counted(progress), url_of(root), number, item, encryption)
    except DeltaError:
        raise
    except OSError as error:
        raise StorageError(
            f"could not import {os.fspath(path)!r:.200} as step {number} of "
            f"{os.fspath(root)!r:.200}: {error}"
        ) from error
    return ExportReport(
        source=source.label,
        target=f"step {number}, item {item!r} of {url_of(root)}",
        leaves=len(source.leaves),
        state_bytes=source.nbytes,
        written_bytes=saved.written_bytes,
        total_seconds=time.perf_counter() - started,
    )


def _number(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= MAX_STEP:
        raise InvalidInputError(
            f"step is {step!r:.80}; expected a number from 0 to {MAX_STEP}"
        )
    return number


def _require_item(item: str) -> None:
    if not item or item in (".", "..", _METRICS) or "/" in item or "\0" in item:
        raise InvalidInputError(
            f"the item {item!r:.80} cannot be; expected the name of a folder, other "
            f"than {_METRICS}, which Orbax keeps for itself"
        )


def _require_storable(source: Source) -> None:
    """Before anything is written: a save does not look at what it was given."""
    for leaf in source.leaves:
        problem = leaf_problem(leaf.entry)
        if problem is not None:
            raise InvalidInputError(
                f"leaf {leaf.entry.name:.300} of {source.label} {problem:.300}, which "
                "no step can hold; leave it out by choosing other leaves"
            )


def _require_writable(url: str) -> None:
    """Before Orbax tries: of a folder that cannot be made it waits for five minutes.

    Raises:
        OSError: The system refuses it.
    """
    if "://" not in url:
        os.makedirs(url, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(prefix=".", suffix=".importing", dir=url))


def _save(
    source: Source,
    url: str,
    step: int,
    item: str,
    encryption: Encryption | str | os.PathLike[str] | None,
) -> SaveReport:
    # Nothing is compared with what is in memory, and nothing is deleted.
    registry = handler_registry(
        item=item, base="store", auto_prune=False, encryption=encryption
    )
    args: Any = DeltaSave(source.tree(), custom_metadata=source.custom_metadata)
    # As Orbax does by itself on GCS: S3 has no renaming either.
    marked = ocp.path.atomicity.CommitFileTemporaryPath if "://" in url else None
    options = ocp.CheckpointManagerOptions(temporary_path_class=marked)
    with ocp.CheckpointManager(
        url, options=options, handler_registry=registry
    ) as manager:
        if step in manager.all_steps():
            raise InvalidInputError(
                f"{url} has a step {step} already; it was left as it is. Give another "
                "number, or delete that step first"
            )
        handler = registry.get(item, DeltaSave)
        if item != DEFAULT_ITEM:
            args = ocp.args.Composite(**{item: args})
        manager.save(step, args=args, force=True)
        manager.wait_until_finished()
    report: SaveReport = handler.last_save_report
    return report


def _opened(path: str, split: Split | None) -> Source:
    """What lies at a path, whatever wrote it."""
    if "://" in path:
        raise InvalidInputError(
            f"{path} is not on this machine; copy it to a local folder first"
        )
    folder = Path(path).absolute()
    if not folder.exists():
        raise NotFoundError(f"there is no {folder}; expected a checkpoint to import")
    if (folder / MANIFEST_NAME).is_file():
        return sources.of_place(locate(str(folder)))
    if orbaxsources.is_checkpoint(folder):
        return orbaxsources.source(folder)
    if tensorsources.is_tensors(folder):
        return tensorsources.source(folder, split=split)
    inside = sorted(
        child.name
        for child in (folder.iterdir() if folder.is_dir() else ())
        if orbaxsources.is_checkpoint(child) or (child / MANIFEST_NAME).is_file()
    )
    hint = f". It holds {', '.join(inside)}; name one of these" if inside else ""
    raise InvalidInputError(
        f"{folder} is no plain Orbax checkpoint (a folder with _METADATA), no "
        f"safetensors file or folder, and no delta step's item{hint}"
    )
