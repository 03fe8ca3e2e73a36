"""Import of checkpoints of other forms, as a step of a root.

Nothing here holds a whole state: a save reads its chunks as it writes them. Does not
belong here: how a form is read.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from orbax_delta import orbaxsources, sources, tensorsources
from orbax_delta.errors import InvalidInputError, NotFoundError
from orbax_delta.exports import ExportReport
from orbax_delta.handler import DEFAULT_ITEM, DeltaSave, handler_registry
from orbax_delta.keys import Encryption
from orbax_delta.listing import Progress, no_progress, url_of
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.options import DeltaOptions
from orbax_delta.places import locate
from orbax_delta.sources import Source
from orbax_delta.tensorsources import Split


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
        InvalidInputError: It is none of these, the step is there, or paths collide.
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
    if type(step) is not int or step < 0:
        raise InvalidInputError(f"step is {step!r}; expected a number from 0")
    # Here nothing has begun that would have to end.
    DeltaOptions(encryption=encryption).writing_key()
    source = _opened(os.fspath(path), split).select(include)
    url = url_of(root)
    # Nothing is compared with what is in memory, and nothing is deleted.
    registry = handler_registry(
        item=item, base="store", auto_prune=False, encryption=encryption
    )
    args: Any = DeltaSave(
        source.counted(progress).tree(), custom_metadata=source.custom_metadata
    )
    with ocp.CheckpointManager(url, handler_registry=registry) as manager:
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
    saved = handler.last_save_report
    return ExportReport(
        source=source.label,
        target=f"step {step}, item {item!r} of {url}",
        leaves=len(source.leaves),
        state_bytes=source.nbytes,
        written_bytes=saved.written_bytes,
        total_seconds=time.perf_counter() - started,
    )


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
