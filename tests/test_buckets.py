"""Runs in a bucket over real HTTP: the contract, every flow, TensorStore's own ways."""

import json
import shutil

import buckets
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
import tensorstore as ts
from bucket_runs import Run, live
from etils import epath
from strategies import LITTLE_OPTIONS, STORE, assert_same_tree, little_state

import orbax_delta
from orbax_delta import check, cli, prune, repair, testing
from orbax_delta.errors import CorruptionError, NotFoundError, StorageError
from orbax_delta.store import COMMIT_MARKER, DeltaStore, Folder
from orbax_delta.testing import contract

HAVE_S3FS = buckets.installed("s3fs")
COMMITTING_BY_MARKER = ocp.path.atomicity.CommitFileTemporaryPath


@pytest.fixture
def url(s3):
    """A new folder in the bucket."""
    return buckets.new_url()


@pytest.fixture(params=["bucket", "shared", "disk", "disk and spec"])
def run(s3, request, tmp_path):
    """A run of each kind: where its root lies, and its store if that is elsewhere."""
    url, store = buckets.new_url(), buckets.new_url()
    root = str(tmp_path / "run")
    return {
        "bucket": Run(url),
        "shared": Run(url, {"store": store}),
        "disk": Run(root, {"store": store}),
        "disk and spec": Run(root, {"store": buckets.spec(s3, store)}),
    }[request.param]


# --- folders ------------------------------------------------------------------------


@pytest.mark.parametrize("name", testing.CONTRACT)
def test_the_contract_holds(url, name):
    """What the format asks of storage, each by itself."""
    testing.CONTRACT[name](Folder(url))


def test_check_store(url, monkeypatch):
    """As users try it, here with one requirement; nothing is left over."""
    name = "exclusive create"
    monkeypatch.setattr(contract, "CONTRACT", {name: testing.CONTRACT[name]})
    testing.check_store(url)
    assert Folder(url).names() == []


def test_urls_and_specs_are_the_same_place(s3, url):
    """A folder given as a URL, and one given as a spec, hold the same keys."""
    by_spec = Folder(buckets.spec(s3, url))
    assert by_spec.url == f"{url}/"
    by_spec.child("a").write("b", b"1")
    assert Folder(url).child("a").read("b") == b"1"


def test_a_store_in_a_spec(s3, url, monkeypatch):
    """A store knows its place by the spec alone, whatever the environment says."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = DeltaStore.open_or_create(Folder(buckets.spec(s3, url)))
    store.packs.write("a", b"1")
    again = DeltaStore.open(Folder(buckets.spec(s3, url)))
    assert (again.uuid, again.packs.names()) == (store.uuid, ["a"])
    assert again.url == f"{url}/{STORE}/"


def test_the_region_is_asked_for_once(s3, url, monkeypatch):
    """Without one TensorStore asks the bucket; all folders share the answer."""
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with s3.watched() as sent:
        for number in range(5):
            Folder(url).child(str(number)).write("key", b"")
    assert buckets.counts(sent) == {"HEAD": 1, "PUT": 5}


def test_keys_that_are_replaced(s3, url, monkeypatch):
    """A job whose keys are temporary: what is opened afterwards uses the new ones."""
    with s3.watched() as sent:
        Folder(url).write("a", b"1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
        Folder(url).child("b").write("c", b"1")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "newer")
        Folder(url).write("d", b"1")
    assert [request.signed_by for request in sent] == ["test", "new", "new"]


@pytest.mark.parametrize("keys", [True, False])
def test_a_refusal_says_what_to_do(s3, url, monkeypatch, keys):
    """Wrong keys or none: at once, naming operation and file, with the way out."""
    if not keys:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", "/nowhere")
    with s3.watched(lambda kind, key: "denied") as sent:
        for verb, refused in {
            "read": lambda: Folder(url).read("key"),
            "write": lambda: Folder(url).write("key", b"1"),
            "list": Folder(url).names,
            "delete": lambda: Folder(url).delete("key"),
        }.items():
            with pytest.raises(
                StorageError,
                match=f"could not {verb} {url}.*AccessDenied.*Set AWS_ACCESS_KEY_ID",
            ):
                refused()
    assert len(sent) == 4, "a refusal is not asked for again"


def test_a_server_that_is_down(url, monkeypatch):
    """Some attempts, then an error that says what was tried; no endless wait."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"could not read .*All 6 retry attempts"):
        Folder(url).read("key")


def test_the_bounds_on_attempts_are_in_force():
    """Those of `locations.RETRIES`; TensorStore's own would be a quarter of an hour."""
    from orbax_delta import locations, store

    for name, bounds in locations.RETRIES.items():
        assert store._CONTEXT[name].to_json() == bounds


def test_a_bucket_that_is_not_there(s3):
    """Writing and listing say so; a save needs both."""
    folder = Folder("s3://no-such-bucket/run")
    with pytest.raises(StorageError, match=r"could not write .*NoSuchBucket"):
        folder.write("key", b"1")
    with pytest.raises(StorageError, match=r"could not list .*NoSuchBucket"):
        folder.names()


# --- what TensorStore 0.1.86 does ---------------------------------------------------


def test_tensorstore_lists_more_than_a_range(s3, url):
    """On S3 it asks for all keys of the folder and drops those out of range.

    So `Folder.find` lists once there. When this fails, listing around the store's
    folder costs less.
    """
    folder = Folder(url)
    for key in ("a", "b/1", "b/2", "c"):
        folder.write(key, b"")
    with s3.watched() as sent:
        found = folder._kvstore.list(ts.KvStore.KeyRange(inclusive_min="b0")).result()
    assert found == [b"c"]
    assert [len(request.keys) for request in sent] == [4]


def test_tensorstore_looks_before_it_creates(s3, url):
    """A conditional write is a HEAD and a PUT on a condition that the server checks."""
    with s3.watched() as sent:
        assert Folder(url).create("key", b"1")
    assert [request.kind for request in sent] == ["GET", "HEAD", "CREATE"]
    with s3.watched() as sent:
        assert not Folder(url).create("key", b"2")
    assert [request.kind for request in sent] == ["GET"]


def test_tensorstore_clears_key_by_key(s3, url):
    """Emptying a folder is one list, and one request a key."""
    for number in range(5):
        Folder(url).write(str(number), b"")
    with s3.watched() as sent:
        Folder(url).clear()
    assert buckets.counts(sent) == {"DELETE": 5, "LIST": 1}


# --- a run --------------------------------------------------------------------------


@pytest.fixture
def command(capsys):
    """Runs a command of the command line; returns its exit code and its JSON."""

    def run(*arguments):
        code = cli.main([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_run(run):
    """Save, delete, prune, restart: what stays restores, what is dead goes."""
    live(run)


def test_a_save_reads_back_from_the_bucket(run):
    """A restored step is the base: its content is read when a save needs it."""
    saver = run.handler()
    run.save(saver, 0)
    saver.close()
    again = run.handler()
    again.restore(run.item(0))
    run.save(again, 1)
    assert again.last_save_report.read_bytes > 0
    run.assert_restores([0, 1])


def test_pruning_in_a_bucket(run, command):
    """A plan changes nothing; carrying it out removes what no step needs."""
    saver = run.handler(auto_prune=False, keep_bases=0)
    for step in range(5):
        run.save(saver, step)
    saver.close()
    for step in range(4):
        run.remove(step)
    store = DeltaStore.open(Folder(run.url)).folder
    before = store.names()
    code, planned = command("prune", run.url, "--dry-run")
    assert (code, store.names()) == (0, before)
    code, done = command("prune", run.url)
    assert code == 0
    gone = {*before} - {*store.names()}
    assert {name.rpartition("/")[2] for name in gone} == {
        pack["pack"] for pack in planned["dead"]
    }
    assert len(gone) > 3
    assert done["deleted"] == planned["dead"]
    run.assert_restores([4])


def test_damage_in_a_bucket(run):
    """Verify finds it, repair mends it from a copy in the same run."""
    state = little_state(0)
    saver = run.handler(auto_prune=False, keep_bases=0, refresh_every=1)
    for step in range(3):
        run.save(saver, step, state)
    saver.close()
    store = DeltaStore.open(Folder(run.url))
    last = strategies.open_step(strategies.locate(str(run.item(2))))
    damaged = next(ref.pack for row in last.rows for ref in row.refs if ref.pack)
    data = bytearray(store.packs.read(damaged))
    data[len(data) // 2] ^= 1
    store.packs.write(damaged, bytes(data))
    assert not check.verify(run.url).ok
    assert repair.repair(run.url, dry_run=False).ok
    assert check.verify(run.url).ok
    assert_same_tree(run.restored(2), state)


def test_damage_that_nothing_heals(run):
    """A pack that is gone: an error that names it, never something else."""
    saver = run.handler(keep_bases=0)
    run.save(saver, 0)
    saver.close()
    store = DeltaStore.open(Folder(run.url))
    for name in store.packs.names():
        store.packs.delete(name)
    with pytest.raises(CorruptionError, match="is missing"):
        run.restored(0)
    with pytest.raises(NotFoundError, match="holds no MANIFEST"):
        run.restored(1)


def test_the_command_line_on_a_bucket(run, command):
    """`ls`, `show` and `verify` take a URL."""
    saver = run.handler()
    for step in range(3):
        run.save(saver, step)
    saver.close()
    code, listed = command("ls", run.url)
    assert code == 0
    assert [step["step"] for step in listed["steps"]] == ["0", "1", "2"]
    code, shown = command("show", run.url, "1")
    assert code == 0
    assert "1" in json.dumps(shown)
    code, verified = command("verify", run.url)
    assert code == 0
    assert verified["problems"] == []


def test_packs_of_a_bucket_are_large(run):
    """Two leaves that would fill two packs of a disk lie in one."""
    big = {name: np.random.default_rng(0).bytes(10 << 20) for name in "ab"}
    saver = run.handler(pack_bytes=None)
    run.save(saver, 0, big)
    assert len(DeltaStore.open(Folder(run.url)).packs.names()) == 1
    assert_same_tree(run.restored(0), big)


# --- a real manager -----------------------------------------------------------------


@pytest.mark.skipif(not HAVE_S3FS, reason=buckets.NEEDS_S3FS)
def test_a_manager_in_a_bucket(url):
    """Orbax writes and deletes its own files through s3fs, we ours; all fits."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        cleanup_tmp_directories=True,
        temporary_path_class=COMMITTING_BY_MARKER,
    )
    root = epath.Path(url)
    for begin in (0, 4):
        with strategies.open_run(
            root, manager_options=options, **LITTLE_OPTIONS
        ) as run:
            if begin:
                assert run.manager.latest_step() == begin - 1
                assert_same_tree(run.restore(begin - 1), little_state(begin - 1))
            for step in range(begin, begin + 4):
                run.save(step, little_state(step))
            assert run.manager.all_steps() == [begin + 2, begin + 3]
            for step in run.manager.all_steps():
                target = jax.tree.map(lambda leaf: leaf, little_state(step))
                assert_same_tree(run.restore(step, target), little_state(step))
    keys = Folder(url).names()
    assert {key.partition("/")[0] for key in keys} == {"6", "7", STORE}
    assert check.verify(url).ok
    assert [*prune.plan(DeltaStore.open(Folder(url))).dead] == []


@pytest.mark.parametrize("by_spec", [True, False])
def test_managers_on_disk_whose_packs_are_in_a_bucket(
    s3, url, by_spec, tmp_path, command, monkeypatch
):
    """Two runs on one store: deletion, prunes, the end of one; reading needs no option.

    Orbax needs nothing for it: its own files are on the disk. A spec is all that is
    needed to find the bucket.
    """
    store = buckets.spec(s3, url) if by_spec else url
    if by_spec:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    roots = [tmp_path / name for name in "ab"]
    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    for root in roots:
        with strategies.open_run(
            root, manager_options=keep, store=store, **LITTLE_OPTIONS
        ) as run:
            for step in range(4):
                run.save(step, little_state(step))
    assert run.handler.last_save_report.chunks_by_form["reference"] > 0
    # A new job is told nothing of the store.
    for root in roots:
        with strategies.open_run(root, manager_options=keep, **LITTLE_OPTIONS) as again:
            for step in (2, 3):
                assert_same_tree(again.restore(step), little_state(step))
            again.save(4, little_state(4))
            report = again.handler.last_save_report
            assert report.chunks_by_form["reference"] > 0
        assert {path.name for path in (root / STORE).iterdir()} == {
            "ROOT.json",
            COMMIT_MARKER,
            "history",
        }
    shutil.rmtree(roots[0])
    code, answer = command("prune", str(roots[1]))
    assert code == 10
    gone = answer["error"]["message"].partition("serves root ")[2][:32]
    # Of a spec a command knows by a root alone.
    where = str(roots[1]) if by_spec else url
    assert command("forget", gone, "--store", where, "--yes")[0] == 0
    assert command("prune", where)[0] == 0
    assert command("prune", where)[1]["deleted"] == []
    code, verified = command("verify", str(roots[1]))
    assert (code, verified["problems"]) == (0, [])
    handler = orbax_delta.DeltaCheckpointHandler()
    for step in (3, 4):
        got = handler.restore(epath.Path(roots[1] / str(step) / "default"))
        assert_same_tree(got, little_state(step))


@pytest.mark.skipif(not HAVE_S3FS, reason=buckets.NEEDS_S3FS)
def test_orbax_cannot_rename_in_a_bucket(url):
    """Its default on s3:// is to rename folders; s3fs copies them as if they were keys.

    So a manager needs `temporary_path_class`. When this fails the README can drop it.
    """
    with strategies.open_run(epath.Path(url), **LITTLE_OPTIONS) as run:
        with pytest.raises(FileNotFoundError, match="key does not exist"):
            run.save(0, little_state(0))
        run.manager.reload()
        assert run.manager.all_steps() == []


# --- Orbax's clean-up where a marker file commits -----------------------------------


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    "where",
    [
        "disk",
        pytest.param(
            "bucket", marks=pytest.mark.skipif(not HAVE_S3FS, reason=buckets.NEEDS_S3FS)
        ),
    ],
)
def test_clean_up_by_marker(where, marked, tmp_path, request):
    """Orbax removes folders of the root that lack a marker: ours has one.

    Without it the store is lost, which is why a save writes it before anything else.
    """
    if where == "bucket":
        request.getfixturevalue("s3")
        root = epath.Path(buckets.new_url())
    else:
        root = epath.Path(tmp_path / "run")
    options = ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=True, temporary_path_class=COMMITTING_BY_MARKER
    )
    with strategies.open_run(root, manager_options=options, **LITTLE_OPTIONS) as run:
        for step in range(2):
            run.save(step, little_state(step))
    before = DeltaStore.open(Folder(str(root)))
    if not marked:
        before.folder.delete(COMMIT_MARKER)
    with strategies.open_run(root, manager_options=options, **LITTLE_OPTIONS) as run:
        run.save(2, little_state(2))  # a save waits for the clean-up first
        assert run.manager.all_steps() == [0, 1, 2]
        assert_same_tree(run.restore(2), little_state(2))
        after = DeltaStore.open(Folder(str(root)))
        assert (after.uuid == before.uuid) == marked
        if marked:
            assert_same_tree(run.restore(1), little_state(1))
        else:
            with pytest.raises(
                NotFoundError, match=f"needs store {before.uuid}, which"
            ):
                run.restore(1)
