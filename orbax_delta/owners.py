"""Who wrote a pin or a condemned mark, and whether that process still runs.

There are no clocks in the protocol: a mark counts until its writer removes it or is
known to be dead. Death is known only on the host that the writer ran on.
"""

import dataclasses
import functools
import os
import socket
from pathlib import Path

_STAT_START_TIME_FIELD = 21


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, told apart from later ones with the same number.

    Attributes:
        host: Host name, and on Linux boot id and process namespace.
        pid: Process number.
        start: Start time of the process in kernel ticks; empty where unknown.
    """

    host: str
    pid: int
    start: str

    @property
    def host_name(self) -> str:
        """The host as people call it."""
        return self.host.partition(" ")[0]

    @property
    def known_dead(self) -> bool:
        """True only when the process ran on this host and runs no more."""
        if self.host != _host():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            # It runs, as another user, from whom its start time may be hidden.
            return _start_time(self.pid) not in ("", self.start)
        return self.start != _start_time(self.pid)


NOBODY = Owner(host="", pid=1, start="")
"""Owner of a mark that is to outlive the process that writes it."""


def this_process() -> Owner:
    """The process that calls."""
    return Owner(host=_host(), pid=os.getpid(), start=_start_time(os.getpid()))


@functools.cache
def _host() -> str:
    parts = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        parts += [boot.read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _start_time(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The command name is in parentheses and may hold anything.
    state, *fields = text.rpartition(")")[2].split()
    # A zombie runs no more; its parent has only not asked for its end yet.
    return "" if state == "Z" else fields[_STAT_START_TIME_FIELD - 3]
