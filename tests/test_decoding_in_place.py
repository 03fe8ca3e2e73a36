"""Decoding into memory that is given, or on top of the base: the same content."""

import hypothesis.strategies as st
import numpy as np
import strategies
from hypothesis import given

from orbax_delta import codecs
from orbax_delta.codecs import Form


@given(
    word_bytes=st.sampled_from([1, 2, 4, 8]),
    words=st.integers(1, 5000),
    changed=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    block=st.booleans(),
    small=st.booleans(),
    seed=strategies.SEEDS,
)
def test_any_form(word_bytes, words, changed, block, small, seed):
    """Fresh memory, given memory and the base itself, for what a save would write."""
    rng = np.random.default_rng(seed)
    size = words * word_bytes
    base = rng.integers(0, 4 if small else 256, size, np.uint8)
    content = base.copy()
    count = int(changed * words)
    where = np.arange(count) if block else rng.permutation(words)[:count]
    content.reshape(words, word_bytes)[where] += np.uint8(1)
    delta = codecs.encode_delta(content, base, word_bytes)
    records = [
        (delta.form, delta.payload, base, content),
        (Form.PLANES, codecs.encode_full(content, word_bytes), None, content),
        (Form.CONSTANT, b"\7" * word_bytes, None, np.full(size, 7, np.uint8)),
    ]
    for form, payload, old, wanted in records:
        arguments = (size, word_bytes)
        before = base.copy()
        assert np.array_equal(codecs.decode(form, payload, old, *arguments), wanted)
        given_memory = np.full(size, 0xA5, np.uint8)
        got = codecs.decode(form, payload, old, *arguments, given_memory)
        assert got is given_memory
        assert np.array_equal(got, wanted)
        assert np.array_equal(base, before)
        if old is not None:
            on_top = old.copy()
            got = codecs.decode(form, payload, on_top, *arguments, on_top)
            assert got is on_top
            assert np.array_equal(got, wanted)
