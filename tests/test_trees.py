"""Pytrees as paths and a document, and back: all node types, keys of any kind."""

import collections
import dataclasses
import json
import typing

import flax.core
import flax.struct
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from flax import nnx

from orbax_delta import trees
from orbax_delta.errors import FormatError, InvalidInputError
from orbax_delta.manifests import (
    LeafEntry,
    Manifest,
    encode_manifest,
    parse_manifest,
)


class Point(typing.NamedTuple):
    """A node with named fields."""

    x: typing.Any
    y: typing.Any


@flax.struct.dataclass
class Block:
    """A node registered with jax by field names."""

    weight: typing.Any
    bias: typing.Any


def _round_trip(tree):
    """The plain tree that comes back when no target is given."""
    flat = trees.flatten(tree)
    structure = json.loads(json.dumps(flat.structure))
    return trees.rebuild(structure, flat.values, paths=flat.paths)


KEYS = st.one_of(
    st.lists(st.text(max_size=4), unique=True, max_size=4),
    st.lists(st.integers(-(1 << 70), 1 << 70), unique=True, max_size=4),
    st.lists(st.binary(max_size=3), unique=True, max_size=3),
    st.lists(st.floats(allow_nan=False), unique_by=repr, max_size=3),
    st.lists(st.tuples(st.text(max_size=2), st.integers()), unique=True, max_size=3),
)
PLAIN_TREES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        KEYS.flatmap(
            lambda keys: st.tuples(*[inner] * len(keys)).map(
                lambda values: dict(zip(keys, values, strict=True))
            )
        ),
    ),
    max_leaves=12,
)


def _same(left, right):
    """Equality that tells 0.0 from -0.0 among keys, and list from tuple."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        pairs = zip(sorted(left, key=repr), sorted(right, key=repr), strict=True)
        return len(left) == len(right) and all(
            repr(a) == repr(b) and _same(left[a], right[b]) for a, b in pairs
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right


@hypothesis.given(PLAIN_TREES)
@hypothesis.settings(max_examples=200)
def test_plain_trees_come_back_without_a_target(tree):
    """dict, list, tuple and None, with integer, float, bytes and tuple keys."""
    assert _same(_round_trip(tree), tree)


@hypothesis.given(PLAIN_TREES)
def test_leaves_are_in_the_order_of_jax(tree):
    """So that values and jax's own tree structure fit together."""
    flat = trees.flatten(tree)
    leaves, treedef = jtu.tree_flatten(tree)
    assert len(flat.values) == len(flat.paths) == len(leaves)
    assert all(a is b for a, b in zip(flat.values, leaves, strict=True))
    assert _same(jtu.tree_unflatten(treedef, flat.values), tree)


@hypothesis.given(PLAIN_TREES)
def test_no_two_leaves_have_one_path(tree):
    """A path is what a leaf is known by."""
    paths = trees.flatten(tree).paths
    assert len(set(paths)) == len(paths)


def test_a_leaf_alone_is_a_tree():
    """Its path is empty."""
    flat = trees.flatten(3)
    assert (flat.structure, flat.paths, flat.values) == ({"leaf": 0}, [()], [3])
    assert trees.rebuild({"none": True}, []) is None


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a/b": 1, "a": {"b": 2}}, [("a", "b"), ("a/b",)]),
        ({"": 1, "(root)": 2}, [("",), ("(root)",)]),
        ({3: (1, [2])}, [("3", "0"), ("3", "1", "0")]),
        ({"é\n\udc80": 1}, [("é\n\udc80",)]),
        (Point(x=1, y=None), [("x",)]),
        (Block(weight=1, bias=(2,)), [("weight",), ("bias", "0")]),
    ],
)
def test_paths_are_the_keys_on_the_way(tree, paths):
    """Slashes, empty names, line breaks and lone surrogates in keys are kept."""
    assert list(trees.flatten(tree).paths) == paths
    if isinstance(tree, dict):
        assert _round_trip(tree) == tree


def test_nodes_of_other_types_come_back_as_their_fields():
    """Named fields as a dict, numbered ones as a list, with the type's name kept."""
    assert _round_trip(Point(x=1, y=2)) == {"x": 1, "y": 2}
    assert _round_trip(Block(weight=1, bias=2)) == {"weight": 1, "bias": 2}
    assert trees.flatten(Point(x=1, y=2)).structure == {
        "node": [["x", {"leaf": 0}], ["y", {"leaf": 1}]],
        "type": f"{__name__}.Point",
    }
    ordered = collections.OrderedDict([("b", 1), ("a", 2)])
    assert list(_round_trip(ordered)) == ["b", "a"]
    assert _round_trip(collections.defaultdict(list, {2: 1})) == {2: 1}
    assert _round_trip(flax.core.freeze({"a": {"b": 1}})) == {"a": {"b": 1}}


def test_optax_states_come_back_into_their_own_types():
    """Named tuples inside tuples, empty states, masked nodes: by target and without."""
    params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(
            optax.adamw(optax.cosine_decay_schedule(1e-3, 10)), {"w": True, "b": False}
        ),
    )
    state = optimizer.init(params)
    flat = trees.flatten(state)
    leaves, treedef = jtu.tree_flatten(state)
    assert all(a is b for a, b in zip(flat.values, leaves, strict=True))
    rebuilt = jtu.tree_unflatten(treedef, flat.values)
    assert jtu.tree_structure(rebuilt) == jtu.tree_structure(state)
    plain = trees.rebuild(flat.structure, flat.values)
    assert isinstance(plain, tuple)
    assert plain[1]["inner_state"][0]["mu"]["w"] is state[1].inner_state[0].mu["w"]


def test_nnx_states_are_known_by_the_names_of_their_modules():
    """Parameters, dropout keys and counts of an nnx model, by path."""
    model = nnx.Sequential(
        nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    )
    state = nnx.state(model)
    flat = trees.flatten(state)
    leaves, treedef = jtu.tree_flatten(state)
    assert all(a is b for a, b in zip(flat.values, leaves, strict=True))
    rebuilt = jtu.tree_unflatten(treedef, flat.values)
    assert jtu.tree_structure(rebuilt) == jtu.tree_structure(state)
    kernels = [path for path in flat.paths if "kernel" in path]
    assert len(kernels) == 1
    plain = trees.rebuild(flat.structure, flat.values)
    for key in kernels[0]:
        plain = plain[int(key) if isinstance(plain, list) else _own_key(plain, key)]
    assert np.array_equal(plain, model.layers[0].kernel[...])


def _own_key(node, text):
    (key,) = [key for key in node if str(key) == text]
    return key


def test_registered_dataclasses_keep_their_static_fields_out():
    """Only what jax counts as a child is a leaf."""

    @jtu.register_dataclass
    @dataclasses.dataclass
    class Layer:
        weight: typing.Any
        name: str = dataclasses.field(default="dense", metadata={"static": True})

    flat = trees.flatten([Layer(weight=1)])
    assert flat.paths == [("0", "weight")]
    assert _round_trip(Layer(weight=1)) == {"weight": 1}


def test_two_leaves_of_one_path_are_refused():
    """The keys 1 and "1" of one node read the same."""
    tree = {"a": collections.OrderedDict([(1, 5), ("1", 6)])}
    with pytest.raises(InvalidInputError, match="two leaves have the path a/1"):
        trees.flatten(tree)


def test_keys_that_read_the_same_are_refused_without_leaves_too():
    """One of the two would be lost in a tree that comes back without a target."""
    twice = collections.OrderedDict([("1", None), (1, 3)])
    with pytest.raises(
        InvalidInputError, match=r"two leaves have the path a/1; rename"
    ):
        trees.flatten({"a": twice})


def test_a_key_that_cannot_be_written_is_the_callers_error():
    """Python writes no integer of more than 4,300 digits."""
    with pytest.raises(
        InvalidInputError, match=r"a key at a cannot be written: .*digit"
    ):
        trees.flatten({"a": {10**5000: 1}})


def test_a_tuple_as_key_may_hold_what_comes_back_as_text():
    """None in it is written as text, so that the key reads in another way."""
    assert _round_trip({(1, None): 3}) == {(1, "None"): 3}


def test_keys_that_jax_cannot_sort_are_the_callers_error():
    """A dict with keys of several types is no tree; the message says where it is."""
    with pytest.raises(InvalidInputError, match="the dict at a/0 is no tree for jax"):
        trees.flatten({"a": [{1: 5, "b": 6}]})


def _nested(depth, node):
    tree = 1
    for _ in range(depth):
        tree = node(tree)
    return tree


@pytest.mark.parametrize("node", [lambda x: [x], lambda x: {"key": x}, lambda x: (x,)])
def test_depth_is_bounded(node):
    """A hundred levels are kept; more would be more than a reader's stack holds."""
    assert _same(_round_trip(_nested(100, node)), _nested(100, node))
    for depth in (101, 5000):
        with pytest.raises(InvalidInputError, match="more than 100 levels deep"):
            trees.flatten(_nested(depth, node))


def test_tracers_do_not_disturb_the_structure():
    """Flattening looks at nodes only; what a leaf is, others judge."""
    seen = []

    def look(x):
        seen.append(trees.flatten({"x": x}).paths)
        return x

    jax.eval_shape(look, jnp.ones(2))
    assert seen == [[("x",)]]


@pytest.mark.parametrize(
    ("structure", "count"),
    [
        ({}, 0),
        ([], 0),
        ("leaf", 1),
        (None, 0),
        ({"leaf": 0}, 0),
        ({"leaf": 1}, 2),
        ({"leaf": -1}, 1),
        ({"leaf": None}, 0),
        ({"none": True}, 1),
        ({"list": [{"leaf": 0}, {"leaf": 0}]}, 2),
        ({"list": [{"leaf": 1}, {"leaf": 0}]}, 2),
        ({"list": 3}, 0),
        ({"dict": [["a"]]}, 0),
        ({"dict": [["a", {"leaf": 0}, 1]]}, 1),
        ({"dict": [[["int", "x"], {"leaf": 0}]]}, 1),
        ({"dict": [[["what", "x"], {"leaf": 0}]]}, 1),
        ({"dict": [[["float", "0x1p99999"], {"leaf": 0}]]}, 1),
        ({"dict": [[[["int"], 1], {"leaf": 0}]]}, 1),
    ],
)
def test_a_document_that_flatten_does_not_make_is_refused(structure, count):
    """Every leaf stands in it once and in order, every node is known."""
    with pytest.raises(FormatError, match="the tree of a MANIFEST"):
        trees.rebuild(structure, list(range(count)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.text(max_size=3),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["leaf", "none", "list", "tuple", "dict", "node", "type"]),
            inner,
            max_size=2,
        ),
        st.tuples(
            st.sampled_from(["int", "bool", "float", "bytes", "tuple", "text"]), inner
        ).map(list),
    ),
    max_leaves=8,
)


@hypothesis.given(JSON, st.integers(0, 3))
@hypothesis.settings(max_examples=300)
def test_any_document_is_a_tree_or_a_typed_error(structure, count):
    """Whatever JSON stands there, nothing but FormatError is raised."""
    try:
        tree = trees.rebuild(structure, [f"leaf {n}" for n in range(count)])
    except FormatError:
        return
    assert str(tree).count("leaf ") == count


def test_a_document_nested_without_end_is_refused():
    """A hostile depth ends in words, not in an exhausted stack."""
    structure = {"leaf": 0}
    for _ in range(100_000):
        structure = {"list": [structure]}
    with pytest.raises(FormatError, match="more than 100 levels deep"):
        trees.rebuild(structure, [1])
    while "list" in structure:  # freed level by level: freeing recurses too
        (structure,) = structure["list"]


def test_the_deepest_tree_fits_a_manifest():
    """What may be saved can be written and read again, a hundred levels down."""
    flat = trees.flatten(_nested(100, lambda x: {"key": x}))
    leaf = LeafEntry(path=flat.paths[0], kind="int", value="0x1")
    manifest = Manifest(
        attempt="0" * 32,
        step=None,
        item="",
        wall_time=0.0,
        save_index=0,
        predecessor=None,
        store_uuid="",
        store_url="",
        options={},
        versions={},
        tree=flat.structure,
        leaves=(leaf,),
        packs=[],
        parts=(),
        report={},
    )
    back = parse_manifest(encode_manifest(manifest), where="MANIFEST")
    assert trees.rebuild(back.tree, [1]) == _nested(100, lambda x: {"key": x})
