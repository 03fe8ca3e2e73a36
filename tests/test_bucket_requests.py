"""What saves and restores ask of a bucket: no more requests than these."""

import buckets
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from bucket_runs import Run
from etils import epath

import orbax_delta
from orbax_delta import check, prune
from orbax_delta.store import DeltaStore, Folder

LEAVES = 40
PACKS = "/_delta_store/packs/"

MOST = {
    "first save": {"CREATE": 1, "GET": 9, "HEAD": 1, "LIST": 18, "PUT": 12},
    "delta save": {"DELETE": 1, "GET": 2, "LIST": 5, "PUT": 7},
    "unchanged save": {"DELETE": 1, "GET": 2, "LIST": 5, "PUT": 6},
    "finalize": {"GET": 1, "LIST": 1},
    "full restore": {"GET": 8},
    "one-leaf restore": {"GET": 7},
    "save after a deletion": {"DELETE": 1, "GET": 9, "LIST": 13, "PUT": 7},
    "prune, nothing dead": {"GET": 4, "LIST": 8},
    "prune": {"DELETE": 3, "GET": 9, "LIST": 16, "PUT": 1},
    "verify": {"GET": 43, "LIST": 11},
}
"""Requests of each kind, at most, of a run with some steps in one bucket."""


def state(step):
    """10 MB in 40 leaves, of which one changes a little."""
    rng = np.random.default_rng(0)
    leaves = {
        f"w{number:02}": rng.standard_normal((512, 128)).astype(np.float32)
        for number in range(LEAVES)
    }
    leaves["w07"][:step] += 1
    return leaves


@pytest.fixture
def measured(s3, record_property):
    """Does something, and holds its requests against the table."""

    def measure(name, action):
        with s3.watched() as sent:
            result = action()
        counts = buckets.counts(sent)
        shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        record_property("bucket_requests", f"{name}: {shown}")
        for kind, count in counts.items():
            assert count <= MOST[name].get(kind, 0), (name, counts)
        return result, sent

    return measure


def test_requests(s3, measured):
    """A life of a run: saves, restores, upkeep."""
    run = Run(buckets.new_url())
    saver = orbax_delta.DeltaCheckpointHandler()

    def save(step, version):
        saver.save(run.item(step), orbax_delta.DeltaSave(state(version)))

    measured("first save", lambda: save(0, 0))
    measured("delta save", lambda: save(1, 1))
    _, sent = measured("unchanged save", lambda: save(2, 1))
    # What has not changed is not sent: rows, MANIFEST, pin and the two fixed files.
    assert sum(request.received for request in sent) < 5000
    measured("finalize", lambda: saver.finalize(run.item(2)))

    reader = orbax_delta.DeltaCheckpointHandler()
    _, sent = measured("full restore", lambda: reader.restore(run.item(2)))
    of_packs = [request for request in sent if PACKS in request.key]
    assert len(of_packs) == 2, "records of a pack that lie together are read together"
    assert sum(request.returned for request in sent) < 1.01 * LEAVES * (512 * 128 * 4)
    one = orbax_delta.DeltaRestore({"w03": ...}, partial_restore=True)
    one.item["w03"] = np.zeros((512, 128), np.float32)
    _, sent = measured("one-leaf restore", lambda: reader.restore(run.item(2), one))
    assert sum(request.returned for request in sent) < 1.1 * 512 * 128 * 4

    run.remove(0)
    measured("save after a deletion", lambda: save(3, 3))
    saver.close()
    store = DeltaStore.open(Folder(run.url))

    def sweep():
        return prune.execute(store, prune.plan(store))

    assert measured("prune, nothing dead", sweep)[0] == ()
    for pack in "01":
        store.packs.write(f"{'a' * 32}-p0-{pack}", b"")
    assert len(measured("prune", sweep)[0]) == 2
    assert measured("verify", lambda: check.verify(run.url))[0].ok


@pytest.mark.skipif(
    not buckets.installed("s3fs"),
    reason=buckets.NEEDS_S3FS,
)
def test_requests_with_a_manager(s3, record_property):
    """What Orbax and s3fs ask for besides is the larger part of a small save."""
    url = buckets.new_url()
    options = ocp.CheckpointManagerOptions(
        temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath
    )
    with strategies.open_run(epath.Path(url), manager_options=options) as run:
        run.save(0, state(0))
        with s3.watched() as sent:
            run.save(1, state(1))
    counts = buckets.counts(sent)
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    record_property("bucket_requests", f"delta save with a manager: {shown}")
    assert sum(counts.values()) <= 70
