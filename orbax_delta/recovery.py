"""Falling back: the newest state of a manager that restores whole, loudly."""

import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

import orbax.checkpoint as ocp
from orbax.checkpoint import v1

from orbax_delta import delegation, fallback, listing
from orbax_delta.errors import (
    CorruptionError,
    NotFoundError,
    UnsupportedVersionError,
)
from orbax_delta.handler import DEFAULT_ITEM, DeltaRestore
from orbax_delta.options import DeltaOptions
from orbax_delta.places import locate
from orbax_delta.processes import restoring

_logger = logging.getLogger("orbax_delta")

_V1_ITEM = "state"


class _Manager(Protocol):
    directory: Any

    def reload(self) -> None: ...

    def all_steps(self) -> Any: ...

    def restore(self, step: int | None, args: Any = None) -> Any: ...


class _ManagerOfV1:
    """A v1 Checkpointer with the methods of a CheckpointManager."""

    def __init__(self, checkpointer: v1.training.Checkpointer) -> None:
        self._checkpointer = checkpointer
        self.directory = checkpointer.directory
        self.reload = checkpointer.reload

    def all_steps(self) -> list[int]:
        return [found.step for found in self._checkpointer.checkpoints]

    def restore(self, step: int | None, args: Any = None) -> Any:
        return self._checkpointer.load_checkpointables(step, dict(args.items()))


def restore_latest_good(
    manager: _Manager | v1.training.Checkpointer,
    target: Any = None,
    *,
    item: str | None = None,
    processes: Sequence[int] | None = None,
) -> tuple[int | None, Any]:
    """Restore the newest state that is not damaged: a step, or else a kept base.

    A target that does not fit is the caller's error and is raised at once; damage is
    logged as an error for each step passed over.

    Args:
        manager: An `ocp.CheckpointManager`, or a `v1.training.Checkpointer` with
            `v1_context`.
        target: As for `DeltaRestore`.
        item: Which item, for a manager of several; None: `default`, of a Checkpointer
            `state`, which are what Orbax calls the only one.
        processes: As `DeltaOptions.processes`: who calls this together.

    Returns:
        The step and its tree; of a base the step that it was, None if that had no
        number.

    Raises:
        StructureError: The target does not fit the newest readable step.
        UnsupportedVersionError: A newer version of this package wrote that step.
        CorruptionError: No step and no base restores.
        NotFoundError: There is no step and no base.
    """
    name = item or DEFAULT_ITEM
    if isinstance(manager, v1.training.Checkpointer):
        name = item or _V1_ITEM
        manager = _ManagerOfV1(manager)
    # The manager's own list can hold steps whose save failed.
    manager.reload()
    steps = sorted(manager.all_steps(), reverse=True)
    count = len(steps)
    passed_over: tuple[type[Exception], ...] = (
        *fallback.damage(str(manager.directory)),
        FileNotFoundError,
    )
    damaged: list[str] = []
    while steps:
        step = steps.pop(0)
        try:
            _require_item(manager, step, name)
            return step, _restore(manager, step, target, name)
        except UnsupportedVersionError:
            raise  # what a newer package wrote is no damage
        except passed_over as error:
            _logger.error(
                "step %s does not restore, trying an older one: %s", step, error
            )
            damaged.append(f"  step {step}: {error}")
            whole = getattr(error, "restorable", None)
            if whole in steps:
                # Those in between were found damaged when the error was made.
                steps = steps[steps.index(whole) :]
    try:
        return restore_base(manager.directory, target, item=name, processes=processes)
    except NotFoundError:
        if not damaged:
            raise NotFoundError(f"{manager.directory} holds no step") from None
    except CorruptionError as error:
        damaged.append(f"  {error}")
    raise CorruptionError(
        f"none of the {count} steps of {manager.directory} restores, and no base:\n"
        + "\n".join(damaged)
    )


def restore_base(
    root: str | os.PathLike[str],
    target: Any = None,
    *,
    step: int | None = None,
    item: str = DEFAULT_ITEM,
    processes: Sequence[int] | None = None,
) -> tuple[int | None, Any]:
    """Restore a state that the store keeps, whatever became of the steps' folders.

    Args:
        root: Folder of the manager.
        target: As for `DeltaRestore`.
        step: The step that it was; None: the newest base that restores.
        item: Which item.
        processes: As `DeltaOptions.processes`: who calls this together. A process that
            restores a base by itself names itself alone.

    Returns:
        The step that it was, None if that had no number, and its tree.

    Raises:
        NotFoundError: There is no such base.
        StructureError: The target does not fit it.
        CorruptionError: None of them restores, or those that could be it are damaged.
    """
    wanted = delegation.target(DeltaRestore(target))
    bases = listing.read_root(os.fspath(root)).bases
    kept = [
        base
        for base in bases
        if base.place.item == item and step in (None, base.place.step)
    ]
    unreadable = [str(base.error) for base in bases if base.manifest is None]
    if not kept:
        which = "no base" if step is None else f"no base of step {step}"
        message = (
            f"the store of {root} keeps {which} of item {item!r}; `orbax-delta ls "
            "--bases` lists those that it keeps"
        )
        if unreadable:
            raise CorruptionError(f"{message}. Others are damaged: {unreadable[0]}")
        raise NotFoundError(message)
    damaged = []
    settings, job = DeltaOptions(), restoring(processes)
    for base in reversed(kept):
        try:
            restored = fallback.together(
                base.place, wanted, settings, job=job, what=base.step
            )
        except fallback.damage(os.fspath(root)) as error:
            _logger.error("the kept base %s does not restore: %s", base.step, error)
            damaged.append(str(error))
            continue
        _logger.warning("restored the kept base of step %s", base.place.step_name)
        return base.place.step, restored.tree
    raise CorruptionError(
        f"none of the kept bases of {root} restores: " + "; ".join(damaged)
    )


def _restore(manager: _Manager, step: int, target: Any, item: str) -> Any:
    args = DeltaRestore(target)
    if item == DEFAULT_ITEM and not isinstance(manager, _ManagerOfV1):
        return manager.restore(step, args=args)
    return manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]


def _require_item(manager: _Manager, step: int, item: str) -> None:
    """Raise for a step whose item is gone, without asking the manager for it.

    A manager whose first restore is of such a step takes itself for one of several
    items from then on, and refuses every other step.

    Raises:
        NotFoundError: The step's folder is there, its item is not.
    """
    folders = [
        folder
        for folder in manager.directory.iterdir()
        if folder.is_dir() and locate(str(folder / item)).step == step
    ]
    if folders and not any((folder / item).exists() for folder in folders):
        raise NotFoundError(
            f"{folders[0]} has no item {item!r}; its deletion was interrupted, or the "
            "item has another name: pass item=..."
        )
