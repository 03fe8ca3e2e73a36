"""Small changes opened beforehand: the same content, bounded, and errors by name."""

import contextlib
import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from strategies import assert_same_tree, open_run

from orbax_delta import codecs, opened, records, sparse
from orbax_delta.codecs import Form
from orbax_delta.errors import CorruptionError, DeltaError, OutOfMemoryError
from orbax_delta.parts import Ref

WORDS = 1 << 16


def change(seed):
    """A record of form SPARSE, and the contents before and after it."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, 4 * WORDS, np.uint8)
    content = base.copy()
    content.view(np.uint32)[rng.integers(0, WORDS, 30)] += 1
    pair = sparse.Pair(content, base, 4, most=WORDS)
    record = records.Record(
        form=Form.SPARSE,
        word_bytes=4,
        content_bytes=content.size,
        content_digest=records.digest(content),
        payload=sparse.encode(sparse.find([pair]))[0],
    )
    return record.encode(), base, content


class Stored:
    """Records that lie nowhere, as `ranges.Records` gives them."""

    def __init__(self, several):
        self.data = dict(enumerate(several))
        self.asked = []

    def get(self, ref):
        self.asked.append(ref.offset)
        return memoryview(self.data[ref.offset])

    def refs(self):
        return [
            Ref(form=Form.SPARSE, pack="p", offset=offset, length=len(data))
            for offset, data in self.data.items()
        ]


@pytest.mark.parametrize("wrong", [None, 0, 5, 8])
@pytest.mark.parametrize("most", [0, 4, 100])
def test_each_record_is_what_it_is_alone(monkeypatch, wrong, most):
    """One that is damaged is told when it is asked for, and spoils no other."""
    monkeypatch.setattr(opened, "_MOST", most)
    made = [change(seed) for seed in range(9)]
    stored = Stored([record for record, _, _ in made])
    if wrong is not None:
        stored.data[wrong] = stored.data[wrong][:-1] + b"?"
    found = opened.Opened(stored, [*stored.refs(), *stored.refs()])
    assert len(stored.asked) == min(most, 9) or wrong is not None  # once
    for number, (ref, (_, base, content)) in enumerate(
        zip(stored.refs(), made, strict=True)
    ):
        if number == wrong:
            with pytest.raises(CorruptionError, match="checksum"):
                found.get(ref)
            continue
        record, unpacked = found.get(ref)
        assert most < 9 or unpacked is not None
        decoded = codecs.decode(
            Form.SPARSE, record.payload, base, base.size, 4, unpacked=unpacked
        )
        assert (decoded == content).all()


def test_nothing_is_kept_alive_by_what_is_wrong():
    """Not even until the next collection of cycles: it holds a batch of reads."""
    stored = Stored([b"no record", change(1)[0]])
    gc.disable()
    try:
        found = opened.Opened(stored, stored.refs())
        with contextlib.suppress(DeltaError):
            found.get(stored.refs()[0])
        watched = weakref.ref(found)
        del found
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("place", [(records, "parse_record"), (codecs, "unpack_small")])
def test_no_room_is_told_by_who_needs_it(tmp_path, monkeypatch, place):
    """An error that names the leaf, or the longer way, where that has room."""
    states = [{"w": jnp.zeros(WORDS).at[:: 100 + step].add(1)} for step in range(3)]

    def refusing(*_):
        raise MemoryError

    with open_run(tmp_path) as run:
        for step, state in enumerate(states):
            run.save(step, state)
        expected = contextlib.nullcontext()
        if place[0] is records:
            named = r"leaf w, chunk .*there is no room"
            expected = pytest.raises(OutOfMemoryError, match=named)
        with monkeypatch.context() as patch:
            patch.setattr(*place, refusing)
            with expected:
                assert_same_tree(run.restore(2, states[2]), states[2])
        assert_same_tree(run.restore(2, states[2]), states[2])
