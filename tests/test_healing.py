"""Damage made good: other lists of records, other states, and `repair`."""

import dataclasses
import errno
import functools
import logging
import shutil
import weakref

import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from etils import epath
from strategies import STORE, assert_same_tree, open_run, packs_named, read_step

import orbax_delta
from orbax_delta import (
    check,
    listing,
    mends,
    owners,
    prune,
    reader,
    repair,
    restore_base,
    rewriting,
    steps,
    testing,
    upkeep,
)
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


def test_a_step_in_a_trash_heals_too(run):
    """Its root is that of its store, wherever it was moved below that."""
    damage_frozen(run, 4)
    (run / "trash").mkdir()
    (run / "4").rename(run / "trash" / "4")
    tree, report = restore(run / "trash", 4)
    assert_same_tree(tree, state(4))
    assert report.chunks_healed == 2


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


def test_what_heals_is_not_kept(run, monkeypatch):
    """However much of a root is damaged, one chunk at a time is in memory."""
    for step in (0, 4, LAST):
        damage_frozen(run, step)
    contents = []
    real = reader.read_one

    def spy(packs, request):
        assert not [content for content in contents if content() is not None]
        found = real(packs, request)
        contents.append(weakref.ref(found))
        return found

    monkeypatch.setattr(reader, "read_one", spy)
    assert [one for one in check.verify(str(run)).problems if one.healed_by]
    assert len(contents) > 1


@pytest.mark.parametrize("count", [3, 9])
def test_damage_that_all_steps_share_is_looked_for_once(root, count, monkeypatch):
    """The error comes as soon as it is known that no step holds the lost chunk."""
    with open_run(root, **{**SMALL, "refresh_every": 1000, "keep_bases": 0}) as opened:
        for step in range(count):
            opened.save(step, state(step))
    damage_frozen(root, count - 1)
    fetch, whole_reads = reader.fetch, []

    def counted(packs, wanted, **options):
        whole_reads.append(packs)
        return fetch(packs, wanted, **options)

    monkeypatch.setattr(reader, "fetch", counted)
    with pytest.raises(CorruptionError, match="No other step or base"):
        restore(root, count - 1)
    assert len(whole_reads) == 2  # of this step, and of the one before it


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


def test_fallback_takes_no_newer_step_under_an_older_name(run):
    """Who asks for a step wants nothing trained after it, whatever the folder says."""
    shutil.rmtree(run / STORE / "bases")
    shutil.rmtree(run / "0")
    (run / str(LAST)).rename(run / "0")
    for step in range(1, LAST):
        (run / str(step) / "default" / "MANIFEST").write_bytes(b"garbled")
    with pytest.raises(FormatError, match="No step or base before it"):
        restore(run, 3, on_corruption="fallback")


def test_fallback_takes_no_other_item(root, caplog):
    """Averaged weights look like the weights: only the MANIFEST tells them apart."""
    names = ("ema", "params")
    registry = orbax_delta.handler_registry(item=names, keep_bases=0)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in range(2):
            trees = {
                name: orbax_delta.DeltaSave({"w": np.full(9, step + 10.0 * number)})
                for number, name in enumerate(names)
            }
            manager.save(step, args=ocp.args.Composite(**trees))
        manager.wait_until_finished()
    (root / "0" / "ema").rename(root / "0" / "was")
    (root / "0" / "params").rename(root / "0" / "ema")
    (root / "1" / "ema" / "MANIFEST").write_bytes(b"garbled")
    handler = orbax_delta.DeltaCheckpointHandler()
    args = orbax_delta.DeltaRestore(on_corruption="fallback")
    with pytest.raises(FormatError, match="No step or base before it"):
        handler.restore(epath.Path(root / "1" / "ema"), args)
    handler.restore(epath.Path(root / "0" / "ema"))
    assert "was saved as item 'params'" in caplog.text


def test_no_fallback_past_a_newer_version(run):
    """What a newer package wrote is not damaged: the package is too old."""
    path = run / str(LAST) / "default" / "MANIFEST"
    old, new = (f"MANIFEST {version} ".encode() for version in (FORMAT_VERSION, 9))
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with open_run(run) as opened:
        with pytest.raises(UnsupportedVersionError, match="Upgrade orbax_delta"):
            restore(run, LAST, on_corruption="fallback")
        with pytest.raises(UnsupportedVersionError, match="Upgrade orbax_delta"):
            orbax_delta.restore_latest_good(opened.manager)


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


def test_a_bad_sector_is_passed_over(run):
    """On a local disk a read that fails does not get better by waiting."""
    packs = packs_of_leaf(run, LAST, "moving")
    rule = testing.fail(errno.EIO, testing.Match(kind="range", url=f"*/{min(packs)}"))
    with testing.faults(rule), open_run(run, **SMALL) as opened:
        with pytest.raises(StorageError, match=r"leaf moving, chunk .*could not read"):
            restore(run, LAST)
        tree, report = restore(run, LAST, on_corruption="fallback")
        step, good = orbax_delta.restore_latest_good(opened.manager)
    assert int(report.step) == step < LAST
    assert_same_tree(tree, state(step))
    assert_same_tree(good, state(step))


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
        opened.save(LAST + 1, state(LAST + 1))
        _, refs = damage_frozen(run, LAST)
        assert refs[-1].pack in read_step(run, LAST + 1).manifest.packs
        # The pin of that save names the pack still, but the next one does not use it.
        assert repair.repair(str(run)).ok
        opened.save(LAST + 2, state(LAST + 2))
        named = read_step(run, LAST + 2).manifest.packs
        assert refs[-1].pack not in named
        assert_same_tree(opened.restore(LAST + 2), state(LAST + 2))


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


@pytest.mark.parametrize("kept_copy", [False, True])
def test_a_step_is_not_made_another_one(run, kept_copy):
    """A MANIFEST of another step lies in a folder: the parts do not follow it there."""
    kept = listing.read_root(str(run)).bases[-1]
    step = kept.place.step
    wrong = run / str(step if kept_copy else step - 1) / "default"
    other = step - 1 if kept_copy else step
    source = run / str(other) / "default" / "MANIFEST"
    shutil.copyfile(source, wrong / "MANIFEST")
    report = repair.repair(str(run))
    if kept_copy:  # the part's name tells which base has the files of the step
        assert report.ok
        assert_same_tree(restore(run, step)[0], state(step))
    else:
        assert [mend.file for mend in report.mended] == []
        with pytest.raises(CorruptionError, match=r"part-\w+-p0 is missing"):
            restore(run, step - 1)


def test_a_manifest_of_another_run_is_replaced(run, tmp_path):
    """A kept base has the right one, of the save that the part's name tells."""
    step = listing.read_root(str(run)).bases[-1].place.step
    with open_run(tmp_path / "other") as other:
        other.save(step, state(step + 1))
    before = strategies.listing(run)
    shutil.copyfile(
        tmp_path / "other" / str(step) / "default" / "MANIFEST",
        run / str(step) / "default" / "MANIFEST",
    )
    assert repair.repair(str(run)).ok
    assert strategies.listing(run) == before


def test_a_step_is_not_made_a_self_contained_checkpoint(run):
    """Nor do the parts of one follow its MANIFEST into a step's folder."""
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        args = orbax_delta.DeltaSave({"w": np.ones(3000)})
        checkpointer.save(run / f"export{LAST}", args=args)
    folder = run / str(LAST) / "default"
    shutil.copyfile(run / f"export{LAST}" / "MANIFEST", folder / "MANIFEST")
    report = repair.repair(str(run))
    assert not report.ok
    assert report.mended == []
    with pytest.raises(CorruptionError, match=r"part-\w+-p0 is missing"):
        restore(run, LAST)


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


def base_folders(root):
    """The kept bases that have a MANIFEST."""
    return {path.parent.name for path in (root / STORE / "bases").glob("*/MANIFEST")}


@pytest.mark.parametrize("loss", ["disk full", "two stores", "input/output error"])
def test_no_base_is_dropped_for_the_fault_of_another_file(run, loss):
    """A base whose own files are whole stays, whatever keeps it from being read now."""
    before = base_folders(run)
    rules = []
    if loss == "input/output error":
        parts = testing.Match(kind="read", url=f"*/{STORE}/bases/*/part-*")
        rules.append(testing.fail(errno.EIO, parts))
        for step in {base.place.step for base in listing.read_root(str(run)).bases}:
            shutil.rmtree(run / str(step))
    else:
        (run / STORE / "STORE.json").rename(run / "aside")
    if loss == "disk full":
        rules.append(testing.fail(errno.ENOSPC, testing.Match(kind="write")))
    if loss == "two stores":
        with open_run(run.parent / "other", **SMALL) as other:
            other.save(77, state(0))
        shutil.copytree(run.parent / "other" / "77", run / "77")
    with testing.faults(*rules):
        dry = repair.repair(str(run), dry_run=True)
        report = repair.repair(str(run))
    assert not report.ok
    assert base_folders(run) == before
    assert not any("dropped" in mend.what for mend in (*dry.mended, *report.mended))
    if loss == "two stores":
        # Step 77 came without its store; the bases tell which store this is.
        assert_same_tree(restore(run, LAST)[0], state(LAST))


def test_a_plan_beside_a_damaged_mark(run):
    """What a dry run cannot delete does not keep it from telling what it would do."""
    damage_frozen(run, LAST)
    mark = run / STORE / "condemned" / ("b" * 32)
    mark.parent.mkdir(exist_ok=True)
    mark.write_bytes(b"no json")
    dry = repair.repair(str(run), dry_run=True)
    assert [mend.what for mend in dry.mended if "condemned" in mend.what]
    report = repair.repair(str(run))
    assert report.ok
    assert [mend.what for mend in report.mended] == [mend.what for mend in dry.mended]


@pytest.mark.parametrize(
    "moment", ["_copy", "examine", "_put_records", "_require_unchanged"]
)
def test_a_step_that_is_deleted_meanwhile(run, moment, monkeypatch):
    """A job with `max_to_keep` beside a repair: the step does not come back."""
    kept = listing.read_root(str(run)).bases[-1]
    folder = run / str(kept.place.step)
    if moment == "_copy":
        (folder / "default" / "MANIFEST").write_bytes(b"garbled")
    elif moment != "examine":
        folder = run / "0"  # the first to be written anew
        damage_frozen(run, 0)
    owners = {"_copy": mends, "examine": check}
    owner = owners.get(moment, rewriting)
    real = getattr(owner, moment)

    def then_delete(*args, **options):
        made = real(*args, **options)
        shutil.rmtree(folder)
        monkeypatch.undo()
        return made

    monkeypatch.setattr(owner, moment, then_delete)
    repair.repair(str(run))
    assert not folder.exists()
    assert check.verify(str(run)).ok


@pytest.mark.parametrize("inside", ["3", "3/default"])
def test_repair_of_a_folder_inside_a_root(run, inside):
    """A step's folder can be verified, but gets no store of its own."""
    before = strategies.listing(run)
    with pytest.raises(NotFoundError, match="its packs lie in"):
        repair.repair(str(run / inside))
    assert strategies.listing(run) == before


def test_steps_that_lie_below_with_their_own_store(run):
    """Another root inside this one keeps its packs, and this one its identity."""
    outer = run.parent / "outer"
    with open_run(outer, keep_bases=0) as opened:
        opened.save(0, state(0))
    shutil.rmtree(outer / "0")
    shutil.copytree(run, outer / "inner")
    damage_frozen(outer / "inner", LAST)
    before = strategies.listing(outer)
    report = repair.repair(str(outer))
    assert not report.ok
    assert strategies.listing(outer) == before
    assert repair.repair(str(outer / "inner")).ok


def test_a_step_that_is_being_saved_is_left_alone(run, monkeypatch):
    """A repair just before Orbax gives the step its name does not fail the save."""
    (refs, *_) = lists_of(run, LAST, "frozen").values()
    real = upkeep.confirm

    def after_a_repair(place, state):
        monkeypatch.setattr(upkeep, "confirm", real)
        assert repair.repair(str(run)).mended
        real(place, state)

    monkeypatch.setattr(upkeep, "confirm", after_a_repair)
    with open_run(run, **SMALL) as opened:
        opened.restore(LAST)
        damage(run, refs[-1])
        opened.save(LAST + 1, state(LAST + 1))
    assert_same_tree(restore(run, LAST + 1)[0], state(LAST + 1))


def save_again(root, step):
    """What a job does that goes on from an older step."""
    shutil.rmtree(root / str(step))
    with open_run(root, **SMALL) as opened:
        opened.restore(step - 1)
        opened.save(step, state(step))
        prune_now(root)


def prune_now(root):
    """What `orbax-delta prune` does."""
    store = DeltaStore.open(Folder(str(root)))
    prune.execute(store, prune.plan(store))


def repair_and_prune(root, step):
    """What a person does about damage to a step."""
    assert not repair.repair(str(root)).failed
    prune_now(root)


def once_before(monkeypatch, owner, name, act):
    """Let `act` happen just before the first call of a function."""
    real = getattr(owner, name)

    def function(*args, **options):
        monkeypatch.setattr(owner, name, real)
        act()
        return real(*args, **options)

    monkeypatch.setattr(owner, name, function)


@pytest.mark.parametrize("moment", ["check_packs", "check_steps"])
@pytest.mark.parametrize("act", [save_again, repair_and_prune])
def test_a_step_that_is_replaced_while_it_is_verified(run, act, moment, monkeypatch):
    """Of a save that is there no more nothing is said, and of the new one neither."""
    damage_frozen(run, LAST)
    once_before(monkeypatch, check.Examination, moment, lambda: act(run, LAST))
    report = check.verify(str(run))
    assert str(LAST) in report.vanished
    assert str(LAST) not in report.whole_steps
    assert not [problem for problem in report.problems if str(LAST) in problem.steps]
    assert check.verify(str(run)).ok


def test_a_step_that_is_repaired_while_it_is_opened(run, monkeypatch):
    """Its old part is gone before it is read: the new one is."""
    damage_frozen(run, LAST)
    act = functools.partial(repair_and_prune, run, LAST)
    once_before(monkeypatch, steps, "read_rows", act)
    tree, report = restore(run, LAST)
    assert_same_tree(tree, state(LAST))
    assert report.step == str(LAST)


def test_a_step_that_is_saved_again_is_not_repaired(run, monkeypatch):
    """A new save's MANIFEST never gives way to that of a repair of the old one."""
    damage_frozen(run, LAST)
    act = functools.partial(save_again, run, LAST)
    once_before(monkeypatch, rewriting, "_exchange", act)
    monkeypatch.setattr(repair, "_MAX_ROUNDS", 1)
    report = repair.repair(str(run))
    assert "was deleted or replaced meanwhile" in report.failed[0].what
    assert_same_tree(restore(run, LAST)[0], state(LAST))
    assert len(list((run / str(LAST) / "default").glob("part-*"))) == 1


def test_a_prune_that_breaks_the_pin_of_a_repair(run, monkeypatch):
    """It has seen the new MANIFEST and deletes what only the old one named."""
    shutil.rmtree(run / STORE / "bases")
    attempt = read_step(run, LAST).manifest.attempt
    own = [
        refs[-1]
        for refs in lists_of(run, LAST, "frozen").values()
        if refs[-1].pack.startswith(attempt)
    ]
    damage(run, own[0])
    real, this = rewriting._exchange, owners.this_process()

    def then_prune(*args):
        real(*args)
        elsewhere = dataclasses.replace(this, host="elsewhere")
        with monkeypatch.context() as patch:
            patch.setattr(owners, "this_process", lambda: elsewhere)
            store = DeltaStore.open(Folder(str(run)))
            planned = prune.plan(store, break_pins=True)
            assert own[0].pack in prune.execute(store, planned)

    monkeypatch.setattr(rewriting, "_exchange", then_prune)
    repair.repair(str(run))
    assert_same_tree(restore(run, LAST)[0], state(LAST))
    assert check.verify(str(run)).ok


def test_a_prune_that_missed_a_repair(run, monkeypatch):
    """It deletes the new packs; the old MANIFEST comes back, and restores."""
    damage_frozen(run, LAST)
    real = rewriting._exchange

    def after_a_prune(folder, before, data):
        monkeypatch.setattr(rewriting, "_exchange", real)
        for path in (run / STORE / "pins").iterdir():
            path.unlink()
        prune_now(run)
        real(folder, before, data)

    monkeypatch.setattr(rewriting, "_exchange", after_a_prune)
    with monkeypatch.context() as patch:
        patch.setattr(repair, "_MAX_ROUNDS", 1)
        report = repair.repair(str(run))
    assert "the step was left as it was" in report.failed[0].what
    assert_same_tree(restore(run, LAST)[0], state(LAST))
    # Undisturbed, the next round mends it.
    assert repair.repair(str(run)).ok
    assert_same_tree(restore(run, LAST)[0], state(LAST))


def test_two_repairs_of_one_step(run, monkeypatch):
    """One of them mends it; the other one is told, and takes back its part."""
    damage_frozen(run, LAST)
    act = functools.partial(repair_and_prune, run, LAST)
    once_before(monkeypatch, rewriting, "_exchange", act)
    report = repair.repair(str(run))
    assert "was deleted or replaced meanwhile" in report.failed[0].what
    prune_now(run)
    assert check.verify(str(run)).ok
    assert len(list((run / str(LAST) / "default").glob("part-*"))) == 1


def test_after_a_repair_that_was_killed_the_next_one_ends_well(run):
    """The pin that it left names damaged packs, but nobody goes on from them."""
    damage_frozen(run, LAST)
    last_write = testing.Match(kind="create", url="*/MANIFEST")
    with (
        pytest.raises(testing.SimulatedCrash),
        testing.new_life(),
        testing.faults(testing.crash_at(1, "after", last_write)),
    ):
        repair.repair(str(run))
    assert len(list((run / STORE / "pins").iterdir())) == 1
    report = repair.repair(str(run))
    assert report.ok, report.problems
    assert report.failed == []


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


def test_restore_base_when_all_are_damaged(run):
    """What cannot be read is not called missing: it may come back from a copy."""
    for base in (run / STORE / "bases").iterdir():
        (base / "MANIFEST").write_bytes(b"garbled")
    with pytest.raises(CorruptionError, match=r"no base of item 'default'.*damaged"):
        restore_base(run)


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


def test_a_store_that_lost_its_file_among_steps_of_two(run, tmp_path):
    """Steps whose packs lie there tell whose it is; one that came along does not."""
    other = tmp_path / "other"
    with open_run(other, keep_bases=0) as opened:
        opened.save(77, state(0))
    shutil.copytree(other / "77", run / "77")
    shutil.rmtree(run / STORE / "bases")
    before = (run / STORE / "STORE.json").read_bytes()
    (run / STORE / "STORE.json").unlink()
    repair.repair(str(run))
    assert (run / STORE / "STORE.json").read_bytes() == before
    assert_same_tree(restore(run, LAST)[0], state(LAST))


def test_one_repair_is_enough(run):
    """What the first mend brings to light is mended too."""
    damage_frozen(run, LAST)
    kept = listing.read_root(str(run)).bases[-1]
    (run / STORE / "STORE.json").write_bytes(b"{")
    (run / str(kept.place.step) / "default" / "MANIFEST").unlink()
    report = repair.repair(str(run))
    assert report.ok
    assert len(report.mended) >= 3
    again = repair.repair(str(run))
    assert again.ok
    assert again.mended == []
