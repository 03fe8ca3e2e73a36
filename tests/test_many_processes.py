"""Jobs of 4, 2 and 1 processes: what some save, others restore and go on from.

Every restored bit is compared with what numpy computes, see `expected.py`.
"""

import contextlib
import itertools
import re

import buckets
import job_states
import pytest
import strategies
from expected import assert_restored
from job_states import LOCAL_LEAVES, MESHES
from processes import Job

from orbax_delta import check, hosts

SIZES = (4, 2, 1)
LATEST = 2
"""Each run has three versions: 0, 1 and this one."""

KNOWN = ("reference", "difference", "blocks", "sparse")
"""Forms that need the box to be recognised."""

MATRIX = "table: saved by 4 processes, restored and saved on by others"
MATRIX_OF_ALL = "table: restored by 4, 2 and 1 processes on every mesh"
SPREAD = "table: share of the bytes that each process wrote"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Jobs of each size; they stay for all tests, each with a manager of its own."""
    folder = tmp_path_factory.mktemp("jobs")
    with contextlib.ExitStack() as stack:
        yield {
            size: stack.enter_context(Job(size, folder / str(size))) for size in SIZES
        }


def save(job, step, mesh):
    """A save that goes well everywhere; what each member reports."""
    answers = job.do("save", step=step, version=step, mesh=mesh)
    assert [answer["error"] for answer in answers] == [None] * job.size
    return [answer["report"] for answer in answers]


def restore(job, step, mesh):
    """A restore onto a mesh, compared bit by bit."""
    assert_restored(job.do("restore", step=step, mesh=mesh), step)


def save_run(job, root, mesh):
    """A run of three saves: nothing known, then sparse and dense changes."""
    job.do("open", root=str(root))
    for step in range(LATEST + 1):
        save(job, step, mesh)
    job.do("close")


def bytes_by_process(root, step):
    """What each process put into packs for a step that is not the store's any more."""
    attempt = strategies.read_manifest(root / str(step) / "default/MANIFEST").attempt
    written = {}
    for path in (root / strategies.STORE / "packs").glob(f"{attempt}-*"):
        (process,) = re.findall(r"-p(\d+)-", path.name)
        written[int(process)] = written.get(int(process), 0) + path.stat().st_size
    return written


def recognised(root, step):
    """Of the boxes that could be deltas or references, the share that are."""
    report = strategies.read_manifest(root / str(step) / "default/MANIFEST").report
    forms = dict(report["chunks_by_form"])
    new = forms.get("planes", 0)
    known = sum(forms.get(form, 0) for form in KNOWN)
    return known / (known + new)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mesh", MESHES)
def test_saved_by_four(root, jobs, mesh, size, record_property):
    """Three saves by four processes; each restores elsewhere, and a save follows."""
    save_run(jobs[4], root, mesh)
    job, new_mesh = jobs[size], MESHES[MESHES.index(mesh) - 1]
    job.do("open", root=str(root))
    plan = [(LATEST, onto) for onto in MESHES]
    # What is restored last is what the next save builds on.
    plan += [(step, new_mesh) for step in range(LATEST + 1)]
    for step, onto in plan:
        restore(job, step, onto)
    save(job, LATEST + 1, new_mesh)
    for onto in (mesh, new_mesh):
        restore(job, LATEST + 1, onto)
    job.do("close")
    share = recognised(root, LATEST + 1)
    strategies.check_clean(root, range(LATEST + 2))
    record_property("restores", len(plan) + 2)
    record_property(
        MATRIX,
        {
            "mesh": mesh,
            "restored by": size,
            "restores": len(plan) + 2,
            "then saved on": new_mesh,
            "boxes recognised": f"{share:.0%}",
        },
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_restart_on_the_same_mesh(root, jobs, mesh, record_property):
    """A restarted job of the same size goes on with deltas alone."""
    save_run(jobs[4], root, mesh)
    never_full = {"full_every": 50, "refresh_every": 50, "read_budget": 100.0}
    jobs[4].do("open", root=str(root), **never_full)
    restore(jobs[4], LATEST, mesh)
    save(jobs[4], LATEST + 1, mesh)
    jobs[4].do("close")
    assert recognised(root, LATEST + 1) == 1
    record_property("restores", 1)


@pytest.mark.parametrize("mesh", MESHES)
def test_writing_is_spread(root, jobs, mesh, record_property):
    """Of what several processes hold each writes a share, and nobody all."""
    save_run(jobs[4], root, mesh)
    for step in range(LATEST + 1):
        written = bytes_by_process(root, step)
        shares = [written.get(p, 0) / sum(written.values()) for p in range(4)]
        assert min(shares) > 0
        assert max(shares) < 0.6
        if step != 1:
            row = {f"process {p}": f"{share:.0%}" for p, share in enumerate(shares)}
            record_property(SPREAD, {"mesh": mesh, "save": step, **row})


def test_a_run_that_moves_between_jobs(root, jobs, record_property):
    """Each save by another number of processes on another mesh, from the one before."""
    moves = [(4, 1), (2, 2), (1, 3), (4, 0), (2, 3), (4, 3), (1, 0), (4, 1)]
    for step, (size, mesh) in enumerate(moves):
        job = jobs[size]
        assert job.do("open", root=str(root))[0] == {"steps": list(range(step))}
        if step:
            restore(job, step - 1, MESHES[mesh])
        save(job, step, MESHES[mesh])
        job.do("close")
    for size in SIZES:
        jobs[size].do("open", root=str(root))
        for step in range(len(moves)):
            restore(jobs[size], step, MESHES[step % len(MESHES)])
        jobs[size].do("close")
    strategies.check_clean(root, range(len(moves)))
    record_property("restores", len(moves) * (1 + len(SIZES)) - 1)


def test_packs_in_a_bucket(root, s3, tmp_path, record_property):
    """Steps on a disk, packs of all processes in a bucket; a smaller job goes on."""
    with Job(4, tmp_path / "jobs of 4") as job:
        job.do("open", root=str(root), store=buckets.new_url())
        for step in range(LATEST + 1):
            save(job, step, "mixed")
            restore(job, step, "fully sharded")
        job.do("close")
    with Job(2, tmp_path / "jobs of 2") as job:
        job.do("open", root=str(root))
        restore(job, LATEST, "data parallel")
        save(job, LATEST + 1, "mixed")
        job.do("close")
    assert not list((root / strategies.STORE).glob("packs/*"))
    report = check.verify(str(root))
    assert (report.problems, len(report.whole_steps)) == ([], LATEST + 2)
    record_property("restores", LATEST + 2)


@pytest.mark.parametrize("size", SIZES)
def test_other_targets(root, jobs, size, record_property):
    """No target, some leaves only, and numpy arrays of what was on devices."""
    save_run(jobs[4], root, "mixed")
    job = jobs[size]
    job.do("open", root=str(root))
    arrays = [name for name in job_states.content(0) if name not in LOCAL_LEAVES]
    # The devices that it was saved on are there for a job of the same size alone.
    gone = {} if size == 4 else dict.fromkeys(set(arrays) - {"key"}, "numpy")
    assert_restored(job.do("restore", step=LATEST), LATEST, kinds=gone)
    some = ["half", "host", "step", "name"]
    answers = job.do("restore", step=1, mesh="fully sharded", only=some)
    assert_restored(answers, 1, names=some)
    numpy = ["dense", "table", "half", "zero"]
    answers = job.do("restore", step=LATEST, mesh="data parallel", numpy=numpy)
    assert_restored(answers, LATEST, kinds=dict.fromkeys(numpy, "numpy"))
    job.do("close")
    record_property("restores", 3)


def test_groups_of_processes(tmp_path, jobs, record_property):
    """Two halves of a job save the same steps, each to a root of its own, at once."""
    job, groups = jobs[4], ([1, 0], [2, 3])
    roots = [tmp_path / str(group[0]) for group in groups]
    own = {
        rank: {"group": group, "root": str(root)}
        for group, root in zip(groups, roots, strict=True)
        for rank in group
    }
    for root in roots:
        root.mkdir()
    job.do("open", own)
    for step in range(LATEST + 1):
        # What the second half saves is another version.
        versions = {rank: {"version": step + 1} for rank in groups[1]}
        answers = job.do("save", versions, step=step, version=step, mesh="mixed")
        assert [answer["error"] for answer in answers] == [None] * 4
    for step in range(LATEST + 1):
        answers = job.do("restore", step=step, mesh="fully sharded")
        assert_restored(answers[:2], step)
        assert_restored(answers[2:], step + 1)
    job.do("close")
    for root in roots:
        strategies.check_clean(root, range(LATEST + 1))
    record_property("restores", 2 * (LATEST + 1))


def test_without_a_manager(tmp_path, jobs, record_property):
    """A plain Checkpointer's checkpoint stands for itself, and leaves no keys."""
    path = str(tmp_path / "alone")
    jobs[4].do("save_alone", path=path, version=1, mesh="mixed")
    jobs[4].do("save_alone", path=path + "2", version=2, mesh="mixed")
    group = hosts.Job(processes=tuple(range(4))).group
    for answer in jobs[4].do("keys"):
        assert not [key for key in answer["keys"] if f"/{group}/" in key]
    for size in SIZES:
        for mesh in MESHES:
            answers = jobs[size].do("restore_alone", path=path, mesh=mesh)
            assert_restored(answers, 1)
    record_property("restores", len(SIZES) * len(MESHES))


@pytest.mark.long
@pytest.mark.parametrize("saving", SIZES)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_pair(root, jobs, mesh, saving, record_property):
    """Every version by jobs of every size on every mesh, then one more save by each."""
    save_run(jobs[saving], root, mesh)
    pairs = list(itertools.product(range(LATEST + 1), MESHES))
    for size in SIZES:
        jobs[size].do("open", root=str(root))
        for step, onto in pairs:
            restore(jobs[size], step, onto)
        jobs[size].do("close")
    count = len(pairs) * len(SIZES)
    row = {"saved by": saving, "mesh": mesh, "restores": count}
    record_property("restores", count)
    record_property(MATRIX_OF_ALL, row)


def test_rules_of_the_coordination_service(jobs):
    """What `test_hosts` takes for granted of jax's."""
    (told,) = jobs[2].tell("ask_service", to=[0])
    assert jobs[2].hear([told]) == [
        {
            "set again": "ALREADY_EXISTS",
            "get": "1",
            "get none": "NOT_FOUND",
            "wait for none": "DEADLINE_EXCEEDED",
            "deleted": "NOT_FOUND",
        }
    ]


def test_the_judgement_is_strict(root, jobs):
    """A wrong bit, a missing part and another type are noticed."""
    job = jobs[2]
    job.do("open", root=str(root))
    save(job, 0, "fully sharded")
    answers = job.do("restore", step=0, mesh="fully sharded")
    job.do("close")
    assert_restored(answers, 0)
    with pytest.raises(AssertionError, match=r"leaf dense on member 0, \[\[0, 16\]"):
        assert_restored(answers, 1)
    with pytest.raises(AssertionError, match="of leaf dense 768 elements are nowhere"):
        assert_restored(answers[:1], 0)
    answers[1]["half"]["kind"] = "numpy"
    with pytest.raises(AssertionError, match="leaf half on member 1"):
        assert_restored(answers, 0)
    del answers[1]["half"]
    with pytest.raises(AssertionError, match="member 1"):
        assert_restored(answers, 0)


@pytest.mark.parametrize("size", SIZES)
def test_with_a_live_tree(root, jobs, size, record_property):
    """Each process takes what it has on any mesh; one of them has nothing."""
    save_run(jobs[4], root, "fully sharded")
    job = jobs[size]
    job.do("open", root=str(root))
    for without, (mesh, onto) in enumerate(itertools.pairwise([*MESHES, MESHES[0]])):
        for version in (LATEST, LATEST - 1):
            answers = job.do(
                "restore", step=LATEST, mesh=onto, live=[version, mesh], without=without
            )
            assert_restored(answers, LATEST)
    job.do("close")
    record_property("restores", 2 * len(MESHES))
