"""A run as a state machine, beside a plain dictionary of what each step must hold."""

import contextlib
import pathlib
import random
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from etils import epath
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from strategies import assert_same_tree, open_run

import orbax_delta
from orbax_delta import keys, listing, prune, repair, usage
from orbax_delta.store import DeltaStore, Folder

PICK = st.integers(0, 1000)
KEYS = st.sampled_from(["", "a", "b"])
"""Names of keys to encrypt with; the first one: not at all."""


def secret_of(name):
    """The key of a name."""
    return name.encode().ljust(32)


def encryption(name):
    """The option for a key."""
    return keys.Encryption(key=secret_of, key_id=name) if name else None


def restore_alone(path):
    """Restore an item's directory with a handler that knows nothing of a manager."""
    return orbax_delta.DeltaCheckpointHandler().restore(epath.Path(path))


def prune_now(root):
    """What `orbax-delta prune` does."""
    store = DeltaStore.open(Folder(str(root)))
    return prune.execute(store, prune.plan(store)) if store else ()


def first_state(seed):
    """A small state with a frozen leaf, a master and its cast, and Python values."""
    rng = np.random.default_rng(seed)
    master = rng.standard_normal(900).astype(np.float32)
    return {
        "master": jnp.asarray(master),
        "half": jnp.asarray(master, jnp.bfloat16),
        "frozen": rng.integers(0, 9, 300),
        "moments": {"mu": jnp.zeros((30, 30)), "nu": jnp.zeros((30, 30))},
        "step": 0,
    }


class Machine(RuleBasedStateMachine):
    """Saves, restores, deletions, prunes, restarts and failures in any order."""

    def __init__(self):
        super().__init__()
        self.monkeypatch = pytest.MonkeyPatch()
        strategies.skip_disk_sync(self.monkeypatch)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="orbax-delta-machine-"))
        self.root = self.folder / "run"
        self.model = {}  # step -> tree, in the root
        self.trash = {}  # step -> tree, below root/trash
        self.gone = set()  # steps that were deleted
        self.run = None

    @property
    def trash_folder(self):
        """Where steps are moved to."""
        return self.root / "trash"

    @initialize(seed=strategies.SEEDS, options=strategies.option_values(), key=KEYS)
    def begin(self, seed, options, key):
        """Open a manager on an empty folder."""
        self.tree = first_state(seed)
        self.options = {**options, "encryption": encryption(key)}
        self._open()

    def _open(self):
        self.context = open_run(self.root, **self.options)
        self.run = self.context.__enter__()

    def _pick(self, steps, pick):
        return sorted(steps)[pick % len(steps)]

    def _start(self, step):
        self.run.manager.save(step, args=ocp.args.StandardSave(self.tree), force=True)

    def _save(self, step):
        self._start(step)
        self.run.manager.wait_until_finished()
        self.model[step] = self.tree

    def _next_step(self):
        return 1 + max({0, *self.model, *self.trash, *self.gone})

    @rule(changes=strategies.edits(), gap=st.integers(0, 3))
    def save(self, changes, gap):
        """Save a state with a few edits."""
        self.tree = strategies.edited(self.tree, changes) or {"never empty": 1}
        self._save(self._next_step() + gap)

    @rule()
    def save_unchanged(self):
        """Save the same state again as another step."""
        self._save(self._next_step())

    @precondition(lambda self: self.model)
    @rule(pick=PICK, changes=strategies.edits())
    def go_back(self, pick, changes):
        """Restore an older step and go on from there."""
        step = self._pick(self.model, pick)
        self.tree = self.run.restore(step, self.model[step])
        assert_same_tree(self.tree, self.model[step])
        self.tree = strategies.edited(self.tree, changes) or {"never empty": 1}
        self._save(self._next_step())

    @precondition(lambda self: self.model)
    @rule(pick=PICK)
    def restore(self, pick):
        """Restore any step."""
        step = self._pick(self.model, pick)
        assert_same_tree(self.run.restore(step), self.model[step])

    @precondition(lambda self: self.model)
    @rule(pick=PICK, by_hand=st.booleans())
    def delete(self, pick, by_hand):
        """Delete any step, by the manager or behind its back."""
        step = self._pick(self.model, pick)
        if by_hand:
            shutil.rmtree(self.root / str(step))
            self.run.manager.reload()
        else:
            self.run.manager.delete(step)
        del self.model[step]
        self.gone.add(step)

    @precondition(lambda self: self.model or self.trash or self.gone)
    @rule()
    def measure(self):
        """What `du` says adds up to what the files take."""
        used = usage.measure(listing.read_root(str(self.root)))
        assert used.total_bytes == strategies.disk_bytes(self.root)
        assert used.rest_bytes >= 0
        assert not used.problems

    @precondition(lambda self: self.gone)
    @rule(pick=PICK)
    def save_a_deleted_step_again(self, pick):
        """Save under the number of a step that is gone."""
        step = self._pick(self.gone, pick)
        self.gone.discard(step)
        self._save(step)

    @precondition(lambda self: self.model)
    @rule(pick=PICK)
    def move_to_trash(self, pick):
        """Move a step the way `todelete_subdir` does."""
        step = self._pick(self.model, pick)
        (self.root / "trash").mkdir(exist_ok=True)
        (self.root / str(step)).rename(self.root / "trash" / str(step))
        self.trash[step] = self.model.pop(step)
        self.run.manager.reload()

    @precondition(lambda self: self.trash)
    @rule(pick=PICK, back=st.booleans())
    def empty_trash(self, pick, back):
        """Take a step back out of the trash, or delete it for good."""
        step = self._pick(self.trash, pick)
        tree = self.trash.pop(step)
        path = self.root / "trash" / str(step)
        assert_same_tree(restore_alone(path / "default"), tree)
        if back:
            path.rename(self.root / str(step))
            self.model[step] = tree
        else:
            shutil.rmtree(path)
            self.gone.add(step)
        self.run.manager.reload()

    @rule()
    def prune(self):
        """Prune from the command line while the run goes on."""
        prune_now(self.root)

    @precondition(lambda self: self.model)
    @rule(pick=PICK, record=PICK, bit=st.integers(0, 1 << 20))
    def rot_and_repair(self, pick, record, bit):
        """A bit flips in a record; what no repair mends is an error, and is deleted."""
        rows = strategies.read_step(self.root, self._pick(self.model, pick)).rows
        # Not by the names of packs, which are others each time.
        refs = [ref for row in rows for ref in row.refs if ref.pack]
        if not refs:
            return
        ref = refs[record % len(refs)]
        path = self.root / strategies.STORE / "packs" / ref.pack
        data = bytearray(path.read_bytes())
        bit = 8 * ref.offset + bit % (8 * ref.length)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        repair.repair(str(self.root))
        for folder, steps in ((self.root, self.model), (self.trash_folder, self.trash)):
            for step, tree in list(steps.items()):
                item = folder / str(step) / "default"
                try:
                    assert_same_tree(restore_alone(item), tree)
                except orbax_delta.CorruptionError:
                    shutil.rmtree(item.parent)
                    del steps[step]
                    self.gone.add(step)
        self.run.manager.reload()

    @rule(pick=PICK, restore=st.booleans(), key=KEYS)
    def reopen(self, pick, restore, key):
        """End the run and start another, which may restore before it saves.

        It may encrypt with another key, or no longer.
        """
        self.context.__exit__(None, None, None)
        self.options["encryption"] = encryption(key)
        self._open()
        if restore and self.model:
            step = self._pick(self.model, pick)
            assert_same_tree(self.run.restore(step), self.model[step])

    @rule(write=st.integers(0, 7), changes=strategies.edits())
    def failing_save(self, write, changes):
        """One write of a save fails; the step does not count, the next one is right."""
        self.tree = strategies.edited(self.tree, changes) or {"never empty": 1}
        step = self._next_step()
        with _failing_write(write):
            self._start(step)
            try:
                self.run.manager.wait_until_finished()
            except orbax_delta.StorageError:
                self.run.manager.reload()
                assert step not in self.run.manager.all_steps()
            else:
                self.model[step] = self.tree

    @invariant()
    def newest_is_right(self):
        """The newest step restores at any time."""
        if self.model:
            step = max(self.model)
            path = self.root / str(step) / "default"
            assert_same_tree(restore_alone(path), self.model[step])

    def teardown(self):
        """All steps restore, and nothing that no step names is left."""
        try:
            if self.run is not None:
                self._save(self._next_step())
                for step, tree in self.model.items():
                    assert_same_tree(self.run.restore(step), tree)
                    for row in strategies.read_step(self.root, step).rows:
                        assert len(row.refs) <= self.options["max_chain"]
                for step, tree in self.trash.items():
                    path = self.root / "trash" / str(step) / "default"
                    assert_same_tree(restore_alone(path), tree)
                self.context.__exit__(None, None, None)
                on_disk = strategies.packs_on_disk(self.root)
                assert on_disk == strategies.packs_named(self.root)
        finally:
            self.monkeypatch.undo()
            shutil.rmtree(self.folder)


@contextlib.contextmanager
def _failing_write(number):
    """Let the store refuse its `number`-th write."""
    start_write = Folder.start_write
    count = 0

    def refusing(self, key, data):
        nonlocal count
        count += 1
        if count == number + 1:
            raise orbax_delta.StorageError(f"no space left for {key}")
        return start_write(self, key, data)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Folder, "start_write", refusing)
        yield


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=settings().max_examples // 4, deadline=None
)


# --- beside a renamer and a pruner --------------------------------------------------


class _Beside:
    """A renamer and a pruner that work while the main thread saves.

    A step moves at most once during one prune, as under Orbax: a step that moves to
    and fro within two listings can be missed by both.

    Attributes:
        moves: Renames done so far.
        prunes: Prunes begun so far.
    """

    def __init__(self, root, seed):
        self.root, self.trash = root, root / "trash"
        self.trash.mkdir(parents=True)
        self.stop = threading.Event()
        self.random = random.Random(seed)
        self.moves = 0
        self.prunes = 0

    def rename(self):
        """Move finished steps to the trash folder and back."""
        moved_in = {}
        while not self.stop.is_set():
            here = [path for path in self.root.iterdir() if path.name.isdigit()]
            there = list(self.trash.iterdir())
            if not here + there:
                continue
            path = self.random.choice(here + there)
            prune_number = self.prunes
            if moved_in.get(path.name) != prune_number:
                moved_in[path.name] = prune_number
                path.rename((self.root if path in there else self.trash) / path.name)
                self.moves += 1

    def prune(self):
        """Prune again and again."""
        while not self.stop.is_set():
            self.prunes += 1
            prune_now(self.root)


@given(
    seed=strategies.SEEDS,
    changes=st.lists(strategies.edits(), min_size=6, max_size=12),
    options=strategies.option_values(),
)
@settings(max_examples=max(2, settings().max_examples // 10))
def test_saves_beside_a_renamer_and_a_pruner(seed, changes, options):
    """Steps that move while they are marked, and packs swept beside saves, survive."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        tempfile.TemporaryDirectory(prefix="orbax-delta-beside-") as name,
    ):
        strategies.skip_disk_sync(monkeypatch)
        root = pathlib.Path(name) / "run"
        beside = _Beside(root, seed)
        model = {}
        tree = first_state(seed)
        with ThreadPoolExecutor(2) as threads, open_run(root, **options) as run:
            running = [threads.submit(beside.rename), threads.submit(beside.prune)]
            try:
                for step, edits in enumerate(changes):
                    tree = strategies.edited(tree, edits) or {"never empty": 1}
                    run.manager.save(step, args=ocp.args.StandardSave(tree), force=True)
                    model[step] = tree
                run.manager.wait_until_finished()
            finally:
                beside.stop.set()
            for future in running:
                future.result()
        assert beside.moves > 0
        assert beside.prunes > 0
        for step, tree in model.items():
            path, other = root / str(step), root / "trash" / str(step)
            assert path.exists() != other.exists()
            path = path if path.exists() else other
            assert_same_tree(restore_alone(path / "default"), tree)


# --- two writers --------------------------------------------------------------------


def _write_and_delete(root, number, seed):
    """One of two writers: every other step, a few of them kept, some restored."""
    chance = random.Random(seed)
    options = orbax_delta.DeltaOptions(
        chunk_bytes=256,
        pack_bytes=4096,
        full_every=chance.choice([0, 1, 3, 10]),
        refresh_every=chance.choice([1, 3, 30]),
    )
    handler, model = orbax_delta.DeltaCheckpointHandler(options), {}
    tree = first_state(seed)
    for step in range(number, 40, 2):
        tree = strategies.edited(tree, [("few", step), ("block", step + 1)])
        directory = epath.Path(root / str(step) / "default")
        handler.save(directory, orbax_delta.DeltaSave(tree))
        model[step] = tree
        if len(model) > 3:
            doomed = chance.choice(sorted(model))
            del model[doomed]
            shutil.rmtree(root / str(doomed))
        if chance.random() < 0.2:
            step = chance.choice(sorted(model))
            restored = handler.restore(epath.Path(root / str(step) / "default"))
            assert_same_tree(restored, model[step])
        if chance.random() < 0.1:
            handler.close()
            handler = orbax_delta.DeltaCheckpointHandler(options)
    handler.close()
    return model


@given(seed=strategies.SEEDS)
@settings(max_examples=max(2, settings().max_examples // 10))
def test_two_writers_of_one_root(seed):
    """Two handlers save, prune and delete side by side; both keep what they kept."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        tempfile.TemporaryDirectory(prefix="orbax-delta-two-") as name,
        ThreadPoolExecutor(2) as threads,
    ):
        strategies.skip_disk_sync(monkeypatch)
        root = pathlib.Path(name)
        writers = [
            threads.submit(_write_and_delete, root, number, seed + number)
            for number in range(2)
        ]
        for writer in writers:
            for step, tree in writer.result().items():
                path = root / str(step) / "default"
                assert_same_tree(restore_alone(path), tree)
        assert strategies.packs_on_disk(root) == strategies.packs_named(root)
