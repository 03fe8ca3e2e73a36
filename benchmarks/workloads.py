"""Training states from real, small training runs, for measuring what a save costs.

Every workload is a generator of successive states (pytrees of jax arrays) of one run on
real text. Nothing is synthetic: gradients, moments and weights come from optax and
flax, so that the share of bits that change from one state to the next is what a real
run of the same kind shows. A run depends only on the scale, the seed and the Python
version (whose library is the text); warmed-up weights are kept in a cache folder.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from decoder import (
    SCALES,
    Scale,
    State,
    batches,
    bf16_copy,
    initial_master,
    mean_loss,
    rounded,
    sequence_losses,
)
from embedding import embedding_states
from rich.console import Console
from rich.progress import track

PRETRAIN_STEPS = 600
TUNE_STEPS = 50


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


def pretrained(setup: Setup) -> tuple[State, optax.OptState]:
    """Returns master and optimizer state after `PRETRAIN_STEPS` steps of AdamW."""
    optimizer = pretrain_optimizer()
    loss = functools.partial(mean_loss, setup.sizes)

    def make() -> tuple[Any, ...]:
        master = initial_master(setup.sizes, seed=setup.seed)
        return run_steps(
            adamw_step(optimizer, loss),
            (master, optimizer.init(master)),
            batches(setup.sizes, seed=setup.seed, held_back=False),
            PRETRAIN_STEPS,
            "pre-training",
        )

    def shapes() -> tuple[State, optax.OptState]:
        master = initial_master(setup.sizes, seed=setup.seed)
        return master, optimizer.init(master)

    return cached(setup, f"pretrained{PRETRAIN_STEPS}", jax.eval_shape(shapes), make)


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
    """Yields weights and optimizer state of a tuning run, from step `TUNE_STEPS` on.

    Args:
        setup: Scale, seed and cache.
        name: Name of the run in the cache.
        optimizer: Optimizer of the run.
        loss: Loss of (weights, tokens).
        weights: fp32 weights that are trained.
    """
    step = adamw_step(optimizer, loss)
    start = (weights, optimizer.init(weights))

    def make() -> tuple[Any, ...]:
        data = batches(setup.sizes, seed=setup.seed, held_back=True)
        return run_steps(step, start, data, TUNE_STEPS, f"warming up {name}")

    weights, opt_state = cached(setup, f"{name}{TUNE_STEPS}", start, make)
    # The data go on where the warm-up stopped, whether it ran now or is a cached one.
    data = batches(setup.sizes, seed=setup.seed, held_back=True)
    for tokens in itertools.islice(data, TUNE_STEPS, None):
        yield weights, opt_state
        weights, opt_state = step(weights, opt_state, tokens)


# ------------------------------------------------------------------------ workloads


def dense(setup: Setup, *, stride: int = 1) -> Iterator[State]:
    """Pre-training with AdamW: fp32 master, mu, nu and the bf16 copy that computes."""
    step = adamw_step(pretrain_optimizer(), functools.partial(mean_loss, setup.sizes))
    master, opt_state = pretrained(setup)
    data = itertools.islice(
        batches(setup.sizes, seed=setup.seed, held_back=False), PRETRAIN_STEPS, None
    )
    while True:
        yield {
            "master": master,
            "moments": adam_moments(opt_state),
            "params": bf16_copy(master),
        }
        for tokens in itertools.islice(data, stride):
            master, opt_state = step(master, opt_state, tokens)


def fine_tune(setup: Setup) -> Iterator[State]:
    """Fine-tuning of every parameter: the state of `dense`, rate 1e-5, b2 0.999."""
    loss = functools.partial(mean_loss, setup.sizes)
    run = tuned(setup, "fine_tune", tune_optimizer(1e-5), loss, pretrained(setup)[0])
    for master, opt_state in run:
        yield {
            "master": master,
            "moments": adam_moments(opt_state),
            "params": bf16_copy(master),
        }


def frozen_backbone(setup: Setup) -> Iterator[State]:
    """Only the last block and the head train; the whole fp32 tree is in the state."""
    base = pretrained(setup)[0]
    names = (f"block_{setup.sizes.layers - 1}", "head")
    frozen = {name: part for name, part in base.items() if name not in names}
    backbone = rounded(frozen)

    def loss(weights: State, tokens: jax.Array) -> jax.Array:
        return mean_loss(setup.sizes, backbone | weights, tokens)

    weights = {name: base[name] for name in names}
    run = tuned(setup, "frozen_backbone", tune_optimizer(1e-4), loss, weights)
    for trained, opt_state in run:
        yield {"master": frozen | trained, "moments": adam_moments(opt_state)}


def lora(setup: Setup, *, rank: int = 8) -> Iterator[State]:
    """Adapters of low rank on every matrix of the blocks, over a bf16 base."""
    base = bf16_copy(pretrained(setup)[0])
    keys = iter(jax.random.split(jax.random.key(setup.seed), 1000))

    def adapter(kernel: jax.Array) -> State:
        rows, columns = kernel.shape
        down = 0.02 * jax.random.normal(next(keys), (rows, rank))
        return {"down": down, "up": jnp.zeros((rank, columns))}

    adapters = {
        block: {
            name: adapter(layer["kernel"])
            for name, layer in base[block].items()
            if "kernel" in layer
        }
        for block in base
        if block.startswith("block_")
    }

    def loss(adapters: State, tokens: jax.Array) -> jax.Array:
        weights = jtu.tree_map(lambda leaf: leaf.astype(jnp.float32), base)
        for block, pairs in adapters.items():
            for name, pair in pairs.items():
                layer = weights[block][name]
                layer["kernel"] = layer["kernel"] + 2.0 * pair["down"] @ pair["up"]
        return mean_loss(setup.sizes, weights, tokens)

    for trained, opt_state in tuned(
        setup, "lora", tune_optimizer(2e-4), loss, adapters
    ):
        yield {"adapters": trained, "base": base, "moments": adam_moments(opt_state)}


def rl_bf16(setup: Setup) -> Iterator[State]:
    """Policy weights at the small rate of reinforcement learning, as bf16 alone.

    The loss is the policy-gradient one on held-back text: each sequence's likelihood is
    weighted with its advantage, here how far its own loss lies below the batch's mean.
    """

    def loss(weights: State, tokens: jax.Array) -> jax.Array:
        losses = sequence_losses(setup.sizes, weights, tokens)
        reward = jax.lax.stop_gradient(-losses)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        return (advantage * losses).mean()

    run = tuned(setup, "rl_bf16", tune_optimizer(1e-6), loss, pretrained(setup)[0])
    for master, _ in run:
        yield {"params": bf16_copy(master)}


def fresh_adamw(setup: Setup) -> Iterator[State]:
    """The state before the first step: random weights, zero moments, the bf16 copy."""
    master = initial_master(setup.sizes, seed=setup.seed)
    moments = adam_moments(pretrain_optimizer().init(master))
    yield {"master": master, "moments": moments, "params": bf16_copy(master)}


def embedding(setup: Setup) -> Iterator[State]:
    """A table of 1,000,000 x 32 fp32, of which a step touches about 4,400 rows."""
    return embedding_states(seed=setup.seed)


WORKLOADS: Mapping[str, Callable[[Setup], Iterator[State]]] = {
    "dense": dense,
    "dense_k100": functools.partial(dense, stride=100),
    "fine_tune": fine_tune,
    "frozen_backbone": frozen_backbone,
    "lora": lora,
    "rl_bf16": rl_bf16,
    "embedding": embedding,
    "fresh_adamw": fresh_adamw,
}
