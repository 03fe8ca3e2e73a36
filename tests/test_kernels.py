"""Compiled passes give what numpy's give, bit for bit; coding is the same with both."""

import os
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from orbax_delta import codecs, differences, dtypes, kernels, planes, sparse
from orbax_delta.codecs import Form

WORDS = (1, 2, 4, 8)


def as_bytes(seed, count, word_bytes, *, calm):
    """Noise, or words near each other, as trained floats are."""
    rng = np.random.default_rng(seed)
    if not calm:
        return rng.integers(0, 256, count * word_bytes, np.uint8)
    word = np.dtype(f"<u{word_bytes}")
    return rng.integers(0, 100, count).astype(word).view(np.uint8)


@pytest.fixture(params=["numba", "large", "numpy"])
def compiled(request, monkeypatch):
    """With and without compiled passes, for contents of any size.

    Of large ones some are not compiled, as they would keep the interpreter's lock.
    """
    monkeypatch.setattr(kernels, "AVAILABLE", request.param != "numpy")
    monkeypatch.setattr(kernels, "_LEAST_BYTES", 0)
    if request.param == "large":
        monkeypatch.setattr(kernels, "_MOST_BYTES", 0)
    return request.param != "numpy"


def test_they_are_here():
    """Or these tests compare numpy with itself."""
    assert kernels.AVAILABLE


@pytest.mark.parametrize("word_bytes", WORDS)
@hypothesis.given(
    st.integers(0, 99), st.integers(0, 99), st.integers(1, 3000), st.booleans()
)
def test_the_same_as_numpy(word_bytes, one, other, count, calm):
    """Differences, planes and back."""
    old = as_bytes(one, count, word_bytes, calm=calm)
    new = as_bytes(other, count, word_bytes, calm=calm)
    change = np.empty_like(new)
    differences.subtract(new, old, word_bytes, change)
    compiled = kernels.of(word_bytes)
    made = np.empty((word_bytes, count), np.uint8)
    new_words, old_words = (
        differences.as_words(part, word_bytes) for part in (new, old)
    )
    compiled.subtract(new_words, old_words, made)
    assert (made.T.reshape(-1) == change).all()
    back = np.empty_like(new_words)
    compiled.add(tuple(made), old_words, back)
    assert (back == new_words).all()
    compiled.add(tuple(made), old_words, old_words)  # upon what it applies to
    assert (old_words == new_words).all()
    compiled.split(new_words, made)
    assert (made == new.reshape(-1, word_bytes).T).all()
    compiled.join(tuple(made), back)
    assert (back == new_words).all()


@pytest.mark.parametrize("word_bytes", WORDS)
@hypothesis.given(
    st.integers(0, 99),
    st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 4096, 9001])),
    st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
    st.sampled_from([0.0, 0.125, 1.0]),
)
def test_the_same_changes_are_found(word_bytes, seed, count, changed, most):
    """How many, where and which, however many are asked for."""
    rng = np.random.default_rng(seed)
    word = np.dtype(f"<u{word_bytes}")
    old = as_bytes(seed, count, word_bytes, calm=False)
    new = old.copy()
    places = np.flatnonzero(rng.random(count) < changed)
    new.view(word)[places] += rng.integers(1, 100, places.size).astype(word)
    found = {}
    pair = sparse.Pair(new, old, word_bytes, most=int(most * count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_LEAST_BYTES", 0)
        for available in (True, False):
            patch.setattr(kernels, "AVAILABLE", available)
            (found[available],) = sparse.find([pair])
    compiled, plain = found[True], found[False]
    assert compiled.count == plain.count == places.size
    assert (compiled.blocks == plain.blocks).all()
    for got, wanted in (
        (compiled.positions, plain.positions),
        (compiled.values, plain.values),
    ):
        assert (got is None) == (wanted is None) == (places.size > int(most * count))
        assert wanted is None or (got == wanted).all()
    if plain.positions is not None:
        assert (plain.positions == places).all()


@hypothesis.given(
    st.integers(0, 99),
    st.integers(1, 3000),
    st.booleans(),
    st.sampled_from([0, 0x7F800000, 0xFF800000, 0x80000001, 0x7F7FFFFF, 0x7F800001]),
)
def test_the_same_cast(seed, count, calm, awkward):
    """To bf16: ties, subnormals and infinities; a NaN has none."""
    source = as_bytes(seed, count, 4, calm=calm)
    words = source.view(np.uint32)
    words[:: 1 + seed] = awkward
    words[1 :: 2 + seed] &= 0xFFFF8000  # between two values of the narrower type
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_LEAST_BYTES", 0)
        for available in (True, False):
            patch.setattr(kernels, "AVAILABLE", available)
            found[available] = dtypes.derive(dtypes.Rule.F32_TO_BF16, source)
    compiled, plain = found[True], found[False]
    assert (compiled is None) == (plain is None)
    assert plain is None or (compiled == plain).all()


@pytest.mark.parametrize("calm", [True, False])
@pytest.mark.parametrize("count", [1, 5, 1024, 40_000])
@pytest.mark.parametrize("word_bytes", WORDS)
def test_payloads_are_the_same(monkeypatch, word_bytes, count, calm):
    """Whoever writes, whoever reads: the format does not tell."""
    monkeypatch.setattr(kernels, "_LEAST_BYTES", 0)
    old = as_bytes(1, count, word_bytes, calm=calm)
    new = as_bytes(2, count, word_bytes, calm=calm)
    found = {}
    for available in (True, False):
        monkeypatch.setattr(kernels, "AVAILABLE", available)
        found[available] = (
            codecs.encode_full(new, word_bytes),
            planes.encode_change(new, old, word_bytes),
        )
    assert found[True] == found[False]
    for available in (True, False):
        monkeypatch.setattr(kernels, "AVAILABLE", available)
        full, change = found[not available]
        for out in (None, np.empty_like(new)):
            got = codecs.decode(Form.PLANES, full, None, new.size, word_bytes, out)
            assert (got == new).all()
            got = codecs.decode(Form.DIFFERENCE, change, old, new.size, word_bytes, out)
            assert (got == new).all()
        upon = old.copy()
        got = codecs.decode(Form.DIFFERENCE, change, upon, new.size, word_bytes, upon)
        assert got is upon
        assert (upon == new).all()


@pytest.mark.usefixtures("compiled")
def test_damaged_planes_are_an_error():
    """A cut payload, or one with more than planes, with and without."""
    old, new = (as_bytes(seed, 5000, 4, calm=False) for seed in (1, 2))
    payload = bytes(planes.encode_change(new, old, 4))
    for wrong, message in (
        (payload[:-1], "cut off"),
        (payload[:3], "before the header"),
        (payload + b"x", "1 bytes follow the last plane"),
    ):
        with pytest.raises(codecs.CorruptionError, match=message):
            codecs.decode(Form.DIFFERENCE, wrong, old, new.size, 4)


def test_small_contents_do_not_wait_for_a_compiler():
    """An import and a compilation would take longer than all of their coding."""
    assert not kernels.pay(kernels._LEAST_BYTES - 1)
    assert kernels.pay(kernels._LEAST_BYTES)


_EVERY_PASS = """
import numpy as np
from orbax_delta import codecs, kernels, sparse
old = np.random.default_rng(0).integers(0, 256, kernels._LEAST_BYTES, np.uint8)
new = old.copy()
new[::999] += 1
(found,) = sparse.find([sparse.Pair(new, old, 4, most=new.size)])
delta = codecs.encode_delta(new, old, 4, found)
codecs.decode(delta.form, delta.payload, old, old.size, 4)
codecs.carry_over(new, old, delta, 4)
names = ("find", "pack", "change", "carry")
stats = [getattr(kernels.of(4), name).stats for name in names]
print(sum(sum(stat.cache_hits.values()) for stat in stats))
print(sum(sum(stat.cache_misses.values()) for stat in stats))
"""


def test_compiled_once_on_a_machine(tmp_path):
    """The second process finds what the first one has compiled."""
    counts = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", _EVERY_PASS],
            env={
                **os.environ,
                "NUMBA_CACHE_DIR": str(tmp_path),
                "JAX_PLATFORMS": "cpu",
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        counts.append(tuple(map(int, ran.stdout.split())))
    assert counts == [(0, 4), (4, 0)]


def test_no_folder_for_compiled_code(monkeypatch):
    """It is then compiled in every process."""
    import numba

    real = numba.njit

    def refusing(*, nogil, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(nogil=nogil)

    monkeypatch.setattr(numba, "njit", refusing)
    compiled = kernels.of.__wrapped__(2)
    words = np.arange(300, dtype=np.uint16)
    made = np.empty((2, 300), np.uint8)
    compiled.split(words, made)
    assert (made[0] == words % 256).all()
