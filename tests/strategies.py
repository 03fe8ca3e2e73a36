"""Shared by the tests: managers, comparison bit by bit, states and edits to draw."""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_delta
from orbax_delta import check, prune
from orbax_delta import store as store_module
from orbax_delta.manifests import MANIFEST_NAME, Manifest, parse_manifest
from orbax_delta.places import locate
from orbax_delta.steps import Step, open_step
from orbax_delta.store import DeltaStore, Folder
from orbax_delta.testing.strategies import (
    EDITS,
    JAX_DTYPES,
    LEAVES,
    NUMPY_DTYPES,
    PYTHON_VALUES,
    SEEDS,
    SHAPES,
    arrays,
    assert_same_leaf,
    assert_same_tree,
    bits,
    dtype_name,
    edited,
    edits,
    keys,
    leaf_kind,
    option_values,
    random_array,
    trees,
)

__all__ = [
    "EDITS",
    "JAX_DTYPES",
    "LEAVES",
    "LITTLE_OPTIONS",
    "NUMPY_DTYPES",
    "PYTHON_VALUES",
    "SEEDS",
    "SHAPES",
    "STORE",
    "Run",
    "arrays",
    "assert_same_leaf",
    "assert_same_tree",
    "bits",
    "check_clean",
    "disk_bytes",
    "dtype_name",
    "edited",
    "edits",
    "keys",
    "leaf_kind",
    "listing",
    "little_state",
    "open_run",
    "option_values",
    "packs_named",
    "packs_on_disk",
    "random_array",
    "read_manifest",
    "read_step",
    "refusing_options",
    "sharded",
    "sharding_of",
    "skip_disk_sync",
    "trees",
]

STORE = "_delta_store"

LITTLE_OPTIONS: Mapping[str, Any] = {
    "chunk_bytes": 2048,
    "pack_bytes": 3000,
    "refresh_every": 2,
    "full_every": 1,
    "keep_bases": 1,
    "threads": 1,
}
"""With `little_state` each save has several packs, each delta is followed by a full
record, bases come and go, and operations come in the same order every time."""


def skip_disk_sync(monkeypatch: Any) -> None:
    """Let the store write without fsync: what a power cut leaves is not tested here."""
    real = store_module._spec

    def spec(url: str) -> Any:
        if "://" in url:
            return real(url)
        return {"driver": "file", "path": url, "context": {"file_io_sync": False}}

    monkeypatch.setattr(store_module, "_spec", spec)


def private_disk(folder: Path, size: str = "100m") -> list[str]:
    """What runs a command for which `folder`, made here, is a disk of its own.

    Skips the test where none can be mounted.
    """
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={size} none "$1" && shift && exec "$@"'
    around = ["unshare", "-rm", "sh", "-c", mount, "sh", str(folder)]
    if shutil.which("unshare") is None:
        pytest.skip("this system has no `unshare` to mount a disk with")
    probe = subprocess.run([*around, "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    return around


@contextlib.contextmanager
def labelled(text: str) -> Iterator[None]:
    """Failures in the block say which injected fault they belong to."""
    try:
        yield
    except BaseException as error:
        error.add_note(text)
        raise


# --- managers -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A manager with the handler that serves its item `default`."""

    manager: ocp.CheckpointManager
    handler: orbax_delta.DeltaCheckpointHandler

    def save(self, step: int, tree: Any, *, force: bool = False) -> None:
        """Save and wait until it is committed and old steps are deleted."""
        assert self.manager.save(step, args=ocp.args.StandardSave(tree), force=force)
        self.manager.wait_until_finished()

    def restore(self, step: int, target: Any = None) -> Any:
        """Restore with Orbax's own arguments."""
        return self.manager.restore(step, args=ocp.args.StandardRestore(target))


@contextlib.contextmanager
def open_run(
    root: Path,
    *,
    manager_options: ocp.CheckpointManagerOptions | None = None,
    **options: Any,
) -> Iterator[Run]:
    """A manager as the README advertises it; closed at the end."""
    registry = orbax_delta.handler_registry(**options)
    handler = registry.get("default", orbax_delta.DeltaSave)
    assert isinstance(handler, orbax_delta.DeltaCheckpointHandler)
    with ocp.CheckpointManager(
        root, options=manager_options, handler_registry=registry
    ) as manager:
        yield Run(manager, handler)


def refusing_options() -> ocp.CheckpointManagerOptions:
    """For tests in which `save()` itself raises.

    orbax-checkpoint 0.12.8 then leaves a thread that waits 300 s for the step's
    folder and keeps the process from ending; not if folders are made at once.
    `test_async.py` notices when that is mended.
    """
    return ocp.CheckpointManagerOptions(
        async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False)
    )


def read_step(root: Path, step: int | str, item: str = "default") -> Step:
    """MANIFEST and rows of a step."""
    return open_step(locate(str(root / str(step) / item)))


def read_manifest(path: Path) -> Manifest:
    """A MANIFEST file."""
    return parse_manifest(path.read_bytes(), where=str(path))


def little_state(version: int) -> dict[str, Any]:
    """Chunks of every kind: dense, sparse, unchanged, constant, derived, values."""
    rng = np.random.default_rng(7)
    weights = rng.standard_normal(1200).astype(np.float32)
    for past in range(version):
        weights[past * 40 : past * 40 + 3] += 1
    if version >= 3:
        weights[:600] *= np.float32(1 + version / 1000)
    return {
        "w": weights,
        "half": jnp.asarray(weights).astype(jnp.bfloat16),
        "frozen": rng.standard_normal(1000).astype(np.float32),
        "zero": np.zeros(700, np.int16),
        "version": version,
    }


def packs_on_disk(root: Path) -> set[str]:
    """Names of the packs that the store holds."""
    folder = root / STORE / "packs"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def packs_named(root: Path) -> set[str]:
    """Names of the packs that MANIFESTs anywhere below the root name."""
    return {
        pack for path in root.rglob(MANIFEST_NAME) for pack in read_manifest(path).packs
    }


def listing(root: Path) -> Mapping[str, str]:
    """Every file and folder below `root`, files with a digest of their bytes."""
    found = {}
    for folder, names, files in os.walk(root):
        for name in names:
            found[os.path.relpath(os.path.join(folder, name), root)] = "folder"
        for name in files:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()
            found[os.path.relpath(path, root)] = digest
    return found


def disk_bytes(root: Path) -> int:
    """Total size of all files below `root`."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def sharded(array: Any, shape: tuple[int, ...], names: str, *spec: Any) -> jax.Array:
    """`array` on a mesh of the first CPU devices, e.g. `(4, 2), "xy", "x", "y"`."""
    return jax.device_put(array, sharding_of(shape, names, *spec))


def sharding_of(shape: tuple[int, ...], names: str, *spec: Any) -> NamedSharding:
    """A NamedSharding on a mesh of the first CPU devices."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(Mesh(devices, tuple(names)), PartitionSpec(*spec))


def check_clean(root: Path, steps: Iterable[int]) -> None:
    """With nobody at work, a prune leaves what steps and bases name, and no more."""
    store = DeltaStore.open(Folder(str(root)))
    prune.execute(store, prune.plan(store))
    assert packs_on_disk(root) == packs_named(root)
    for folder in (store.packs, store.bases):
        assert folder.unfinished() == []
    for folder in (store.pins, store.condemned):
        assert folder.names() == []
    report = check.verify(str(root))
    assert not report.problems
    assert set(report.whole_steps) >= set(map(str, steps))
