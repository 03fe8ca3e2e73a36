"""What is kept for the backward pass: frozen values that print, hash and become JSON.

A policy becomes one of jax's own name-based policies; a callable of ours would be
ignored by jax's new remat (`JAX_REMAT3`) on some versions, in silence. Does not belong
here: applying a policy to a function.
"""

import dataclasses
import fnmatch
import functools
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from remat_policies import _compat
from remat_policies.errors import InvalidInputError

AUTO = "rp/"
"""How every name begins that was given by `autoname`, not by a block."""

JaxPolicy = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which values of a block are kept, where, and that the others are recomputed.

    Values are meant by the names that the block gave them (`checkpoint_name`) or, for
    values without one, by those that `autoname` gives. `*` and `?` stand for any text.

    Attributes:
        label: What it is called in tables.
        remat: False: nothing is recomputed, as if there were no policy.
        save: Names of values kept in the device's memory.
        offload: Names of values kept in the host's memory until they are needed.
        unnamed: Stands in for `save` (or, where `offload` is not empty, for
            `offload`) in a block that has none of the names.
        strict: Each name has to stand for a value of the block. Presets are not
            strict: they know the names of many kinds of block, one is enough.

    Example:
        >>> names(save=["query_proj"], offload=["context"])
        names(save=['query_proj'], offload=['context'])

    Raises:
        InvalidInputError: A name is both saved and offloaded, is empty, or is not text.
    """

    label: str = ""
    remat: bool = True
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()
    strict: bool = True

    def __post_init__(self) -> None:
        for name in (*self.save, *self.offload, *self.unnamed):
            if not isinstance(name, str) or not name:
                raise InvalidInputError(f"names are texts that are not empty: {name!r}")
        both = sorted(set(self.save) & set(self.offload))
        if both:
            raise InvalidInputError(
                f"{both} are to be saved and offloaded: a value is kept in one place;"
                " take them out of `save` or out of `offload`"
            )
        if not self.remat and (self.save or self.offload):
            raise InvalidInputError("without remat every value is kept: name none")

    def __repr__(self) -> str:
        if self.label:
            return self.label
        given = [("save", self.save), ("offload", self.offload)]
        inside = ", ".join(f"{key}={list(value)}" for key, value in given if value)
        return f"names({inside})"

    @property
    def keeps(self) -> tuple[str, ...]:
        """All names that it speaks of."""
        return (*self.save, *self.offload)

    def relaxed(self) -> "Policy":
        """The same, but names that a block does not have are passed over."""
        return dataclasses.replace(self, strict=False)

    def jax_policy(self) -> JaxPolicy | None:
        """The same policy as `jax.checkpoint` takes it: one object for equal policies.

        Names stand for themselves here: `*` is for `remat_policies.remat`, which knows
        the block.

        Returns:
            What to give to `jax.checkpoint(policy=)`; None recomputes everything.

        Raises:
            InvalidInputError: `none` (do not call `jax.checkpoint` at all), or values
                are to be offloaded and this jax would ignore that.
        """
        if not self.remat:
            raise InvalidInputError(
                "`none` recomputes nothing: leave jax.checkpoint out; None as a policy"
                " of jax.checkpoint means the opposite, to recompute everything"
            )
        if self.offload and _compat.offload_is_ignored():
            raise InvalidInputError(
                f"jax {jax.__version__} with JAX_REMAT3 ignores what is to be"
                " offloaded, and recomputes it: use remat_policies.remat, leave"
                " JAX_REMAT3 unset, or take jax 0.11 or newer"
            )
        return lowered(self)

    def to_json(self) -> str:
        """A JSON document that `from_json` reads."""
        fields = {
            "label": self.label,
            "remat": self.remat,
            "save": list(self.save),
            "offload": list(self.offload),
            "unnamed": list(self.unnamed),
            "strict": self.strict,
        }
        return json.dumps(fields, sort_keys=True)


def from_json(text: str) -> Policy:
    """The policy that `Policy.to_json` wrote.

    Raises:
        InvalidInputError: The text is no such document.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"not a policy in JSON: {error}") from error
    wanted = {"label", "remat", "save", "offload", "unnamed", "strict"}
    if not isinstance(fields, dict) or set(fields) != wanted:
        raise InvalidInputError(f"a policy has the fields {sorted(wanted)}: {text!r}")
    for key in ("save", "offload", "unnamed"):
        if not isinstance(fields[key], list):
            raise InvalidInputError(f"`{key}` is a list of names: {fields[key]!r}")
        fields[key] = tuple(fields[key])
    for key, kind in (("label", str), ("remat", bool), ("strict", bool)):
        if not isinstance(fields[key], kind):
            raise InvalidInputError(f"`{key}` is a {kind.__name__}: {fields[key]!r}")
    return Policy(**fields)


def names(*, save: Iterable[str] = (), offload: Iterable[str] = ()) -> Policy:
    """Keep the values of these names, recompute all others.

    Args:
        save: Kept in the device's memory.
        offload: Kept in the host's memory; copied back before they are needed.

    Raises:
        InvalidInputError: As `Policy`, or one text instead of several.
    """
    for given in (save, offload):
        if isinstance(given, str):
            raise InvalidInputError(f"several names, as in [{given!r}]: {given!r}")
    return Policy(save=tuple(sorted(set(save))), offload=tuple(sorted(set(offload))))


def any_of(*policies: Policy) -> Policy:
    """Keep what at least one of them keeps; on the device if one of them says so.

    Example:
        >>> any_of(names(save=["a"]), names(save=["b"], offload=["c"]))
        names(save=['a', 'b'], offload=['c'])
    """
    _some(policies)
    if not all(policy.remat for policy in policies):
        return Policy(label="none", remat=False)
    save = {name for policy in policies for name in policy.save}
    offload = {name for policy in policies for name in policy.offload} - save
    return _combined(policies, save, offload)


def all_of(*policies: Policy) -> Policy:
    """Keep what each of them keeps; on the host if one of them says so.

    Example:
        >>> all_of(names(save=["a", "b"]), names(save=["b"], offload=["a"]))
        names(save=['b'], offload=['a'])

    Raises:
        InvalidInputError: None is given, or one has `*` or `?` (what two patterns have
            in common is no pattern).
    """
    _some(policies)
    limits = [policy for policy in policies if policy.remat]
    if not limits:
        return Policy(label="none", remat=False)
    for name in (name for policy in limits for name in policy.keeps):
        if is_pattern(name):
            raise InvalidInputError(f"all_of takes whole names, not {name!r}")
    common = set.intersection(*(set(policy.keeps) for policy in limits))
    offload = common & {name for policy in limits for name in policy.offload}
    return _combined(limits, common - offload, offload)


def is_pattern(name: str) -> bool:
    """Whether `*` or `?` in it may stand for other text."""
    return "*" in name or "?" in name


def matching(pattern: str, known: Collection[str]) -> list[str]:
    """The names that a name or pattern stands for, in their order.

    A name that is there means itself, whatever signs it has.
    """
    if pattern in known or not is_pattern(pattern):
        return [name for name in known if name == pattern]
    literal = pattern.replace("[", "[[]")  # no other sign is special
    return [name for name in known if fnmatch.fnmatchcase(name, literal)]


def _some(policies: tuple[Policy, ...]) -> None:
    if not policies:
        raise InvalidInputError("at least one policy is needed")


def _combined(policies: Iterable[Policy], save: set[str], offload: set[str]) -> Policy:
    strict = all(policy.strict for policy in policies)
    return Policy(
        save=tuple(sorted(save)), offload=tuple(sorted(offload)), strict=strict
    )


def lowered(policy: Policy) -> JaxPolicy | None:
    """As `Policy.jax_policy`, for functions that this package names itself."""
    return _lowered(frozenset(policy.save), frozenset(policy.offload))


@functools.cache
def _lowered(save: frozenset[str], offload: frozenset[str]) -> JaxPolicy | None:
    # Cached, because newer jax returns a new closure each time, and a new policy means
    # that everything around it is traced and compiled again.
    if not save and not offload:
        return None
    if not offload:
        saving: JaxPolicy = jax.checkpoint_policies.save_only_these_names(*sorted(save))
        return saving
    moving: JaxPolicy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(save),
        names_which_can_be_offloaded=sorted(offload),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return moving
