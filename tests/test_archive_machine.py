"""A run and its archive as a state machine: whatever anybody lists restores."""

import pathlib
import shutil
import tempfile

import hypothesis.strategies as st
import pytest
import strategies
from etils import epath
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from strategies import LITTLE_OPTIONS, assert_same_tree, labelled, little_state

import orbax_delta
from orbax_delta import check, listing, prune, testing
from orbax_delta.places import TEMPORARY_SUFFIX
from orbax_delta.store import DeltaStore, Folder

PICK = st.integers(0, 1000)
SOME = st.sets(PICK, min_size=1, max_size=3)


class Machine(RuleBasedStateMachine):
    """Saves, archives, moves, deletions, prunes, crashes, returns, in any order."""

    @initialize()
    def begin(self):
        """A new root; its archive is not there yet."""
        self.patch = pytest.MonkeyPatch()
        strategies.skip_disk_sync(self.patch)
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.root, self.cold = self.folder / "run", self.folder / "cold"
        self.root.mkdir()
        self.life = testing.new_life()
        self.life.__enter__()
        self.handler = orbax_delta.DeltaCheckpointHandler(
            orbax_delta.DeltaOptions(**LITTLE_OPTIONS)
        )
        self.next = 0
        self.held = {}
        self.hot, self.archived, self.moved = set(), set(), set()

    def teardown(self):
        """Nothing is left."""
        if hasattr(self, "folder"):
            self.life.__exit__(None, None, None)
            self.patch.undo()
            shutil.rmtree(self.folder)

    def picked(self, steps, picks):
        """Some of the steps."""
        ordered = sorted(steps)
        return sorted({ordered[pick % len(ordered)] for pick in picks})

    # --- the run ----------------------------------------------------------------------

    @rule(version=st.integers(0, 5))
    def save(self, version):
        """As Orbax asks for it."""
        step, self.next = self.next, self.next + 1
        self.held[step] = version
        temporary = self.root / f"{step}{TEMPORARY_SUFFIX}"
        item = temporary / f"default{TEMPORARY_SUFFIX}"
        item.mkdir(parents=True)
        self.handler.save(item, orbax_delta.DeltaSave(little_state(version)))
        self.handler.finalize(item)
        item.rename(temporary / "default")
        temporary.rename(self.root / str(step))
        self.hot.add(step)

    @precondition(lambda self: self.hot | self.moved)
    @rule(pick=PICK)
    def restore(self, pick):
        """And go on from there."""
        (step,) = self.picked(self.hot | self.moved, {pick})
        got = self.handler.restore(epath.Path(self.root / str(step) / "default"))
        assert_same_tree(got, little_state(self.held[step]))

    @precondition(lambda self: self.hot | self.moved)
    @rule(pick=PICK)
    def delete(self, pick):
        """A step of the root; what the archive has stays there."""
        (step,) = self.picked(self.hot | self.moved, {pick})
        shutil.rmtree(self.root / str(step))
        self.hot.discard(step)
        self.moved.discard(step)

    @precondition(lambda self: self.archived - self.moved)
    @rule(pick=PICK)
    def delete_there(self, pick):
        """A step of the archive that nothing leads to."""
        (step,) = self.picked(self.archived - self.moved, {pick})
        shutil.rmtree(self.cold / str(step))
        self.archived.discard(step)

    @rule(there=st.booleans())
    def prune(self, there):
        """What nothing names any more goes."""
        store = DeltaStore.open(Folder(str(self.cold if there else self.root)))
        if store is not None:
            prune.execute(store, prune.plan(store))

    @rule()
    def restart(self):
        """A new process; the old one has just ended."""
        self.handler.close()
        self.handler = orbax_delta.DeltaCheckpointHandler(
            orbax_delta.DeltaOptions(**LITTLE_OPTIONS)
        )

    # --- the archive ------------------------------------------------------------------

    @precondition(lambda self: self.hot | self.moved)
    @rule(picks=SOME, move=st.booleans())
    def archive(self, picks, move):
        """Copy or move some steps."""
        steps = self.picked(self.hot | self.moved, picks)
        report = orbax_delta.archive(self.root, self.cold, steps=steps, move=move)
        assert report.ok, report
        self.went(steps, move)

    @precondition(lambda self: len(self.hot | self.moved) > 1)
    @rule(every=st.integers(1, 3), move=st.booleans())
    def archive_by_policy(self, every, move):
        """All that fit, but for the newest."""
        report = orbax_delta.archive(self.root, self.cold, keep_every=every, move=move)
        assert report.ok, report
        there = sorted(self.hot | self.moved)[:-1]
        steps = [step for step in there if step % every == 0]
        assert [int(step.step) for step in report.steps] == steps
        self.went(steps, move)

    def went(self, steps, move):
        """What the archive has now."""
        self.archived.update(steps)
        if move:
            self.moved.update(steps)
            self.hot.difference_update(steps)

    @precondition(lambda self: self.hot)
    @rule(picks=SOME, move=st.booleans(), when=st.integers(1, 120))
    def crash(self, picks, move, when):
        """An archiving process dies somewhere; what is there is what counts."""
        steps = self.picked(self.hot, picks)
        with testing.new_life():
            crash = testing.crash_at(when, "after")
            try:
                with testing.faults(crash):
                    orbax_delta.archive(self.root, self.cold, steps=steps, move=move)
            except testing.SimulatedCrash:
                pass
        for step in steps:
            if (self.cold / str(step)).exists():
                self.archived.add(step)
            if not (self.root / str(step) / "default" / "MANIFEST").exists():
                self.moved.add(step)
                self.hot.discard(step)

    @precondition(lambda self: self.archived)
    @rule(picks=SOME, move=st.booleans())
    def bring_back(self, picks, move):
        """Also steps that have been deleted in the root."""
        steps = self.picked(self.archived, picks)
        report = orbax_delta.archive(self.cold, self.root, steps=steps, move=move)
        assert report.ok, report
        self.hot.update(steps)
        self.moved.difference_update(steps)
        if move:
            # Links there lead back; without the folders they count no more.
            for step in steps:
                shutil.rmtree(self.cold / str(step))
            self.archived.difference_update(steps)

    # --- what always holds ------------------------------------------------------------

    @invariant()
    def whatever_is_listed_restores(self):
        """From the root and from the archive, by who has seen nothing."""
        if not hasattr(self, "folder"):
            return
        for place, wanted in (
            (self.root, self.hot | self.moved),
            (self.cold, self.archived),
        ):
            if not place.exists() or not any(place.iterdir()):
                assert not wanted
                continue
            items = listing.read_root(str(place)).items
            assert {i.place.step for i in items if i.finished} == wanted
            for item in items:
                if not item.finished:
                    continue
                with labelled(f"{item.step} of {place}"):
                    got = orbax_delta.DeltaCheckpointHandler().restore(
                        epath.Path(place / item.step / "default")
                    )
                    assert_same_tree(got, little_state(self.held[item.place.step]))

    @invariant()
    def verification_agrees(self):
        """It says where moved steps are, and finds nothing wrong."""
        if getattr(self, "hot", None):
            report = check.verify(str(self.root))
            assert report.ok, report.problems
            assert set(map(int, report.archived)) == self.moved


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=20)
