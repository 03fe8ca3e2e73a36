"""What can go wrong, by what one does about it."""

import difflib
from collections.abc import Iterable


class RematError(Exception):
    """Any error of this package."""


class InvalidInputError(RematError, ValueError):
    """An argument cannot be meant; the message says what is expected."""


class UnknownNameError(InvalidInputError):
    """A policy speaks of a value that the block does not have.

    jax itself would recompute everything and say nothing.
    """


class GradientMismatchError(RematError):
    """A rematerialised function's gradients differ from the function's own."""


class RematWarning(UserWarning):
    """A policy is right but does less than it seems to."""


def closest(name: str, known: Iterable[str]) -> str:
    """Words that name what was probably meant, or all there is."""
    there = list(known)
    like = difflib.get_close_matches(name, there, n=3)
    if like:
        return f"did you mean {' or '.join(repr(one) for one in like)}?"
    return f"there are {', '.join(repr(one) for one in there) or 'none'}"
