"""What the command line shows people: tables and sentences made of `documents`.

Does not belong here: reading anything, deciding what is shown.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import rich.box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orbax_delta.documents import Document
from orbax_delta.reports import human_bytes

_MAX_NAMED = 8
_MAX_ROWS = 20
_PIPE_WIDTH = 10_000
_LEAST_NAME_WIDTH = 12


def console() -> Console:
    """Standard output, taken literally; lines in a pipe are never cut or wrapped."""
    found = Console(highlight=False, markup=False, emoji=False)
    if not found.is_terminal:
        found.width = _PIPE_WIDTH
    return found


# Names come from files that anybody may have written; a terminal obeys what it is sent.
_CONTROLS = {
    code: f"\\x{code:02x}"
    for code in (*range(32), *range(127, 160))
    if chr(code) not in "\t\n"
}


_BREAKS = {ord(char): f"\\x{ord(char):02x}" for char in "\t\n"}


def plain(text: str) -> str:
    r"""`text` without what makes a terminal do something.

    >>> print(plain("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return text.translate(_CONTROLS)


def say(out: Console, *lines: str | Text) -> None:
    """Print sentences; a terminal wraps them by itself."""
    for line in lines:
        text = Text(line) if isinstance(line, str) else line
        out.print(Text(plain(text.plain), style=text.style), soft_wrap=True)


def show(out: Console, table: Table) -> None:
    """Print a table: ruled on a terminal, otherwise plain columns."""
    if out.is_terminal:
        table.box, table.padding = rich.box.SIMPLE_HEAD, (0, 0, 0, 0)
        least, terminal = _least_width(table), out.width
        # A figure that is cut off reads as another one; rather let the terminal wrap.
        out.width = max(least, terminal)
        out.print(table, soft_wrap=least > terminal)
        out.width = terminal
        return
    out.file.writelines(f"{line}\n" for line in _plain_lines(table))


def _plain_lines(table: Table) -> Iterator[str]:
    """Lines of a table for a pipe; for thousands rich would take seconds."""
    columns = []
    for column in table.columns:
        header = [str(column.header)] if table.show_header else []
        cells = [*header, *map(str, column.cells)]
        width = max(map(cell_len, cells), default=0)
        pads = (" " * (width - cell_len(cell)) for cell in cells)
        right = column.justify == "right"
        columns.append(
            [pad + cell if right else cell + pad for cell, pad in zip(cells, pads)]
        )
    return ("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def _least_width(table: Table) -> int:
    """What a ruled table takes so that no figure is cut off and no name vanishes."""
    widths = []
    for column in table.columns:
        cells = (str(cell) for cell in (column.header, *column.cells))
        full = max(map(cell_len, cells))
        column.min_width = full if column.no_wrap else min(full, _LEAST_NAME_WIDTH)
        widths.append(column.min_width)
    return sum(widths) + len(widths) + 1  # the ruling


class _PlainTable(Table):
    """A table of texts that no terminal obeys, and of a line each."""

    def add_row(self, *cells: Any, **named: Any) -> None:
        """As Table's; every cell is a str."""
        lines = (plain(cell).translate(_BREAKS) for cell in cells)
        super().add_row(*lines, **named)


def columns_table(left: Iterable[str], right: Iterable[str]) -> Table:
    """A table with columns that are aligned left and right."""
    table = _PlainTable(pad_edge=False)
    for name in left:
        # A time is as wide as it is; a long path gives way.
        table.add_column(name, overflow="fold", no_wrap=name == "saved at")
    for name in right:
        table.add_column(
            name, justify="right", overflow="fold", no_wrap=name != "forms"
        )
    return table


def steps_table(root: Document) -> Table:
    """What `ls` shows: one line a step and item."""
    table = columns_table(
        ["step", "item", "saved at"],
        # Short, so that a line fits a terminal of 80 columns.
        ["raw", "written", "smaller", "packs", "records", "after"],
    )
    for entry in root["steps"]:
        if "error" in entry:
            table.add_row(_step(entry), entry["item"], "damaged", style="red")
            continue
        if "archive" in entry:
            cells = (_step(entry), entry["item"] or "-", _saved_at(entry), "archived")
            table.add_row(*cells, style="dim")
            continue
        table.add_row(
            _step(entry),
            entry["item"] or "-",
            _saved_at(entry),
            human_bytes(entry["full_bytes"]),
            human_bytes(entry["written_bytes"]),
            times(entry["times_smaller"]),
            str(entry["packs"]),
            _records(entry),
            entry["predecessor"] or "-",
        )
    for name in root["other_steps"]:
        table.add_row(name, "-", "other", style="dim")
    return table


def bases_table(root: Document) -> Table:
    """What `ls --bases` shows: kept states, as the steps they were."""
    table = columns_table(["step", "item", "saved at"], ["raw", "packs"])
    table.add_column("folder", overflow="fold")
    for entry in root["bases"]:
        if "error" in entry:
            table.add_row("-", "-", "damaged", "-", "-", entry["step"], style="red")
            continue
        table.add_row(
            str(entry["number"]),
            entry["item"],
            _saved_at(entry),
            human_bytes(entry["full_bytes"]),
            str(entry["packs"]),
            entry["step"],
        )
    return table


def _saved_at(entry: Document) -> str:
    return str(entry["saved_at"])[:16].replace("T", " ")


def _step(entry: Document) -> str:
    return str(entry["step"]) + ("" if entry["finished"] else " (unfinished)")


def times(ratio: float) -> str:
    """How many times smaller."""
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"


def _records(entry: Document) -> str:
    mean, longest = entry["records_per_chunk_mean"], entry["records_per_chunk_max"]
    return f"{mean:.2f}/{longest}"


def store_lines(root: Document, *, bases: bool) -> list[str | Text]:
    """What `ls` says below its table: the store, and all that is damaged.

    Args:
        root: What `ls` found.
        bases: The table was of bases, which need not be mentioned again.
    """
    store = root["store"]
    lines: list[str | Text] = []
    if store["packs"]:
        kind = f"Shared store {store['url']}" if store["shared"] else "Store"
        lines.append(
            f"{kind}: {_packs(store['packs'], store['bytes'])}. Are some dead? "
            f"orbax-delta prune --dry-run {root['root']}"
        )
    # Several items of a step are kept on their own; a damaged one keeps nothing.
    kept = dict.fromkeys(
        str(entry["number"]) for entry in root["bases"] if entry["number"] is not None
    )
    if bases and not kept:
        lines.append("No state is kept whatever is deleted (keep_bases).")
    if kept and not bases:
        plural = "s" if len(kept) > 1 else ""
        lines.append(
            f"Kept whatever is deleted: the state{plural} of step{plural} "
            f"{', '.join(kept)}. More: orbax-delta ls --bases {root['root']}"
        )
    moved = {e["step"]: e["archive"] for e in root["steps"] if "archive" in e}
    lines += [] if bases else archived_lines(moved, root["root"])
    lines += _key_lines(root)
    entries = (store, *root["steps"], *root["bases"])
    damaged = (entry for entry in entries if "error" in entry)
    lines += [Text(entry["error"]["message"], style="red") for entry in damaged]
    return lines


def _key_lines(root: Document) -> Iterator[str]:
    """Which key is still needed for what; nothing where nothing is encrypted."""
    keys: dict[str | None, list[Document]] = {}
    for entry in (*root["steps"], *root["bases"]):
        if "key_id" in entry:
            keys.setdefault(entry["key_id"], []).append(entry)
    if not keys.keys() - {None}:
        return
    bases = {entry["step"] for entry in root["bases"]}
    for key, entries in keys.items():
        # Several items of a step have one name.
        names = dict.fromkeys(e["step"] for e in entries if e["step"] not in bases)
        kept = dict.fromkeys(str(e["number"]) for e in entries if e["step"] in bases)
        what = [f"steps {_names([*names])}"] if names else []
        what += [f"kept states {_names([*kept])}"] if kept else []
        head = "Not encrypted" if key is None else f"Encrypted with key {key}"
        yield f"{head}: {', '.join(what)}."


def archived_lines(moved: Mapping[str, str], root: str) -> list[str]:
    """Where steps are that were moved, by their archives."""
    by_archive: dict[str, list[str]] = {}
    for step, archive in moved.items():
        by_archive.setdefault(archive, []).append(step)
    return [
        f"Moved to {archive}: {_names(steps)}. Back: orbax-delta archive {archive} "
        f"{root} --steps {steps[-1]}"
        for archive, steps in by_archive.items()
    ]


def facts_table(step: Document) -> Table:
    """What `show` says of a step."""
    table = _PlainTable(show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    before = step["predecessor"]
    for name, text in (
        ("step", _step(step)),
        ("item", step["item"] or "none, a checkpoint of its own"),
        ("saved at", step["saved_at"].replace("T", " ")),
        ("built on", f"step {before['step']}" if before else "nothing"),
        *_report_facts(step),
        ("packs", f"{step['packs']} in {step['packs_url']}"),
        *([("archive", step["archive"])] if "archive" in step else []),
        ("store", step["store_uuid"] or "none, the packs lie beside the MANIFEST"),
        ("encrypted", f"with key {step['key_id']}" if step["key_id"] else "no"),
        ("options", pairs(step["options"])),
        ("versions", pairs(step["versions"])),
        ("custom metadata", str(step["custom_metadata"] or "none")),
    ):
        table.add_row(name, text)
    return table


def _report_facts(step: Document) -> list[tuple[str, str]]:
    report = step["report"]
    stages = pairs(report["stage_seconds"], lambda value: f"{value:.3f}")
    return [
        ("raw", human_bytes(step["full_bytes"])),
        (
            "written",
            f"{human_bytes(step['written_bytes'])}, "
            f"{times(step['times_smaller'])} times smaller",
        ),
        (
            "changed",
            f"{report['elements_changed']:,} of {report['elements']:,} elements, "
            f"{report['blocks_changed']:,} of {report['blocks']:,} blocks of 4 KiB",
        ),
        ("chunks", pairs(report["chunks_by_form"]) or "none"),
        ("new records", pairs(report["bytes_by_form"], human_bytes) or "none"),
        (
            "seconds",
            f"{report['blocking_seconds']:.3f} blocking, "
            f"{report['total_seconds']:.3f} in all ({stages})",
        ),
    ]


def pairs(values: Document, text: Callable[[Any], str] = str) -> str:
    """Names with their values, in one line."""
    return ", ".join(f"{name} {text(value)}" for name, value in values.items())


def leaves_table(step: Document) -> Table:
    """What `show` says of each leaf."""
    table = columns_table(
        ["leaf", "kind", "dtype", "shape"],
        ["chunks", "records", "stored", "forms"],
    )
    for leaf in step["leaves"]:
        stored = leaf["chunks"] > 0
        table.add_row(
            leaf["path"],
            leaf["kind"],
            leaf["dtype"] or "-",
            " x ".join(map(str, leaf["shape"])) or "-",
            str(leaf["chunks"]),
            _records(leaf) if stored else "-",
            human_bytes(leaf["stored_bytes"]) if stored else "-",
            pairs(leaf["forms"]) or "-",
        )
    return table


def errors_table(step: Document) -> Table | None:
    """What `show` says of leaves that were stored within a bound; None: of none."""
    errors = step["report"].get("lossy", {})
    table = columns_table(
        ["leaf", "policy"], ["bound", "largest error", "rms error", "exact chunks"]
    )
    found = [leaf for leaf in step["leaves"] if leaf["lossy"]]
    for leaf in found:
        numbers = errors.get(leaf["path"], {})
        table.add_row(
            leaf["path"],
            str(leaf["lossy"].get("policy")),
            *(
                f"{numbers[name]:.3g}" if name in numbers else "-"
                for name in ("bound", "largest", "rms", "exact_chunks")
            ),
        )
    return table if found else None


def problem_lines(report: Document) -> list[str]:
    """What `verify` found: what does not restore, for which steps, which file, why."""
    lines = []
    for number, problem in enumerate(report["problems"], 1):
        leaf = problem["leaf"]
        where = f"leaf {leaf}, chunk {problem['chunk']}" if leaf else problem["file"]
        lines.append(f"{number}. {where}")
        if problem["steps"]:
            plural = "s" if len(problem["steps"]) > 1 else ""
            item = f", item {problem['item']}" if problem["item"] else ""
            lines.append(f"   step{plural} {_names(problem['steps'])}{item}")
        if leaf:
            lines.append(f"   {problem['file']}")
        lines.append(f"   {problem['what']}")
        if problem["healed_by"]:
            lines.append(
                f"   It restores all the same: {problem['healed_by']} holds the same "
                "content. `orbax-delta repair` writes it back."
            )
        lines.append("")
    return lines


def verify_lines(report: Document) -> list[str | Text]:
    """What `verify` looked at, and its verdict."""
    lines: list[str | Text] = [
        f"{_count(len(report['steps']), 'step')}, "
        f"{_count(len(report['bases']), 'kept base')}, "
        f"{_count(report['chunks'], 'chunk')} "
        f"({report['chunks_decoded']:,} different ones decoded), "
        f"{_packs(report['packs'], report['pack_bytes'])}, "
        f"{report['total_seconds']:.1f} s."
    ]
    if report["vanished"]:
        lines.append(f"Deleted meanwhile, not judged: {_names(report['vanished'])}.")
    if report["others"]:
        lines.append(
            f"Saved by other handlers, not looked at: {_names(report['others'])}."
        )
    lines += archived_lines(report["archived"], report["root"])
    if report["unnamed_packs"]:
        lines.append(
            f"Named by no step: {_count(len(report['unnamed_packs']), 'pack')}, "
            "garbage that prune removes, or of a save under way."
        )
    whole = report["newest_whole"]
    if report["ok"]:
        lines.append(Text("Nothing is wrong.", style="green"))
    else:
        tail = f"the newest whole step is {whole}" if whole else "no step is whole"
        problems = _count(len(report["problems"]), "problem")
        lines.append(Text(f"{problems}; {tail}.", style="red"))
    return lines


def repair_lines(report: Document) -> list[str | Text]:
    """What `repair` did, what it could not do, and what is left."""
    verb = "Would mend" if report["dry_run"] else "Mended"
    lines: list[str | Text] = [
        f"{verb} {mend['file']}: {mend['what']}." for mend in report["mended"]
    ]
    lines += [
        Text(f"Could not mend {mend['file']}: {mend['what']}", style="red")
        for mend in report["failed"]
    ]
    if report["ok"]:
        lines.append(Text("Nothing is wrong.", style="green"))
    elif report["dry_run"]:
        problems = _count(len(report["problems"]), "problem")
        lines.append(f"Now: {problems}. What is mended can show what else is to be.")
    else:
        left = _count(len(report["problems"]), "problem")
        lines.append(Text(f"Left: {left}; orbax-delta verify says more.", style="red"))
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    shown = ", ".join(names[:_MAX_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown


def packs_table(prune: Document) -> Table:
    """The packs that `prune` deletes, the first of many."""
    table = columns_table(["pack"], ["bytes"])
    entries = prune["dead"] if prune["dry_run"] else prune["deleted"]
    for entry in entries[:_MAX_ROWS]:
        size = entry["bytes"]
        table.add_row(entry["pack"], "-" if size is None else f"{size:,}")
    if len(entries) > _MAX_ROWS:
        table.add_row(f"and {len(entries) - _MAX_ROWS} more; --json names all", "")
    return table


def prune_lines(prune: Document) -> list[str]:
    """Why packs are alive or dead, and what was done."""
    dry_run = prune["dry_run"]
    lines = [
        f"Alive: {_packs(prune['live'], prune['live_bytes'])}, named by "
        f"{_count(len(prune['manifests']), 'MANIFEST')} and "
        f"{_count(len(prune['pins']), 'pin')} of saves.",
        f"Dead: {_packs(len(prune['dead']), prune['dead_bytes'])}, named by none.",
    ]
    if prune["hosts"]:
        lines.append(
            f"Some pins are of other hosts ({_names(prune['hosts'])}), and whether a "
            "job saves there cannot be seen from here. If none does any more: "
            "orbax-delta prune --break-pins."
        )
    if prune["stale"]:
        verb = "would be removed" if dry_run else "removed"
        lines.append(f"Pins and marks left behind, {verb}: {len(prune['stale'])}.")
    if dry_run:
        lines.append("Nothing was deleted.")
    else:
        done = _packs(len(prune["deleted"]), prune["deleted_bytes"])
        lines.append(f"Deleted: {done}.")
    return lines


def forget_lines(forget: Document, *, done: bool) -> list[str]:
    """What a root's leaving the registry means, before it and after."""
    lines = []
    for root in forget["roots"]:
        where = root["root"] or "an unreadable entry, or a lost one"
        bases = _count(root["bases"], "kept base")
        if done:
            lines.append(f"Forgot {where} ({root['uuid']}); {bases} released.")
            continue
        there = (
            "it cannot be reached from here"
            if root["steps"] is None
            else f"{_count(root['steps'], 'MANIFEST')} of it can be read from here"
        )
        lines.append(
            f"{where} ({root['uuid']}): {there}; the store keeps {bases} of it. The "
            "next prune deletes the packs that only these need."
        )
    return lines


def move_lines(move: Document, *, done: bool) -> list[str]:
    """What a root's move means, before it is registered and after."""
    here = f"{move['to']} ({move['uuid']})"
    if done:
        return [f"{here} is registered with {move['store']}."]
    return [
        f"{here} is registered as {move['from']}, where it cannot be found from here. "
        "From now on only steps in the new place count."
    ]


def _packs(packs: int, size_bytes: int | None) -> str:
    size = "" if size_bytes is None else f" ({human_bytes(size_bytes)})"
    return f"{_count(packs, 'pack')}{size}"
