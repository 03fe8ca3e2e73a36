"""Elements on disk: names, sub-byte packing, byte order, and casts in integers."""

import hypothesis
import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from orbax_delta import dtypes
from orbax_delta.dtypes import Rule
from orbax_delta.errors import InvalidInputError

PACKED = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
PACKED |= {name: 1 for name in ("int1", "uint1") if hasattr(ml_dtypes, name)}
ML_NAMES = sorted(
    name
    for name, value in vars(ml_dtypes).items()
    if isinstance(value, type)
    and issubclass(value, np.generic)
    and value.__name__ == name  # 0.7 leaves a variable behind
)
NUMPY_NAMES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16"),
    *("<M8[ns]", "<M8[D]", "<M8[25s]", ">M8[us]", "<m8[ms]", ">m8[Y]", "<M8", "<m8"),
]

# Low halves of a float32 that decide how its upper half is rounded, by either cast.
CRITICAL_LOW = np.array(
    [
        *(0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000),
        *(0x3001, 0x7FFF, 0x8000, 0x8001, 0x9000, 0xB000, 0xEFFF, 0xF000, 0xF001),
        0xFFFF,
    ],
    np.uint32,
)


def _bf16_bits(words):
    """Section 3.4 of FORMAT.md: round to nearest even at bit 16."""
    wide = words.astype(np.uint64)
    quotient, rest = wide >> 16, wide & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (quotient % 2 == 1))
    return (quotient + up).astype(np.uint16)


def _f16_bits(words):
    """Section 3.4 of FORMAT.md: significand over a power of two, to nearest even."""
    wide = words.astype(np.int64)
    sign, exponent = (wide >> 31) << 15, (wide >> 23) & 0xFF
    significand = (wide & 0x7FFFFF) | np.where(exponent > 0, 1 << 23, 0)
    # The float is significand * 2^(max(exponent, 1) - 150). In units of the smallest
    # float16 step at its size, 2^-24 or 2^(exponent - 137), it is this many bits long.
    drop = np.clip(np.where(exponent >= 113, 13, 126 - exponent), 0, 40)
    quotient = significand >> drop
    rest, half = significand & ((1 << drop) - 1), 1 << (drop - 1)
    up = (rest > half) | ((rest == half) & (quotient % 2 == 1))
    # A normal significand carries its leading bit into the exponent field.
    magnitude = quotient + up + np.where(exponent >= 113, (exponent - 113) << 10, 0)
    return (sign | np.minimum(magnitude, 0x7C00)).astype(np.uint16)


REFERENCE = {Rule.F32_TO_BF16: _bf16_bits, Rule.F32_TO_F16: _f16_bits}


def _assert_casts(rule, words):
    nan = (words & 0x7FFFFFFF) > 0x7F800000
    words = words[~nan]
    cast = dtypes.derive(rule, words.view(np.uint8))
    assert cast is not None
    expected = REFERENCE[rule](words)
    wrong = np.flatnonzero(cast.view(np.uint16) != expected)
    assert wrong.size == 0, [hex(word) for word in words[wrong[:5]]]


@pytest.mark.parametrize("rule", list(REFERENCE))
def test_casts_are_the_integer_arithmetic_of_the_format(rule):
    """Every upper half of a float32 with every critical lower half: 1.2 million."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    _assert_casts(rule, (upper[:, None] | CRITICAL_LOW).ravel())


@pytest.mark.parametrize("rule", list(REFERENCE))
@hypothesis.given(
    words=npst.arrays(np.uint32, 256, elements=st.integers(0, (1 << 32) - 1))
)
def test_casts_of_any_floats_are_that_arithmetic(rule, words):
    """Floats that nobody chose."""
    _assert_casts(rule, words)


@pytest.mark.parametrize("rule", list(REFERENCE))
def test_casts_of_a_million_random_floats_are_that_arithmetic(rule):
    """Random bits, and random values of the sizes that weights have."""
    rng = np.random.default_rng(5)
    _assert_casts(rule, rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32))
    small = rng.standard_normal(1 << 18).astype(np.float32) * np.float32(2e-6)
    _assert_casts(rule, small.view(np.uint32))


@pytest.mark.parametrize(
    ("rule", "word", "expected"),
    [
        (Rule.F32_TO_BF16, 0x7F7FFFFF, 0x7F80),  # the largest float becomes infinity
        (Rule.F32_TO_BF16, 0x00000001, 0x0000),  # the smallest subnormal becomes 0
        (Rule.F32_TO_BF16, 0x00018000, 0x0002),  # subnormals are kept; a tie goes even
        (Rule.F32_TO_BF16, 0x80000000, 0x8000),  # -0.0
        (Rule.F32_TO_F16, 0x477FE000, 0x7BFF),  # 65504, the largest
        (Rule.F32_TO_F16, 0x477FEFFF, 0x7BFF),  # just below 65520
        (Rule.F32_TO_F16, 0x477FF000, 0x7C00),  # 65520 becomes infinity
        (Rule.F32_TO_F16, 0xFF800000, 0xFC00),  # -infinity
        (Rule.F32_TO_F16, 0x387FE000, 0x0400),  # rounds up to the smallest normal
        (Rule.F32_TO_F16, 0x33800000, 0x0001),  # 2^-24, the smallest subnormal
        (Rule.F32_TO_F16, 0x33000000, 0x0000),  # 2^-25 is a tie, to even
        (Rule.F32_TO_F16, 0x33000001, 0x0001),  # just above it
        (Rule.F32_TO_F16, 0xB2FFFFFF, 0x8000),  # just below it, negative
    ],
)
def test_casts_at_the_edges(rule, word, expected):
    """The literal values of the format at the ends of each range."""
    cast = dtypes.derive(rule, np.array([word], np.uint32).view(np.uint8))
    assert cast is not None
    assert cast.view(np.uint16)[0] == expected


@pytest.mark.parametrize("rule", list(REFERENCE))
@pytest.mark.parametrize("nan", [0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF800001])
def test_a_nan_is_never_cast(rule, nan):
    """One NaN anywhere, and the cast is not defined."""
    words = np.array([0x3F800000, nan, 0], np.uint32)
    assert dtypes.derive(rule, words.view(np.uint8)) is None


@pytest.mark.parametrize("rule", list(REFERENCE))
def test_a_cast_leaves_its_source_alone(rule):
    """The source is another chunk's content and stays it."""
    source = np.arange(0, 1 << 12, dtype=np.uint32) * 0x80001
    source = source[(source & 0x7FFFFFFF) <= 0x7F800000]
    before = source.tobytes()
    assert dtypes.derive(rule, source.view(np.uint8)) is not None
    assert source.tobytes() == before


def test_cast_names_and_widths():
    """Casts go from float32 to half its width; without a rule nothing is resized."""
    assert dtypes.CAST_SOURCE == "float32"
    assert {name: dtypes.cast_rule(name) for name in dtypes.CAST_TARGETS} == {
        "bfloat16": Rule.F32_TO_BF16,
        "float16": Rule.F32_TO_F16,
    }
    assert dtypes.source_bytes(Rule.NONE, 6) == 6
    assert dtypes.source_bytes(Rule.F32_TO_BF16, 6) == 12


@pytest.mark.parametrize("name", [*NUMPY_NAMES, *ML_NAMES])
def test_a_name_on_disk_stands_for_one_layout(name):
    """The name of a type gives that type again, and only canonical names are used."""
    element = dtypes.element_type_of(name)
    assert element.name == name
    assert dtypes.element_type(element.dtype) == element
    assert element.word_bytes in (1, 2, 4, 8)
    assert element.bits == PACKED.get(name, 8 * element.dtype.itemsize)


@pytest.mark.parametrize("name", [*NUMPY_NAMES, *ML_NAMES])
@hypothesis.given(shape=npst.array_shapes(min_dims=0, max_dims=3, max_side=7))
@hypothesis.settings(max_examples=6)
def test_any_bits_of_any_type_come_back(name, shape):
    """Arrays of arbitrary bits, NaN payloads included, are the same bits afterwards."""
    element = dtypes.element_type_of(name)
    count = int(np.prod(shape))
    raw = np.random.default_rng(count).integers(
        0, 256, count * element.dtype.itemsize, np.uint8
    )
    if element.dtype.kind == "b":
        raw &= 1
    if element.bits < 8:
        raw &= (1 << element.bits) - 1
    array = raw.view(element.dtype).reshape(shape)
    content = element.to_content(array)
    assert content.dtype == np.uint8
    assert content.size == element.content_bytes(count)
    back = element.from_content(content, shape)
    assert (back.dtype, back.shape) == (element.dtype, shape)
    assert back.tobytes() == raw.tobytes()


@pytest.mark.parametrize("name", sorted(PACKED))
@hypothesis.given(data=st.data())
def test_sub_byte_elements_are_packed_from_the_low_bits_up(name, data):
    """Any count, also one that fills no byte; what pads the last byte is zero."""
    element, bits = dtypes.element_type_of(name), PACKED[name]
    values = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=1))
    array = np.array(values, np.uint8).view(element.dtype)
    content = element.to_content(array)
    stored = int.from_bytes(content.tobytes(), "little")
    assert content.size == -(-len(values) * bits // 8)
    assert stored == sum(value << (i * bits) for i, value in enumerate(values))
    back = element.from_content(content, (len(values),))
    assert np.array_equal(back.view(np.uint8), array.view(np.uint8))


def test_sub_byte_values_are_those_of_the_type():
    """High bits of a byte in memory mean nothing and are not stored."""
    element = dtypes.element_type_of("int4")
    array = np.array([-8, -1, 0, 7, -3], ml_dtypes.int4)
    content = element.to_content(array)
    assert content.tobytes() == bytes([0xF8, 0x70, 0x0D])
    back = element.from_content(content, (5,))
    assert back.astype(np.int8).tolist() == [-8, -1, 0, 7, -3]


def test_foreign_byte_order_is_stored_as_it_is():
    """The name says in which order the bytes are; nothing is swapped."""
    element = dtypes.element_type(np.dtype(">f4"))
    array = np.array([1.5, -2.0], ">f4")
    assert element.to_content(array).tobytes() == array.tobytes()
    assert element.from_content(element.to_content(array), (2,)).dtype == np.dtype(
        ">f4"
    )


def test_complex_numbers_are_coded_by_halves():
    """The integer view that is compared and coded has the width of one part."""
    assert dtypes.element_type(np.dtype("complex64")).word_bytes == 4
    assert dtypes.element_type(np.dtype("complex128")).word_bytes == 8


def test_arrays_that_are_no_block_of_memory_are_stored_in_c_order():
    """Strides, Fortran order and views make no difference."""
    element = dtypes.element_type_of("int16")
    array = np.arange(24, dtype=np.int16).reshape(4, 6)
    for view in (array.T, array[::2, ::-1], np.asfortranarray(array)):
        content = element.to_content(view)
        assert content.tobytes() == view.tobytes()
        assert np.array_equal(element.from_content(content, view.shape), view)


@pytest.mark.parametrize(
    "dtype",
    [
        *("O", "S4", "U3", "V4", "longdouble", "clongdouble"),
        np.dtype([("a", "f4")]),
        np.dtype(ml_dtypes.bfloat16).newbyteorder(),
        np.dtype(ml_dtypes.int4).newbyteorder(),
    ],
)
def test_types_without_a_layout_are_refused(dtype):
    """Also byte-swapped ml_dtypes, whose name numpy forgets: no reader could know."""
    with pytest.raises(InvalidInputError, match="cannot be stored"):
        dtypes.element_type(np.dtype(dtype))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "is not known") for name in ("float31", "<M8[x]", ">f99")),
        *((name, "cannot be stored") for name in ("object", "str", "finfo")),
        *((name, "not a name") for name in ("f4", "<f4", "float", "d", "<i1")),
        *((name, "not a name") for name in ("", "O", "S5", "V4", "a5", "__doc__")),
        *((name, "not a name") for name in ("f4,(", "f4,f4", "f4," * 9000, "\ud800")),
    ],
)
def test_a_foreign_name_is_refused(name, message):
    """Only the one canonical name of a known type is read."""
    with pytest.raises(InvalidInputError, match=message):
        dtypes.element_type_of(name)


@hypothesis.given(st.text(max_size=12))
def test_any_text_is_a_name_or_refused(name):
    """No text raises anything but InvalidInputError."""
    try:
        element = dtypes.element_type_of(name)
    except InvalidInputError:
        return
    assert element.name == name
