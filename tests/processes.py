"""Jobs of several real processes: start them, tell them what to do, hear of it.

A `Job` is some processes of `members.py` that jax joins into one job on the loopback
interface. Every wait is bounded; where one fails, all processes of the job are killed
by their number and the error holds the end of what each has written. A member ends by
itself when its parent does. Does not belong here: what members do, and judging it.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import members

START_SECONDS = 120
ANSWER_SECONDS = 40
END_SECONDS = 30
_TAIL = 6000

Answer = dict[str, Any]
Only = Mapping[int, Mapping[str, Any]]
"""Arguments that some members get instead of the others', by rank."""


class JobError(AssertionError):
    """A member ended, or did not answer in time; says what each has written."""


class Job:
    """Processes of one jax job.

    Attributes:
        size: Number of processes. They are named by rank; 0 is the primary.
    """

    def __init__(
        self,
        size: int,
        folder: Path,
        *,
        around: Mapping[int, Sequence[str]] | None = None,
        **settings: Any,
    ) -> None:
        """Start `size` processes and wait until jax has joined them.

        Args:
            size: Number of processes; one alone is an ordinary run without a job.
            folder: Where they keep what they write to standard error.
            around: By rank, a command that runs the member as its arguments say.
            **settings: For `members.join`.
        """
        self.size = size
        self._members: list[_Member] = []
        folder.mkdir(parents=True, exist_ok=True)
        with reserved_port() as port:
            try:
                for rank in range(size):
                    words = {"rank": rank, "size": size, "port": port, **settings}
                    before = (around or {}).get(rank, ())
                    member = _Member(folder / f"{rank}.err", words, before)
                    self._members.append(member)
                self._hear_all(range(size), START_SECONDS)
            except BaseException:
                self.kill_all()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill_all()

    @property
    def is_alive(self) -> bool:
        """Whether all members still run."""
        return self.codes == [None] * self.size

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes."""
        return [member.process.pid for member in self._members]

    @property
    def codes(self) -> list[int | None]:
        """How each has ended; None for one that runs."""
        return [member.process.poll() for member in self._members]

    def do(
        self, name: str, only: Only | None = None, /, **arguments: Any
    ) -> list[Answer]:
        """All members do a thing together; what each answers, by rank."""
        ranks = self.tell(name, only, **arguments)
        return self.hear(ranks)

    def tell(
        self,
        name: str,
        only: Only | None = None,
        /,
        *,
        to: Sequence[int] | None = None,
        **arguments: Any,
    ) -> Sequence[int]:
        """Tell members, by default all, to begin with a thing; their ranks."""
        ranks = range(self.size) if to is None else to
        for rank in ranks:
            own = (only or {}).get(rank, {})
            self._members[rank].forget_notes()
            self._members[rank].tell({"do": name, **arguments, **own})
        return ranks

    def hear(
        self, ranks: Sequence[int], seconds: float = ANSWER_SECONDS
    ) -> list[Answer]:
        """What members answer to what they were told."""
        try:
            return self._hear_all(ranks, seconds)
        except BaseException:
            self.kill_all()
            raise

    def await_note(self, rank: int, note: str) -> None:
        """Wait until a member says in passing that it has come to a certain point."""
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            while self._members[rank].next("note", deadline) != note:
                pass  # of something that nobody waited for
        except JobError as error:
            story = self._story(f"member {rank} {error}: nothing of {note!r}")
            self.kill_all()
            raise JobError(story) from error

    def release(self, rank: int) -> None:
        """Let a member go on that is held."""
        self._members[rank].tell({"do": "release"})

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to one member."""
        self._members[rank].process.send_signal(number)

    def ends(self, ranks: Sequence[int], seconds: float) -> dict[int, float]:
        """Wait until members have ended by themselves; after how many seconds each."""
        begin = time.monotonic()
        try:
            for rank in ranks:
                if not self._members[rank].ended.wait(
                    max(0.0, begin + seconds - time.monotonic())
                ):
                    raise JobError(self._story(f"member {rank} has not ended"))
        except BaseException:
            self.kill_all()
            raise
        return {rank: self._members[rank].end_time - begin for rank in ranks}

    def errors_of(self, rank: int) -> str:
        """What a member has written to its standard error."""
        return self._members[rank].errors()

    def close(self) -> None:
        """Let all members leave the job; those that do not are killed."""
        try:
            ranks = self.tell("leave")
            self.ends(ranks, END_SECONDS)
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        """End every member that still runs, and wait for it."""
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.wait()
            member.close()

    def _hear_all(self, ranks: Sequence[int], seconds: float) -> list[Answer]:
        deadline = time.monotonic() + seconds
        answers = []
        for rank in ranks:
            try:
                answers.append(self._members[rank].next("answer", deadline))
            except JobError as error:
                raise JobError(self._story(f"member {rank} {error}")) from error
        return answers

    def _story(self, what: str) -> str:
        """What went wrong, where each member is, and what it has written last."""
        for member in self._members:
            member.process.send_signal(signal.SIGUSR1)
        for member in self._members:
            # Those that can still say where they are do so at once.
            member.ended.wait(0.5)
        tails = (
            f"--- member {rank} ({member.process.poll()}):\n{member.errors()[-_TAIL:]}"
            for rank, member in enumerate(self._members)
        )
        return "\n".join([what, *tails])


class _Member:
    """One process: its words in, its words out.

    Attributes:
        process: The process.
        ended: Set once it has ended.
        end_time: When it did, on the monotonic clock.
    """

    def __init__(
        self, errors: Path, words: Mapping[str, Any], around: Sequence[str]
    ) -> None:
        self.ended = threading.Event()
        self.end_time = 0.0
        self._errors = errors
        self._said: dict[str, queue.SimpleQueue[Any]] = {
            kind: queue.SimpleQueue() for kind in ("answer", "note")
        }
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                [*around, sys.executable, members.__file__, json.dumps(words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                },
            )
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout,), daemon=True
        )
        self._reader.start()

    def tell(self, words: Mapping[str, Any]) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        # One that has ended is noticed when its answer is waited for.
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(words) + "\n")
            stdin.flush()

    def forget_notes(self) -> None:
        """Nobody asked for those of what it did before."""
        with contextlib.suppress(queue.Empty):
            while self._said["note"].get_nowait() is not None:
                pass
            self._said["note"].put(None)

    def next(self, kind: str, deadline: float) -> Any:
        try:
            word = self._said[kind].get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise JobError("did not answer in time") from None
        if word is None:
            self._said[kind].put(None)
            raise JobError("has ended")
        return word

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def close(self) -> None:
        """Let go of the pipes of a process that has ended."""
        self._reader.join()
        stdin = self.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.close()

    def _read(self, said: IO[str]) -> None:
        with said:
            for line in said:
                for kind, word in json.loads(line).items():
                    self._said[kind].put(word)
        self.process.wait()
        self.end_time = time.monotonic()
        self.ended.set()
        for kind in self._said:
            self._said[kind].put(None)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else is given while the coordinator does not listen yet.

    It listens beside this socket, which never does: gRPC shares its ports.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
