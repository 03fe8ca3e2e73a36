"""Training states and their changes to draw with Hypothesis, compared bit by bit.

For property tests of whoever saves with this package: draw a tree, change it as
training does (few elements, a block, everything, a cast, another shape), save, restore,
`assert_same_tree`. Needs the extra `orbax-delta[testing]`.
"""

import struct
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np

# Bits of one element where they do not fill its bytes; the rest means nothing.
_SUB_BYTE_MASKS = {
    "int4": 0x0F,
    "uint4": 0x0F,
    "float4_e2m1fn": 0x0F,
    "int2": 0x03,
    "uint2": 0x03,
    "int1": 0x01,
    "uint1": 0x01,
}

JAX_DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn", "int4", "uint4", "int2", "uint2"),
)
"""What jax holds without 64-bit mode."""

NUMPY_DTYPES = (
    *JAX_DTYPES,
    *("int64", "uint64", "float64", "complex128"),
    *(">f4", ">i2", ">u8", ">c8", "datetime64[ns]", "timedelta64[us]"),
)
"""What numpy holds on top: 64-bit types, foreign byte order, dates."""


# --- comparison ---------------------------------------------------------------------


def assert_same_tree(actual: Any, expected: Any) -> None:
    """Structure, leaf types, dtypes, shapes and every bit agree."""
    got, got_structure = jtu.tree_flatten_with_path(actual)
    want, want_structure = jtu.tree_flatten_with_path(expected)
    same = got_structure == want_structure  # type: ignore[operator]
    assert same, f"{got_structure} is not {want_structure}"
    for (path, left), (_, right) in zip(got, want, strict=True):
        assert_same_leaf(left, right, jtu.keystr(path))


def assert_same_leaf(actual: Any, expected: Any, name: str = "") -> None:
    """One leaf: kind, dtype, shape and every bit agree."""
    assert leaf_kind(actual) == leaf_kind(expected), name
    if leaf_kind(expected) in ("jax", "numpy", "numpy scalar"):
        assert actual.dtype == expected.dtype, name
        assert actual.shape == expected.shape, name
    assert bits(actual) == bits(expected), f"{name}: the bits differ"


def leaf_kind(leaf: Any) -> str:
    """What a leaf is, apart from dtype and shape."""
    if isinstance(leaf, jax.Array):
        return "jax"
    if isinstance(leaf, np.ndarray):
        return "numpy"
    if isinstance(leaf, np.generic):
        return "numpy scalar"
    return type(leaf).__name__


def bits(leaf: Any) -> bytes:
    """The bits of a leaf that carry meaning, never compared as floats."""
    if isinstance(leaf, float):
        return struct.pack("<d", leaf)
    if isinstance(leaf, complex):
        return struct.pack("<dd", leaf.real, leaf.imag)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return f"{jax.random.key_impl(leaf)} ".encode() + bits(
            jax.random.key_data(leaf)
        )
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        array = np.ascontiguousarray(np.asarray(leaf)).reshape(-1)
        data = array.view(np.uint8)
        mask = _SUB_BYTE_MASKS.get(array.dtype.name)
        return (data if mask is None else data & np.uint8(mask)).tobytes()
    return repr(leaf).encode()


# --- states and edits to draw -------------------------------------------------------


def random_array(
    rng: np.random.Generator, dtype: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Any bits that `dtype` can hold: NaNs with payloads, -0.0, subnormals."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    count = int(np.prod(shape, dtype=np.int64))
    data = rng.integers(0, 256, count * kind.itemsize, np.uint8)
    if kind == np.bool_:
        data &= 1
    elif kind.name in _SUB_BYTE_MASKS:
        data &= _SUB_BYTE_MASKS[kind.name]
    return data.view(kind).reshape(shape)


SHAPES = st.one_of(
    st.lists(st.integers(0, 7), max_size=3).map(tuple),
    st.sampled_from([(130,), (33, 17), (3, 5, 40), (2_100,)]),
)
SEEDS = st.integers(0, 2**32 - 1)
_TEXT = st.text(max_size=4)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """A jax or numpy array, or a numpy scalar, of any dtype."""
    on_device = draw(st.booleans())
    dtype = draw(st.sampled_from(JAX_DTYPES if on_device else NUMPY_DTYPES))
    array = random_array(np.random.default_rng(draw(SEEDS)), dtype, draw(SHAPES))
    if on_device:
        return jnp.asarray(array)
    return array[()] if array.ndim == 0 and draw(st.booleans()) else array


def keys() -> st.SearchStrategy[jax.Array]:
    """Typed keys and arrays of them."""
    return st.builds(
        lambda seed, impl, count: (
            jax.random.split(jax.random.key(seed, impl=impl), count)
            if count
            else jax.random.key(seed, impl=impl)
        ),
        st.integers(0, 100),
        st.sampled_from(["threefry2x32", "rbg"]),
        st.integers(0, 3),
    )


PYTHON_VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    _TEXT,
    st.binary(max_size=200),
)
LEAVES = st.one_of(arrays(), arrays(), arrays(), PYTHON_VALUES, keys())
"""Leaves of every supported kind, mostly arrays."""


def trees() -> st.SearchStrategy[dict[str, Any]]:
    """Nested dict, list, tuple and None with any leaves."""
    inner = st.recursive(
        LEAVES | st.none(),
        lambda child: st.one_of(
            st.lists(child, max_size=3),
            st.lists(child, max_size=3).map(tuple),
            st.dictionaries(_TEXT, child, max_size=3),
            st.dictionaries(st.integers(-3, 3), child, max_size=3),
        ),
        max_leaves=5,
    )
    return st.dictionaries(_TEXT, inner, max_size=4)


EDITS = ("none", "few", "block", "all", "constant", "copy", "cast", "replace", "drop")


def edits() -> st.SearchStrategy[list[tuple[str, int]]]:
    """A few edits with their seeds, for `edited`."""
    return st.lists(st.tuples(st.sampled_from(EDITS), SEEDS), max_size=4)


def edited(tree: Any, changes: list[tuple[str, int]]) -> Any:
    """`tree` after some edits; `tree` itself is left alone."""
    for kind, seed in changes:
        tree = _edited(tree, kind, np.random.default_rng(seed))
    return tree


def _edited(tree: Any, kind: str, rng: np.random.Generator) -> Any:
    leaves, structure = jtu.tree_flatten(tree)
    if not leaves or kind == "none":
        return tree
    index = int(rng.integers(len(leaves)))
    leaf = leaves[index]
    if kind == "drop" and isinstance(tree, dict):
        return {key: tree[key] for key in list(tree)[:-1]}
    if kind == "replace":
        dtype = str(rng.choice(NUMPY_DTYPES))
        leaves[index] = random_array(rng, dtype, (int(rng.integers(1, 60)),))
    elif kind == "cast":
        _with_cast(leaves, index, rng)
    elif kind == "copy":
        leaves[index] = leaves[int(rng.integers(len(leaves)))]
    elif _is_array(leaf):
        changed = _edited_array(np.array(leaf), kind, rng)
        leaves[index] = jnp.asarray(changed) if isinstance(leaf, jax.Array) else changed
    return jtu.tree_unflatten(structure, leaves)


def _is_array(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array | np.ndarray)
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        and leaf.size > 0
    )


def _edited_array(array: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    flat = array.reshape(-1)
    fresh = random_array(rng, dtype_name(array), flat.shape)
    if kind == "few":
        where = rng.integers(0, flat.size, max(1, flat.size // 50))
    elif kind == "block":
        start = int(rng.integers(flat.size))
        where = np.arange(start, min(flat.size, start + 1 + flat.size // 4))
    else:
        where = np.arange(flat.size)
    if kind == "constant":
        fresh[:] = fresh[0]
    flat[where] = fresh[where]
    return flat.reshape(array.shape)


def _with_cast(leaves: list[Any], index: int, rng: np.random.Generator) -> None:
    """Make one leaf a fp32 master, sometimes with NaNs, and another its half copy."""
    shape = (int(rng.integers(1, 700)),)
    master = random_array(rng, "float32", shape)
    if rng.integers(2):
        master = np.nan_to_num(master)
    half = ml_dtypes.bfloat16 if rng.integers(2) else np.float16
    with np.errstate(all="ignore"):
        leaves[index - 1], leaves[index] = master, master.astype(half)


def dtype_name(array: Any) -> str:
    """Name under which `random_array` knows the dtype."""
    dtype = array.dtype
    foreign = dtype.kind in "mM" or not dtype.isnative
    return str(dtype.str if foreign else dtype.name)


def option_values() -> st.SearchStrategy[dict[str, Any]]:
    """Any `DeltaOptions`, small numbers first so that every limit is met."""
    return st.fixed_dictionaries(
        {
            "chunk_bytes": st.sampled_from([64, 100, 1024, 4096, 1 << 20]),
            "pack_bytes": st.sampled_from([1024, 4096, 16 << 20]),
            "full_every": st.sampled_from([0, 1, 3, 10]),
            "max_chain": st.sampled_from([1, 2, 3, 20]),
            "read_budget": st.sampled_from([1.0, 1.1, 2.0, 100.0]),
            "refresh_every": st.sampled_from([1, 2, 5, 30]),
            "base": st.sampled_from(["auto", "keep", "store"]),
            "threads": st.sampled_from([1, 2, None]),
        }
    )
