"""Damage made good: other lists of records, other states, and `repair`."""

import logging
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from etils import epath
from strategies import STORE, assert_same_tree, open_run, packs_named, read_step

import orbax_delta
from orbax_delta import check, listing, prune, repair, restore_base
from orbax_delta.errors import (
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from orbax_delta.records import FORMAT_VERSION
from orbax_delta.store import DeltaStore, Folder

SMALL = {"chunk_bytes": 4096, "refresh_every": 2, "full_every": 3}
LAST = 8


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def state(step):
    """What never changes, with a cast copy, and what changes as a whole."""
    frozen = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    moving = np.random.default_rng(2 + step).standard_normal(3000).astype(np.float32)
    return {
        "frozen": frozen,
        "half": frozen.astype(np.float16),
        "moving": moving,
        "name": "a name that stays as it is",
        "step": step,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A root whose frozen leaf has been written anew several times."""
    root = tmp_path_factory.mktemp("made") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        strategies.skip_disk_sync(monkeypatch)
        with open_run(root, **SMALL) as run:
            for step in range(LAST + 1):
                run.save(step, state(step))
    return root


@pytest.fixture
def run(made, root):
    """A copy of it, to be damaged."""
    shutil.copytree(made, root)
    return root


def lists_of(root, step, leaf):
    """The record lists of a leaf, by box."""
    found = read_step(root, step)
    return {
        row.box: row.refs
        for row in found.rows
        if found.manifest.leaves[row.leaf].name == leaf
    }


def damage(root, ref):
    """Flip a bit in the payload of a record."""
    path = root / STORE / "packs" / ref.pack
    data = bytearray(path.read_bytes())
    data[ref.offset + ref.length // 2] ^= 0x20
    path.write_bytes(data)


def restore(root, step, **options):
    """Restore a step without a manager; also the report."""
    handler = orbax_delta.DeltaCheckpointHandler()
    args = orbax_delta.DeltaRestore(**options)
    tree = handler.restore(epath.Path(root / str(step) / "default"), args)
    return tree, handler.last_restore_report


def damage_frozen(root, step):
    """Spoil one chunk of the frozen leaf as one step stores it."""
    ((box, refs), *_) = lists_of(root, step, "frozen").items()
    damage(root, refs[-1])
    return box, refs


def damage_moving(root, step):
    """Spoil a chunk whose content no other step has."""
    (refs, *_) = lists_of(root, step, "moving").values()
    damage(root, refs[-1])
    return refs[-1].pack


# --- other lists --------------------------------------------------------------------


def test_the_lists_differ(made):
    """Without refreshes nothing below would show anything."""
    lists = {lists_of(made, n, "frozen")[(0, 16), (0, 64)] for n in range(LAST + 1)}
    assert len(lists) > 2


@pytest.mark.parametrize("step", [0, 4, LAST])
def test_damage_heals(run, step, caplog):
    """Content that another list yields is restored, and said loudly."""
    damage_frozen(run, step)
    with caplog.at_level(logging.ERROR):
        tree, report = restore(run, step)
    assert_same_tree(tree, state(step))
    # The cast copy follows from the same records.
    assert report.chunks_healed == 2
    assert "2 chunks are damaged" in caplog.text
    assert f"orbax-delta repair {run}" in caplog.text


def test_nothing_healed_is_reported_of_a_whole_step(run):
    """A restore without damage reads no other step."""
    _, report = restore(run, LAST)
    assert report.chunks_healed == 0


@pytest.mark.parametrize("loss", ["missing", "cut", "unreadable"])
def test_a_lost_pack_heals(run, loss, monkeypatch):
    """A pack that is gone, cut off or on a bad sector spoils no other."""
    _, refs = damage_frozen(run, 4)
    path = run / STORE / "packs" / refs[-1].pack
    others = {
        n for n in range(LAST + 1) if path.name in read_step(run, n).manifest.packs
    }
    if loss == "missing":
        path.unlink()
    elif loss == "cut":
        path.write_bytes(path.read_bytes()[:40])
    else:
        start_read = Folder.start_read

        def failing(self, key, offset, length):
            if key == path.name:
                return _Failing(f"read {self.url}{key}: EIO")
            return start_read(self, key, offset, length)

        monkeypatch.setattr(Folder, "start_read", failing)
    for step in others - {4}:
        try:
            assert_same_tree(restore(run, step)[0], state(step))
        except (CorruptionError, StorageError):
            assert path.name in packs_of_leaf(run, step, "moving")


class _Failing:
    def __init__(self, what):
        self._what = what

    def result(self):
        """Fail as the store does."""
        raise StorageError(f"could not {self._what}")


def packs_of_leaf(root, step, leaf):
    """Packs that the lists of a leaf name."""
    lists = lists_of(root, step, leaf).values()
    return {ref.pack for refs in lists for ref in refs}


def test_the_next_save_does_not_build_on_damage(run):
    """What was healed is written in full by the next save."""
    _, refs = damage_frozen(run, LAST)
    with open_run(run, **SMALL) as opened:
        tree = opened.restore(LAST)
        opened.save(LAST + 1, tree)
        assert_same_tree(opened.restore(LAST + 1), state(LAST))
        assert opened.handler.last_restore_report.chunks_healed == 0
    assert refs not in lists_of(run, LAST + 1, "frozen").values()


def test_verify_says_what_heals(run):
    """The step counts as whole; the damage is reported all the same."""
    damage_frozen(run, LAST)
    report = check.verify(str(run))
    assert not report.ok
    assert str(LAST) in report.whole_steps
    chunks = [problem for problem in report.problems if problem.leaf]
    assert {problem.leaf for problem in chunks} == {"frozen", "half"}
    assert all(problem.healed_by for problem in chunks)


# --- other states -------------------------------------------------------------------


def test_the_error_names_the_newest_step_that_restores(run):
    """Damage that nothing heals: leaf, chunk, and where to go."""
    damage_moving(run, LAST)
    whole = newest_whole(run)
    pattern = rf"step 8.*leaf moving, chunk \[.*newest state that restores is .*{whole}"
    with pytest.raises(CorruptionError, match=pattern) as caught:
        restore(run, LAST)
    assert caught.value.restorable == whole


def newest_whole(root):
    """The newest step that restores, tried one by one."""
    for step in range(LAST, -1, -1):
        found = root / str(step) / "default"
        if found.exists() and f"{step}" in check.verify(str(root)).whole_steps:
            return step
    raise AssertionError("none")


def test_fallback_takes_the_step_before(run, caplog):
    """`on_corruption="fallback"`: an older step, logged as an error and reported."""
    damage_moving(run, 5)
    whole = max(int(s) for s in whole_steps(run) if int(s) < 5)
    with caplog.at_level(logging.ERROR):
        tree, report = restore(run, 5, on_corruption="fallback")
    assert_same_tree(tree, state(whole))
    assert report.step == str(whole)
    assert f"restored step {whole} instead of step 5" in caplog.text


def whole_steps(root):
    """Numbers of the steps that restore, without bases."""
    return [name for name in check.verify(str(root)).whole_steps if name.isdigit()]


def test_fallback_through_the_manager(run):
    """The argument works where users write it."""
    damage_moving(run, LAST)
    args = orbax_delta.DeltaRestore(state(0), on_corruption="fallback")
    with open_run(run, **SMALL) as opened:
        tree = opened.manager.restore(LAST, args=args)
    assert_same_tree(tree, state(int(whole_steps(run)[-1])))


def test_fallback_to_a_base(run):
    """No step is left that restores, but the store keeps one."""
    for step in range(1, LAST + 1):
        shutil.rmtree(run / str(step))
    (run / "0" / "default" / "MANIFEST").write_bytes(b"garbled")
    kept = listing.read_root(str(run)).bases
    with pytest.raises(
        FormatError, match=r"newest state that restores is the kept base"
    ):
        restore(run, 0)
    with open_run(run, **SMALL) as opened:
        step, tree = orbax_delta.restore_latest_good(opened.manager)
    assert step == kept[-1].place.step
    assert_same_tree(tree, state(step))


def test_no_fallback_past_a_wrong_target(run):
    """A target that does not fit is the caller's error."""
    with pytest.raises(orbax_delta.StructureError, match="does not fit"):
        restore(run, LAST, item={"other": 1}, on_corruption="fallback")


def test_nothing_to_fall_back_to(root):
    """One step, damaged: the error says that there is nothing else."""
    with open_run(root, keep_bases=0) as opened:
        opened.save(0, state(0))
    damage_moving(root, 0)
    with pytest.raises(CorruptionError, match="No other step or base"):
        restore(root, 0)
    with pytest.raises(CorruptionError, match="No step or base before it"):
        restore(root, 0, on_corruption="fallback")


def test_wrong_value_of_on_corruption(run):
    """Anything else is refused."""
    with pytest.raises(InvalidInputError, match="on_corruption is 'skip'"):
        restore(run, LAST, on_corruption="skip")


# --- repair -------------------------------------------------------------------------


def test_repair_of_a_healthy_root_changes_nothing(run):
    """Nothing is planned, nothing is written."""
    before = strategies.listing(run)
    report = repair.repair(str(run))
    assert report.ok
    assert report.mended == report.failed == []
    assert strategies.listing(run) == before


def test_repair_writes_back_what_heals(run):
    """After it every step is whole without the damaged pack, which prune deletes."""
    damaged = {damage_frozen(run, step)[1][-1].pack for step in (0, LAST)}
    dry = repair.repair(str(run), dry_run=True)
    assert dry.mended
    assert not dry.ok
    report = repair.repair(str(run))
    assert [mend.what for mend in report.mended] == [m.what for m in dry.mended]
    assert report.failed == []
    assert report.ok
    assert not packs_named(run) & damaged
    for step in range(LAST + 1):
        tree, read = restore(run, step)
        assert_same_tree(tree, state(step))
        assert read.chunks_healed == 0
    store = DeltaStore.open(Folder(str(run)))
    prune.execute(store, prune.plan(store))
    assert strategies.packs_on_disk(run) == packs_named(run)
    prune.execute(store, prune.plan(store))
    assert store.condemned.names() == store.pins.names() == []
    assert check.verify(str(run)).ok


def test_repair_leaves_what_is_lost(run):
    """What no list yields stays an error; the rest of the pack is saved."""
    pack = damage_moving(run, LAST)
    report = repair.repair(str(run))
    assert not report.ok
    assert all(p.leaf == "moving" or p.file.endswith(pack) for p in report.problems)
    with pytest.raises(CorruptionError, match="leaf moving"):
        restore(run, LAST)
    assert_same_tree(*_without_moving(run))
    # Again: nothing more can be done, and no mark is added.
    marks = sorted((run / STORE / "condemned").iterdir())
    repair.repair(str(run))
    assert sorted((run / STORE / "condemned").iterdir()) == marks


def _without_moving(root):
    target = {key: value for key, value in state(LAST).items() if key != "moving"}
    tree, _ = restore(root, LAST, item=target, partial_restore=True)
    return tree, target


def test_a_job_does_not_build_on_a_pack_found_damaged(run):
    """A repair beside a job that goes on: it writes anew what the pack held."""
    with open_run(run, **SMALL, keep_bases=0) as opened:
        opened.restore(LAST)
        _, refs = damage_frozen(run, LAST)
        repair.repair(str(run))
        opened.save(LAST + 1, state(LAST + 1))
        named = read_step(run, LAST + 1).manifest.packs
        assert refs[-1].pack not in named
        assert_same_tree(opened.restore(LAST + 1), state(LAST + 1))


def test_repair_of_the_small_files(run):
    """STORE.json, its marker, pins and marks that cannot be read."""
    before = strategies.listing(run)
    store = run / STORE
    (store / "STORE.json").write_bytes(b"{")
    (store / "commit_success.txt").unlink()
    (store / "pins").mkdir(exist_ok=True)
    (store / "pins" / ("a" * 32 + "-p0")).write_bytes(b"{}")
    (store / "condemned").mkdir(exist_ok=True)
    (store / "condemned" / ("b" * 32)).write_bytes(b"no json")
    report = repair.repair(str(run))
    assert report.ok
    assert len(report.mended) == 4
    after = {k: v for k, v in strategies.listing(run).items() if v != "folder"}
    assert after == {k: v for k, v in before.items() if v != "folder"}


@pytest.mark.parametrize("kind", ["MANIFEST", "part"])
@pytest.mark.parametrize("loss", ["garbled", "missing"])
@pytest.mark.parametrize("side", ["step", "base"])
def test_a_base_and_its_step_mend_each_other(run, kind, loss, side):
    """Files of one attempt lie in two places; one whole copy is enough."""
    kept = listing.read_root(str(run)).bases[-1]
    step = kept.place.step
    folder = run / kept.step if side == "base" else run / str(step) / "default"
    before = strategies.listing(run)
    (path,) = folder.glob(f"{kind}*")
    if loss == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    report = repair.repair(str(run))
    assert report.ok
    lost_base = side == "base" and kind == "MANIFEST" and loss == "missing"
    if not lost_base:
        assert strategies.listing(run) == before
    assert_same_tree(restore(run, step)[0], state(step))


def test_a_base_that_nothing_mends_is_dropped(run):
    """It would stop every prune."""
    kept = listing.read_root(str(run)).bases[0]
    shutil.rmtree(run / str(kept.place.step), ignore_errors=True)
    (run / kept.step / "MANIFEST").write_bytes(b"garbled")
    report = repair.repair(str(run))
    assert report.ok
    assert [base.step for base in listing.read_root(str(run)).bases] != [kept.step]
    assert not (run / kept.step).exists()


def test_a_damaged_base_is_written_anew(run):
    """A base whose records heal gets a folder of a new attempt."""
    kept = listing.read_root(str(run)).bases[0]
    shutil.rmtree(run / str(kept.place.step), ignore_errors=True)
    packs = set(kept.manifest.packs)
    others = set().union(
        *(
            read_step(run, n).manifest.packs
            for n in range(LAST + 1)
            if (run / str(n)).exists()
        )
    )
    (own, *_) = packs - others or packs
    path = run / STORE / "packs" / own
    data = bytearray(path.read_bytes())
    data[-3] ^= 1  # the footer: every record still reads
    path.write_bytes(data)
    report = repair.repair(str(run))
    assert report.ok
    assert kept.step not in [base.step for base in listing.read_root(str(run)).bases]
    step, tree = restore_base(run, step=kept.place.step)
    assert_same_tree(tree, state(step))


def test_a_newer_store_is_left_alone(run):
    """Of a version that it does not know a repair touches nothing."""
    path = run / str(LAST) / "default" / "MANIFEST"
    data = path.read_bytes()
    old, new = (f"MANIFEST {version} ".encode() for version in (FORMAT_VERSION, 9))
    path.write_bytes(data.replace(old, new, 1))
    (run / STORE / "commit_success.txt").unlink()
    before = strategies.listing(run)
    with pytest.raises(UnsupportedVersionError, match="version 9"):
        repair.repair(str(run))
    assert strategies.listing(run) == before


def test_restore_base_of_no_such_step(run):
    """The error says how to see those that there are."""
    with pytest.raises(NotFoundError, match=r"no base of step 77.*ls --bases"):
        restore_base(run, step=77)


def test_orbax_steps_need_no_healing(root):
    """A root with nothing of this package holds nothing to mend."""
    with ocp.CheckpointManager(root) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.ones(3)}))
        manager.wait_until_finished()
    report = repair.repair(str(root))
    assert report.ok
