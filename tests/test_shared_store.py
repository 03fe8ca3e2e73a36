"""One store for many roots: who uses it, what a prune needs, what must not be."""

import contextlib
import errno
import itertools
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import second_reader
import strategies
from strategies import (
    STORE,
    assert_same_tree,
    labelled,
    listing,
    little_state,
    open_run,
    packs_named,
    read_manifest,
    read_step,
)

import orbax_delta
from orbax_delta import check, cli, prune, registry, restore_base, storefiles, testing
from orbax_delta.errors import (
    ConflictError,
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from orbax_delta.listing import read_root
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.places import TEMPORARY_SUFFIX
from orbax_delta.store import DeltaStore, Folder

SMALL = {"chunk_bytes": 4096, "pack_bytes": 8 << 10, "full_every": 2}
FROZEN = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


@pytest.fixture
def shared(tmp_path):
    """Options of a run on a shared store."""
    return SMALL | {"store": str(tmp_path / "store")}


def state(run, step):
    """What every run has in common, what this one has, and what changes."""
    own = np.random.default_rng(ord(run[0])).standard_normal(3000)
    changing = np.random.default_rng((ord(run[0]), step)).standard_normal(1000)
    return {"base": FROZEN, "own": own, "w": changing, "step": step}


def save(root, steps, **options):
    """Save some steps of a run that is named like its folder."""
    with open_run(root, **options) as run:
        for step in steps:
            run.save(step, state(root.name, step))


def check_steps(root, steps):
    """Steps restore bit for bit, without any option."""
    handler = orbax_delta.DeltaCheckpointHandler()
    for step in steps:
        with labelled(f"step {step} of {root}"):
            got = handler.restore(root / str(step) / "default")
            assert_same_tree(got, state(root.name, step))


def open_store(root):
    """The store that a root uses."""
    return DeltaStore.open(Folder(str(root)))


def prune_now(root):
    """What `orbax-delta prune` deletes."""
    store = open_store(root)
    return prune.execute(store, prune.plan(store))


def packs_of(store):
    """Names of the packs of a shared store."""
    return {path.name for path in (store / "packs").iterdir()}


def uuid_of(root):
    """Identity of a root."""
    return json.loads((root / STORE / "ROOT.json").read_text())["root_uuid"]


# --- what is where ------------------------------------------------------------------


def test_two_runs_on_one_store(tmp_path, shared):
    """Packs lie in the store, what a root needs to find it lies in the root."""
    for name in "ab":
        save(tmp_path / name, range(3), **shared)
    store = tmp_path / "store"
    document = json.loads((store / "STORE.json").read_text())
    assert document["shared"] is True
    uuids = {uuid_of(tmp_path / name) for name in "ab"}
    assert {path.name for path in (store / "roots").iterdir()} == uuids
    for name in "ab":
        root = tmp_path / name
        below = {path.name for path in (root / STORE).iterdir()}
        assert below == {"ROOT.json", "commit_success.txt", "history"}
        link = storefiles.parse_root((root / STORE / "ROOT.json").read_bytes(), "it")
        assert link.store == str(store)
        assert link.store_uuid == document["uuid"]
        entry = (store / "roots" / link.root_uuid).read_bytes()
        known = storefiles.parse_entry(entry, f"roots/{link.root_uuid}")
        assert known.root == str(root)
        check_steps(root, range(3))
        manifest = read_manifest(root / "2" / "default" / MANIFEST_NAME)
        assert manifest.root_uuid == link.root_uuid
        assert manifest.options["store"] == str(store)
        assert check.verify(str(root)).ok


def test_a_root_keeps_its_store(tmp_path, shared):
    """A manager without the option goes on with the store that the root uses."""
    save(tmp_path / "a", range(2), **shared)
    save(tmp_path / "a", [2], **SMALL)
    check_steps(tmp_path / "a", range(3))
    assert read_step(tmp_path / "a", 2).packs.url == f"{tmp_path}/store/packs/"
    below = {path.name for path in (tmp_path / "a" / STORE).iterdir()}
    assert below == {"ROOT.json", "commit_success.txt", "history"}


def test_a_root_without_the_option_has_its_own_store(root):
    """Its STORE.json says that it is not shared."""
    save(root, [0], **SMALL)
    assert json.loads((root / STORE / "STORE.json").read_text())["shared"] is False
    assert not (root / STORE / "ROOT.json").exists()
    assert not (root / STORE / "roots").exists()


def test_a_relative_store_is_that_of_the_working_directory(tmp_path, monkeypatch):
    """The location that is written down means the same everywhere."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a", [0], **SMALL, store="some/../store")
    monkeypatch.chdir("/")
    check_steps(tmp_path / "a", [0])
    link = DeltaStore.read_link(Folder(str(tmp_path / "a")))
    assert link.store == str(tmp_path / "store")


def test_the_second_reader_finds_the_store(tmp_path, shared):
    """Steps and bases, from FORMAT.md alone."""
    for name in "ab":
        save(tmp_path / name, range(2), **shared)
        read = second_reader.read_step(tmp_path / name / "1" / "default")
        assert read["own",].data == state(name, 1)["own"].tobytes()
    bases = list((tmp_path / "store" / "bases").iterdir())
    assert len(bases) == 2
    for base in bases:
        assert second_reader.read_step(base)["base",].data == FROZEN.tobytes()
        got = orbax_delta.DeltaCheckpointHandler().restore(base)
        assert_same_tree(got["base"], FROZEN)


def test_fixed_files_are_renewed(tmp_path, shared):
    """So that rules which delete files by age spare them."""
    save(tmp_path / "a", [0], **shared)
    files = [
        tmp_path / "store" / "STORE.json",
        tmp_path / "store" / "commit_success.txt",
        tmp_path / "a" / STORE / "ROOT.json",
        tmp_path / "a" / STORE / "commit_success.txt",
        tmp_path / "store" / "roots" / uuid_of(tmp_path / "a"),
    ]
    before = [path.read_bytes() for path in files]
    for path in files:
        os.utime(path, (1, 1))  # as old as files get; inodes are used again
    save(tmp_path / "a", [1], **shared)
    assert [path.read_bytes() for path in files] == before
    assert [path for path in files if path.stat().st_mtime == 1] == []


# --- deletion -----------------------------------------------------------------------


def test_the_end_of_one_run_harms_no_other(tmp_path, shared):
    """All steps of each of three runs go, in any order; the others stay whole."""
    for order in ("abc", "bca", "cab"):
        for name in order:
            save(tmp_path / name, range(2), **shared)
        left = list(order)
        while left:
            gone = left.pop(0)
            for step in range(2):
                shutil.rmtree(tmp_path / gone / str(step))
            prune_now(tmp_path / gone)
            for name in left:
                check_steps(tmp_path / name, range(2))
                assert check.verify(str(tmp_path / name)).ok
        shutil.rmtree(tmp_path / "store")
        for name in order:
            shutil.rmtree(tmp_path / name)


def test_managers_side_by_side(tmp_path, shared):
    """Three managers save in turn and delete old steps; every prune sees all of them.

    Garbage goes as it arises: what is there in the end is named.
    """
    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    roots = [tmp_path / name for name in "abc"]
    with (
        open_run(roots[0], manager_options=keep, **shared) as first,
        open_run(roots[1], manager_options=keep, **shared) as second,
        open_run(roots[2], manager_options=keep, **shared) as third,
    ):
        for step in range(8):
            for root, run in zip(roots, (first, second, third), strict=True):
                run.save(step, state(root.name, step))
            for root in roots:
                check_steps(root, range(max(0, step - 1), step + 1))
    for root in roots:
        prune_now(root)
    named = set().union(*map(packs_named, (*roots, tmp_path / "store")))
    assert packs_of(tmp_path / "store") == named
    for root in roots:
        assert check.verify(str(root)).unnamed_packs == []


def test_bases_are_counted_for_each_root_and_item(tmp_path, shared):
    """`keep_bases` of one run does not release another's, and each finds its own."""
    options = shared | {"keep_bases": 1, "full_every": 1, "refresh_every": 2}
    keep = ocp.CheckpointManagerOptions(max_to_keep=1)
    for name in "ab":
        with open_run(tmp_path / name, manager_options=keep, **options) as run:
            for step in range(4):
                run.save(step, state(name, step))
    for name in "ab":
        root = tmp_path / name
        kept = read_root(str(root)).bases
        assert [base.place.step for base in kept] == [3]
        assert kept[0].manifest.root_uuid == uuid_of(root)
        shutil.rmtree(root / "3")
        prune_now(root)
        step, tree = restore_base(root)
        assert step == 3
        assert_same_tree(tree, state(name, 3))
    assert len(list((tmp_path / "store" / "bases").iterdir())) == 2


def test_a_base_becomes_a_step_again(tmp_path, shared):
    """Its files, copied into a step's folder of the root."""
    save(tmp_path / "a", [0], **shared)
    (base,) = (tmp_path / "store" / "bases").iterdir()
    shutil.rmtree(tmp_path / "a" / "0")
    shutil.copytree(base, tmp_path / "a" / "0" / "default")
    check_steps(tmp_path / "a", [0])


# --- roots that cannot be reached ---------------------------------------------------


def vanish(root):
    """It was deleted."""
    shutil.rmtree(root)


def lose_link(root):
    """The folder is there, perhaps that of another host."""
    (root / STORE / "ROOT.json").unlink()


def another(root):
    """The folder is another root, of another host."""
    path = root / STORE / "ROOT.json"
    link = storefiles.parse_root(path.read_bytes(), "it")
    other = storefiles.Link(
        root_uuid="ab" * 16, store=link.store, store_uuid=link.store_uuid
    )
    path.write_bytes(storefiles.root_document(other))


def rot(root):
    """A flipped bit."""
    path = root / STORE / "ROOT.json"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def close(root):
    """A file lies where the folder was."""
    shutil.rmtree(root)
    root.write_text("no folder")


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (vanish, NotFoundError),
        (lose_link, NotFoundError),
        (another, NotFoundError),
        (rot, (CorruptionError, FormatError)),
        (close, (NotFoundError, StorageError)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_root_out_of_reach_stops_every_prune(tmp_path, shared, harm, error, caplog):
    """Nothing is deleted, the message names the root and what to do; saves go on."""
    store = tmp_path / "store"
    for name in "ab":
        save(tmp_path / name, range(3), **shared)
    shutil.rmtree(tmp_path / "b" / "0")
    shutil.rmtree(tmp_path / "b" / "1")
    (entry,) = registry.find(registry.open_shared(str(store)), f"{tmp_path}/a")
    harm(tmp_path / "a")
    before = listing(tmp_path)
    said = f"forget {entry.root_uuid} --store {store}"
    for opened in (open_store(tmp_path / "b"), registry.open_shared(str(store))):
        with pytest.raises(error, match=said):
            prune.plan(opened)
    for where in (tmp_path / "b", store):
        assert cli.main(["prune", str(where)]) > 1
    assert listing(tmp_path) == before
    packs = packs_of(store)
    with caplog.at_level(logging.WARNING, "orbax_delta"):
        save(tmp_path / "b", [3], **shared)
    assert f"{tmp_path}/a" in caplog.text
    assert "while tidying up" in caplog.text
    check_steps(tmp_path / "b", [2, 3])
    assert packs_of(store) > packs
    report = check.verify(str(tmp_path / "b"))
    assert report.ok
    assert not report.unnamed_packs
    # Only a person knows that it is gone.
    assert cli.main(["forget", f"{tmp_path}/a", "--store", str(store), "--yes"]) == 0
    assert prune_now(tmp_path / "b")
    check_steps(tmp_path / "b", [2, 3])
    named = packs_named(tmp_path / "b") | packs_named(store)
    assert packs_of(store) == named


def test_a_store_out_of_reach(tmp_path, shared):
    """Nothing is saved to or restored from another one in its place."""
    save(tmp_path / "a", [0], **shared)
    (tmp_path / "store").rename(tmp_path / "away")
    before = listing(tmp_path)
    with pytest.raises(NotFoundError, match=r"uses the shared store .* holds no STORE"):
        check_steps(tmp_path / "a", [0])
    for options in (SMALL, SMALL | {"store": str(tmp_path / "new")}):
        with pytest.raises(
            (NotFoundError, InvalidInputError), match="uses the shared store"
        ):
            registry.open_store(Folder(str(tmp_path / "a")), options.get("store"))
    assert listing(tmp_path) == before
    assert not check.verify(str(tmp_path / "a")).ok
    # Who names its new place moves the root along.
    moved = SMALL | {"store": str(tmp_path / "away")}
    save(tmp_path / "a", [1], **moved)
    check_steps(tmp_path / "a", [0, 1])
    assert DeltaStore.read_link(Folder(str(tmp_path / "a"))).store == moved["store"]
    assert not (tmp_path / "store").exists()


def test_the_same_store_by_another_name(tmp_path, shared):
    """A root goes on with the name that it knows."""
    save(tmp_path / "a", [0], **shared)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    save(tmp_path / "a", [1], **SMALL, store=str(tmp_path / "link"))
    assert (
        DeltaStore.read_link(Folder(str(tmp_path / "a"))).store == f"{tmp_path}/store"
    )
    check_steps(tmp_path / "a", [0, 1])


# --- forgetting ---------------------------------------------------------------------


def forget(*arguments):
    """The command; its exit code."""
    return cli.main(["forget", *map(str, arguments)])


def test_forgetting_asks_first(tmp_path, shared, monkeypatch, capsys):
    """Who does not say yes changes nothing."""
    save(tmp_path / "a", range(2), **shared)
    store = tmp_path / "store"
    before = listing(tmp_path)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "n")
    assert forget(tmp_path / "a", "--store", store) == 130
    out = capsys.readouterr().out
    assert f"{tmp_path}/a ({uuid_of(tmp_path / 'a')}): 2 MANIFESTs of it can be" in out
    assert "the store keeps 1 kept base of it" in out
    assert forget(tmp_path / "a", "--store", store, "--json") == 2
    assert "add --yes" in capsys.readouterr().err
    assert listing(tmp_path) == before
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "y")
    assert forget(tmp_path / "a", "--store", store) == 0
    assert "Forgot" in capsys.readouterr().out
    assert not list((store / "roots").iterdir())


def test_what_forgetting_does(tmp_path, shared, capsys):
    """The entry and the bases go; packs with the next prune, shared ones never."""
    for name in "ab":
        save(tmp_path / name, range(2), **shared)
    store, uuid = tmp_path / "store", uuid_of(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    assert forget(tmp_path / "a", "--store", store, "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "store": f"{store}/",
        "roots": [
            {"root": str(tmp_path / "a"), "uuid": uuid, "steps": None, "bases": 1}
        ],
    }
    assert [p.name for p in (store / "roots").iterdir()] == [uuid_of(tmp_path / "b")]
    assert len(list((store / "bases").iterdir())) == 1
    assert prune_now(tmp_path / "b")
    check_steps(tmp_path / "b", range(2))
    assert packs_of(store) == packs_named(tmp_path / "b") | packs_named(store)


def test_what_can_be_forgotten(tmp_path, shared, capsys):
    """By location or identity; nothing else; only of a shared store."""
    save(tmp_path / "a", [0], **shared)
    save(tmp_path / "own", [0], **SMALL)
    store = tmp_path / "store"
    before = listing(tmp_path)
    assert forget(tmp_path / "b", "--store", store, "--yes") == 10
    assert f"there are: {tmp_path}/a" in capsys.readouterr().err
    assert forget(tmp_path / "a", "--store", tmp_path / "own" / STORE, "--yes") == 10
    assert "holds no shared store" in capsys.readouterr().err
    assert forget(tmp_path / "a", "--store", tmp_path, "--yes", "--json") == 10
    assert "no shared store" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert listing(tmp_path) == before
    uuid = uuid_of(tmp_path / "a")
    (store / "roots" / uuid).write_bytes(b"rotten")
    with pytest.raises(FormatError, match=f"roots/{uuid} is not JSON"):
        prune.plan(open_store(tmp_path / "a"))
    assert forget(uuid, "--store", store, "--yes") == 0
    assert "an unreadable entry" in capsys.readouterr().out
    assert not list((store / "roots").iterdir())


def test_a_forgotten_root_that_saves_again(tmp_path, shared):
    """It is registered anew, and what is gone is written in full."""
    with open_run(tmp_path / "a", **shared) as run:
        run.save(0, state("a", 0))
        run.save(1, state("a", 1))
        forget(tmp_path / "a", "--store", shared["store"], "--yes")
        problem = check.verify(str(tmp_path / "a")).problems[0]
        assert "no prune counts with this root" in problem.what
        run.save(2, state("a", 2))
        assert check.verify(str(tmp_path / "a")).ok
    check_steps(tmp_path / "a", range(3))
    assert (tmp_path / "store" / "roots" / uuid_of(tmp_path / "a")).exists()


# --- what must not be ---------------------------------------------------------------


def own_store_as_shared(tmp_path):
    """The store of another root."""
    save(tmp_path / "b", [0], **SMALL)
    return tmp_path / "a", tmp_path / "b" / STORE, "is the store of one root"


def named_like_an_own_store(tmp_path):
    """It would look like one."""
    return tmp_path / "a", tmp_path / "b" / STORE, "is named like the own store"


def inside_its_root(tmp_path):
    """It would be one of the root's folders."""
    return tmp_path / "a", tmp_path / "a" / "store", "must lie apart"


def its_root(tmp_path):
    """The root itself."""
    return tmp_path / "a", tmp_path / "a", "must lie apart"


def around_its_root(tmp_path):
    """The root would be one of its folders."""
    return tmp_path / "runs" / "a", tmp_path / "runs", "must lie apart"


def inside_its_root_by_a_link(tmp_path):
    """The same, seen through a link."""
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    return tmp_path / "a", tmp_path / "link" / "store", "must lie apart"


def another_root(tmp_path):
    """A folder of steps."""
    save(tmp_path / "b", [0], **SMALL)
    return tmp_path / "a", tmp_path / "b", "is .*/b, to which a manager saves"


def inside_another_root(tmp_path):
    """A folder of one."""
    save(tmp_path / "b", [0], **SMALL, store=str(tmp_path / "store"))
    where = tmp_path / "b" / "some" / "store"
    return tmp_path / "a", where, "lies in .*/b, to which a manager saves"


def inside_another_root_by_a_spec(tmp_path):
    """A folder of one, however it is named."""
    root, where, message = inside_another_root(tmp_path)
    return root, {"driver": "file", "path": str(where)}, message


def inside_its_root_by_a_url(tmp_path):
    """It would be one of the root's folders."""
    return tmp_path / "a", f"file://{tmp_path}/a/store", "must lie apart"


def inside_another_store(tmp_path):
    """Its registry would have an entry that is none."""
    save(tmp_path / "b", [0], **SMALL, store=str(tmp_path / "store"))
    return tmp_path / "a", tmp_path / "store" / "roots" / "x", "lies in the store"


def a_root_with_its_own_store(tmp_path):
    """Its steps need that."""
    save(tmp_path / "a", [0], **SMALL)
    return tmp_path / "a", tmp_path / "store", "has a store of its own"


def a_root_that_lost_its_store_file(tmp_path):
    """Its packs are still there."""
    save(tmp_path / "a", [0], **SMALL)
    (tmp_path / "a" / STORE / "STORE.json").unlink()
    return tmp_path / "a", tmp_path / "store", "has a store of its own"


def a_root_with_another_store(tmp_path):
    """To a new one."""
    save(tmp_path / "a", [0], **SMALL, store=str(tmp_path / "store"))
    return tmp_path / "a", tmp_path / "new", r"names .*/new/, which holds none"


def a_root_with_another_existing_store(tmp_path):
    """To one that is there."""
    save(tmp_path / "a", [0], **SMALL, store=str(tmp_path / "store"))
    save(tmp_path / "b", [0], **SMALL, store=str(tmp_path / "other"))
    return tmp_path / "a", tmp_path / "other", r"names .*/other/, which is store \w{32}"


def a_copied_root(tmp_path):
    """Both cannot be the registered one."""
    save(tmp_path / "b", [0], **SMALL, store=str(tmp_path / "store"))
    shutil.copytree(tmp_path / "b", tmp_path / "a")
    return tmp_path / "a", tmp_path / "store", "registered as .*/b; nothing was written"


def a_copied_root_without_the_option(tmp_path):
    """The same."""
    save(tmp_path / "b", [0], **SMALL, store=str(tmp_path / "store"))
    shutil.copytree(tmp_path / "b", tmp_path / "a")
    return tmp_path / "a", None, "If this is a copy of it, save to a new root"


def a_shared_store_in_the_place_of_an_own_one(tmp_path):
    """A copy, or a link."""
    save(tmp_path / "b", [0], **SMALL, store=str(tmp_path / "store"))
    (tmp_path / "a").mkdir()
    shutil.copytree(tmp_path / "store", tmp_path / "a" / STORE)
    return tmp_path / "a", None, "is a shared store, but lies where the own store"


def another_shared_store_in_the_place_of_an_own_one(tmp_path):
    """The same, with the option."""
    root, _, _ = a_shared_store_in_the_place_of_an_own_one(tmp_path)
    return root, tmp_path / "store", "has a store of its own"


WRONG = [
    own_store_as_shared,
    named_like_an_own_store,
    inside_its_root,
    its_root,
    around_its_root,
    inside_its_root_by_a_link,
    another_root,
    inside_another_root,
    inside_another_root_by_a_spec,
    inside_its_root_by_a_url,
    inside_another_store,
    a_root_with_its_own_store,
    a_root_that_lost_its_store_file,
    a_root_with_another_store,
    a_root_with_another_existing_store,
    a_copied_root,
    a_copied_root_without_the_option,
    a_shared_store_in_the_place_of_an_own_one,
    another_shared_store_in_the_place_of_an_own_one,
]


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_what_cannot_be_a_store(tmp_path, make):
    """An error that says what to do, and not a byte changes."""
    root, where, message = make(tmp_path)
    item = root / f"1{TEMPORARY_SUFFIX}" / f"default{TEMPORARY_SUFFIX}"
    item.mkdir(parents=True)
    before = listing(tmp_path)
    options = orbax_delta.DeltaOptions(**SMALL, store=where)
    handler = orbax_delta.DeltaCheckpointHandler(options)
    with pytest.raises(InvalidInputError, match=message):
        handler.save(item, orbax_delta.DeltaSave(state("a", 1)))
    handler.close()
    assert listing(tmp_path) == before


def test_a_manager_is_told_of_a_wrong_store(tmp_path):
    """The error comes out of the manager; a manager with another store is all right."""
    save(tmp_path / "a", [0], **SMALL)
    with (
        open_run(tmp_path / "a", **SMALL, store=str(tmp_path / "store")) as run,
        pytest.raises(InvalidInputError, match="has a store of its own"),
    ):
        run.save(1, state("a", 1))
    assert not (tmp_path / "store").exists()
    save(tmp_path / "a", [2], **SMALL)
    check_steps(tmp_path / "a", [0, 2])


def test_a_root_that_lost_its_link(tmp_path, shared):
    """It does not become another root: its steps would count for nobody."""
    save(tmp_path / "a", [0], **shared)
    (tmp_path / "a" / STORE / "ROOT.json").unlink()
    before = listing(tmp_path)
    for store in (None, shared["store"]):
        with pytest.raises(CorruptionError, match=r"but no _delta_store/ROOT\.json"):
            registry.open_store(Folder(str(tmp_path / "a")), store)
    assert listing(tmp_path) == before
    assert not check.verify(str(tmp_path / "a")).ok


def test_what_ties_a_root_to_its_store_is_mended(tmp_path, shared, capsys):
    """ROOT.json, its marker and the entry, lost or damaged: byte for byte."""
    save(tmp_path / "a", range(2), **shared)
    files = (
        tmp_path / "a" / STORE / "ROOT.json",
        tmp_path / "a" / STORE / "commit_success.txt",
        tmp_path / "store" / "roots" / uuid_of(tmp_path / "a"),
    )
    for path, data in itertools.product(files, (None, b"rotten")):
        if path.name == "commit_success.txt" and data is not None:
            continue  # only that it is there matters
        good = path.read_bytes()
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with labelled(f"{path}: {data}"):
            problems = check.verify(str(tmp_path / "a")).problems
            assert problems
            assert all(path.name in problem.file for problem in problems)
            # What STORE.json holds is no advice about any of these.
            assert not any("orbax-delta-store" in problem.what for problem in problems)
            if path.name == "ROOT.json" or data is not None:
                assert all("orbax-delta repair" in p.what for p in problems)
                assert not any("STORE.json" in p.what for p in problems)
            code, found = run_json(capsys, "repair", tmp_path / "a")
            assert code == 0
            assert len(found["mended"]) == 1
            assert path.read_bytes() == good
            check_steps(tmp_path / "a", range(2))


def test_a_lost_link_that_nobody_can_vouch_for(tmp_path, shared, capsys):
    """Of a copy, or of a root that the store does not know, nothing is made up."""
    save(tmp_path / "a", [0], **shared)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / STORE / "ROOT.json").unlink()
    before = listing(tmp_path)
    code, found = run_json(capsys, "repair", tmp_path / "b")
    assert (code, found["mended"]) == (22, [])
    assert listing(tmp_path) == before


def test_a_moved_root(tmp_path, shared, monkeypatch, capsys):
    """It reads at once, and saves once the store is told; nothing of it is lost."""
    for name in "ab":
        save(tmp_path / name, [0], **shared)
    uuid = uuid_of(tmp_path / "a")
    (tmp_path / "runs").mkdir()
    moved = tmp_path / "runs" / "a"
    (tmp_path / "a").rename(moved)
    check_steps(moved, [0])
    said = f"registered as {tmp_path}/a.*`orbax-delta moved {moved}`"
    with pytest.raises(InvalidInputError, match=said):
        registry.open_store(Folder(str(moved)), None)
    before = listing(tmp_path)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "n")
    assert cli.main(["moved", str(moved)]) == 130
    assert f"is registered as {tmp_path}/a" in capsys.readouterr().out
    assert cli.main(["moved", str(moved), "--json"]) == 2
    assert listing(tmp_path) == before
    capsys.readouterr()
    code, found = run_json(capsys, "moved", moved, "--yes")
    assert (code, found["from"]) == (0, f"{tmp_path}/a")
    assert (found["to"], found["uuid"]) == (str(moved), uuid)
    prune_now(tmp_path / "b")
    check_steps(moved, [0])
    save(moved, [1], **shared)
    check_steps(moved, [0, 1])
    assert uuid_of(moved) == uuid
    code, found = run_json(capsys, "moved", moved, "--yes")
    assert (code, found["from"]) == (0, None)


def test_what_has_not_moved(tmp_path, shared, capsys):
    """A copy does not take the entry over; a store of its own moves along."""
    save(tmp_path / "a", [0], **shared)
    save(tmp_path / "own", [0], **SMALL)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    before = listing(tmp_path)
    for name, message in {"b": "is a copy of", "own": "not use a shared store"}.items():
        assert cli.main(["moved", str(tmp_path / name), "--yes"]) == 2
        assert message in capsys.readouterr().err
    assert listing(tmp_path) == before


@pytest.mark.parametrize("instead", ["nothing", "empty folder", "another run"])
@pytest.mark.parametrize("auto_prune", [True, False])
def test_a_root_that_is_moved_under_a_job(tmp_path, shared, auto_prune, instead):
    """Or whose disk is gone: the end of the job deletes and writes nothing.

    What is in its place does not become it either.
    """
    root, away = tmp_path / "a", tmp_path / "away"
    options = shared | {"keep_bases": 0, "auto_prune": auto_prune}
    with open_run(root, **options) as run:
        for step in range(3):
            run.save(step, state("a", step))
        root.rename(away)
        if instead == "empty folder":
            root.mkdir()
        if instead == "another run":
            save(root, range(2), **options)
        before = listing(root), listing(away), packs_of(tmp_path / "store")
    assert (listing(root), listing(away), packs_of(tmp_path / "store")) == before
    save(tmp_path / "b", [0], **shared)
    with pytest.raises(NotFoundError, match="serves root"):
        prune_now(tmp_path / "b")
    if instead == "another run":
        check_steps(root, range(2))
        shutil.rmtree(root)
    elif instead == "empty folder":
        root.rmdir()
    away.rename(root)
    check_steps(root, range(3))


def test_a_store_that_is_moved_under_a_job(tmp_path, shared):
    """The end of the job leaves nothing in its place that passes for it."""
    with open_run(tmp_path / "a", **shared) as run:
        run.save(0, state("a", 0))
        (tmp_path / "store").rename(tmp_path / "away")
    assert not (tmp_path / "store" / "STORE.json").exists()
    save(tmp_path / "a", [1], **SMALL, store=str(tmp_path / "away"))
    check_steps(tmp_path / "a", range(2))


def test_forgetting_the_root_that_was_here_before(tmp_path, shared, capsys):
    """The one that is here now stays, by location as by the identity that is named."""
    save(tmp_path / "a", [0], **shared)
    gone = uuid_of(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    for name in "ab":
        save(tmp_path / name, range(2), **shared)
    with pytest.raises(NotFoundError, match=f"`orbax-delta forget {gone} --store"):
        prune_now(tmp_path / "b")
    assert forget(tmp_path / "a", "--store", shared["store"], "--yes") == 0
    assert gone in capsys.readouterr().out
    roots = {path.name for path in (tmp_path / "store" / "roots").iterdir()}
    assert roots == {uuid_of(tmp_path / name) for name in "ab"}
    prune_now(tmp_path / "b")
    for name in "ab":
        check_steps(tmp_path / name, range(2))


def test_a_root_that_lost_its_entry_stops_every_prune(tmp_path, shared):
    """Its bases tell of it; its next save, or a word that it is gone, mends it."""
    for name in "ab":
        save(tmp_path / name, range(2), **shared)
    lost = uuid_of(tmp_path / "a")
    (tmp_path / "store" / "roots" / lost).unlink()
    before = packs_of(tmp_path / "store")
    with pytest.raises(NotFoundError, match=rf"a base of root {lost}.* forget {lost}"):
        prune_now(tmp_path / "b")
    assert packs_of(tmp_path / "store") == before
    save(tmp_path / "a", [2], **shared)
    prune_now(tmp_path / "b")
    check_steps(tmp_path / "a", range(3))
    (tmp_path / "store" / "roots" / lost).unlink()
    shutil.rmtree(tmp_path / "a")
    assert forget(lost, "--store", shared["store"], "--yes") == 0
    prune_now(tmp_path / "b")
    check_steps(tmp_path / "b", range(2))
    assert packs_of(tmp_path / "store") < before


def test_two_stores_for_one_root_at_once(tmp_path, monkeypatch):
    """Who is second in giving a root its store is told so, if it is another one."""
    root = Folder(str(tmp_path / "a"))
    real = Folder.create

    def beaten(self, key, data, **named):
        if key == storefiles.ROOT_FILE:
            monkeypatch.setattr(Folder, "create", real)
            registry.open_store(root, str(tmp_path / "first"))
        return real(self, key, data, **named)

    monkeypatch.setattr(Folder, "create", beaten)
    with pytest.raises(ConflictError, match=r"gave .*/a/ another store than .*second"):
        registry.open_store(root, str(tmp_path / "second"))
    assert registry.open_store(root, None).url == f"{tmp_path}/first/"


def test_two_managers_of_one_root_at_once(tmp_path, monkeypatch):
    """Both use the identity of the quicker one."""
    root, where = Folder(str(tmp_path / "a")), str(tmp_path / "store")
    real = Folder.create
    made = []

    def beaten(self, key, data, **named):
        if key == storefiles.ROOT_FILE and not made:
            made.append(None)
            made.append(registry.open_store(root, where).root_uuid)
        return real(self, key, data, **named)

    monkeypatch.setattr(Folder, "create", beaten)
    store = registry.open_store(root, where)
    assert store.root_uuid == made[1]
    assert store.roots.names() == [made[1]]


# --- small files --------------------------------------------------------------------

LINK = storefiles.Link(root_uuid="ab" * 16, store="/store", store_uuid="cd" * 16)
ENTRY = storefiles.Registered(root="/runs/a", root_uuid="ab" * 16)


def test_what_the_small_files_hold_comes_back():
    """Also a location that is no text."""
    for store in ("/store", "s3://bucket/store", {"driver": "s3", "bucket": "b"}):
        link = storefiles.Link(root_uuid="ab" * 16, store=store, store_uuid="cd" * 16)
        assert storefiles.parse_root(storefiles.root_document(link), "it") == link
    document = storefiles.entry_document(ENTRY)
    assert storefiles.parse_entry(document, f"roots/{'ab' * 16}") == ENTRY
    for shared in (True, False):
        document = storefiles.store_document("ab" * 16, shared=shared)
        found = storefiles.Identity(uuid="ab" * 16, shared=shared)
        assert storefiles.parse_store(document, "it") == found


def _changed(data, **changes):
    document = json.loads(data) | changes
    return storefiles.jsontext.sealed(document)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"magic": "other"}, FormatError, "is not the file of a root"),
        ({"format_version": 9}, UnsupportedVersionError, "format version 9.*Upgrade"),
        ({"root_uuid": "x"}, FormatError, "does not say which store"),
        ({"store_uuid": None}, FormatError, "does not say which store"),
        ({"store": ""}, FormatError, "does not say which store"),
        ({"store": "relative"}, FormatError, "does not say which store"),
        ({"store": ["/store"]}, FormatError, "does not say which store"),
    ],
)
def test_links_that_are_refused(tmp_path, changes, error, message):
    """For reading and for saving; nothing is written."""
    folder = Folder(str(tmp_path))
    document = _changed(storefiles.root_document(LINK), **changes)
    folder.child(STORE).write("ROOT.json", document)
    for read in (DeltaStore.open, lambda root: registry.open_store(root, None)):
        with pytest.raises(error, match=message):
            read(folder)
    assert folder.names() == [f"{STORE}/ROOT.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"root_uuid": "cd" * 16}, "is the entry of root cd"),
        ({"root_uuid": 1}, "does not say which root"),
        ({"root": "relative"}, "does not say which root"),
        ({"root": None}, "does not say which root"),
    ],
)
def test_entries_that_are_refused(tmp_path, shared, changes, message, caplog):
    """A prune stops, a verification tells, the next save of the root mends it."""
    save(tmp_path / "a", [0], **shared)
    uuid = uuid_of(tmp_path / "a")
    path = tmp_path / "store" / "roots" / uuid
    good = path.read_bytes()
    path.write_bytes(_changed(good, **changes))
    with pytest.raises(FormatError, match=message):
        prune.plan(open_store(tmp_path / "a"))
    (problem,) = check.verify(str(tmp_path / "a")).problems
    assert problem.file == str(path)
    with caplog.at_level(logging.WARNING, "orbax_delta"):
        save(tmp_path / "a", [1], **shared)
    assert "writes it anew" in caplog.text
    assert path.read_bytes() == good


def test_a_newer_entry_is_left_alone(tmp_path, shared):
    """What a newer package wrote is no damage."""
    save(tmp_path / "a", [0], **shared)
    path = tmp_path / "store" / "roots" / uuid_of(tmp_path / "a")
    path.write_bytes(_changed(path.read_bytes(), format_version=9))
    before = listing(tmp_path)
    with pytest.raises(UnsupportedVersionError, match="format version 9"):
        registry.open_store(Folder(str(tmp_path / "a")), None)
    assert listing(tmp_path) == before


# --- the command line, damage -------------------------------------------------------


def run_json(capsys, *arguments):
    """What a command prints with `--json`."""
    code = cli.main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_command_finds_the_store(tmp_path, shared, capsys):
    """Through the root alone; each root shows its own steps and bases."""
    for name in "ab":
        save(tmp_path / name, range(2), **shared)
    for name in "ab":
        root = tmp_path / name
        code, found = run_json(capsys, "ls", root)
        assert code == 0
        assert found["store"]["url"] == f"{tmp_path}/store/"
        assert found["store"]["shared"] is True
        assert found["store"]["packs"] == len(packs_of(tmp_path / "store"))
        assert [step["step"] for step in found["steps"]] == ["0", "1"]
        assert [base["number"] for base in found["bases"]] == [0]
        _, found = run_json(capsys, "show", root, "1")
        assert found["items"][0]["packs_url"] == f"{tmp_path}/store/packs/"
        code, found = run_json(capsys, "show", root, found["items"][0]["step"])
        assert code == 0
        code, found = run_json(capsys, "verify", root)
        assert (code, found["ok"], found["unnamed_packs"]) == (0, True, [])
        code, found = run_json(capsys, "repair", root)
        assert (code, found["mended"]) == (0, [])
    assert cli.main(["ls", str(tmp_path / "a")]) == 0
    assert f"Shared store {tmp_path}/store/: " in capsys.readouterr().out
    for where in (tmp_path / "a", tmp_path / "store"):
        code, found = run_json(capsys, "prune", where)
        assert code == 0
        assert found["dead"] == []
        assert len(found["manifests"]) == 6


def test_damage_in_a_shared_store(tmp_path, shared, capsys):
    """One file harms both roots; records of either heal the other, repairs last."""
    options = shared | {"refresh_every": 1}
    save(tmp_path / "a", range(2), **options)
    save(tmp_path / "b", range(2), **shared)
    save(tmp_path / "a", range(2, 4), **options)
    named = read_step(tmp_path / "b", 1).manifest.packs
    (pack,) = [
        name
        for name in read_step(tmp_path / "a", 1).manifest.packs
        if name in named and (tmp_path / "store" / "packs" / name).stat().st_size > 9000
    ][:1]
    path = tmp_path / "store" / "packs" / pack
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = check.verify(str(tmp_path / "b"))
    assert {problem.healed_by for problem in report.problems} > {""}
    assert report.whole_steps == ["0", "1"]
    assert all(
        problem.healed_by.startswith(f"{tmp_path}/a/")
        for problem in report.problems
        if problem.leaf
    )
    check_steps(tmp_path / "b", range(2))
    code, found = run_json(capsys, "repair", tmp_path / "b")
    assert found["mended"]
    assert code == 0
    check_steps(tmp_path / "b", range(2))
    shutil.rmtree(tmp_path / "a" / "2")
    shutil.rmtree(tmp_path / "a" / "3")
    run_json(capsys, "repair", tmp_path / "a")
    for name in "ab":
        assert check.verify(str(tmp_path / name)).ok
        check_steps(tmp_path / name, range(2))
    assert prune_now(tmp_path / "a")
    assert not path.exists()


def test_a_shared_store_that_lost_its_identity(tmp_path, shared, capsys):
    """A repair of any root writes it anew, and that it is shared."""
    save(tmp_path / "a", range(2), **shared)
    path = tmp_path / "store" / "STORE.json"
    good = path.read_bytes()
    for data in (None, b"rotten"):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        before = listing(tmp_path)
        with pytest.raises((NotFoundError, FormatError), match=r"STORE\.json"):
            registry.open_store(Folder(str(tmp_path / "a")), None)
        assert cli.main(["prune", str(tmp_path / "a")]) > 1
        assert listing(tmp_path) == before
        with pytest.raises((CorruptionError, FormatError), match=r"STORE\.json"):
            registry.open_store(Folder(str(tmp_path / "b")), shared["store"])
        assert listing(tmp_path) == before
        problem = check.verify(str(tmp_path / "a")).problems[0]
        assert problem.file == str(path)
        assert run_json(capsys, "repair", tmp_path / "a")[0] == 0
        assert path.read_bytes() == good


# --- crashes ------------------------------------------------------------------------

OPTIONS = strategies.LITTLE_OPTIONS


class Job:
    """A run with Orbax's part of a save done by hand, on a shared store."""

    def __init__(self, root: Path, store: Path) -> None:
        options = orbax_delta.DeltaOptions(**OPTIONS, store=str(store))
        self.root = root
        self.committed: dict[int, object] = {}
        self.handler = orbax_delta.DeltaCheckpointHandler(options)

    def save(self, step: int) -> None:
        """The handler writes, then the step gets its name."""
        temporary = self.root / f"{step}{TEMPORARY_SUFFIX}"
        shutil.rmtree(temporary, ignore_errors=True)
        item = temporary / f"default{TEMPORARY_SUFFIX}"
        item.mkdir(parents=True)
        tree = little_state(step)
        self.handler.save(item, orbax_delta.DeltaSave(tree))
        item.rename(temporary / "default")
        temporary.rename(self.root / str(step))
        self.committed[step] = tree

    def check(self) -> None:
        """Every committed step restores."""
        reader = orbax_delta.DeltaCheckpointHandler()
        for step, tree in self.committed.items():
            assert_same_tree(reader.restore(self.root / str(step) / "default"), tree)


def joining(folder):
    """A second run joins a store; the operations of that are what is broken."""
    first = Job(folder / "a", folder / "store")
    first.save(0)
    first.save(1)
    return first, Job(folder / "b", folder / "store")


def test_a_crash_at_every_operation_of_joining(tmp_path, record_property):
    """The first save of a run dies; the other run, prunes and a second try go on."""
    with testing.new_life():
        first, second = joining(tmp_path / "count")
        with testing.faults() as log:
            second.save(0)
            second.save(1)
    kinds = ("write", "create", "delete", "clear")
    tried = [
        (operation.number, when)
        for before, operation in itertools.pairwise(log.operations)
        for when in ("before", "after")
        # Just before a change is just after the one before.
        if operation.kind in kinds and (when == "after" or before.kind not in kinds)
    ]
    assert len(tried) > 20
    for number, when in tried:
        with labelled(f"died {when} operation {number}"):
            folder = tmp_path / "try"
            with testing.new_life():
                first, second = joining(folder)
                with (
                    contextlib.suppress(testing.SimulatedCrash),
                    testing.faults(testing.crash_at(number, when)) as log,
                ):
                    second.save(0)
                    second.save(1)
                assert log.crashed
            with testing.new_life():
                life_after(folder, first, second)
            shutil.rmtree(folder)
    record_property("crash_points", len(tried))


def life_after(folder, first, second):
    """Everything committed is whole, every prune works, the run can be tried again."""
    for job in (first, second):
        job.check()
    prune_now(first.root)
    for job in (first, second):
        job.check()
    again = Job(second.root, folder / "store")
    again.committed = second.committed
    step = max(again.committed, default=-1) + 1
    again.save(step)
    again.handler.close()
    store = folder / "store"
    assert len(list((store / "roots").iterdir())) == 2
    for left in second.root.glob(f"*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(left)
    prune_now(second.root)
    for job in (first, again):
        job.check()
        assert check.verify(str(job.root)).ok
    named = set().union(*map(packs_named, (first.root, second.root, store)))
    assert packs_of(store) == named
    assert not list((store / "pins").iterdir())


def test_a_full_disk_at_every_write_of_joining(tmp_path, record_property):
    """An error, nothing lost, and the next save is right."""
    _, second = joining(tmp_path / "count")
    with testing.faults() as log:
        second.save(0)
    writes = sum(operation.kind in ("write", "create") for operation in log.operations)
    assert writes > 10
    for number in range(1, writes + 1):
        folder = tmp_path / "try"
        first, second = joining(folder)
        match = testing.Match(kind=("write", "create"), first=number, times=1)
        # What comes after the MANIFEST cannot fail a save.
        full = testing.fail(errno.ENOSPC, match)
        with contextlib.suppress(StorageError), testing.faults(full):
            second.save(0)
        second.save(1)
        second.handler.close()
        first.handler.close()
        for job in (first, second):
            job.check()
            assert check.verify(str(job.root)).ok
        assert len(list((folder / "store" / "roots").iterdir())) == 2
        shutil.rmtree(folder)
    record_property("failures", writes)
