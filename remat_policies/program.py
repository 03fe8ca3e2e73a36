"""A function as a flat list of steps on numbered values.

Calls (`jit`) are opened up and `checkpoint_name` vanishes: a name belongs to the value
itself, so that two names of one value, or a use of it before it is named, make no
difference. Does not belong here: derivatives, costs, policies.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from remat_policies import _compat

_PRODUCTS = "dot_general"
_KERNELS = frozenset(
    {
        "pallas_call",
        "ffi_call",
        "tpu_custom_call",
        "triton_kernel_call",
        "dot_product_attention_fwd_wrapper",
    }
)
"""Primitives that are one compiled kernel, of which XLA knows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One equation, on numbered values.

    Attributes:
        equation: jax's own.
        jaxpr: What the equation stands in.
        inputs: Numbers of its inputs, those that are literals left out.
        outputs: Numbers of its results.
        kind: `matmul`, `batched_matmul`, `kernel`, or the name of its primitive.
    """

    equation: _compat.Equation
    jaxpr: _compat.Jaxpr
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Steps in the order in which they run.

    Attributes:
        steps: All of them.
        avals: Shape and dtype of each value, by its number.
        arguments: Numbers of the function's arguments.
        constants: Values that stand in the program, by number.
        outputs: Numbers of the results.
        names: What the function calls some of its values.
    """

    steps: tuple[Step, ...]
    avals: tuple[Any, ...]
    arguments: tuple[int, ...]
    constants: Mapping[int, Any]
    outputs: tuple[int, ...]
    names: Mapping[int, tuple[str, ...]]

    def producers(self) -> dict[int, int]:
        """Which step makes each value; arguments and constants are made by none."""
        return {
            value: number
            for number, step in enumerate(self.steps)
            for value in step.outputs
        }

    def nbytes(self, value: int) -> int:
        """Size of a value, in bytes."""
        aval = self.avals[value]
        return int(aval.size) * int(aval.dtype.itemsize)


def flatten(closed: Any, *, as_jax: bool = False) -> Program:
    """The program of a closed jaxpr.

    Args:
        closed: What to flatten.
        as_jax: A name is a step of its own, whose result has the name and whose input
            has not: what `jax.checkpoint` makes of it.
    """
    flattener = _Flattener(as_jax)
    jaxpr, consts = _compat.opened(closed)
    arguments = tuple(flattener.value(var.aval) for var in jaxpr.invars)
    outputs = flattener.inline(jaxpr, consts, arguments)
    return Program(
        steps=tuple(flattener.steps),
        avals=tuple(flattener.avals),
        arguments=arguments,
        constants=flattener.constants,
        outputs=tuple(outputs),
        names={value: tuple(found) for value, found in flattener.names.items()},
    )


def automatic_names(program: Program) -> dict[int, str]:
    """A name for each value that a step makes: `rp/KIND/FILE:LINE#COUNT`.

    The same for the same trace of the same code: a name travels with a plan.
    """
    counts: dict[str, int] = {}
    found = {}
    for step in program.steps:
        source = _compat.source_of(step.equation)
        place = f"rp/{step.kind}/{PurePath(source.file).name}:{source.line}"
        for value in step.outputs:
            count = counts.get(place, 0)
            counts[place] = count + 1
            found[value] = f"{place}#{count}"
    return found


class _Flattener:
    """Collects what `flatten` finds."""

    def __init__(self, as_jax: bool) -> None:
        self.as_jax = as_jax
        self.steps: list[Step] = []
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.names: dict[int, list[str]] = {}

    def value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, found: Any, aval: Any) -> int:
        number = self.value(aval)
        self.constants[number] = found
        return number

    def name(self, value: int, name: str) -> None:
        known = self.names.setdefault(value, [])
        if name not in known:
            known.append(name)

    def inline(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Iterable[int]
    ) -> list[int]:
        """Take a jaxpr's equations in; the numbers of its results."""
        numbers: dict[Any, int] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            numbers[var] = self.constant(const, var.aval)

        def number_of(var: Any) -> int:
            if _compat.is_literal(var):
                return self.constant(var.val, var.aval)
            return numbers[var]

        for equation in jaxpr.eqns:
            name = _compat.name_of(equation)
            if name is not None and self.as_jax:
                self.add(equation, jaxpr, numbers)
                self.name(numbers[equation.outvars[0]], name)
            elif name is not None:
                (var,) = equation.invars
                numbers[equation.outvars[0]] = number_of(var)
                self.name(number_of(var), name)
            elif (call := self.inlined(equation)) is not None:
                inner, inner_consts = _compat.opened(call)
                inputs = [number_of(var) for var in equation.invars]
                found = self.inline(inner, inner_consts, inputs)
                numbers.update(zip(equation.outvars, found, strict=True))
            else:
                self.add(equation, jaxpr, numbers)
        return [number_of(var) for var in jaxpr.outvars]

    def inlined(self, equation: Any) -> Any:
        """The program that stands for an equation, if it is a call and nothing more.

        A `jit` that asks for a sharding or a donation is more. A function with a
        derivative of its own is a call where only its value is asked for, as in the
        forward rule of another; it is opened up if it has names inside, which jax does
        not see.
        """
        custom = _compat.custom_primal_of(equation)
        if custom is not None:
            return custom if names_in(custom) and not self.as_jax else None
        if equation.primitive.name not in ("jit", "pjit"):
            return None
        params = equation.params
        shardings = (*params["in_shardings"], *params["out_shardings"])
        plain = all(type(found).__name__ == "UnspecifiedValue" for found in shardings)
        return params["jaxpr"] if plain and not any(params["donated_invars"]) else None

    def add(self, equation: Any, jaxpr: Any, numbers: dict[Any, int]) -> None:
        inputs = [
            numbers[var] for var in equation.invars if not _compat.is_literal(var)
        ]
        outputs = [self.value(var.aval) for var in equation.outvars]
        numbers.update(zip(equation.outvars, outputs, strict=True))
        for value, name in zip(outputs, _names_inside(equation), strict=False):
            if name is not None:
                self.name(value, name)
        step = Step(
            equation=equation,
            jaxpr=jaxpr,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            kind=_kind(equation),
        )
        self.steps.append(step)


def names_in(program: Any) -> list[str]:
    """All names that a jaxpr, closed or not, gives anywhere inside."""
    found = []
    for equation in _compat.opened(program)[0].eqns:
        name = _compat.name_of(equation)
        found += [] if name is None else [name]
        for inner in _compat.inner_jaxprs(equation):
            found += names_in(inner)
    return found


def _names_inside(equation: Any) -> list[str | None]:
    """The names that a loop's body gives to what the loop then returns."""
    if equation.primitive.name != "scan":
        return []
    body, _ = _compat.opened(equation.params["jaxpr"])
    given = {one.outvars[0]: _compat.name_of(one) for one in body.eqns}
    return [None if _compat.is_literal(var) else given.get(var) for var in body.outvars]


def _kind(equation: Any) -> str:
    if _compat.name_of(equation) is not None:
        return "name"
    name = str(equation.primitive.name)
    if name in _KERNELS:
        return "kernel"
    if name == _PRODUCTS:
        _, (batch, _) = equation.params["dimension_numbers"]
        return "batched_matmul" if batch else "matmul"
    return name
