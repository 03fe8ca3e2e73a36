"""How two arrays of one type and shape differ: bits that changed, and by how much.

Bits are compared as integers, so that a NaN equals itself and -0.0 is not 0.0; of
floats the absolute change is taken in float64. Pure arithmetic in pieces that bound the
memory. Does not belong here: where the arrays come from.
"""

import dataclasses
import sys
from collections.abc import Iterator

import numpy as np

from orbax_delta.dtypes import ElementType

_PIECE_ELEMENTS = 1 << 17


@dataclasses.dataclass(slots=True, kw_only=True)
class Deviation:
    """What is known so far of a leaf.

    Attributes:
        changed: Elements with other bits.
        not_finite: Of these floats, those infinite or no number in one of the arrays.
        largest: Largest absolute change of the others; None before there is one.
        total: Sum of these absolute changes, in units of `unit` so that it is finite.
    """

    changed: int = 0
    not_finite: int = 0
    largest: float | None = None
    total: float = 0.0

    def add(
        self,
        element: ElementType,
        before: np.ndarray,
        after: np.ndarray,
        *,
        unit: float = 1.0,
    ) -> None:
        """Add what two arrays of the same shape say.

        Args:
            element: Their type.
            before: The first.
            after: The second.
            unit: What `total` counts in.
        """
        for old, new in zip(_pieces(before), _pieces(after), strict=True):
            changed = np.flatnonzero(_differs(element, old, new))
            self.changed += changed.size
            if changed.size and is_float(element):
                every = changed.size == old.size  # dense training: no need to pick
                chosen = slice(None) if every else changed
                self._measure(old[chosen], new[chosen], unit)

    def _measure(self, old: np.ndarray, new: np.ndarray, unit: float) -> None:
        wide = np.complex128 if old.dtype.kind == "c" else np.float64
        with np.errstate(all="ignore"):  # NaN payloads, and what overflows
            old, new = old.astype(wide), new.astype(wide)
            finite = np.isfinite(old) & np.isfinite(new)
            size = np.abs(new - old)[finite]
        self.not_finite += int(finite.size - np.count_nonzero(finite))
        if size.size:
            # Two finite numbers may be further apart than the largest one.
            np.minimum(size, sys.float_info.max, out=size)
            self.largest = max(self.largest or 0.0, float(size.max()))
            self.total += float(np.sum(size / unit))


def is_float(element: ElementType) -> bool:
    """Whether elements are floats, complex ones included.

    >>> from orbax_delta.dtypes import element_type_of
    >>> [is_float(element_type_of(name)) for name in ("bfloat16", ">c8", "int4")]
    [True, True, False]
    """
    return element.dtype.kind in "fc" or element.name.startswith(("float", "bfloat"))


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _PIECE_ELEMENTS):
        yield np.ascontiguousarray(flat[start : start + _PIECE_ELEMENTS])


def _differs(element: ElementType, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    words = np.dtype(f"u{element.word_bytes}")
    different: np.ndarray = np.not_equal(old.view(words), new.view(words))
    if old.dtype.kind == "c":
        different = np.logical_or(different[::2], different[1::2])
    return different
