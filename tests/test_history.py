"""The history: across restarts, deletions, processes and failures; what it must not do.

Its fields are held against FORMAT.md in `test_format_document`.
"""

import dataclasses
import errno
import json
import logging
import os
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from processes import Job
from strategies import STORE, open_run

import orbax_delta
from orbax_delta import blocking, costs, errors, history, jsontext, owners, testing
from orbax_delta.history import HistoryLog, RestoreCost, SaveCost
from orbax_delta.manifests import encode_manifest
from orbax_delta.store import Folder


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def read(root):
    """What the files of a root say."""
    return history.read(Folder(str(root)))


def files(root):
    """The files of a root's history."""
    folder = root / STORE / "history"
    return sorted(folder.iterdir()) if folder.exists() else []


def save_cost(number):
    """A save that never was."""
    return SaveCost(
        attempt=f"{number:032x}",
        step=str(number),
        item="default",
        started=1.7e9 + number + 0.25,
        blocking_seconds=0.125,
        total_seconds=2.5,
        stage_seconds={"code": 1.0},
        full_bytes=10,
        written_bytes=5,
        read_bytes=0,
        chunks_by_form={"planes": 1},
        bytes_by_form={"planes": 5},
    )


def test_what_a_save_is_remembered_by(root):
    """The report's figures, when and where; times to a microsecond."""
    with open_run(root) as run:
        run.save(7, {"w": np.arange(9.0)})
        report = run.handler.last_save_report
    (cost,) = read(root).saves
    manifest = strategies.read_manifest(root / "7/default/MANIFEST")
    assert (cost.step, cost.item, cost.attempt) == ("7", "default", manifest.attempt)
    assert cost.host == owners.this_process().host_name
    assert cost.processes == 1
    assert cost.started == pytest.approx(manifest.wall_time, abs=1e-6)
    for name in ("blocking_seconds", "total_seconds"):
        assert getattr(cost, name) == pytest.approx(getattr(report, name), abs=1e-6)
    for name in ("full_bytes", "written_bytes", "read_bytes", "bytes_by_form"):
        assert getattr(cost, name) == getattr(report, name)
    assert cost.stage_seconds.keys() == report.stage_seconds.keys()


def test_it_outlives_steps_and_processes(root):
    """Steps are deleted, jobs restart, a restore comes between: all saves are known."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    for life in range(3):
        with open_run(root, manager_options=options) as run:
            if life:
                run.restore(2 * life - 1)
            for step in (2 * life, 2 * life + 1):
                run.save(step, {"w": np.arange(900.0) + step})
    shutil.rmtree(root / "5")
    kept = read(root)
    assert [cost.step for cost in kept.saves] == ["0", "1", "2", "3", "4", "5"]
    assert [cost.step for cost in kept.restores] == ["1", "3"]
    assert kept.restores[0].restored_bytes == 7200
    assert kept.restores[0].total_seconds > 0
    assert len(files(root)) == 3
    assert not kept.damaged
    known = costs.read(str(root))
    assert [cost.step for cost in known.saves] == ["0", "1", "2", "3", "4", "5"]


def test_manifests_tell_what_the_history_does_not(root):
    """A run that an earlier version saved, or a job that died before the line."""
    with open_run(root) as run:
        for step in range(3):
            run.save(step, {"w": np.arange(900.0) + step})
    whole = costs.read(str(root)).saves
    files(root)[0].unlink()
    assert not read(root).saves
    told = costs.read(str(root)).saves
    assert [cost.step for cost in told] == ["0", "1", "2"]
    # To a microsecond, as the lines are.
    assert [dataclasses.replace(cost, host="", processes=0) for cost in whole] == [
        history.parse_line(history.encode_line(cost)) for cost in told
    ]


def test_a_repaired_step_is_one_save(root):
    """A repair publishes a new attempt (its MANIFEST is made here) of a known save."""
    with open_run(root, keep_bases=1) as run:
        for step in range(2):
            run.save(step, {"w": np.arange(900.0) + step})
    path = root / "0/default/MANIFEST"
    before = strategies.read_manifest(path)
    part = dataclasses.replace(before.parts[0], name=f"part-{'0f' * 16}-p0")
    again = dataclasses.replace(before, attempt="0f" * 16, parts=(part,))
    path.write_bytes(encode_manifest(again))
    assert [cost.step for cost in costs.read(str(root)).saves] == ["0", "1"]


def test_files_are_short(root):
    """After so many lines the next file begins, and nothing is lost between them."""
    folder, log = Folder(str(root)), HistoryLog()
    for number in range(3 * history.FILE_LINES + 5):
        log.saved(save_cost(number))
        log.write(folder)
    log.write(folder)
    lines = [len(path.read_bytes().splitlines()) for path in files(root)]
    assert lines == [history.FILE_LINES] * 3 + [5]
    assert read(root).saves == [save_cost(number) for number in range(sum(lines))]


def test_what_a_full_disk_refuses_comes_later(root):
    """Lines wait, but not for ever: memory stays bounded."""
    folder, log = Folder(str(root)), HistoryLog()
    refuse = testing.fail(errno.ENOSPC, testing.Match(url="*history/*"))
    with testing.faults(refuse):
        for number in range(3):
            log.saved(save_cost(number))
            with pytest.raises(errors.StorageError, match=r"history/.*No space left"):
                log.write(folder)
    log.write(folder)
    assert len(read(root).saves) == 3
    with testing.faults(refuse):
        for number in range(3, 1000):
            log.saved(save_cost(number))
        assert len(log._lines) <= 2 * history.FILE_LINES


@pytest.mark.parametrize("where", ["*history/*", "*STORE.json"])
def test_it_never_fails_a_save(root, caplog, where):
    """The storage refuses the history, or what is written before it."""
    caplog.set_level(logging.WARNING, "orbax_delta")
    with open_run(root) as run:
        run.save(0, {"w": np.arange(9.0)})
        refused = testing.Match(url=where, kind="write")
        with testing.faults(testing.fail(errno.EACCES, refused)):
            run.save(1, {"w": np.arange(9.0) + 1})
        assert "what saves cost could not be noted" in caplog.text
        run.save(2, {"w": np.arange(9.0) + 2})
    assert [cost.step for cost in read(root).saves] == ["0", "1", "2"]


def test_damaged_lines_do_not_concern_others(root):
    """A flipped bit costs one line; what came later is passed over."""
    with open_run(root) as run:
        for step in range(4):
            run.save(step, {"w": np.arange(9.0) + step})
    (path,) = files(root)
    lines = path.read_bytes().splitlines()
    lines[1] = lines[1].replace(b'"step": "1"', b'"step": "9"')
    later = {"format_version": 1, "kind": "from the future"}
    newer = {"format_version": 2, "kind": "save"}
    lines += [b"garbled", json.dumps(newer).encode(), b"[1]"]
    lines.append(jsontext.sealed(later))
    path.write_bytes(b"\n".join(lines))
    (path.parent / ".nfs01").write_bytes(b"of the file system")
    kept = read(root)
    assert [cost.step for cost in kept.saves] == ["0", "2", "3"]
    assert len(kept.damaged) == 3
    assert "line 2 of" in kept.damaged[0]
    assert "its digest is" in kept.damaged[0]
    known = costs.read(str(root))
    assert len(known.saves) == 4
    assert known.exit_code == 0


@pytest.mark.parametrize(
    "change",
    [
        {"blocking_us": -1},
        {"blocking_us": 1.5},
        {"total_us": {}},
        {"stage_us": 3},
        {"stage_us": {"code": "1"}},
        {"step": 7},
        {"written_bytes": 1 << 63},
        {"item": None},
        {"started_us": (1 << 63) - 1},
    ],
    ids=str,
)
def test_fields_that_are_none(change):
    """Whoever seals them: a line is what its fields may be, or damaged."""
    document = json.loads(history.encode_line(save_cost(1))) | change
    with pytest.raises(ValueError, match=r"its field \w+ is"):
        history.parse_line(jsontext.sealed(document))


def test_lines_read_back():
    """Both kinds, as they were."""
    restore = RestoreCost(
        step="3",
        item="",
        started=1.75e9,
        host='a\n"b"\\ ü',
        total_seconds=0.5,
        restored_bytes=1,
        reused_bytes=0,
        read_bytes=1,
    )
    for cost in (save_cost(1), restore):
        line = history.encode_line(cost)
        assert line.count(b"\n") == 1
        assert history.parse_line(line) == cost


def test_a_fork_does_not_write_its_parents_file(root, monkeypatch):
    """The child of a process has a copy of its log, and begins another file."""
    folder, log = Folder(str(root)), HistoryLog()
    log.saved(save_cost(0))
    log.write(folder)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    log.saved(save_cost(1))
    log.write(folder)
    assert [path.name for path in files(root)] == [f"{n:032x}" for n in range(2)]
    assert [cost.step for cost in read(root).saves] == ["0", "1"]


def test_who_only_restores_writes_nothing(root):
    """An evaluator may have no right to."""
    with open_run(root) as run:
        run.save(0, {"w": np.arange(9.0)})
    before = strategies.listing(root)
    for _ in range(20):
        handler = orbax_delta.DeltaCheckpointHandler()
        handler.restore(strategies.Path(root / "0/default"))
        handler.close()
    changed = {
        name
        for name, digest in strategies.listing(root).items()
        if before.get(name) != digest
    }
    assert not changed


def test_a_self_contained_checkpoint_has_none(tmp_path):
    """There is no root to keep it for; its MANIFEST tells."""
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        checkpointer.save(
            tmp_path / "final", args=orbax_delta.DeltaSave({"w": np.arange(9.0)})
        )
    assert not list(tmp_path.rglob("history"))
    assert [cost.step for cost in costs.read(str(tmp_path)).saves] == ["final"]


def test_full_saves_are_told_from_others(root):
    """By whether they build on anything that was stored before."""
    with open_run(root) as run:
        run.save(0, {"w": np.arange(900.0), "zero": np.zeros(50)})
        run.save(1, {"w": np.arange(900.0), "zero": np.zeros(50)})
    assert [cost.is_full for cost in read(root).saves] == [True, False]


def test_several_items_of_a_step(tmp_path):
    """Each item has its file; a step's cost is that of all of them."""
    root = tmp_path / "run"
    registry = orbax_delta.handler_registry(item=("params", "opt"))
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in range(2):
            trees = {
                name: orbax_delta.DeltaSave({"w": np.arange(99.0) + step})
                for name in ("params", "opt")
            }
            manager.save(step, args=ocp.args.Composite(**trees))
            manager.wait_until_finished()
    known = costs.read(str(root))
    assert [(c.step, c.item) for c in known.saves] in (
        [("0", "opt"), ("0", "params"), ("1", "opt"), ("1", "params")],
        [("0", "params"), ("0", "opt"), ("1", "params"), ("1", "opt")],
    )
    steps = costs.by_step(known.saves)
    assert [step.step for step in steps] == ["0", "1"]
    for step in steps:
        parts = [cost for cost in known.saves if cost.step == step.step]
        assert step.written_bytes == sum(cost.written_bytes for cost in parts)
        assert step.blocking_seconds == sum(cost.blocking_seconds for cost in parts)
        assert step.total_seconds >= max(cost.total_seconds for cost in parts)
    assert [step.is_full for step in steps] == [True, False]


def test_two_processes_write_one_file(root, tmp_path):
    """The primary notes the save of both; the time is that of the slower one."""
    with Job(2, tmp_path / "job") as job:
        job.do("open", root=str(root))
        for step in range(2):
            answers = job.do("save", step=step, version=step, mesh="x")
            assert [answer["error"] for answer in answers] == [None, None]
        job.do("restore", step=1, mesh="x")
        answers = job.do("save", step=2, version=2, mesh="x")
        job.do("close")
    kept = read(root)
    assert [(cost.step, cost.processes) for cost in kept.saves] == [
        *(("0", 2), ("1", 2), ("2", 2)),
    ]
    assert [cost.step for cost in kept.restores] == ["1"]
    assert len(files(root)) == 1
    for answer in answers:
        report = answer["report"]
        assert kept.saves[2].written_bytes == report["written_bytes"]


def test_a_hurried_save_is_noted_when_there_is_time(root, monkeypatch):
    """Before a preemption nothing is written but what must be; a manager closes."""
    prepare = blocking.prepare
    with open_run(root) as run:
        run.save(0, {"w": np.arange(9.0)})
        with monkeypatch.context() as patch:
            patch.setattr(
                blocking,
                "prepare",
                lambda *args, **named: prepare(*args, **named | {"hurried": True}),
            )
            run.save(1, {"w": np.arange(9.0) + 1})
        assert [cost.step for cost in read(root).saves] == ["0"]
    assert [cost.step for cost in read(root).saves] == ["0", "1"]
