"""A store that fails at any operation: a save counts or does not, and life goes on.

Unlike a crash, the process lives: the same manager and handler save again, nothing of a
failed save is written once its error is known, and nothing is left over at the end.
"""

import collections
import errno
import os
import shutil

import orbax.checkpoint as ocp
import pytest
import strategies
from strategies import assert_same_tree, labelled, listing, little_state

import orbax_delta
from orbax_delta import testing
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.testing import Match

CHANGES = ("write", "create", "delete", "clear")
ITEM_RENAME, STEP_RENAME = "default", "3"


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A root with steps 1, 2 and some dead packs, to be copied."""
    root = tmp_path_factory.mktemp("made") / "run"
    with pytest.MonkeyPatch.context() as patch:
        strategies.skip_disk_sync(patch)
        for steps in ((0,), (1, 2)):  # two processes that share no pack
            with testing.new_life(), open_little(root) as run:
                for step in steps:
                    run.save(step, little_state(step))
        shutil.rmtree(root / "0")
    return root


@pytest.fixture
def root(made, tmp_path):
    """A copy of that root."""
    return copy_of(made, tmp_path)


def copy_of(made, folder):
    """A new copy of `made` in `folder`; what it replaces is gone."""
    root = folder / "run"
    if root.exists():
        shutil.rmtree(root)
    return shutil.copytree(made, root)


def open_little(root, **options):
    """A manager with small chunks and packs."""
    return strategies.open_run(root, **{**strategies.LITTLE_OPTIONS, **options})


# --- one failure anywhere -----------------------------------------------------------


def save_with_faults(run, root, step, *rules):
    """Save a step under some faults; the error, if it failed, and the log.

    Nothing of the failed save may happen once its error was raised: no operation
    begins, and none that had begun still takes effect.
    """
    error = None
    with testing.faults(*rules) as log:
        try:
            run.save(step, little_state(step))
        except orbax_delta.StorageError as caught:
            error = caught
        count, files = len(log.operations), our_files(root)
    assert len(log.operations) == count
    assert our_files(root) == files
    return error, log


def our_files(root):
    """The files of this package: threads of Orbax may still be at its own."""
    return {
        name: digest
        for name, digest in listing(root).items()
        if name.startswith(strategies.STORE)
        or name.rpartition("/")[2].startswith(("part-", "MANIFEST"))
    }


def check_goes_on(run, root, failed, *, reload):
    """The same manager saves on, and every step that counts is right, and no other.

    Args:
        run: The manager.
        root: Its folder.
        failed: Step whose save failed; None: it did not.
        reload: Whether the manager is told to look at the disk again.
    """
    steps = [1, 2, 3]
    if failed is not None:
        assert not (root / str(failed)).exists()
        steps.remove(failed)
        if reload:
            run.manager.reload()
            assert sorted(run.manager.all_steps()) == steps
            steps.append(failed)  # its number can be used again at once
            run.save(failed, little_state(failed))
    for step in (4, 5):
        run.save(step, little_state(step))
        steps.append(step)
    for step in steps:
        with labelled(f"step {step}"):
            assert_same_tree(run.restore(step), little_state(step))
    return steps


def name_of(operation, root):
    """What an operation is about, apart from random names."""
    key = operation.url.removeprefix(f"{root}/")
    known = (
        *("packs/", "pins/", "condemned/", "bases/", "part-", "MANIFEST", "STORE"),
        "default",
    )
    about = next((word for word in known if word in key), key or "the root")
    return f"{operation.kind} {about}"


def operations_of_a_save(root, **options):
    """The operations of the save of step 3 by a new process, in order."""
    with testing.new_life(), open_little(root, **options) as run:
        error, log = save_with_faults(run, root, 3)
    assert error is None
    return log.operations


def refused(operation):
    """It has no effect: no space for what is to be written, otherwise a bad disk."""
    code = errno.ENOSPC if operation.kind in ("write", "create") else errno.EIO
    return testing.fail(code, Match(first=operation.number, times=1))


def unacknowledged(operation):
    """It takes effect, and the caller is told that it failed."""
    match = Match(first=operation.number, times=1)
    return testing.lose_acknowledgement(errno.EIO, match)


MUST_FAIL = {
    *("read STORE", "write pins/", "list condemned/", "list packs/", "write packs/"),
    *("write part-", "write MANIFEST", "read pins/"),
    *("read MANIFEST", "list default"),
}
"""Up to Orbax's first rename, before which it has the step looked at once more.
All else only warns, and so does the same in tidying up."""


@pytest.mark.parametrize("rule", [refused, unacknowledged])
def test_one_failure_at_every_operation(made, tmp_path, record_property, rule):
    """The save fails and leaves nothing, or the step is there."""
    operations = operations_of_a_save(copy_of(made, tmp_path))
    if rule is unacknowledged:
        operations = [one for one in operations if one.kind in CHANGES]
    outcomes = collections.defaultdict(set)
    for operation in operations:
        root = copy_of(made, tmp_path)
        name = name_of(operation, tmp_path / "run")
        with (
            labelled(f"{rule.__name__} {operation.number}: {operation}"),
            testing.new_life(),
        ):
            with open_little(root) as run:
                error, _ = save_with_faults(run, root, 3, rule(operation))
                outcomes[name].add(error is not None)
                failed = None if error is None else 3
                reload = operation.number % 2 == 0
                steps = check_goes_on(run, root, failed, reload=reload)
            strategies.check_clean(root, steps)
    for name in MUST_FAIL & outcomes.keys():
        assert True in outcomes[name], name
    assert {name for name in outcomes if True in outcomes[name]} <= MUST_FAIL
    record_property("failures", len(operations))


def test_one_failure_in_a_new_root(tmp_path, record_property):
    """The same for the very first save, which makes the store."""
    with testing.new_life(), open_little(tmp_path / "whole") as run:
        _, log = save_with_faults(run, tmp_path / "whole", 0)
    count = 0
    for operation in log.operations:
        for rule in (refused, unacknowledged):
            if rule is unacknowledged and operation.kind not in CHANGES:
                continue
            count += 1
            root = tmp_path / "run"
            with (
                labelled(f"{rule.__name__} {operation.number}: {operation}"),
                testing.new_life(),
            ):
                with open_little(root) as run:
                    error, _ = save_with_faults(run, root, 0, rule(operation))
                    assert (root / "0").exists() == (error is None)
                    run.manager.reload()
                    for step in range(0 if error else 1, 3):
                        run.save(step, little_state(step))
                    for step in range(3):
                        assert_same_tree(run.restore(step), little_state(step))
                strategies.check_clean(root, range(3))
            shutil.rmtree(root)
    record_property("failures", count)


def test_one_failure_out_of_order(made, tmp_path, record_property):
    """Packs land in any order, one of them fails: none lands after the error."""
    small = {"pack_bytes": 1024}
    operations = operations_of_a_save(copy_of(made, tmp_path), **small)
    packs = [op for op in operations if op.kind == "write" and "packs/" in op.url]
    assert len(packs) >= 4
    for operation in packs:
        root = copy_of(made, tmp_path)
        with testing.new_life(), open_little(root, **small) as run:
            rules = [refused(operation), testing.out_of_order()]
            error, _ = save_with_faults(run, root, 3, *rules)
            assert error is not None
            check_goes_on(run, root, 3, reload=True)
    record_property("failures", len(packs))


# --- failures that last -------------------------------------------------------------


OUTAGES = {
    "no space": (errno.ENOSPC, ("write", "create")),
    "read-only": (errno.EROFS, CHANGES),
    "no answer": (errno.EIO, None),
}


@pytest.mark.parametrize("outage", OUTAGES)
def test_failures_that_last(made, tmp_path, record_property, outage):
    """From some operation on nothing works for two saves; then it does again."""
    code, kinds = OUTAGES[outage]
    whole = copy_of(made, tmp_path)
    operations = [
        one for one in operations_of_a_save(whole) if kinds is None or one.kind in kinds
    ]
    count, before = 0, None
    for first, operation in enumerate(operations, 1):
        name = name_of(operation, whole)
        if name == before:
            continue  # one of several reads or deletions of the same kind
        before, count = name, count + 1
        root = copy_of(made, tmp_path)
        rule = testing.fail(code, Match(kind=kinds, first=first))
        with labelled(f"{outage} from {first}: {operation}"), testing.new_life():
            check_outage(root, rule, os.strerror(code))
    record_property("failures", count)


def check_outage(root, rule, reason):
    """Two saves during the outage, two after it; then all is as if it had not been."""
    with open_little(root) as run:
        saved = []
        with testing.faults(rule):
            for step in (3, 4):
                try:
                    run.save(step, little_state(step))
                    saved.append(step)
                except orbax_delta.StorageError as error:
                    saved.append(reason in str(error))
        # The first save counts if the trouble began after its commit.
        assert saved in ([True, True], [3, True])
        run.manager.reload()
        steps = [1, 2, *(step for step in saved if step is not True)]
        assert sorted(run.manager.all_steps()) == steps
        for step in (5, 6):
            run.save(step, little_state(step))
        for step in (*steps, 5, 6):
            assert_same_tree(run.restore(step), little_state(step))
    strategies.check_clean(root, [*steps, 5, 6])


# --- the MANIFEST -------------------------------------------------------------------


def left_manifests(root):
    """MANIFESTs in folders of saves that were not committed."""
    return list(root.glob(f"*tmp*/*/{MANIFEST_NAME}"))


@pytest.mark.parametrize("what", ["write", "pin"])
def test_a_manifest_of_a_failed_save_is_withdrawn(root, what):
    """A save that failed counts for nobody, even if its MANIFEST was written."""
    rule = {
        "write": testing.lose_acknowledgement(
            errno.EIO, Match(kind="write", url="*/3.*/MANIFEST", times=1)
        ),
        "pin": testing.fail(errno.EIO, Match(kind="read", url="*/pins/*", times=1)),
    }[what]
    with testing.new_life(), open_little(root) as run:
        error, log = save_with_faults(run, root, 3, rule)
        assert "Input/output error" in str(error)
        assert any(op.kind == "write" and "MANIFEST" in op.url for op in log.operations)
        assert left_manifests(root) == []


def test_a_manifest_that_cannot_be_withdrawn(root):
    """It lies in a folder that never becomes a step, and goes with the next try."""
    rules = [
        testing.lose_acknowledgement(
            errno.EIO, Match(kind="write", url="*/3.*/MANIFEST", times=1)
        ),
        testing.fail(errno.EIO, Match(kind="delete", url="*/3.*/MANIFEST", times=1)),
    ]
    with testing.new_life():
        with open_little(root) as run:
            error, _ = save_with_faults(run, root, 3, *rules)
            assert "could not write" in str(error)
            assert len(left_manifests(root)) == 1
            run.manager.reload()
            assert sorted(run.manager.all_steps()) == [1, 2]
            with open_little(root) as other:
                assert sorted(other.manager.all_steps()) == [1, 2]
            steps = check_goes_on(run, root, 3, reload=True)
            assert left_manifests(root) == []
        strategies.check_clean(root, steps)


# --- failures that are not the store's ----------------------------------------------


def fail_once(monkeypatch, owner, name, applies, error):
    """The first call of `owner.name` that `applies` raises; tells whether it did."""
    original = getattr(owner, name)
    raised = []

    def failing(*args, **kwargs):
        if not raised and applies(*args):
            raised.append(args)
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return raised


@pytest.mark.parametrize("target", [ITEM_RENAME, STEP_RENAME])
@pytest.mark.parametrize("reload", [True, False])
def test_orbax_cannot_rename(root, monkeypatch, target, reload):
    """The handler had done its part; the step does not count, the next one does."""
    error = OSError(errno.EIO, "cannot rename")
    with testing.new_life():
        with open_little(root) as run:
            raised = fail_once(
                monkeypatch,
                os,
                "rename",
                lambda source, final: os.path.basename(final) == target,
                error,
            )
            with pytest.raises(OSError, match="cannot rename"):
                run.save(3, little_state(3))
            assert len(raised) == 1
            steps = check_goes_on(run, root, 3, reload=reload)
        for left in root.glob("*tmp*"):
            shutil.rmtree(left)
        strategies.check_clean(root, steps)


@pytest.mark.parametrize("reload", [True, False])
def test_finalize_fails(root, monkeypatch, reload):
    """The MANIFEST cannot be read back once: the step does not count."""
    with testing.new_life():
        with open_little(root) as run:
            raised = fail_once(
                monkeypatch,
                run.handler,
                "finalize",
                lambda directory: True,
                orbax_delta.StorageError("could not read MANIFEST: no answer"),
            )
            with pytest.raises(orbax_delta.StorageError, match="no answer"):
                run.save(3, little_state(3))
            assert len(raised) == 1
            steps = check_goes_on(run, root, 3, reload=reload)
        for left in root.glob("*tmp*"):
            shutil.rmtree(left)
        strategies.check_clean(root, steps)


def test_a_bad_leaf(root):
    """The blocking phase refuses: no operation of the store, the next save is right."""
    options = strategies.refusing_options()
    with testing.new_life():
        with open_little(root, manager_options=options) as run:
            args = ocp.args.StandardSave({"bad": object(), "w": 1})
            with (
                testing.faults() as log,
                pytest.raises(orbax_delta.InvalidInputError, match="bad"),
            ):
                run.manager.save(3, args=args)
            assert log.operations == []
            steps = check_goes_on(run, root, 3, reload=True)
        strategies.check_clean(root, steps)


def test_failures_in_a_row(root):
    """Every save fails at another place; the one that does not is right."""
    kinds = ("*/pins/*", "*/packs/*", "*/part-*", "*/MANIFEST", "*/packs/*-0")
    with testing.new_life():
        with open_little(root) as run:
            for step, url in enumerate(kinds, 3):
                rule = testing.fail(errno.ENOSPC, Match(kind="write", url=url, times=1))
                error, _ = save_with_faults(run, root, step, rule)
                assert "No space left" in str(error)
                run.manager.reload()
            run.save(3, little_state(3))
            run.save(4, little_state(4))
            for step in range(1, 5):
                assert_same_tree(run.restore(step), little_state(step))
        strategies.check_clean(root, range(1, 5))
