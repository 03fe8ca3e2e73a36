"""Plots of what saves cost and of how often to save, as PNG files.

matplotlib comes with the extra `demo`, and is imported when a plot is drawn. Does not
belong here: what is drawn (`costs`, `advice`).
"""

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orbax_delta import advice, wholefiles
from orbax_delta.advice import Advice, Scheme
from orbax_delta.costs import StepCost
from orbax_delta.costviews import human_seconds
from orbax_delta.errors import InvalidInputError, StorageError

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_DARK, _LIGHT, _RED = "#1f6fb4", "#9aa5b1", "#c0392b"
_COLOURS: Mapping[str, str] = {"deltas": _DARK, "full": _LIGHT}
_NAMES: Mapping[str, str] = {"deltas": "deltas", "full": "full saves"}
_POINTS = 400


def require_matplotlib() -> None:
    """Say what is missing before anything is read for a plot.

    Raises:
        InvalidInputError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInputError(
            'a plot needs matplotlib, which is not installed; pip install "orbax-delta'
            '[demo]" brings it'
        )


def draw_history(saves: Sequence[StepCost], path: Path) -> None:
    """Draw seconds and bytes of every save, in order.

    Args:
        saves: All of a root's, by step.
        path: The PNG to write.

    Raises:
        StorageError: It cannot be written.

    Example:
        >>> draw_history(costs.by_step(known.saves), Path("run.png"))  # doctest: +SKIP
    """
    import matplotlib.figure
    import matplotlib.ticker

    figure = matplotlib.figure.Figure(figsize=(11, 4.4), dpi=130, layout="constrained")
    times, sizes = figure.subplots(1, 2)
    places = range(1, len(saves) + 1)
    marker = "o" if len(saves) < 60 else ""
    style = {"marker": marker, "markersize": 4, "linewidth": 1.4}
    total = [save.total_seconds for save in saves]
    blocking = [save.blocking_seconds for save in saves]
    times.plot(places, total, color=_LIGHT, label="until it is committed", **style)
    times.plot(places, blocking, color=_DARK, label="training waits", **style)
    times.set_ylabel("seconds")
    raw = [save.full_bytes / 1e6 for save in saves]
    # A save of which nothing is written still has a part.
    written = [max(save.written_bytes, 1) / 1e6 for save in saves]
    sizes.plot(places, raw, color=_LIGHT, label="raw", **style)
    sizes.plot(places, written, color=_DARK, label="written", **style)
    sizes.set_ylabel("MB")
    for panel, title in ((times, "Time of a save"), (sizes, "Bytes of a save")):
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        # Numbers between the decades only where there are few of these.
        between = matplotlib.ticker.LogFormatter(minor_thresholds=(1, 0.4))
        panel.yaxis.set_minor_formatter(between)
        panel.set_title(title)
        panel.set_xlabel("step")
        _name_steps(panel, [save.step for save in saves])
        _tidy(panel)
    _save(figure, path)


def _name_steps(panel: "matplotlib.axes.Axes", names: Sequence[str]) -> None:
    """Ticks at some saves, with the names of their steps."""
    every = max(1, math.ceil(len(names) / 8))
    places = range(1, len(names) + 1, every)
    shown = [names[place - 1][:12] for place in places]
    panel.set_xticks(list(places), shown, parse_math=False)  # $ is a dollar


def draw_advice(found: Advice, path: Path) -> None:
    """Draw the time that is lost against the interval, with the best one marked.

    Args:
        found: The advice.
        path: The PNG to write.

    Raises:
        StorageError: It cannot be written.

    Example:
        >>> draw_advice(found, Path("advice.png"))  # doctest: +SKIP
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(8, 4.8), dpi=130, layout="constrained")
    panel = figure.subplots()
    for scheme in reversed(found.schemes):  # deltas above the others
        _draw_scheme(panel, scheme, found)
    if found.now_seconds is not None and found.now_overhead is not None:
        panel.plot(
            [found.now_seconds],
            [100 * found.now_overhead],
            "x",
            color=_RED,
            markersize=9,
            markeredgewidth=2.5,
            label=f"now: every {human_seconds(found.now_seconds)}",
        )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("seconds from one save to the next")
    panel.set_ylabel("time lost, %")
    panel.set_title(f"One failure in {human_seconds(found.mtbf_seconds)}")
    _tidy(panel)
    _save(figure, path)


def _draw_scheme(panel: "matplotlib.axes.Axes", scheme: Scheme, found: Advice) -> None:
    least = max(scheme.total_seconds, scheme.blocking_seconds * 1.01, 1e-3)
    now = found.now_seconds or scheme.interval_seconds
    low = max(least, min(scheme.interval_seconds / 100, now / 2))
    high = max(scheme.interval_seconds * 100, now * 2, low * 10)
    ratio = high / low
    intervals = [low * ratio ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    lost = [
        100
        * advice.overhead(
            interval,
            blocking=scheme.blocking_seconds,
            total=scheme.total_seconds,
            restore=found.restore_seconds,
            mtbf=found.mtbf_seconds,
        )
        for interval in intervals
    ]
    colour = _COLOURS[scheme.kind]
    best = human_seconds(scheme.interval_seconds)
    width = 2.0 if scheme.kind == "deltas" else 5.0
    panel.plot(intervals, lost, color=colour, linewidth=width)
    panel.plot(
        [scheme.interval_seconds],
        [100 * scheme.overhead],
        "o",
        color=colour,
        markersize=7 + width,
        label=f"{_NAMES[scheme.kind]}: best every {best}, {scheme.overhead:.2%} lost",
    )


def _tidy(panel: "matplotlib.axes.Axes") -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.legend(edgecolor="none", framealpha=0.85, fontsize=9)


def _save(figure: "matplotlib.figure.Figure", path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    try:
        wholefiles.replace(path, drawn.getvalue())
    except OSError as error:
        raise StorageError(
            f"could not write the plot to {path}: {error}; name a file in a folder "
            "that is there and may be written to"
        ) from error
