"""The tables of the comparison, in plain words; losses stand as plainly as wins."""

from collections.abc import Sequence

import numpy as np
from contenders import HANDLERS, ORBAX
from disk import DiskResult
from headlines import Headline
from memory import NOTHING, MemoryResult
from rich.table import Table
from sidebyside import Pair, Seconds, median
from verdicts import Verdict


def new_table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Returns a table with columns of text on the left, of numbers on the right."""
    table = Table(title=title)
    for name in texts:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def megabytes(count: float) -> str:
    """Returns a count of bytes as text in MB of 1e6 bytes."""
    return f"{count / 1e6:,.2f}" if count < 1e7 else f"{count / 1e6:,.1f}"


def seconds(values: Seconds) -> str:
    """Returns the median, and from where to where all values lie."""
    if not values:
        return "-"
    spread = f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else ""
    return f"{median(values):.3f}{spread}"


def times(ours: float, theirs: float) -> str:
    """Returns a ratio as text; a dash where there is none."""
    return f"{ours / theirs:.2f}" if ours == ours and theirs > 0 else "-"


def pair_tables(pair: Pair) -> list[Table]:
    """Returns the tables of one pair: saves with all peers, then restores."""
    state = f"{megabytes(pair.raw_bytes)} MB, {100 * pair.changed:.2f} % changed"
    saves = new_table(
        f"{pair.title} ({state}): saves",
        ["by"],
        [
            "MB, second save",
            "times smaller than raw",
            "second save, s",
            "of Orbax's",
            "later saves, s",
            "of Orbax's",
            "blocking, s",
            "of Orbax's",
        ],
    )
    baseline = [
        median(found(ORBAX))
        for found in (pair.total_seconds, pair.later_seconds, pair.blocking_seconds)
    ]
    for handler in HANDLERS:
        cells = [handler, *_sizes(pair, pair.added_bytes(handler))]
        found = pair.total_seconds, pair.later_seconds, pair.blocking_seconds
        for values, theirs in zip(found, baseline, strict=True):
            ours = values(handler)
            cells += [seconds(ours), times(median(ours), theirs)]
        saves.add_row(*cells)
    for peer in pair.peers:
        if peer.install:
            saves.add_row(peer.name, f"not installed: {peer.install}")
            continue
        share = times(median(peer.save_seconds), baseline[0])
        sizes = _sizes(pair, peer.added_bytes)
        saves.add_row(peer.name, *sizes, seconds(peer.save_seconds), share)
    return [saves, _restores(pair)]


def _sizes(pair: Pair, added: int) -> list[str]:
    return [megabytes(added), f"{pair.raw_bytes / max(added, 1):.2f}"]


def _restores(pair: Pair) -> Table:
    table = new_table(
        f"{pair.title}: restores of the last state",
        ["by"],
        [
            "page cache, s",
            "of Orbax's",
            "cold disk, s",
            "of Orbax's",
            "state before in memory, s",
            "of Orbax's (page cache)",
        ],
    )
    warm, cold = median(pair.restore_seconds(ORBAX)), median(pair.cold_seconds(ORBAX))
    for handler in HANDLERS:
        cells = [handler]
        for values, theirs in (
            (pair.restore_seconds(handler), warm),
            (pair.cold_seconds(handler), cold),
            (pair.warm_seconds(handler), warm),
        ):
            cells += [seconds(values), times(median(values), theirs)]
        table.add_row(*cells)
    for peer in pair.peers:
        if peer.restore_seconds:
            share = times(median(peer.restore_seconds), warm)
            table.add_row(peer.name, seconds(peer.restore_seconds), share)
    return table


def memory_table(results: Sequence[MemoryResult]) -> Table:
    """Returns the peaks of memory of saving loops, by workload."""
    table = new_table(
        "Peak of resident memory of a loop that trains on while it saves",
        ["workload", "saves by"],
        ["peak, MB", "of Orbax's", "above the loop alone, MB", "of Orbax's"],
    )
    for result in results:
        peaks = result.peaks
        alone = peaks[NOTHING].peak_bytes
        theirs = peaks[ORBAX].peak_bytes
        for loop, peak in peaks.items():
            above = max(peak.peak_bytes - alone, 0)
            table.add_row(
                result.where,
                loop,
                megabytes(peak.peak_bytes),
                times(peak.peak_bytes, theirs),
                megabytes(above),
                times(above, theirs - alone),
            )
        table.add_section()
    return table


def disk_table(results: Sequence[DiskResult]) -> Table:
    """Returns what long runs left on disk."""
    table = new_table(
        "Disk after a long run: default options, max_to_keep=3",
        ["workload", "scale"],
        ["saves", "state MB", "on disk MB", "live records MB", "ratio", "worst ratio"],
    )
    for run in results:
        ratios = np.divide(run.root_bytes, run.live_bytes)
        table.add_row(
            run.workload,
            run.scale,
            str(run.saves),
            megabytes(run.state_bytes),
            megabytes(run.root_bytes[-1]),
            megabytes(run.live_bytes[-1]),
            f"{run.ratio:.2f}",
            f"{ratios.max():.2f}",
        )
    return table


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Returns what is wanted, found, and whether it is met."""
    table = new_table("What is wanted", ["what", "where"], ["found", "wanted", "met"])
    for one in verdicts:
        sign = "at least" if one.at_least else "at most"
        table.add_row(
            one.what,
            one.where,
            f"{one.found:.2f}",
            f"{sign} {one.wanted:.2f}",
            "met" if one.met else "[bold red]not met[/]",
        )
    return table


def headline_table(found: Sequence[Headline]) -> Table:
    """Returns the advertised savings and what became of them."""
    table = Table(title="What incremental checkpoints are advertised with")
    for name in ("less", "conditions", "advertised", "here", "verdict"):
        numbers = name in ("advertised", "here")
        table.add_column(name, justify="right" if numbers else "left")
    for one in found:
        table.add_row(
            one.claim,
            one.conditions,
            f"-{100 * one.wanted:.0f} %",
            f"{-100 * one.found:+.1f} %",
            one.verdict,
        )
    return table
