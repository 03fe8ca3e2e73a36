"""Puts a step's arguments onto the devices of a target, by their shardings.

Only axes and their sizes, specs and memory kinds count: what a sharding says of this
machine's devices, the target's devices take over. Does not belong here: making those
devices (see `targets`).
"""

from typing import Any

import jax

from remat_policies import targets
from remat_policies.devices import Device
from remat_policies.errors import InvalidInputError

_HOST = "pinned_host"

# Stands for None, which is no leaf of a tree.
_ANYWHERE = object()

_WHOLE = jax.sharding.PartitionSpec()


def placed(
    avals: tuple[Any, ...], shardings: Any, chosen: Device
) -> tuple[tuple[Any, ...], jax.sharding.Mesh]:
    """The arguments as they would be on the target, and the mesh they are on.

    Args:
        avals: Trees of whatever has a shape and a dtype; the rest stays as it is.
        shardings: A prefix of `avals` of `NamedSharding` and None; where None, an
            argument's own counts if it is one, else it is whole on every device.
        chosen: What they go to. Without any sharding, to one such device.

    Raises:
        InvalidInputError: Shardings are no prefix, not named, of several meshes or of
            a memory kind that the target's compiler does not heed.
    """
    wanted = _wanted(avals, shardings)
    mesh = _mesh(chosen, [sharding for _, sharding in wanted if sharding])
    leaves = [_leaf(leaf, sharding, mesh, chosen) for leaf, sharding in wanted]
    return jax.tree.unflatten(jax.tree.structure(avals), leaves), mesh


def _wanted(avals: Any, shardings: Any) -> list[tuple[Any, Any]]:
    """Each leaf of the arguments with the sharding it is to have, or None."""
    marked = jax.tree.map(
        lambda node: _ANYWHERE if node is None else node,
        shardings,
        is_leaf=lambda node: node is None,
    )
    try:
        asked = jax.tree.leaves(jax.tree.broadcast(marked, avals))
    except ValueError as error:
        raise InvalidInputError(
            f"shardings is no prefix of the tuple of arguments: {error}"
        ) from error
    pairs = []
    for leaf, sharding in zip(jax.tree.leaves(avals), asked, strict=True):
        if sharding is _ANYWHERE:
            own = getattr(leaf, "sharding", None)
            sharding = own if isinstance(own, jax.sharding.NamedSharding) else None
        elif not isinstance(sharding, jax.sharding.NamedSharding):
            raise InvalidInputError(
                f"shardings holds a {type(sharding).__name__}: the target's devices "
                "need a NamedSharding, or None for whole onto each."
            )
        pairs.append((leaf, sharding))
    return pairs


def _mesh(chosen: Device, shardings: list[Any]) -> jax.sharding.Mesh:
    """The mesh of all these shardings, of the target's devices."""
    if not shardings:
        return targets.aot_mesh(chosen.name)
    meshes = {tuple(sharding.mesh.shape.items()) for sharding in shardings}
    if len(meshes) > 1:
        raise InvalidInputError(
            "the shardings of the arguments are of different meshes: "
            f"{' and '.join(str(dict(axes)) for axes in sorted(meshes))}; give all of "
            "one."
        )
    source = shardings[0].mesh
    made = targets.aot_mesh(chosen.name, source.shape)
    return jax.sharding.Mesh(
        made.devices, made.axis_names, axis_types=source.axis_types
    )


def _leaf(leaf: Any, sharding: Any, mesh: jax.sharding.Mesh, chosen: Device) -> Any:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    kind = getattr(sharding or getattr(leaf, "sharding", None), "memory_kind", None)
    if kind == _HOST and chosen.kind == "gpu":
        # The GPU's compiler drops it without a word and counts device memory.
        raise InvalidInputError(
            "an argument is in pinned_host memory, of which the GPU's compiler takes "
            "no notice ahead of time: verify on a TPU, or keep it on the device."
        )
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        weak_type=getattr(leaf, "weak_type", False),
        sharding=jax.sharding.NamedSharding(
            mesh,
            sharding.spec if sharding else _WHOLE,
            memory_kind=_HOST if kind == _HOST else None,
        ),
    )
