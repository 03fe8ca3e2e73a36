"""What a policy does to a block, as a table, JSON or a picture.

Does not belong here: finding it out.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderResult
from rich.table import Table
from rich.text import Text

from remat_policies.applying import as_policy
from remat_policies.errors import InvalidInputError
from remat_policies.lints import Lint, lint
from remat_policies.policies import Policy
from remat_policies.residuals import Residuals, residuals


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `report` found. Printed by `rich`, or `str()` for plain text.

    Attributes:
        residuals: What is kept, value by value.
        lints: Traps.
    """

    residuals: Residuals
    lints: tuple[Lint, ...]

    def __rich_console__(self, *_: Any) -> RenderResult:
        yield _table(self.residuals)
        yield Text(_summary(self.residuals))
        for found in self.lints:
            yield Text(f"{found.kind}: {found.message}. Instead: {found.instead}.")

    def __str__(self) -> str:
        console = Console(width=140, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def to_json(self) -> str:
        """A JSON document of all that the table shows, in bytes and FLOPs."""
        found = self.residuals
        return json.dumps(
            {
                "policy": repr(found.policy),
                "residuals": [asdict(row) for row in found.rows],
                "device_bytes": found.device_bytes,
                "host_bytes": found.host_bytes,
                "argument_bytes": found.argument_bytes,
                "forward_flops": found.forward_flops,
                "recompute_flops": found.recompute_flops,
                "tokens": found.tokens,
                "lints": [asdict(one) for one in self.lints],
            },
            indent=1,
        )

    def plot(self, path: str | Path) -> Path:
        """Draw the bytes of each value as bars; the format is that of the suffix.

        Raises:
            InvalidInputError: Nothing is kept: there is nothing to draw.
        """
        # Imported here: matplotlib is an extra, and takes a second to start.
        from matplotlib.figure import Figure

        rows = [row for row in self.residuals.rows if row.needed][:30]
        if not rows:
            raise InvalidInputError(
                "the policy keeps no value: there is nothing to draw"
            )
        figure = Figure(figsize=(8, 1.2 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        sizes = [row.nbytes / self.residuals.tokens for row in rows]
        colors = ["tab:blue" if row.place == "device" else "tab:orange" for row in rows]
        axes.barh([row.name for row in rows], sizes, color=colors)
        axes.invert_yaxis()
        axes.set_xlabel("bytes a token (blue: device, orange: host)")
        axes.set_title(f"kept under {self.residuals.policy!r}")
        figure.savefig(path, dpi=120)
        return Path(path)


def report(
    block: Callable[..., Any],
    *args: Any,
    policy: Policy | str,
    wrt: Sequence[int] | None = None,
    tokens: int | None = None,
    **kwargs: Any,
) -> Report:
    """Say what a block keeps under a policy, what it runs again, and its traps.

    Args:
        block: Function of pytrees of arrays; nothing of it is computed.
        *args: Of the block: arrays or `jax.ShapeDtypeStruct`s.
        policy: A policy, or the name of a preset.
        wrt: Positions of the arguments by which the derivative is taken; None: all.
        tokens: By how many tokens to divide bytes; None: the result's leading axes.
        **kwargs: Of the block.

    A name that the block does not have is a lint here, and an error in `remat`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        >>> found = report(lambda x, w: jnp.tanh(x @ w), w, w, policy="minimal")
        >>> found.residuals.device_bytes
        64
    """
    chosen = as_policy(policy)
    return Report(
        residuals=residuals(
            block, *args, policy=chosen, wrt=wrt, tokens=tokens, **kwargs
        ),
        lints=lint(block, *args, policy=chosen, **kwargs),
    )


def readable(count: float, unit: str = "B") -> str:
    """A number of bytes (or operations) in a few digits: 1 kB is 1000 B."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(count) < 1000 or prefix == "T":
            break
        count /= 1000
    return f"{count:.4g} {prefix}{unit}"


def _table(found: Residuals) -> Table:
    table = Table(title=f"kept under {found.policy!r}")
    for heading in ("value", "made at", "shape", "dtype", "where"):
        table.add_column(heading, no_wrap=heading != "made at", overflow="fold")
    for heading in ("bytes", "a token", "else run again"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        place = row.place if row.needed else "never read"
        note = " (its kernel's)" if row.with_kernel else ""
        table.add_row(
            row.name + note,
            Path(row.source).name,
            "x".join(map(str, row.shape)),
            row.dtype,
            place,
            readable(row.nbytes),
            f"{row.nbytes / found.tokens:.4g}",
            readable(row.saves_flops, "FLOP"),
        )
    return table


def _summary(found: Residuals) -> str:
    share = found.recompute_flops / found.forward_flops if found.forward_flops else 0.0
    return (
        f"{readable(found.device_bytes)} on the device"
        f" ({found.device_bytes / found.tokens:.4g} B a token),"
        f" {readable(found.host_bytes)} on the host,"
        f" {readable(found.argument_bytes)} of arguments;"
        f" {readable(found.recompute_flops, 'FLOP')} are run again,"
        f" {share:.1%} of a forward pass"
    )
