"""What saves and restores of a root have cost, in small files that outlive its steps.

A process that saves keeps one file, a sealed JSON line for each save, and replaces it
whole after each: nobody else writes that file, so nothing is read and nothing can be
torn (FORMAT.md section 9.5). Does not belong here: what MANIFESTs say of the same
saves (`costs`), when it is written (`upkeep`).
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_delta import fields, jsontext
from orbax_delta.reports import RestoreReport, SaveReport
from orbax_delta.store import STORE_NAME, Folder

FOLDER = "history"
FILE_NAME = re.compile(r"[0-9a-f]{32}")
FILE_LINES = 32
"""Lines of a file; then the next one begins. All of it is written with each save."""

_VERSION = 1
_KEPT_RESTORES = 8
_PER_SECOND = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """What one committed save cost. Sizes in bytes, times in seconds.

    Attributes:
        attempt: Its attempt.
        step: Name of the step.
        item: Name of the item.
        started: When `save()` was called, in seconds since 1970.
        host: Name of the host that published it; empty where not known.
        processes: Processes that saved together; 0 where not known.
        blocking_seconds: Time that `save()` kept the caller.
        total_seconds: From the call to just before the MANIFEST was written.
        stage_seconds: Time by stage of the background work, as in `SaveReport`.
        full_bytes: Raw size of the state's arrays.
        written_bytes: Packs and parts put by the save.
        read_bytes: Of earlier records, read to make deltas against.
        chunks_by_form: Chunks by how the save stored them.
        bytes_by_form: Bytes of new records by form.
    """

    attempt: str
    step: str
    item: str
    started: float
    host: str = ""
    processes: int = 0
    blocking_seconds: float
    total_seconds: float
    stage_seconds: Mapping[str, float]
    full_bytes: int
    written_bytes: int
    read_bytes: int
    chunks_by_form: Mapping[str, int]
    bytes_by_form: Mapping[str, int]

    @classmethod
    def of(
        cls,
        report: SaveReport,
        *,
        attempt: str,
        started: float,
        host: str = "",
        processes: int = 0,
    ) -> "SaveCost":
        """What a save's report says of its cost."""
        same = {name: getattr(report, name) for name in _SAVE_REPORTED}
        return cls(
            attempt=attempt, started=started, host=host, processes=processes, **same
        )

    @property
    def identity(self) -> tuple[str, str, int]:
        """What tells it from other saves, also after a repair of its step."""
        return self.item, self.step, round(self.started * _PER_SECOND)

    @property
    def is_full(self) -> bool:
        """Whether it built on nothing stored before."""
        return not self.chunks_by_form.keys() & _BUILDING_FORMS


_BUILDING_FORMS = frozenset(
    {"reference", "difference", "blocks", "sparse", "grid_change"}
)

_SAVE_REPORTED = (
    "step",
    "item",
    "blocking_seconds",
    "total_seconds",
    "stage_seconds",
    "full_bytes",
    "written_bytes",
    "read_bytes",
    "chunks_by_form",
    "bytes_by_form",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCost:
    """What one restore cost, of a process that saved afterwards.

    Attributes:
        step: Name of the step.
        item: Name of the item.
        started: When it was called, in seconds since 1970.
        host: Name of the host.
        total_seconds: From the call to the finished tree.
        restored_bytes: Raw size of the chunks that were wanted.
        reused_bytes: Of these, what was live and taken as it was.
        read_bytes: Bytes read from packs.
    """

    step: str
    item: str
    started: float
    host: str
    total_seconds: float
    restored_bytes: int
    reused_bytes: int
    read_bytes: int

    @classmethod
    def of(cls, report: RestoreReport, *, started: float, host: str) -> "RestoreCost":
        """What a restore's report says of its cost."""
        same = {name: getattr(report, name) for name in _RESTORE_REPORTED}
        return cls(started=started, host=host, **same)


_RESTORE_REPORTED = (
    "step",
    "item",
    "total_seconds",
    "restored_bytes",
    "reused_bytes",
    "read_bytes",
)

Cost = SaveCost | RestoreCost
_KINDS: Mapping[str, type[Cost]] = {"save": SaveCost, "restore": RestoreCost}


def encode_line(cost: Cost) -> bytes:
    """One line; times in whole microseconds, because a sealed text has no fractions."""
    kind = "save" if isinstance(cost, SaveCost) else "restore"
    fields = {
        _unitless(name) + "_us" if _is_time(name) else name: _in_microseconds(value)
        if _is_time(name)
        else value
        for name, value in dataclasses.asdict(cost).items()
    }
    return jsontext.sealed({"format_version": _VERSION, "kind": kind, **fields}) + b"\n"


def _is_time(name: str) -> bool:
    return name == "started" or name.endswith("_seconds")


def _unitless(name: str) -> str:
    return name.removesuffix("_seconds")


def _in_microseconds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _in_microseconds(seconds) for name, seconds in value.items()}
    return round(value * _PER_SECOND)


def parse_line(line: bytes) -> Cost | None:
    """What a line says; None for one of a kind or version that came later.

    Raises:
        ValueError: It is damaged.
    """
    document = jsontext.parse(line)
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 # of data, not of a call
    if document.get("format_version") != _VERSION:
        return None
    jsontext.check_seal(document)
    kind = _KINDS.get(str(document.get("kind")))
    if kind is None:
        return None
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name, time = field.name, _is_time(field.name)
        found = document.get(_unitless(name) + "_us" if time else name)
        if not _fits(found, field.type):
            raise ValueError(f"its field {name} is {found!r:.80}")
        values[name] = _in_seconds(found) if time else found
        if name == "started" and not fields.is_time(values[name]):
            raise ValueError(
                f"its field {name} is {found!r:.80}, a time of no calendar"
            )
    return kind(**values)


def _fits(value: Any, kind: Any) -> bool:
    """Whether it is a text, counts by name, or a count, as a field of `kind` holds."""
    if kind is str:
        return type(value) is str
    if kind in (int, float):
        return type(value) is int and 0 <= value < 1 << 63
    return type(value) is dict and all(_fits(inner, int) for inner in value.values())


def _in_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_seconds(inner) for name, inner in value.items()}
    return value / _PER_SECOND


class HistoryLog:
    """The lines of one process for one item, and the file that holds the last of them.

    A line stays until it has been written, so that what a full disk refuses comes with
    a later save.
    """

    def __init__(self) -> None:
        self._name = ""
        self._lines: list[bytes] = []
        self._written = 0
        self._restores: list[RestoreCost] = []
        self._process = os.getpid()

    def restored(self, cost: RestoreCost) -> None:
        """Remember a restore, the last few of them, until this process saves.

        A process that never saves writes no history: it may not be allowed to.
        """
        self._restores = [*self._restores, cost][-_KEPT_RESTORES:]

    def saved(self, cost: SaveCost) -> None:
        """Add a committed save, and the restores before it."""
        if self._process != os.getpid():
            # What a fork has copied is its parent's to write.
            self._process = os.getpid()
            self._name, self._lines, self._written = "", [], 0
        if not self._name or len(self._lines) >= FILE_LINES:
            waiting = self._lines[self._written :][-FILE_LINES:]
            self._name, self._lines, self._written = cost.attempt, waiting, 0
        costs: list[Cost] = [*self._restores, cost]
        self._lines += map(encode_line, costs)
        self._restores = []

    def write(self, root: Folder) -> None:
        """Write what has been added since the last time; nothing if there is nothing.

        Raises:
            StorageError: The storage refused it.
        """
        count = len(self._lines)
        if count > self._written:
            folder_of(root).write(self._name, b"".join(self._lines))
            self._written = count


def folder_of(root: Folder) -> Folder:
    """Where the history of a root lies; with a shared store in the root all the same.

    It is of the root's steps, whatever else a store serves.
    """
    return root.child(STORE_NAME).child(FOLDER)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the files of a root say.

    Attributes:
        saves: Saves, in order of their beginning.
        restores: Restores, likewise.
        damaged: What cannot be read, as sentences.
    """

    saves: Sequence[SaveCost]
    restores: Sequence[RestoreCost]
    damaged: Sequence[str]


def read(root: Folder) -> History:
    """The history of a root; empty where no version that kept one has saved.

    Raises:
        StorageError: The storage failed.
    """
    folder = folder_of(root)
    costs: list[Cost] = []
    damaged: list[str] = []
    for name in folder.names():
        data = folder.read(name) if FILE_NAME.fullmatch(name) else None
        for number, line in enumerate((data or b"").split(b"\n"), 1):
            try:
                cost = parse_line(line) if line else None
            except ValueError as error:
                damaged.append(
                    f"line {number} of {folder.url}{name} is damaged ({error}); the "
                    "other lines count, and no step needs it"
                )
                continue
            costs += [cost] if cost else []
    costs.sort(key=lambda cost: cost.started)
    return History(
        saves=[cost for cost in costs if isinstance(cost, SaveCost)],
        restores=[cost for cost in costs if isinstance(cost, RestoreCost)],
        damaged=damaged,
    )
