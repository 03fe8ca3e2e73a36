"""Saving together: what the processes of a job agree on for one save.

An attempt that the primary names, a vote by each process, and one verdict. A restore
has them too: all processes get the same state, or the same error. All of it
goes over the key-value store of JAX's coordination service. No collectives: those hang
when one process is missing, and no thread may call them. The only module that talks to
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
from typing import Any, ClassVar, Protocol, TypeVar

import xxhash

from orbax_delta.errors import (
    DeltaError,
    DisagreementError,
    PeerError,
    StorageError,
)

_logger = logging.getLogger("orbax_delta")

_SLICE_SECONDS = 0.5
_LOOK_EVERY_SECONDS = 1.0
_NAMESPACE = "orbax_delta"

Document = Mapping[str, Any]
_Result = TypeVar("_Result")


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

    @property
    def group(self) -> str:
        """A short name of just these processes; others may save the same step."""
        return xxhash.xxh3_64_hexdigest(repr(tuple(self.processes)).encode())


ALONE = Job()
"""A process that saves and restores for itself."""


class Round:
    """One save, or one restore, of one item, as the processes agree on it.

    Made in the thread that calls, where all processes come by in the same order.

    Attributes:
        job: The processes.
    """

    # How often each was begun by a group; alike on all of its processes.
    _begun: ClassVar[collections.Counter[str]] = collections.Counter()
    # Rounds that the primary has ended, by group. Their keys go with the group's next
    # round: whoever takes part in that has seen the end of these.
    _ended: ClassVar[dict[str, list["Round"]]] = {}

    def __init__(
        self, job: Job, name: str, *, timeout: float, deed: str = "save"
    ) -> None:
        self.job = job
        self._name = name
        self._timeout = timeout
        self._deed = deed
        self._looked = time.monotonic()
        self._heard: DeltaError | None = None
        self._earlier: list[Round] = []
        rounds = f"{deed}/{name}/{job.group}"
        if job.client is not None:
            Round._begun[rounds] += 1
            self._earlier = Round._ended.pop(job.group, [])
        self._prefix = f"{_NAMESPACE}/{rounds}/{Round._begun[rounds]}/"

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
                _logger.error("no %s of %s: %s", self._deed, self._name, error)
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
        self._clear(self._earlier)
        self._earlier = []
        return votes

    def settle(self, outcome: Document) -> None:
        """Make `outcome` the verdict; for the primary, once all is published.

        Raises:
            DeltaError: Another process was quicker to abort.
        """
        if self.job.client is not None:
            self._raise_abort(self._decide({"commit": outcome}))

    def leave(self) -> None:
        """Have the keys of this round removed as soon as nobody can be reading them."""
        if self.job.client is not None and self.job.primary:
            ended = Round._ended.setdefault(self.job.group, [])
            ended += [*self._earlier, self]
            self._earlier = []

    @staticmethod
    def clear_ended(job: Job) -> None:
        """Remove the keys of rounds that all processes of a job have left."""
        Round._clear(Round._ended.pop(job.group, []))

    # A whole round in the calling thread.

    def unanimous(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Do what all processes do together, and succeed or raise as all of them do.

        Args:
            what: What it is about; the same on all processes.
            work: Does it; leaves nothing behind where it raises.

        Raises:
            Exception: What `work` has raised here.
            DeltaError: What it has raised on another process, of the same class. Of
                several errors all processes raise the same one.
        """
        if self.job.client is None:
            return work()
        try:
            with self.spread_errors():
                result = work()
                self._require_same(what)
                if self.job.primary:
                    self.collect({})
                    self.settle({})
                else:
                    self.vote({})
        except Exception as error:
            # Callers decide by the class what to do next, and must not do two things.
            first = self._decided_error(error)
            if first is None:
                raise
            raise first from error
        finally:
            self.leave()
        return result

    def _require_same(self, what: str) -> None:
        _, first = self.attempt({"what": what})
        if first["what"] != what:
            raise DisagreementError(
                f"this process wants to {self._deed} {what} while the primary wants "
                f"{first['what']}. All processes must {self._deed} the same, in the "
                "same order"
            )

    def _decided_error(self, error: Exception) -> DeltaError | None:
        """The error of another process that counts instead of this one."""
        verdict = None
        with contextlib.suppress(StorageError):
            verdict = self._try_get("verdict")
        if error is self._heard or verdict is None or "abort" not in verdict:
            return None
        own = verdict["abort"] == self._describe(error)
        return None if own else _error_of(verdict["abort"])

    # Keys and values.

    @staticmethod
    def _clear(ended: Sequence["Round"]) -> None:
        # Keys that stay behind are small, and no later round reads them.
        with contextlib.suppress(RuntimeError):
            for one in ended:
                one._client.key_value_delete(one._prefix)

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
        restorable = getattr(error, "restorable", None)
        return {"kind": kind, "text": f"{where}: {text}", "restorable": restorable}

    def _missing_voter(self) -> int:
        """Whom the primary still waits for; the primary, if all others have voted."""
        primary, *others = self.job.processes
        return next((p for p in others if self._try_get(f"vote/{p}") is None), primary)

    def _late(self, process: int) -> PeerError:
        return PeerError(
            f"{self._name}: process {process} did not answer within {self._timeout:g} "
            f"s; nothing of this {self._deed} was kept. See what holds it up and "
            f"{self._deed} again, or raise `vote_timeout`; if it takes no part, "
            "`processes` tells who does"
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
    error = found[0](document["text"])
    error.restorable = document["restorable"]
    return error
