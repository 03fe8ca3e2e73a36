"""What history, du, diff, watch and advise show people: tables and sentences.

Made of `costdocuments`, printed by `views`. Does not belong here: reading anything.
"""

from collections.abc import Sequence

from rich.table import Table

from orbax_delta.documents import Document
from orbax_delta.reports import human_bytes
from orbax_delta.views import columns_table, pairs, times

_MAX_LEAVES = 40
_WIDE, _NARROW = 120, 60


def human_seconds(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> [human_seconds(s) for s in (0.0213, 8.5, 150, 5400, 400_000)]
    ['0.021 s', '8.50 s', '2 min 30 s', '1 h 30 min', '4 d 15 h']
    """
    if seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    for unit, below, small, limit in (
        (60, 1, ("min", "s"), 3600),
        (3600, 60, ("h", "min"), 86400),
    ):
        if whole < limit:
            return f"{whole // unit} {small[0]} {whole % unit // below} {small[1]}"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def history_table(saves: Sequence[Document], width: int) -> Table:
    """One line a save, oldest first; where there is no room, without the last ones.

    Args:
        saves: The saves.
        width: Columns of the terminal.
    """
    if width < _NARROW:
        return _narrow_history_table(saves)
    table = columns_table(
        ["step", "item", "saved at"],
        ["blocked s", "total s", "written", "smaller"],
    )
    if width >= _WIDE:
        table.add_column("raw", justify="right", no_wrap=True)
        table.add_column("host", overflow="fold")
        table.add_column("chunks by form", overflow="fold")
    for save in saves:
        cells = (
            save["step"],
            save["item"] or "-",
            save["started_at"][:19].replace("T", " "),
            f"{save['blocking_seconds']:.3f}",
            f"{save['total_seconds']:.2f}",
            human_bytes(save["written_bytes"]),
            times(save["times_smaller"]),
            human_bytes(save["full_bytes"]),
            save["host"] or "-",
            pairs(save["chunks_by_form"]) or "-",
        )
        table.add_row(*cells[: len(table.columns)])
    return table


def _narrow_history_table(saves: Sequence[Document]) -> Table:
    table = columns_table(["step"], ["blocked s", "total s", "written"])
    for save in saves:
        table.add_row(
            save["step"],
            f"{save['blocking_seconds']:.3f}",
            f"{save['total_seconds']:.2f}",
            human_bytes(save["written_bytes"]),
        )
    return table


def restore_lines(history: Document) -> list[str]:
    """What is known of restores."""
    restores = history["restores"]
    if not restores:
        return []
    last = restores[-1]
    return [
        f"Restores known: {len(restores)}; the last one, of step {last['step']}, took "
        f"{human_seconds(last['total_seconds'])} and read "
        f"{human_bytes(last['read_bytes'])}."
    ]


def save_line(save: Document) -> str:
    """One save as `watch` prints it into a pipe."""
    return (
        f"{save['started_at'][11:19]} step {save['step']} ({save['item']}): "
        f"{human_bytes(save['full_bytes'])} as {human_bytes(save['written_bytes'])} "
        f"({times(save['times_smaller'])} times smaller), blocked "
        f"{save['blocking_seconds']:.3f} s of {save['total_seconds']:.2f} s"
    )


def forecast_lines(forecast: Document | None) -> list[str]:
    """What the next saves will take, in words."""
    if forecast is None:
        return ["No save is known yet."]
    per_save = human_bytes(forecast["bytes_per_save"])
    per_day = forecast["bytes_per_day"]
    daily = f", {human_bytes(per_day)} a day at this pace" if per_day else ""
    count = forecast["saves"]
    measured = f"the last {count} saves" if count > 1 else "the one save known"
    written = f"A save writes {per_save} (mean of {measured}){daily}."
    if forecast["deleting"]:
        kept = forecast["steps"]
        growth = (
            f"Steps are deleted, {kept} {'are' if kept != 1 else 'is'} there: in the "
            "long run as much becomes free as is written, and the store stays about as "
            "large as it is."
        )
    else:
        hundred = human_bytes(forecast["growth_bytes_of_100_saves"])
        growth = (
            "No step has been deleted so far, so the store grows by that with each "
            f"save: 100 more saves take {hundred}."
        )
    if forecast["copies_bytes"]:
        growth += (
            " Once it has as many separate copies as keep_bases asks for, it takes "
            f"about {human_bytes(forecast['copies_bytes'])} more."
        )
    return [written, growth]


def owners_table(usage: Document) -> Table:
    """What each step and each kept base owns alone and shares."""
    table = columns_table(
        ["step", "kind"],
        ["alone", "shared", "other files", "free if deleted"],
    )
    for owner in usage["owners"]:
        number = owner["number"]
        is_base = owner["is_base"]
        table.add_row(
            str(number) if is_base and number is not None else owner["name"],
            "kept base" if is_base else "step",
            human_bytes(owner["alone_bytes"]),
            human_bytes(owner["shared_bytes"]),
            human_bytes(owner["file_bytes"]),
            human_bytes(owner["freed_bytes"]),
        )
    return table


def usage_table(usage: Document) -> Table:
    """All bytes of a root, each counted once."""
    table = columns_table(["where"], ["bytes", ""])
    rows = {
        "records that one step or base needs": usage["alone_bytes"],
        "records that several share": usage["shared_bytes"],
        "beside them in their packs (dead records, headers)": usage["rest_bytes"],
        "packs that only pins keep (saves under way)": usage["pinned_bytes"],
        "dead packs (the next prune deletes them)": usage["dead_bytes"],
        "other files of steps and bases": usage["step_file_bytes"],
        "other files of the store": usage["store_file_bytes"],
        "other files of the root": usage["other_bytes"],
    }
    for name, size in rows.items():
        if size is None:
            table.add_row(name, "not known in a bucket", "")
        else:
            table.add_row(name, f"{size:,}", human_bytes(size))
    total = usage["total_bytes"]
    table.add_row("all", f"{total:,}", human_bytes(total), style="bold")
    return table


def elsewhere_lines(usage: Document) -> list[str]:
    """What else a shared store holds."""
    size = usage["elsewhere_bytes"]
    if not size:
        return []
    return [
        f"The shared store holds {human_bytes(size)} more, which this root does not "
        "need: of other roots, or dead."
    ]


def leaves_table(usage: Document) -> Table:
    """What the records of each leaf take, the dearest first."""
    table = columns_table(
        ["leaf", "item"], ["stored", "share", "cumulated", "in the newest step"]
    )
    leaves = usage["leaves"]
    whole = sum(leaf["stored_bytes"] for leaf in leaves) or 1
    so_far = 0
    for leaf in leaves[:_MAX_LEAVES]:
        so_far += leaf["stored_bytes"]
        table.add_row(
            leaf["path"],
            leaf["item"] or "-",
            human_bytes(leaf["stored_bytes"]),
            f"{leaf['stored_bytes'] / whole:.1%}",
            f"{so_far / whole:.1%}",
            human_bytes(leaf["newest_bytes"]),
        )
    if len(leaves) > _MAX_LEAVES:
        more = f"and {len(leaves) - _MAX_LEAVES} more; --json names all"
        table.add_row(more, "", "", "", "", "")
    return table


def diff_table(item: Document) -> Table:
    """Leaves that differ; those that do not are only counted."""
    table = columns_table(
        ["leaf", "what", "type"],
        ["changed", "of", "share", "largest", "mean", "not finite"],
    )
    for leaf in item["leaves"]:
        if leaf["status"] == "same":
            continue
        before, after = leaf["before"], leaf["after"]
        changed = leaf["status"] == "changed"
        kind = after if changed else " -> ".join(filter(None, (before, after)))
        table.add_row(
            leaf["path"],
            "damaged" if leaf["error"] else leaf["status"],
            kind,
            f"{leaf['changed']:,}" if changed else "-",
            f"{leaf['elements']:,}" if changed else "-",
            f"{100 * leaf['share']:.3g}%" if changed else "-",
            _figure(leaf["largest"]),
            _figure(leaf["mean"]),
            f"{leaf['not_finite']:,}" if leaf["not_finite"] else "-",
            style="red" if leaf["error"] else "",
        )
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def diff_lines(item: Document) -> list[str]:
    """How many leaves are the same, and what had to be read."""
    leaves = item["leaves"]
    same = sum(leaf["status"] == "same" for leaf in leaves)
    name = f"Item {item['item']}: " if item["item"] else ""
    lines = [
        f"{name}{same} of {len(leaves)} leaves have the same bits. Read "
        f"{human_bytes(item['read_bytes'])} for {item['chunks_read']} of "
        f"{item['chunks']} chunks; the digests of the others are equal."
    ]
    return lines + [
        f"{leaf['path']}: {leaf['error']}" for leaf in leaves if leaf["error"]
    ]


def advice_table(advice: Document) -> Table:
    """Deltas beside full saves, each at its best interval."""
    schemes = advice["schemes"]
    names = {"deltas": "deltas", "full": "full saves"}
    table = columns_table([""], [names[scheme["kind"]] for scheme in schemes])

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    def seconds(name: str, field: str) -> None:
        row(name, *(human_seconds(scheme[field]) for scheme in schemes))

    def sizes(name: str, field: str) -> None:
        row(name, *(human_bytes(scheme[field]) for scheme in schemes))

    row("saves measured", *(str(scheme["measured"]) for scheme in schemes))
    seconds("training waits for a save (median)", "blocking_seconds")
    seconds("until it is committed (median)", "total_seconds")
    sizes("written by a save (mean)", "save_bytes")
    seconds("best interval between saves", "interval_seconds")
    if advice["step_seconds"]:
        step = advice["step_seconds"]
        steps = (f"{scheme['interval_seconds'] / step:,.0f}" for scheme in schemes)
        row("  in training steps", *steps)
    row("time lost at that interval", *(f"{s['overhead']:.3%}" for s in schemes))
    seconds("training undone by a failure (mean)", "lost_seconds")
    row("saves in 30 days", *(f"{scheme['month_saves']:,.0f}" for scheme in schemes))
    sizes("written in 30 days", "month_bytes")
    kept = advice["keep"]
    sizes("kept at a time" if kept is None else f"kept with {kept} steps", "kept_bytes")
    return table


_RESTORE_SOURCES = {
    "measured": "median of the restores of this run",
    "given": "as given",
    "assumed": "no restore is known: taken for as long as a save; --restore is better",
}


def advice_lines(advice: Document) -> list[str]:
    """What the table rests on, and how the run does now."""
    source = _RESTORE_SOURCES[advice["restore_from"]]
    lines = [
        f"One failure in {human_seconds(advice['mtbf_seconds'])}; after one it takes "
        f"{human_seconds(advice['restore_seconds'])} until training goes on ({source})."
    ]
    if advice["now_seconds"] is not None:
        lines.append(
            f"Now a save begins every {human_seconds(advice['now_seconds'])}, which "
            f"loses {advice['now_overhead']:.3%} of the time."
        )
    if advice["bases"]:
        lines.append(
            "What deltas keep includes the states that the store keeps whatever is "
            f"deleted ({advice['bases']} so far, keep_bases)."
        )
    for scheme in advice["schemes"]:
        if scheme["waits"]:
            kind = "delta" if scheme["kind"] == "deltas" else "full save"
            lines.append(
                f"A {kind} could be worth making more often than it can: the next one "
                "waits until the last one is committed."
            )
    return lines
