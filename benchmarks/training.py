"""Training itself: what a run depends on, its compiled step, warmed-up weights.

Warmed-up weights are kept in a cache folder, so that a run begins where it is worth
looking at. Does not belong here: what a workload trains, and what is in its state.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from decoder import SCALES, Scale, State, batches, initial_master, mean_loss, rounded
from rich.console import Console
from rich.progress import track


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a run depends on.

    Attributes:
        scale: Key of `SCALES`.
        seed: Seed of the initial weights and of the order of the text.
        cache: Folder for warmed-up weights, or None to train them anew.
    """

    scale: str = "medium"
    seed: int = 0
    cache: pathlib.Path | None = None

    @property
    def sizes(self) -> Scale:
        """The sizes that the scale's name stands for."""
        return SCALES[self.scale]


Loss = Callable[[State, jax.Array], jax.Array]
TrainStep = Callable[
    [State, optax.OptState, jax.typing.ArrayLike], tuple[State, optax.OptState]
]


def adamw_step(
    optimizer: optax.GradientTransformation,
    loss: Loss,
) -> TrainStep:
    """Returns one compiled step: gradients at the bf16 copy, update of the master.

    Args:
        optimizer: What turns gradients into updates of the master.
        loss: Loss of (weights, tokens); the weights have the values of the bf16 copy.

    Returns:
        A function (master, optimizer state, tokens) -> (master, optimizer state).
    """

    @jax.jit
    def step(
        master: State, opt_state: optax.OptState, tokens: jax.typing.ArrayLike
    ) -> tuple[State, optax.OptState]:
        gradients = jax.grad(loss)(rounded(master), jnp.asarray(tokens))
        updates, opt_state = optimizer.update(gradients, opt_state, master)
        return optax.apply_updates(master, updates), opt_state

    return step


def adam_moments(opt_state: optax.OptState) -> State:
    """Returns count, mu and nu of the one Adam in an optax state."""
    (adam,) = (
        node
        for node in jtu.tree_leaves(
            opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState)
        )
        if isinstance(node, optax.ScaleByAdamState)
    )
    return {"count": adam.count, "mu": adam.mu, "nu": adam.nu}


def cached(setup: Setup, name: str, like: Any, make: Callable[[], Any]) -> Any:
    """Returns a tree from the cache folder, or makes it and puts it there.

    Args:
        setup: Names the folder, the scale and the seed.
        name: Name of the tree among those of the same scale and seed.
        like: Tree of ShapeDtypeStructs or arrays of the same structure.
        make: Makes the tree.

    Returns:
        The tree, its leaves jax arrays.
    """
    if setup.cache is None:
        return make()
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    path = setup.cache / f"{name}-{setup.scale}-{setup.seed}-py{python}.npz"
    if path.exists():
        with np.load(path) as stored:
            leaves = [jnp.array(stored[name]) for name in stored.files]
        return jtu.tree_unflatten(jtu.tree_structure(like), leaves)
    tree = make()
    setup.cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    np.savez(partial, *(np.asarray(leaf) for leaf in jtu.tree_leaves(tree)))
    partial.replace(path)
    return tree


def run_steps(
    step: Callable[..., tuple[Any, ...]],
    carry: tuple[Any, ...],
    data: Iterator[np.ndarray],
    count: int,
    title: str,
) -> tuple[Any, ...]:
    """Trains `count` steps under a progress bar and returns what the last one made."""
    console = Console(stderr=True)
    for _ in track(range(count), title, console=console, transient=True):
        carry = jax.block_until_ready(step(*carry, next(data)))
    return carry


def pretrained(setup: Setup, *, extra: int = 0) -> tuple[State, optax.OptState]:
    """Returns master and optimizer state of AdamW after the scale's steps.

    Args:
        setup: Scale, seed and cache.
        extra: Steps to go on from there.
    """
    optimizer = pretrain_optimizer()
    loss = functools.partial(mean_loss, setup.sizes)
    begun = setup.sizes.pretrain_steps if extra else 0
    steps = extra or setup.sizes.pretrain_steps

    def make() -> tuple[Any, ...]:
        if extra:
            start = pretrained(setup)
        else:
            master = initial_master(setup.sizes, seed=setup.seed)
            start = master, optimizer.init(master)
        data = batches(setup.sizes, seed=setup.seed, held_back=False)
        return run_steps(
            adamw_step(optimizer, loss),
            start,
            itertools.islice(data, begun, None),
            steps,
            "pre-training",
        )

    def shapes() -> tuple[State, optax.OptState]:
        master = initial_master(setup.sizes, seed=setup.seed)
        return master, optimizer.init(master)

    return cached(setup, f"pretrained{begun + steps}", jax.eval_shape(shapes), make)


def pretrain_optimizer() -> optax.GradientTransformation:
    """AdamW as for pre-training: 50 steps of warm-up to 3e-4, then constant."""
    schedule = optax.linear_schedule(3e-6, 3e-4, transition_steps=50)
    return optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.01)


def tune_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """AdamW as for fine-tuning, at a constant rate."""
    return optax.adamw(learning_rate, b1=0.9, b2=0.999, weight_decay=0.01)


def tuned(
    setup: Setup,
    name: str,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    weights: State,
) -> Iterator[tuple[State, optax.OptState]]:
    """Yields weights and optimizer state of a tuning run, from a while on.

    Args:
        setup: Scale, seed and cache.
        name: Name of the run in the cache.
        optimizer: Optimizer of the run.
        loss: Loss of (weights, tokens).
        weights: fp32 weights that are trained.
    """
    step = adamw_step(optimizer, loss)
    start = (weights, optimizer.init(weights))
    steps = setup.sizes.tune_steps

    def make() -> tuple[Any, ...]:
        data = batches(setup.sizes, seed=setup.seed, held_back=True)
        return run_steps(step, start, data, steps, f"warming up {name}")

    weights, opt_state = cached(setup, f"{name}{steps}", start, make)
    # The data go on where the warm-up stopped, whether it ran now or is a cached one.
    data = batches(setup.sizes, seed=setup.seed, held_back=True)
    for tokens in itertools.islice(data, steps, None):
        yield weights, opt_state
        weights, opt_state = step(weights, opt_state, tokens)
