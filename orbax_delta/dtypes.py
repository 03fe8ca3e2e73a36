"""What an element is on disk: names, word sizes, sub-byte packing, defined casts.

The stored content of an array is its elements in C order and in the byte order that
its dtype names; 4-, 2- and 1-bit types are packed. Nothing here imports jax, so that
the command line can decode without it.
"""

import dataclasses
import enum
import functools
import re

import ml_dtypes
import numpy as np

from orbax_delta import kernels, lanes, scratch
from orbax_delta.codecs import Bytes
from orbax_delta.errors import InvalidInputError

_PACKED_BITS = {
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
    "int2": 2,
    "uint2": 2,
    "int1": 1,
    "uint1": 1,
}
_BUILTIN_KINDS = "biufcmM"
# numpy also parses, evaluates and warns of much that is no name of one type.
_NAME = re.compile(
    r"[a-z]{3}[a-z0-9_]{0,29}|[<>][biufcmM]\d{1,2}(\[\d{0,9}[A-Za-z]{1,2}\])?", re.ASCII
)
_LARGEST_ITEM_BYTES = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElementType:
    """How elements of one dtype are laid out.

    Attributes:
        name: Name on disk, e.g. `float32`, `bfloat16`, `int4`, `>f4`.
        dtype: The numpy dtype in memory.
        bits: Bits an element takes on disk.
        word_bytes: Size of the integer view that comparison and coding use.
    """

    name: str
    dtype: np.dtype
    bits: int
    word_bytes: int

    def content_bytes(self, element_count: int) -> int:
        """Bytes that `element_count` elements take on disk."""
        return -(-element_count * self.bits // 8)

    def to_content(self, array: np.ndarray) -> Bytes:
        """`uint8[content_bytes]` of `array`; a view where the layout allows it."""
        flat = np.ascontiguousarray(array).reshape(-1)
        if self.bits >= 8:
            return flat.view(np.uint8)
        mask = np.uint8((1 << self.bits) - 1)
        return lanes.pack(flat.view(np.uint8) & mask, self.bits)

    def from_content(self, content: Bytes, shape: tuple[int, ...]) -> np.ndarray:
        """The array that `to_content` was given, in `shape`."""
        if self.bits >= 8:
            return content.view(self.dtype).reshape(shape)
        count = int(np.prod(shape, dtype=np.int64))
        # ml_dtypes reads only the low bits of each byte, signed types too.
        values = lanes.unpack(content, self.bits)[:count]
        return values.view(self.dtype).reshape(shape)


@functools.lru_cache(maxsize=256)
def element_type(dtype: np.dtype) -> ElementType:
    """The layout of `dtype`.

    Raises:
        InvalidInputError: The dtype has no fixed-size bit representation that this
            format knows (objects, strings, records, long double).
    """
    name = dtype.name if dtype.isnative else dtype.str
    if dtype.kind in "mM":
        name = dtype.str
    # Swapped ml_dtypes lose their name: nothing could tell what their bytes mean.
    own = dtype.isnative and hasattr(ml_dtypes, dtype.name)
    # float8_e4m3fnuz has the type character of a long double complex.
    builtin = dtype.kind in _BUILTIN_KINDS and dtype.char not in "gG"
    if not (own or builtin) or dtype.itemsize > _LARGEST_ITEM_BYTES:
        raise InvalidInputError(
            f"dtype {dtype} cannot be stored; expected a bool, integer, float, "
            "complex, datetime or (in native byte order) ml_dtypes type of fixed size"
        )
    bits = _PACKED_BITS.get(name, 8 * dtype.itemsize)
    word_bytes = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return ElementType(name=name, dtype=dtype, bits=bits, word_bytes=word_bytes)


@functools.lru_cache(maxsize=256)
def element_type_of(name: str) -> ElementType:
    """The layout of the dtype called `name` on disk.

    Raises:
        InvalidInputError: This installation knows no such dtype.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInputError(f"dtype {name!r:.80} is not a name of this format")
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except (TypeError, ValueError, SyntaxError, OverflowError) as error:
        raise InvalidInputError(
            f"dtype {name!r:.80} is not known to numpy {np.__version__} and ml_dtypes "
            f"{ml_dtypes.__version__}; install a version that has it"
        ) from error
    element = element_type(dtype)
    if element.name != name:
        raise InvalidInputError(
            f"dtype {name!r} is not a name of this format; expected {element.name!r}"
        )
    return element


class Rule(enum.IntEnum):
    """How a chunk follows from what its records decode to; the numbers are on disk."""

    NONE = 0
    F32_TO_BF16 = 1
    F32_TO_F16 = 2


_CASTS = {"bfloat16": Rule.F32_TO_BF16, "float16": Rule.F32_TO_F16}
CAST_SOURCE = "float32"
CAST_TARGETS = tuple(_CASTS)
CAST_WORD_BYTES = 2
_CAST_WIDTH_RATIO = 2


def cast_rule(target_name: str) -> Rule:
    """The defined cast from CAST_SOURCE to a dtype of CAST_TARGETS."""
    return _CASTS[target_name]


def source_bytes(rule: Rule, size: int) -> int:
    """What `size`, of content or of a word, is in the source of a derived chunk."""
    return size if rule is Rule.NONE else size * _CAST_WIDTH_RATIO


def least_normal(rule: Rule) -> float:
    """Below this the values of a cast lie no closer."""
    return 2.0**-126 if rule is Rule.F32_TO_BF16 else 2.0**-14


def cast_values(rule: Rule, content: Bytes) -> Bytes:
    """The elements of a cast as float32, which has them all."""
    if rule is Rule.F32_TO_BF16:
        widened = content.view(np.uint16).astype(np.uint32)
        widened <<= np.uint32(16)
        return widened.view(np.uint8)
    return content.view(np.float16).astype(np.float32).view(np.uint8)


def cast_shift(rule: Rule) -> int:
    """In how many zeros these end at least."""
    return 16 if rule is Rule.F32_TO_BF16 else 13


def derive(rule: Rule, source: Bytes) -> Bytes | None:
    """Content that a cast makes of `source`; None where it meets a NaN.

    Casts round to nearest, ties to even, overflow to infinity and keep subnormals;
    what a cast does to a NaN differs between libraries, so none is ever cast.
    """
    words = source.view(np.uint32)
    if rule is Rule.F32_TO_BF16 and kernels.pay(source.size):
        halves = np.empty(words.size, np.uint16)
        return None if kernels.to_bf16()(words, halves) else halves.view(np.uint8)
    passing = scratch.array("cast", words.size, 4)
    np.bitwise_and(words, 0x7FFFFFFF, out=passing)
    if passing.size and passing.max() > 0x7F800000:
        return None
    if rule is Rule.F32_TO_BF16:
        np.right_shift(words, 16, out=passing)
        np.bitwise_and(passing, 1, out=passing)
        np.add(passing, 0x7FFF, out=passing)
        np.add(passing, words, out=passing)
        np.right_shift(passing, 16, out=passing)
        return passing.astype(np.uint16).view(np.uint8)
    with np.errstate(over="ignore"):
        return source.view(np.float32).astype(np.float16).view(np.uint8)
