"""Delta items beside JSON and the place in the data, in one manager."""

import ast

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from strategies import assert_same_tree, packs_named, packs_on_disk, read_step

import orbax_delta
from orbax_delta import check

ITEMS = ("state", "average")
SAVES = 7
KEPT = (5, 6)


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def state(step):
    """A dense and a sparse change, a value."""
    rng = np.random.default_rng(4)
    weights = rng.standard_normal(1500).astype(np.float32)
    weights[: step * 10] += 1
    return {"w": jnp.asarray(weights), "moments": (weights * step, [step])}


def average(step):
    """Another item, of the same paths but other content."""
    return {"w": jnp.asarray(state(step)["w"]) / 2}


class Shuffled:
    """Batches of numbers in random order, for ever: a loader without Grain."""

    def __init__(self):
        self.rng = np.random.default_rng(8)

    def __iter__(self):
        return self

    def __next__(self):
        return self.rng.permutation(100)[:8]

    def get_state(self):
        return self.rng.bit_generator.state

    def set_state(self, found):
        self.rng.bit_generator.state = found


class Json:
    """The place in `Shuffled` as an item of Orbax's JSON handler."""

    make = Shuffled

    @staticmethod
    def saved(data):
        return ocp.args.JsonSave(data.get_state())

    @staticmethod
    def restored(manager, step):
        args = ocp.args.Composite(data=ocp.args.JsonRestore())
        data = Shuffled()
        data.set_state(manager.restore(step, args=args).data)
        return data


class Grain:
    """Grain's own handler, for a pipeline with shuffling and several epochs."""

    @staticmethod
    def make():
        grain = pytest.importorskip("grain", reason="no Grain wheel for this platform")
        numbers = grain.MapDataset.source(np.arange(50)).seed(8).shuffle()
        return iter(numbers.repeat(6).batch(8).to_iter_dataset())

    @staticmethod
    def saved(data):
        from grain.checkpoint import CheckpointSave

        return CheckpointSave(data)

    @classmethod
    def restored(cls, manager, step):
        from grain.checkpoint import CheckpointRestore

        data = cls.make()
        args = ocp.args.Composite(data=CheckpointRestore(data))
        assert manager.restore(step, args=args).data is data
        return data


def open_manager(root):
    """Two items by deltas; the others by whatever handlers Orbax has for them."""
    return ocp.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(max_to_keep=len(KEPT)),
        handler_registry=orbax_delta.handler_registry(
            item=ITEMS, chunk_bytes=2048, pack_bytes=4096, full_every=2, keep_bases=1
        ),
    )


@pytest.fixture(params=[Json, Grain], ids=["json", "grain"])
def saved(request, root):
    """A root with all four items, the kind of its data, and the batches that follow."""
    kind, following = request.param, {}
    data = kind.make()
    with open_manager(root) as manager:
        for step in range(SAVES):
            next(data)
            # Asynchronous: the loader goes on while the save is written.
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state(step)),
                    average=orbax_delta.DeltaSave(average(step)),
                    config=ocp.args.JsonSave({"step": step, "name": "run ü"}),
                    data=kind.saved(data),
                ),
            )
            twin = kind.make()
            twin.set_state(data.get_state())
            following[step] = [next(twin) for _ in range(20)]
    return root, kind, following


def test_each_item_alone_and_together(saved):
    """From a new manager: what was not asked for is not restored, and not read."""
    root, kind, following = saved
    with open_manager(root) as manager:
        assert manager.all_steps() == list(KEPT)
        for step in KEPT:
            both = manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(state(0)),
                    average=orbax_delta.DeltaRestore(average(0)),
                    config=ocp.args.JsonRestore(),
                ),
            )
            assert set(both) == {*ITEMS, "config"}
            assert_same_tree(both.state, state(step))
            assert_same_tree(both.average, average(step))
            assert both.config == {"step": step, "name": "run ü"}
            alone = manager.restore(
                step, args=ocp.args.Composite(average=ocp.args.PyTreeRestore())
            )
            assert set(alone) == {"average"}
            assert_same_tree(alone.average, average(step))
            batches = kind.restored(manager, step)
            for wanted in following[step]:
                assert np.array_equal(next(batches), wanted)


def test_everything_without_arguments(saved):
    """As with Orbax's own handlers: Grain's must be told where to restore to."""
    root, kind, _ = saved
    with open_manager(root) as manager:
        if kind is Grain:
            with pytest.raises(ValueError, match=r"\"data\".*not default constructib"):
                manager.restore(6)
            return
        everything = manager.restore(6)
        assert set(everything) == {*ITEMS, "config", "data"}
        assert_same_tree(everything.state, state(6))
        assert_same_tree(everything.average, average(6))
        assert everything.config["step"] == 6
        fresh = Shuffled()
        for _ in range(7):
            next(fresh)
        assert everything.data == fresh.get_state()


def test_metadata_of_items(saved):
    """Shapes and dtypes of the delta items; JSON and Grain give none."""
    root, _, _ = saved
    with open_manager(root) as manager:
        found = manager.item_metadata(6)
        assert set(found) == {*ITEMS, "config", "data"}
        assert found["config"] is None
        assert found["data"] is None
        weights = found["state"].tree["w"]
        assert (weights.shape, weights.dtype) == ((1500,), np.float32)
        assert found["average"].tree.keys() == {"w"}


def test_retention_prunes_the_packs_of_every_item(saved):
    """Deleted steps take their packs along; two items share one store."""
    root, _, _ = saved
    store = root / strategies.STORE
    assert packs_on_disk(root) == packs_named(root)
    assert not list((store / "pins").glob("*"))
    for item in ITEMS:
        manifest = read_step(root, 6, item).manifest
        assert manifest.predecessor["step"] == "5"
        assert manifest.save_index == 6
        assert manifest.report["chunks_by_form"].keys() > {"reference"}
    assert not set(read_step(root, 6, "state").manifest.packs) & set(
        read_step(root, 6, "average").manifest.packs
    )
    with open_manager(root) as manager:
        manager.delete(5)
        manager.save(
            7,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state(7)),
                average=orbax_delta.DeltaSave(average(7)),
            ),
        )
    assert packs_on_disk(root) == packs_named(root)
    report = check.verify(str(root))
    assert report.ok
    strategies.check_clean(root, [])


def test_each_item_goes_on_with_deltas_after_a_restart(saved):
    """Also when only one of them was restored: the other writes in full, once."""
    root, _, _ = saved
    with open_manager(root) as manager:
        manager.restore(6, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
        manager.save(
            7,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state(6)),
                average=ocp.args.StandardSave(average(6)),
            ),
        )
    forms = {item: read_step(root, 7, item).manifest.report for item in ITEMS}
    assert set(forms["state"]["chunks_by_form"]) == {"reference"}
    for item, tree in (("state", state(6)), ("average", average(6))):
        with open_manager(root) as manager:
            args = ocp.args.Composite(**{item: ocp.args.StandardRestore()})
            assert_same_tree(manager.restore(7, args=args)[item], tree)


def test_the_newest_good_state_and_its_data(root):
    """The place in the data as a text of the tree: a kept base holds it too."""
    data = Shuffled()
    registry = orbax_delta.handler_registry(full_every=2, keep_bases=1)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in range(4):
            next(data)
            tree = {"state": state(step), "data": repr(data.get_state())}
            manager.save(step, args=ocp.args.StandardSave(tree))
    for step in range(4):
        (root / str(step) / "default" / "MANIFEST").write_bytes(b"")
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        step, tree = orbax_delta.restore_latest_good(manager)
    assert_same_tree(tree["state"], state(step))
    again = Shuffled()
    for _ in range(step + 1):
        next(again)
    assert ast.literal_eval(tree["data"]) == again.get_state()
