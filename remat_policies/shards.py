"""Bytes of a block's values on each device, where its arguments are sharded.

Which axes of a value in the middle are spread over a mesh is what XLA's partitioner
decides, so it is asked: the forward half is compiled, with all its values as results,
for the mesh of the arguments' shardings. Does not belong here: adding up.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from remat_policies.errors import InvalidInputError
from remat_policies.linearized import Linearized
from remat_policies.naming import evaluate


def device_count(avals: Sequence[Any]) -> int:
    """Over how many devices the arguments are spread; 1 without shardings."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(avals)]
    meshes = {one.mesh for one in shardings if isinstance(one, jax.NamedSharding)}
    spread = [mesh for mesh in meshes if mesh.size > 1]
    abstract = [mesh for mesh in spread if isinstance(mesh, AbstractMesh)]
    if len(spread) > 1 or abstract:
        raise InvalidInputError(
            "the arguments are sharded over several meshes, or one without devices:"
            " give all of one mesh, such as that of aot_mesh"
        )
    return max((mesh.size for mesh in meshes), default=1)


def bytes_on_each(split: Linearized, avals: Sequence[Any]) -> dict[int, int]:
    """Bytes of each value on each device, by number; nothing if none is sharded.

    Args:
        split: The block.
        avals: Its arguments. Their shardings may be of devices that are not here, such
            as those of `aot_mesh`.
    """
    if device_count(avals) == 1:
        return {}
    program = split.program
    flat = jax.tree.leaves(avals)
    made = [value for step in program.steps for value in step.outputs]

    def run(*args: Any) -> list[Any]:
        found = evaluate(program, [*split.outside, *args], {}, also=made)
        return found[len(program.outputs) :]

    (mesh, *_) = (leaf.sharding.mesh for leaf in flat if _mesh_size(leaf) > 1)
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*flat).compile()
    shardings = dict(zip(made, jax.tree.leaves(compiled.output_shardings), strict=True))
    shardings |= {
        value: leaf.sharding
        for value, leaf in zip(program.arguments[len(split.outside) :], flat)
        if _mesh_size(leaf) > 1
    }
    return {
        value: math.prod(sharding.shard_shape(program.avals[value].shape))
        * program.avals[value].dtype.itemsize
        for value, sharding in shardings.items()
    }


def bytes_if_spread(split: Linearized, devices: int) -> dict[int, int]:
    """The same without a compiler: as a value's type has it, else evenly over devices.

    Args:
        split: The block, at tracers whose shardings are not known.
        devices: How many there are.
    """
    if devices == 1:
        return {}
    program = split.program
    made = [value for step in program.steps for value in step.outputs]
    found = {}
    for value in (*program.arguments, *made):
        sharding = getattr(program.avals[value], "sharding", None)
        if sharding is not None and any(sharding.spec):
            shape = sharding.shard_shape(program.avals[value].shape)
            found[value] = math.prod(shape) * program.avals[value].dtype.itemsize
        else:
            found[value] = program.nbytes(value) // devices
    return found


def _mesh_size(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    return sharding.mesh.size if isinstance(sharding, jax.NamedSharding) else 1
