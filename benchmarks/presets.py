"""What each preset keeps, runs again, and takes of a TPU and a GPU that are not here.

`python benchmarks/presets.py` compiles the gradient of a stack of blocks, scanned, for
each preset and target, and prints a table (Markdown by `--markdown`, all figures by
`--json FILE`). Needs the extra `aot`; a TPU takes a minute a program to compile.
"""

import dataclasses
import functools
import json
from pathlib import Path

import click
import jax
import rich
from rich.progress import track
from rich.table import Table

import remat_policies as rp
from remat_policies import demo
from remat_policies.demo import pure

ORDER = (
    *("none", "selective", "minimal_with_context", "minimal"),
    *("save_dot_with_context_except_mlp", "save_dot_except_mlp", "save_qkv_proj"),
    *("save_out_proj", "full"),
    *("minimal_offloaded", "qkv_proj_offloaded", "layer_input_offloaded"),
)


def measured(config, shape, layers, policy, targets):
    """A row: what the report says of a layer, and compilers of all."""
    block = functools.partial(pure.apply, config)
    found = rp.report(block, *pure.avals(config, *shape), policy=policy).residuals
    row = {
        "preset": policy,
        "bytes_per_token": found.device_bytes / found.tokens,
        "host_bytes_per_token": found.host_bytes / found.tokens,
        "recompute_share": found.recompute_flops / found.forward_flops,
    }
    wrap = functools.partial(rp.remat, policy=policy, in_scan=layers > 1)
    gradient = jax.grad(functools.partial(pure.loss, config, wrap=wrap))
    for target in targets:
        avals = pure.avals(config, *shape, layers=layers)
        taken = rp.verify(gradient, *avals, target=target)
        row[target] = {
            "temp_bytes": taken.temp_bytes,
            "host_bytes": taken.host_bytes,
            "flops": taken.flops,
            "hidden_remats": taken.hidden_remats,
            "fits": taken.fits,
            "required_bytes": taken.hbm_bytes,
        }
    return row


def cells(row, targets):
    """A row as text."""
    found = [
        row["preset"],
        f"{row['bytes_per_token'] / 1000:.1f}",
        f"{row['host_bytes_per_token'] / 1000:.1f}",
        f"{row['recompute_share']:.1%}",
    ]
    for target in targets:
        taken = row[target]
        if taken["temp_bytes"] is None:
            found += [f"does not fit: {taken['required_bytes'] / 1e9:.1f}", ""]
        else:
            found += [
                f"{taken['temp_bytes'] / 1e9:.3f}",
                f"{taken['host_bytes'] / 1e9:.3f}",
            ]
    return found


@click.command(help=__doc__)
@click.option("--size", default="D2048", help="Name of a size in remat_policies.demo.")
@click.option("--attention", default="xla", help="xla, splash or cudnn.")
@click.option("--batch", default=2, help="Sequences.")
@click.option("--length", default=2048, help="Tokens of each.")
@click.option("--layers", default=8, help="Blocks in the stack.")
@click.option("--target", "targets", multiple=True, default=("v5e", "h100"))
@click.option("--preset", "presets", multiple=True, default=ORDER)
@click.option("--markdown", is_flag=True, help="The table for a README.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path))
def main(size, attention, batch, length, layers, targets, presets, markdown, file):
    """Compile and print."""
    config = dataclasses.replace(getattr(demo, size), attention=attention)
    rows = [
        measured(config, (batch, length), layers, preset, targets)
        for preset in track(presets, "compiling")
    ]
    if file:
        file.write_text(json.dumps(rows, indent=1))
    heads = ["preset", "kB/token", "host kB/token", "forward again"]
    for target in targets:
        heads += [f"{target} temp GB", "host GB"]
    texts = [cells(row, targets) for row in rows]
    if markdown:
        for line in (heads, ["---"] * len(heads), *texts):
            print(f"| {' | '.join(line)} |")
        return
    table = Table(title=f"{size}, {layers} layers, {batch} x {length} tokens")
    for head in heads:
        table.add_column(head, justify="left" if head == "preset" else "right")
    for line in texts:
        table.add_row(*line)
    rich.print(table)


if __name__ == "__main__":
    main()
