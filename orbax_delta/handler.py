"""The adapter to Orbax (v0): arguments, handler, registry. No logic of its own.

`async_save` takes the snapshot in the calling thread and gives Orbax a future that
runs the save; Orbax's own arguments are understood too, and steps that Orbax's own
handlers wrote are restored by them.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from orbax_delta import delegation, fallback, processes, save, steps, upkeep
from orbax_delta.errors import InvalidInputError, NotFoundError
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.options import DeltaOptions
from orbax_delta.places import locate
from orbax_delta.reports import RestoreReport, SaveReport
from orbax_delta.save import SaveRequest
from orbax_delta.store import Folder
from orbax_delta.upkeep import ItemState

_logger = logging.getLogger("orbax_delta")

DEFAULT_ITEM = "default"


class DeltaCheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves only what changed of a pytree, and restores it bit for bit.

    Give it to a `CheckpointManager` with `handler_registry()`. One instance remembers
    what each item of each root last stored, in host memory; it can serve several items
    and several managers.

    Attributes:
        options: Options in force.
        last_save_report: Of the last save that was committed.
        last_restore_report: Of the last restore.
    """

    def __init__(self, options: DeltaOptions | None = None) -> None:
        if not isinstance(options, DeltaOptions | None):
            raise InvalidInputError(
                f"options are {options!r}; expected DeltaOptions(...) or None"
            )
        self.options = options or DeltaOptions()
        self.last_save_report: SaveReport | None = None
        self.last_restore_report: RestoreReport | None = None
        self._states: dict[tuple[str, str], ItemState] = {}

    @classmethod
    def typestr(cls) -> str:
        """Name under which Orbax records this handler, whatever module it moves to."""
        return "orbax_delta.handler.DeltaCheckpointHandler"

    async def async_save(
        self, directory: epath.Path, args: ocp.args.CheckpointArgs
    ) -> list[ocp.future.Future] | None:
        """Take the state now, write it in the background.

        Raises:
            InvalidInputError: A leaf cannot be stored; nothing was written.
        """
        # Orbax keeps the future, and with it this list, until the next save; the state
        # must not live that long, for jax cannot reuse buffers that are viewed.
        requests = [self._request(directory, args)]

        async def write() -> None:
            self._run(requests.pop())

        # Made here, in the calling thread: it captures which save it belongs to.
        return [
            ocp.future.CommitFutureAwaitingContractedSignals(
                write(), name="orbax_delta_save"
            )
        ]

    def save(self, directory: epath.Path, args: ocp.args.CheckpointArgs) -> None:
        """Write the state and return when it is durable (plain `Checkpointer`)."""
        self._run(self._request(directory, args))

    def _request(
        self, directory: epath.Path, args: ocp.args.CheckpointArgs
    ) -> SaveRequest:
        tree, custom_metadata = delegation.saved_item(args)
        place = locate(str(directory))
        return save.prepare(
            tree,
            place,
            self.options,
            custom_metadata=custom_metadata,
            job=processes.job(self.options),
            hurried=processes.preempted(place),
        )

    def _run(self, request: SaveRequest) -> None:
        place = request.place
        state = self._states.setdefault((place.root_url or "", place.item), ItemState())
        self.last_save_report = save.run(request, state)

    def restore(
        self, directory: epath.Path, args: ocp.args.CheckpointArgs | None = None
    ) -> Any:
        """Restore a step; see `DeltaRestore` for what can be asked.

        Raises:
            NotFoundError: The step, or the store it needs, is not there.
            StructureError: The target does not fit the step.
            CorruptionError: Something stored is damaged and nothing else of the root
                holds it; it names the newest step that restores.
        """
        args = args or DeltaRestore()
        place = locate(str(directory))
        if delegation.written_by_orbax(Folder(place.item_url)):
            return delegation.restore(directory, args)
        result = fallback.run(
            place,
            delegation.target(args),
            self.options,
            on_corruption=_on_corruption(args),
        )
        self.last_restore_report = result.report
        if place.root_url is not None and result.base.store_uuid:
            state = self._states.setdefault((place.root_url, place.item), ItemState())
            with state.lock:
                state.base = result.base
        return result.tree

    def metadata(self, directory: epath.Path) -> Any:
        """What a step holds, without reading any of it.

        Raises:
            NotFoundError: There is no step of this or Orbax's own kind.
        """
        folder = Folder(str(directory))
        manifest = steps.read_manifest(folder)
        if manifest is not None:
            return delegation.tree_metadata(manifest, directory)
        if delegation.written_by_orbax(folder):
            return ocp.StandardCheckpointHandler().metadata(directory)
        raise NotFoundError(f"{directory} holds no {MANIFEST_NAME}")

    def finalize(self, directory: epath.Path) -> None:
        """Check that the step is there and this job's; nothing is left to do.

        Raises:
            NotFoundError: It is not there.
            ConflictError: Another job saved into the same folder.
        """
        place = locate(str(directory))
        upkeep.confirm(place, self._states.get((place.root_url or "", place.item)))

    def close(self) -> None:
        """Release pins and sweep; may be called more than once."""
        for state in self._states.values():
            upkeep.close(state, self.options)


@ocp.args.register_with_handler(DeltaCheckpointHandler, for_save=True)
@dataclasses.dataclass
class DeltaSave(ocp.args.CheckpointArgs):
    """What to save.

    Attributes:
        item: Any pytree of arrays, typed keys and Python values.
        custom_metadata: JSON to keep with the step.
    """

    item: Any
    custom_metadata: Any = None


@ocp.args.register_with_handler(DeltaCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class DeltaRestore(ocp.args.CheckpointArgs):
    """What to restore.

    Attributes:
        item: Target: a pytree of arrays or `jax.ShapeDtypeStruct`s (any sharding and
            mesh, another dtype is a cast), numpy arrays, Python scalars, `...` for a
            leaf to leave out. None: a plain tree of everything, as it was saved.
        partial_restore: Allow leaves of the step that the target does not have.
        strict: Refuse another shape; otherwise cut off or pad with zeros.
        on_corruption: What to do about a step that is damaged and cannot be healed.
            `"raise"`: an error that names the newest step that restores. `"fallback"`:
            take the newest state before it that restores, log that as an error, and
            name it in the handler's `last_restore_report`.
    """

    item: Any = None
    partial_restore: bool = False
    strict: bool = True
    on_corruption: fallback.OnCorruption = "raise"


def handler_registry(
    item: str | Sequence[str] | None = DEFAULT_ITEM, **options: Any
) -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """The one line that turns a `CheckpointManager` to deltas.

    `CheckpointManager(root, handler_registry=handler_registry())`: call sites keep
    `StandardSave/Restore`, `PyTreeSave/Restore` or use `DeltaSave/Restore`.

    Args:
        item: Item, or items, that deltas are for; None: all items with such arguments.
        **options: Fields of `DeltaOptions`.

    Raises:
        InvalidInputError: An option is unknown or out of range.
    """
    handler = DeltaCheckpointHandler(_options(options))
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    names = [item] if item is None or isinstance(item, str) else list(item)
    for name in names:
        for args in (DeltaSave, DeltaRestore, *delegation.ORBAX_ARGS):
            registry.add(name, args, handler)
    return registry


def _on_corruption(args: ocp.args.CheckpointArgs) -> fallback.OnCorruption:
    value = getattr(args, "on_corruption", "raise")
    if value not in ("raise", "fallback"):
        raise InvalidInputError(
            f'DeltaRestore.on_corruption is {value!r}; expected "raise" or "fallback"'
        )
    return "fallback" if value == "fallback" else "raise"


def _options(values: Mapping[str, Any]) -> DeltaOptions:
    known = [field.name for field in dataclasses.fields(DeltaOptions)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise InvalidInputError(
            f"unknown options {unknown}; DeltaOptions has {', '.join(known)}"
        )
    return DeltaOptions(**values)
