"""Export of a step to forms that stand for themselves.

Nothing here holds a whole state: chunks are read as they are written. An export appears
under its name when all of it is durable. Does not belong here: how a form is written.
"""

import contextlib
import dataclasses
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import orbax.checkpoint as ocp

from orbax_delta import chunks, localwrites, orbaxfolders, sources, tensorfolders
from orbax_delta.errors import (
    DeltaError,
    InvalidInputError,
    StorageError,
)
from orbax_delta.handler import DeltaCheckpointHandler, DeltaSave
from orbax_delta.listing import Progress, no_progress, url_of
from orbax_delta.options import MAX_CHUNK_BYTES, DeltaOptions
from orbax_delta.sources import Source
from orbax_delta.tensorfolders import SHARD_BYTES, Name, dotted

_NARROWEST_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was exported, or imported.

    Attributes:
        source: What was read.
        target: What was written: a folder, or the step's.
        leaves: Leaves of the state.
        state_bytes: Their size in memory.
        written_bytes: Size of what was written.
        total_seconds: Time it took.
    """

    source: str
    target: str
    leaves: int
    state_bytes: int
    written_bytes: int
    total_seconds: float


def export_delta(
    root: str | os.PathLike[str],
    step: int | str,
    target: str | os.PathLike[str],
    *,
    item: str | None = None,
    include: Sequence[str] = (),
    progress: Progress = no_progress,
) -> ExportReport:
    """Write a step as a delta folder that needs no store beside it.

    It is restored by `ocp.Checkpointer(DeltaCheckpointHandler())`, and a root of its
    own for every command. Leaves within a bound are exported as they are restored.

    Args:
        root: Folder of the manager; or a folder with self-contained checkpoints.
        step: Number or name of the step, or folder of a kept base.
        target: Folder to write; it must not be there.
        item: Which item; None: the only one.
        include: Patterns of paths (as in `fnmatch`), e.g. `["params/*"]`; leaves that
            fit none stay out. None: the whole state.
        progress: Told of chunks.

    Raises:
        NotFoundError: There is no such root, step or item.
        InvalidInputError: The target is there, a pattern fits nothing, or the step has
            several items.
        CorruptionError: The step is damaged, and nothing else of the root heals it.
        StorageError: The storage refused something; nothing of the export is left.

    Example:
        >>> report = export_delta(root, 3, exports / "delta")
        >>> with ocp.Checkpointer(DeltaCheckpointHandler()) as checkpointer:
        ...     checkpointer.restore(exports / "delta")["step"]
        3
    """
    source = sources.of_step(url_of(root), str(step), item).select(include)
    handler = DeltaCheckpointHandler(_options(source))
    with (
        _published(source, target, progress) as (counted, made),
        ocp.Checkpointer(handler) as checkpointer,
    ):
        args = DeltaSave(counted.tree(), custom_metadata=source.custom_metadata)
        checkpointer.save(made.path, args=args)
    return made.report()


def export_orbax(
    root: str | os.PathLike[str],
    step: int | str,
    target: str | os.PathLike[str],
    *,
    item: str | None = None,
    include: Sequence[str] = (),
    progress: Progress = no_progress,
) -> ExportReport:
    """Write a step as a plain Orbax checkpoint, for readers without this package.

    `ocp.StandardCheckpointer().restore(target)` opens it on any devices; without a
    target arrays come back as numpy's, and tuples as Orbax has them. The custom
    metadata, if they are a dict, go along.

    Args:
        root: As for `export_delta`, and so are all others.
        step: Number or name of the step.
        target: Folder to write; it must not be there.
        item: Which item; None: the only one.
        include: Patterns of paths.
        progress: Told of chunks.

    Raises:
        NotFoundError: There is no such root, step or item.
        InvalidInputError: As for `export_delta`; or Orbax cannot hold a leaf: bytes,
            ints of more than 64 bits, Python's complex, times, some narrow types.
        CorruptionError: The step is damaged, and nothing else of the root heals it.
        StorageError: The storage refused something; nothing of the export is left.

    Example:
        >>> report = export_orbax(root, 3, exports / "orbax", include=["params/*"])
        >>> restored = ocp.StandardCheckpointer().restore(exports / "orbax")
        >>> restored["params"]["w"].shape
        (4, 2)
    """
    source = sources.of_step(url_of(root), str(step), item).select(include)
    with _published(source, target, progress) as (counted, made):
        orbaxfolders.write(counted, made.path)
    return made.report()


def export_safetensors(
    root: str | os.PathLike[str],
    step: int | str,
    target: str | os.PathLike[str],
    *,
    item: str | None = None,
    include: Sequence[str] = (),
    name: Name = dotted,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = no_progress,
) -> ExportReport:
    """Write a step as safetensors, in the layout of Hugging Face.

    Typed keys become their data. Python values, texts and None are no tensors; they
    are in a header, with all else that lets `import_checkpoint` make the same step of
    the files again.

    Args:
        root: As for `export_delta`, and so are all others without a word here.
        step: Number or name of the step.
        target: Folder to write; it must not be there.
        item: Which item; None: the only one.
        include: Patterns of paths.
        name: From the path of a leaf, a tuple of texts, to the name of its tensor.
        shard_bytes: Most bytes of tensors in a file; a larger tensor has its own.
        progress: Told of chunks.

    Raises:
        NotFoundError: There is no such root, step or item.
        InvalidInputError: As for `export_delta`; or a leaf is of a type that
            safetensors lack (4-bit integers, times, complex128), two leaves would have
            one name, or a name is none.
        CorruptionError: The step is damaged, and nothing else of the root heals it.
        StorageError: The storage refused something; nothing of the export is left.

    Example:
        >>> report = export_safetensors(
        ...     root, 3, exports / "hf", include=["params/*"], name=lambda path: path[1]
        ... )
        >>> [file.name for file in (exports / "hf").iterdir()]
        ['model.safetensors']
    """
    source = sources.of_step(url_of(root), str(step), item).select(include)
    with _published(source, target, progress) as (counted, made):
        planned = tensorfolders.plan(counted, shard_bytes=shard_bytes, name=name)
        made.path.mkdir()
        tensorfolders.write(planned, made.path)
    return made.report()


def _options(source: Source) -> DeltaOptions:
    """Such that the chunks of a step stay as they are cut."""
    largest = max(
        (
            chunks.element_count(piece.box)
            * max(_NARROWEST_BYTES, leaf.entry.element.dtype.itemsize)
            for leaf in source.leaves
            for piece in leaf.pieces
        ),
        default=0,
    )
    default = DeltaOptions()
    chunk_bytes = min(max(default.chunk_bytes, largest), MAX_CHUNK_BYTES)
    return dataclasses.replace(default, chunk_bytes=chunk_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """An export that is being written.

    Attributes:
        path: Where, until it is whole.
        target: Where it belongs.
    """

    source: Source
    path: Path
    target: Path
    started: float

    def report(self) -> ExportReport:
        """Once it is where it belongs."""
        files = (file for file in self.target.rglob("*") if file.is_file())
        return ExportReport(
            source=self.source.label,
            target=str(self.target),
            leaves=len(self.source.leaves),
            state_bytes=self.source.nbytes,
            written_bytes=sum(file.stat().st_size for file in files),
            total_seconds=time.perf_counter() - self.started,
        )


@contextlib.contextmanager
def _published(
    source: Source, target: str | os.PathLike[str], progress: Progress
) -> Iterator[tuple[Source, _Made]]:
    """A folder beside the target, which becomes the target when all is durable.

    Whoever is killed leaves `.<name>.<random>.exporting`, which nobody takes for a
    checkpoint. The folder inside has its final name, for names are written down.
    """
    text = url_of(target)
    if "://" in text:
        raise InvalidInputError(
            f"{text} is not on this machine; export to a local folder and copy that"
        )
    path = Path(text)
    _require_free(path)
    beside = path.parent / f".{path.name:.50}.{secrets.token_hex(4)}.exporting"
    absent: list[Path] = []
    made = _Made(
        source=source,
        path=beside / path.name,
        target=path,
        started=time.perf_counter(),
    )
    try:
        absent += itertools.takewhile(lambda one: not one.exists(), path.parents)
        beside.mkdir(parents=True)
        yield source.counted(progress), made
        _sync(made.path)
        _require_free(path)
        made.path.rename(path)
        localwrites.sync_folder(path.parent)
    except DeltaError:
        raise
    except OSError as error:
        raise StorageError(
            f"could not write the export {path}: {error}; nothing of it was left"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty: the export, or somebody else's
            for folder in absent:
                folder.rmdir()


def _require_free(path: Path) -> None:
    if os.path.lexists(path):
        raise InvalidInputError(
            f"{path} is there already; it was left as it is. Give another target, or "
            "delete it first"
        )


def _sync(folder: Path) -> None:
    for where, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(where, name), "rb") as file:
                os.fsync(file.fileno())
        localwrites.sync_folder(Path(where))
