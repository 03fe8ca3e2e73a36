"""Step time and peak memory of presets and plans, on the devices that are here.

`python benchmarks/steptime.py` runs a small language model on whatever jax finds: a
GPU, a TPU or the CPU. Policies alternate, medians of several rounds; plans are those
for the bytes of each preset and halfway to the next. Peak memory is what the device's
allocator says (not on CPUs); policies run first in the order of what they keep, so
that each peak is its own. Larger: `--size D2048 --layers 8 --batch 4 --length 2048`.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import plans
from rich.progress import Progress

import remat_policies as rp
from remat_policies import demo
from remat_policies.demo import pure

PRESETS = ("full", "save_qkv_proj", "save_dot_except_mlp", "minimal", "none")


def policies(config, batch, length):
    """By name, from what keeps least: presets, and plans in between."""
    block, avals = (
        functools.partial(pure.apply, config),
        pure.avals(config, batch, length),
    )
    kept = {name: rp.report(block, *avals, policy=name).residuals for name in PRESETS}
    found = [(kept[name].device_bytes, name, rp.preset(name)) for name in PRESETS]
    for low, high in itertools.pairwise(PRESETS):
        budget = (kept[low].device_bytes + kept[high].device_bytes) // 2
        plan = rp.plan(block, *avals, budget=budget)
        found.append((plan.device_bytes, f"plan above {low}", plan.policy))
    shares = {
        name: rp.report(block, *avals, policy=policy).residuals
        for _, name, policy in found
    }
    return [
        (name, policy, size, shares[name].recompute_flops / shares[name].forward_flops)
        for size, name, policy in sorted(found, key=lambda one: one[0])
    ]


@click.command(help=__doc__)
@click.option("--size", default="TINY", help="Name of a size in remat_policies.demo.")
@click.option("--attention", default="xla", help="xla, splash or cudnn.")
@click.option("--layers", default=4)
@click.option("--batch", default=4)
@click.option("--length", default=256)
@click.option("--rounds", default=7)
@click.option("--markdown", is_flag=True)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path))
def main(size, attention, layers, batch, length, rounds, markdown, file):
    """Measure and print."""
    config = dataclasses.replace(getattr(demo, size), attention=attention)
    device = jax.devices()[0]
    if device.platform == "cpu":
        config = dataclasses.replace(config, dtype=jnp.float32)  # bf16 is emulated
    shapes, _ = plans.avals_of(config, batch, length, layers, 4096)
    params = pure.init_stack(config, jax.random.key(0), layers)
    table = jax.random.normal(jax.random.key(1), shapes["table"].shape) / 30
    weights = {"table": table.astype(config.dtype), "layers": params}
    tokens = jax.random.randint(jax.random.key(2), (batch, length + 1), 0, 4096)
    rows, steps = [], {}
    chosen = policies(config, batch, length)
    with Progress() as progress:
        task = progress.add_task("steps", total=len(chosen) * (rounds + 1))
        for name, policy, kept, share in chosen:
            steps[name] = jax.jit(plans.make_step(config, policy))
            jax.block_until_ready(steps[name](weights, tokens))
            memory = device.memory_stats() or {}
            peak = memory.get("peak_bytes_in_use")
            rows.append(
                {
                    "policy": name,
                    "kept, MB": f"{layers * kept / 1e6:.1f}",
                    "run again": share,
                    "peak, GB": f"{peak / 1e9:.2f}" if peak else "",
                }
            )
            progress.advance(task)
        seconds = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                start = time.perf_counter()
                jax.block_until_ready(step(weights, tokens))
                seconds[name].append(time.perf_counter() - start)
                progress.advance(task)
    base = statistics.median(seconds["full"])
    for row in rows:
        taken = seconds[row["policy"]]
        row["ms"] = f"{1000 * statistics.median(taken):.0f}"
        row["least ms"] = f"{1000 * min(taken):.0f}"
        row["of full"] = f"{statistics.median(taken) / base:.2f}"
    title = (
        f"{size}, {layers} layers, {batch} x {length} tokens on {device.device_kind}"
    )
    plans.finish(rows, title, markdown, file)


if __name__ == "__main__":
    main()
