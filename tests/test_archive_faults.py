"""Archiving that is broken off: at every operation, by SIGKILL, by prunes, in a bucket.

Whatever happens, every step restores from where it is listed, and the same command run
again ends what was begun.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import buckets
import orbax.checkpoint as ocp
import pytest
import strategies
from bucket_runs import Run
from etils import epath
from strategies import STORE, assert_same_tree, labelled, little_state, open_run

import orbax_delta
from orbax_delta import check, listing, packcopies, prune, stepcopies, testing
from orbax_delta.errors import ConflictError, NotFoundError, StorageError
from orbax_delta.store import COMMIT_MARKER, DeltaStore, Folder

CHANGES = ("write", "create", "delete", "clear")
STEPS = (0, 1, 2, 3)
MOVED = (0, 1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A root with few small packs, that no test changes."""
    root = tmp_path_factory.mktemp("small") / "run"
    with pytest.MonkeyPatch.context() as patch:
        strategies.skip_disk_sync(patch)
        with open_run(root, **strategies.LITTLE_OPTIONS) as run:
            for step in STEPS:
                run.save(step, little_state(step))
    return root


def restored(root, step):
    """A step as a handler finds it that has seen nothing."""
    return orbax_delta.DeltaCheckpointHandler().restore(
        epath.Path(root / str(step) / "default")
    )


def assert_restores(root, steps):
    """Each of these steps, bit for bit."""
    for step in steps:
        with labelled(f"step {step} of {root}"):
            assert_same_tree(restored(root, step), little_state(step))


def listed(root):
    """Steps that a root lists and that are finished."""
    try:
        found = listing.read_root(str(root)).items
    except NotFoundError:
        return set()
    assert not any(item.error for item in found)
    return {item.place.step for item in found if item.finished}


def prune_now(root):
    """What `orbax-delta prune` does."""
    store = DeltaStore.open(Folder(str(root)))
    return prune.execute(store, prune.plan(store)) if store else ()


# --- every crash ----------------------------------------------------------------------


def there_and_back(root, cold):
    """Steps copied, moved, and one of them brought back."""
    for given in (
        {"steps": [0]},
        {"steps": [0, 1], "move": True},
    ):
        yield orbax_delta.archive(root, cold, **given)
    yield orbax_delta.archive(cold, root, steps=[1])


def check_life_after(root, cold):
    """All steps are there, whatever was half done; then it is done."""
    assert_restores(root, STEPS)
    assert listed(root) == set(STEPS)
    assert_restores(cold, listed(cold))
    for place in (root, cold):
        if place.exists():
            prune_now(place)
    assert_restores(root, STEPS)
    assert_restores(cold, listed(cold))
    assert all(report.ok for report in there_and_back(root, cold))
    assert_restores(root, STEPS)
    assert_restores(cold, MOVED)
    assert not (root / "1" / "default" / "ARCHIVED").exists()
    for path in root.parent.rglob("*.orbax-checkpoint-tmp"):
        shutil.rmtree(path)
    strategies.check_clean(cold, MOVED)
    strategies.check_clean(root, STEPS[1:])


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_crash_at_every_operation(small, tmp_path, monkeypatch, record_property, when):
    """A process that dies leaves every step restorable, and the next one goes on."""
    monkeypatch.setattr(packcopies, "PACKS_IN_FLIGHT", 1)
    root, cold = tmp_path / "run", tmp_path / "cold"

    def fresh():
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(cold, ignore_errors=True)
        shutil.copytree(small, root)

    fresh()
    with testing.new_life(), testing.faults() as log:
        assert all(report.ok for report in there_and_back(root, cold))
    check_life_after(root, cold)
    tried = [one.number for one in log.operations if one.kind in CHANGES]
    assert len(tried) > 20
    for number in tried:
        fresh()
        with labelled(f"died {when} {log.operations[number - 1]}"):
            with (
                testing.new_life(),
                testing.faults(testing.crash_at(number, when)),
                pytest.raises(testing.SimulatedCrash, match="died at operation"),
            ):
                list(there_and_back(root, cold))
            with testing.new_life():
                check_life_after(root, cold)
    record_property("crash_points", len(tried))


def test_crash_before_and_after_the_rename(small, tmp_path, monkeypatch):
    """The one thing on a local disk that is no operation of the store."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    real = Path.rename
    for after in (False, True):
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(cold, ignore_errors=True)
        shutil.copytree(small, root)

        def rename(path, target, after=after):
            if after:
                real(path, target)
            raise testing.SimulatedCrash("died at operation rename")

        # Nothing that is left to do is done by the dead.
        monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
        monkeypatch.setattr(Path, "rename", rename)
        with testing.new_life(), pytest.raises(testing.SimulatedCrash, match="rename"):
            orbax_delta.archive(root, cold, steps=[0], move=True)
        monkeypatch.undo()
        strategies.skip_disk_sync(monkeypatch)
        assert listed(cold) == ({0} if after else set())
        with testing.new_life():
            check_life_after(root, cold)


def test_storage_that_fails(small, tmp_path, record_property):
    """Each write refused once: an error of that step, the other goes on, no harm."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)
    with testing.faults() as log:
        assert orbax_delta.archive(root, cold, steps=MOVED, move=True).ok
    changes = [one.number for one in log.operations if one.kind in CHANGES]
    failed = 0
    for count, _ in enumerate(changes, 1):
        shutil.rmtree(root)
        shutil.rmtree(cold)
        shutil.copytree(small, root)
        full = testing.fail(
            errno.ENOSPC, testing.Match(kind=CHANGES, first=count, times=1)
        )
        try:
            with testing.faults(full):
                report = orbax_delta.archive(root, cold, steps=MOVED, move=True)
            failed += not report.ok
            assert all(isinstance(s.error, StorageError | None) for s in report.steps)
        except StorageError:
            failed += 1  # before any step: there is no store
        assert_restores(root, STEPS)
        prune_now(root)
        if cold.exists():
            prune_now(cold)
        assert orbax_delta.archive(root, cold, steps=MOVED, move=True).ok
        assert_restores(root, STEPS)
        assert_restores(cold, MOVED)
    assert failed > len(changes) // 2
    record_property("failures", len(changes))


def test_pins_that_stay(small, tmp_path, caplog):
    """A storage that does not delete: the same process is not in its own way."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)
    stuck = testing.fail(errno.EIO, testing.Match(kind="delete", url="*/pins/*"))
    with testing.faults(stuck):
        assert orbax_delta.archive(root, cold, steps=[1]).ok
    assert "a pin was left behind" in caplog.text
    assert len(DeltaStore.open(Folder(str(cold))).pins.names()) == 1
    assert orbax_delta.archive(root, cold, steps=[1], move=True).ok
    assert DeltaStore.open(Folder(str(cold))).pins.names() == []


def test_a_pack_that_does_not_read_back(small, tmp_path):
    """A storage that says yes and writes something else: the step is not there."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)
    rule = testing.flip_bit(
        99, testing.Match(kind="write", url="*/cold/*/packs/*", times=1)
    )
    with testing.faults(rule):
        report = orbax_delta.archive(root, cold, steps=[0, 3], move=True)
    assert [step.error is None for step in report.steps] == [False, True]
    assert "does not read back" in str(report.steps[0].error)
    assert listed(cold) == {3}
    assert_restores(root, STEPS)
    assert orbax_delta.archive(root, cold, steps=[0]).ok
    assert_restores(cold, (0, 3))


# --- killed processes -----------------------------------------------------------------

KILLED = """
    import os, signal, sys
    from orbax_delta import archive, store
    real, left = store.Folder.start_write, [int(sys.argv[3])]
    def start_write(folder, key, data):
        pending = real(folder, key, data)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return pending
    store.Folder.start_write = start_write
    report = archive(sys.argv[1], sys.argv[2], steps=[0, 1], move=True)
    print(report.ok)
"""


def killed(root, cold, writes):
    """A process that archives until its last write; what it said."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), root, cold, str(writes)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )


def test_kills(small, tmp_path, record_property):
    """Run again after each SIGKILL, later and later; what was copied stays."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)
    kills = 0
    for writes in (2, 5, 3, 8, 13, 1000):
        ended = killed(root, cold, writes)
        kills += ended.returncode == -signal.SIGKILL
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        assert_restores(root, STEPS)
        assert listed(cold) <= {0, 1}
        assert_restores(cold, listed(cold))
    assert kills >= 3
    assert ended.stdout == "True\n"
    prune_now(root)
    strategies.check_clean(cold, MOVED)
    assert_restores(root, STEPS)
    record_property("kills", kills)


NIGHTLY = """
    import sys, threading
    from orbax_delta import archive, errors
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set())).start()
    tried = 0
    while not over.is_set():
        tried += 1
        try:
            report = archive(sys.argv[1], sys.argv[2], keep_every=2, move=tried % 2)
        except errors.DeltaError as error:
            print(type(error).__name__, error)
            continue
        for step in report.steps:
            print(step.step, step.outcome, type(step.error).__name__, step.error or "")
"""


def test_beside_a_job_that_saves(tmp_path, record_property):
    """A real job saves, deletes and prunes, while another process archives."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    keep = ocp.CheckpointManagerOptions(max_to_keep=6)
    with open_run(root, manager_options=keep, **strategies.LITTLE_OPTIONS) as run:
        run.save(0, little_state(0))
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(NIGHTLY), root, cold],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        ) as nightly:
            for step in range(1, 40):
                run.save(step, little_state(step % 6))
            said = nightly.communicate()[0].splitlines()
        assert nightly.returncode == 0
        allowed = ("NoneType", "ConflictError", "NotFoundError")
        kinds = [line.split()[2] for line in said if line[0].isdigit()]
        assert set(kinds) <= set(allowed), said
        assert "NoneType" in kinds
        for step in run.manager.all_steps():
            assert_same_tree(run.restore(step), little_state(step % 6))
    there = listed(cold)
    assert there
    for step in there:
        assert_same_tree(restored(cold, step), little_state(step % 6))
    assert check.verify(str(root)).ok
    for path in cold.glob("*.orbax-checkpoint-tmp"):
        shutil.rmtree(path)
    strategies.check_clean(cold, there)
    record_property("races", len(kinds))


# --- prunes and deletions beside it ---------------------------------------------------


def test_a_prune_sees_the_pin(small, tmp_path):
    """Before each operation both stores are pruned, and the step deleted at some."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)
    busy = []

    def prune_beside(call, proceed):
        if not busy:
            busy.append(True)
            with call.log.unseen():
                for place in (root, cold):
                    with labelled(f"prune of {place}"):
                        prune_now(place)
            busy.clear()
        return proceed(call)

    rule = testing.Rule(testing.Match(kind=CHANGES), lambda: prune_beside)
    with testing.faults(rule):
        report = orbax_delta.archive(root, cold, steps=MOVED, move=True)
    assert report.ok, report
    assert_restores(root, STEPS)
    assert_restores(cold, MOVED)


def test_a_step_deleted_at_every_operation(small, tmp_path, record_property):
    """And pruned at once: it is in the archive as a whole, or an error names it."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)
    with testing.faults() as log:
        assert orbax_delta.archive(root, cold, steps=MOVED).ok
    tried = range(1, len(log.operations) + 1, 3)
    for number in tried:
        shutil.rmtree(root)
        shutil.rmtree(cold, ignore_errors=True)
        shutil.copytree(small, root)

        def delete(call, proceed):
            with call.log.unseen():
                shutil.rmtree(root / "0", ignore_errors=True)
                prune_now(root)
            return proceed(call)

        rule = testing.Rule(testing.Match(first=number, times=1), lambda: delete)
        with labelled(f"deleted at {log.operations[number - 1]}"):
            try:
                with testing.faults(rule):
                    report = orbax_delta.archive(root, cold, steps=MOVED)
            except NotFoundError:
                assert not cold.exists()
                continue
            errors = [step.error for step in report.steps if step.error]
            assert len(errors) < 2
            assert all(str(one).startswith("step 0 was not") for one in errors)
            assert all(isinstance(one, ConflictError | NotFoundError) for one in errors)
            assert listed(cold) == ({1} if errors else {0, 1})
            assert_restores(cold, listed(cold))
            strategies.check_clean(cold, listed(cold))
    record_property("races", len(tried))


@pytest.mark.parametrize("what", ["file", "target"])
def test_files_of_others_that_go_meanwhile(small, tmp_path, monkeypatch, what):
    """What is copied without the store: an error of the step, nothing is left."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)
    (root / "1" / "notes").write_text("mine")
    real = stepcopies._stream

    def stream(source, target):
        if source.name == "notes":
            if what == "file":
                source.unlink()
            else:
                raise OSError(errno.ENOSPC, "no space left")
        return real(source, target)

    monkeypatch.setattr(stepcopies, "_stream", stream)
    report = orbax_delta.archive(root, cold, steps=[0, 1], move=True)
    kind = ConflictError if what == "file" else StorageError
    assert [type(step.error) for step in report.steps] == [type(None), kind]
    assert {path.name for path in cold.iterdir()} == {STORE, "0"}
    monkeypatch.undo()
    assert orbax_delta.archive(root, cold, steps=[0, 1], move=True).ok
    assert_restores(root, STEPS)


def test_a_prune_that_breaks_the_pins(small, tmp_path):
    """It takes the packs; the step is not called archived."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)

    def break_pins(call, proceed):
        with call.log.unseen():
            store = DeltaStore.open(Folder(str(cold)))
            store.pins.clear()
            prune_now(cold)
        return proceed(call)

    match = testing.Match(kind="write", url="*-tmp/default/part-*", times=1)
    with testing.faults(testing.Rule(match, lambda: break_pins)):
        report = orbax_delta.archive(root, cold, steps=[1], move=True)
    assert isinstance(report.steps[0].error, ConflictError)
    assert "has removed the pin of this process" in str(report.steps[0].error)
    assert listed(cold) == set()
    assert_restores(root, STEPS)
    assert orbax_delta.archive(root, cold, steps=[1], move=True).ok
    assert_restores(root, STEPS)


def test_a_step_saved_again_while_it_is_moved(small, tmp_path):
    """The new one is not deleted."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)

    def save_again(call, proceed):
        with call.log.unseen():
            shutil.rmtree(root / "1")
            with open_run(root, **strategies.LITTLE_OPTIONS) as run:
                run.save(1, little_state(6), force=True)
        return proceed(call)

    match = testing.Match(
        kind="read", url=f"{cold}/1/default/MANIFEST", first=2, times=1
    )
    with testing.faults(testing.Rule(match, lambda: save_again)):
        report = orbax_delta.archive(root, cold, steps=[1], move=True)
    assert isinstance(report.steps[0].error, ConflictError)
    assert str(report.steps[0].error).startswith("step 1 was not moved")
    assert_same_tree(restored(root, 1), little_state(6))
    assert_same_tree(restored(cold, 1), little_state(1))


def test_a_step_deleted_while_it_is_moved(small, tmp_path):
    """Its folder does not come to life again, with a link in it."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)

    def delete(call, proceed):
        with call.log.unseen():
            shutil.rmtree(root / "1")
        return proceed(call)

    match = testing.Match(kind="write", url=f"{root}/1/default/ARCHIVED", times=1)
    with testing.faults(testing.Rule(match, lambda: delete)):
        report = orbax_delta.archive(root, cold, steps=[0, 1], move=True)
    assert [step.error is None for step in report.steps] == [True, False]
    assert "step 1 was not moved" in str(report.steps[1].error)
    assert not (root / "1").exists()
    assert_restores(cold, MOVED)
    assert orbax_delta.archive(cold, root, steps=[1]).ok
    assert_restores(root, STEPS)


def test_a_moved_step_that_is_saved_again(small, tmp_path):
    """Running the move once more, while it is, takes nothing of the new one."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    shutil.copytree(small, root)
    assert orbax_delta.archive(root, cold, steps=[1], move=True).ok

    def save_again(call, proceed):
        with call.log.unseen():
            shutil.rmtree(root / "1")
            with open_run(root, **strategies.LITTLE_OPTIONS) as run:
                run.save(1, little_state(6), force=True)
        return proceed(call)

    match = testing.Match(kind="list", url=f"{root}/1/default/", times=1)
    with testing.faults(testing.Rule(match, lambda: save_again)) as log:
        assert orbax_delta.archive(root, cold, steps=[1], move=True).ok
    assert any(one.url == f"{root}/1/default/" for one in log.operations)
    assert_same_tree(restored(root, 1), little_state(6))
    assert_same_tree(restored(cold, 1), little_state(1))


# --- buckets --------------------------------------------------------------------------


@pytest.fixture(params=["disk to bucket", "bucket to bucket", "bucket to disk"])
def places(request, s3, tmp_path):
    """A root with steps, and where their archive is to be."""
    here, _, there = request.param.partition(" to ")
    root = str(tmp_path / "run") if here == "disk" else buckets.new_url()
    run = Run(root)
    saver = run.handler()
    for step in STEPS:
        run.save(saver, step)
    saver.close()
    cold = str(tmp_path / "cold") if there == "disk" else buckets.new_url()
    return run, Run(cold)


def test_buckets(places, command):
    """Copied, moved, read through the link, brought back; MANIFEST and marker last."""
    run, cold = places
    assert orbax_delta.archive(run.url, cold.url, steps=[0]).ok
    cold.assert_restores([0])
    report = orbax_delta.archive(run.url, cold.url, steps=MOVED, move=True)
    assert [s.outcome for s in report.steps] == ["there", "copied"]
    assert report.ok
    run.assert_restores(STEPS)
    cold.assert_restores(MOVED)
    prune_now(run.url)
    run.assert_restores(STEPS)
    for url in (run.url, cold.url):
        report = check.verify(url)
        assert report.ok
    assert command("ls", cold.url)[0] == command("ls", run.url)[0] == 0
    assert orbax_delta.archive(cold.url, run.url, steps=MOVED).ok
    run.assert_restores(STEPS)
    assert check.verify(run.url).archived == {}
    assert orbax_delta.archive(cold.url, run.url, steps=MOVED, move=True).ok
    cold.assert_restores(MOVED)
    assert check.verify(cold.url).archived == dict.fromkeys("01", run.url)


def test_order_and_cost_in_a_bucket(s3, tmp_path):
    """Packs before the rest, MANIFEST after it, Orbax's markers last; no pack twice."""
    run = Run(str(tmp_path / "run"))
    saver = run.handler()
    for step in STEPS:
        run.save(saver, step)
    saver.close()
    (tmp_path / "run" / "0" / "_CHECKPOINT_METADATA").write_text("{}")
    cold = buckets.new_url()
    with s3.watched() as sent:
        assert orbax_delta.archive(run.url, cold, steps=MOVED).ok
    inside = cold.removeprefix(f"s3://{buckets.BUCKET}/")
    puts = [
        one.key.removeprefix(f"{inside}/")
        for one in sent
        if one.kind in ("PUT", "CREATE") and "/pins/" not in one.key
    ]
    packs = [key for key in puts if "/packs/" in key]
    assert len(packs) == len(set(packs))
    first = [key for key in puts if key.startswith("0/")]
    assert first[0] == "0/_CHECKPOINT_METADATA"
    assert first[1].startswith("0/default/part-")
    assert first[2:] == [
        "0/default/MANIFEST",
        f"0/default/{COMMIT_MARKER}",
        f"0/{COMMIT_MARKER}",
    ]
    assert puts.index(first[0]) > puts.index(packs[0])
    with s3.watched() as sent:
        assert orbax_delta.archive(run.url, cold, steps=MOVED).ok
    assert not {one.kind for one in sent} & {"PUT", "CREATE", "DELETE"}
    assert not any("/packs/" in one.key and one.kind == "GET" for one in sent)


def test_crash_at_every_operation_into_a_bucket(small, tmp_path, s3, record_property):
    """Half a copy is listed as no step by anybody, and the next run goes on with it."""
    root = tmp_path / "run"
    shutil.copytree(small, root)
    with testing.new_life(), testing.faults() as log:
        orbax_delta.archive(root, buckets.new_url(), steps=[1], move=True)
    tried = [one.number for one in log.operations if one.kind in CHANGES]
    for number in tried:
        shutil.rmtree(root)
        shutil.copytree(small, root)
        cold = buckets.new_url()
        with labelled(f"died after {log.operations[number - 1]}"):
            with (
                testing.new_life(),
                testing.faults(testing.crash_at(number, "after")),
                pytest.raises(testing.SimulatedCrash, match="died at operation"),
            ):
                orbax_delta.archive(root, cold, steps=[1], move=True)
            with testing.new_life():
                assert_restores(root, STEPS)
                assert listed(cold) <= {1}
                assert orbax_delta.archive(root, cold, steps=[1], move=True).ok
                assert_restores(root, STEPS)
                Run(cold).assert_restores([1])
                assert check.verify(cold).ok
                for folder in ("1", "1/default"):
                    assert Folder(f"{cold}/{folder}").read(COMMIT_MARKER) is not None
    record_property("crash_points", len(tried))


@pytest.mark.skipif(not buckets.installed("s3fs"), reason=buckets.NEEDS_S3FS)
def test_a_manager_opens_an_archive_in_a_bucket(small, s3, tmp_path):
    """With the markers that it asks for there, and only what has them."""
    root, cold = tmp_path / "run", buckets.new_url()
    shutil.copytree(small, root)
    assert orbax_delta.archive(root, cold, steps=MOVED).ok
    options = ocp.CheckpointManagerOptions(
        temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath
    )
    with open_run(epath.Path(cold), manager_options=options) as run:
        assert sorted(run.manager.all_steps()) == list(MOVED)
        for step in MOVED:
            assert_same_tree(run.restore(step), little_state(step))


def test_an_archive_that_cannot_be_reached(small, s3, tmp_path, monkeypatch):
    """A bucket that refuses: the error names the step and both places."""
    root, cold = tmp_path / "run", buckets.new_url()
    shutil.copytree(small, root)
    assert orbax_delta.archive(root, cold, steps=[0], move=True).ok
    said = rf"step 0.*{root}/0/default.*archive {cold}.*cannot be read"
    with (
        s3.watched(lambda kind, key: "denied"),
        pytest.raises(StorageError, match=said),
    ):
        restored(root, 0)
    assert_restores(root, STEPS)


def test_json_of_a_failure(small, tmp_path, document):
    """The command ends with the exit code of the first error, and says all."""
    root = tmp_path / "run"
    shutil.copytree(small, root)
    full = testing.fail(
        errno.ENOSPC, testing.Match(kind="write", url="*cold/*/packs/*")
    )
    with testing.faults(full):
        code, told = document("archive", root, tmp_path / "cold", "--steps", "0,1")
    assert code == 30
    assert [step["outcome"] for step in told["steps"]] == ["failed", "failed"]
    assert json.dumps(told)
    assert STORE in told["steps"][0]["error"]["message"]
