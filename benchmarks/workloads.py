"""Training states from real, small training runs, for measuring what a save costs.

Every workload is a generator of successive states (pytrees of jax arrays) of one run on
real text. Nothing is synthetic: gradients, moments and weights come from optax and
flax, so that the share of bits that change from one state to the next is what a real
run of the same kind shows. A run depends only on the scale, the seed and the Python
version (whose library is the text); warmed-up weights are kept in a cache folder.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from decoder import (
    State,
    batches,
    bf16_copy,
    initial_master,
    mean_loss,
    rounded,
    sequence_losses,
)
from embedding import embedding_states
from experts import expert_states
from head import head_columns
from training import Setup as Setup
from training import (
    adam_moments,
    adamw_step,
    pretrain_optimizer,
    pretrained,
    tune_optimizer,
    tuned,
)


def full_state(master: State, opt_state: optax.OptState) -> State:
    """Returns what mixed precision with AdamW keeps: 14 bytes for each parameter."""
    return {
        "master": master,
        "moments": adam_moments(opt_state),
        "params": bf16_copy(master),
    }


def dense(setup: Setup) -> Iterator[State]:
    """Pre-training with AdamW: fp32 master, mu, nu and the bf16 copy that computes."""
    step = adamw_step(pretrain_optimizer(), functools.partial(mean_loss, setup.sizes))
    master, opt_state = pretrained(setup)
    data = batches(setup.sizes, seed=setup.seed, held_back=False)
    for tokens in itertools.islice(data, setup.sizes.pretrain_steps, None):
        yield full_state(master, opt_state)
        master, opt_state = step(master, opt_state, tokens)


def dense_far(setup: Setup, *, stride: int) -> Iterator[State]:
    """Pre-training as `dense`, saved every `stride` steps; each state is cached."""
    for extra in itertools.count(0, stride):
        yield full_state(*pretrained(setup, extra=extra))


def fine_tune(setup: Setup) -> Iterator[State]:
    """Fine-tuning of every parameter: the state of `dense`, rate 1e-5, b2 0.999."""
    loss = functools.partial(mean_loss, setup.sizes)
    run = tuned(setup, "fine_tune", tune_optimizer(1e-5), loss, pretrained(setup)[0])
    for master, opt_state in run:
        yield full_state(master, opt_state)


def ema(setup: Setup) -> Iterator[State]:
    """Fine-tuning with copies: a running average, and the frozen model to compare with.

    The average starts where the measured states start. The reference is what a penalty
    on the distance from the first model needs; it never changes.
    """
    base = pretrained(setup)[0]
    loss = functools.partial(mean_loss, setup.sizes)
    average = base
    reference = bf16_copy(base)

    @jax.jit
    def follow(average: State, master: State) -> State:
        return jtu.tree_map(lambda a, w: a + 1e-3 * (w - a), average, master)

    run = tuned(setup, "fine_tune", tune_optimizer(1e-5), loss, base)
    for master, opt_state in run:
        average = follow(average, master)
        copies = {"average": average, "reference": reference}
        yield full_state(master, opt_state) | copies


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


def moe(setup: Setup) -> Iterator[State]:
    """A mixture of experts of which a batch reaches a few; the others stay."""
    return expert_states(seed=setup.seed)


WORKLOADS: Mapping[str, Callable[[Setup], Iterator[State]]] = {
    "dense": dense,
    "dense_k100": functools.partial(dense_far, stride=100),
    "fine_tune": fine_tune,
    "frozen_backbone": frozen_backbone,
    "lora": lora,
    "rl_bf16": rl_bf16,
    "embedding": embedding,
    "moe": moe,
    "ema": ema,
    "head_columns": head_columns,
    "fresh_adamw": fresh_adamw,
}
