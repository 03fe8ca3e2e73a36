"""Differences between steps against a brute-force comparison of restored trees."""

import math
import shutil

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp
import pytest
import roots
import strategies
from hypothesis import given, settings
from strategies import STORE, open_run

import orbax_delta
from orbax_delta import differing, errors, prune, testing
from orbax_delta.store import DeltaStore, Folder


@pytest.fixture(autouse=True, scope="module")
def _unsynced():
    with pytest.MonkeyPatch.context() as patch:
        strategies.skip_disk_sync(patch)
        yield


def save_all(root, trees, **options):
    """Save trees as steps 0, 1, ..."""
    with open_run(root, **options) as run:
        for step, tree in enumerate(trees):
            run.save(step, tree)
    return root


def diff(root, before=0, after=1):
    """The comparison of two steps with one item."""
    (found,) = differing.between(str(root), str(before), str(after))
    return found


def by_path(found):
    """Leaves of a comparison by their paths."""
    return {leaf.path: leaf for leaf in found.leaves}


# --- brute force --------------------------------------------------------------------


def elements(leaf):
    """A leaf as a plain array, and whether its elements are floats."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    name = array.dtype.name
    return array, array.dtype.kind in "fc" or name.startswith(("float", "bfloat"))


def expected(before, after):
    """(changed, largest, mean, not finite) of two leaves of one type and shape."""
    (old, floats), (new, _) = elements(before), elements(after)
    if old.dtype.name in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn"):
        different = old.reshape(-1).astype(float) != new.reshape(-1).astype(float)
        if old.dtype.name == "float4_e2m1fn":  # -0.0 is another number there too
            signs = [np.signbit(x.reshape(-1).astype(float)) for x in (old, new)]
            different |= signs[0] != signs[1]
    else:
        rows = [
            np.frombuffer(x.tobytes(), np.uint8).reshape(-1, x.itemsize)
            for x in (old, new)
        ]
        different = (rows[0] != rows[1]).any(axis=1)
    changed = int(different.sum())
    if not floats:
        return changed, None, None, 0
    sizes, bad = [], 0
    wide = complex if old.dtype.kind == "c" else float
    for index in np.flatnonzero(different):
        a, b = (wide(x.reshape(-1)[index]) for x in (old, new))
        if all(math.isfinite(abs(x)) for x in (a, b)):
            sizes.append(abs(b - a))
        else:
            bad += 1
    if not sizes:
        return changed, None, None, bad
    return changed, max(sizes), math.fsum(sizes) / old.size, bad


def check_leaf(found, before, after):
    """One leaf of a comparison against brute force."""
    changed, largest, mean, bad = expected(before, after)
    assert (found.changed, found.not_finite) == (changed, bad)
    assert found.status == ("changed" if changed else "same")
    assert found.elements == elements(after)[0].size
    assert (found.largest is None) == (largest is None)
    if largest is not None:
        assert found.largest == largest
        assert found.mean == pytest.approx(mean, rel=1e-9)


def check_trees(found, before, after):
    """All leaves of a comparison of two trees of dicts, by brute force."""
    old, new = (
        {"/".join(str(key.key) for key in path): leaf for path, leaf in paths}
        for paths in (jtu.tree_leaves_with_path(tree) for tree in (before, after))
    )
    leaves = by_path(found)
    assert leaves.keys() == old.keys() | new.keys()
    for path, leaf in leaves.items():
        if path not in old or path not in new:
            assert leaf.status == ("added" if path in new else "removed")
            continue
        a, b = old[path], new[path]
        if isinstance(b, int | float | bool | str | bytes):
            assert (leaf.status == "same") == (type(a) is type(b) and a == b)
            continue
        # As texts: float is equal to numpy's float64.
        types = [str(getattr(x, "dtype", type(x))) for x in (a, b)]
        if types[0] != types[1]:
            assert leaf.status == "retyped"
        elif np.shape(a) != np.shape(b):
            assert leaf.status == "reshaped"
        else:
            check_leaf(leaf, a, b)


@given(seed=strategies.SEEDS, changes=st.lists(strategies.edits(), max_size=3))
@settings(max_examples=settings().max_examples // 2, deadline=None)
def test_edited_trees(tmp_path_factory, seed, changes):
    """Any edits of a state with every kind of leaf, with lists of several records."""
    root = tmp_path_factory.mktemp("run") / "run"
    rng = np.random.default_rng(seed)
    tree = {
        "dense": rng.standard_normal((30, 40)).astype(np.float32),
        "half": jnp.asarray(rng.standard_normal(600), jnp.bfloat16),
        "ints": rng.integers(0, 9, 500),
        "empty": np.zeros((0, 3)),
        "scalar": np.float64(rng.standard_normal()),
        "key": jax.random.key(seed),
        "step": 1,
        "rate": 0.5,
        "name": "run",
    }
    trees = [tree]
    for change in changes:
        trees.append(strategies.edited(trees[-1], change) or {"never empty": 1})
    trees.append(trees[-1])
    save_all(root, trees, chunk_bytes=512, pack_bytes=2000, full_every=2)
    with open_run(root) as run:
        restored = [run.restore(step) for step in (0, len(trees) - 1)]
    check_trees(diff(root, 0, len(trees) - 1), *restored)
    shutil.rmtree(root)


SPECIAL = {
    "nan payloads": np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 5], np.uint32),
    "zeros": np.array([0x00000000, 0x80000000, 0x00000001, 0x80000001], np.uint32),
    "infinities": np.array([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0], np.uint32),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_bits_that_compare_oddly(root, name):
    """A NaN equals itself, not another one; -0.0 is not 0.0, and no change in size."""
    words = SPECIAL[name]
    before = {"w": words.view(np.float32)}
    after = {"w": np.roll(words, 1).view(np.float32)}
    save_all(root, [before, after, after])
    check_trees(diff(root), before, after)
    assert {leaf.status for leaf in diff(root, 1, 2).leaves} == {"same"}


@pytest.mark.parametrize("name", strategies.NUMPY_DTYPES)
def test_every_type(root, name):
    """Bits and sizes of every element type that can be stored."""
    rng = np.random.default_rng(5)
    before = strategies.random_array(rng, name, (7, 11))
    after = np.array(before)
    after.reshape(-1)[::3] = before.reshape(-1)[::-1][::3]
    save_all(root, [{"w": before}, {"w": after}], chunk_bytes=64)
    found = by_path(diff(root))["w"]
    check_leaf(found, before, after)


def test_the_largest_doubles(root):
    """Two finite numbers further apart than the largest one, and their mean."""
    most = np.finfo(np.float64).max
    before, after = np.full(4, most), np.array([-most, -most, most, 0.0])
    save_all(root, [{"w": before, "r": most}, {"w": after, "r": -most}])
    leaf = by_path(diff(root))["w"]
    assert (leaf.changed, leaf.largest) == (3, most)
    assert leaf.mean == pytest.approx(0.75 * most)
    assert by_path(diff(root))["r"].largest == most


def test_values_and_other_structures(root):
    """Python values, and leaves that come, go, or change type or shape."""
    before = {
        **{"rate": 0.5, "nan": float("nan"), "step": 3, "flag": True, "z": 1 + 2j},
        **{"gone": 1, "text": "abc", "other": "abc", "bytes": b"12", "kind": 1},
        **{"array": np.zeros(3), "shape": np.zeros(3), "key": jax.random.key(0)},
        **{"scalar": np.float32(1), "minus": 0.0},
    }
    after = before | {
        **{"rate": 0.25, "nan": 1.0, "step": 4, "flag": False, "z": 1 + 3j},
        **{"text": "abd", "other": "abcd", "bytes": b"13", "kind": 1.0},
        **{"array": np.zeros(3, np.float32), "shape": np.zeros(4), "new": [1]},
        **{"key": jax.random.key(0, impl="rbg"), "scalar": np.ones((), np.float32)},
        "minus": -0.0,
    }
    del after["gone"]
    save_all(root, [before, after])
    leaves = by_path(diff(root))
    assert {path: leaf.status for path, leaf in leaves.items()} == {
        **dict.fromkeys(["rate", "nan", "step", "flag", "z", "text"], "changed"),
        **dict.fromkeys(["bytes", "minus"], "changed"),
        **dict.fromkeys(["kind", "array", "key"], "retyped"),
        **dict.fromkeys(["other", "shape"], "reshaped"),
        **{"gone": "removed", "new/0": "added", "scalar": "same"},
    }
    assert (leaves["rate"].largest, leaves["rate"].mean) == (0.25, 0.25)
    assert (leaves["nan"].largest, leaves["nan"].not_finite) == (None, 1)
    assert leaves["text"].changed == 1
    assert leaves["array"].before == "float64[3]"
    assert leaves["array"].after == "float32[3]"
    assert leaves["key"].after == "key<rbg>[4]"
    assert leaves["gone"].after == ""


# --- layouts and reading --------------------------------------------------------------

LAYOUTS = [
    ((8,), "x", ("x",)),
    ((8,), "x", (None, "x")),
    ((4, 2), "xy", ("x", "y")),
    ((2,), "x", ()),
]


@pytest.mark.parametrize("before", LAYOUTS, ids=str)
@pytest.mark.parametrize("after", LAYOUTS, ids=str)
def test_other_shardings(root, before, after):
    """However the two steps cut the leaf: the same elements, the same figures."""
    rng = np.random.default_rng(0)
    old = rng.standard_normal((64, 48)).astype(np.float32)
    new = old.copy()
    new[rng.integers(0, 64, 90), rng.integers(0, 48, 90)] += 1
    for step, (array, layout) in enumerate(((old, before), (new, after))):
        shape, names, spec = layout
        tree = {"w": strategies.sharded(array, shape, names, *spec)}
        # Another job each time, whose chunks are another size.
        with open_run(root, chunk_bytes=1024 << step) as run:
            run.save(step, tree)
    check_leaf(by_path(diff(root))["w"], old, new)


def test_little_memory_whatever_the_layouts(root, monkeypatch):
    """Groups of both steps are held one against the other, never a leaf whole."""
    rng = np.random.default_rng(0)
    old = rng.standard_normal((64, 64)).astype(np.float32)
    new = old + 1
    with open_run(root, chunk_bytes=512) as run:
        run.save(0, {"w": strategies.sharded(old, (8,), "x", "x")})
    with open_run(root, chunk_bytes=512) as run:
        run.save(1, {"w": strategies.sharded(new, (8,), "x", None, "x")})
    monkeypatch.setattr(differing, "_GROUP_BYTES", 1024)
    held = []
    contents = differing._Comparing._contents

    def watched(self, *arguments):
        found = contents(self, *arguments)
        held.append(sum(content.nbytes for content in found.values()))
        return found

    monkeypatch.setattr(differing._Comparing, "_contents", watched)
    check_leaf(by_path(diff(root))["w"], old, new)
    assert max(held) <= 4 * 1024
    assert len(held) > 8


def test_equal_digests_are_not_read(root):
    """Of a large leaf of which one chunk changed, the records of that chunk."""
    rng = np.random.default_rng(0)
    old = rng.standard_normal(100_000)
    new = old.copy()
    new[70_000] += 1
    save_all(root, [{"w": old}, {"w": new}, {"w": new}], chunk_bytes=8000)
    found = diff(root)
    assert (found.chunks, found.chunks_read) == (100, 1)
    # The full record once, though both lists begin with it, and the delta.
    assert 6000 < found.read_bytes < 10_000
    check_leaf(by_path(found)["w"], old, new)
    same = diff(root, 1, 2)
    assert (same.chunks_read, same.read_bytes) == (0, 0)


def test_kept_bases_and_self_contained_ones(root, tmp_path):
    """A base that the store keeps is a step like others; so is a checkpoint."""
    made = roots.make(root)
    (base,) = (made / STORE / "bases").iterdir()
    found = diff(made, f"{STORE}/bases/{base.name}", 5)
    assert by_path(found)["step"].changed == 1
    trees = [{"w": np.arange(900.0)}, {"w": np.arange(900.0) + 1}]
    for name, tree in zip(("a", "b"), trees, strict=True):
        with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
            save = orbax_delta.DeltaSave(tree)
            checkpointer.save(tmp_path / "own" / name, args=save)
    found = diff(tmp_path / "own", "a", "b")
    assert (by_path(found)["w"].changed, by_path(found)["w"].largest) == (900, 1.0)


def test_items_that_one_step_alone_has(tmp_path):
    """All of their leaves were added or removed."""
    root = tmp_path / "run"
    registry = orbax_delta.handler_registry(item=("a", "b", "c"))
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step, names in enumerate((("a", "b"), ("b", "c"))):
            trees = {n: orbax_delta.DeltaSave({"w": np.arange(9.0)}) for n in names}
            manager.save(step, args=ocp.args.Composite(**trees))
            manager.wait_until_finished()
    found = differing.between(str(root), "0", "1")
    assert {item.item: item.leaves[0].status for item in found} == {
        **{"a": "removed", "b": "same", "c": "added"},
    }


# --- what goes wrong ------------------------------------------------------------------


def test_a_damaged_record(root):
    """Its leaf says so; the others are compared."""
    rng = np.random.default_rng(0)
    trees = [{"a": rng.random(900), "b": rng.random(900)} for _ in range(2)]
    save_all(root, trees, chunk_bytes=1024)
    step = strategies.read_step(root, 1)
    row = next(row for row in step.rows if row.leaf == 0)
    path = root / STORE / "packs" / row.refs[-1].pack
    data = bytearray(path.read_bytes())
    data[row.refs[-1].offset + row.refs[-1].length // 2] ^= 1
    path.write_bytes(data)
    found = diff(root)
    (leaf,) = found.damaged
    assert leaf.path == "a"
    assert leaf.status == "changed"
    assert "leaf a, chunk [0:" in leaf.error
    check_leaf(by_path(found)["b"], trees[0]["b"], trees[1]["b"])


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("MANIFEST", orbax_delta.FormatError, r"3/default/MANIFEST does not begin"),
        ("part-*", orbax_delta.CorruptionError, r"the part .*3/default/part-.* holds"),
    ],
)
def test_a_damaged_step(root, name, error, match):
    """A MANIFEST or part that cannot be read is an error that names it."""
    made = roots.make(root)
    (path,) = (made / "3/default").glob(name)
    path.write_bytes(b"garbled")
    with pytest.raises(error, match=match):
        diff(made, 2, 3)
    assert diff(made, 4, 5).leaves


@pytest.mark.parametrize("moment", ["part-*", "packs/*"])
def test_a_step_that_goes_away(root, moment):
    """A live run deletes and prunes what is compared: said so, not taken for damage."""
    rng = np.random.default_rng(0)
    save_all(root, [{"w": rng.random(900)} for _ in range(3)], keep_bases=0)
    store = DeltaStore.open(Folder(str(root)))

    def go(_):
        if (root / "0").exists():
            shutil.rmtree(root / "0")
            prune.execute(store, prune.plan(store))

    late = testing.Match(kind=("read", "range"), url=f"*/{moment}")
    with (
        testing.faults(testing.delay(go, late)),
        pytest.raises(errors.NotFoundError, match="step 0 went away while it was comp"),
    ):
        diff(root, 0, 2)


def test_an_unknown_step(root):
    """Named, with those that there are."""
    save_all(root, [{"w": np.arange(9.0)}] * 2)
    with pytest.raises(errors.NotFoundError, match=r"no step '7' .*there are 0, 1"):
        diff(root, 0, 7)
