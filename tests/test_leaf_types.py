"""Every kind of leaf comes back as it was: type, dtype, shape and every bit."""

import collections
import enum
import math
import struct

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import strategies
from flax import nnx
from flax.training.train_state import TrainState
from strategies import assert_same_leaf, assert_same_tree, open_run, random_array

import orbax_delta
from orbax_delta import reader
from orbax_delta.background import pool


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def round_trip(root, tree, target=None):
    """Save with one manager, restore with another that has seen nothing."""
    with open_run(root) as run:
        run.save(0, tree)
    with open_run(root) as run:
        return run.restore(0, target)


def abstract(tree):
    """Orbax's own way to make a target."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (5, 3)], ids=str)
def test_jax_arrays_of_every_dtype(root, shape):
    """Arrays of jax, zero-size and 0-d ones too, with and without a target."""
    rng = np.random.default_rng(0)
    tree = {
        name: jnp.asarray(random_array(rng, name, shape))
        for name in strategies.JAX_DTYPES
    }
    with open_run(root) as run:
        run.save(0, tree)
        assert_same_tree(run.restore(0), tree)
        assert_same_tree(run.restore(0, abstract(tree)), tree)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 9)], ids=str)
def test_numpy_arrays_of_every_dtype(root, shape):
    """Arrays of numpy, foreign byte order, 64-bit types and dates too."""
    rng = np.random.default_rng(1)
    tree = {name: random_array(rng, name, shape) for name in strategies.NUMPY_DTYPES}
    with open_run(root) as run:
        run.save(0, tree)
        assert_same_tree(run.restore(0), tree)
        assert_same_tree(run.restore(0, tree), tree)


def test_numpy_scalars_keep_their_type(root):
    """`np.generic` leaves, which Orbax saves but does not restore by target."""
    rng = np.random.default_rng(2)
    tree = {
        name: random_array(rng, name, ())[()]
        for name in strategies.NUMPY_DTYPES
        if not name.startswith(">")  # numpy scalars are always native
    }
    assert all(isinstance(leaf, np.generic) for leaf in tree.values())
    with open_run(root) as run:
        run.save(0, tree)
        assert_same_tree(run.restore(0), tree)
        assert_same_tree(run.restore(0, tree), tree)


def test_python_values(root):
    """Python values of any size, with every bit of floats."""
    (payload_nan,) = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))
    tree = {
        "bools": [True, False],
        "ints": [0, -1, 2**63, -(2**64), 3**4000],
        "floats": [0.0, -0.0, math.inf, -math.inf, payload_nan, 5e-324],
        "complex": [1j, complex(-0.0, math.nan)],
        "text": ["", "naïve\u2028\U0001f600", "nul\0inside", "lone \ud800"],
        "bytes": [b"", bytes(range(256))],
        "none": None,
    }
    with open_run(root) as run:
        run.save(0, tree)
        assert_same_tree(run.restore(0), tree)
        assert_same_tree(run.restore(0, tree), tree)


def test_nan_payloads_and_negative_zeros(root):
    """NaNs keep sign and payload, signalling ones too, and -0.0 stays -0.0."""
    words = np.array([0x7F800001, 0xFFC0BEEF, 0x7FFFFFFF, 0x80000000, 1], np.uint32)
    halves = np.array([0x7C01, 0xFE55, 0x8000, 1], np.uint16)
    tree = {
        "f32": jnp.asarray(words.view(np.float32)),
        "bf16": jnp.asarray(np.array([0x7F81, 0xFFC5, 0x8000], np.uint16)).view(
            jnp.bfloat16
        ),
        "f16": halves.view(np.float16),
    }
    for restored in (round_trip(root, tree), round_trip(root / "b", tree, tree)):
        assert_same_tree(restored, tree)
        assert np.asarray(restored["f32"]).view(np.uint32).tolist() == words.tolist()
        assert restored["f16"].view(np.uint16).tolist() == halves.tolist()


@pytest.mark.parametrize(
    ("dtype", "values", "stored"),
    [
        (ml_dtypes.int4, [1, -1, 7, -8, 3], [0xF1, 0x87, 0x03]),
        (ml_dtypes.uint4, [1, 15, 7, 8, 3], [0xF1, 0x87, 0x03]),
        (ml_dtypes.int2, [1, -1, -2, 0, 1], [0b00101101, 0b01]),
        (ml_dtypes.float4_e2m1fn, [0.5, -6.0, 1.0], [0xF1, 0x02]),
    ],
    ids=["int4", "uint4", "int2", "float4_e2m1fn"],
)
def test_sub_byte_types_are_packed(root, dtype, values, stored):
    """Two 4-bit or four 2-bit elements share a byte of the stored content."""
    tree = {"w": jnp.asarray(np.array(values, dtype))}
    with open_run(root) as run:
        run.save(0, tree)
        assert_same_tree(run.restore(0), tree)
    step = strategies.read_step(root, 0)
    requests = [
        reader.Request(leaf=step.manifest.leaves[row.leaf], row=row)
        for row in step.rows
    ]
    with pool(1) as executor:
        (got,) = reader.fetch(
            step.packs, requests, executor=executor, count=reader.ReadCount()
        )
    assert got.content.tolist() == stored


def test_large_packed_leaf_takes_half_a_byte_each(root):
    """Random int4 values, which nothing compresses, cost 4 bits each on disk."""
    values = random_array(np.random.default_rng(3), "int4", (1 << 18,))
    with open_run(root) as run:
        run.save(0, {"w": jnp.asarray(values)})
    assert orbax_delta.save_report(root / "0").full_bytes == 1 << 17
    assert strategies.disk_bytes(root) < 1.05 * (1 << 17)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys(root, impl):
    """Typed keys and arrays of keys keep implementation and key data."""
    tree = {
        "one": jax.random.key(7, impl=impl),
        "many": jax.random.split(jax.random.key(8, impl=impl), (2, 3)),
        "raw": jax.random.PRNGKey(9, impl="threefry2x32"),
    }
    with open_run(root) as run:
        run.save(0, tree)
        for restored in (
            run.restore(0),
            run.restore(0, tree),
            run.restore(0, abstract(tree)),
            run.restore(0, jax.eval_shape(lambda: tree)),
        ):
            assert_same_tree(restored, tree)
            assert jax.random.bits(restored["one"]) == jax.random.bits(tree["one"])


def test_no_keys(root):
    """A key array of size zero keeps its implementation."""
    tree = {"keys": jax.random.split(jax.random.key(1, impl="rbg"), 3)[:0]}
    with open_run(root) as run:
        run.save(0, tree)
        for restored in (run.restore(0), run.restore(0, tree)):
            assert_same_tree(restored, tree)


def test_64_bit_device_arrays(root):
    """With 64-bit mode they come back to the device; without it as numpy, unharmed."""
    with jax.enable_x64(True):
        tree = {
            "f": jnp.arange(3.0) / 7,
            "i": jnp.asarray([2**40]),
            "c": jnp.ones(1) * 1j,
        }
        with open_run(root) as run:
            run.save(0, tree)
            assert_same_tree(run.restore(0), tree)
            assert_same_tree(run.restore(0, tree), tree)
    with open_run(root) as run:
        assert_same_tree(run.restore(0), jax.tree.map(np.asarray, tree))


def test_sharded_key_array(root):
    """A key array over eight devices comes back over eight devices."""
    sharding = strategies.sharding_of((8,), "x", "x")
    keys = jax.device_put(jax.random.split(jax.random.key(1), 16), sharding)
    with open_run(root) as run:
        run.save(0, {"keys": keys})
        for restored in (run.restore(0), run.restore(0, {"keys": keys})):
            assert_same_tree(restored, {"keys": keys})
            assert restored["keys"].sharding == sharding


class Decoder(nn.Module):
    """Two layers with a mutable collection."""

    @nn.compact
    def __call__(self, x, train=False):
        """One forward pass."""
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(2)(x)


def test_linen_train_state_with_an_optax_chain(root):
    """A TrainState with masked, scheduled, clipped AdamW restores into its type."""
    module = Decoder()
    variables = module.init(jax.random.key(0), jnp.ones((1, 4)))
    transform = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adamw(optax.linear_schedule(1e-3, 0.0, 10)), True),
        optax.ema(0.99),
    )
    state = TrainState.create(
        apply_fn=module.apply, params=variables["params"], tx=transform
    )
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    with open_run(root) as run:
        run.save(0, state)
        for target in (state, abstract(state)):
            restored = run.restore(0, target)
            assert isinstance(restored, TrainState)
            assert_same_tree(restored, state)
        # eval_shape asks for the Python step as an array of the host.
        traced = run.restore(0, jax.eval_shape(lambda: state))
        assert_same_tree(traced, state.replace(step=np.asarray(1, np.int32)))
        plain = run.restore(0)
    assert_same_tree(plain["params"], state.params)
    assert plain["step"] == 1


def test_nnx_state(root):
    """An NNX State with parameters, batch statistics and dropout keys."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    state = nnx.state((model, optimizer))
    with open_run(root) as run:
        run.save(0, state)
        for target in (state, abstract(state)):
            assert_same_tree(run.restore(0, target), state)
        merged = nnx.merge(nnx.graphdef((model, optimizer)), run.restore(0, state))
        assert_same_tree(nnx.state(merged), state)
        plain = run.restore(0)
    got, want = jax.tree.leaves(plain), jax.tree.leaves(state)
    for left, right in zip(got, want, strict=True):
        assert_same_leaf(left, right)


def test_containers_without_a_target(root):
    """Tuples, lists, None, empty containers and odd dictionary keys keep their kind."""
    tree = {
        "tuple": (1, [2, (3,)], ()),
        "empty": {"dict": {}, "list": [], "none": None},
        "int keys": {0: "a", 1: "b", -5: "c"},
        "int keys only": {0: {0: 1.0}, 1: {0: 2.0}},
        "tuple keys": {(0, "a"): 1, (1, "b"): 2},
        "float keys": {0.5: 1, -1.5: 2},
        "bytes keys": {b"\xff": 1},
        "bool keys": {True: 1, False: 2},
        "a.b/c~d\\": {"": {"e/": 1}, "..": 2},
    }
    assert_same_tree(round_trip(root, tree), tree)


Point = collections.namedtuple("Point", ["x", "y"])


@jtu.register_pytree_node_class
class Pair:
    """A node without names for its children."""

    def __init__(self, left, right):
        self.children = (left, right)

    def tree_flatten(self):
        """Both children."""
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        """From both children."""
        return cls(*children)


def test_custom_nodes(root):
    """Custom nodes restore into a target; without one as dict or list of children."""
    tree = {
        "named": Point(1, np.ones(2)),
        "pair": Pair(jnp.ones(3), {"z": 2}),
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "by default": collections.defaultdict(int, {0: 5, 1: 6}),
    }
    with open_run(root) as run:
        run.save(0, tree)
        assert_same_tree(run.restore(0, tree), tree)
        plain = run.restore(0)
    assert_same_tree(
        plain,
        {
            "named": {"x": 1, "y": np.ones(2)},
            "pair": [jnp.ones(3), {"z": 2}],
            "ordered": {"b": 1, "a": 2},
            "by default": {0: 5, 1: 6},
        },
    )


@pytest.mark.parametrize(
    "tree",
    [{}, [], (), None, {"a": {}, "b": [(), None]}],
    ids=repr,
)
def test_trees_without_leaves(root, tree):
    """Nothing to store is stored and restored as such."""
    with open_run(root) as run:
        assert run.manager.save(0, args=orbax_delta.DeltaSave(tree))
        run.manager.wait_until_finished()
        assert run.manager.restore(0, args=orbax_delta.DeltaRestore()) == tree


@pytest.mark.parametrize(
    "leaf",
    [jnp.arange(5.0), np.arange(5), np.float32(2), 3, "text", jax.random.key(1)],
    ids=["jax", "numpy", "numpy scalar", "int", "str", "key"],
)
def test_single_leaf_as_the_whole_tree(root, leaf):
    """A bare leaf is a tree too."""
    assert_same_tree(round_trip(root, leaf), leaf)
    assert_same_tree(round_trip(root / "again", leaf, leaf), leaf)


def test_views_and_layouts(root):
    """Strided, transposed, reversed and read-only numpy arrays store their values."""
    base = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    frozen = base.copy()
    frozen.flags.writeable = False
    tree = {
        "strided": base[:, ::2],
        "transposed": base.T,
        "reversed": base[::-1, :, ::-1],
        "broadcast": np.broadcast_to(np.float32(3), (2, 3)),
        "fortran": np.asfortranarray(base),
        "frozen": frozen,
    }
    assert_same_tree(round_trip(root, tree), tree)


def test_weak_types_become_ordinary(root):
    """A weakly typed jax scalar keeps dtype and bits."""
    tree = {"x": jnp.asarray(3.5) * 2}
    assert_same_tree(round_trip(root, tree, tree), tree)


def test_leaf_with_many_dimensions(root):
    """Nine dimensions, cut into chunks across several of them."""
    values = np.arange(3 * 2**8, dtype=np.int16).reshape(3, *(2,) * 8)
    with open_run(root, chunk_bytes=64) as run:
        run.save(0, {"w": values})
        assert_same_tree(run.restore(0), {"w": values})


class Colour(enum.IntEnum):
    """An int subclass, which would lose its type."""

    RED = 1


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (Colour.RED, r"leaf a/0 is a .*test_leaf_types\.Colour.*expected a jax or"),
        (object(), r"leaf a/0 is a builtins\.object"),
        (np.array(["x"]), r"leaf a/0: dtype <U1 cannot be stored; expected"),
        (np.array([None]), r"leaf a/0: dtype object cannot be stored"),
        (np.zeros(2, "f4,i4"), r"leaf a/0: dtype .* cannot be stored"),
        (np.longdouble(1), r"leaf a/0: dtype .*128 cannot be stored"),
        (np.ma.masked_array([1, 2]), r"leaf a/0 .*save its data and its mask"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), r"leaf a/0 is a .*ShapeDtypeStruct"),
        ({1, 2}, r"leaf a/0 is a builtins\.set"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_leaves_name_their_path(root, leaf, message):
    """What cannot be kept bit for bit is refused before anything is written."""
    with open_run(root, manager_options=strategies.refusing_options()) as run:
        run.save(0, {"a": [1]})
        before = strategies.listing(root / "0")
        with pytest.raises(orbax_delta.InvalidInputError, match=message):
            run.manager.save(1, args=ocp.args.StandardSave({"a": [leaf]}))
        assert strategies.listing(root / "0") == before
        run.save(2, {"a": [2]})
        assert run.restore(2) == {"a": [2]}
