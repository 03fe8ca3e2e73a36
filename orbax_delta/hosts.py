"""Saving together: what the processes of a job agree on for one save.

An attempt that the primary names, a vote by each process, and one verdict. All of it
goes over the key-value store of JAX's coordination service. No collectives: those hang
when one process is missing, and no thread may call them. The only module that knows of
other processes; it knows nothing of what they save.

The verdict is written once, whoever comes first: the primary's `commit` after every
process has voted and the MANIFEST is there, or the `abort` of a process that failed or
has waited too long. Everybody obeys the one that is there.
"""

import collections
import contextlib
import dataclasses
import json
import logging
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from orbax_delta.errors import DeltaError, PeerError, StorageError

_logger = logging.getLogger("orbax_delta")

_SLICE_SECONDS = 0.5
_LOOK_EVERY_SECONDS = 1.0
_NAMESPACE = "orbax_delta"

Document = Mapping[str, Any]


class Coordination(Protocol):
    """What is used of JAX's client of the coordination service."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Write a key that must not exist yet."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """The value of a key, once there is one."""

    def key_value_try_get_bytes(self, key: str) -> bytes:
        """The value of a key that exists."""

    def key_value_delete(self, key: str) -> None:
        """Remove a key, or all keys below one that ends in a slash."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The processes that save together.

    Attributes:
        process: Index of this process.
        processes: Indices of all of them, in order; the first is the primary.
        client: How they talk; None where there is only one.
    """

    process: int = 0
    processes: Sequence[int] = (0,)
    client: Coordination | None = None

    @property
    def primary(self) -> bool:
        """Whether this process publishes what all have written."""
        return self.process == self.processes[0]

    @property
    def alone(self) -> bool:
        """Whether there is no other process to agree with."""
        return len(self.processes) == 1


class Round:
    """One save of one item, as the processes agree on it.

    Made in the thread that calls `save`, where all processes come by in the same order.

    Attributes:
        job: The processes.
    """

    # How often each save was begun; alike on all processes.
    _begun: ClassVar[collections.Counter[str]] = collections.Counter()
    # Keys of saves that have ended, and that go with those of the next round: whoever
    # takes part in that has seen the end of these.
    _left: ClassVar[list[str]] = []

    def __init__(self, job: Job, name: str, *, timeout: float) -> None:
        self.job = job
        self._name = name
        self._timeout = timeout
        self._looked = time.monotonic()
        self._heard: DeltaError | None = None
        self._left_before: list[str] = []
        if job.client is not None:
            Round._begun[name] += 1
            self._left_before, Round._left = Round._left, []
        self._prefix = f"{_NAMESPACE}/{name}/{Round._begun[name]}/"

    # In the calling thread.

    def declare(self, problem: Exception | None) -> None:
        """Tell the others whether this process can take its state.

        Raises:
            Exception: `problem`, if all processes have one: then all raise alike. That
                of one process alone must not be raised here, because it would leave
                Orbax's barriers; it goes to the vote.
        """
        if problem is not None and self.job.alone:
            raise problem
        if self.job.client is None:
            return
        self._set(f"state/{self.job.process}", {"fit": problem is None})
        if problem is None:
            return
        deadline = time.monotonic() + self._timeout
        for process in self.job.processes:
            if self._await(f"state/{process}", process, deadline)["fit"]:
                return
        self.leave()
        raise problem

    # In the background.

    @contextlib.contextmanager
    def spread_errors(self) -> Iterator[None]:
        """Make an error of this process the error of all."""
        try:
            yield
        except BaseException as error:
            if self.job.client is not None:
                # Orbax may keep it for as long as another process does not come back.
                _logger.error("%s is not saved: %s", self._name, error)
                if error is not self._heard:
                    # It is raised here whatever the others hear first.
                    with contextlib.suppress(DeltaError):
                        self._decide({"abort": self._describe(error)})
            raise

    def attempt(self, details: Document | None) -> tuple[bytes, Document]:
        """The random bits that name the attempt, and the primary's `details`.

        Raises:
            DeltaError: Another process has failed, or does not answer.
        """
        if self.job.primary:
            bits = secrets.token_bytes(16)
            if self.job.client is not None:
                self._set("attempt", {"bits": bits.hex(), "details": details})
            return bits, details or {}
        deadline = time.monotonic() + self._timeout
        found = self._await("attempt", self.job.processes[0], deadline)
        return bytes.fromhex(found["bits"]), found["details"]

    def look(self, *, at_once: bool = False) -> None:
        """See whether the others have given up; at little cost, now and then.

        Raises:
            DeltaError: What another process failed with.
        """
        now = time.monotonic()
        due = at_once or now - self._looked >= _LOOK_EVERY_SECONDS
        if not due or self.job.client is None:
            return
        self._looked = now
        self._raise_abort(self._try_get("verdict"))

    def vote(self, ballot: Document) -> Document:
        """Vote, and wait for the verdict; not for the primary.

        Raises:
            DeltaError: The save was aborted.
        """
        self._set(f"vote/{self.job.process}", ballot)
        deadline = time.monotonic() + self._timeout
        verdict = None
        while verdict is None and time.monotonic() < deadline:
            verdict = self._get("verdict")
        if verdict is None:
            late = self._late(self._missing_voter())
            verdict = self._decide({"abort": self._describe(late)})
        self._raise_abort(verdict)
        commit: Document = verdict["commit"]
        return commit

    def collect(self, ballot: Document) -> Sequence[Document]:
        """All votes in order of the processes; for the primary.

        Raises:
            DeltaError: Another process has failed, or does not answer.
        """
        deadline = time.monotonic() + self._timeout
        others = (
            self._await(f"vote/{process}", process, deadline)
            for process in self.job.processes[1:]
        )
        votes = [ballot, *others]
        self._remove(self._left_before)
        self._left_before = []
        return votes

    def settle(self, outcome: Document) -> None:
        """Make `outcome` the verdict; for the primary, once all is published.

        Raises:
            DeltaError: Another process was quicker to abort.
        """
        if self.job.client is not None:
            self._raise_abort(self._decide({"commit": outcome}))

    def clear(self) -> None:
        """Remove the keys of this save, which every process has seen the end of.

        The primary does it; for the others there is nothing to do.
        """
        if self.job.client is not None and self.job.primary:
            self._remove([*self._left_before, self._prefix])

    def leave(self) -> None:
        """Let the keys of this save go with those of the next one, of whatever item."""
        if self.job.client is not None:
            Round._left += [*self._left_before, self._prefix]

    # Keys and values.

    def _remove(self, prefixes: Sequence[str]) -> None:
        # Keys that stay behind are small, and no later save reads them.
        with contextlib.suppress(RuntimeError):
            for prefix in prefixes:
                self._client.key_value_delete(prefix)

    def _decide(self, wanted: Document) -> Document:
        """Write the verdict if there is none; returns the one that counts."""
        try:
            self._set("verdict", wanted)
        except StorageError:
            decided = self._try_get("verdict")
            if decided is None:
                raise
            return decided
        return wanted

    def _raise_abort(self, verdict: Document | None) -> None:
        if verdict is not None and "abort" in verdict:
            self._heard = _error_of(verdict["abort"])
            raise self._heard

    def _describe(self, error: BaseException) -> Document:
        kind = error.kind if isinstance(error, DeltaError) else DeltaError.kind
        text = str(error)
        if not isinstance(error, DeltaError):
            text = f"{type(error).__name__}: {text}"
        where = f"process {self.job.process} on {socket.gethostname()}"
        return {"kind": kind, "text": f"{where}: {text}"}

    def _missing_voter(self) -> int:
        """Whom the primary still waits for; the primary, if all others have voted."""
        primary, *others = self.job.processes
        return next((p for p in others if self._try_get(f"vote/{p}") is None), primary)

    def _late(self, process: int) -> PeerError:
        return PeerError(
            f"{self._name}: process {process} did not answer within {self._timeout:g} "
            "s; nothing of this save was kept. See what holds it up and save again, or "
            "raise `vote_timeout`"
        )

    def _await(self, key: str, who: int, deadline: float) -> Document:
        """The value of a key that another process is about to write."""
        while (found := self._get(key)) is None:
            self._raise_abort(self._try_get("verdict"))
            if time.monotonic() >= deadline:
                raise self._late(who)
        return found

    def _set(self, key: str, value: Document) -> None:
        with _translated(f"write {self._prefix}{key}"):
            # Names of packs differ in a few digits, and there may be thousands.
            data = zlib.compress(json.dumps(value).encode())
            self._client.key_value_set_bytes(self._prefix + key, data)

    def _get(self, key: str) -> Document | None:
        """The value of a key, waiting a little for it."""
        with _translated(f"read {self._prefix}{key}"):
            return _read(
                self._client.blocking_key_value_get_bytes,
                self._prefix + key,
                int(1000 * min(_SLICE_SECONDS, self._timeout)),
            )

    def _try_get(self, key: str) -> Document | None:
        with _translated(f"read {self._prefix}{key}"):
            return _read(self._client.key_value_try_get_bytes, self._prefix + key)

    @property
    def _client(self) -> Coordination:
        if self.job.client is None:
            raise AssertionError("a process alone has nobody to ask")
        return self.job.client


# Status codes with which JAX's errors begin.
_NO_VALUE = ("DEADLINE_EXCEEDED", "NOT_FOUND")


def _read(read: Callable[..., bytes], *arguments: Any) -> Document | None:
    try:
        data = read(*arguments)
    except RuntimeError as error:
        if str(error).startswith(_NO_VALUE):
            return None
        raise
    document: Document = json.loads(zlib.decompress(data))
    return document


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StorageError(
            f"could not {what} in JAX's coordination service: {error}"
        ) from error


def _error_of(document: Document) -> DeltaError:
    """The error that another process has described, of the same class."""
    classes: list[type[DeltaError]] = [DeltaError]
    for known in classes:
        classes += known.__subclasses__()
    found = [known for known in classes if known.kind == document["kind"]]
    return found[0](document["text"])
