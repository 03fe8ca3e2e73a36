"""The harness for jobs itself: bounded waits, no orphans, failures that explain."""

import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest
from processes import Job, JobError

PARENT = textwrap.dedent(
    """
    import pathlib, sys
    from processes import Job
    job = Job(2, pathlib.Path(sys.argv[1]))
    print(*job.pids, flush=True)
    sys.stdin.read()
    """
)

BOUND_MILLISECONDS = 60_000


def assert_ends(watched):
    """The process behind a descriptor ends; it need not be a child."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    assert poll.poll(BOUND_MILLISECONDS)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open (Linux)")
def test_members_end_with_their_parent(tmp_path):
    """A test run that is killed leaves no process behind."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        try:
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2
            watched = [os.pidfd_open(pid) for pid in pids]
        finally:
            parent.kill()
    for descriptor in watched:
        assert_ends(descriptor)
        os.close(descriptor)


def test_a_member_that_does_not_answer(tmp_path):
    """Says where each member is; ends all of them."""
    job = Job(2, tmp_path)
    with pytest.raises(JobError, match=r"(?s)member 0 did not answer.*in main") as told:
        job.hear([0], seconds=0)
    assert str(told.value).count("most recent call first") > 1
    assert job.codes == [-signal.SIGKILL] * 2


def test_a_member_that_fails(tmp_path):
    """Says what was raised; ends the others too."""
    job = Job(2, tmp_path)
    with pytest.raises(JobError, match=r"(?s)member 1 has ended.*no_such_thing"):
        job.hear(job.tell("no_such_thing", to=[1]))
    assert job.codes == [-signal.SIGKILL, 1]


def test_a_block_that_fails(tmp_path):
    """An error of the test ends all members at once."""
    with pytest.raises(ZeroDivisionError, match="zero"), Job(2, tmp_path) as job:
        1 / 0  # noqa: B018
    assert job.codes == [-signal.SIGKILL] * 2
