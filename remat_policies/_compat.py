"""Every private name of jax that the package uses, in one place.

Written for jax 0.10.2 to 0.12; where they differ, the difference is handled here and
nowhere else. Does not belong here: anything that public jax can do.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import ad_util, config, core, source_info_util
from jax._src.ad_checkpoint import CheckpointName, RematTraced, name_p
from jax._src.interpreters import remat as remat3
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

Equation = Any
Jaxpr = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where in the user's program an equation comes from."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remat:
    """A use of `jax.checkpoint` in a program.

    Attributes:
        jaxpr: What is rematerialised.
        prevents_cse: XLA is kept from undoing it, at least in part.
        keeps: "products" for `dots_with_no_batch_dims_saveable`, "all" for what keeps
            everything although it says otherwise, "function" for a callable that is
            none of jax's own; else "".
    """

    jaxpr: Jaxpr
    prevents_cse: bool
    keeps: str


def remat3_is_on() -> bool:
    """Whether `jax.checkpoint` is jax's new implementation (`JAX_REMAT3`)."""
    return bool(config.remat3.value)


def offload_is_ignored() -> bool:
    """Whether this jax, as it is set, recomputes what should be offloaded."""
    # In 0.10.2 the new remat knows two policies by their classes, and only those.
    return remat3_is_on() and _FIRST_REMAT3


def opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr, closed or not, and its constants."""
    # Newer jax has one class for both.
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def evaluate(jaxpr: Jaxpr, equation: Equation, args: Sequence[Any]) -> list[Any]:
    """Run one equation of a jaxpr on the values of its inputs that are no literals."""
    inputs = [var for var in equation.invars if not is_literal(var)]
    alone = jaxpr.replace(
        constvars=[],
        invars=inputs,
        outvars=list(equation.outvars),
        eqns=[equation],
        effects=equation.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    # With the equation's own place in the user's program and its own settings.
    results: list[Any] = core.eval_jaxpr(alone, (), *args)
    return results


def run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Run a whole jaxpr; each equation keeps its place in the user's program."""
    results: list[Any] = core.eval_jaxpr(jaxpr, consts, *args)
    return results


def zeros(aval: Any) -> Any:
    """Zeros of a type, with its sharding and the axes over which it varies."""
    return ad.instantiate_zeros(ad.Zero(aval))


def is_reference(value: Any) -> bool:
    """Whether it is a mutable array, or stands for one."""
    return "Ref" in type(getattr(value, "aval", None)).__name__


def is_literal(var: Any) -> bool:
    """Whether an input of an equation is a value that stands in the program."""
    return isinstance(var, jex.Literal)


def name_of(equation: Equation) -> str | None:
    """The name that a `checkpoint_name` gives; None for any other equation."""
    if equation.primitive is name_p:
        return str(equation.params["name"])
    inner = equation.params.get("_prim")
    return str(inner.name) if isinstance(inner, CheckpointName) else None


def source_of(equation: Equation) -> Source:
    """The user's line behind an equation."""
    frame = source_info_util.user_frame(equation.source_info.traceback)
    if frame is None:
        return Source(file="", line=0, function="")
    return Source(
        file=frame.file_name, line=frame.start_line, function=frame.function_name
    )


def inner_jaxprs(equation: Equation) -> Iterator[Jaxpr]:
    """The programs in an equation's parameters: bodies of loops, branches, calls."""
    remat = remat_of(equation)
    if remat is not None:
        yield remat.jaxpr
    else:
        yield from core.jaxprs_in_params(equation.params)


def custom_primal_of(equation: Equation) -> Any:
    """The program of a function with a derivative of its own; None of another."""
    if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return equation.params["call_jaxpr"]
    return None


def remat_of(equation: Equation) -> Remat | None:
    """What an equation rematerialises; None of one that does not."""
    if equation.primitive.name in ("remat2", "checkpoint", "remat"):
        params = equation.params
    elif isinstance(equation.params.get("_prim"), RematTraced):
        params = equation.params["_prim"].params
    else:
        return None
    jaxpr, _ = opened(params["jaxpr"])
    prevents = params.get("prevent_cse", True)  # the first version always does
    return Remat(
        jaxpr=jaxpr,
        prevents_cse=prevents if isinstance(prevents, bool) else any(prevents),
        keeps=_keeps(params["policy"]),
    )


def _keeps(policy: Any) -> str:
    if policy is None:
        return ""
    if policy == jax.checkpoint_policies.dots_with_no_batch_dims_saveable:
        return "products"
    name = getattr(policy, "__qualname__", type(policy).__qualname__)
    if name.startswith("save_anything_except_these_names"):
        return "all"
    module = getattr(policy, "__module__", "")
    ours = module.startswith("jax.") and not name.startswith("save_from_both")
    return "" if ours else "function"


def functions_around(equation: Equation) -> frozenset[str]:
    """Names of the functions, libraries' own among them, in which an equation arose."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return frozenset(frame.function_name.split(".")[0] for frame in frames)


def zero_tangent(value: Any) -> Any:
    """A tangent that jax knows to be zero without any array."""
    return ad_util.p2tz(value)


cut = jex.Primitive("remat_policies_cut")
"""The identity, whose derivative is zero once: a second derivative sees through it.

`jax.lax.stop_gradient` is zero at every order, which would make second derivatives
wrong and say nothing.
"""
cut.def_impl(lambda x: x)
cut.def_abstract_eval(lambda x: x)
ad.primitive_jvps[cut] = lambda primals, tangents: (
    primals[0],
    zero_tangent(primals[0]),
)
ad.primitive_transposes[cut] = lambda change, x: [change]
mlir.register_lowering(cut, lambda context, x: [x])
batching.primitive_batchers[cut] = lambda args, dims: (cut.bind(*args), dims[0])

_FIRST_REMAT3 = jax.__version_info__ < (0, 11)

# The new remat runs the forward pass outside of the derivative that the identity is to
# cut, inside of the next one: there it has to be the plain identity.
if not _FIRST_REMAT3:
    remat3.rules[cut] = lambda trace, x: (x, (), lambda residuals, y: cut.bind(y))


@contextlib.contextmanager
def settled_remat() -> Iterator[None]:
    """`jax.checkpoint` as it was, where the new one (`JAX_REMAT3`) is jax 0.10's.

    That first version recomputes what is to be offloaded, cannot be mapped over by
    `vmap` or `shard_map` once there are names, and keeps what only a frozen argument
    needs. Later ones are taken as they are.
    """
    if _FIRST_REMAT3 and remat3_is_on():
        with config.remat3(False):
            yield
    else:
        yield
