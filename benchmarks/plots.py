"""Pictures of the comparison: bytes against seconds, and ratios against Orbax."""

import pathlib
from collections.abc import Sequence

import numpy as np
from contenders import DELTA, HANDLERS, ORBAX
from matplotlib.figure import Figure
from sidebyside import Pair, median
from verdicts import Verdict, ratio


def _plain(value: float, position: int | None) -> str:
    return f"{value:g}"


def plot_pairs(pairs: Sequence[Pair], folder: pathlib.Path) -> None:
    """Writes one scatter of bytes and seconds for each pair, lower left is better."""
    for pair in pairs:
        points = [
            (handler, pair.added_bytes(handler), median(pair.total_seconds(handler)))
            for handler in HANDLERS
        ]
        points += [
            (peer.name, peer.added_bytes, median(peer.save_seconds))
            for peer in pair.peers
            if peer.save_seconds
        ]
        figure = Figure(figsize=(7, 5), layout="constrained")
        axes = figure.subplots()
        for name, added, taken in points:
            kind = {"marker": "*", "s": 160} if name == DELTA else {"marker": "o"}
            axes.scatter(taken, added / 1e6, label=name, **kind)
        axes.axhline(pair.raw_bytes / 1e6, color="grey", ls=":", label="raw state")
        axes.set(
            title=f"Second save: {pair.title}",
            xlabel="seconds of the save",
            ylabel="MB added",
            xscale="log",
            yscale="log",
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(_plain)
        axes.legend(fontsize="small")
        name = pair.title.replace(", ", "-")
        figure.savefig(folder / f"pair-{name}.png", dpi=120)


def plot_ratios(pairs: Sequence[Pair], folder: pathlib.Path) -> None:
    """Writes bars of orbax_delta's bytes and seconds over Orbax's."""
    names = [pair.title for pair in pairs]
    rows = {
        "bytes": [p.added_bytes(DELTA) / p.added_bytes(ORBAX) for p in pairs],
        "second save": [
            ratio(p.total_seconds(DELTA), p.total_seconds(ORBAX)) for p in pairs
        ],
        "blocking": [
            ratio(p.blocking_seconds(DELTA), p.blocking_seconds(ORBAX)) for p in pairs
        ],
        "restore": [
            ratio(p.restore_seconds(DELTA), p.restore_seconds(ORBAX)) for p in pairs
        ],
        "warm restore": [
            ratio(p.warm_seconds(DELTA), p.restore_seconds(ORBAX)) for p in pairs
        ],
    }
    figure = Figure(figsize=(9, 1.5 + 0.8 * len(names)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(rows)
    for index, (what, values) in enumerate(rows.items()):
        places = np.arange(len(names)) + index * height
        axes.barh(places, values, height, label=what)
    axes.axvline(1, color="black", lw=1)
    axes.set_yticks(np.arange(len(names)) + 0.4, names)
    axes.invert_yaxis()
    axes.set(xlabel="orbax_delta over Orbax's default (less is better)")
    axes.legend(fontsize="small")
    figure.savefig(folder / "ratios.png", dpi=120)


def plot_verdicts(verdicts: Sequence[Verdict], folder: pathlib.Path) -> None:
    """Writes how far each wanted figure is from its limit: left of 1 is met."""
    used = [
        one.wanted / one.found if one.at_least else one.found / one.wanted
        for one in verdicts
    ]
    names = [f"{one.what} | {one.where}" for one in verdicts]
    figure = Figure(figsize=(12, 1.5 + 0.25 * len(names)), layout="constrained")
    axes = figure.subplots()
    colours = ["tab:green" if one.met else "tab:red" for one in verdicts]
    axes.barh(names, used, color=colours)
    axes.axvline(1, color="black", lw=1)
    axes.invert_yaxis()
    axes.set(xlabel="share of the limit that is used", xscale="log")
    axes.tick_params(axis="y", labelsize="small")
    figure.savefig(folder / "wanted.png", dpi=120)
