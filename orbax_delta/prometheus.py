"""What saves cost as a text file for Prometheus (exposition format 0.0.4).

For the textfile collector of node-exporter, or whatever else reads such files: made
from outside of the job by `orbax-delta watch --prometheus`, or once by `history`. Does
not belong here: events inside the job (`monitoring`).
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orbax_delta import wholefiles
from orbax_delta.costs import Costs
from orbax_delta.errors import StorageError
from orbax_delta.history import RestoreCost, SaveCost

_PREFIX = "orbax_delta_"

_SUMS: Mapping[str, tuple[str, Callable[[SaveCost], float]]] = {
    "saves_total": ("Saves that are known.", lambda save: 1),
    "blocking_seconds_total": (
        "Time that saves kept the training.",
        lambda save: save.blocking_seconds,
    ),
    "save_seconds_total": (
        "Time from the calls until saves were done.",
        lambda save: save.total_seconds,
    ),
    "written_bytes_total": ("Bytes written.", lambda save: save.written_bytes),
    "raw_bytes_total": ("Raw size of what was saved.", lambda save: save.full_bytes),
}
_RESTORE_SUMS: Mapping[str, tuple[str, Callable[[RestoreCost], float]]] = {
    "restores_total": ("Restores of processes that saved afterwards.", lambda one: 1),
    "restore_seconds_total": ("Time of restores.", lambda one: one.total_seconds),
}
_LAST: Mapping[str, tuple[str, Callable[[SaveCost], float | None]]] = {
    "last_save_timestamp_seconds": (
        "When the newest save was called, since 1970.",
        lambda save: save.started,
    ),
    "last_save_step": (
        "Step of the newest save, where its name is a number.",
        lambda save: int(save.step) if save.step.isdecimal() else None,
    ),
    "last_save_blocking_seconds": (
        "Time that the newest save kept the training.",
        lambda save: save.blocking_seconds,
    ),
    "last_save_seconds": (
        "Time from its call until the newest save was done.",
        lambda save: save.total_seconds,
    ),
    "last_save_written_bytes": (
        "Bytes written by the newest save.",
        lambda save: save.written_bytes,
    ),
    "last_save_raw_bytes": (
        "Raw size of what the newest save saved.",
        lambda save: save.full_bytes,
    ),
}


def exposition(costs: Costs) -> str:
    """The text of the file: counters of all saves, gauges of the newest of each item.

    Args:
        costs: What is known of a root.

    Example:
        >>> print(exposition(costs.read(root)))  # doctest: +SKIP
        # HELP orbax_delta_saves_total Saves that are known.
        # TYPE orbax_delta_saves_total counter
        orbax_delta_saves_total{root="/checkpoints/run/",item="default"} 41
    """
    root = costs.root.folder.url
    saves: dict[str, list[SaveCost]] = {}
    for save in costs.saves:
        saves.setdefault(save.item, []).append(save)
    restores: dict[str, list[RestoreCost]] = {}
    for restore in costs.restores:
        restores.setdefault(restore.item, []).append(restore)
    lines: list[str] = []
    for name, (what, value) in _SUMS.items():
        sums = {item: sum(map(value, found)) for item, found in saves.items()}
        lines += _metric(name, what, "counter", root, sums)
    for name, (what, of_restore) in _RESTORE_SUMS.items():
        sums = {item: sum(map(of_restore, found)) for item, found in restores.items()}
        lines += _metric(name, what, "counter", root, sums)
    for name, (what, of_last) in _LAST.items():
        last = {item: of_last(found[-1]) for item, found in saves.items()}
        lines += _metric(name, what, "gauge", root, last)
    there: collections.Counter[str] = collections.Counter()
    there.update(item.place.item for item in costs.root.items)
    lines += _metric("steps", "Steps that are there.", "gauge", root, there)
    return "".join(f"{line}\n" for line in lines)


def _metric(
    name: str, what: str, kind: str, root: str, values: Mapping[str, float | None]
) -> Sequence[str]:
    known = {item: value for item, value in values.items() if value is not None}
    if not known:
        return ()
    return (
        f"# HELP {_PREFIX}{name} {what}",
        f"# TYPE {_PREFIX}{name} {kind}",
        *(
            f'{_PREFIX}{name}{{root="{_label(root)}",item="{_label(item)}"}} {value!r}'
            for item, value in known.items()
        ),
    )


def _label(text: str) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return escaped.encode("utf-8", "backslashreplace").decode()


def require_folder(path: Path) -> None:
    """Say at once what every later `write` would run into.

    Raises:
        StorageError: The folder of the file is not there.

    Example:
        >>> require_folder(Path("/metrics/run.prom"))  # doctest: +SKIP
    """
    if not path.absolute().parent.is_dir():
        raise _refused(path, "there is no such folder")


def write(path: Path, costs: Costs) -> None:
    """Write the file as a whole: who reads it meanwhile sees the old or the new one.

    Args:
        path: Where; its folder must be there.
        costs: What is known of a root.

    Raises:
        StorageError: It cannot be written.

    Example:
        >>> write(Path("/metrics/run.prom"), costs.read(root))  # doctest: +SKIP
    """
    try:
        wholefiles.replace(path, exposition(costs).encode())
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, why: object) -> StorageError:
    return StorageError(
        f"could not write the metrics to {path}: {why}; name a file in a folder that "
        "is there and may be written to"
    )
