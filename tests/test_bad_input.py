"""Wrong calls and foreign or newer files: a typed error in words, nothing changed."""

import collections
import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from etils import epath
from strategies import STORE, assert_same_tree, open_run, refusing_options

import orbax_delta
from orbax_delta import prune
from orbax_delta.manifests import encode_manifest
from orbax_delta.store import DeltaStore, Folder


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def state(step):
    """A small state."""
    return {"w": np.arange(1000.0) + step, "step": step}


@pytest.fixture
def saved(root):
    """A root with steps 0 and 1."""
    with open_run(root) as run:
        for step in range(2):
            run.save(step, state(step))
    return root


def finished(listing):
    """A listing without what Orbax leaves of a save that failed."""
    return {
        name: digest
        for name, digest in listing.items()
        if ".orbax-checkpoint-tmp" not in name
    }


class _Unchanged:
    """Asserts that a block changes nothing below a root."""

    def __init__(self, root):
        self.root = root

    def __enter__(self):
        self.before = strategies.listing(self.root)

    def __exit__(self, kind, *_):
        if kind is None:
            after = strategies.listing(self.root)
            assert finished(after) == finished(self.before)


def open_store(root):
    """The store of a root."""
    return DeltaStore.open(Folder(str(root)))


# --- the call -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_bytes": 63}, r"chunk_bytes is 63; expected a whole number from 64"),
        ({"chunk_bytes": 1 << 31}, r"chunk_bytes is \d+; expected"),
        ({"chunk_bytes": 1e6}, r"chunk_bytes is 1000000\.0; expected a whole"),
        ({"pack_bytes": 0}, r"pack_bytes is 0; expected"),
        ({"full_every": -1}, r"full_every is -1; expected a whole number from 0"),
        ({"full_every": True}, r"full_every is True; expected"),
        ({"max_chain": 0}, r"max_chain is 0; expected a whole number from 1 to 200"),
        ({"read_budget": 0.9}, r"read_budget is 0\.9; expected a number from 1\.0"),
        ({"read_budget": float("nan")}, r"read_budget is nan; expected"),
        ({"read_budget": "2"}, r"read_budget is '2'; expected"),
        ({"refresh_every": 0}, r"refresh_every is 0; expected"),
        ({"threads": 0}, r"threads is 0; expected a whole number from 1"),
        (
            {"chunksize": 5},
            r"unknown options \['chunksize'\]; DeltaOptions has chunk_by",
        ),
    ],
    ids=str,
)
def test_options_out_of_range(root, options, message):
    """Each names the option, the value and the range, before anything is opened."""
    with pytest.raises(orbax_delta.InvalidInputError, match=message):
        orbax_delta.handler_registry(**options)
    assert not root.exists()


def test_two_leaves_with_one_path(saved):
    """Keys that read the same are refused with the path."""
    twice = collections.OrderedDict([(1, np.ones(2)), ("1", np.ones(2))])
    with (
        open_run(saved, manager_options=refusing_options()) as run,
        _Unchanged(saved),
        pytest.raises(
            orbax_delta.InvalidInputError, match="two leaves have the path a/1; rename"
        ),
    ):
        run.manager.save(2, args=ocp.args.StandardSave({"a": twice}))


def deleted_array():
    """An array that was donated or deleted before the save."""
    array = jnp.arange(3.0)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (deleted_array, r"leaf opt/0 has been deleted or donated; save the state that"),
        (
            lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
            r"leaf opt/0 is a .*ShapeDtypeStruct: expected a jax or numpy array",
        ),
        (
            lambda: np.array(["text"]),
            r"leaf opt/0: dtype <U4 cannot be stored; expected",
        ),
        (lambda: open, r"leaf opt/0 is a .*builtin_function_or_method: expected a jax"),
    ],
    ids=["deleted", "struct", "strings", "function"],
)
@pytest.mark.parametrize("args", [ocp.args.StandardSave, ocp.args.PyTreeSave])
def test_leaf_that_cannot_be_saved(saved, args, leaf, message):
    """The leaf is named; the manager saves on."""
    with open_run(saved, manager_options=refusing_options()) as run:
        with (
            _Unchanged(saved),
            pytest.raises(orbax_delta.InvalidInputError, match=message),
        ):
            run.manager.save(2, args=args({"w": np.ones(3), "opt": [leaf()]}))
        run.save(3, state(3))
        for step in (0, 1, 3):
            assert_same_tree(run.restore(step), state(step))


def test_saving_inside_a_transformation(saved):
    """A tracer is told from an array."""
    with open_run(saved, manager_options=refusing_options()) as run, _Unchanged(saved):

        @jax.jit
        def step(x):
            run.manager.save(2, args=ocp.args.StandardSave({"x": x}))
            return x

        with pytest.raises(
            orbax_delta.InvalidInputError, match=r"leaf x is a .*save outside of jit"
        ):
            step(jnp.ones(2))


def test_save_args_that_ask_for_a_cast(saved):
    """A cast on the way to disk would not be bit for bit."""
    save_args = {"w": ocp.SaveArgs(dtype=jnp.bfloat16)}
    args = ocp.args.PyTreeSave({"w": np.ones(3)}, save_args=save_args)
    with (
        open_run(saved, manager_options=refusing_options()) as run,
        _Unchanged(saved),
        pytest.raises(
            orbax_delta.InvalidInputError, match=r"cast to .*; cast the leaf before"
        ),
    ):
        run.manager.save(2, args=args)


def test_custom_metadata_that_is_not_json(saved):
    """It is refused in the calling thread."""
    args = orbax_delta.DeltaSave({"w": 1}, custom_metadata={"x": object()})
    with (
        open_run(saved, manager_options=refusing_options()) as run,
        _Unchanged(saved),
        pytest.raises(
            orbax_delta.InvalidInputError, match="custom_metadata is not JSON"
        ),
    ):
        run.manager.save(2, args=args)


# --- steps and stores ---------------------------------------------------------------


def test_step_that_is_not_there(saved):
    """A wrong number says which folder was looked for."""
    with open_run(saved) as run, _Unchanged(saved):
        run.restore(0)  # until then Orbax does not know that there is one item
        with pytest.raises(FileNotFoundError, match=r"77"):
            run.restore(77)
        handler = orbax_delta.DeltaCheckpointHandler()
        with pytest.raises(orbax_delta.NotFoundError, match=r"step 77.*no MANIFEST"):
            handler.restore(epath.Path(saved / "77" / "default"))
        with pytest.raises(orbax_delta.NotFoundError, match=r"77.* holds no MANIFEST"):
            handler.metadata(epath.Path(saved / "77" / "default"))
        with pytest.raises(orbax_delta.NotFoundError, match=r"77/ is not there"):
            orbax_delta.save_report(saved / "77")


def test_step_copied_without_its_store(saved, tmp_path):
    """The message says which store is missing, where it was and what to do."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(saved / "1", elsewhere / "1")
    uuid = open_store(saved).uuid
    with (
        open_run(elsewhere) as run,
        _Unchanged(elsewhere),
        pytest.raises(
            orbax_delta.NotFoundError,
            match=rf"needs store {uuid}, which is not above it.*moved or copied "
            rf"without its store; .*store was {re.escape(str(saved))}/{STORE}/\. Put",
        ),
    ):
        run.restore(1)
    # As told: with the store beside it the step restores.
    shutil.copytree(saved / STORE, elsewhere / STORE)
    with open_run(elsewhere) as run:
        assert_same_tree(run.restore(1), state(1))


def test_step_copied_into_another_run(saved, tmp_path):
    """A step below a store that is not its own is told from damage; saves go on."""
    other = tmp_path / "other"
    with open_run(other) as run:
        run.save(5, state(5))
    shutil.copytree(saved / "1", other / "1")
    with open_run(other) as run:
        with (
            _Unchanged(other),
            pytest.raises(
                orbax_delta.NotFoundError, match=rf"other/{STORE}/ is store [0-9a-f]+"
            ),
        ):
            run.restore(1)
        run.save(6, state(6))
        assert_same_tree(run.restore(6), state(6))


def test_whole_run_moved(saved, tmp_path):
    """A root moved with its store needs nothing else."""
    moved = tmp_path / "deep" / "moved"
    moved.parent.mkdir()
    saved.rename(moved)
    with open_run(moved, full_every=50) as run:
        assert_same_tree(run.restore(1), state(1))
        run.save(2, state(2))
        assert_same_tree(run.restore(0), state(0))
        assert_same_tree(run.restore(2), state(2))


FOREIGN = {
    "packs/notes.txt": r"notes\.txt is not named like a pack.*Move it away",
    "pins/notes.txt": r"pins/notes\.txt is damaged.*remove it",
    "condemned/notes.txt": r"condemned/notes\.txt is damaged.*remove it",
}


@pytest.mark.parametrize("where", FOREIGN)
def test_foreign_file_in_the_store_stops_prune(saved, where):
    """What nobody can account for is left alone, and nothing is deleted."""
    (saved / STORE / where).parent.mkdir(exist_ok=True)
    (saved / STORE / where).write_text("mine")
    shutil.rmtree(saved / "0")
    with (
        _Unchanged(saved),
        pytest.raises(orbax_delta.FormatError, match=FOREIGN[where]),
    ):
        prune.plan(open_store(saved))
    with open_run(saved) as run:
        assert_same_tree(run.restore(1), state(1))


def test_foreign_files_elsewhere_are_ignored(saved):
    """Files beside steps, in steps and in the store's own folder hurt nobody."""
    for where in ("README", "1/notes", "1/default/notes", f"{STORE}/notes"):
        (saved / where).write_text("mine")
    (saved / "7").write_text("a file named like a step")
    with open_run(saved) as run:
        run.save(2, state(2))
        for step in range(3):
            assert_same_tree(run.restore(step), state(step))
        run.manager.delete(0)
        run.save(3, state(3))
    assert (saved / STORE / "notes").read_text() == "mine"
    assert strategies.packs_on_disk(saved) == strategies.packs_named(saved)


# --- newer and damaged files --------------------------------------------------------


def newer_store(root):
    """STORE.json of a format to come."""
    path = root / STORE / "STORE.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "format_version": 2}))


def newer_manifest(root):
    """A MANIFEST of a format to come."""
    path = root / "0" / "default" / "MANIFEST"
    path.write_bytes(path.read_bytes().replace(b"MANIFEST 1 ", b"MANIFEST 2 ", 1))


def newer_mark(root, folder):
    """A pin or mark of a format to come."""
    path = root / STORE / folder / ("0" * 32 + "-p0")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"format_version": 2, "anything": "else"}))


def newer_feature(root):
    """A MANIFEST that requires what this version does not know."""
    path = root / "0" / "default" / "MANIFEST"
    manifest = strategies.read_manifest(path)
    newer = dataclasses.replace(manifest, required_features=["holograms"])
    path.write_bytes(encode_manifest(newer))


NEWER = {
    "store": newer_store,
    "manifest": newer_manifest,
    "feature": newer_feature,
    "pin": lambda root: newer_mark(root, "pins"),
    "mark": lambda root: newer_mark(root, "condemned"),
}


@pytest.mark.parametrize("what", NEWER)
def test_newer_format_stops_prune(saved, what):
    """A version to come may name packs that this one would delete."""
    NEWER[what](saved)
    shutil.rmtree(saved / "1")
    with (
        _Unchanged(saved),
        pytest.raises(
            orbax_delta.UnsupportedVersionError, match=r"Upgrade orbax_delta"
        ),
    ):
        prune.plan(open_store(saved))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("store", r"STORE\.json has format version 2; this package reads 1\. Upgrade"),
        ("manifest", r"MANIFEST has format version 2; this package reads 1\. Upgrade"),
        ("feature", r"needs the features \['holograms'\], which this package does not"),
    ],
)
def test_newer_format_is_not_read(saved, what, message):
    """Restoring says which file is newer."""
    NEWER[what](saved)
    with open_run(saved) as run, _Unchanged(saved):
        with pytest.raises(orbax_delta.UnsupportedVersionError, match=message):
            run.restore(0)
        if what != "store":
            assert_same_tree(run.restore(1), state(1))


def test_newer_store_is_not_written(saved):
    """A save into a newer store fails and touches nothing of it."""
    newer_store(saved)
    with _Unchanged(saved), open_run(saved) as run:
        run.manager.save(2, args=ocp.args.StandardSave(state(2)))
        with pytest.raises(
            orbax_delta.UnsupportedVersionError,
            match=r"STORE\.json has format version 2",
        ):
            run.manager.wait_until_finished()


@pytest.mark.parametrize("what", ["manifest", "feature", "pin"])
def test_save_beside_newer_files_keeps_everything(saved, what, caplog):
    """The save itself works; its automatic prune stops with a warning."""
    NEWER[what](saved)
    before = strategies.packs_on_disk(saved)
    with open_run(saved) as run:
        run.save(2, state(2))
        run.manager.delete(1)
        run.save(3, state(3))
        assert_same_tree(run.restore(3), state(3))
    assert before <= strategies.packs_on_disk(saved)
    warnings = [r.getMessage() for r in caplog.records if r.name == "orbax_delta"]
    assert any("Upgrade orbax_delta" in message for message in warnings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"STORE\.json is not JSON .*restore it from a copy"),
        ("[]", r"STORE\.json is not the file of a delta store"),
        ('{"magic": "orbax-delta-store", "format_version": 1}', r"its digest is"),
    ],
)
def test_damaged_store_file(saved, text, message):
    """A store file that is none is neither read nor replaced."""
    damage = orbax_delta.FormatError, orbax_delta.CorruptionError
    (saved / STORE / "STORE.json").write_text(text)
    with _Unchanged(saved):
        with pytest.raises(damage, match=message):
            open_store(saved)
        with open_run(saved) as run:
            with pytest.raises(damage, match=message):
                run.restore(1)
            run.manager.save(2, args=ocp.args.StandardSave(state(2)))
            with pytest.raises(damage, match=message):
                run.manager.wait_until_finished()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda data: b"", orbax_delta.FormatError, r"does not begin with a"),
        (lambda data: b"not a manifest", orbax_delta.FormatError, r"does not begin"),
        (
            lambda data: data[:-5],
            orbax_delta.CorruptionError,
            r"the digest of .*MANIFEST does not match",
        ),
        (
            lambda data: data[:-1] + bytes([data[-1] ^ 1]),
            orbax_delta.CorruptionError,
            r"the digest of .*MANIFEST does not match",
        ),
    ],
    ids=["empty", "foreign", "cut", "changed"],
)
def test_damaged_manifest(saved, damage, error, message):
    """It is an error to read it and stops prune; other steps restore."""
    path = saved / "0" / "default" / "MANIFEST"
    path.write_bytes(damage(path.read_bytes()))
    with open_run(saved) as run, _Unchanged(saved):
        with pytest.raises(error, match=message):
            run.restore(0)
        with pytest.raises(error, match=message):
            prune.plan(open_store(saved))
        assert_same_tree(run.restore(1), state(1))


def test_errors_are_also_builtin_ones():
    """Callers who know nothing of this package catch what they would expect."""
    assert issubclass(orbax_delta.InvalidInputError, ValueError)
    assert issubclass(orbax_delta.NotFoundError, FileNotFoundError)
    assert issubclass(orbax_delta.StorageError, OSError)
    kinds = [
        getattr(orbax_delta, name)
        for name in dir(orbax_delta)
        if name.endswith("Error")
    ]
    assert len({kind.kind for kind in kinds}) == len(kinds)
    assert all(issubclass(kind, orbax_delta.DeltaError) for kind in kinds)
