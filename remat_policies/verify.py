"""Compiles a step for a TPU or GPU that is not here, and says what it takes there.

Figures are the compiler's own, per device. Does not belong here: predicting them, and
what to do about them.
"""

import time
from collections.abc import Callable
from typing import Any

import jax

from remat_policies import hlo
from remat_policies.compiled import Compiled, OutOfMemory
from remat_policies.devices import Device, device
from remat_policies.errors import InvalidInputError
from remat_policies.placement import placed


def verify(
    step: Callable[..., Any],
    *avals: Any,
    target: str | Device,
    budget_bytes: int | None = None,
    donate_argnums: int | tuple[int, ...] = (),
    static_argnums: int | tuple[int, ...] = (),
    shardings: Any = None,
    headroom: float = 0.0,
) -> Compiled:
    """Compile a step for a device and compare what it takes with what there is.

    Nothing runs, and no accelerator is needed. An input goes where its sharding says:
    that in `shardings`, else its own, else whole onto every device. Shardings may be of
    any mesh, also of this machine's CPUs: axes and their sizes count, and the target's
    devices take the places. While it is traced, that mesh is the current one. Without
    any sharding there is one device.

    Args:
        step: A function, jitted or not.
        *avals: Its arguments: trees of `jax.ShapeDtypeStruct` or arrays; what has no
            shape and dtype (numbers, static arguments) is passed on as it is.
        target: Name of a device, or a variant of one, e.g. of another memory size.
        budget_bytes: What the step may take of a device; all of it by default.
        donate_argnums: As of `jax.jit`; not with a jitted step.
        static_argnums: As of `jax.jit`; not with a jitted step.
        shardings: A tree of `NamedSharding` or None that is a prefix of the tuple of
            arguments, static ones too. Memory kind `pinned_host` is heeded for TPUs.
        headroom: Share of the budget to leave free, from 0 to below 1. XLA starts to
            recompute on its own close to the limit; 0.05 keeps away from it.

    Raises:
        InvalidInputError: Target, budget, headroom or shardings make no sense.
        CompilerMissingError: The target's compiler is not installed.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
        >>> verify(lambda x: x @ x, x, target="v5e").argument_bytes
        2097152
    """
    chosen = device(target) if isinstance(target, str) else target
    available_bytes = _available(chosen, budget_bytes, headroom)
    jitted = _jitted(step, donate_argnums, static_argnums)
    arguments, mesh = placed(avals, shardings, chosen)
    started = time.perf_counter()
    try:
        # The context of a single device would only trip code that looks for its axes.
        if mesh.size > 1:
            with jax.set_mesh(mesh):
                compiled = jitted.lower(*arguments).compile()
        else:
            compiled = jitted.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        overflow = hlo.hbm_overflow(str(error))
        if overflow is None:
            raise
        return _given_up(
            chosen, mesh, overflow, available_bytes, time.perf_counter() - started
        )
    return _measured(
        chosen, mesh, compiled, available_bytes, time.perf_counter() - started
    )


def _available(chosen: Device, budget_bytes: int | None, headroom: float) -> int:
    if not 0 <= headroom < 1:
        raise InvalidInputError(
            f"headroom={headroom} is no share to leave free: give 0 up to below 1."
        )
    if budget_bytes is None:
        budget_bytes = chosen.hbm_bytes
    if not 0 < budget_bytes <= chosen.hbm_bytes:
        raise InvalidInputError(
            f"budget_bytes={budget_bytes} is not within the {chosen.hbm_bytes} bytes "
            f"of a {chosen.name}: give less, or another target."
        )
    return int(budget_bytes * (1 - headroom))


def _jitted(
    step: Callable[..., Any],
    donate_argnums: int | tuple[int, ...],
    static_argnums: int | tuple[int, ...],
) -> Any:
    if not hasattr(step, "lower"):
        return jax.jit(
            step, donate_argnums=donate_argnums, static_argnums=static_argnums
        )
    if donate_argnums != () or static_argnums != ():
        raise InvalidInputError(
            "the step is jitted already: give donate_argnums and static_argnums to "
            "jax.jit, or pass the function without it."
        )
    return step


def _given_up(
    chosen: Device,
    mesh: jax.sharding.Mesh,
    overflow: tuple[int, int],
    available_bytes: int,
    seconds: float,
) -> Compiled:
    required_bytes, allowed_bytes = overflow
    return Compiled(
        target=chosen.name,
        device_count=mesh.size,
        argument_bytes=None,
        output_bytes=None,
        alias_bytes=None,
        temp_bytes=None,
        host_bytes=None,
        peak_bytes=None,
        hbm_bytes=required_bytes,
        available_bytes=available_bytes,
        fits=False,
        out_of_memory=OutOfMemory(
            required_bytes=required_bytes, available_bytes=allowed_bytes
        ),
        flops=None,
        hidden_remats=0,
        kernels={},
        seconds=seconds,
    )


def _measured(
    chosen: Device,
    mesh: jax.sharding.Mesh,
    compiled: Any,
    available_bytes: int,
    seconds: float,
) -> Compiled:
    memory, text = compiled.memory_analysis(), _text(compiled)
    cost = compiled.cost_analysis() or {}  # XLA tells nothing of it for GPUs
    hbm_bytes = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return Compiled(
        target=chosen.name,
        device_count=mesh.size,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        - memory.host_alias_size_in_bytes
        + memory.host_temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        hbm_bytes=hbm_bytes,
        available_bytes=available_bytes,
        fits=hbm_bytes <= available_bytes,
        out_of_memory=None,
        flops=cost.get("flops"),
        hidden_remats=None if text is None else hlo.hidden_remats(text),
        kernels=None if text is None else hlo.kernel_counts(text),
        seconds=seconds,
    )


def _text(compiled: Any) -> str | None:
    """The compiled program, if jaxlib can read what the compiler gives it.

    jaxlib 0.10.2 cannot where libtpu 0.0.52 fuses copies that overlap with work, as it
    does for v5p ("async-update instruction should have 1 operands but sees 3").
    """
    try:
        return str(compiled.as_text())
    except jax.errors.JaxRuntimeError as error:
        if "RET_CHECK" not in str(error) or "hlo_instruction" not in str(error):
            raise
        return None
