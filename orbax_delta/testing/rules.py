"""Ready-made faults for `faults`: crashes, refusals, lost and damaged writes.

Each takes a `Match` that says which operations it is for, and they combine:
`faults(fail(errno.EIO, Match(kind="read", times=2)), out_of_order())`.
"""

import contextlib
import dataclasses
import fnmatch
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from orbax_delta.errors import StorageError
from orbax_delta.store import Pending
from orbax_delta.testing.injection import (
    Act,
    Call,
    Done,
    Failed,
    Match,
    Operation,
    Proceed,
    Rule,
)

EVERY = Match()
WRITES = Match(kind=("write", "create"))

_CHANGES = ("write", "create", "delete", "clear")

# What TensorStore appends to a file's name while it writes or deletes it.
_LOCK = ".__lock"

When = Literal["before", "after", "torn"]


def crash_at(number: int, when: When = "before", match: Match = EVERY) -> Rule:
    """The process dies at an operation, and raises `SimulatedCrash` ever after.

    Args:
        number: Which of the operations that match, from 1.
        when: `before` it takes effect, `after`, or `torn`: half way through, with what
            a killed TensorStore leaves beside the key of a write or a deletion.
        match: Operations that count; its own `first` and `times` do not matter.
    """

    def act(call: Call, proceed: Proceed) -> Pending:
        if when == "after":
            proceed(call).result()
        elif when == "torn":
            _tear(call, proceed)
        operation = call.operation
        raise call.log.die(
            f"died at operation {operation.number} ({when}): {operation}"
        )

    return Rule(dataclasses.replace(match, first=number, times=1), lambda: act)


def _tear(call: Call, proceed: Proceed) -> None:
    """Leave an operation half done, as far as storage can be found in that state."""
    operation = call.operation
    if operation.kind == "clear":
        with call.log.unseen():
            for key in call.folder.names()[::2]:
                call.folder.delete(key)
    if "://" in operation.url or operation.kind not in ("write", "create", "delete"):
        return
    if operation.kind == "delete":
        proceed(call).result()
    os.makedirs(os.path.dirname(operation.url), exist_ok=True)
    with open(operation.url + _LOCK, "wb") as file:
        file.write(call.data[: len(call.data) // 2])


def fail(code: int, match: Match = EVERY) -> Rule:
    """Operations have no effect and fail with an error of the operating system.

    Args:
        code: `errno.ENOSPC`, `errno.EIO`, ...
        match: Operations that fail.
    """
    return Rule(match, lambda: lambda call, _: Failed(_error(call.operation, code)))


def lose_acknowledgement(code: int, match: Match = WRITES) -> Rule:
    """Operations take effect, and fail all the same."""

    def act(call: Call, proceed: Proceed) -> Pending:
        proceed(call).result()
        return Failed(_error(call.operation, code))

    return Rule(match, lambda: act)


def _error(operation: Operation, code: int) -> Any:
    return operation.error(f"{os.strerror(code)} [os_error_code='{code}']")


def lose_write(match: Match = WRITES) -> Rule:
    """Writes, or deletions if they match, are acknowledged but never happen."""

    def act(call: Call, proceed: Proceed) -> Pending:
        if call.operation.kind not in _CHANGES:
            return proceed(call)
        return Done(True if call.operation.kind == "create" else None)

    return Rule(match, lambda: act)


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    """What a ranged read answers."""

    state: str
    value: bytes


def flip_bit(bit: int, match: Match) -> Rule:
    """One bit of what is written, or of what is read, is another one.

    Args:
        bit: Number of the bit, modulo the bits there are; negative: from the end.
        match: Writes and reads that are damaged.
    """

    def flipped(data: bytes) -> bytes:
        if not data:
            return data
        changed = bytearray(data)
        index = bit % (8 * len(data))
        changed[index // 8] ^= 1 << index % 8
        return bytes(changed)

    return _damage(flipped, match)


def truncate(keep: int, match: Match) -> Rule:
    """Of what is written, or of what is read, only the first `keep` bytes are there."""
    return _damage(lambda data: data[:keep], match)


def _damage(change: Callable[[bytes], bytes], match: Match) -> Rule:
    def act(call: Call, proceed: Proceed) -> Pending:
        if call.operation.kind in ("write", "create"):
            return proceed(dataclasses.replace(call, data=change(call.data)))
        if call.operation.kind not in ("read", "range"):
            return proceed(call)
        got = proceed(call).result()
        if call.operation.kind == "read":
            return Done(None if got is None else change(got))
        return Done(_Range(got.state, change(bytes(got.value))))

    return Rule(match, lambda: act)


def delay(wait: Callable[[Operation], None], match: Match = EVERY) -> Rule:
    """`wait` is called with the operation before it takes effect, in its thread."""

    def act(call: Call, proceed: Proceed) -> Pending:
        wait(call.operation)
        return proceed(call)

    return Rule(match, lambda: act)


def out_of_order(match: Match = EVERY) -> Rule:
    """Started writes take effect last to first, none before somebody waits for it.

    A process that dies has lost those that nobody waited for.
    """
    return Rule(match, lambda: _Reordering())


class _Reordering:
    """The writes that were started and have not taken effect, in order."""

    def __init__(self) -> None:
        self._waiting: list[_Deferred] = []
        self._known = False

    def __call__(self, call: Call, proceed: Proceed) -> Pending:
        if call.operation.kind != "write":
            return proceed(call)
        if not self._known:
            self._known = True
            call.log.at_end(self._rest)
        deferred = _Deferred(self, call, proceed)
        self._waiting.append(deferred)
        return deferred

    def settle(self, wanted: "_Deferred") -> None:
        """Let everything take effect that was started after `wanted`, and that."""
        while wanted in self._waiting:
            self._waiting.pop().take_effect()

    def _rest(self) -> None:
        while self._waiting:
            self._waiting.pop().take_effect()


class _Deferred:
    def __init__(self, queue: _Reordering, call: Call, proceed: Proceed) -> None:
        self._queue = queue
        self._call = call
        self._proceed = proceed
        self._inner: Pending = Done()

    def take_effect(self) -> None:
        self._inner = self._proceed(self._call)
        # It has landed before the next one begins; its caller hears of a failure.
        with contextlib.suppress(StorageError):
            self._inner.result()

    def result(self) -> Any:
        self._queue.settle(self)
        return self._inner.result()


def stale_listing(as_of: int, url: str = "*") -> Rule:
    """Listings answer as if no operation after number `as_of` had happened.

    Args:
        as_of: Number of the last operation that they know of.
        url: Glob for the folders whose listings are stale.
    """

    def make() -> Act:
        # Urls of keys changed since, and whether they were there before.
        before: dict[str, bool] = {}

        def act(call: Call, proceed: Proceed) -> Pending:
            operation = call.operation
            if operation.number <= as_of:
                return proceed(call)
            if operation.kind in _CHANGES:
                for key, existed in _touched(call):
                    before.setdefault(key, existed)
                return proceed(call)
            got = proceed(call)
            if not Match(kind=("list", "find"), url=url).fits(operation):
                return got
            return Done(_as_before(got.result(), call, before))

        return act

    return Rule(EVERY, make)


def _touched(call: Call) -> list[tuple[str, bool]]:
    """Keys that a call is about to change, and whether they are there."""
    operation, folder = call.operation, call.folder
    with call.log.unseen():
        if operation.kind == "clear":
            return [(folder.url + key, True) for key in folder.names()]
        key = operation.url.removeprefix(folder.url)
        return [(operation.url, folder.read(key) is not None)]


def _as_before(
    names: Sequence[str], call: Call, before: Mapping[str, bool]
) -> list[str]:
    there = set(names)
    for url, existed in before.items():
        key = url.removeprefix(call.folder.url)
        name = key.rpartition("/")[2]
        if key == url or not fnmatch.fnmatchcase(name, call.sought or "*"):
            continue
        (there.add if existed else there.discard)(key)
    return sorted(there)
