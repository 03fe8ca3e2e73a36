"""Orbax's own arguments, metadata and steps, read the way this package does.

Everything here translates: Standard and PyTree arguments into trees and targets, a
MANIFEST into Orbax's metadata values, and steps of Orbax's own handlers back to them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from orbax_delta import leaves, shardings, trees
from orbax_delta.errors import InvalidInputError, StructureError
from orbax_delta.fallback import OnCorruption
from orbax_delta.live import Live, live_of
from orbax_delta.manifests import (
    MANIFEST_NAME,
    VALUE_KINDS,
    LeafEntry,
    Manifest,
    path_name,
)
from orbax_delta.restore import Target
from orbax_delta.store import Folder
from orbax_delta.targets import AS_SAVED, Make, Wanted, wanted_of

ORBAX_ARGS = (
    ocp.args.StandardSave,
    ocp.args.StandardRestore,
    ocp.args.PyTreeSave,
    ocp.args.PyTreeRestore,
)
_ORBAX_METADATA_FILE = "_METADATA"
_PLAIN_METADATA = (ocp.metadata.ScalarMetadata, ocp.metadata.StringMetadata)
_PYTHON_NUMBERS = (bool, int, float, complex)


def saved_item(args: Any) -> tuple[Any, Any]:
    """The tree and the custom metadata that save arguments hold.

    Raises:
        InvalidInputError: They ask for something that would change the bits.
    """
    if not hasattr(args, "custom_metadata"):
        raise InvalidInputError(
            f"save was given {type(args).__name__}; expected DeltaSave, StandardSave "
            "or PyTreeSave"
        )
    for path, save_args in jtu.tree_leaves_with_path(getattr(args, "save_args", None)):
        if getattr(save_args, "dtype", None) is not None:
            raise InvalidInputError(
                f"SaveArgs of leaf {jtu.keystr(path)} ask for a cast to "
                f"{save_args.dtype}; cast the leaf before saving it"
            )
    return args.item, args.custom_metadata


def target(args: Any) -> Target | None:
    """The target that restore arguments stand for; None: everything as saved.

    Raises:
        StructureError: A leaf of it is nothing that can be a target.
        InvalidInputError: They ask for something that is not supported.
    """
    if isinstance(args, ocp.args.PyTreeRestore):
        return _pytree_target(args)
    if not hasattr(args, "strict"):
        raise InvalidInputError(
            f"restore was given {type(args).__name__}; expected DeltaRestore, "
            "StandardRestore or PyTreeRestore"
        )
    item = args.item.tree if isinstance(args.item, DeltaTreeMetadata) else args.item
    if item is None:
        return None
    flat = trees.flatten(item)
    leaves = {
        path: _wanted(path, value, args)
        for path, value in zip(flat.paths, flat.values, strict=True)
    }
    return Target(
        treedef=jtu.tree_structure(item),
        leaves=leaves,
        partial=getattr(args, "partial_restore", False),
    )


def on_corruption(args: Any) -> OnCorruption:
    """What restore arguments say is to become of a damaged step.

    Raises:
        InvalidInputError: They say neither of the two.
    """
    value = getattr(args, "on_corruption", "raise")
    if value not in ("raise", "fallback"):
        raise InvalidInputError(
            f'DeltaRestore.on_corruption is {value!r}; expected "raise" or "fallback"'
        )
    return "fallback" if value == "fallback" else "raise"


def live(args: Any) -> Live | None:
    """The live tree that restore arguments offer, if they do.

    Raises:
        InvalidInputError: An array of it has been deleted or donated.
    """
    base = getattr(args, "base", None)
    return None if base is None else live_of(base)


def _wanted(path: trees.Path, value: Any, args: Any) -> Wanted:
    """One leaf of the target of StandardRestore or DeltaRestore."""
    if isinstance(value, (*_PLAIN_METADATA, type)):
        return AS_SAVED
    wanted = wanted_of(path, value, strict=args.strict)
    fallback = getattr(args, "fallback_sharding", None)
    if fallback is None or wanted.make is not Make.JAX or wanted.sharding is not None:
        return wanted
    return dataclasses.replace(wanted, sharding=fallback)


def _pytree_target(args: Any) -> Target | None:
    if args.transforms or args.legacy_transform_fn is not None:
        raise InvalidInputError(
            "PyTreeRestore.transforms is not supported; restore the subset with "
            "partial_restore=True and rename it yourself"
        )
    shape = args.item if args.item is not None else args.restore_args
    if shape is None:
        return None
    flat = trees.flatten(shape)
    wanted = {
        path: _pytree_wanted(path, value) if args.item is not None else AS_SAVED
        for path, value in zip(flat.paths, flat.values, strict=True)
    }
    if args.restore_args is not None:
        extra = trees.flatten(args.restore_args)
        for path, value in zip(extra.paths, extra.values, strict=True):
            if path in wanted:
                wanted[path] = _with_restore_args(wanted[path], value)
    # An empty dict of transforms is the older way to ask for a subset.
    partial = args.partial_restore or args.transforms == {}
    return Target(treedef=jtu.tree_structure(shape), leaves=wanted, partial=partial)


def _pytree_wanted(path: trees.Path, value: Any) -> Wanted:
    """PyTreeRestore's item gives structure; numbers in it are mere place-holders."""
    return AS_SAVED if type(value) in _PYTHON_NUMBERS else wanted_of(path, value)


def _with_restore_args(wanted: Wanted, args: Any) -> Wanted:
    if wanted.make is Make.NOTHING or not isinstance(args, ocp.RestoreArgs):
        return wanted
    if args.dtype is not None:
        wanted = dataclasses.replace(wanted, dtype=args.dtype)
    kinds = {jax.Array: Make.JAX, np.ndarray: Make.NUMPY}
    if args.restore_type in kinds:
        wanted = dataclasses.replace(wanted, make=kinds[args.restore_type])
    elif args.restore_type in _PYTHON_NUMBERS:
        wanted = Wanted(make=Make.PYTHON, python=args.restore_type)
    if not isinstance(args, ocp.ArrayRestoreArgs):
        return wanted
    sharding = args.sharding
    if sharding is None and args.mesh is not None and args.mesh_axes is not None:
        sharding = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
    if isinstance(sharding, ocp.metadata.ShardingMetadata):
        sharding = sharding.to_jax_sharding()
    return dataclasses.replace(
        wanted,
        sharding=sharding or wanted.sharding,
        shape=args.global_shape or wanted.shape,
        strict=args.strict,
    )


def written_by_orbax(folder: Folder) -> bool:
    """Whether an item's directory was written by Orbax's Standard or PyTree handler."""
    return folder.read(_ORBAX_METADATA_FILE) is not None


def _require_leaves(directory: epath.Path, args: Any) -> None:
    """Refuse a partial target with leaves that an Orbax step lacks.

    Orbax would hand the target's own values back in their place.
    """
    if not args.strict:
        raise InvalidInputError(
            f"{directory} was written by Orbax's own handler, which cannot cut or pad "
            "a partial target; leave strict=True"
        )
    stored = trees.flatten(ocp.PyTreeCheckpointHandler().metadata(directory).tree)
    absent = set(trees.flatten(args.item).paths) - set(stored.paths)
    if absent:
        raise StructureError(
            f"the target does not fit {directory}: "
            + ", ".join(sorted(map(path_name, absent)))
            + " not in the step"
        )


def restore(directory: epath.Path, args: Any) -> Any:
    """Restore a step of Orbax's own handlers with them."""
    if isinstance(args, ocp.args.PyTreeRestore):
        return ocp.PyTreeCheckpointHandler().restore(directory, args=args)
    if getattr(args, "partial_restore", False):
        _require_leaves(directory, args)
        return ocp.PyTreeCheckpointHandler().restore(
            directory,
            args=ocp.args.PyTreeRestore(
                args.item,
                restore_args=ocp.checkpoint_utils.construct_restore_args(args.item),
                partial_restore=True,
            ),
        )
    if not isinstance(args, ocp.args.StandardRestore):
        args = ocp.args.StandardRestore(args.item, strict=args.strict)
    return ocp.StandardCheckpointHandler().restore(directory, args=args)


def tree_metadata(manifest: Manifest, directory: epath.Path) -> "DeltaTreeMetadata":
    """What Orbax users expect of `item_metadata(step)`."""
    found = [_leaf_metadata(leaf, directory) for leaf in manifest.leaves]
    return DeltaTreeMetadata(
        trees.rebuild(
            manifest.tree,
            found,
            paths=[leaf.path for leaf in manifest.leaves],
            where=f"{directory}/{MANIFEST_NAME}",
        ),
        manifest.custom_metadata,
    )


def _leaf_metadata(leaf: LeafEntry, directory: epath.Path) -> Any:
    name = path_name(leaf.path)
    if leaf.kind in ("str", "bytes"):
        return ocp.metadata.StringMetadata(name=name, directory=directory)
    if leaf.kind in VALUE_KINDS:
        return ocp.metadata.ScalarMetadata(
            name=name, directory=directory, dtype=np.dtype(leaf.kind)
        )
    shape, dtype = leaf.shape, leaf.element.dtype
    if leaf.kind == "key":
        keys = leaves.key_struct(leaf)
        shape, dtype = keys.shape, keys.dtype
    return ocp.metadata.ArrayMetadata(
        name=name,
        directory=directory,
        shape=shape,
        dtype=dtype,
        sharding=_sharding_metadata(leaf.sharding),
    )


def _sharding_metadata(document: Any) -> ocp.metadata.ShardingMetadata | None:
    if document is None:
        return None
    if document["kind"] == "single":
        return ocp.metadata.SingleDeviceShardingMetadata(device_str=document["device"])
    mesh = shardings.mesh_document(document)
    try:
        axis_types = shardings.axis_types(mesh)
    except KeyError:
        return None  # of a newer jax
    return ocp.metadata.NamedShardingMetadata(
        shape=np.array(mesh.shape),
        axis_names=list(mesh.axis_names),
        partition_spec=tuple(shardings.partition_spec(document)),
        axis_types=axis_types,
    )


@jtu.register_pytree_with_keys_class
class DeltaTreeMetadata:
    """A step's tree with metadata as leaves; a pytree, and a mapping if the tree is.

    Follows Orbax's `TreeMetadata` protocol.

    Attributes:
        tree: Plain tree of `ocp.metadata.value` leaves.
        custom_metadata: What the caller kept with the step.
        use_zarr3: Always False: there is no zarr in this format.
    """

    use_zarr3 = False

    def __init__(self, tree: Any, custom_metadata: Any = None) -> None:
        self.tree = tree
        self.custom_metadata = custom_metadata

    @classmethod
    def build(
        cls, tree: Any, *, custom_metadata: Any = None, use_zarr3: bool = False
    ) -> "DeltaTreeMetadata":
        """Make one, as the protocol asks; `use_zarr3` means nothing here."""
        del use_zarr3
        return cls(tree, custom_metadata)

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        """For jax."""
        return (self.tree,), self.custom_metadata

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Any]:
        """For jax."""
        return ((jtu.GetAttrKey("tree"), self.tree),), self.custom_metadata

    @classmethod
    def tree_unflatten(cls, custom_metadata: Any, children: Any) -> "DeltaTreeMetadata":
        """For jax."""
        return cls(children[0], custom_metadata)

    def __getitem__(self, key: str | int) -> Any:
        return self.tree[key]

    def __contains__(self, key: str | int) -> bool:
        return key in self.tree

    def __len__(self) -> int:
        return len(self.tree)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def get(self, key: str, default: Any = None) -> Any:
        """Like `dict.get`."""
        return self.tree.get(key, default)

    def keys(self) -> Any:
        """Like `dict.keys`."""
        return self.tree.keys()

    def values(self) -> Any:
        """Like `dict.values`."""
        return self.tree.values()

    def items(self) -> Any:
        """Like `dict.items`."""
        return self.tree.items()

    def __repr__(self) -> str:
        return f"DeltaTreeMetadata(tree={self.tree!r})"
