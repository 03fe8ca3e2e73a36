"""The adapter to Orbax (v0): arguments, handler, registry. No logic of its own.

`async_save` takes the snapshot in the calling thread and gives Orbax a future that
runs the save; Orbax's own arguments are understood too, and steps that Orbax's own
handlers wrote are restored by them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from orbax_delta import delegation, fallback, processes, steps
from orbax_delta.blocking import SaveRequest
from orbax_delta.errors import InvalidInputError, NotFoundError
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.options import DeltaOptions, options_of
from orbax_delta.places import locate
from orbax_delta.reports import RestoreReport, SaveReport
from orbax_delta.sessions import Sessions
from orbax_delta.store import Folder

DEFAULT_ITEM = "default"

V1_TYPESTR = "orbax_delta.handler_v1.DeltaHandler"
"""Name under which Orbax records the handler of the v1 adapter."""


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
        self._sessions = Sessions()

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
        options = self.options
        if isinstance(args, DeltaSave):
            options = args.options(options)
        return processes.prepare(
            tree,
            str(directory),
            options,
            known=self._sessions.known,
            custom_metadata=custom_metadata,
        )

    def _run(self, request: SaveRequest) -> None:
        self.last_save_report = self._sessions.save(request)

    def restore(
        self, directory: epath.Path, args: ocp.args.CheckpointArgs | None = None
    ) -> Any:
        """Restore a step; see `DeltaRestore` for what can be asked.

        Raises:
            InvalidInputError: An array of `base` has been deleted or donated.
            NotFoundError: The step, or the store it needs, is not there.
            StructureError: The target does not fit the step.
            CorruptionError: Something stored is damaged and nothing else of the root
                holds it; it names the newest step that restores.
        """
        args = args or DeltaRestore()
        live = delegation.live(args)
        place = locate(str(directory))
        if delegation.written_by_orbax(Folder(place.item_url)):
            return delegation.restore(directory, args)
        result = self._sessions.restore(
            place,
            delegation.target(args),
            self.options,
            on_corruption=delegation.on_corruption(args),
            job=processes.restoring(self.options.processes),
            live=live,
        )
        self.last_restore_report = result.report
        return result.tree

    def metadata(self, directory: epath.Path) -> Any:
        """What a step holds, without reading any of it.

        Raises:
            NotFoundError: There is no step of this or Orbax's own kind.
        """
        place = locate(str(directory))
        found = steps.find_manifest(place)
        if found is not None:
            return delegation.tree_metadata(found[1], directory)
        if delegation.written_by_orbax(place.folder):
            return ocp.StandardCheckpointHandler().metadata(directory)
        raise NotFoundError(f"{directory} holds no {MANIFEST_NAME}")

    def finalize(self, directory: epath.Path) -> None:
        """Check that the step is there and this job's; nothing is left to do.

        Raises:
            NotFoundError: It is not there.
            ConflictError: Another job saved into the same folder.
        """
        place = locate(str(directory))
        self._sessions.confirm(place, processes.job(self.options))

    def close(self) -> None:
        """Release pins and sweep; may be called more than once."""
        self._sessions.close()


@ocp.args.register_with_handler(DeltaCheckpointHandler, for_save=True)
@dataclasses.dataclass
class DeltaSave(ocp.args.CheckpointArgs):
    """What to save.

    Attributes:
        item: Any pytree of arrays, typed keys and Python values.
        custom_metadata: JSON to keep with the step.
        exact: Store every leaf bit for bit, whatever `DeltaOptions.lossy` says.
    """

    item: Any
    custom_metadata: Any = None
    exact: bool = False

    def options(self, options: DeltaOptions) -> DeltaOptions:
        """`options` as this save has them.

        Raises:
            InvalidInputError: `exact` is no bool.
        """
        if type(self.exact) is not bool:
            raise InvalidInputError(
                f"DeltaSave.exact is {self.exact!r}; expected True or False"
            )
        return dataclasses.replace(options, lossy=None) if self.exact else options


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
        base: A live pytree of jax or numpy arrays, of any structure; leaves are found
            by their path. A stored chunk is not read if its bytes are in it (digests
            are compared, nothing is believed), and of a chunk that is as the last save
            or restore of this handler left it only the records after that are read.
            An array that is the one to be restored, with its dtype, shape and sharding,
            is *itself* put into the result: donating or overwriting one of the two
            does so to the other; one array at two paths comes back as one, and one that
            jax has not committed to a device stays so. Arrays of another dtype or shape
            are of no use, and no error; nobody may write to numpy ones meanwhile.
            Arrays on accelerators are copied to the host to be digested. Steps of
            Orbax's own handlers are read as always.
    """

    item: Any = None
    partial_restore: bool = False
    strict: bool = True
    on_corruption: fallback.OnCorruption = "raise"
    # Not shown: text of arrays on accelerators would be copied to the host for it.
    base: Any = dataclasses.field(default=None, repr=False)


class _HandlerOfV1(DeltaCheckpointHandler):
    """What a manager that is told of no handler makes for a step that v1 wrote."""

    @classmethod
    def typestr(cls) -> str:
        return V1_TYPESTR


@ocp.args.register_with_handler(_HandlerOfV1, for_save=True, for_restore=True)
@dataclasses.dataclass
class _RestoreOfV1(DeltaRestore):
    """The arguments that such a manager then makes; both kinds have to be known."""


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
    handler = DeltaCheckpointHandler(options_of(options))
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    names = [item] if item is None or isinstance(item, str) else list(item)
    for name in names:
        for args in (DeltaSave, DeltaRestore, *delegation.ORBAX_ARGS):
            registry.add(name, args, handler)
    return registry
