"""Odd things that people do: each works, or is refused in words."""

import logging
import shutil

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from strategies import STORE, assert_same_tree, open_run, packs_named, packs_on_disk

import orbax_delta
from orbax_delta import check, cli, packs, store


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def state(step):
    """A state that is never the same."""
    return {"w": np.random.default_rng(step).standard_normal(3000), "step": step}


def test_no_garbage_after_close(root):
    """Packs that the last pin held back go when the handler is closed."""
    with open_run(root) as run:
        run.save(0, state(0))
        run.save(1, state(1))
        run.manager.delete(1)
        for step in range(2, 8):
            run.save(step, state(step))
    assert packs_on_disk(root) == packs_named(root)


def test_room_is_made_after_a_failed_save(root, monkeypatch):
    """Deleting steps after a save that failed frees their packs before the next one."""
    with open_run(root) as run:
        for step in range(3):
            run.save(step, state(step))

        def full(self, key, data):
            raise orbax_delta.StorageError("no space left")

        with monkeypatch.context() as patched:
            patched.setattr(store.Folder, "start_write", full)
            with pytest.raises(orbax_delta.StorageError, match="no space left"):
                run.save(3, state(3))
        run.manager.reload()
        run.manager.delete(0)
        kept = packs_named(root)
        found = []
        write = store.Folder.start_write

        def look(self, key, data):
            if self.url.endswith("packs/"):
                found.append(packs_on_disk(root))
            return write(self, key, data)

        monkeypatch.setattr(store.Folder, "start_write", look)
        run.save(4, state(4))
        assert found[0] <= kept
        assert_same_tree(run.restore(4), state(4))


def test_a_step_copied_over_another_is_named(root, caplog):
    """The values are those of the copied step; the log says so."""
    with open_run(root) as run:
        for step in range(3):
            run.save(step, state(step))
    shutil.rmtree(root / "2" / "default")
    shutil.copytree(root / "1" / "default", root / "2" / "default")
    with open_run(root) as run, caplog.at_level(logging.WARNING, "orbax_delta"):
        assert_same_tree(run.restore(2), state(1))
    assert "step 2, item 'default'" in caplog.text
    assert "was saved as step 1" in caplog.text


def test_a_root_with_two_dots(root):
    """TensorStore takes no `..`; the path is resolved."""
    (root / "a").mkdir(parents=True)
    with open_run(root / "a" / ".." / "b") as run:
        run.save(0, state(0))
        assert_same_tree(run.restore(0), state(0))
    assert (root / "b" / STORE).is_dir()


def test_a_root_with_a_backslash(root):
    """TensorStore would write elsewhere; refused before anything is lost."""
    with open_run(root / "a\\b") as run:
        with pytest.raises(orbax_delta.InvalidInputError, match="has a backslash"):
            run.save(0, state(0))
        run.manager.reload()


def test_stray_files_of_the_file_system(root):
    """Dot files in the store's folders are nobody's; saves and prunes go on."""
    with open_run(root) as run:
        run.save(0, state(0))
        for folder in ("packs", "pins", "condemned"):
            (root / STORE / folder).mkdir(exist_ok=True)
            (root / STORE / folder / ".nfs0001").write_bytes(b"busy")
        run.save(1, state(1))
        run.manager.delete(0)
        run.save(2, state(2))
        assert_same_tree(run.restore(2), state(2))
    names = {name for name in packs_on_disk(root) if name != ".nfs0001"}
    assert names == packs_named(root)


def test_keys_of_an_unknown_implementation(root):
    """They could not be made again; refused when saving."""
    mine = jex.random.define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
        random_bits=lambda key, bits, shape: jnp.zeros(shape, jnp.uint32),
        fold_in=lambda key, data: key,
        name="mine",
        tag="mn",
    )
    options = strategies.refusing_options()
    with (
        open_run(root, manager_options=options) as run,
        pytest.raises(orbax_delta.InvalidInputError, match=r"leaf k .* by no name"),
    ):
        run.save(0, {"k": jax.random.key(0, impl=mine)})


def test_keys_under_a_transfer_guard(root):
    """Restoring moves keys to the device explicitly."""
    tree = {"k": jax.random.key(3)}
    with open_run(root) as run:
        run.save(0, tree)
        with jax.transfer_guard("disallow"):
            got = run.restore(0, tree)
        assert_same_tree(got, tree)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(np.zeros(3, "M8[s]"), jnp.bfloat16), (np.zeros(3, "m8[s]"), jnp.float8_e5m2)],
    ids=["date", "span"],
)
def test_casts_that_do_not_exist(root, stored, wanted):
    """The leaf and both types are named."""
    with open_run(root) as run:
        run.save(0, {"t": stored})
        target = {"t": np.zeros(3, wanted)}
        with pytest.raises(orbax_delta.StructureError, match=r"leaf t .*no cast to"):
            run.restore(0, target)


def test_save_and_restore_arguments_mixed_up(root):
    """Told by name what was expected."""
    handler = orbax_delta.DeltaCheckpointHandler()
    with pytest.raises(orbax_delta.InvalidInputError, match="save was given DeltaRest"):
        handler.save(root / "0", orbax_delta.DeltaRestore())
    with open_run(root) as run:
        run.save(0, state(0))
        with pytest.raises(
            orbax_delta.InvalidInputError, match="restore was given Del"
        ):
            run.handler.restore(root / "0" / "default", orbax_delta.DeltaSave(1))


@pytest.mark.parametrize(
    "options", [{"auto_prune": "no"}, {"read_budget": True}], ids=str
)
def test_options_of_another_type(options):
    """A string is not False, True is not 1."""
    with pytest.raises(orbax_delta.InvalidInputError, match=next(iter(options))):
        orbax_delta.handler_registry(**options)
    with pytest.raises(orbax_delta.InvalidInputError, match="expected DeltaOptions"):
        orbax_delta.DeltaCheckpointHandler(options)


def test_restore_latest_good_of_a_named_item(root):
    """For managers of several items, or of one with another name."""
    registry = orbax_delta.handler_registry(item="params")
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in range(2):
            args = ocp.args.StandardSave(state(step))
            manager.save(step, args=ocp.args.Composite(params=args))
        manager.wait_until_finished()
        step, tree = orbax_delta.restore_latest_good(manager, item="params")
        assert step == 1
        assert_same_tree(tree, state(1))
    with (
        open_run(root) as run,
        pytest.raises(orbax_delta.CorruptionError, match="pass item="),
    ):
        orbax_delta.restore_latest_good(run.manager)


def test_keys_that_no_terminal_shows(root, capsys):
    """A lone surrogate in a key does not stop `show`."""
    with open_run(root) as run:
        run.save(0, {"a\udcff": 1})
    assert check.verify(str(root)).ok
    assert cli.main(["show", str(root), "0"]) == 0
    assert "a" in capsys.readouterr().out


def test_a_pin_that_stays_does_not_fail_a_committed_save(root, monkeypatch):
    """The store fails after the MANIFEST: the step counts, the next save is a delta."""
    delete = store.Folder.delete

    def failing(self, key):
        if self.url.endswith("pins/"):
            raise orbax_delta.StorageError("not now")
        delete(self, key)

    with open_run(root) as run:
        run.save(0, state(0))
        with monkeypatch.context() as patched:
            patched.setattr(store.Folder, "delete", failing)
            run.save(1, state(1))
        assert_same_tree(run.restore(1), state(1))
        run.save(2, state(1) | {"step": 2})
        assert run.handler.last_save_report.chunks_by_form == {"reference": 1}


def test_every_write_of_a_failed_save_is_waited_for():
    """A pack still in flight when another one fails may not land later."""
    waited = []

    class Write:
        def __init__(self, number):
            self.number = number

        def result(self):
            waited.append(self.number)
            raise orbax_delta.StorageError(f"pack {self.number}")

    writer = packs.PackWriter(None, attempt=bytes(16), process=0, pack_bytes=1024)
    writer._in_flight.extend([Write(0), Write(1)])
    with pytest.raises(orbax_delta.StorageError, match="pack"):
        writer.drain()
    assert waited == [0, 1]
