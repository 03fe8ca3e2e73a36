"""Runs in a GCS bucket, against a server that does as Google documents."""

import concurrent.futures
import secrets

import gcs
import pytest
from bucket_runs import Run, live
from strategies import STORE

import orbax_delta
from orbax_delta import check, testing
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.store import DeltaStore, Folder


@pytest.fixture(scope="module")
def server():
    """One for the process: TensorStore reads its address once."""
    with gcs.serving() as (address, bucket):
        yield address, bucket


@pytest.fixture
def bucket(server, monkeypatch):
    """A bucket that the environment leads to."""
    address, bucket = server
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
    for name, value in gcs.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.fixture
def url(bucket):
    """A folder that no other test uses."""
    return f"gs://{gcs.BUCKET}/{secrets.token_hex(8)}/run"


@pytest.fixture
def run(url):
    """A run in it."""
    return Run(url)


@pytest.mark.parametrize("name", testing.CONTRACT)
def test_the_contract_holds(url, name):
    """What the format asks of storage, each by itself."""
    testing.CONTRACT[name](Folder(url))


def test_a_spec(url):
    """A folder as a TensorStore spec is the same place as its URL."""
    path = url.removeprefix(f"gs://{gcs.BUCKET}/")
    by_spec = Folder({"driver": "gcs", "bucket": gcs.BUCKET, "path": path})
    by_spec.child("a").write("b", b"1")
    assert by_spec.url == f"{url}/"
    assert Folder(url).child("a").read("b") == b"1"


def test_steps_are_found_without_listing_the_store(bucket, url):
    """However many packs there are: TensorStore sends the ends of a range."""
    folder = Folder(url)
    steps = ["1/a/M", "2/a/M", f"{STORE}_old/M", "step_3/a/M", f"{STORE[:-1]}/M", "~/M"]
    begun = [folder.start_write(f"{STORE}/packs/{n:04}", b"") for n in range(1500)]
    begun += [folder.start_write(key, b"") for key in [*steps, f"{STORE}/M"]]
    for pending in begun:
        pending.result()
    bucket.listed.clear()
    assert folder.find("M", max_depth=2, skip=STORE) == sorted(steps)
    assert sum(bucket.listed) == len(steps)
    assert len(bucket.listed) == 2


def test_a_run(run):
    """Save, delete, prune, restart: what stays restores, what is dead goes."""
    live(run)
    keys = Folder(run.url).find(MANIFEST_NAME, max_depth=2, skip=STORE)
    assert keys == [f"{step}/default/{MANIFEST_NAME}" for step in (3, 4, 5, 6)]


def test_an_archive(run, url, tmp_path):
    """Steps of a disk moved to a bucket and back, and between two folders of it."""
    disk, cold = Run(str(tmp_path / "run")), Run(f"{url}-cold")
    for hot in (disk, run):
        saver = hot.handler()
        for step in range(3):
            hot.save(saver, step)
        saver.close()
        archive = cold.url if hot is run else f"{cold.url}-2"
        assert orbax_delta.archive(hot.url, archive, steps=[0, 1], move=True).ok
        hot.assert_restores(range(3))
        Run(archive).assert_restores([0, 1])
        assert orbax_delta.archive(archive, hot.url, steps=[1]).ok
        assert check.verify(hot.url).archived == {"0": archive}


def test_a_store_is_made_once(url):
    """Rivals all find the same one."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        made = {
            store.uuid
            for store in pool.map(DeltaStore.open_or_create, [Folder(url)] * 4)
        }
    assert made == {DeltaStore.open(Folder(url)).uuid}
