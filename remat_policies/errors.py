"""The exception tree, by what the caller can do about it.

Every error says what was found, what was expected and what to do. Does not belong here:
anything that decides *when* to raise.
"""

import difflib
from collections.abc import Iterable


class RematError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidInputError(RematError, ValueError):
    """The call itself is wrong: a name, a target, an option. Mend the call."""


class UnknownNameError(InvalidInputError):
    """A policy speaks of a value that the block does not have.

    jax itself would recompute everything and say nothing.
    """


class GradientMismatchError(RematError):
    """A rematerialised function's gradients differ from the function's own."""


class OverBudgetError(RematError):
    """The program does not fit. Save less, shard more, or take a larger device.

    Attributes:
        required_bytes: What the program needs of each device.
        available_bytes: What there is for it on each device.
    """

    def __init__(self, message: str, *, required_bytes: int, available_bytes: int):
        super().__init__(message)
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class CompilerMissingError(RematError, ImportError):
    """The compiler for the target is not there. Install the extra that brings it."""


class RematWarning(UserWarning):
    """A policy is right but does less than it seems to."""


def closest(name: str, known: Iterable[str]) -> str:
    """Words that name what was probably meant, or all there is."""
    there = list(known)
    like = difflib.get_close_matches(name, there, n=3)
    if like:
        return f"did you mean {' or '.join(repr(one) for one in like)}?"
    return f"there are {', '.join(repr(one) for one in there) or 'none'}"
