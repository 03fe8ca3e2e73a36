"""Falling back: the newest step of a manager that restores whole, loudly."""

import logging
from typing import Any, Protocol

import orbax.checkpoint as ocp

from orbax_delta.errors import CorruptionError, FormatError, NotFoundError
from orbax_delta.handler import DEFAULT_ITEM, DeltaRestore
from orbax_delta.places import locate

_logger = logging.getLogger("orbax_delta")


class _Manager(Protocol):
    directory: Any

    def reload(self) -> None: ...

    def all_steps(self) -> Any: ...

    def restore(self, step: int | None, args: Any = None) -> Any: ...


def restore_latest_good(
    manager: _Manager, target: Any = None, *, item: str = DEFAULT_ITEM
) -> tuple[int, Any]:
    """Restore the newest step that is not damaged.

    A target that does not fit is the caller's error and is raised at once; damage is
    logged as an error for each step passed over.

    Args:
        manager: An `ocp.CheckpointManager`.
        target: As for `DeltaRestore`.
        item: Which item, for a manager of several.

    Returns:
        The step and its tree.

    Raises:
        StructureError: The target does not fit the newest readable step.
        CorruptionError: No step restores.
        NotFoundError: There is no step.
    """
    # The manager's own list can hold steps whose save failed.
    manager.reload()
    steps = sorted(manager.all_steps(), reverse=True)
    damaged = []
    for step in steps:
        try:
            _require_item(manager, step, item)
            return step, _restore(manager, step, target, item)
        except (CorruptionError, FormatError, FileNotFoundError) as error:
            _logger.error(
                "step %s does not restore, trying an older one: %s", step, error
            )
            damaged.append(f"  step {step}: {error}")
    if not steps:
        raise NotFoundError(f"{manager.directory} holds no step")
    raise CorruptionError(
        f"none of the {len(steps)} steps of {manager.directory} restores:\n"
        + "\n".join(damaged)
    )


def _restore(manager: _Manager, step: int, target: Any, item: str) -> Any:
    args = DeltaRestore(target)
    if item == DEFAULT_ITEM:
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
