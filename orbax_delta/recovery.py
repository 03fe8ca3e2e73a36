"""Falling back: the newest step of a manager that restores whole, loudly."""

import logging
from typing import Any, Protocol

from orbax_delta.errors import CorruptionError, FormatError, NotFoundError
from orbax_delta.handler import DEFAULT_ITEM, DeltaRestore
from orbax_delta.places import locate

_logger = logging.getLogger("orbax_delta")


class _Manager(Protocol):
    directory: Any

    def reload(self) -> None: ...

    def all_steps(self) -> Any: ...

    def restore(self, step: int | None, args: Any = None) -> Any: ...


def restore_latest_good(manager: _Manager, target: Any = None) -> tuple[int, Any]:
    """Restore the newest step that is not damaged.

    A target that does not fit is the caller's error and is raised at once; damage is
    logged as an error for each step passed over.

    Args:
        manager: An `ocp.CheckpointManager` with a single item.
        target: As for `DeltaRestore`.

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
            _require_item(manager, step)
            return step, manager.restore(step, args=DeltaRestore(target))
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


def _require_item(manager: _Manager, step: int) -> None:
    """Raise for a step whose item is gone, without asking the manager for it.

    A manager whose first restore is of such a step takes itself for one of several
    items from then on, and refuses every other step.

    Raises:
        NotFoundError: The step's folder is there, its item is not.
    """
    folders = [
        folder
        for folder in manager.directory.iterdir()
        if folder.is_dir() and locate(str(folder / DEFAULT_ITEM)).step == step
    ]
    if folders and not any((folder / DEFAULT_ITEM).exists() for folder in folders):
        raise NotFoundError(
            f"{folders[0]} has no item {DEFAULT_ITEM!r}; its deletion was interrupted"
        )
