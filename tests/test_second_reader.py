"""FORMAT.md says enough: a reader written from it alone reads what was saved."""

import json
import shutil
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import roots
import second_decoder
import second_reader
import strategies
import xxhash
import zstandard
from hypothesis import given, settings
from strategies import open_run

import orbax_delta
from orbax_delta import jsontext

EVERY_DTYPE = (
    *strategies.NUMPY_DTYPES,
    *("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", ">f2", ">f8", ">c16", ">M8[s]"),
    *("datetime64[25s]", ">u2", ">i8"),
)
"""All that 3.1 names; the one-bit types where ml_dtypes has them."""


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def path_text(path):
    """A leaf's path as section 8.6 spells it."""
    return tuple(
        str(
            getattr(key, "key", None)
            if isinstance(key, jtu.DictKey | jtu.FlattenedIndexKey)
            else getattr(key, "idx", getattr(key, "name", None))
        )
        for key in path
    )


def plain(leaf):
    """A leaf in the second reader's terms: bytes, not arrays."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        impl = str(jax.random.key_impl(leaf))
        return ("key", "uint32", data.shape, data.tobytes(), impl)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        kind = strategies.leaf_kind(leaf).replace(" ", "_")
        dtype = strategies.dtype_name(leaf)
        if leaf.dtype.kind in "mM":
            dtype = leaf.dtype.str
        return (kind, dtype, leaf.shape, strategies.bits(leaf), None)
    return (type(leaf).__name__, strategies.bits(leaf))


def plain_read(value):
    """A value of the second reader in the same terms."""
    if isinstance(value, second_reader.Array):
        data = value.data
        return (value.kind, value.dtype, value.shape, data, value.key_type)
    return (type(value).__name__, strategies.bits(value))


def assert_reads(folder, tree):
    """The second reader finds exactly the leaves of `tree`, bit for bit."""
    found = second_reader.read_step(folder)
    leaves, _ = jtu.tree_flatten_with_path(tree)
    expected = {path_text(path): plain(leaf) for path, leaf in leaves}
    assert len(expected) == len(leaves)
    assert list(found) == list(expected)
    for path, value in found.items():
        assert plain_read(value) == expected[path], path


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A root with every kind of chunk."""
    return roots.make(tmp_path_factory.mktemp("healthy") / "run")


@pytest.mark.parametrize("step", roots.STEPS)
def test_a_healthy_root(healthy, step):
    """Full, sparse, constant, derived, copied, sharded and empty leaves."""
    assert_reads(healthy / str(step) / "default", roots.state(step))


@given(
    tree=strategies.trees(),
    changes=st.lists(strategies.edits(), min_size=1, max_size=5),
    options=strategies.option_values(),
)
def test_any_states(tmp_path_factory, tree, changes, options):
    """Several saves of any tree under any options: every one reads."""
    root = tmp_path_factory.mktemp("any") / "run"
    saved = {}
    with open_run(root, **options) as run:
        for step, edits in enumerate(changes):
            saved[step] = tree = strategies.edited(tree, edits) or {"never empty": 1}
            run.save(step, tree)
    for step, tree in saved.items():
        assert_reads(root / str(step) / "default", tree)


def dtype_exists(name):
    """Whether this numpy or ml_dtypes knows a type."""
    try:
        np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("dtype", list(filter(dtype_exists, EVERY_DTYPE)))
def test_every_dtype(root, dtype):
    """Full, sparse, dense and constant chunks of every type, of odd sizes."""
    rng = np.random.default_rng(0)
    first = strategies.random_array(rng, dtype, (37, 41))
    tree = {"a": first, "scalar": first[0, :1].reshape(())[()], "empty": first[:0]}
    saved = {}
    with open_run(root, chunk_bytes=500, full_every=100, threads=1) as run:
        for step, change in enumerate(("none", "few", "block", "all", "constant")):
            changed = strategies.edited({"a": tree["a"]}, [(change, step)])
            tree = saved[step] = {**tree, **changed}
            run.save(step, tree)
    for step, tree in saved.items():
        assert_reads(root / str(step) / "default", tree)


def test_every_form_and_rule(root):
    """What these saves are stored as covers each form and rule of the document."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((200, 50)).astype(np.float32)
    forms, rules = set(), set()
    with open_run(root, chunk_bytes=20_000, full_every=100) as run:
        for step in range(6):
            if step == 1:
                values[150:180] += 1
            elif step == 2:
                values[3, 4:9] = -values[3, 4:9]
            elif step == 3:
                values = values * np.float32(1.0001)
            elif step == 4:
                values = np.zeros_like(values)
            elif step == 5:
                values[7, 7] = 5
            tree = {
                "w": values.copy(),
                "bf16": values.astype(ml_dtypes.bfloat16),
                "f16": values.astype(np.float16),
            }
            run.save(step, tree)
            assert_reads(root / str(step) / "default", tree)
            rows = strategies.read_step(root, step).rows
            forms |= {int(ref.form) for row in rows for ref in row.refs}
            rules |= {int(row.rule) for row in rows}
    assert forms == {1, 2, 3, 4, 5}
    assert rules == {0, 1, 2}


def test_casts_of_every_magnitude(root):
    """The casts of 3.4 over all exponents, ties and subnormals."""
    words = np.arange(0, 1 << 32, 37_991, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(0x8000)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    words = np.concatenate([words, ties, ties ^ 0x8000, halves.view(np.uint32)])
    values = np.concatenate([words, words - 1, words + 1]).view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(all="ignore"):
        tree = {
            "w": values,
            "bf16": values.astype(ml_dtypes.bfloat16),
            "f16": values.astype(np.float16),
        }
    with open_run(root) as run:
        run.save(0, tree)
    assert {int(row.rule) for row in strategies.read_step(root, 0).rows} == {0, 1, 2}
    assert_reads(root / "0/default", tree)


@given(tree=strategies.trees())
@settings(max_examples=max(5, settings().max_examples // 4))
def test_self_contained_steps(tmp_path_factory, tree):
    """Steps of a plain Checkpointer, whose packs lie beside the MANIFEST."""
    path = tmp_path_factory.mktemp("alone") / "final"
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=orbax_delta.DeltaSave(tree or {"a": 1}))
    assert_reads(path, tree or {"a": 1})


def test_registered_nodes_and_odd_keys(root):
    """Named tuples, keys of every kind and texts with lone surrogates."""
    tree = {
        "node": jax.tree_util.Partial(print, np.arange(3), x=4),
        "ints": {-3: 1.5, 20: float("nan"), 0: -0.0},
        "bools": {True: "\ud800 text", False: b"\x00"},
        "floats": {0.5: 1},
        "bytes": {b"\xff": complex("nan-0j")},
        "tuples": {(1, "a"): -(2**100)},
        "a/b~c": None,
        "": [],
    }
    with open_run(root) as run:
        run.save(0, tree)
    assert_reads(root / "0/default", tree)


# --- damage -------------------------------------------------------------------------


def damaged_copies(data, rng, count):
    """Copies of a file with a byte changed, an end cut off or bytes added."""
    for _ in range(count):
        where = int(rng.integers(len(data)))
        flipped = bytearray(data)
        flipped[where] ^= 1 << int(rng.integers(8))
        yield bytes(flipped)
    yield data[: len(data) // 2]
    yield data + b"\0"
    yield b""


def test_damage_is_never_a_wrong_value(healthy, record_property):
    """Any damaged file: an error, or the right bits where it did not matter."""
    step = roots.STEPS[-1]
    folder = healthy / str(step) / "default"
    expected = list(map(plain_read, second_reader.read_step(folder).values()))
    rng = np.random.default_rng(5)
    tried = refused = 0
    store = healthy / strategies.STORE
    manifest = strategies.read_manifest(folder / "MANIFEST")
    files = [store / "packs" / name for name in manifest.packs]
    files += [folder / "MANIFEST", folder / manifest.parts[0].name]
    for path in [*files, store / "STORE.json"]:
        data = path.read_bytes()
        for damaged in damaged_copies(data, rng, 12):
            path.write_bytes(damaged)
            tried += 1
            try:
                found = second_reader.read_step(folder)
            except second_reader.DamagedError:
                refused += 1
            else:
                assert list(map(plain_read, found.values())) == expected, path
        path.write_bytes(data)
    record_property("damage_cases", tried)
    assert tried > refused > tried // 2


def put_manifest(folder, document):
    """Write a MANIFEST with any document in it, its digest right."""
    body = json.dumps(document).encode()
    frame = zstandard.compress(body)
    digest = xxhash.xxh3_128_hexdigest(frame)
    line = f"ORBAX-DELTA-MANIFEST 1 {digest} {len(body)}\n"
    (folder / "MANIFEST").write_bytes(line.encode() + frame)


@pytest.mark.parametrize("where", ["MANIFEST", "store", "part", "features"])
def test_newer_versions_are_refused_first(healthy, tmp_path, where):
    """A newer file is told from a damaged one."""
    root = tmp_path / "copy"
    shutil.copytree(healthy, root)
    folder = root / str(roots.STEPS[0]) / "default"
    path = folder / "MANIFEST"
    document = second_reader.read_manifest(path.read_bytes())
    if where == "MANIFEST":
        path.write_bytes(b"ORBAX-DELTA-MANIFEST 8 and whatever")
    elif where == "store":
        path = root / strategies.STORE / "STORE.json"
        newer = json.loads(path.read_bytes()) | {"format_version": 8, "uuid": 7}
        path.write_text(json.dumps(newer))
    elif where == "part":
        (entry,) = document["parts"]
        data = bytearray((folder / entry["name"]).read_bytes())
        data[8] = 8
        (folder / entry["name"]).write_bytes(data)
        entry["digest"] = xxhash.xxh3_128_hexdigest(data)
        put_manifest(folder, document)
    else:
        put_manifest(folder, {"required_features": ["version 8"], "new": 1})
    with pytest.raises(second_reader.UnknownVersionError, match="version 8"):
        second_reader.read_step(folder)


@pytest.mark.parametrize("module", [second_reader, second_decoder])
def test_it_imports_nothing_of_the_package(module):
    """The second reader stands alone."""
    imported = {
        line.split()[1].partition(".")[0]
        for line in Path(module.__file__).read_text().splitlines()
        if line.startswith(("import ", "from "))
    }
    assert imported <= {
        *("dataclasses", "json", "math", "re", "struct", "collections", "pathlib"),
        *("typing", "numpy", "xxhash", "zstandard", "second_decoder"),
        *("hmac", "cryptography"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'"\xff"', "utf-8"),
    ],
)
def test_both_readers_refuse_what_is_no_json(text, message):
    """Section 1.4, read alike."""
    refusals = (second_reader.DamagedError, ValueError)
    for parse in (second_reader.parse_json, jsontext.parse):
        with pytest.raises(refusals, match=message):
            parse(text)
