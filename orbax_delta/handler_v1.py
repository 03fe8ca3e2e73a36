"""The adapter to Orbax v1: context, handler, stateful object. No logic of its own.

v1 makes a handler anew for every call, never closes one and calls nothing when a step
is done. So what is remembered from save to save lies in this module, per item and root,
and a step is published inside the save's awaitable.

    >>> from orbax.checkpoint import v1
    >>> with v1.training.Checkpointer(root, context=v1_context()) as checkpointer:
    ...     for step in range(3):
    ...         state = {"w": jnp.arange(1024.0).at[step].set(-1), "step": step}
    ...         _ = checkpointer.save(step, state)
    ...     int(checkpointer.load(2)["step"])
    2
"""

import asyncio
import atexit
import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, ClassVar

import jax
import jax.tree_util as jtu
import numpy as np
from etils import epath
from orbax.checkpoint import v1

from orbax_delta import delegation, leaves, processes, shardings, steps, trees
from orbax_delta.blocking import SaveRequest
from orbax_delta.errors import InvalidInputError, NotFoundError
from orbax_delta.handler import DeltaCheckpointHandler, DeltaRestore, DeltaSave
from orbax_delta.manifests import MANIFEST_NAME, LeafEntry
from orbax_delta.options import DeltaOptions, options_of
from orbax_delta.places import locate
from orbax_delta.sessions import Sessions
from orbax_delta.store import Folder

DEFAULT_ITEM = "state"

HELD_BYTES = 1 << 30
"""Host memory that contents may take between saves, besides those of the root that was
used last: that one holds on to a copy of its state, as the v0 handler does."""

MOST_STATES = 100
"""Items, of all roots, of which anything is remembered at all."""

_VALUES = {kind.__name__: kind() for kind in (bool, int, float, complex, str, bytes)}

_SESSIONS = Sessions(held_bytes=HELD_BYTES, states=MOST_STATES)

# Nobody closes a handler. Whoever prunes on this host would see that the pins' owner is
# dead, but on another one (a pod's successor) they would hold packs back for ever.
# Orbax's threads have ended by then: Python joins them before it calls this.
atexit.register(_SESSIONS.release)


class DeltaHandler:
    """Saves only what changed of a pytree: a `v1.handlers.CheckpointableHandler`.

    `v1_context` registers one with its options. To register it globally, under a name:
    `v1.handlers.register_handler(DeltaHandler, checkpointable_name="items")`.

    Attributes:
        options: Options in force; subclass to change them, for v1 takes types only.
        partial_load: Allow leaves of a step that a target does not have.
    """

    options: ClassVar[DeltaOptions] = DeltaOptions()
    partial_load: ClassVar[bool] = False

    async def save(
        self, directory: v1.path.PathAwaitingCreation, checkpointable: Any
    ) -> Awaitable[None]:
        """Take the state now, write it in the awaitable; that raises whatever fails.

        `DeltaSave(tree, exact=True)` is understood too.
        """
        # Orbax keeps the awaitable; the state must not live as long.
        prepared = [_prepared(checkpointable, str(directory.path), self.options)]

        async def write() -> None:
            request = prepared.pop()
            await directory.await_creation()
            # Not in the event loop: items of one step wait there for each other's turn,
            # and those of many processes would not come in the same order.
            await _finished(asyncio.to_thread(lambda: _SESSIONS.save(request())))

        return write()

    async def load(
        self, directory: epath.Path, abstract_checkpointable: Any = None
    ) -> Awaitable[Any]:
        """Restore a step; `DeltaRestore(tree, ...)` is understood too.

        Raises:
            NotFoundError: The step, or the store it needs, is not there.
            StructureError: The target does not fit the step.
            CorruptionError: Something stored is damaged and nothing else of the root
                holds it; it names the newest step that restores.
        """
        # Here and not in the awaitable: orbax-checkpoint 0.12.8 turns whatever that
        # raises into a KeyError about incompatible handlers, and awaits it at once.
        loaded = await self._load(directory, abstract_checkpointable)

        async def done() -> Any:
            return loaded

        return done()

    async def _load(self, directory: epath.Path, abstract: Any) -> Any:
        place = locate(str(directory))
        args = self._restore_args(abstract)
        live = delegation.live(args)
        if delegation.written_by_orbax(Folder(place.item_url)):
            if args is abstract and (args.partial_restore or not args.strict):
                return delegation.restore(directory, args)
            return await (await v1.handlers.PyTreeHandler().load(directory, args.item))
        result = _SESSIONS.restore(
            place,
            delegation.target(args),
            self.options,
            on_corruption=delegation.on_corruption(args),
            job=processes.restoring(self.options.processes),
            live=live,
        )
        return result.tree

    def _restore_args(self, abstract: Any) -> DeltaRestore:
        if isinstance(abstract, DeltaRestore):
            return abstract
        target = jtu.tree_map(_target_leaf, abstract)
        return DeltaRestore(target, partial_restore=self.partial_load)

    async def metadata(self, directory: epath.Path) -> Any:
        """The tree of a step with abstract leaves, made to be a target as it is.

        jax arrays and typed keys are `jax.ShapeDtypeStruct`s, with their sharding where
        its devices are here; numpy arrays are `NumpyMetadata`, numbers 0, texts empty.

        Raises:
            NotFoundError: There is no step of this or Orbax's own kind.
        """
        place = locate(str(directory))
        found = steps.find_manifest(place)
        if found is not None:
            manifest = found[1]
            return trees.rebuild(
                manifest.tree,
                [_leaf_metadata(leaf) for leaf in manifest.leaves],
                paths=[leaf.path for leaf in manifest.leaves],
                where=f"{directory}/{MANIFEST_NAME}",
            )
        if delegation.written_by_orbax(place.folder):
            return await v1.handlers.PyTreeHandler().metadata(directory)
        raise NotFoundError(f"{directory} holds no {MANIFEST_NAME}")

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it is a tree of leaves that can be stored."""
        if isinstance(checkpointable, DeltaSave):
            return self.is_handleable(checkpointable.item)
        return not isinstance(checkpointable, v1.StatefulCheckpointable) and (
            leaves.storable(checkpointable)
        )

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Whether it is a target."""
        if isinstance(abstract_checkpointable, v1.StatefulCheckpointable):
            return False
        try:
            delegation.target(self._restore_args(abstract_checkpointable))
        except InvalidInputError:
            return False
        return True


def v1_context(
    item: str | Sequence[str] | None = DEFAULT_ITEM,
    *,
    context: v1.Context | None = None,
    **options: Any,
) -> v1.Context:
    """The one line that turns Orbax v1 to deltas, for a Checkpointer or a `with` block.

    `training.Checkpointer(root, context=v1_context())`: call sites stay as they are.

    Args:
        item: Name, or names, of the checkpointables that deltas are for; None: `state`
            and every other one that no handler is registered for by name.
        context: What to start from, `pytree.loading.partial_load` included; it is left
            as it is.
        **options: Fields of `DeltaOptions`.

    Raises:
        InvalidInputError: An option is unknown or out of range, or a name is none.
    """
    names = _names(item)
    made = v1.Context(context)
    handler = _handler(options_of(options), made.pytree.loading.partial_load)
    registry = v1.handlers.local_registry(include_global_registry=False)
    earlier = made.checkpointables.registry
    for other, name in earlier.get_all_entries():
        if name not in names:
            registry.add(
                other,
                checkpointable_name=name,
                secondary_typestrs=earlier.get_secondary_typestrs(other),
            )
    typestrs = [DeltaCheckpointHandler.typestr()]
    for name in [None, *names] if item is None else names:
        registry.add(handler, checkpointable_name=name, secondary_typestrs=typestrs)
    made.checkpointables.registry = registry
    return made


def _names(item: Any) -> list[str]:
    if item is None or isinstance(item, str):
        names = [DEFAULT_ITEM if item is None else item]
    else:
        names = list(item) if isinstance(item, Sequence) else []
    good = all(isinstance(name, str) and name for name in names)
    if not names or not good or len(set(names)) < len(names):
        raise InvalidInputError(
            f"item is {item!r}; expected the name of a checkpointable, several "
            "different ones, or None"
        )
    return names


def v1_release(root: str | os.PathLike[str] | None = None) -> None:
    """Let go of what is remembered between v1 saves: host memory, and pins.

    For a process that lives on when a run has ended. Saving again writes in full.

    Args:
        root: Folder of the Checkpointer; None: all of them.
    """
    _SESSIONS.forget(None if root is None else str(epath.Path(root)))


class DeltaState:
    """A pytree that saves only what changed, by itself, with no context needed.

    A `v1.StatefulCheckpointable`, so it is found under any name, `state` too; make one
    per save or keep one, that makes no difference.

        >>> with v1.training.Checkpointer(root) as checkpointer:
        ...     model = DeltaState({"w": jnp.arange(1024.0)})
        ...     _ = checkpointer.save_checkpointables(9, {"model": model})
        ...     loaded = checkpointer.load_checkpointables(9, {"model": DeltaState()})
        >>> float(loaded["model"].tree["w"][7])
        7.0

    Args:
        tree: What to save; when loading a target, None for everything as it was saved.
        base: When loading, a live tree that need not be read, as `DeltaRestore.base`.
        **options: Fields of `DeltaOptions`.

    Attributes:
        tree: The same; once it has loaded, what was restored.
        base: The same; it is let go of by loading.
    """

    def __init__(self, tree: Any = None, *, base: Any = None, **options: Any) -> None:
        self.tree = tree
        self.base = base
        self._handler = _handler(options_of(options))()

    async def save(self, directory: v1.path.PathAwaitingCreation) -> Awaitable[None]:
        """See `DeltaHandler.save`."""
        return await self._handler.save(directory, self.tree)

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """See `DeltaHandler.load`."""
        wanted = self.tree
        if self.base is not None:
            target = jtu.tree_map(_target_leaf, wanted)
            wanted, self.base = DeltaRestore(target, base=self.base), None
        loaded = await self._handler.load(directory, wanted)

        async def done() -> None:
            self.tree = await loaded

        return done()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NumpyMetadata:
    """A numpy leaf of a step: a `v1.arrays.AbstractArray`.

    Attributes:
        shape: Its shape.
        dtype: Its type.
    """

    shape: tuple[int, ...]
    dtype: np.dtype


def _handler(options: DeltaOptions, partial_load: bool = False) -> type[DeltaHandler]:
    """A type with options bound, which Orbax records under the name of its base."""
    bound = {"options": options, "partial_load": partial_load}
    named = {"__module__": DeltaHandler.__module__, "__qualname__": "DeltaHandler"}
    return type("DeltaHandler", (DeltaHandler,), bound | named)


def _prepared(
    tree: Any, directory: str, options: DeltaOptions
) -> Callable[[], SaveRequest]:
    """The snapshot, or what taking it raised.

    If `save` itself raises, orbax-checkpoint 0.12.8 takes that save to be in progress
    from then on, and its default policy skips every later one without a word. The
    awaitable may raise.
    """
    metadata = None
    if isinstance(tree, DeltaSave):
        options = tree.options(options)
        tree, metadata = tree.item, tree.custom_metadata
    try:
        request = processes.prepare(
            tree,
            directory,
            options,
            known=_SESSIONS.known,
            custom_metadata=metadata,
        )
    except Exception as error:  # noqa: BLE001 # raised by the awaitable
        refused = error

        def fail() -> SaveRequest:
            raise refused

        return fail
    return lambda: request


async def _finished(work: Coroutine[Any, Any, Any]) -> None:
    """Wait for `work`, if cancelled too: nothing may be written once that is told."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        # Orbax may cancel more than once.
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


def _target_leaf(leaf: Any) -> Any:
    """A leaf of a v1 target as v0 has it."""
    sharded = hasattr(leaf, "sharding") or isinstance(leaf, np.ndarray | np.generic)
    if isinstance(leaf, type) or sharded or not hasattr(leaf, "dtype"):
        return leaf
    # An AbstractArray is numpy's; takes no memory.
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _leaf_metadata(leaf: LeafEntry) -> Any:
    if leaf.kind == "jax":
        return _struct(leaf, leaf.shape, leaf.element.dtype)
    if leaf.kind == "key":
        keys = leaves.key_struct(leaf)
        return _struct(leaf, keys.shape, keys.dtype)
    if leaf.kind == "numpy":
        return NumpyMetadata(shape=tuple(leaf.shape), dtype=leaf.element.dtype)
    if leaf.kind == "numpy_scalar":
        return np.zeros((), leaf.element.dtype)[()]
    return _VALUES[leaf.kind]


def _struct(leaf: LeafEntry, shape: Sequence[int], dtype: Any) -> Any:
    sharding = shardings.from_document(leaf.sharding, shape)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)  # type: ignore[no-untyped-call] # jax leaves it so
