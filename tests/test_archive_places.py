"""Archives in odd places: under two names, read-only, taken, with other steps."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import textwrap

import orbax.checkpoint as ocp
import pytest
import roots
import strategies
from etils import epath
from strategies import STORE, assert_same_tree, open_run

import orbax_delta
from orbax_delta import check, packcopies
from orbax_delta.errors import (
    ConflictError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from orbax_delta.storefiles import Archived, archived_document, parse_archived

ARCHIVING = """
    import json, sys
    import orbax_delta
    root, target, move = sys.argv[1:]
    report = orbax_delta.archive(root, target, steps=[2, 3], move=move == "move")
    print(json.dumps([[step.outcome, str(step.error or "")] for step in report.steps]))
"""


@pytest.fixture
def cold(tmp_path):
    """Where the archive is to be."""
    return tmp_path / "cold"


def assert_restores(root, steps=roots.STEPS):
    """A manager restores each of these bit for bit."""
    with open_run(root) as run:
        for step in steps:
            assert_same_tree(run.restore(step, roots.state(step)), roots.state(step))


def archived_under(mount, root, target, move):
    """What became of two steps, in a process that has mounted something before."""
    around = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or (
        subprocess.run([*around, "true"], capture_output=True).returncode
    ):
        pytest.skip("no folder can be mounted here")
    script = [sys.executable, "-c", textwrap.dedent(ARCHIVING), str(root), str(target)]
    done = subprocess.run(
        [*around, *script, "move" if move else "copy"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_place_under_two_names(run, tmp_path):
    """Links would lead to themselves; nothing is deleted."""
    alias = tmp_path / "alias"
    alias.mkdir()
    before = strategies.listing(run)
    found = archived_under(f"mount --bind {run} {alias}", run, alias, move=True)
    for outcome, error in found:
        assert outcome == "failed"
        assert "are one place under two names, so nothing was deleted" in error
    after = strategies.listing(run)
    assert {name: after[name] for name in before} == before
    assert not list(run.rglob("ARCHIVED"))
    assert_restores(run)


def test_a_file_url_is_a_path(run, tmp_path):
    """The root itself as a URL is the root, and links hold paths."""
    with pytest.raises(InvalidInputError, match="must lie apart"):
        orbax_delta.archive(run, f"file://{run}", steps=[2], move=True)
    cold = tmp_path / "cold storage"
    url = f"file://{tmp_path}/cold%20storage"
    assert orbax_delta.archive(f"file://{run}/", url, steps=[2], move=True).ok
    link = (run / "2" / "default" / "ARCHIVED").read_bytes()
    assert parse_archived(link, "here").archive == str(cold)
    assert_restores(run)
    assert_restores(cold, [2])


@pytest.mark.parametrize("move", [False, True])
def test_a_root_that_cannot_be_written(run, cold, move):
    """A copy asks for nothing to be written there; a move fails and harms nothing."""
    mount = f"mount --bind {run} {run} && mount -o remount,ro,bind {run}"
    before = strategies.listing(run)
    found = archived_under(mount, run, cold, move=move)
    for outcome, error in found:
        assert outcome == ("failed" if move else "copied")
        assert ("was not moved: could not write" in error) == move
    assert strategies.listing(run) == before
    assert_restores(cold, [2, 3])
    assert check.verify(str(cold)).ok


def test_two_who_copy_a_self_contained_step(tmp_path, cold):
    """There is no store to pin anything in; the second one is told, harming nothing."""
    folder = tmp_path / "alone"
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "final", orbax_delta.DeltaSave(roots.state(1)))
    half = cold / "final.orbax-checkpoint-tmp"
    half.mkdir(parents=True)
    (half / "half").write_text("a copy")
    descriptor = os.open(half, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (step,) = orbax_delta.archive(folder, cold, steps=["final"], move=True).steps
        assert isinstance(step.error, ConflictError)
        assert "another process is copying the step" in str(step.error)
        assert (half / "half").read_text() == "a copy"
        assert check.verify(str(folder)).ok
    finally:
        os.close(descriptor)
    # It was killed: what it has left is no part of the copy.
    assert orbax_delta.archive(folder, cold, steps=["final"], move=True).ok
    assert [path.name for path in cold.iterdir()] == ["final"]
    assert not (cold / "final" / "half").exists()
    assert check.verify(str(cold)).ok


def test_a_step_of_another_store(run, cold, tmp_path):
    """It is left where it is; the others go on."""
    other = roots.make(tmp_path / "other")
    shutil.copytree(other / "2", run / "1")
    report = orbax_delta.archive(run, cold, steps=[1, 2], move=True)
    assert [step.outcome for step in report.steps] == ["failed", "copied"]
    assert isinstance(report.steps[0].error, FormatError)
    assert "the step was copied from another root" in str(report.steps[0].error)
    assert_restores(cold, [2])
    # Without STORE.json nothing is known of any of them, and nothing is written.
    (run / STORE / "STORE.json").write_text("{}")
    with pytest.raises(FormatError, match=r"STORE\.json is not"):
        orbax_delta.archive(run, tmp_path / "new", steps=[3])
    assert not (tmp_path / "new").exists()


def test_a_step_saved_again_after_a_rollback(run, cold):
    """A policy goes on with the others; what the archive has stays as it is."""
    assert orbax_delta.archive(run, cold, older_than=0).ok
    for step in (4, 5):
        shutil.rmtree(run / str(step))
    with open_run(run) as again:
        again.save(4, roots.state(14))
        again.save(6, roots.state(6))
        again.save(7, roots.state(7))
    there = strategies.listing(cold / "4")
    report = orbax_delta.archive(run, cold, older_than=0)
    assert [(step.step, step.outcome) for step in report.steps] == [
        ("2", "there"),
        ("3", "there"),
        ("4", "failed"),
        ("6", "copied"),
    ]
    assert "holds another save than step 4" in str(report.steps[2].error)
    assert strategies.listing(cold / "4") == there
    with pytest.raises(InvalidInputError, match="holds another save than step 4"):
        orbax_delta.archive(run, cold, steps=[4, 6])


def test_a_damaged_step_of_the_archive(run, cold):
    """Is an error of that step, which says where to repair."""
    assert orbax_delta.archive(run, cold, steps=[2]).ok
    (cold / "2" / "default" / "MANIFEST").write_bytes(b"")
    report = orbax_delta.archive(run, cold, steps=[2, 3], move=True)
    assert [step.outcome for step in report.steps] == ["failed", "copied"]
    assert f"`orbax-delta repair {cold}/`" in str(report.steps[0].error)
    assert_restores(run)


def test_a_step_that_this_archive_has_lost(run, cold):
    """Is not said to be elsewhere."""
    assert orbax_delta.archive(run, cold, steps=[2, 3], move=True).ok
    shutil.rmtree(cold / "2")
    (step,) = orbax_delta.archive(run, cold, steps=[2]).steps
    assert isinstance(step.error, NotFoundError)
    assert "which does not hold it any more: put it back" in str(step.error)


def test_a_link_to_what_cannot_be_a_place(run, cold):
    """The error names the step; a fallback passes it over."""
    assert orbax_delta.archive(run, cold, steps=[2, 3, 4], move=True).ok
    for step, place in ((3, "/a\\b"), (4, "//a")):
        path = run / str(step) / "default" / "ARCHIVED"
        link = json.loads(path.read_bytes())
        del link["digest"], link["magic"], link["format_version"]
        odd = Archived(**link | {"archive": place})
        path.write_bytes(archived_document(odd))
        said = rf"step {step}, .* was moved to the archive .*, which cannot be read"
        with pytest.raises((FormatError, StorageError), match=said):
            orbax_delta.DeltaCheckpointHandler().restore(epath.Path(path.parent))
    (run / "5" / "default" / "MANIFEST").unlink()
    with open_run(run) as again:
        args = orbax_delta.DeltaRestore(roots.state(2), on_corruption="fallback")
        assert_same_tree(again.manager.restore(5, args=args), roots.state(2))


def test_a_dry_run_says_what_a_run_does(run, cold, tmp_path, document):
    """Outcome, what is moved, packs and exit code, in every state of a step."""

    def both(*words):
        before = [strategies.listing(place) for place in (run, cold) if place.exists()]
        code, planned = document("archive", *words, "--dry-run")
        assert before == [
            strategies.listing(place) for place in (run, cold) if place.exists()
        ]
        real_code, real = document("archive", *words)
        keys = ("step", "outcome", "moved", "packs_copied", "packs_there")
        said, done = (
            [[step[key] for key in keys] for step in found["steps"]]
            for found in (planned, real)
        )
        renamed = {"copy": "copied", "would fail": "failed"}
        for step in said:
            step[1] = renamed.get(step[1], step[1])
        assert (code, said) == (real_code, done)
        return [step[1:3] for step in done]

    assert both(run, cold, "--steps", " 2, 2 ,") == [["copied", False]]
    assert both(run, cold, "--keep-every", 1) == [
        ["there", False],
        ["copied", False],
        ["copied", False],
    ]
    assert both(run, cold, "--steps", "2,3", "--move") == 2 * [["there", True]]
    assert both(run, cold, "--steps", "2,3", "--move") == 2 * [["there", True]]
    assert both(run, cold, "--steps", "2") == [["there", True]]
    shutil.rmtree(cold / "3")
    assert both(run, cold, "--steps", "2,3") == [["there", True], ["failed", False]]
    folder = tmp_path / "alone"
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "final", orbax_delta.DeltaSave(roots.state(1)))
    words = ("archive", folder, tmp_path / "new", "--steps", "final")
    (step,) = document(*words, "--dry-run")[1]["steps"]
    packs = (folder / "final" / "packs").iterdir()
    assert step["written_bytes"] == sum(pack.stat().st_size for pack in packs)


def test_what_is_remembered_of_packs_is_bounded(run, cold, monkeypatch):
    """However many there are: older ones are looked at again, and all is well."""
    copiers = []
    init = packcopies.PackCopier.__init__

    def watched(self, *given):
        copiers.append(self)
        init(self, *given)

    monkeypatch.setattr(packcopies.PackCopier, "__init__", watched)
    monkeypatch.setattr(packcopies, "MOST_RECORDS", 20)
    for move in (False, True):
        assert orbax_delta.archive(run, cold, older_than=0, move=move).ok
    for copier in copiers:
        known = [len(found.spans) for found in copier._checked.values()]
        assert sum(known) == copier._remembered
        assert sum(known) <= 20 or len(known) == 1
    assert_restores(run)
    assert check.verify(str(cold)).ok
