"""What a caller wants of each leaf: kind, shape, dtype, sharding.

Targets follow Orbax's conventions: arrays and ShapeDtypeStructs give shape, dtype and
sharding, numpy gives numpy, Python scalars give Python scalars, `...` leaves a leaf
out. Does not belong here: what is stored.
"""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from orbax_delta import trees
from orbax_delta.errors import StructureError
from orbax_delta.manifests import path_name

PLACEHOLDER = ...
"""A target leaf that is not to be restored; the same object as Orbax's."""

_PYTHON_TYPES = (bool, int, float, complex, str, bytes)


class Make(enum.Enum):
    """What to make of a leaf."""

    SAVED = "what it was when it was saved"
    JAX = "a jax array"
    NUMPY = "a numpy array"
    NUMPY_SCALAR = "a numpy scalar"
    PYTHON = "a Python value"
    NOTHING = "nothing"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One leaf of a target.

    Attributes:
        make: What to make.
        shape: Shape it must have; None: any.
        dtype: Type to cast to, or a typed key's; None: as stored.
        sharding: Where a jax array goes; None: where it was.
        python: Type of a Python value.
        strict: Whether another stored shape is an error; otherwise it is cut off or
            padded with zeros.
    """

    make: Make
    shape: tuple[int, ...] | None = None
    dtype: Any = None
    sharding: jax.sharding.Sharding | None = None
    python: type | None = None
    strict: bool = True


AS_SAVED = Wanted(make=Make.SAVED)


def wanted_of(path: trees.Path, target: Any, *, strict: bool = True) -> Wanted:
    """Read one leaf of a target tree.

    Raises:
        StructureError: It is nothing that can be a target.
    """
    if target is PLACEHOLDER:
        return Wanted(make=Make.NOTHING)
    if isinstance(target, np.ndarray | np.generic):
        scalar = isinstance(target, np.generic)
        return Wanted(
            make=Make.NUMPY_SCALAR if scalar else Make.NUMPY,
            shape=target.shape,
            dtype=target.dtype,
            strict=strict,
        )
    if type(target) in _PYTHON_TYPES:
        return Wanted(make=Make.PYTHON, python=type(target))
    shape, dtype = getattr(target, "shape", None), getattr(target, "dtype", None)
    if shape is None or dtype is None:
        raise StructureError(
            f"target leaf {path_name(path)} is a {type(target).__name__}; expected an "
            "array, a jax.ShapeDtypeStruct, a Python scalar or the placeholder `...`"
        )
    sharding = getattr(target, "sharding", None)
    return Wanted(
        make=Make.JAX,
        shape=tuple(shape),
        dtype=dtype,
        sharding=sharding if isinstance(sharding, jax.sharding.Sharding) else None,
        strict=strict,
    )
