"""Drills with real processes: one fails, is late, disagrees, is killed, is preempted.

After each of them every process knows what happened and to whom, the next save is
right, every committed step is whole, and nothing is left behind in the coordination
service or, once pruned, in the store. No duration is asserted; a table shows them.
"""

import contextlib
import re
import shutil
import signal

import pytest
import strategies
from expected import assert_restored
from processes import Job

TABLE = "table: seconds from save() until all processes but the held one had the error"
GRACE = "table: seconds that the save of a preempted job took"
ENDS = "table: seconds from SIGKILL until every other process had ended"

MESH = "mixed"
SIZE = 4
OTHER = 2
"""The process that is to blame, unless it is the primary."""

HOLDS_MANIFEST = {"rule": "hold", "kind": "write", "url": "*tmp/MANIFEST"}
PATIENCE = 5
"""`vote_timeout` where somebody is kept waiting on purpose; others may be slow."""


@pytest.fixture(scope="module")
def shared_job(tmp_path_factory):
    """One job for all drills that it survives; a function that gives it."""
    started = []

    def give():
        if not started or not started[-1].is_alive:
            started.append(Job(SIZE, tmp_path_factory.mktemp("job")))
        return started[-1]

    yield give
    for job in started:
        if job.is_alive:
            job.close()


@pytest.fixture
def job(shared_job):
    """A job of four; a drill that fails ends it."""
    return shared_job()


def good_save(job, step):
    """A save that goes well everywhere."""
    answers = job.do("save", step=step, version=step, mesh=MESH)
    assert [answer["error"] for answer in answers] == [None] * job.size
    return answers


def good_restore(job, step):
    """A restore, bit by bit."""
    assert_restored(job.do("restore", step=step, mesh=MESH), step)


@contextlib.contextmanager
def drill(job, root, *, steps=(0, 2), **during):
    """Around a save of step 1 with trouble: one before it, one after, all in order."""
    try:
        job.do("open", root=str(root))
        good_save(job, 0)
        if during:
            job.do("close")
            job.do("open", root=str(root), **during)
        yield
        job.do("mend")
        good_save(job, 2)
        assert job.do("keys") == [{"keys": []}] * job.size
        for step in steps:
            good_restore(job, step)
        job.do("close")
    except BaseException:
        job.kill_all()  # the next drill begins with another
        raise
    strategies.check_clean(root, steps)


def assert_all_failed(answers, culprit, cause, *, kind, where="wait"):
    """Everybody has an error of this kind that names the cause, and whose it is."""
    for rank, answer in enumerate(answers):
        error = answer["error"]
        assert error is not None, f"process {rank} knows of nothing"
        assert (error["kind"], answer["where"]) == (kind, where), (rank, error)
        assert re.search(cause, error["message"]), (rank, error)
        if rank != culprit and culprit is not None:
            assert f"process {culprit}" in error["message"], (rank, error)


def entered(record_property, name, culprit, answers):
    """A row of the table."""
    raised = max(answer["seconds"] for answer in answers)
    known = max(answer["handler_seconds"] or answer["seconds"] for answer in answers)
    who = {None: "all", 0: "the primary"}.get(culprit, f"process {culprit}")
    row = {
        "drill": name,
        "whose": who,
        "known": f"{known:.2f}",
        "raised by Orbax": f"{raised:.2f}",
    }
    record_property(TABLE, row)
    record_property("failures", 1)


# --- the state does not fit -----------------------------------------------------------


def test_a_leaf_that_nobody_can_store(job, root, record_property):
    """Alike on all processes: raised by `save()` itself, at once."""
    with drill(job, root):
        answers = job.do("save", step=1, version=1, mesh=MESH, edit="odd leaf")
        assert_all_failed(
            answers, None, r"leaf odd is a builtins\.object", where="save",
            kind="InvalidInputError",
        )  # fmt: skip
        entered(record_property, "a leaf that cannot be stored", None, answers)


@pytest.mark.parametrize("culprit", [0, OTHER])
@pytest.mark.parametrize(
    ("edit", "kind", "cause"),
    [
        ("odd leaf", "InvalidInputError", r"leaf odd is a builtins\.object"),
        ("extra leaf", "DisagreementError", "not that of the primary: 1[01] leaves"),
        ("other dtype", "DisagreementError", "not that of the primary.*leaf.* host"),
    ],
)
def test_a_tree_that_one_process_has_wrong(
    job, root, edit, kind, cause, culprit, record_property
):
    """No process leaves the others waiting; who differs from the primary is named."""
    with drill(job, root):
        wrong = {culprit: {"edit": edit}}
        answers = job.do("save", wrong, step=1, version=1, mesh=MESH)
        # Where the primary is the odd one all others differ from it.
        named = culprit if culprit or edit == "odd leaf" else None
        assert_all_failed(answers, named, cause, kind=kind)
        entered(record_property, edit, culprit, answers)


def test_values_that_one_process_has_otherwise(job, root):
    """Of what is on the hosts the primary's counts, whole, as with Orbax."""
    with drill(job, root, steps=(0, 1, 2)):
        wrong = {OTHER: {"edit": "other values"}}
        answers = job.do("save", wrong, step=1, version=1, mesh=MESH)
        assert [answer["error"] for answer in answers] == [None] * SIZE


# --- the storage of one process fails -------------------------------------------------


@pytest.mark.parametrize(
    ("name", "culprit", "url"),
    [
        ("cannot write a pin", OTHER, "*/pins/*"),
        ("cannot write a pack", OTHER, "*/packs/*"),
        ("cannot write a pack", 0, "*/packs/*"),
        ("cannot write a part", OTHER, "*/part-*"),
        ("cannot write the MANIFEST", 0, "*tmp/MANIFEST"),
    ],
)
def test_a_store_that_fails_one_process(job, root, name, culprit, url, record_property):
    """The error of one is the error of all, with its words."""
    with drill(job, root):
        rule = {"rule": "fail", "kind": "write", "url": url}
        job.do("break", {culprit: {"rules": [rule]}})
        answers = job.do("save", step=1, version=1, mesh=MESH)
        words = f"could not write .*{url.strip('*')}.*Input/output error"
        assert_all_failed(answers, culprit, words, kind="StorageError")
        entered(record_property, name, culprit, answers)


def test_a_write_that_lands_in_the_next_attempt(job, root, record_property):
    """What a failed attempt still writes never becomes part of the next one."""
    with drill(job, root, steps=(0, 1, 2)):
        rules = [
            {"rule": "late", "kind": "write", "url": url}
            for url in ("*/packs/*", "*/part-*")
        ]
        # The pack that fails ends the first attempt; its part fails in the second.
        job.do("break", {OTHER: {"rules": rules}})
        for _ in range(2):
            answers = job.do("save", step=1, version=1, mesh=MESH)
            assert_all_failed(answers, OTHER, "Input/output error", kind="StorageError")
        good_save(job, 1)
    stray = {path.name for path in (root / "1/default").glob("part-*")}
    named = {part.name for part in strategies.read_step(root, 1).manifest.parts}
    assert named < stray
    record_property("failures", 2)


# --- somebody is late -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("culprit", "url"), [(OTHER, "*/packs/*"), (OTHER, "*/part-*"), (0, "*/packs/*")]
)
def test_a_process_that_is_held_up(job, root, culprit, url, record_property):
    """Nobody waits longer than `vote_timeout`, and the late one gives up too."""
    with drill(job, root, vote_timeout=PATIENCE):
        rule = {"rule": "hold", "kind": "write", "url": url, "times": 1}
        job.do("break", {culprit: {"rules": [rule]}})
        job.tell("save", step=1, version=1, mesh=MESH)
        job.await_note(culprit, "held")
        others = [rank for rank in range(SIZE) if rank != culprit]
        for rank in others:
            job.await_note(rank, "failed")
        # Orbax tells its callers only when all processes are at its barrier.
        job.release(culprit)
        answers = job.hear(range(SIZE))
        words = f"process {culprit} did not answer within {PATIENCE} s"
        assert_all_failed(answers, None, words, kind="PeerError")
        entered(record_property, "held up", culprit, [answers[rank] for rank in others])


@pytest.mark.parametrize(
    "held",
    [
        {"rules": [{**HOLDS_MANIFEST, "rule": "hold after"}]},
        {"decision": "wait"},  # with all checks behind it
    ],
)
def test_the_primary_comes_too_late_with_its_verdict(job, root, held, record_property):
    """The others have given up: the MANIFEST that is there already goes again."""
    with drill(job, root, vote_timeout=PATIENCE):
        job.do("break", {0: held})
        job.tell("save", step=1, version=1, mesh=MESH)
        job.await_note(0, "held")
        for rank in (1, 2, 3):
            job.await_note(rank, "failed")
        tmp = root / "1.orbax-checkpoint-tmp"
        assert list(tmp.rglob("MANIFEST"))
        job.release(0)
        answers = job.hear(range(SIZE))
        words = f"process 0 did not answer within {PATIENCE} s"
        assert_all_failed(answers, None, words, kind="PeerError")
        assert not list(tmp.rglob("MANIFEST"))
        entered(record_property, "a verdict too late", 0, answers[1:])


def test_giving_up_too_late(job, root):
    """Who is about to give up when the verdict comes obeys it: the step counts."""
    with drill(job, root, steps=(0, 1, 2), vote_timeout=PATIENCE):
        waiting = {rank: {"decision": "wait"} for rank in (1, 2, 3)}
        job.do("break", {0: {"rules": [HOLDS_MANIFEST], "decision": "tell"}, **waiting})
        job.tell("save", step=1, version=1, mesh=MESH)
        for rank in range(SIZE):
            job.await_note(rank, "held")
        job.release(0)
        job.await_note(0, "decided")
        for rank in waiting:
            job.release(rank)
        answers = job.hear(range(SIZE))
        assert [answer["error"] for answer in answers] == [None] * SIZE


# --- a directory that is not shared ---------------------------------------------------


def test_a_process_with_another_folder(job, root, tmp_path, record_property):
    """Found out at the first save: named, with what to do."""
    (tmp_path / "elsewhere").mkdir()
    elsewhere = {OTHER: {"root": str(tmp_path / "elsewhere")}}
    job.do("open", elsewhere, root=str(root), appears_within=1)
    answers = job.do("save", step=0, version=0, mesh=MESH)
    assert_all_failed(
        answers, OTHER, "not shared between the hosts", kind="DisagreementError"
    )
    entered(record_property, "another folder", OTHER, answers)
    job.do("close")
    with drill(job, root):
        pass  # all saves go to one folder now


def test_a_primary_whose_listings_are_old(job, root):
    """What is not listed yet may be there: it asks before it takes it for missing."""
    with drill(job, root, steps=(0, 1, 2)):
        job.do("break", {0: {"rules": [{"rule": "stale"}]}})
        answers = job.do("save", step=1, version=1, mesh=MESH)
        assert [answer["error"] for answer in answers] == [None] * SIZE


def test_a_process_with_other_options(job, root, record_property):
    """Leaves would be cut in two ways: named, with both values."""
    other = {OTHER: {"chunk_bytes": 1024}}
    with drill(job, root):
        job.do("close")
        job.do("open", other, root=str(root))
        answers = job.do("save", step=1, version=1, mesh=MESH)
        words = "chunk_bytes is 1024 and 512"
        assert_all_failed(answers, OTHER, words, kind="DisagreementError")
        entered(record_property, "other options", OTHER, answers)
        job.do("close")
        job.do("open", root=str(root))


def test_a_folder_that_is_another_disk_there(root, tmp_path, record_property):
    """The same name on all hosts, but one of them has a disk of its own behind it."""
    around = strategies.private_disk(root)
    with Job(2, tmp_path / "job", around={1: around}) as job:
        job.do("open", root=str(root), appears_within=1)
        answers = job.do("save", step=0, version=0, mesh=MESH)
        assert_all_failed(
            answers, 1, "not shared between the hosts", kind="DisagreementError"
        )
        entered(record_property, "a private disk", 1, answers)
    strategies.check_clean(root, [])


# --- damage ---------------------------------------------------------------------------


def lose_packs(root, step, process):
    """Delete what one process has written for a step."""
    attempt = strategies.read_manifest(root / str(step) / "default/MANIFEST").attempt
    packs = list((root / strategies.STORE / "packs").glob(f"{attempt}-p{process}-*"))
    assert packs
    for pack in packs:
        pack.unlink()


# What the primary writes of leaves on the host, all processes want.
@pytest.mark.parametrize("culprit", [1, OTHER])
def test_damage_that_only_one_process_meets(job, root, culprit, record_property):
    """No process restores another state than the others do, and none waits."""
    mesh = "fully sharded"
    job.do("open", root=str(root), full_every=0, keep_bases=0)
    for step in (0, 1):
        answers = job.do("save", step=step, version=step, mesh=mesh)
        assert [answer["error"] for answer in answers] == [None] * SIZE
    lose_packs(root, 1, culprit)
    for how in ("fallback", "latest good"):
        answers = job.do("restore_good", step=1, mesh=mesh, how=how)
        assert_restored([answer["tree"] for answer in answers], 0)
    answers = job.do("restore_good", step=1, mesh=mesh, how="raise")
    for rank, answer in enumerate(answers):
        error = answer["error"]
        assert error["kind"] == "CorruptionError", rank
        assert "The newest state that restores is step 0" in error["message"], rank
        assert rank == culprit or f"process {culprit} on " in error["message"]
    record_property("failures", 3)
    good_save(job, 2)
    good_restore(job, 2)
    assert job.do("keys")[0]["keys"]  # of the restores since
    job.do("close")
    shutil.rmtree(root / "1")
    strategies.check_clean(root, [0, 2])


def test_a_base_that_one_process_cannot_restore(job, root, record_property):
    """All of them restore the one before."""
    mesh = "fully sharded"
    job.do("open", root=str(root), full_every=1, refresh_every=1, keep_bases=3)
    for step in range(4):
        answers = job.do("save", step=step, version=step, mesh=mesh)
        assert [answer["error"] for answer in answers] == [None] * SIZE
    answers = job.do("restore_base", root=str(root), mesh=mesh)
    newest, *older = sorted(
        strategies.read_manifest(path).step
        for path in (root / strategies.STORE / "bases").glob("*/MANIFEST")
    )[::-1]
    assert_restored([answer["tree"] for answer in answers], newest)
    lose_packs(root, newest, OTHER)
    answers = job.do("restore_base", root=str(root), mesh=mesh)
    assert_restored([answer["tree"] for answer in answers], older[0])
    record_property("failures", 1)
    job.do("close")


# --- some of the processes ------------------------------------------------------------


def test_some_of_the_processes_save(job, tmp_path):
    """Others do not wait for them, nor they for others, then or later."""
    for name in ("a", "b"):
        told = job.tell(
            "save_by_some", to=[0, 1], path=str(tmp_path / name / "7"), processes=[0, 1]
        )
        assert job.hear(told) == [{"error": None}] * 2
        path = str(tmp_path / name / "all/7")
        job.do("save_alone", path=path, version=1, mesh=MESH)


def test_one_process_alone_saves_what_others_hold(job, tmp_path):
    """It says what it lacks."""
    path = str(tmp_path / "alone")
    told = job.tell("save_by_some", to=[1], path=path, processes=[1], mesh=MESH)
    (answer,) = job.hear(told)
    assert answer["error"]["kind"] == "InvalidInputError"
    words = r"parts of it lie on none of the processes \[1\] that save"
    assert re.search(words, answer["error"]["message"])


# --- killed ---------------------------------------------------------------------------

HEARTBEAT = 3
"""Seconds; jax's default is 100."""

_GRACE = 15


@pytest.mark.parametrize(
    ("victim", "rule", "fewer"),
    [
        pytest.param(OTHER, None, 2, marks=pytest.mark.long),
        (OTHER, {"rule": "hold", "kind": "write", "url": "*/part-*"}, 4),
        pytest.param(0, HOLDS_MANIFEST, 2, marks=pytest.mark.long),
        (0, {**HOLDS_MANIFEST, "rule": "hold after"}, 1),
    ],
)
def test_a_killed_process(root, tmp_path, victim, rule, fewer, record_property):
    """Jax ends the others; a restarted job, also a smaller one, goes on."""
    with Job(SIZE, tmp_path / "first", heartbeat_seconds=HEARTBEAT) as job:
        job.do("open", root=str(root))
        good_save(job, 0)
        good_save(job, 1)
        if rule is not None:
            job.do("break", {victim: {"rules": [rule]}})
            job.tell("save", step=2, version=2, mesh=MESH)
            job.await_note(victim, "held")
        job.send_signal(victim, signal.SIGKILL)
        others = [rank for rank in range(SIZE) if rank != victim]
        seconds = job.ends(others, HEARTBEAT + _GRACE)
        assert "another task died" in job.errors_of(others[-1])
    moment = "between saves" if rule is None else f"{rule['rule']} {rule['url']}"
    row = {
        "killed": victim,
        "while": moment,
        "heartbeat": HEARTBEAT,
        "seconds": f"{max(seconds.values()):.1f}",
    }
    record_property(ENDS, row)
    record_property("kills", 1)
    with Job(fewer, tmp_path / "second") as job:
        assert job.do("open", root=str(root)) == [{"steps": [0, 1]}] * fewer
        for step in (0, 1):
            good_restore(job, step)
        good_save(job, 2)
        good_restore(job, 2)
        job.do("close")
    strategies.check_clean(root, [0, 1, 2])


# --- preempted ------------------------------------------------------------------------


def test_a_preempted_process(root, tmp_path, record_property):
    """SIGTERM to one: all save the same step, hurriedly; a smaller job goes on."""
    with Job(SIZE, tmp_path / "first") as job:
        job.do("open", root=str(root), refresh_every=1)
        told = {OTHER: {"signalled": 7}}
        answers = job.do("train_until_preempted", told, step=0, mesh=MESH)
        steps = {answer["step"] for answer in answers}
        assert len(steps) == 1
        (last,) = steps
        seconds = max(answer["last"]["seconds"] for answer in answers)
        record_property(GRACE, {"step": last, "seconds": f"{seconds:.2f}"})
        for answer in answers:
            assert answer["last"]["error"] is None
            # What has not changed each save here writes anew, but for constants; this
            # one does not.
            *_, before = answer["saves"]
            constant, unchanged = (
                save["report"]["chunks_by_form"]["reference"]
                for save in (before, answer["last"])
            )
            assert constant < 10 < 40 < unchanged
        job.do("close")
    with Job(2, tmp_path / "second") as job:
        (found, _) = job.do("open", root=str(root))
        assert found["steps"][-1] == last
        for step in found["steps"]:
            good_restore(job, step)
        good_save(job, last + 1)
        good_restore(job, last + 1)
        job.do("close")
    strategies.check_clean(root, [*found["steps"], last + 1])
    record_property("restores", len(found["steps"]) + 1)
