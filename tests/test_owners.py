"""Owners of pins and marks: who is known to be dead, and who is not."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

from orbax_delta import owners

SAY_WHO = (
    "import json, dataclasses, sys; from orbax_delta import owners;"
    "print(json.dumps(dataclasses.asdict(owners.this_process())), flush=True);"
    "sys.stdin.read()"
)


@pytest.fixture
def other():
    """A process that has said who it is and waits; ended by the test or by this."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAY_WHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def said(process):
    """The owner that the process names."""
    return owners.Owner(**json.loads(process.stdout.readline()))


def test_this_process_runs():
    """The caller is alive, and says so the same way each time."""
    assert not owners.this_process().known_dead
    assert owners.this_process() == owners.this_process()
    assert owners.this_process().pid == os.getpid()


def test_another_process_until_its_end(other):
    """A process of this host is alive until it has been killed."""
    owner = said(other)
    assert owner.pid == other.pid
    assert owner.host == owners.this_process().host
    assert not owner.known_dead
    other.kill()
    other.wait()
    assert owner.known_dead


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_a_process_that_nobody_has_waited_for(other):
    """A killed process is dead although its number is still taken (a zombie)."""
    owner = said(other)
    other.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert owner.known_dead


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_a_number_used_again():
    """A process with the same number that started at another time is another one."""
    this = owners.this_process()
    assert dataclasses.replace(this, start=this.start + "1").known_dead


def test_another_host_is_never_known_dead(other):
    """Nothing is known of processes elsewhere, other containers included."""
    owner = said(other)
    other.kill()
    other.wait()
    assert not dataclasses.replace(owner, host="elsewhere").known_dead


@pytest.mark.parametrize("hidden", [False, True])
def test_a_process_of_another_user(hidden, monkeypatch):
    """A process that may not be signalled runs, also where /proc hides it (hidepid)."""

    def forbidden(pid, number):
        raise PermissionError

    this = owners.this_process()
    monkeypatch.setattr(os, "kill", forbidden)
    if hidden:
        monkeypatch.setattr(owners, "_start_time", lambda pid: "")
    assert not this.known_dead
