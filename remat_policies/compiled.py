"""What a compiled step takes of a device, as a value: words, table, JSON.

Does not belong here: compiling (see `verify`).
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from remat_policies.errors import OverBudgetError

_REMEDIES = (
    "Save or offload less by a tighter policy, donate what the step replaces, take a "
    "smaller batch, or shard over more devices."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """That a TPU compiler gave up, in numbers; exact to 10 MB.

    Attributes:
        required_bytes: Arguments, outputs and temporaries together.
        available_bytes: What the compiler allows a program.
    """

    required_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a compiled step takes of each device. Sizes in bytes.

    Attributes:
        target: Name of the device it was compiled for.
        device_count: Over how many of them its inputs are spread.
        argument_bytes: Arguments in device memory; these and all other parts are None
            where the compiler gave up.
        output_bytes: Results in device memory.
        alias_bytes: Of these, how much takes the place of donated arguments.
        temp_bytes: Everything in between, saved residuals above all.
        host_bytes: Pinned memory of the host: offloaded residuals, and arguments and
            results that live there.
        peak_bytes: The compiler's own peak. Counts host buffers and a TPU's on-chip
            memory as well, so it is no measure of device memory.
        hbm_bytes: What must be resident: arguments, outputs and temporaries, less what
            is aliased; what the compiler asked for, where it gave up.
        available_bytes: What there is for it: the budget, less the headroom.
        fits: Whether it does.
        out_of_memory: Set where the compiler gave up; a GPU's never does.
        flops: Of one step, as XLA counts: the body of a loop once, a Pallas kernel by
            its own estimate if it has one. None for GPUs.
        hidden_remats: Instructions that XLA doubled on its own, to fit. This and the
            next are None where jaxlib cannot read the compiler's program.
        kernels: Calls in the program by kernel; see `hlo.kernel_counts`.
        seconds: What it took to trace and compile.
    """

    target: str
    device_count: int
    argument_bytes: int | None
    output_bytes: int | None
    alias_bytes: int | None
    temp_bytes: int | None
    host_bytes: int | None
    peak_bytes: int | None
    hbm_bytes: int
    available_bytes: int
    fits: bool
    out_of_memory: OutOfMemory | None
    flops: float | None
    hidden_remats: int | None
    kernels: Mapping[str, int] | None
    seconds: float

    def to_json(self) -> str:
        """All of it as one JSON object, by name of the field."""
        return json.dumps(dataclasses.asdict(self))

    def require_fit(self) -> "Compiled":
        """Itself, if it fits.

        Raises:
            OverBudgetError: It does not.
        """
        if self.fits:
            return self
        raise OverBudgetError(
            f"{self._verdict()} {_REMEDIES}",
            required_bytes=self.hbm_bytes,
            available_bytes=self.available_bytes,
        )

    def explain(self) -> str:
        """What it takes and what stands out, in plain words."""
        words = [self._verdict()]
        if self.host_bytes:
            words.append(f"{_size(self.host_bytes)} more are in the host's memory.")
        if self.hidden_remats is None:
            words.append(
                "jaxlib cannot read the compiled program: what XLA recomputes on its "
                "own, and its kernels, are not known."
            )
        if self.hidden_remats:
            words.append(
                f"To fit, XLA recomputes {self.hidden_remats} values on its own, "
                "policy or not: leave it more headroom."
            )
        if self.kernels:
            calls = (f"{name} {count}" for name, count in self.kernels.items())
            words.append(f"Calls of kernels: {', '.join(calls)}.")
        if not self.fits:
            words.append(_REMEDIES)
        return " ".join(words)

    def _verdict(self) -> str:
        needs = (
            f"The step needs {_size(self.hbm_bytes)} of each of {self.device_count} "
            f"{self.target}; {_size(self.available_bytes)} are available"
        )
        if self.out_of_memory:
            return f"{needs}, and the compiler gave up."
        return f"{needs}: it {'fits' if self.fits else 'does not fit'}."

    def __rich__(self) -> Table:
        """A table of it, for `rich.print`."""
        table = Table(title=f"compiled for {self.device_count} x {self.target}")
        table.add_column("per device")
        table.add_column("", justify="right")
        sizes = {
            "arguments": self.argument_bytes,
            "outputs": self.output_bytes,
            "of these donated": self.alias_bytes,
            "temporaries": self.temp_bytes,
            "resident": self.hbm_bytes,
            "available": self.available_bytes,
            "host memory": self.host_bytes,
        }
        for label, count in sizes.items():
            if count is not None:
                table.add_row(label, _size(count))
        table.add_row("fits", "yes" if self.fits else "no")
        if self.flops is not None:
            table.add_row("FLOPs", f"{self.flops:.4g}")
        hidden = self.hidden_remats
        known = "not known" if hidden is None else str(hidden)
        table.add_row("hidden recomputations", known)
        for name, count in (self.kernels or {}).items():
            table.add_row(f"calls of {name}", str(count))
        return table


def _size(count: int) -> str:
    """A size in the units compilers use."""
    if count < 1 << 30:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count / (1 << 30):.2f} GiB"
