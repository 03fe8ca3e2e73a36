"""Many runs on one store as a state machine, beside what each of their steps holds."""

import contextlib
import errno
import pathlib
import shutil
import tempfile

import hypothesis.strategies as st
import numpy as np
import pytest
import strategies
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from strategies import assert_same_tree, labelled, packs_named

import orbax_delta
from orbax_delta import check, forgetting, prune, registry, testing
from orbax_delta.errors import InvalidInputError, NotFoundError, StorageError
from orbax_delta.places import TEMPORARY_SUFFIX
from orbax_delta.store import DeltaStore, Folder

PICK = st.integers(0, 1000)
NAMES = st.sampled_from("abc")
ITEMS = st.sampled_from(["model", "opt"])
OPTIONS = strategies.LITTLE_OPTIONS | {"refresh_every": 3}


def first_tree():
    """What every run begins with; little, so that many saves are tried."""
    rng = np.random.default_rng(3)
    return {
        "frozen": rng.standard_normal(1500).astype(np.float32),
        "w": rng.standard_normal(600),
        "zero": np.zeros(50),
    }


class Machine(RuleBasedStateMachine):
    """Runs save, fork, die, lose steps, vanish, return and are forgotten."""

    def __init__(self):
        super().__init__()
        self.monkeypatch = pytest.MonkeyPatch()
        strategies.skip_disk_sync(self.monkeypatch)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="orbax-delta-shared-"))
        self.store = self.folder / "store"
        self.model = {}  # (run, item) -> {step: tree}
        self.trees = {}  # (run, item) -> what it would save next
        self.handlers = {}  # run -> handler
        self.away = set()  # runs that cannot be reached
        self.last_step = 0

    @initialize(one=NAMES, two=NAMES)
    def begin(self, one, two):
        """Two saves, or one twice."""
        for name in (one, two):
            self._save(name, "model", first_tree())

    def _root(self, name):
        return self.folder / name

    def _handler(self, name):
        if name not in self.handlers:
            options = orbax_delta.DeltaOptions(**OPTIONS, store=str(self.store))
            self.handlers[name] = orbax_delta.DeltaCheckpointHandler(options)
        return self.handlers[name]

    def _save(self, name, item, tree):
        """As Orbax does it: under a temporary name first."""
        self.last_step += 1
        temporary = self._root(name) / f"{self.last_step}{TEMPORARY_SUFFIX}"
        folder = temporary / f"{item}{TEMPORARY_SUFFIX}"
        folder.mkdir(parents=True)
        try:
            self._handler(name).save(folder, orbax_delta.DeltaSave(tree))
        except BaseException:
            shutil.rmtree(temporary)
            raise
        folder.rename(temporary / item)
        temporary.rename(self._root(name) / str(self.last_step))
        self.model.setdefault((name, item), {})[self.last_step] = tree
        self.trees[name, item] = tree

    @rule(name=NAMES, item=ITEMS, changes=strategies.edits())
    def save(self, name, item, changes):
        """The next state of a run."""
        if name in self.away:
            return
        tree = self.trees.get((name, item)) or first_tree()
        self._save(name, item, strategies.edited(tree, changes) or first_tree())

    @rule(name=NAMES, item=ITEMS, pick=PICK)
    def fork(self, name, item, pick):
        """A run goes on from any state of any run."""
        if name in self.away:
            return
        trees = sorted(self.trees)
        self._save(name, item, self.trees[trees[pick % len(trees)]])

    @rule(name=NAMES, item=ITEMS, number=st.integers(1, 40), fails=st.booleans())
    def broken_save(self, name, item, number, fails):
        """The process dies at some operation, or the storage refuses it."""
        if name in self.away:
            return
        tree = self.trees.get((name, item)) or first_tree()
        match = testing.Match(kind=("write", "create"), first=1 + number // 3, times=1)
        broken = (
            testing.fail(errno.EIO, match)
            if fails
            else testing.crash_at(number, "after")
        )
        # Dead or not, whoever saves next has not seen what came of this.
        self.handlers.pop(name, None)
        with (
            testing.new_life(),
            contextlib.suppress(StorageError, testing.SimulatedCrash),
            testing.faults(broken),
        ):
            self._save(name, item, tree)
        self.handlers.pop(name, None)

    @rule(name=NAMES, closed=st.booleans())
    def restart(self, name, closed):
        """A new process, after an end in order or not."""
        handler = self.handlers.pop(name, None)
        if handler is not None and closed and name not in self.away:
            handler.close()

    @rule(name=NAMES, item=ITEMS, pick=PICK)
    def go_on(self, name, item, pick):
        """A run restores one of its steps and goes on from that."""
        steps = self.model.get((name, item))
        if steps and name not in self.away:
            step = sorted(steps)[pick % len(steps)]
            got = self._handler(name).restore(self._root(name) / str(step) / item)
            assert_same_tree(got, steps[step])
            self.trees[name, item] = got

    @rule(name=NAMES, keep=st.integers(0, 1))
    def delete(self, name, keep):
        """All but the newest step of each item of a run go, or that too."""
        for item in ("model", "opt"):
            steps = self.model.get((name, item), {})
            for step in sorted(steps)[: len(steps) - keep]:
                if name not in self.away:
                    del steps[step]
                    shutil.rmtree(self._root(name) / str(step))

    @rule(name=NAMES)
    def vanish(self, name):
        """Its disk is not there any more."""
        if self._root(name).exists():
            self._root(name).rename(self.folder / f"{name} away")
            self.away.add(name)

    @precondition(lambda self: self.away)
    @rule()
    def come_back(self):
        """All disks are there again."""
        for name in self.away:
            (self.folder / f"{name} away").rename(self._root(name))
        self.away.clear()

    @precondition(lambda self: self.away)
    @rule()
    def forget(self):
        """Who is away is gone for good."""
        for name in sorted(self.away):
            store = registry.open_shared(str(self.store))
            with contextlib.suppress(NotFoundError):
                planned = forgetting.plan(store, str(self._root(name)))
                forgetting.execute(store, planned)
            shutil.rmtree(self.folder / f"{name} away")
            self.handlers.pop(name, None)
            for item in ("model", "opt"):
                self.model.pop((name, item), None)
        self.away.clear()

    @rule()
    def prune(self):
        """It deletes nothing while a run that it must know of is away."""
        store = registry.open_shared(str(self.store))
        before = {path.name for path in (self.store / "packs").iterdir()}
        try:
            prune.execute(store, prune.plan(store))
        except NotFoundError:
            assert self.away
            assert before == {path.name for path in (self.store / "packs").iterdir()}

    @rule(name=NAMES)
    def wrong_store(self, name):
        """A run that has a store is not given another one."""
        # A save that died early may have left a root that has none yet.
        has_store = (self._root(name) / "_delta_store" / "ROOT.json").exists()
        if name in self.away or not has_store:
            return
        with pytest.raises(InvalidInputError, match="uses the shared store"):
            registry.open_store(Folder(str(self._root(name))), str(self.folder / "x"))

    @invariant()
    def everything_restores(self):
        """Every committed step that can be reached, by someone who knows nothing."""
        reader = orbax_delta.DeltaCheckpointHandler()
        for (name, item), steps in self.model.items():
            for step, tree in steps.items():
                if name not in self.away:
                    with labelled(f"{name}, step {step}, item {item}"):
                        got = reader.restore(self._root(name) / str(step) / item)
                        assert_same_tree(got, tree)

    def teardown(self):
        """In the end a prune leaves what is named, and all of that is whole."""
        try:
            if self.store.exists() and not self.away:
                self._check_clean()
        finally:
            self.monkeypatch.undo()
            shutil.rmtree(self.folder)

    def _check_clean(self):
        for handler in self.handlers.values():
            handler.close()
        with testing.new_life():
            store = registry.open_shared(str(self.store))
            prune.execute(store, prune.plan(store))
        named = packs_named(self.store)
        for root in map(self._root, "abc"):
            if root.exists():
                named |= packs_named(root)
                if DeltaStore.open(Folder(str(root))) is not None:
                    assert check.verify(str(root)).ok
        assert {path.name for path in (self.store / "packs").iterdir()} == named
        assert not list((self.store / "pins").iterdir())


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=max(8, settings.default.max_examples // 4), stateful_step_count=20
)
