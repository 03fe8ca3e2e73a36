"""From a policy's names to the values of one function.

Does not belong here: applying what was found.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from remat_policies import _compat
from remat_policies.blocknames import LAYER_INPUT
from remat_policies.errors import RematWarning, UnknownNameError, closest
from remat_policies.linearized import Linearized
from remat_policies.policies import AUTO, Policy, is_pattern, matching, names
from remat_policies.program import Program, automatic_names, names_in
from remat_policies.schedule import reach

_REARRANGED = frozenset({"reshape", "transpose", "squeeze", "copy", "expand_dims"})
"""Primitives that give the same elements in another order or shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The values of a function that a policy keeps.

    Attributes:
        save: Name of each that is kept on the device, by number of value.
        offload: Name of each that is kept on the host.
        with_kernel: Those of both that no name asked for: the kernel that makes a kept
            value makes them too, and would have to run again for them.
    """

    save: Mapping[int, str]
    offload: Mapping[int, str]
    with_kernel: frozenset[int]

    @property
    def names(self) -> dict[int, str]:
        """The name of each kept value."""
        return {**self.save, **self.offload}

    @property
    def marks(self) -> dict[int, str]:
        """Under which name jax is told of each kept value.

        Not the block's own: that may stand inside of a loop in the block as well, and
        would keep values there that nobody reads.
        """
        return {value: _mark(name) for value, name in self.names.items()}

    @property
    def policy(self) -> Policy:
        """The policy in these marks alone."""
        return names(
            save=map(_mark, self.save.values()),
            offload=map(_mark, self.offload.values()),
        )


def choose(split: Linearized, policy: Policy) -> Kept:
    """Find the values that a policy means.

    Raises:
        UnknownNameError: The function has no value of a name, or of all names of a
            preset.
    """
    known = _known(split)
    save = _found(policy.save, known)
    offload = _found(policy.offload, known)
    missing = [name for name in policy.keeps if not _found([name], known)]
    if missing and policy.strict:
        raise _unknown(missing[0], split, known)
    if policy.keeps and not save and not offload:
        standing_in = _found(policy.unnamed, known)
        if not standing_in and (policy.strict or policy.label):
            raise _unknown(policy.keeps[0], split, known, preset=policy)
        save, offload = ({}, standing_in) if policy.offload else (standing_in, {})
    offload = {value: name for value, name in offload.items() if value not in save}
    save, extra_saved = _with_kernels(split, save, known)
    offload, extra_offloaded = _with_kernels(split, offload, known)
    kept = Kept(
        save=save,
        offload={value: name for value, name in offload.items() if value not in save},
        with_kernel=frozenset(extra_saved | extra_offloaded),
    )
    if policy.strict:
        _warn_of_unused(split, kept)
    return kept


def has_names(split: Linearized, policy: Policy) -> bool:
    """Whether the function has a value that a policy keeps, if it keeps any."""
    try:
        choose(split, policy.relaxed())
    except UnknownNameError:
        return False
    return True


def unused(split: Linearized, kept: Kept) -> list[str]:
    """Names of kept values that the backward pass does not read."""
    found, _, _ = reach(split, kept.names, split.residuals)
    read = {kept.names[value] for value in found}
    return sorted(set(kept.names.values()) - read)


def _mark(name: str) -> str:
    return f"{AUTO}kept/{name}"


def own_names(split: Linearized) -> dict[str, list[int]]:
    """The values that the function itself names, by name."""
    known: dict[str, list[int]] = {}
    for value, given in split.program.names.items():
        for name in given:
            known.setdefault(name, []).append(origin(split, value))
    return known


def _known(split: Linearized) -> dict[str, list[int]]:
    """Values by name, those that the function itself named first."""
    known = own_names(split)
    if LAYER_INPUT not in known:
        found = layer_input(split)
        known |= {LAYER_INPUT: found} if found else {}
    for value, name in automatic_names(split.program).items():
        known.setdefault(name, []).append(value)
    return known


def layer_input(split: Linearized) -> list[int]:
    """The argument that is what the block gives: the one of its shape, if it is one.

    It has to be known by name to be offloaded. A block that names its own output gains
    nothing: in a scan over layers that stays on the device as the next one's input.
    """
    avals = split.program.avals
    results = {(avals[one].shape, avals[one].dtype) for one in split.outputs}
    found = [
        one
        for one in split.program.arguments
        if (avals[one].shape, avals[one].dtype) in results and avals[one].ndim > 1
    ]
    return found if len(found) == 1 else []


def origin(split: Linearized, value: int) -> int:
    """The result of a kernel that a value is, in another shape; else the value.

    The backward kernel reads its forward kernel's own result: to keep a rearranged
    copy instead would mean to keep it and to run the kernel again all the same.
    """
    program: Program = split.program
    producers = program.producers()
    at = value
    while at in producers:
        step = program.steps[producers[at]]
        if step.kind == "kernel":
            return at if at in split.residuals else value
        if step.kind not in _REARRANGED or len(step.inputs) != 1:
            return value
        (at,) = step.inputs
    return value


def _found(wanted: Iterable[str], known: Mapping[str, list[int]]) -> dict[int, str]:
    return {
        value: name
        for pattern in wanted
        for name in matching(pattern, known)
        for value in known[name]
    }


def _with_kernels(
    split: Linearized, kept: dict[int, str], known: Mapping[str, list[int]]
) -> tuple[dict[int, str], set[int]]:
    """Add what else the backward pass reads of the kernels whose results are kept."""
    names_of = {value: name for name, values in known.items() for value in values}
    extra = {
        value: names_of[value]
        for step in split.program.steps
        if step.kind == "kernel" and any(value in kept for value in step.outputs)
        for value in step.outputs
        if value in split.residuals and value not in kept
    }
    return {**kept, **extra}, set(extra)


def _unknown(
    name: str,
    split: Linearized,
    known: Mapping[str, list[int]],
    preset: Policy | None = None,
) -> UnknownNameError:
    given = sorted({one for names in split.program.names.values() for one in names})
    if preset is not None:
        there = f"it names {', '.join(given)}" if given else "it names none"
        if preset.unnamed:
            there += ", and has no matrix product without batch axes outside of loops"
        return UnknownNameError(
            f"the block has no value that the preset {preset!r} keeps: {there}. jax"
            " would recompute everything and say nothing. Name the values with"
            " jax.ad_checkpoint.checkpoint_name (see remat_policies.blocknames), or"
            " take `full`, if that is what you want"
        )
    for step in split.program.steps:
        inside = {
            one
            for jaxpr in _compat.inner_jaxprs(step.equation)
            for one in names_in(jaxpr)
        }
        if name in inside:
            source = _compat.source_of(step.equation)
            return UnknownNameError(
                f"{name!r} is inside of a {step.kind} at {source.file}:{source.line}:"
                " of that only results can be kept; name one of them, or put"
                " remat_policies.remat around its body"
            )
    like = closest(name, known if name.startswith(AUTO) or is_pattern(name) else given)
    return UnknownNameError(
        f"the block has no value called {name!r}: {like} jax would recompute"
        " everything and say nothing"
    )


def _warn_of_unused(split: Linearized, kept: Kept) -> None:
    for name in unused(split, kept):
        warnings.warn(
            f"{name!r} is kept for nothing: no derivative in this block reads it; leave"
            " it out of the policy",
            RematWarning,
            stacklevel=2,
        )
