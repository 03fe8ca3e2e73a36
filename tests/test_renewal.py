"""Live chunks leave packs that are mostly dead: which, and what that does to a disk."""

import numpy as np
import pytest
import strategies
from strategies import assert_same_tree, open_run, read_step

from orbax_delta import renewal
from orbax_delta.base import Entry
from orbax_delta.changes import Chunk, Finding, Status
from orbax_delta.codecs import Form
from orbax_delta.dtypes import Rule
from orbax_delta.manifests import LeafEntry
from orbax_delta.parts import Ref, Row

SCALE = 10
"""Bytes of a unit in the tables below, so that a pack is worth something."""

LEAF = LeafEntry(path=("w",), kind="numpy", dtype="uint8", shape=(10_000,))


@pytest.fixture(autouse=True, scope="module")
def _unsynced():
    with pytest.MonkeyPatch.context() as monkeypatch:
        strategies.skip_disk_sync(monkeypatch)
        yield


def finding(*refs, status=Status.SAME, rule=Rule.NONE, idle=1):
    """A chunk whose list has records of (pack, offset, length), the first one full."""
    row = Row(
        leaf=0,
        box=((0, 100),),
        digest=bytes(16),
        rule=rule,
        refs=tuple(
            Ref(
                form=Form.SPARSE if i else Form.PLANES,
                pack=p,
                offset=SCALE * o,
                length=SCALE * n,
            )
            for i, (p, o, n) in enumerate(refs)
        ),
        since=0,
        age=0,
    )
    chunk = Chunk(
        leaf_index=0,
        leaf=LEAF,
        box=row.box,
        shard=(((0, 10_000),), np.zeros(10_000, np.uint8)),
        stored=Entry(row=row, content=None, idle=idle),
        content_bytes=100,
    )
    return Finding(chunk=chunk, status=status, digest=row.digest)


# Enough that is alive elsewhere, so that the bound on one save is not met.
REST = finding(("x-p0-9", 0, 100_000))
SIZES = {"x-p0-9": 100_000, "a-p0-0": 1000, "b-p0-0": 1000}


def moved(*findings, sizes=SIZES, elsewhere=frozenset()):
    """Indices of those that are written anew."""
    sizes = {name: SCALE * size for name, size in sizes.items()}
    result = renewal.moved([*findings, REST], sizes, own="-p0-", elsewhere=elsewhere)
    assert len(result) == len(findings) + 1
    return [i for i, one in enumerate(result) if one.status is Status.REFRESH]


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        # Half of the pack is dead, and what is alive can move.
        ([finding(("a-p0-0", 0, 300)), finding(("a-p0-0", 500, 199))], [0, 1]),
        ([finding(("a-p0-0", 0, 501))], []),
        # It may be changing at every other save.
        ([finding(("a-p0-0", 0, 300), idle=0)], []),
        ([finding(("a-p0-0", 0, 300)), finding(("a-p0-0", 500, 200), idle=0)], []),
        # What changes now may go on with a delta, and so hold the pack.
        (
            [
                finding(("a-p0-0", 0, 300)),
                finding(("a-p0-0", 500, 200), status=Status.CHANGED),
            ],
            [],
        ),
        # What becomes constant leaves it.
        (
            [
                finding(("a-p0-0", 0, 300)),
                finding(("a-p0-0", 500, 200), status=Status.CONSTANT),
            ],
            [0],
        ),
        # A derived chunk goes where its source goes.
        (
            [
                finding(("a-p0-0", 0, 300)),
                finding(("a-p0-0", 0, 300), rule=Rule.F32_TO_BF16),
            ],
            [0],
        ),
        # A small delta in a dead pack: moving means a full record, which may be dear.
        ([finding(("x-p0-9", 0, 900), ("a-p0-0", 0, 50))], [0]),
        ([finding(("x-p0-9", 0, 960), ("a-p0-0", 0, 50))], []),
        # One move frees two packs.
        (
            [
                finding(("a-p0-0", 0, 400), ("b-p0-0", 0, 10)),
                finding(("b-p0-0", 10, 420)),
            ],
            [0, 1],
        ),
        # Of a pack of another process nobody here knows what is alive.
        ([finding(("a-p1-0", 0, 10))], []),
    ],
)
def test_what_is_written_anew(findings, expected):
    """Where fewer bytes are written than die."""
    assert moved(*findings) == expected


def test_a_pack_of_unknown_size_is_as_large_as_was_seen():
    """After a restart: what is dead behind the last known record goes unnoticed."""
    assert moved(finding(("a-p0-0", 700, 300)), sizes={"x-p0-9": 100_000}) == [0]
    assert moved(finding(("a-p0-0", 0, 300)), sizes={"x-p0-9": 100_000}) == []


def test_what_other_runs_need_stays():
    """A copy of one's own would free nothing."""
    assert moved(finding(("a-p0-0", 0, 300)), elsewhere={"a-p0-0"}) == []


def test_one_save_moves_a_tenth_at_most():
    """Those packs first of which least is alive; the rest waits for the next saves."""
    sizes = {f"a-p0-{i}": 1000 for i in range(10)}
    findings = [finding((f"a-p0-{i}", 0, 100 + 10 * i)) for i in range(10)]
    findings += [finding(("a-p0-0", 400, 4)), REST]
    sizes["x-p0-9"], sizes["a-p0-0"] = 2_000, 1500
    findings[-1] = finding(("x-p0-9", 0, 1000))

    def anew():
        return [one.status is Status.REFRESH for one in now]

    sizes = {name: SCALE * size for name, size in sizes.items()}
    now = renewal.moved(findings, sizes, own="-p0-", elsewhere=frozenset())
    assert [i for i, one in enumerate(anew()) if one] == [0, 1, 10]


def test_one_save_moves_a_chunk_at_least():
    """However large that is, or a small state would never be tidied."""
    sizes = {"a-p0-0": 1000}
    findings = [finding(("a-p0-0", 0, 200)), finding(("a-p0-0", 200, 200))]
    sizes = {name: SCALE * size for name, size in sizes.items()}
    now = renewal.moved(findings, sizes, own="-p0-", elsewhere=frozenset())
    assert [one.status is Status.REFRESH for one in now] == [True, False]


def test_no_chunk_at_all():
    """An empty state has no packs."""
    assert renewal.moved([], {}, own="-p0-", elsewhere=frozenset()) == []


def test_a_disk_of_changing_and_idle_chunks(root):
    """Experts that are trained in turns do not keep the packs of all others."""
    rng = np.random.default_rng(0)
    experts = [rng.standard_normal(3000).astype(np.float32) for _ in range(8)]
    keep = strategies.ocp.CheckpointManagerOptions(max_to_keep=2)
    options = {"chunk_bytes": 4096, "keep_bases": 0, "full_every": 3}
    with open_run(root, manager_options=keep, **options) as run:
        for step in range(60):
            for busy in (0, 1, 2 + step // 10):
                experts[busy] = experts[busy] * np.float32(1.001)
            state = {str(i): expert for i, expert in enumerate(experts)}
            run.save(step, state)
        assert_same_tree(run.restore(59), state)
    refs = {ref for row in read_step(root, 59).rows for ref in row.refs}
    refs |= {ref for row in read_step(root, 58).rows for ref in row.refs}
    alive = sum(ref.length for ref in refs)
    packs = (root / strategies.STORE / "packs").iterdir()
    assert sum(path.stat().st_size for path in packs) < 1.3 * alive


def test_a_handful_of_dead_bytes_is_left():
    """A disk gives back blocks: nothing is written for less."""
    assert moved(finding(("a-p0-0", 0, 100)), sizes={"a-p0-0": 500}) == []
    assert moved(finding(("a-p0-0", 0, 100)), sizes={"a-p0-0": 510}) == [0]


def test_small_records_of_large_leaves_share_a_pack(root):
    """Each such leaf would fill a pack if all of it were written."""
    rng = np.random.default_rng(0)
    state = {str(i): rng.standard_normal(1 << 19).astype(np.float32) for i in range(6)}
    with open_run(root) as run:
        run.save(0, state)
        first = set(read_step(root, 0).manifest.packs)
        assert len(first) >= 6
        for leaf in state.values():
            leaf[::1000] += 1
        run.save(1, state)
        assert len(set(read_step(root, 1).manifest.packs) - first) == 1
        assert_same_tree(run.restore(1), state)
