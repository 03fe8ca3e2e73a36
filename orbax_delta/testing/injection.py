"""Faults in the store: every operation of this process is seen, and any can be broken.

`faults` lets every operation of every `Folder` pass through some rules. A rule sees the
operation and decides whether, when and with which data it takes effect, and what its
caller is told. `rules` has ready-made ones; any function `(call, proceed) -> Pending`
can be another. Does not belong here: what Orbax itself does to folders.
"""

import contextlib
import dataclasses
import fnmatch
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from orbax_delta import localwrites
from orbax_delta.errors import StorageError
from orbax_delta.store import Folder, Pending

Kind = Literal[
    "write", "create", "read", "range", "list", "find", "unfinished", "delete", "clear"
]

_KINDS: Mapping[str, Kind] = {
    "start_write": "write",
    "create": "create",
    "read": "read",
    "start_read": "range",
    "names": "list",
    "find": "find",
    "unfinished": "unfinished",
    "delete": "delete",
    "clear": "clear",
}
_STARTED = ("start_write", "start_read")


class SimulatedCrash(BaseException):
    """This process is dead; no handler for errors can do anything about it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of the store.

    Attributes:
        number: From 1, in order of beginning.
        kind: `write`, `create`, `read` (a whole key), `range` (bytes of a key), `list`,
            `find`, `unfinished`, `delete` or `clear` (all keys of a folder).
        url: Key or, where none is given, folder in full.
        size: Bytes to be written, or to be read by a `range`; otherwise 0.
        offset: Where a `range` begins.
    """

    number: int
    kind: Kind
    url: str
    size: int = 0
    offset: int = 0

    def __str__(self) -> str:
        if self.kind == "range":
            return f"read {self.size} bytes at {self.offset} of {self.url}"
        verb = {"find": "list", "unfinished": "list", "clear": "empty"}
        return f"{verb.get(self.kind, self.kind)} {self.url}"

    def error(self, reason: str) -> StorageError:
        """What the store raises when this operation fails."""
        return StorageError(f"could not {self}: {reason}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Which operations a rule is for; without arguments: all.

    Attributes:
        kind: One kind or several; None: any.
        url: Glob for the whole url, e.g. `*/packs/*`.
        first: The first of the matching operations that the rule is for, from 1.
        times: How many of them it is for; None: all from the first on.
    """

    kind: Kind | Sequence[Kind] | None = None
    url: str = "*"
    first: int = 1
    times: int | None = None

    def fits(self, operation: Operation) -> bool:
        """Whether kind and url fit, whatever came before."""
        kinds = (self.kind,) if isinstance(self.kind, str) else self.kind
        return (kinds is None or operation.kind in kinds) and fnmatch.fnmatchcase(
            operation.url, self.url
        )

    def counts(self, occurrence: int) -> bool:
        """Whether the rule is for this occurrence of what fits."""
        past = occurrence - self.first
        return past >= 0 and (self.times is None or past < self.times)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operation about to happen, as a rule sees it.

    Attributes:
        operation: What it is.
        log: The log it is entered in.
        folder: Folder that was asked.
        data: What a `write` or `create` writes; a rule may pass on something else.
        sought: Pattern of the last component of the keys that a `find` is for.
    """

    operation: Operation
    log: "Log"
    folder: Folder
    data: bytes = b""
    sought: str = ""


Proceed = Callable[[Call], Pending]
Act = Callable[[Call, Proceed], Pending]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A fault.

    Attributes:
        match: Operations that it is for.
        make: Makes what happens to them; called once for each `faults`, so that what it
            remembers begins anew.
    """

    match: Match
    make: Callable[[], Act]


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """An operation that is over."""

    value: Any = None

    def result(self) -> Any:
        """What it came to."""
        return self.value


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """An operation that is over and failed."""

    error: StorageError

    def result(self) -> Any:
        """Raises the error."""
        raise self.error


@dataclasses.dataclass(frozen=True, slots=True)
class _Watched:
    """An operation under way whose result a dead process does not see."""

    log: "Log"
    inner: Pending

    def result(self) -> Any:
        self.log.check_alive()
        value = self.inner.result()
        self.log.check_alive()
        return value


class Log:
    """What happened inside one `faults`.

    Attributes:
        operations: All operations in order, also those that a rule broke; none that
            came after a simulated crash.
        crash: The crash, once there was one.
        in_flight: Writes that have begun.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.operations: list[Operation] = []
        self.crash: SimulatedCrash | None = None
        self._rules = [(rule.match, rule.make()) for rule in rules]
        self._hits = [0] * len(rules)
        self._lock = threading.Lock()
        self.in_flight: list[Pending] = []
        self._inside = threading.local()
        self._last: list[Callable[[], None]] = []

    @property
    def crashed(self) -> bool:
        """Whether this process is dead."""
        return self.crash is not None

    def check_alive(self) -> None:
        """Raises the crash, if there was one."""
        if self.crash is not None:
            raise SimulatedCrash(*self.crash.args)

    def die(self, why: str) -> SimulatedCrash:
        """From now on every operation raises; the crash, for the rule to raise.

        Writes that had begun are waited for: a later process must not see them appear.
        """
        self.crash = SimulatedCrash(why)
        self._wait()
        return self.crash

    def at_end(self, function: Callable[[], None]) -> None:
        """Call `function` when the block ends, unless the process died."""
        self._last.append(function)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Operations of this thread in the block pass no rules and are not logged."""
        before, self._inside.on = self.is_inside, True
        try:
            yield
        finally:
            self._inside.on = before

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in such a block."""
        return getattr(self._inside, "on", False)

    def enter(
        self, folder: Folder, kind: Kind, arguments: Sequence[Any]
    ) -> tuple[Call, list[Act]]:
        """Enter an operation; what it is, and what the rules do to it."""
        self.check_alive()
        with self._lock:
            operation = _operation(len(self.operations) + 1, folder, kind, arguments)
            self.operations.append(operation)
            acts = []
            for index, (match, act) in enumerate(self._rules):
                if match.fits(operation):
                    self._hits[index] += 1
                    if match.counts(self._hits[index]):
                        acts.append(act)
        call = Call(
            operation=operation,
            log=self,
            folder=folder,
            data=arguments[1] if kind in ("write", "create") else b"",
            sought=arguments[0] if kind == "find" else "",
        )
        return call, acts

    def _wait(self) -> None:
        begun, self.in_flight = self.in_flight, []
        for pending in begun:
            with contextlib.suppress(StorageError):
                pending.result()

    def settle(self) -> None:
        """What was deferred happens now; nothing is in flight afterwards."""
        if not self.crashed:
            with self.unseen():
                for function in self._last:
                    function()
        self._wait()


def _operation(
    number: int, folder: Folder, kind: Kind, arguments: Sequence[Any]
) -> Operation:
    size = offset = 0
    if kind in ("write", "create"):
        size = len(arguments[1])
    elif kind == "range":
        offset, size = arguments[1:]
    of_folder = kind in ("list", "find", "unfinished", "clear")
    key = "" if of_folder else arguments[0]
    return Operation(
        number=number, kind=kind, url=folder.url + key, size=size, offset=offset
    )


@contextlib.contextmanager
def faults(*rules: Rule) -> Iterator[Log]:
    """Every operation of every store of this process passes through `rules`.

    The first rule is the outermost: what it does not let through the others do not
    see. Without rules the operations are only logged. Threads that work on a store
    must have ended before the block does.

    >>> from orbax_delta.store import Folder
    >>> with faults() as log:
    ...     Folder("memory://example").write("key", b"value")
    >>> print(log.operations[0])
    write memory://example/key
    """
    log = Log(rules)
    originals = {name: getattr(Folder, name) for name in _KINDS}
    try:
        for name, original in originals.items():
            setattr(Folder, name, _seen(log, name, original))
        yield log
    finally:
        for name, original in originals.items():
            setattr(Folder, name, original)
        log.settle()


def _seen(log: Log, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The method `name` of `Folder`, through the rules of `log`."""
    started = name in _STARTED

    def method(folder: Folder, *arguments: Any, **named: Any) -> Any:
        if log.is_inside:
            return original(folder, *arguments, **named)
        if name == "start_write":
            arguments = (arguments[0], localwrites.joined(arguments[1]))
        call, acts = log.enter(folder, _KINDS[name], arguments)

        def take_effect(call: Call) -> Pending:
            passed = arguments
            if call.operation.kind in ("write", "create"):
                passed = (arguments[0], call.data)
            with log.unseen():
                value = original(folder, *passed, **named)
            if name == "start_write":
                log.in_flight.append(value)
            return value if started else Done(value)

        pending = _chained(acts, take_effect)(call)
        return _Watched(log, pending) if started else pending.result()

    return method


def _chained(acts: Sequence[Act], proceed: Proceed) -> Proceed:
    for act in reversed(acts):
        proceed = _around(act, proceed)
    return proceed


def _around(act: Act, proceed: Proceed) -> Proceed:
    return lambda call: act(call, proceed)
