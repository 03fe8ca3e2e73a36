"""Plans against presets, predictions against compilers, and batches that fit.

`python benchmarks/plans.py compare` needs no compiler: what presets and plans of the
same bytes run again, block by block. `... compile` compiles plans for devices that are
not here (extra `aot`) and compares bytes and FLOPs with what was predicted. `... batch`
finds the largest batch that fits for each preset, and what a plan runs again there.
Each prints a table, or Markdown by `--markdown`, and writes all by `--json FILE`.
"""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import rich
from rich.progress import track
from rich.table import Table

import remat_policies as rp
from remat_policies import costs, demo
from remat_policies.choosing import choose
from remat_policies.demo import pure
from remat_policies.residuals import split_at
from remat_policies.schedule import schedule

SPLASH = dataclasses.replace(demo.D2048, attention="splash")
LLAMA = dataclasses.replace(demo.LLAMA_8B, attention="splash")
MOE = dataclasses.replace(demo.D2048, ffn_dim=1408, experts=8, attention="splash")
BLOCKS = {
    "dense d2048, XLA attention": (demo.D2048, 2, 2048),
    "dense d2048, splash": (SPLASH, 2, 2048),
    "Llama 8B, splash, 8k": (LLAMA, 1, 8192),
    "8 experts, splash": (MOE, 2, 2048),
    "encoder, dropout": (dataclasses.replace(demo.ENCODER, dropout=0.1), 8, 512),
}
"""Sizes of a block, sequences, tokens of each."""

PRESETS = (
    *("minimal_with_context", "minimal", "save_dot_with_context_except_mlp"),
    *("save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "full"),
)


def block_of(name):
    """A block and the shapes of its arguments."""
    config, batch, length = BLOCKS[name]
    params, x = pure.avals(config, batch, length)
    key = (jax.eval_shape(lambda: jax.random.key(0)),) if config.dropout else ()
    return functools.partial(pure.apply, config), (params, x, *key)


def avals_of(config, batch, length, layers, vocabulary):
    """A language model's weights, and tokens."""
    params, x = pure.avals(config, 1, length, layers=layers)
    table = jax.ShapeDtypeStruct((vocabulary, config.d_model), x.dtype)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    return {"table": table, "layers": params}, tokens


def make_step(config, policy):
    """Gradients of a whole language model: embedding, layers, loss."""

    def loss(weights, tokens):
        def body(x, layer):
            w, key = layer
            return pure.apply(config, w, x, key), None

        x = weights["table"][tokens[:, :-1]]
        count = len(jax.tree.leaves(weights["layers"])[0])
        keys = jax.random.split(jax.random.key(0), count) if config.dropout else None
        y, _ = rp.scan_layers(body, x, (weights["layers"], keys), policy)
        logits = jnp.einsum(
            "bsd,vd->bsv", y, weights["table"], preferred_element_type=jnp.float32
        )
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()

    return jax.grad(loss)


def compared(name):
    """Rows: a preset, the plan of the same bytes, and one of half as many more."""
    block, avals = block_of(name)
    tokens = avals[1].shape[0] * avals[1].shape[1]
    found = {
        preset: rp.report(block, *avals, policy=preset).residuals for preset in PRESETS
    }
    found = {key: one for key, one in found.items() if one.rows or key == "full"}
    order = sorted(found, key=lambda key: found[key].device_bytes)
    budgets = {found[key].device_bytes for key in order}
    steps = [found[key].device_bytes for key in order]
    budgets |= {(low + high) // 2 for low, high in itertools.pairwise(steps)}
    exact = rp.frontier(block, *avals, budgets=sorted(budgets), worth=0)
    usual = rp.frontier(block, *avals, budgets=sorted(budgets))
    rows = []
    for one, other in zip(exact.plans, usual.plans):
        fitting = [k for k in order if found[k].device_bytes <= one.budget_bytes]
        preset = min(fitting, key=lambda key: found[key].recompute_flops)
        again = found[preset].recompute_flops
        rows.append(
            {
                "block": name,
                "kB a token": f"{one.budget_bytes / tokens / 1000:.1f}",
                "best preset": preset,
                "again": again / one.forward_flops,
                "plan": one.recompute_share,
                "gain": 1 - one.recompute_flops / again if again else 0.0,
                "usual plan": other.recompute_share,
                "its kB": f"{other.device_bytes / tokens / 1000:.1f}",
            }
        )
    return rows


def counted(block, avals, policy):
    """What XLA counts of what is run again: nothing for compiled kernels.

    Products of experts (`ragged_dot`) are kernels of the TPU compiler's own.
    """
    split = split_at(block, avals, {})
    found = schedule(split, choose(split, policy).names, split.residuals)
    steps = [split.program.steps[number] for number in found.rerun]
    kernels = sum(
        costs.step_flops(split.program, step)
        for step in steps
        if step.kind == "kernel" or step.kind.startswith("ragged_dot")
    )
    return found.flops - kernels


def called(compiled):
    """How many kernels the program calls; None where it cannot be read."""
    return None if compiled.kernels is None else sum(compiled.kernels.values())


def predicted(name, target, layers):
    """Rows: plans at the bytes of three presets, as predicted and as compiled."""
    config, batch, length = BLOCKS[name]
    if rp.device(target).kind == "gpu":  # splash is a kernel for TPUs
        config = dataclasses.replace(config, attention="xla")
    block = functools.partial(pure.apply, config)
    key = (jax.eval_shape(lambda: jax.random.key(0)),) if config.dropout else ()
    avals = (*pure.avals(config, batch, length), *key)
    model = avals_of(config, batch, length, layers, 32768)
    base = rp.verify(make_step(config, "full"), *model, target=target)
    full = counted(block, avals, rp.preset("full"))
    rows, before, kept_before = [], base.hbm_bytes, 0
    for preset in ("save_qkv_proj", "save_dot_except_mlp", "minimal"):
        kept = rp.report(block, *avals, policy=preset).residuals.device_bytes
        plan = rp.plan(block, *avals, budget=kept, layers=layers)
        found = rp.verify(make_step(config, plan.policy), *model, target=target)
        all_kept = layers * plan.device_bytes
        first = base.hbm_bytes + all_kept
        then = before + all_kept - kept_before  # as `fit` predicts its next plan
        before, kept_before = found.hbm_bytes, all_kept
        row = {
            "block": name,
            "target": target,
            "bytes of": preset,
            "kept, GB": f"{all_kept / 1e9:.3f}",
            "again": plan.recompute_share,
            "compiled, GB": f"{found.hbm_bytes / 1e9:.3f}",
            "from full": first / found.hbm_bytes - 1,
            "from the last": then / found.hbm_bytes - 1,
            "hidden": found.hidden_remats,
            "kernels": called(found),
            "of full": called(base),
        }
        if found.flops and base.flops:  # XLA counts a loop's body once
            less = full - counted(block, avals, plan.policy)
            row["FLOPs"] = (base.flops - less) / found.flops - 1
        rows.append(row)
    return rows


def batches(config, length, layers, target, presets, attempts):
    """Rows: the largest batch of each preset, and what a plan runs again there."""

    def at(batch):
        return avals_of(config, batch, length, layers, 32768)

    step = functools.partial(make_step, config)
    # What a step takes with nothing kept is a line over its batch.
    low, high = (
        rp.verify(step("full"), *at(batch), target=target).hbm_bytes for batch in (1, 3)
    )
    slope = (high - low) // 2
    limit = int(0.94 * rp.device(target).hbm_bytes)
    block, rows = functools.partial(pure.apply, config), []
    for preset in track(presets, "batches"):
        one = rp.report(block, *pure.avals(config, 1, length), policy=preset).residuals
        each = slope + layers * one.device_bytes
        found = rp.largest_batch(
            step(preset),
            at,
            device=target,
            start=max((limit - low + slope) // each, 1),
        )
        row = {
            "preset": preset,
            "largest batch": found.batch,
            "GB": f"{found.compiled.hbm_bytes / 1e9:.2f}",
            "again": one.recompute_flops / one.forward_flops,
        }
        if found.batch:
            fit = rp.fit(step, *at(found.batch), device=target, attempts=attempts)
            row |= {
                "plan there, GB": f"{fit.compiled.hbm_bytes / 1e9:.2f}",
                "plan's again": fit.plan.recompute_share,
                "hidden": fit.compiled.hidden_remats,
                "compiled": len(fit.attempts),
            }
        rows.append(row)
    return rows


def shown(rows, title, markdown):
    """A table of rows that are alike."""
    texts = [
        [
            f"{value:.1%}" if isinstance(value, float)
            else ", ".join(value) if isinstance(value, list)
            else str(value)
            for value in row.values()
        ]
        for row in rows
    ]  # fmt: skip
    if markdown:
        for line in (list(rows[0]), ["---"] * len(rows[0]), *texts):
            print(f"| {' | '.join(line)} |")
        return
    table = Table(title=title)
    for head in rows[0]:
        table.add_column(head)
    for line in texts:
        table.add_row(*line)
    rich.print(table)


def finish(rows, title, markdown, file):
    """Print and write."""
    if file:
        file.write_text(json.dumps(rows, indent=1))
    shown(rows, title, markdown)


markdown_option = click.option("--markdown", is_flag=True, help="For a README.")
json_option = click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path)
)


@click.group(help=__doc__)
def main():
    """See the module."""


@main.command()
@click.option("--block", "names", multiple=True, default=tuple(BLOCKS))
@markdown_option
@json_option
def compare(names, markdown, file):
    """Plans against presets of the same bytes, and halfway to the next."""
    rows = [row for name in track(names, "solving") for row in compared(name)]
    finish(rows, "run again, of a forward pass", markdown, file)


@main.command("compile")
@click.option("--block", "names", multiple=True, default=tuple(BLOCKS))
@click.option("--target", "targets", multiple=True, default=("v5e", "v5p", "h100"))
@click.option("--layers", default=16)
@markdown_option
@json_option
def compile_(names, targets, layers, markdown, file):
    """Predictions against compilers."""
    rows = []
    for name in track(names, "compiling"):
        for target in targets:
            rows += predicted(name, target, layers)
            if file:
                file.write_text(json.dumps(rows, indent=1))
    finish(rows, f"{layers} layers, embedding and loss", markdown, file)


@main.command()
@click.option("--target", default="v5e")
@click.option("--length", default=2048)
@click.option("--layers", default=40)
@click.option("--preset", "presets", multiple=True, default=("none", *PRESETS))
@click.option("--attempts", default=4, help="Plans that are compiled for a batch.")
@markdown_option
@json_option
def batch(target, length, layers, presets, attempts, markdown, file):
    """The largest batch that fits."""
    rows = batches(SPLASH, length, layers, target, presets, attempts)
    finish(rows, f"{layers} layers on {target}", markdown, file)


if __name__ == "__main__":
    main()
