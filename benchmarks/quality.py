"""What lossy saves do to training: runs resumed from them, beside one never stopped.

    python benchmarks/quality.py --plot quality.png

A decoder is pre-trained; then it trains on and is saved and restored ten times through
`ocp.CheckpointManager` with each policy. What counts is the loss on held-back text at
the end, less that of the same run never interrupted, beside what another order of the
data does. The same for a fine-tune, with the bound of its own learning rate and with
that of pre-training. Policies that are known to harm are among them: a test that shows
no harm there shows nothing. The exit code is 1 if it does not, or if the default harms.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import orbax.checkpoint as ocp
from bounds import DEFAULT, Settings
from decoder import Scale, batches, bf16_copy, initial_master, mean_loss
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from tables import new_table
from training import adamw_step

import orbax_delta
from orbax_delta import policies

SIZES = Scale(vocabulary=2048, width=128, layers=3, heads=4, length=64, batch=8)
TINY = Scale(vocabulary=128, width=32, layers=1, heads=2, length=16, batch=2)
EVALUATED = 40
"""Batches of the loss at the end."""

POLICIES: Mapping[str, Settings] = {
    "weights 0.25 lr, mu 0.05, nu 1/4 octave": {
        "weights": 0.25,
        "mu": 0.05,
        "nu_octaves": 0.25,
    },
    "weights 1 lr, mu 0.1, nu 1 octave": {"mu": 0.1},
    DEFAULT: {},
    "bf16 weights exact": {"weights": "bfloat16"},
    "weights 4 lr": {"weights": 4.0},
    "weights 16 lr, mu 0.5, nu 2 octaves": {
        "weights": 16.0,
        "mu": 0.5,
        "nu_octaves": 2.0,
    },
}
OF_BEFORE = "adamw(lr of pre-training)"
HARMFUL = {
    ("pre-training", "weights 16 lr, mu 0.5, nu 2 octaves"),
    ("fine-tune", "bf16 weights exact"),
}
"""Phases and policies that have been found to harm."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A run that is interrupted.

    Attributes:
        name: Its name.
        learning_rate: Constant.
        b2: Of Adam.
        steps: How many.
        restores: How often it is saved and restored, evenly spaced.
        held_back: Whether it trains on the text that pre-training never sees.
    """

    name: str
    learning_rate: float
    b2: float
    steps: int
    restores: int
    held_back: bool

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW at its rate."""
        return optax.adamw(self.learning_rate, b2=self.b2, weight_decay=0.01)


PRETRAINING = Phase(
    name="pre-training",
    learning_rate=9e-4,
    b2=0.95,
    steps=200,
    restores=10,
    held_back=False,
)
FINE_TUNE = Phase(
    name="fine-tune",
    learning_rate=2e-5,
    b2=0.999,
    steps=120,
    restores=10,
    held_back=True,
)
PHASES = (PRETRAINING, FINE_TUNE)
FIRST_STEPS = 300

Carry = tuple[Any, Any]
"""Weights, and state of the optimizer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one policy in one phase.

    Attributes:
        phase: Name of the phase.
        policy: Name of the policy.
        differences: Final loss less that of the run that was never stopped, by seed.
        noise: Standard deviation of the final loss over orders of the data.
        gained: What the phase takes off the loss, mean over seeds.
    """

    phase: str
    policy: str
    differences: tuple[float, ...]
    noise: float
    gained: float

    @property
    def mean(self) -> float:
        """Mean difference."""
        return statistics.fmean(self.differences)

    @property
    def verdict(self) -> str:
        """In a word, beside what chance does to one run and to a mean of them."""
        worse = self.mean > self.noise and min(self.differences) > 0
        if worse:
            return "harmful"
        share = self.noise / math.sqrt(len(self.differences))
        return "harmless" if self.mean <= share else "within noise"


class Trainer:
    """Compiled steps of a phase, and the loss at the end.

    Attributes:
        phase: The phase.
    """

    def __init__(self, phase: Phase, sizes: Scale) -> None:
        """Prepares what runs of the phase share."""
        self.phase = phase
        self._sizes = sizes
        self._loss = functools.partial(mean_loss, sizes)
        self._step = adamw_step(phase.optimizer(), self._loss)
        self._evaluate = jax.jit(self._loss)

    def begin(self, master: Any) -> Carry:
        """Returns weights with a fresh optimizer."""
        return master, self.phase.optimizer().init(master)

    def train(self, carry: Carry, data: Iterator[np.ndarray], steps: int) -> Carry:
        """Returns what some steps make."""
        for tokens in itertools.islice(data, steps):
            carry = jax.block_until_ready(self._step(*carry, tokens))
        return carry

    def data(self, order: int) -> Iterator[np.ndarray]:
        """Yields batches in an order of their own."""
        held_back = self.phase.held_back
        return batches(self._sizes, seed=1000 + order, held_back=held_back)

    def loss(self, carry: Carry) -> float:
        """Returns the mean loss of batches that no run trains on."""
        seen = batches(self._sizes, seed=999_999, held_back=True)
        found = [self._evaluate(carry[0], b) for b in itertools.islice(seen, EVALUATED)]
        return float(jnp.mean(jnp.stack(found)))

    def run(self, carry: Carry, order: int) -> float:
        """Returns the final loss of a run that is never stopped."""
        return self.loss(self.train(carry, self.data(order), self.phase.steps))

    def interrupted(self, carry: Carry, order: int, lossy: policies.AdamW) -> float:
        """Returns the final loss of one that is saved and restored on its way."""
        data = self.data(order)
        each = self.phase.steps // self.phase.restores
        with tempfile.TemporaryDirectory() as root:
            for number in range(self.phase.restores):
                carry = self.train(carry, data, each)
                carry = _through_a_save(pathlib.Path(root), number, carry, lossy)
        return self.loss(carry)


def _through_a_save(
    root: pathlib.Path, number: int, carry: Carry, lossy: policies.AdamW
) -> Carry:
    """A save by one job, and a restore by the next one."""
    master, opt_state = carry
    state = {"params": bf16_copy(master), "master": master, "opt": opt_state}
    registry = orbax_delta.handler_registry(lossy=lossy)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        manager.save(number, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        target = jtu.tree_map(ocp.utils.to_shape_dtype_struct, state)
        found = manager.restore(number, args=ocp.args.StandardRestore(target))
    return found["master"], found["opt"]


def lossy_of(name: str, phase: Phase) -> policies.AdamW:
    """Returns the policies of a row in a phase."""
    if name == OF_BEFORE:
        return policies.adamw(PRETRAINING.learning_rate)
    return policies.adamw(phase.learning_rate, **POLICIES[name])


def measure(
    phase: Phase, sizes: Scale, starts: Sequence[Any], orders: int, progress: Progress
) -> list[Outcome]:
    """Runs a phase from several starts with each policy.

    Args:
        phase: The phase.
        sizes: Of the decoder.
        starts: Weights and optimizer state, or weights alone, by seed.
        orders: Orders of the data by which chance is told, at least 2.
        progress: Gets a bar.
    """
    trainer = Trainer(phase, sizes)
    names = [*POLICIES, *([OF_BEFORE] if phase is FINE_TUNE else [])]
    bar = progress.add_task(phase.name, total=len(starts) * (orders + len(names)))
    spreads, gains = [], []
    differences: dict[str, list[float]] = {name: [] for name in names}
    for seed, start in enumerate(starts):
        carry = start if isinstance(start, tuple) else trainer.begin(start)
        losses = []
        for order in range(orders):
            losses.append(trainer.run(carry, 100 * seed + order))
            progress.advance(bar)
        spreads.append(statistics.variance(losses))
        gains.append(trainer.loss(carry) - losses[0])
        for name in names:
            found = trainer.interrupted(carry, 100 * seed, lossy_of(name, phase))
            differences[name].append(found - losses[0])
            progress.advance(bar)
    return [
        Outcome(
            phase=phase.name,
            policy=name,
            differences=tuple(found),
            noise=math.sqrt(statistics.fmean(spreads)),
            gained=statistics.fmean(gains),
        )
        for name, found in differences.items()
    ]


def plot(outcomes: Sequence[Outcome], path: pathlib.Path) -> None:
    """Writes a picture for each phase: a point for each seed, and the noise."""
    names = list(dict.fromkeys(one.phase for one in outcomes))
    figure = Figure(figsize=(9, 3.2 * len(names)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(len(names)))
    for axes, phase in zip(panels, names, strict=True):
        rows = [one for one in outcomes if one.phase == phase]
        noise = rows[0].noise
        axes.axvspan(-noise, noise, color="0.9", label="another order of the data")
        for place, one in enumerate(rows):
            colour = {"harmful": "tab:red"}.get(one.verdict, "tab:blue")
            places = [place] * len(one.differences)
            axes.scatter(one.differences, places, color=colour, s=18)
            axes.scatter([one.mean], [place], color=colour, marker="|", s=300)
        axes.set_yticks(range(len(rows)), [one.policy for one in rows])
        axes.invert_yaxis()
        axes.axvline(0, color="black", lw=1)
        axes.set_xscale("symlog", linthresh=max(noise, 1e-6))
        axes.set(
            title=f"{phase}: takes {rows[0].gained:.3f} off the loss",
            xlabel="final loss less that of the run never stopped (right is worse)",
        )
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def report(outcomes: Sequence[Outcome], console: Console) -> bool:
    """Prints a table for each phase; returns whether all is as it has to be."""
    good = True
    for phase in dict.fromkeys(one.phase for one in outcomes):
        rows = [one for one in outcomes if one.phase == phase]
        table = new_table(
            f"{phase}: final loss less that of the run never stopped; another order of "
            f"the data moves it by {rows[0].noise:.4f}; the phase takes "
            f"{rows[0].gained:.4f} off it",
            ["policy"],
            ["by seed", "mean", "verdict"],
        )
        for one in rows:
            by_seed = " ".join(f"{found:+.4f}" for found in one.differences)
            table.add_row(one.policy, by_seed, f"{one.mean:+.4f}", one.verdict)
            if one.policy == DEFAULT:
                good = good and one.verdict != "harmful"
            if (phase, one.policy) in HARMFUL:
                good = good and one.verdict == "harmful"
        console.print(table)
    return good


def main() -> int:
    """Trains, interrupts, compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--orders", type=int, default=4, help="of the data, for noise")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all figures")
    parser.add_argument("--plot", type=pathlib.Path, help="where to write the picture")
    parser.add_argument("--quick", action="store_true", help="tiny: does it all run?")
    options = parser.parse_args()
    sizes, phases, first_steps = SIZES, PHASES, FIRST_STEPS
    if options.quick:
        sizes, first_steps = TINY, 4
        phases = tuple(dataclasses.replace(p, steps=4, restores=2) for p in PHASES)
        options.seeds, options.orders = 1, 2
    outcomes: list[Outcome] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        trainer = Trainer(PRETRAINING, sizes)
        starts = []
        bar = progress.add_task("first steps", total=options.seeds)
        for seed in range(options.seeds):
            carry = trainer.begin(initial_master(sizes, seed=seed))
            starts.append(trainer.train(carry, trainer.data(-1 - seed), first_steps))
            progress.advance(bar)
        for phase in phases:
            fresh = phase.name == FINE_TUNE.name
            given = [start[0] if fresh else start for start in starts]
            outcomes += measure(phase, sizes, given, options.orders, progress)
    good = report(outcomes, Console(width=150))
    if options.json:
        figures = [dataclasses.asdict(one) for one in outcomes]
        options.json.write_text(json.dumps(figures, indent=1))
    if options.plot:
        plot(outcomes, options.plot)
    return 0 if good or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
