"""Which error a leaf may have, in units that users think in.

By default leaves are stored bit for bit. A policy lets a leaf of float32 be stored
within a bound that holds at every step, whatever was saved or deleted before: what is
restored depends on the true value alone, so that errors do not add up. Pass a mapping
from path to policy, or `adamw(...)`, as `DeltaOptions(lossy=...)`.

>>> lossy = {"opt/nu/*": LogGrid(octaves=0.5), "opt/mu/*": RelativeTo(bound=0.1)}
>>> lossy["opt/nu/*"].bound
0.25
"""

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from orbax_delta.errors import InvalidInputError

_LEAST_BOUND, _MOST_BOUND = 1e-30, 1e30
_OCTAVES = tuple(2.0**power for power in range(-6, 2))


@dataclasses.dataclass(frozen=True, slots=True)
class Lossless:
    """Stored bit for bit, whatever later patterns say."""

    @property
    def bound(self) -> float:
        """No error."""
        return 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """An element is stored only once it has moved by more than this.

    Until then it stays what was stored of it. It is compared with that, not with the
    value at the last save, so that small moves are caught up with once they add up. A
    copy of what was stored stays in memory, whatever `DeltaOptions.base` says.
    Good for leaves of which most elements move little; dense optimizer states are far
    smaller on a `Grid`. Refused for leaves called `nu`, where a small absolute error
    is a large one: training on such a state blows up.

    Attributes:
        abs: |restored - true| is at most this ...
        rel: ... or at most this times |true|, whichever is larger.

    Raises:
        InvalidInputError: A bound is negative or no number, or both are 0.
    """

    abs: float = 0.0
    rel: float = 0.0

    def __post_init__(self) -> None:
        _set(self, "abs", least=0.0)
        _set(self, "rel", least=0.0)
        if not self.abs and not self.rel:
            raise InvalidInputError("Threshold needs abs or rel; found 0 for both")

    @property
    def bound(self) -> float | None:
        """`abs`, where that is all."""
        return None if self.rel else self.abs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Evenly spaced values: |restored - true| <= bound.

    Attributes:
        bound: In the leaf's own units. For weights that Adam trains, one learning rate,
            the one in force, is harmless and sixteen are not (DESIGN.md, decision 76).
        dither: Move the grid at each element, by an amount that is fixed between two
            restores. Without it a value that moves by less than the bound between
            restores is rounded back each time and never gets on.

    Raises:
        InvalidInputError: The bound is not a positive number.
    """

    bound: float
    dither: bool = True

    def __post_init__(self) -> None:
        _set(self, "bound")
        _check_bool("Grid.dither", self.dither)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogGrid:
    """Evenly spaced exponents, for leaves that are never negative, such as nu.

    What is restored is 0 where the value is 0 and only there, never negative, and a
    little too large rather than too small on average.

    Attributes:
        octaves: Spacing, a power of two from 1/64 to 2. 1 is a factor of two, so that
            |restored - true| is at most half of true.
        dither: As of `Grid`.

    Raises:
        InvalidInputError: The spacing is none of these.
    """

    octaves: float = 1.0
    dither: bool = True

    def __post_init__(self) -> None:
        if type(self.octaves) not in (int, float) or self.octaves not in _OCTAVES:
            raise InvalidInputError(
                f"LogGrid.octaves is {self.octaves!r}; expected one of "
                + ", ".join(f"{octaves:g}" for octaves in _OCTAVES)
            )
        _check_bool("LogGrid.dither", self.dither)

    @property
    def bound(self) -> float:
        """|restored - true| / true, of normal numbers, is at most this."""
        return self.octaves / 2


_NARROW_BOUNDS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """The values of a narrower type: |restored - true| / true is at most 2^-8 of bf16.

    Copies of that type are what they were, bit for bit, and take no room.

    Attributes:
        dtype: "bfloat16" or "float16" (2^-11).

    Raises:
        InvalidInputError: It is neither.
    """

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if type(self.dtype) is not str or self.dtype not in _NARROW_BOUNDS:
            raise InvalidInputError(
                f"Narrow.dtype is {self.dtype!r}; expected 'bfloat16' or 'float16'"
            )

    @property
    def bound(self) -> float:
        """|restored - true| / true, of normal numbers, is at most this."""
        return _NARROW_BOUNDS[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RelativeTo:
    """In units of the square root of another leaf: mu in units of sqrt(nu).

    |restored - true| <= bound * (sqrt(other) + floor), other being what is restored of
    the other leaf.

    Attributes:
        leaf: The other leaf's path is this one's with this key ...
        instead_of: ... in the place of this one.
        bound: As above.
        floor: As above; Adam's epsilon.

    Raises:
        InvalidInputError: A bound is no positive number, or a key is missing.
    """

    leaf: str = "nu"
    instead_of: str = "mu"
    bound: float
    floor: float = 1e-8

    def __post_init__(self) -> None:
        _set(self, "bound", most=1e3)
        _set(self, "floor", least=0.0)
        _check_keys("RelativeTo", self.leaf, self.instead_of)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CastOf:
    """A bf16 or f16 copy of another leaf, which takes no room.

    What is restored is the cast of what is restored of the other leaf. Where it is no
    copy in truth, it is stored bit for bit.

    Attributes:
        leaf: The other leaf's path is this one's with this key ...
        instead_of: ... in the place of this one.

    Raises:
        InvalidInputError: A key is missing.
    """

    leaf: str
    instead_of: str

    def __post_init__(self) -> None:
        _check_keys("CastOf", self.leaf, self.instead_of)


Policy = Lossless | Threshold | Grid | LogGrid | Narrow | RelativeTo | CastOf

Schedule = Callable[[int], Any]
"""Learning rate by count of updates, as optax has it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Policies for a state with optax's Adam in it; see `adamw`.

    Attributes: the arguments of `adamw`.
    """

    learning_rate: float | Schedule
    weights: float | str
    mu: float
    nu_octaves: float
    floor: float
    copies: str
    master: str
    least_elements: int

    def __post_init__(self) -> None:
        if not callable(self.learning_rate):
            _check("adamw's learning_rate", self.learning_rate)
            object.__setattr__(self, "learning_rate", float(self.learning_rate))
        if isinstance(self.weights, str):
            Narrow(dtype=self.weights)
        else:
            _check("adamw's weights", self.weights, least=0.0)
            object.__setattr__(self, "weights", float(self.weights))
        if type(self.master) is not str or not self.master:
            raise InvalidInputError(
                f"adamw's master is {self.master!r}; expected a pattern of paths"
            )
        if type(self.least_elements) is not int or self.least_elements < 1:
            raise InvalidInputError(
                f"adamw's least_elements is {self.least_elements!r}; expected a whole "
                "number from 1"
            )
        RelativeTo(bound=self.mu, floor=self.floor)
        LogGrid(octaves=self.nu_octaves)
        if self.copies not in ("follow", "exact"):
            raise InvalidInputError(
                f"adamw's copies is {self.copies!r}; expected 'follow' or 'exact'"
            )


def adamw(
    learning_rate: float | Schedule,
    *,
    weights: float | str = 1.0,
    mu: float = 0.2,
    nu_octaves: float = 1.0,
    floor: float = 1e-8,
    copies: str = "follow",
    master: str = "*",
    least_elements: int = 16_384,
) -> AdamW:
    """Policies for states that optax's Adam trains, found by their structure.

    Two leaves of one shape whose paths differ in `mu` and `nu`, in a node of `count`,
    `mu` and `nu` alone, are Adam's moments; a float32 leaf outside of the optimizer
    whose path ends as theirs are its weights; bf16 and f16 leaves that end alike are
    copies of those. All else is stored bit for bit. Not for `optax.adamax`, whose state
    looks the same: its `nu` is no mean of squares.

    >>> adamw(3e-4).weights
    1.0

    Args:
        learning_rate: The one in force when the state is saved, or optax's schedule,
            which is asked with Adam's `count`. Not that of an earlier phase.
        weights: Bound of the weights, in learning rates; 0: they are exact. "bfloat16":
            they become those of their bf16 copies, which are exact then; that takes a
            part of what a fine-tune at a small rate learns.
        mu: Bound of mu, in units of sqrt(nu).
        nu_octaves: Spacing of nu, see `LogGrid`.
        floor: Adam's epsilon.
        copies: "follow": copies are casts of the restored weights. "exact": they are
            stored bit for bit, and evaluate as ever.
        master: Pattern of the weights' paths, where other leaves end alike (averages).
        least_elements: Smaller leaves are stored bit for bit.

    Raises:
        InvalidInputError: An argument is out of its range.
    """
    return AdamW(
        learning_rate=learning_rate,
        weights=weights,
        mu=mu,
        nu_octaves=nu_octaves,
        floor=floor,
        copies=copies,
        master=master,
        least_elements=least_elements,
    )


Lossy = Mapping[str, Policy] | AdamW


def document(policy: Policy | AdamW) -> dict[str, Any]:
    """A policy as JSON: its name and its numbers."""
    # A schedule may be any object: it is not looked into.
    values = {
        field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)
    }
    if callable(values.get("learning_rate")):
        values["learning_rate"] = "schedule"
    return {"policy": type(policy).__name__, **values}


def documents(lossy: Lossy | None) -> Any:
    """The option `lossy` as JSON."""
    if lossy is None:
        return None
    if isinstance(lossy, AdamW):
        return document(lossy)
    return [[pattern, document(policy)] for pattern, policy in lossy.items()]


def check(lossy: object) -> None:
    """Raise unless `lossy` is what `DeltaOptions.lossy` may be.

    Raises:
        InvalidInputError: It is not; the message says what is expected.
    """
    if lossy is None or isinstance(lossy, AdamW):
        return
    good = isinstance(lossy, Mapping) and all(
        type(pattern) is str and isinstance(policy, Policy)
        for pattern, policy in lossy.items()
    )
    if not good:
        raise InvalidInputError(
            f"DeltaOptions.lossy is {lossy!r:.200}; expected a mapping from patterns "
            "of paths to policies, or policies.adamw(...)"
        )


def _set(policy: object, name: str, **limits: float) -> None:
    """Check a number, and make it one of Python's, as JSON has them."""
    value = getattr(policy, name)
    _check(f"{type(policy).__name__}.{name}", value, **limits)
    object.__setattr__(policy, name, float(value))


def _check(
    name: str, value: object, least: float = _LEAST_BOUND, most: float = _MOST_BOUND
) -> None:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not least <= float(value) <= most:  # type: ignore[arg-type]
        raise InvalidInputError(
            f"{name} is {value!r}; expected a number from {least:g} to {most:g}"
        )


def _check_bool(name: str, value: object) -> None:
    if type(value) is not bool:
        raise InvalidInputError(f"{name} is {value!r}; expected True or False")


def _check_keys(name: str, leaf: object, instead_of: object) -> None:
    good = type(leaf) is str and type(instead_of) is str and leaf and instead_of
    if not good or leaf == instead_of:
        raise InvalidInputError(
            f"{name} has leaf {leaf!r} instead of {instead_of!r}; expected two "
            "different keys of paths"
        )
