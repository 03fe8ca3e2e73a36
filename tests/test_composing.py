"""Small deltas become one: nothing changes but how many records a chunk is made of."""

import itertools
import logging

import hypothesis.strategies as st
import numpy as np
import pytest
import second_reader
import strategies
from hypothesis import given
from strategies import STORE, open_run, read_step

import orbax_delta
from orbax_delta import codecs, composing, records
from orbax_delta.codecs import Form
from orbax_delta.dtypes import Rule
from orbax_delta.errors import CorruptionError
from orbax_delta.options import DeltaOptions
from orbax_delta.parts import Ref, Row

SMALL = {"chunk_bytes": 4096, "full_every": 3, "max_chain": 6, "threads": 1}


@pytest.fixture(autouse=True, scope="module")
def _unsynced():
    with pytest.MonkeyPatch.context() as monkeypatch:
        strategies.skip_disk_sync(monkeypatch)
        yield


# --- which records are replaced -----------------------------------------------------


def row(*lengths, since, age=0, word=b""):
    """A row whose list has records of these lengths, the first of them full."""
    first = Ref(form=Form.CONSTANT, word=word) if word else None
    refs = [
        Ref(form=Form.SPARSE if i else Form.PLANES, pack="p", offset=i, length=length)
        for i, length in enumerate(lengths)
    ]
    refs = (first, *refs) if first else tuple(refs)
    return Row(
        leaf=0,
        box=((0, 1),),
        digest=bytes(16),
        rule=Rule.NONE,
        refs=refs,
        since=since,
        age=age,
    )


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (row(100, since=0), 0),
        (row(100, 1, 1, since=2), 0),
        (row(100, 1, 1, 1, since=3), 3),
        # A stagger makes the first cycle shorter, options may have changed since.
        (row(100, 1, since=3), 1),
        (row(100, since=9), 0),
        # What earlier cycles left stays.
        (row(100, 9, 1, 1, 1, since=3), 3),
        # The list is full: after the full record all become one.
        (row(100, 9, 9, 9, 1, 1, since=2), 5),
        (row(100, 9, 9, 1, 1, 1, since=3), 3),
        # Not small together.
        (row(100, 20, 20, 20, since=3), None),
        (row(100, 20, 20, 9, 1, 1, since=2), None),
        # Nobody knows how large a full record would be: at most the content.
        (row(10, 10, since=3, word=b"\0\0\0\0"), 2),
        (row(300, 300, since=3, word=b"\0\0\0\0"), None),
        # Old enough to be renewed.
        (row(100, 1, since=1, age=98), 0),
        (row(100, 1, since=1, age=99), None),
    ],
)
def test_which_records_the_next_one_replaces(stored, expected):
    """By the deltas since the last cycle, the length of the list and its bytes."""
    options = DeltaOptions(full_every=3, max_chain=6)
    assert composing.replaced(stored, 1000, options, hurried=False) == expected


@pytest.mark.parametrize("options", [{"full_every": 0}, {"max_chain": 1}])
def test_no_deltas_at_all(options):
    """Where options leave no room for one, the next record is full."""
    found = composing.replaced(
        row(100, since=0), 1000, DeltaOptions(**options), hurried=False
    )
    assert found is None


def test_a_hurried_save_puts_it_off():
    """Unless the list is full; it reads nothing that it need not."""
    options = DeltaOptions(full_every=3, max_chain=6)
    due = row(100, 1, 1, 1, since=3, age=200)
    assert composing.replaced(due, 1000, options, hurried=True) == 0
    full = row(100, 9, 9, 1, 1, 1, since=3)
    assert composing.replaced(full, 1000, options, hurried=True) == 5


# --- the content before them --------------------------------------------------------


@st.composite
def chains(draw):
    """Contents of one chunk, save after save, and the size of its words."""
    word_bytes = draw(st.sampled_from([1, 2, 4, 8]))
    words = draw(st.integers(1, 3000))
    rng = np.random.default_rng(draw(strategies.SEEDS))
    contents = [rng.integers(0, 256, words * word_bytes, np.uint8)]
    for share in draw(st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), max_size=6)):
        changed = contents[-1].copy()
        where = rng.random(words) < share
        fresh = rng.integers(0, 256, (int(where.sum()), word_bytes), np.uint8)
        changed.reshape(-1, word_bytes)[where] = fresh
        contents.append(changed)
    return contents, word_bytes


def coded(content, base, word_bytes):
    """A record of the change, as a reader finds it."""
    delta = codecs.encode_delta(content, base, word_bytes)
    record = records.Record(
        form=delta.form,
        word_bytes=word_bytes,
        content_bytes=content.size,
        content_digest=records.digest(content),
        payload=delta.payload,
    )
    return records.parse_record(memoryview(record.encode()))


@given(chain=chains())
def test_without_its_last_records_a_list_yields_what_it_did_before(chain):
    """Any contents, any forms, any number of records; and one delta stands for all."""
    contents, word_bytes = chain
    pairs = zip(contents[1:], contents[:-1])
    changes = [coded(new, old, word_bytes) for new, old in pairs]
    for count in range(len(changes) + 1):
        before = composing.earlier(
            contents[-1], changes[len(changes) - count :], word_bytes
        )
        assert np.array_equal(before, contents[-1 - count])
        whole = coded(contents[-1], before, word_bytes)
        decoded = codecs.decode(
            whole.form, whole.payload, before, before.size, word_bytes
        )
        assert np.array_equal(decoded, contents[-1])


def test_what_came_before_is_checked():
    """Against the header of the record before, or its constant."""
    content = np.arange(64, dtype=np.uint8)
    record = records.Record(
        form=Form.PLANES,
        word_bytes=4,
        content_bytes=64,
        content_digest=records.digest(content),
        payload=b"any",
    )
    head = memoryview(record.encode())[: records.RECORD_HEAD_BYTES]
    stored = row(100, 1, 1, since=2)
    composing.check_earlier(content, stored, 2, head)
    with pytest.raises(CorruptionError, match=r"last 2 records.*pack p, offset 0"):
        composing.check_earlier(content[::-1].copy(), stored, 2, head)
    with pytest.raises(CorruptionError, match=r"a record begins with b'ODR0', 31"):
        composing.check_earlier(content, stored, 2, head[:-1])
    with pytest.raises(CorruptionError, match=r"a record begins with b'\\x00DR0'"):
        composing.check_earlier(content, stored, 2, memoryview(b"\0" + bytes(head)[1:]))
    constant = row(1, since=1, word=b"\1\2\3\4")
    empty = memoryview(b"")
    filled = codecs.fill(b"\1\2\3\4", 64)
    composing.check_earlier(filled, constant, 1, empty)
    with pytest.raises(CorruptionError, match=r"last 1 records.*pack none"):
        composing.check_earlier(content, constant, 1, empty)


# --- through a manager --------------------------------------------------------------


def sparse_states(count):
    """A table of which each state differs from the one before in a few elements."""
    rng = np.random.default_rng(3)
    table = rng.standard_normal((64, 64)).astype(np.float32)
    for _ in range(count):
        rows, columns = rng.integers(0, 64, (2, 20))
        table[rows, columns] += np.float32(0.01)
        yield {"table": table.copy()}


@pytest.mark.parametrize("base", ["auto", "keep", "store"])
@pytest.mark.parametrize("restarts", [(), (7, 8, 20)])
def test_long_runs_of_small_changes_need_no_full_record(root, base, restarts):
    """Forty saves, one full record a chunk; every step is read by both readers."""
    saved = dict(enumerate(sparse_states(40)))
    forms = []
    bounds = [0, *restarts, 40]
    for first, stop in itertools.pairwise(bounds):
        with open_run(root, base=base, **SMALL) as run:
            if first:
                run.restore(first - 1)
            for step in range(first, stop):
                run.save(step, saved[step])
                forms.append(run.handler.last_save_report.bytes_by_form)
    assert [save.get("planes", 0) > 0 for save in forms] == [True] + [False] * 39
    longest = 0
    for step, tree in saved.items():
        longest = max(longest, *(len(r.refs) for r in read_step(root, step).rows))
        (leaf,) = second_reader.read_step(root / str(step) / "default").values()
        assert leaf.data == tree["table"].tobytes()
    assert longest == SMALL["max_chain"]
    with open_run(root) as run:
        for step, tree in saved.items():
            strategies.assert_same_tree(run.restore(step), tree)


def _damage(root, step, place):
    """Flip a bit in the record at `place` of the list of the first chunk."""
    ref = read_step(root, step).rows[0].refs[place]
    path = root / STORE / "packs" / ref.pack
    data = bytearray(path.read_bytes())
    # The digest that a header announces, and so the checksum of the record too.
    data[ref.offset + 20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("place", "words"),
    [(-1, "checksum of a record's stored bytes"), (0, "without its last")],
)
def test_damage_among_what_is_replaced_costs_a_full_record(root, caplog, place, words):
    """The data saved are right, and the log says what was wrong."""
    options = SMALL | {"chunk_bytes": 1 << 20, "keep_bases": 0}
    saved = dict(enumerate(sparse_states(12)))
    with open_run(root, **options) as run:
        for step in range(12):
            if step:
                (last,) = read_step(root, step - 1).rows
                if last.since == SMALL["full_every"]:
                    break
            run.save(step, saved[step])
        _damage(root, step - 1, place)
        with caplog.at_level(logging.WARNING, "orbax_delta"):
            run.save(step, saved[step])
        assert words in caplog.text
        assert "leaf table, chunk" in caplog.text
        assert "writing the chunk in full" in caplog.text
        assert run.handler.last_save_report.chunks_by_form == {"planes": 1}
        strategies.assert_same_tree(run.restore(step), saved[step])


def test_another_record_in_the_place_of_one(root, caplog):
    """A whole record that is not the row's one is told, not subtracted."""
    options = SMALL | {"chunk_bytes": 1 << 20, "keep_bases": 0}
    saved = dict(enumerate(sparse_states(12)))
    with open_run(root, **options) as run:
        for step in range(12):
            if step and read_step(root, step - 1).rows[0].since == 3:
                break
            run.save(step, saved[step])
        ref = read_step(root, step - 1).rows[0].refs[-1]
        path = root / STORE / "packs" / ref.pack
        data = bytearray(path.read_bytes())
        record = records.parse_record(
            memoryview(data)[ref.offset : ref.offset + ref.length]
        )
        other = records.Record(
            form=Form.BLOCKS,
            word_bytes=record.word_bytes,
            content_bytes=record.content_bytes,
            content_digest=record.content_digest,
            payload=bytes(record.payload),
        ).encode()
        data[ref.offset : ref.offset + ref.length] = other
        path.write_bytes(data)
        with caplog.at_level(logging.WARNING, "orbax_delta"):
            run.save(step, saved[step])
        assert "is (form, content bytes, word bytes)" in caplog.text
        strategies.assert_same_tree(run.restore(step), saved[step])


def test_options_are_named():
    """A misspelt mode is told apart from the right ones."""
    for wrong in ("none", None, [], True):
        with pytest.raises(
            orbax_delta.InvalidInputError,
            match=r"DeltaOptions\.base is .*; expected one of .auto., .keep., .store.",
        ):
            DeltaOptions(base=wrong)
