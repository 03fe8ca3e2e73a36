"""The largest batch that fits a device, by asking its compiler.

Does not belong here: policies; the step has one, or none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat_policies.budgets import as_device, whole_number
from remat_policies.compiled import Compiled
from remat_policies.devices import Device
from remat_policies.errors import InvalidInputError
from remat_policies.verify import verify

_BY_LINE = 4
"""So many guesses by the line; it has missed by then if it does."""

_MOST = 1 << 24
"""No batch is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch that fits.

    Attributes:
        batch: How many; 0 if not even the smallest fits.
        compiled: What the step takes with it; of the smallest if none fits.
        tried: What each batch that was compiled takes, in bytes of a device.
    """

    batch: int
    compiled: Compiled
    tried: dict[int, int]


def largest_batch(
    step: Callable[..., Any],
    avals_at: Callable[[int], tuple[Any, ...]],
    *,
    device: str | Device,
    headroom: float = 0.06,
    start: int = 1,
    multiple_of: int = 1,
    donate_argnums: int | tuple[int, ...] = (),
    shardings: Any = None,
) -> LargestBatch:
    """Find the largest batch with which a step fits, by some five compilations.

    What a step takes is nearly a line over its batch: each guess is where the line
    through the last two compilations meets the device's memory. Where it is none, the
    interval is halved.

    Args:
        step: As for `verify`.
        avals_at: From a batch to the step's arguments.
        device: Name of a device, or a variant of one.
        headroom: Share of its memory to leave free.
        start: First guess.
        multiple_of: Only multiples of this are tried, such as the number of devices.
        donate_argnums: As for `verify`.
        shardings: As for `verify`.

    Raises:
        InvalidInputError: A first guess or a multiple below 1, or a step that takes
            the same for any batch.
        CompilerMissingError: The device's compiler is not installed.

    Example:
        >>> import dataclasses, jax, jax.numpy as jnp, remat_policies as rp
        >>> small = dataclasses.replace(rp.device("h100"), hbm_bytes=10**7)
        >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> at = lambda n: (w, jax.ShapeDtypeStruct((n, 256), jnp.float32))
        >>> found = largest_batch(lambda w, x: x @ w, at, device=small, multiple_of=100)
        >>> found.batch, found.compiled.fits
        (4400, True)
    """
    start = whole_number(start, "start", least=1)
    multiple_of = whole_number(multiple_of, "multiple_of", least=1)
    chosen = as_device(device)
    found: dict[int, Compiled] = {}
    fits, fails = 0, None
    guess = max(start // multiple_of, 1)
    while fails is None or fits + 1 < fails:
        found[guess] = compiled = verify(
            step,
            *avals_at(guess * multiple_of),
            target=chosen,
            headroom=headroom,
            donate_argnums=donate_argnums,
            shardings=shardings,
        )
        if compiled.fits:
            fits = max(fits, guess)
        else:
            fails = guess if fails is None else min(fails, guess)
        guess = max(_guess(found), fits + 1)
        if fails is not None:
            guess = min(guess, max(fails - 1, 1))
            if len(found) > _BY_LINE:
                guess = max((fits + fails) // 2, 1)
        if guess > _MOST:
            raise InvalidInputError(
                "what the step takes does not grow with its batch:"
                f" {compiled.hbm_bytes} bytes at {fits * multiple_of}; see that"
                " avals_at heeds its argument"
            )
    return LargestBatch(
        batch=fits * multiple_of,
        compiled=found[fits or 1],
        tried={count * multiple_of: one.hbm_bytes for count, one in found.items()},
    )


def _guess(found: dict[int, Compiled]) -> int:
    """Where the line through the last two meets the device's memory."""
    (*_, (count, one)) = found.items()
    before, bytes_before = 0, one.argument_bytes or 0
    if len(found) > 1:
        (*_, (before, other), _) = found.items()
        bytes_before = other.hbm_bytes
    slope = (one.hbm_bytes - bytes_before) / (count - before)
    left = one.available_bytes - one.hbm_bytes
    # Not more than eight times as many at once: a line through noise may be flat.
    most = 8 * count
    return max(min(count + int(left // slope), most), 1) if slope > 0 else most
