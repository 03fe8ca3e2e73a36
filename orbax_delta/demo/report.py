"""What the demo shows: its result as tables in plain words and as a plot.

Does not belong here: processes, measuring and comparing. Every number in a sentence
comes from the result, and so does whether a sentence speaks of a gain or a loss.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import rich.box
import rich.console
import rich.progress
import rich.table
from rich.filesize import decimal as in_units
from rich.markup import escape

from orbax_delta.demo.results import DemoResult
from orbax_delta.demo.runs import KEPT_STEPS

if TYPE_CHECKING:
    import matplotlib.axes

# Two figures nearer to each other than this are called the same: the same save takes
# longer or shorter by such a share from one run to the next, but its bytes do not.
SAME_SECONDS_WITHIN = 0.1
SAME_BYTES_WITHIN = 0.01

CALM_COLOUR = "#f5c451"
ORBAX_COLOUR = "#9aa5b1"
DELTA_COLOUR = "#1f6fb4"
KILL_COLOUR = "#c0392b"


def progress_bar(console: rich.console.Console) -> rich.progress.Progress:
    """Make the demo's progress display."""
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def show_opening(console: rich.console.Console, *, steps: int, seed: int) -> None:
    """Say what is about to happen."""
    console.print(
        f"Training a small language model on Python's own source code, twice, for "
        f"{steps} steps from seed {seed}. One run is left alone; the other is killed "
        "in the middle of a save and has to go on from what is on disk. Then the same "
        "states are saved through Orbax's own handler and through orbax_delta. In its "
        "usual size this takes about a minute.\n",
        highlight=False,
    )


def show_result(console: rich.console.Console, result: DemoResult) -> None:
    """Show both tables with what they mean, the verdict and where the plot is."""
    for part in (
        f"The model has {result.parameters:,} parameters. What is saved every "
        f"{result.save_every} steps (parameters, their bfloat16 copy, AdamW's state, "
        f"schedule, dropout key, place in the text) is {in_units(result.state_bytes)}.",
        crash_table(result),
        crash_sentence(result),
        verdict(result),
        "\nNext, the same states in turn through both handlers, in one process, "
        f"{result.save_every} training steps between two saves:",
        cost_table(result),
        cost_sentence(result),
    ):
        console.print(part, highlight=False)
    plot = escape(result.plot)
    console.print(f"\nPlot: {plot}", soft_wrap=True, highlight=False)
    console.print(f"The demo took {result.seconds:.0f} s.", highlight=False)


def crash_table(result: DemoResult) -> rich.table.Table:
    """Lay the two training runs beside each other."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("left alone", justify="right")
    table.add_column("killed and resumed", justify="right")
    repeated = sum(len(life.losses) for life in result.lives) - result.steps
    last_life = result.lives[-1]
    saves = f"every {result.save_every} steps, {KEPT_STEPS} kept"
    table.add_row("steps trained", f"{result.steps}", trained(result))
    table.add_row("saved", saves, saves)
    if result.crash.in_save:
        unfinished = in_units(result.crash.unfinished_bytes)
        table.add_row("killed while saving step", "-", str(result.crash.step))
        table.add_row("  of that save already on disk", "-", unfinished)
    if result.crash.kills:
        found = listed(last_life.found_steps)
        whole = listed(result.crash.whole_steps)
        table.add_row("  whole steps on disk at that moment", "-", whole)
        table.add_row("  steps Orbax lists afterwards", "-", found)
        table.add_row("resumed from step", "-", str(last_life.first_step - 1))
        table.add_row("  steps trained again after that", "-", str(repeated))
    table.add_row(
        "last loss, nats a byte",
        f"{result.undisturbed.losses[-1]:.7f}",
        f"{last_life.losses[-1]:.7f}",
    )
    return table


def trained(result: DemoResult) -> str:
    """Say which steps each process of the killed run trained."""
    return ", then ".join(
        f"{life.first_step}-{life.first_step + len(life.losses) - 1}"
        for life in result.lives
        if life.losses
    )


def listed(steps: tuple[int, ...]) -> str:
    """Write step numbers as a list in words."""
    return ", ".join(str(step) for step in steps) or "none"


def crash_sentence(result: DemoResult) -> str:
    """Say what the kill did and what was left of it."""
    crash = result.crash
    if not crash.kills:
        return (
            "Every save was too quick for the kill to fall into one, so this run was "
            "not killed at all: the two runs are compared, but nothing was resumed."
        )
    missed = crash.kills - int(crash.in_save)
    tries = f" (after {missed} kill(s) that came just too late)" if missed else ""
    if not crash.in_save:
        return (
            f"The process was killed {crash.kills} time(s), each time just after a "
            "save had become whole; no kill fell into a save in this run."
        )
    found = result.lives[-1].found_steps
    if crash.step in found or not set(crash.whole_steps) <= set(found):
        outcome = (
            f"[bold red]But Orbax lists {listed(found)} afterwards, where "
            f"{listed(crash.whole_steps)} were whole.[/]"
        )
    else:
        outcome = (
            f"Step {crash.step} is not listed afterwards; every step that was whole "
            "is, and training went on from the newest of them."
        )
    return (
        "The process was killed without warning (SIGKILL) while it was saving step "
        f"{crash.step}{tries}. {outcome}"
    )


def verdict(result: DemoResult) -> str:
    """Say whether the killed run came out exactly as the one left alone."""
    if result.exact:
        return (
            f"[bold green]Bit-identical:[/] all {result.steps} losses, and all "
            f"{result.leaves} leaves ({in_units(result.state_bytes)}) of the last "
            "state, in memory and as restored from disk."
        )
    return (
        f"[bold red]NOT identical:[/] {len(result.losses_different)} losses differ "
        f"(steps {listed(result.losses_different)}), {len(result.leaves_different)} "
        f"leaves differ ({escape(', '.join(result.leaves_different[:3])) or 'none'}), "
        f"restores from disk {'agree' if result.restores_exact else 'differ'}."
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the cost table; less is better in all of them."""

    label: str
    short: str
    orbax: float
    delta: float
    is_bytes: bool = False

    @property
    def same_within(self) -> float:
        """Share by which the figures may differ and still be called the same."""
        return SAME_BYTES_WITHIN if self.is_bytes else SAME_SECONDS_WITHIN

    @property
    def gains(self) -> bool:
        """Whether orbax_delta needs clearly less."""
        return self.delta * (1 + self.same_within) < self.orbax

    @property
    def loses(self) -> bool:
        """Whether orbax_delta needs clearly more."""
        return self.orbax * (1 + self.same_within) < self.delta

    @property
    def outcome(self) -> str:
        """How orbax_delta compares, in words: "1.5x less", "same", "1.2x more"."""
        if self.gains:
            return f"{self.orbax / self.delta:.2f}x less"
        if self.loses:
            return f"{self.delta / self.orbax:.2f}x more"
        return "same"

    def shown(self, value: float) -> str:
        """Write one of the two figures with its unit."""
        return in_units(round(value)) if self.is_bytes else f"{value * 1000:,.0f} ms"


def cost_rows(result: DemoResult) -> list[Row]:
    """Pair the figures of both handlers."""
    lines = (
        ("first save: on disk", "the first save's bytes", "first_bytes"),
        ("  until the step is whole", "the first save's time", "first_total_seconds"),
        ("each later save: on disk (mean)", "later saves' bytes", "later_mean_bytes"),
        ("  training waits (median)", "how long training waits", "blocking_seconds"),
        ("  until the step is whole (median)", "later saves' time", "total_seconds"),
        ("restoring the last step (median)", "restoring", "restore_seconds"),
    )
    return [
        Row(
            label=label,
            short=short,
            orbax=getattr(result.orbax, field),
            delta=getattr(result.orbax_delta, field),
            is_bytes=field.endswith("_bytes"),
        )
        for label, short, field in lines
    ]


def cost_table(result: DemoResult) -> rich.table.Table:
    """Lay the costs of both handlers beside each other."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("Orbax Standard", justify="right")
    table.add_column("orbax_delta", justify="right")
    table.add_column("orbax_delta needs", justify="right")
    for row in cost_rows(result):
        colour = "green" if row.gains else "red" if row.loses else "default"
        outcome = f"[{colour}]{row.outcome}[/]"
        table.add_row(row.label, row.shown(row.orbax), row.shown(row.delta), outcome)
    return table


def cost_sentence(result: DemoResult) -> str:
    """Say what the cost table means, the losses as plainly as the gains."""
    rows = cost_rows(result)
    parts = {
        "less": [f"{row.short} ({row.outcome})" for row in rows if row.gains],
        "more": [f"{row.short} ({row.outcome})" for row in rows if row.loses],
        "same": [row.short for row in rows if not row.gains and not row.loses],
    }
    openings = {
        "less": "orbax_delta is ahead in",
        "more": "[bold]Orbax's own handler is ahead in[/]",
        "same": "No difference to speak of in",
    }
    said = " ".join(
        f"{openings[word]} {', '.join(shorts)}."
        for word, shorts in parts.items()
        if shorts
    )
    return (
        f"{said} Between the last two saves {result.changed_share:.1%} of all numbers "
        "changed; the fewer change, the less orbax_delta writes. Times are of this "
        f"machine with a state of {in_units(result.state_bytes)}, over "
        f"{len(result.orbax_delta.later_bytes)} later saves."
    )


def draw_plot(result: DemoResult, path: Path) -> None:
    """Draw the loss curves and the bytes of each save into a PNG."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(12, 4.6), dpi=130, layout="constrained")
    losses, sizes = figure.subplots(1, 2)
    draw_losses(losses, result)
    draw_sizes(sizes, result)
    for panel in (losses, sizes):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
        panel.set_axisbelow(True)
    figure.savefig(path, format="png")


def draw_losses(panel: "matplotlib.axes.Axes", result: DemoResult) -> None:
    """Draw the killed run's loss curve over that of the run that was left alone."""
    undisturbed = result.undisturbed.losses
    steps = range(1, len(undisturbed) + 1)
    panel.plot(steps, undisturbed, color=CALM_COLOUR, linewidth=7, label="left alone")
    for number, life in enumerate(result.lives):
        last = number == len(result.lives) - 1
        panel.plot(
            range(life.first_step, life.first_step + len(life.losses)),
            life.losses,
            color=DELTA_COLOUR if last else KILL_COLOUR,
            # Steps that were trained twice show both lines.
            linewidth=1.5 if last else 4,
            label=life_label(result, number),
        )
    if result.crash.kills:
        panel.axvline(result.crash.step, color=KILL_COLOUR, linestyle=":")
        panel.annotate(
            f"killed {'while' if result.crash.in_save else 'after'}\n"
            f"saving step {result.crash.step}",
            (result.crash.step, 0.62),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            color=KILL_COLOUR,
        )
    same = "identical in every bit" if result.exact else "NOT identical"
    panel.set_title(f"Left alone, and killed and resumed: {same}")
    panel.set(xlabel="training step", ylabel="loss, nats a byte")
    panel.legend(frameon=False)


def life_label(result: DemoResult, number: int) -> str:
    """Name one process of the killed run for the plot."""
    if number == len(result.lives) - 1 and result.crash.kills:
        return f"resumed from step {result.lives[number].first_step - 1}"
    return "until it was killed" if result.crash.kills else "second run"


def draw_sizes(panel: "matplotlib.axes.Axes", result: DemoResult) -> None:
    """Draw what each save wrote through either handler."""
    for handler, offset, colour, label in (
        (result.orbax, -0.2, ORBAX_COLOUR, "Orbax Standard"),
        (result.orbax_delta, 0.2, DELTA_COLOUR, "orbax_delta"),
    ):
        sizes = (handler.first_bytes, *handler.later_bytes)
        saves = [number + offset for number in range(1, len(sizes) + 1)]
        panel.bar(
            saves, [size / 1e6 for size in sizes], width=0.4, color=colour, label=label
        )
    panel.axhline(result.state_bytes / 1e6, color="black", linestyle="--", linewidth=1)
    panel.annotate(
        "the state itself",
        (0.0, result.state_bytes / 1e6),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
    )
    panel.set_title("Written by each save of the same states")
    panel.set(xlabel="save", ylabel="MB on disk")
    panel.set_xticks(range(1, len(result.orbax.later_bytes) + 2))
    panel.set_ylim(top=result.state_bytes / 1e6 * 1.3)
    panel.legend(frameon=False, loc="upper right", ncols=2)
