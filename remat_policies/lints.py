"""Traps: what looks like a policy and is none, with what to write instead.

jax says nothing in any of these cases. Those of names are of plain `jax.checkpoint`;
`remat_policies.remat` has none of them, since it names values itself. Does not belong
here: applying policies.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from remat_policies import _compat
from remat_policies.choosing import choose, origin, unused
from remat_policies.errors import UnknownNameError
from remat_policies.linearized import Linearized
from remat_policies.policies import AUTO, Policy
from remat_policies.program import names_in
from remat_policies.residuals import split_at
from remat_policies.schedule import schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """One trap that was found.

    Attributes:
        kind: Its name, for machines; never changes.
        about: The value or place, such as a name.
        message: What happens.
        instead: What to write.
    """

    kind: str
    about: str
    message: str
    instead: str


def lint(
    fn: Callable[..., Any], *args: Any, policy: Policy | None = None, **kwargs: Any
) -> tuple[Lint, ...]:
    """Look for traps in a block, or in a whole step with `jax.checkpoint` inside.

    Args:
        fn: Of pytrees of arrays.
        *args: Of `fn`: arrays or `jax.ShapeDtypeStruct`s.
        policy: The policy that the block is to have; None looks only at the uses of
            `jax.checkpoint` inside of the function.
        **kwargs: Of `fn`.
    """
    closed = jax.make_jaxpr(fn)(*args, **kwargs)
    jaxpr, _ = _compat.opened(closed)
    found = list(_inside(jaxpr, in_loop=False, within=None))
    if policy is not None and policy.remat:
        split = split_at(fn, args, kwargs)
        plain = split_at(fn, args, kwargs, as_jax=True)
        found += _of_names(split, plain, policy)
    return tuple(dict.fromkeys(found))


def _of_names(split: Linearized, plain: Linearized, policy: Policy) -> Iterator[Lint]:
    """Traps of a policy's names on a block's values."""
    try:
        kept = choose(split, policy.relaxed())
    except UnknownNameError as error:
        yield Lint(
            kind="unknown-name",
            about=", ".join(policy.keeps),
            message=str(error),
            instead="a name that the block gives",
        )
        return
    known = {name for given in split.program.names.values() for name in given}
    for name in policy.keeps:
        if policy.strict and name not in known and not name.startswith(AUTO):
            yield Lint(
                kind="unknown-name",
                about=name,
                message=f"the block has no value called {name!r}: jax recomputes it",
                instead=f"one of {', '.join(sorted(known)) or '(it names none)'}",
            )
    # A preset names what many kinds of block have; the table says what is not read.
    for name in unused(split, kept) if policy.strict else ():
        yield Lint(
            kind="unused-name",
            about=name,
            message=f"no derivative in the block reads {name!r}: the policy does the"
            " same without it",
            instead="leave it out, or name a value that the backward pass reads",
        )
    for value, name in kept.offload.items():
        if value in split.outputs:
            yield Lint(
                kind="offloaded-output",
                about=name,
                message=f"{name!r} is the block's output: in a scan over layers it is"
                " the next layer's input, which stays on the device",
                instead="offload the block's input (blocknames.LAYER_INPUT)",
            )
    yield from _named_twice(split, kept.names)
    yield from _hidden(plain)
    yield from _kept_and_computed(plain, {*kept.names.values()} & known)


def _named_twice(split: Linearized, kept: Mapping[int, str]) -> Iterator[Lint]:
    wanted = set(kept.values())
    for given in split.program.names.values():
        both = [name for name in given if name in wanted or not wanted]
        if len(given) > 1 and both:
            yield Lint(
                kind="named-twice",
                about=", ".join(given),
                message=f"one value is called {' and '.join(map(repr, given))}: plain"
                " jax.checkpoint keeps a copy for each name that the policy has",
                instead="one name for each value",
            )


def _kept_and_computed(plain: Linearized, names: set[str]) -> Iterator[Lint]:
    """Names on copies: what jax keeps, and computes again all the same."""
    program = plain.program
    kept = {
        value: name
        for value, given in program.names.items()
        for name in given
        if name in names
    }
    again = schedule(plain, kept, plain.residuals).rerun
    producers = program.producers()
    for value, name in kept.items():
        step = program.steps[producers[value]]
        if step.kind != "name" or not step.inputs:
            continue
        source = origin(plain, step.inputs[0])
        maker = producers.get(source)
        if maker is None or maker not in again:
            continue
        if program.steps[maker].kind == "kernel":
            why = "a kernel whose backward reads the result without the name"
        elif source in plain.residuals:
            why = "a function whose derivative reads its own result, without the name"
        else:
            why = "something that is used without the name elsewhere"
        yield Lint(
            kind="kept-and-computed",
            about=name,
            message=f"{name!r} names a copy of the result of {why}: plain"
            " jax.checkpoint keeps the copy and computes the value again",
            instead="remat_policies.remat, which names the value itself; or name the"
            " input of the function, and use only the named value from there on",
        )


def _hidden(plain: Linearized) -> Iterator[Lint]:
    """Names in a custom derivative's forward rule that calls the function itself."""
    for step in plain.program.steps:
        custom = _compat.custom_primal_of(step.equation)
        for name in names_in(custom) if custom is not None else ():
            yield Lint(
                kind="hidden-name",
                about=name,
                message=f"{name!r} is inside of a function with a derivative of its"
                " own, whose forward rule calls that function: jax does not see it",
                instead="name the results of the forward rule, or remat_policies.remat",
            )


def _inside(jaxpr: Any, *, in_loop: bool, within: str | None) -> Iterator[Lint]:
    """Traps of `jax.checkpoint` itself, wherever it is in a program."""
    for equation in jaxpr.eqns:
        remat = _compat.remat_of(equation)
        place = _place(equation)
        if remat is not None:
            if within is not None:
                yield Lint(
                    kind="nested-remat",
                    about=place,
                    message=f"jax.checkpoint inside of jax.checkpoint at {within}: the"
                    " policy of the outer one counts, the inner one's is ignored",
                    instead="one jax.checkpoint for each block",
                )
            yield from _of_checkpoint(remat, place, in_loop)
        if equation.primitive.name == "scan" and within is None:
            yield from _of_scan(equation, place)
        rounds = equation.primitive.name == "scan" and equation.params["length"] > 1
        loops = in_loop or rounds or equation.primitive.name == "while"
        for inner in _compat.inner_jaxprs(equation):
            outer = place if remat is not None else within
            yield from _inside(inner, in_loop=loops, within=outer)


def _of_checkpoint(remat: _compat.Remat, place: str, in_loop: bool) -> Iterator[Lint]:
    if not remat.prevents_cse and not in_loop:
        yield Lint(
            kind="undone-by-cse",
            about=place,
            message="prevent_cse=False outside of a loop: XLA finds that the forward"
            " pass is computed twice, computes it once, and the policy is undone",
            instead="prevent_cse=True, or remat_policies.remat without in_scan",
        )
    if remat.keeps == "function":
        yield Lint(
            kind="callable-policy",
            about=place,
            message="a policy that is a function of equations: jax's new remat"
            " (JAX_REMAT3) ignores it on some versions and recomputes everything",
            instead="names: remat_policies.names(save=[...])",
        )
    if remat.keeps == "all":
        yield Lint(
            kind="keeps-everything",
            about=place,
            message="save_anything_except_these_names keeps everything, the names too",
            instead="save_any_names_but_these, or remat_policies.names(save=[...])",
        )
    if remat.keeps == "products" and not _unbatched_products(remat.jaxpr):
        yield Lint(
            kind="all-products-batched",
            about=place,
            message="dots_with_no_batch_dims_saveable keeps nothing: each product here"
            " has a batch axis (vmap, an ensemble, pipeline stages)",
            instead="names, which vmap does not change",
        )


def _of_scan(equation: Any, place: str) -> Iterator[Lint]:
    if "remat_scan" not in _compat.functions_around(equation):
        return
    body, _ = _compat.opened(equation.params["jaxpr"])
    if not any(
        _compat.remat_of(one) or list(_compat.inner_jaxprs(one)) for one in body.eqns
    ):
        yield Lint(
            kind="remat-scan-of-one-axis",
            about=place,
            message="flax.linen.remat_scan with one length recomputes nothing",
            instead="remat_policies.linen.scan_layers, or lengths of two axes",
        )


def _unbatched_products(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            _, (batch, _) = equation.params["dimension_numbers"]
            if not batch:
                return True
        if any(_unbatched_products(inner) for inner in _compat.inner_jaxprs(equation)):
            return True
    return False


def _place(equation: Any) -> str:
    source = _compat.source_of(equation)
    return f"{source.file}:{source.line}" if source.file else "jax"
