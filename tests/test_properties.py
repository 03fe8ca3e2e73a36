"""Properties over any state, any edits, any options and any order of deletion."""

import pathlib
import shutil
import tempfile

import hypothesis
import hypothesis.strategies as st
import jax.tree_util as jtu
import pytest
import strategies
from hypothesis import given
from strategies import assert_same_leaf, assert_same_tree, open_run, read_step

import orbax_delta


@pytest.fixture(autouse=True, scope="module")
def _unsynced():
    with pytest.MonkeyPatch.context() as monkeypatch:
        strategies.skip_disk_sync(monkeypatch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where examples make their roots."""
    return tmp_path_factory.mktemp("properties")


def assert_lists_within(root, step, options):
    """No list is longer than max_chain or dearer than read_budget full records."""
    for row in read_step(root, step).rows:
        assert len(row.refs) <= options["max_chain"]
        if row.refs[0].pack:
            allowed = options["read_budget"] * row.refs[0].length
            assert row.stored_bytes <= allowed


# What happens between two saves: edits, whether a new process takes over (and restores
# first), and which of the kept steps are deleted, by the manager or behind its back.
ROUNDS = st.lists(
    st.fixed_dictionaries(
        {
            "edits": strategies.edits(),
            "reopen": st.sampled_from(["no", "no", "yes", "and restore"]),
            "delete": st.lists(st.integers(0, 10), max_size=2),
            "by hand": st.booleans(),
        }
    ),
    min_size=1,
    max_size=6,
)


class _History:
    """Saves, deletions and restarts of one example, beside what must be on disk."""

    def __init__(self, root, options):
        self.root = root
        self.options = options
        self.kept = {}
        self._open()

    def _open(self):
        self._context = open_run(self.root, **self.options)
        self.run = self._context.__enter__()

    def close(self):
        self._context.__exit__(None, None, None)

    def reopen(self, *, restore):
        self.close()
        self._open()
        if restore and self.kept:
            newest = max(self.kept)
            assert_same_tree(self.run.restore(newest), self.kept[newest])

    def delete(self, step, *, by_hand):
        del self.kept[step]
        if by_hand:
            shutil.rmtree(self.root / str(step))
            self.run.manager.reload()
        else:
            self.run.manager.delete(step)

    def save(self, step, tree):
        # Through our own arguments: Orbax has no empty states.
        assert self.run.manager.save(step, args=orbax_delta.DeltaSave(tree), force=True)
        self.run.manager.wait_until_finished()
        self.kept[step] = tree

    def check(self):
        for step, tree in self.kept.items():
            args = orbax_delta.DeltaRestore()
            assert_same_tree(self.run.manager.restore(step, args=args), tree)
            args = orbax_delta.DeltaRestore(tree)
            assert_same_tree(self.run.manager.restore(step, args=args), tree)
            assert_lists_within(self.root, step, self.options)


@given(tree=strategies.trees(), options=strategies.option_values(), rounds=ROUNDS)
def test_every_kept_step_restores_bit_for_bit(folder, tree, options, rounds):
    """Any pytree, any edits, any options, any order of deletion."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        history = _History(pathlib.Path(name) / "run", options)
        for step, events in enumerate(rounds):
            tree = strategies.edited(tree, events["edits"])
            history.save(step, tree)
            if events["reopen"] != "no":
                history.reopen(restore=events["reopen"] == "and restore")
            for pick in events["delete"]:
                if history.kept:
                    doomed = sorted(history.kept)[pick % len(history.kept)]
                    history.delete(doomed, by_hand=events["by hand"])
        # A run that saves nothing sweeps nothing; this one does.
        history.save(len(rounds), tree)
        history.check()
        history.close()
        assert strategies.packs_on_disk(history.root) == strategies.packs_named(
            history.root
        )


@given(tree=strategies.trees(), picks=st.sets(st.integers(0, 20)))
def test_any_subset_restores(folder, tree, picks):
    """Any choice of leaves, by placeholder, gives exactly these leaves."""
    leaves, structure = jtu.tree_flatten(tree)
    chosen = [leaf if i in picks else ... for i, leaf in enumerate(leaves)]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = pathlib.Path(name) / "run"
        with open_run(root, chunk_bytes=64, pack_bytes=1024) as run:
            run.manager.save(0, args=orbax_delta.DeltaSave(tree))
            run.manager.wait_until_finished()
            target = jtu.tree_unflatten(structure, chosen)
            got = run.manager.restore(0, args=orbax_delta.DeltaRestore(target))
    for left, right in zip(jtu.tree_leaves(got), chosen, strict=True):
        assert left is ... if right is ... else True
        if right is not ...:
            assert_same_leaf(left, right)


@given(
    tree=strategies.trees(),
    options=strategies.option_values(),
    rounds=st.lists(strategies.edits(), min_size=1, max_size=4),
)
@hypothesis.settings(max_examples=15)
def test_self_contained_saves_of_one_handler_are_independent(
    folder, tree, options, rounds
):
    """Saves without a manager need nothing of each other, whatever came before."""
    handler = orbax_delta.DeltaCheckpointHandler(orbax_delta.DeltaOptions(**options))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for number, changes in enumerate(rounds):
            tree = strategies.edited(tree, changes)
            path = pathlib.Path(name) / f"save{number}"
            with strategies.ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(path, args=orbax_delta.DeltaSave(tree))
            if number:
                shutil.rmtree(path.with_name(f"save{number - 1}"))
            with strategies.ocp.Checkpointer(
                orbax_delta.DeltaCheckpointHandler()
            ) as checkpointer:
                assert_same_tree(checkpointer.restore(path), tree)
