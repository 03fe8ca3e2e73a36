"""Option `base`: what stays in memory between saves, and what is read back instead."""

import numpy as np
import pytest
import strategies
from strategies import assert_same_tree, open_run

import orbax_delta
from orbax_delta import holding, memory
from orbax_delta.base import Entry
from orbax_delta.holding import Outlook
from orbax_delta.options import DeltaOptions
from orbax_delta.store import Folder

AUTO, KEEP, STORE = (DeltaOptions(base=base) for base in ("auto", "keep", "store"))
NO_RENEWAL = {"chunk_bytes": 4096, "refresh_every": 10_000, "keep_bases": 0}


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def entry(*, content=True, idle=0, grace=0, skip=0):
    """An entry; its row is looked at by nobody."""
    held = np.zeros(8, np.uint8) if content else None
    return Entry(row=None, content=held, idle=idle, grace=grace, skip=skip)


@pytest.mark.parametrize(
    ("options", "stored", "recalled", "unpaid", "expected"),
    [
        (KEEP, None, False, False, Outlook(hold=True)),
        (KEEP, entry(skip=3), True, True, Outlook(hold=True)),
        (STORE, None, False, False, Outlook(hold=False)),
        (STORE, entry(), False, True, Outlook(hold=False, skip=10)),
        (AUTO, None, False, False, Outlook(hold=True)),
        (AUTO, entry(), False, False, Outlook(hold=True)),
        (AUTO, entry(content=False), True, False, Outlook(hold=True, grace=10)),
        (AUTO, entry(grace=10), False, False, Outlook(hold=True, grace=10)),
        (AUTO, entry(), False, True, Outlook(hold=False, skip=10)),
        (AUTO, entry(skip=2), False, False, Outlook(hold=False, skip=1)),
        # The next save tries a delta again.
        (AUTO, entry(skip=1), False, False, Outlook(hold=True)),
        (DeltaOptions(full_every=0), None, False, False, Outlook(hold=False)),
        (DeltaOptions(max_chain=1), None, False, False, Outlook(hold=False)),
    ],
)
def test_what_becomes_of_what_is_written(options, stored, recalled, unpaid, expected):
    """A copy is worth its memory while deltas against it are small."""
    found = holding.written(stored, options, recalled=recalled, unpaid=unpaid)
    assert found == expected


@pytest.mark.parametrize(
    ("options", "stored", "held"),
    [
        (KEEP, entry(idle=50), True),
        (STORE, entry(), False),
        (AUTO, entry(), False),
        (AUTO, entry(grace=10, idle=9), True),
        (AUTO, entry(grace=10, idle=10), False),
        (KEEP, entry(content=False), False),
    ],
)
def test_what_becomes_of_what_is_unchanged(options, stored, held):
    """In `auto` it goes at once, unless it had to be read back before."""
    after = holding.unchanged(stored, None, options)
    assert (after.content is not None) == held
    assert (after.idle, after.grace) == (stored.idle + 1, stored.grace)


def test_counts_do_not_grow_without_end():
    """A chunk may be unchanged for as long as it likes."""
    assert holding.unchanged(entry(idle=1000), None, AUTO).idle == 1000


def states(count):
    """A leaf that changes at each step, one at each fifth, and one that does not."""
    rng = np.random.default_rng(0)
    state = {
        "always": rng.standard_normal(4000).astype(np.float32),
        "frozen": rng.standard_normal(9000).astype(np.float32),
        "seldom": rng.standard_normal(5000).astype(np.float32),
    }
    for step in range(count):
        state["always"][step::1000] += 1  # an element of each chunk
        if step % 5 == 3:
            state["seldom"][step] += 1
        yield {name: leaf.copy() for name, leaf in state.items()}


def reports_of(root, count, **options):
    """Save states one by one; each restores, the reports are returned."""
    reports = []
    saved = list(states(count))
    with open_run(root, **NO_RENEWAL, **options) as run:
        for step, state in enumerate(saved):
            run.save(step, state)
            reports.append(run.handler.last_save_report)
        for step, state in enumerate(saved):
            assert_same_tree(run.restore(step), state)
    return reports


def test_auto_holds_what_changes(root):
    """Frozen leaves go with the second save; what comes back stays for a while."""
    held = [report.held_bytes for report in reports_of(root, 30)]
    always, everything = 4 * 4000, 4 * (4000 + 5000 + 9000)
    assert held[0] == everything
    # Of `seldom` one chunk changes with the fourth save, which reads it back.
    (chunk,) = {held[3] - always}
    assert held[1:3] == [always, always]
    assert 0 < chunk <= 4096
    # From then on it is held: ten saves without a change are not in sight.
    assert set(held[4:]) <= {always + chunk}


def test_auto_reads_back_once(root):
    """Not at each change of a chunk that changes now and then."""
    reports = reports_of(root, 30)
    assert [i for i, report in enumerate(reports) if report.read_bytes > 2000] == [3]


def test_keep_holds_all_and_reads_nothing_large(root):
    """As much memory as the state; only small records are read, to be replaced."""
    reports = reports_of(root, 30, base="keep")
    assert {report.held_bytes for report in reports} == {4 * (4000 + 5000 + 9000)}
    assert max(report.read_bytes for report in reports) < 2000


def test_store_holds_nothing(root):
    """Each save reads what it compares with."""
    reports = reports_of(root, 12, base="store")
    assert {report.held_bytes for report in reports} == {0}
    assert reports[0].read_bytes == 0
    assert min(report.read_bytes for report in reports[1:]) > 10_000


def test_what_is_read_back_is_read_together(root, monkeypatch):
    """Few requests for many chunks, begun before the first is decoded."""
    with open_run(root, base="store", **NO_RENEWAL) as run:
        first, second = states(2)
        second["always"] += np.float32(1e-6)
        run.save(0, first)
        reads = []
        start_read = Folder.start_read

        def counted(self, key, offset, length):
            reads.append(key)
            return start_read(self, key, offset, length)

        monkeypatch.setattr(Folder, "start_read", counted)
        run.save(1, second)
        assert len(reads) == 1
        assert run.handler.last_save_report.read_bytes > 4 * 4000 // 2


def test_the_modes_write_the_same(root):
    """What is held decides what is read, never what is stored."""
    bytes_by_form = [
        [r.bytes_by_form for r in reports_of(root / base, 14, base=base)]
        for base in ("auto", "keep", "store")
    ]
    assert bytes_by_form[0] == bytes_by_form[1] == bytes_by_form[2]


def noise(step):
    """A state that has nothing to do with the one before."""
    return {"noise": np.random.default_rng(step).integers(0, 256, 20_000, np.uint8)}


@pytest.mark.parametrize("base", ["auto", "store"])
def test_deltas_that_do_not_pay_are_not_tried_again_at_once(root, base):
    """A whole cycle goes by without a copy and without reading."""
    held, read = [], []
    with open_run(root, base=base, full_every=3, **NO_RENEWAL) as run:
        for step in range(10):
            run.save(step, noise(step))
            held.append(run.handler.last_save_report.held_bytes)
            read.append(run.handler.last_save_report.read_bytes)
        for step in range(10):
            assert_same_tree(run.restore(step), noise(step))
    # Tried by the second save, then by the one after three full ones.
    if base == "store":
        assert set(held) == {0}
        assert [i for i, count in enumerate(read) if count] == [1, 5, 9]
    else:
        assert [i for i, count in enumerate(held) if count] == [0, 4, 8]
        assert set(read) == {0}


def test_nothing_is_read_for_what_will_be_full_anyway(root):
    """The first save after a restart, of chunks that need no earlier content."""
    with open_run(root, full_every=0) as run:
        run.save(0, noise(0))
    with open_run(root, full_every=0) as run:
        run.restore(0)
        run.save(1, noise(1))
        assert run.handler.last_save_report.read_bytes == 0
        assert run.handler.last_save_report.chunks_by_form == {"planes": 1}
        assert_same_tree(run.restore(1), noise(1))


def test_renewed_chunks_are_not_held(root):
    """They have not changed; only `keep` has copies of them."""
    for base, wanted in (("auto", 0), ("keep", 20_000), ("store", 0)):
        with open_run(root / base, base=base, refresh_every=1) as run:
            run.save(0, noise(0))
            run.save(1, noise(0))
            assert run.handler.last_save_report.chunks_by_form == {"planes": 1}
            assert run.handler.last_save_report.held_bytes == wanted


def test_saves_without_a_manager_hold_nothing(tmp_path):
    """Nothing can build on them, so no copies are made."""
    handler = orbax_delta.DeltaCheckpointHandler()
    with strategies.ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "alone", args=orbax_delta.DeltaSave(noise(0)))
    assert handler.last_save_report.held_bytes == 0


def test_memory_that_was_freed_is_given_back(root, monkeypatch):
    """When a save codes much, or drops many copies; not when it does little."""
    calls = []
    monkeypatch.setattr(memory, "give_back", lambda: calls.append(len(held)))
    monkeypatch.setattr(memory, "WORTH_BYTES", 30_000)
    held = []
    with open_run(root, **NO_RENEWAL) as run:
        for step, state in enumerate(states(4)):
            run.save(step, state)
            held.append(run.handler.last_save_report.held_bytes)
    assert held[0] - held[1] >= 30_000
    assert calls == [0, 1]


def test_giving_memory_back_where_it_cannot_be(monkeypatch):
    """On another C library nothing happens."""
    memory.give_back()
    for wrong in (object(), None):
        memory._trim.cache_clear()
        monkeypatch.setattr(memory.ctypes, "CDLL", lambda _, wrong=wrong: wrong)
        memory.give_back()
    memory._trim.cache_clear()
