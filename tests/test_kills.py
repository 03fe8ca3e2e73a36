"""Processes killed at any moment, life after life: every committed step is whole."""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading

import children
import pytest
import second_reader
import strategies

from orbax_delta import check, prune
from orbax_delta.store import DeltaStore, Folder

KINDS = {"before": 260, "within": 260, "bytes": 90_000, "disk": 60, "wall": 250}
"""Kinds of fuses, and the longest of each: some saves."""

HANGS_AFTER_SECONDS = 120


def run(*arguments, around=()):
    """A process of `children` to its end: what it said, its status, its complaints.

    It is ended if this test ends first, and if it hangs.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*around, sys.executable, children.__file__, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        ) as process,
    ):
        watch = threading.Timer(HANGS_AFTER_SECONDS, process.kill)
        watch.start()
        try:
            # Not `communicate`: its standard input stays open for as long as it lives.
            said = process.stdout.read()
            code = process.wait()
        finally:
            watch.cancel()
            process.kill()
        errors.seek(0)
        words = [json.loads(line) for line in said.splitlines() if line[-1:] == "}"]
        return words, code, errors.read()[-3000:]


def live(root, kind, left, saves):
    """One life to its end; returns what it said, and how it ended."""
    settings = json.dumps({"kind": kind, "left": left, "saves": saves})
    return run("train", root, settings)


def steps_on_disk(root):
    """Steps that Orbax has committed."""
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdigit())


def assert_reads(folder, step):
    """The second reader finds the state of a step, bit for bit."""
    found = second_reader.read_step(folder)
    wanted = children.state(step)
    assert {path for (path,) in found} == wanted.keys()
    for (path,), value in found.items():
        if isinstance(value, second_reader.Array):
            assert value.dtype == wanted[path].dtype.name
            assert value.shape == wanted[path].shape
            assert value.data == wanted[path].tobytes(), f"step {step}, {path}"
        else:
            assert children.same_leaf(value, wanted[path])


def assert_whole(root, words):
    """After a life: nothing that it, or an earlier one, has committed is lost."""
    if not root.exists():
        assert "committed" not in words
        return
    steps = steps_on_disk(root)
    committed = [word["committed"] for word in words if "committed" in word]
    assert not committed or steps[-1] >= committed[-1]
    assert not any("wrong" in word for word in words), words
    kept = steps[-children.KEPT_STEPS :]
    if steps:
        report = check.verify(str(root))
        # Half of a folder may be left of what Orbax was deleting.
        deleted = {str(step) for step in steps[: -children.KEPT_STEPS]}
        deleted |= {path.name for path in root.glob("*.orbax-checkpoint-tmp")}
        for problem in report.problems:
            assert problem.steps, problem
            assert set(problem.steps) <= deleted, problem
        assert set(map(str, kept)) <= set(report.whole_steps)
    for step in kept:
        assert_reads(root / str(step) / "default", step)


def lives(root, seed, count):
    """`count` lives that are killed and a last one that is not."""
    chance = random.Random(seed)
    latest = -1
    for number in range(count):
        kind = chance.choice(sorted(KINDS))
        left = chance.randrange(1, KINDS[kind])
        life = f"seed {seed}, life {number}: {kind} {left}"
        words, code, errors = live(root, kind, left, saves=200)
        assert code == -9, f"{life}: {words[-1:]} {errors}"
        assert_whole(root, words)
        steps = steps_on_disk(root) if root.exists() else []
        assert max(steps, default=-1) >= latest, life
        latest = max(steps, default=-1)
    words, code, errors = live(root, "none", 0, saves=4)
    assert (code, words[-1]) == (0, {"closed": True}), errors
    assert_whole(root, words)
    assert steps_on_disk(root)[-1] == latest + 4
    assert len(steps_on_disk(root)) == children.KEPT_STEPS


def assert_swept(root):
    """A prune leaves exactly what is named, and no pin or mark."""
    store = DeltaStore.open(Folder(str(root)))
    prune.execute(store, prune.plan(store))
    assert strategies.packs_on_disk(root) == strategies.packs_named(root)
    assert store.pins.names() == store.condemned.names() == []
    assert list(prune.plan(store).dead) == []


@pytest.mark.parametrize("seed", range(2))
def test_kills(root, seed, record_property):
    """Five kills of one run, then a life in peace."""
    lives(root, seed, 5)
    assert_swept(root)
    record_property("kills", 5)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 105))
def test_many_kills(root, seed, record_property):
    """Twenty kills of one run, then a life in peace."""
    lives(root, seed, 20)
    assert_swept(root)
    record_property("kills", 20)


def test_children_end_with_their_parent(root):
    """A life ends when the other end of its standard input is gone."""
    settings = json.dumps({"kind": "none", "left": 0, "saves": 10_000})
    with subprocess.Popen(
        [sys.executable, children.__file__, "train", str(root), settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == '{"found": []}\n'
            process.stdin.close()
            process.stdout.read()
            assert process.wait(HANGS_AFTER_SECONDS) == -9
        finally:
            process.kill()


# --- a disk that is full ------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """Runs a scenario of `children` on a disk of 3 MB; returns what it said."""
    disk = tmp_path / "disk"
    around = strategies.private_disk(disk, size="3m")

    def fill(scenario):
        words, code, errors = run(scenario, disk, around=around)
        assert code == 0, f"{words[-3:]} {errors}"
        return words

    return fill


def assert_full(word):
    """An error that names the operation and the file, and says that space is gone."""
    message = word["message"]
    if word["kind"] == "OSError":  # Orbax's own files
        assert "No space left" in message, word
    else:
        assert word["kind"] == "StorageError", word
        assert re.search(r"could not \w+ /.*/run/.*: .*No space left", message), word


def test_no_space_left_in_a_save(small_disk):
    """A save that meets a full disk fails clearly; the one after it is right."""
    *failures, last = small_disk("fill_within_a_save")
    assert last["steps"][-1] == last["whole"][-1]
    assert len(failures) > 10
    for word in failures:
        assert_full(word)
    # It ended in all kinds of writes.
    for name in ("packs/", "part-"):
        assert any(name in word["message"] for word in failures), name


def test_only_deletion_helps(small_disk):
    """A disk full of steps: a failed save, a deletion, and the next one has room."""
    *failures, last = small_disk("only_deletion_helps")
    assert len(failures) == 4
    for word in failures:
        assert_full(word)
    assert last["whole"][-1] >= failures[0]["step"]


def test_prune_on_a_full_disk(small_disk):
    """Without a page for its mark a prune says what to do; with one it works."""
    full, little, last = small_disk("prune_on_a_full_disk")
    assert full["dead"] > 0
    assert "make a little room" in full["message"]
    assert "No space left" in full["message"]
    assert little["gone"] == little["dead"] == full["dead"]
    assert last["steps"] == last["whole"] != []
