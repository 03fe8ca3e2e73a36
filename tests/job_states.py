"""The state that jobs save: as numpy values, laid out over a job, and in digests.

`content` is what everything is compared with. Does not belong here: Orbax, this
package, and imports at the top that are slow.
"""

import hashlib

import ml_dtypes
import numpy as np

MESHES = ("data parallel", "fully sharded", "tensor parallel", "mixed")

LOCAL_LEAVES = ("host", "step", "rate", "name", "nothing")
"""Leaves that every process holds by itself: numpy and Python values."""


def content(version):
    """The state after `version` changes, as numpy and Python values alone."""
    rng = np.random.default_rng(11)
    dense = rng.standard_normal((64, 24)).astype(np.float32)
    table = rng.standard_normal((512, 8)).astype(np.float32)
    host = rng.standard_normal(300)
    for past in range(version):
        dense *= np.float32(1.001)
        table[past * 37 % 512] += 1
        host[past] += 1
    return {
        "dense": dense,
        "table": table,
        "half": dense.astype(ml_dtypes.bfloat16),
        "frozen": np.arange(1024, dtype=np.int32) ** 3,
        "zero": np.zeros((64, 16), np.float32),
        "key": np.array([0, 7], np.uint32),
        "host": host,
        "step": version,
        "rate": version / 10,
        "name": f"version {version}",
        "nothing": None,
    }


def digest(array):
    """Of the bits of an array, with its type and shape."""
    array = np.ascontiguousarray(array)
    words = f"{array.dtype.name} {array.shape} ".encode() + array.tobytes()
    return hashlib.sha256(words).hexdigest()


# --- the state on a mesh --------------------------------------------------------------


def sharding(mesh_name, leaf, rank, group=None):
    """How a mesh lays out a leaf with `rank` dimensions over a group of processes.

    Args:
        mesh_name: One of `MESHES`.
        leaf: Name of the leaf.
        rank: Number of its dimensions.
        group: Indices of the processes; None: the whole job.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(
        [d for d in jax.devices() if group is None or d.process_index in group]
    )
    if mesh_name == "mixed":
        # Neighbours along x, not along y, belong to one process.
        mesh = Mesh(devices.reshape(2, -1).T, ("x", "y"))
        spec = {
            "dense": ("x", "y"),
            "table": (None, "y"),
            "half": ("y",),
            "frozen": ("x",),
        }.get(leaf, ())
    else:
        mesh = Mesh(devices, ("x",))
        spec = {
            "fully sharded": ("x",),
            "tensor parallel": (None, "x"),
        }.get(mesh_name, ())
        if len(spec) > rank or leaf == "key":
            spec = ()
    return NamedSharding(mesh, PartitionSpec(*spec))


def state(version, mesh_name, group=None):
    """The state as jax arrays over a group of processes, and local leaves."""
    import jax

    def place(name, value):
        if name in LOCAL_LEAVES:
            return value
        layout = sharding(mesh_name, name, value.ndim, group)
        array = jax.make_array_from_callback(
            value.shape, layout, lambda index: value[index], dtype=value.dtype
        )
        return jax.random.wrap_key_data(array) if name == "key" else array

    return {name: place(name, value) for name, value in content(version).items()}


def target(mesh_name, group=None):
    """What to ask of a restore that is to give the state on a mesh."""
    import jax

    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        if isinstance(leaf, jax.Array)
        else leaf
        for name, leaf in state(0, mesh_name, group).items()
    }


def described(leaf):
    """A restored leaf: kind, and the box and digest of each part that is here."""
    import jax

    kind = "jax"
    if isinstance(leaf, jax.Array):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kind, leaf = f"key {jax.random.key_impl(leaf)}", jax.random.key_data(leaf)
        parts = [
            [
                [part.indices(size)[:2] for part, size in zip(s.index, leaf.shape)],
                digest(np.asarray(s.data)),
            ]
            for s in leaf.addressable_shards
        ]
        return {"kind": kind, "shape": leaf.shape, "parts": parts}
    if isinstance(leaf, np.ndarray):
        box = [[0, size] for size in leaf.shape]
        return {"kind": "numpy", "shape": leaf.shape, "parts": [[box, digest(leaf)]]}
    return {"kind": type(leaf).__name__, "value": leaf}
