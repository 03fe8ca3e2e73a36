"""Writes the golden store: a small one of every form, rule and kind of leaf, kept.

`python tests/golden.py` writes `tests/golden/v1/`: a manager's root, a self-contained
step, a root that two processes have saved to and, in `expected.json.zst`, the bits that
each leaf must have. `test_golden.py`
restores it with the package and with the second reader, so that what was once written
stays readable. It is written anew only with a new format version: while
`FORMAT_VERSION` is the one of the folder this script refuses, unless told `--force`
(which is right until a release has written that version).

Nothing of the machine that wrote it may matter to a reader, and no path of it may be
in it: each save is made in a temporary folder, of which MANIFESTs keep only `golden`.
"""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import zstandard

import orbax_delta
from orbax_delta import save
from orbax_delta.records import FORMAT_VERSION

FOLDER = Path(__file__).parent / "golden" / f"v{FORMAT_VERSION}"
STEPS = range(6)
SIZE = 2100
MOST_BYTES = 100_000
EXPECTED = "expected.json.zst"
TOGETHER = range(2)
"""Steps that two processes save, and the processes."""

_MASKS = {"int4": 15, "uint4": 15, "float4_e2m1fn": 15, "int2": 3, "uint2": 3}
_DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn", "int4", "uint4", "int2", "uint2"),
    *(">f4", ">i2", ">u8", ">c8", "<M8[ns]", "<m8[us]", ">M8[s]"),
)


def state(step):
    """The state of a step; a function of nothing but integers."""
    rng = np.random.Generator(np.random.PCG64(12345))
    # Every exponent but those of NaNs, and few bits below it: small when packed.
    words = np.arange(SIZE, dtype=np.uint32) % 255 << 23
    weights = (words | rng.integers(0, 16, SIZE, np.uint32) << 10).view(np.float32)
    if step >= 1:
        weights.view(np.uint32)[1024:1100] += 7  # a block
    if step >= 2:
        weights.view(np.uint32)[[3, 1000, 2099]] ^= 1  # sparse
    if step >= 3:
        weights.view(np.uint32)[:] += np.arange(SIZE, dtype=np.uint32) % 5  # dense
    if step >= 4:
        weights[:] = 0
    if step >= 5:
        weights[77] = -0.0
    with np.errstate(all="ignore"):
        casts = {
            "bf16": weights.astype(ml_dtypes.bfloat16),
            "f16": weights.astype(np.float16),
        }
    return {
        "weights": jnp.asarray(weights),
        **casts,
        "copy": weights.copy(),
        "nan": np.array([0x7FC12345, 0xFF800001, 0x80000000], np.uint32).view("f4"),
        "types": {name: _array(name, rng) for name in _DTYPES},
        "scalar": np.float32(step),
        "empty": np.zeros((0, 3), np.int16),
        "no dimensions": np.array(step, np.int64),
        "key": jax.random.wrap_key_data(jnp.array([step, 7], jnp.uint32)),
        "python": {
            "int": -(2**70) - step,
            "float": float("nan"),
            "bool": step % 2 == 0,
            "complex": complex(-0.0, float("inf")),
            "str": "step ü \ud800",
            "bytes": b"\x00\xff" * step,
            "None": None,
        },
        "nodes": [(), [1], (2, {"3": []}), {-1: {True: 4}, 2: {}}],
        "odd/key~": {"": step},
    }


def _array(name, rng):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    data = rng.integers(0, 256, 35 * dtype.itemsize, np.uint8)
    if name == "bool":
        data &= 1
    data &= np.uint8(_MASKS.get(name, 255))
    return data.view(dtype).reshape(5, 7)


def bits(leaf):
    """A leaf as JSON: kind, type, shape and bits; never compared as numbers."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(leaf))
        return [f"key {jax.random.key_impl(leaf)}", *bits(words)[1:]]
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        array = np.asarray(leaf)
        kind = "jax" if isinstance(leaf, jax.Array) else "numpy"
        kind = "numpy_scalar" if isinstance(leaf, np.generic) else kind
        plain = array.dtype.isnative and array.dtype.kind not in "mM"
        name = array.dtype.name if plain else array.dtype.str
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        data = data & np.uint8(_MASKS.get(name, 255))
        return [kind, name, list(array.shape), _text(data.tobytes())]
    if isinstance(leaf, float | complex):
        parts = np.array([complex(leaf)]).tobytes()
        return [type(leaf).__name__, _text(parts)]
    if isinstance(leaf, str):
        leaf = leaf.encode("utf-8", "surrogatepass")
        return ["str", _text(leaf)]
    if isinstance(leaf, bytes):
        return ["bytes", _text(leaf)]
    return [type(leaf).__name__, repr(leaf)]


def _text(data):
    return data.hex()


def leaves(tree):
    """Bits of each leaf of a tree, by its path as JSON."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        json.dumps(
            [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
        ): (bits(leaf))
        for path, leaf in found
    }


def write(folder):
    """Write the golden store of this format into an empty folder."""
    registry = orbax_delta.handler_registry(
        chunk_bytes=8192, pack_bytes=16384, full_every=100, keep_bases=1, threads=1
    )
    options = ocp.CheckpointManagerOptions(max_to_keep=None)
    with ocp.CheckpointManager(
        folder / "run", options=options, handler_registry=registry
    ) as manager:
        for step in STEPS:
            manager.save(step, args=ocp.args.StandardSave(state(step)))
            manager.wait_until_finished()
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "alone", args=orbax_delta.DeltaSave(state(3)))
    _write_together(folder / "together")
    for path in folder.rglob("commit_success.txt"):
        # Orbax writes the folder into these, and reads only that they are there.
        path.write_text(path.read_text().replace(str(folder), "golden"))
    expected = {f"run/{step}/default": leaves(state(step)) for step in STEPS}
    expected["alone"] = leaves(state(3))
    for step in TOGETHER:
        expected[f"together/{step}/default"] = leaves(shared_state(step))
    text = json.dumps(expected, sort_keys=True).encode()
    (folder / EXPECTED).write_bytes(zstandard.compress(text, 19))


def shared_state(step, put=lambda array, *spec: jnp.asarray(array)):
    """The state that two processes save: split, on both, and the primary's."""
    whole = np.array(state(0)["weights"][:2048]).reshape(64, 32)
    whole[step * 7] += step
    return {
        "rows": put(whole, "x"),
        "columns": put(whole + 1, None, "x"),
        "both": put(-whole),
        "number": step,
        "text": "two",
    }


def _write_together(root):
    """Have two processes save to `root`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, __file__, "--process", str(root), str(port)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen([*command, str(process)], env=environment)
        for process in TOGETHER
    ]
    if any(code for code in [child.wait(timeout=120) for child in children]):
        sys.exit("a process that was to save together with another one failed")


def _save_together(root, port, process):
    """What each of them does."""
    jax.distributed.initialize(
        coordinator_address=f"127.0.0.1:{port}",
        num_processes=len(TOGETHER),
        process_id=int(process),
    )
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))

    def put(array, *spec):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: array[index]
        )

    save.encode_manifest = _neutral(save.encode_manifest)
    registry = orbax_delta.handler_registry(
        chunk_bytes=1024, keep_bases=0, full_every=100, threads=1
    )
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in TOGETHER:
            manager.save(step, args=ocp.args.StandardSave(shared_state(step, put)))
            manager.wait_until_finished()


def expected_leaves(folder):
    """What each leaf of each step in the golden store must be."""
    return json.loads(zstandard.decompress((folder / EXPECTED).read_bytes()))


def _neutral(encode):
    """MANIFESTs that say nothing of the folder they were written in."""

    def encode_manifest(manifest):
        url = "golden/_delta_store/" if manifest.store_url else ""
        return encode(dataclasses.replace(manifest, store_url=url))

    return encode_manifest


def main(arguments):
    """Write the store, unless there is one of this version."""
    if arguments[:1] == ["--process"]:
        _save_together(*arguments[1:])
        return
    if FOLDER.exists() and "--force" not in arguments:
        sys.exit(
            f"{FOLDER} holds a store of format version {FORMAT_VERSION} already. It is "
            "written anew only with a new version; --force does it all the same"
        )
    with tempfile.TemporaryDirectory() as name:
        new = Path(name) / "golden"
        new.mkdir()
        save.encode_manifest = _neutral(save.encode_manifest)
        write(new)
        size = sum(path.stat().st_size for path in new.rglob("*") if path.is_file())
        if size > MOST_BYTES:
            sys.exit(f"the store has {size} bytes, more than {MOST_BYTES}")
        if FOLDER.exists():
            shutil.rmtree(FOLDER)
        shutil.copytree(new, FOLDER)
    print(f"{FOLDER}: {size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
