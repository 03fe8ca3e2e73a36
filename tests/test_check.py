"""Verification: silent on what is whole; finds, names and passes every damage."""

import dataclasses
import json
import shutil
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import orbax.checkpoint as ocp
import pytest
import roots
import strategies
from etils import epath
from strategies import STORE, packs_named, packs_on_disk, read_manifest, read_step

import orbax_delta
from orbax_delta import (
    check,
    cli,
    codecs,
    errors,
    owners,
    parts,
    prune,
    reader,
    records,
)
from orbax_delta.codecs import Form
from orbax_delta.dtypes import Rule
from orbax_delta.errors import CorruptionError, DeltaError, FormatError, NotFoundError
from orbax_delta.findings import Problem
from orbax_delta.manifests import encode_manifest
from orbax_delta.marks import Mark
from orbax_delta.owners import Owner
from orbax_delta.store import DeltaStore, Folder, store_document

PIN = Mark(owner=Owner(host="elsewhere", pid=7, start=""), packs=[]).encode()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A healthy root without kept bases, that no test changes."""
    return roots.make(tmp_path_factory.mktemp("made") / "run", keep_bases=0)


@pytest.fixture
def run(made, root):
    """A copy of the healthy root, to be damaged."""
    shutil.copytree(made, root)
    return root


def step_names(*numbers):
    """Steps as verification names them."""
    return tuple(map(str, numbers))


def files(report):
    """The files that a report blames."""
    return {problem.file for problem in report.problems}


def flip(path: Path, position: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def restores(root: Path, step: str) -> bool:
    """Whether a handler restores a step, bit for bit."""
    handler = orbax_delta.DeltaCheckpointHandler()
    try:
        tree = handler.restore(epath.Path(root / step / "default"))
    except DeltaError:
        return False
    strategies.assert_same_tree(tree, roots.state(int(step)))
    return True


def test_healthy_root(made):
    """Nothing is wrong with full, sparse, constant, derived, copied, sharded chunks."""
    rows = [row for number in roots.STEPS for row in read_step(made, number).rows]
    forms = {ref.form for row in rows for ref in row.refs}
    assert {Form.CONSTANT, Form.PLANES, Form.SPARSE} <= forms
    assert any(row.rule is Rule.F32_TO_BF16 for row in rows)
    report = check.verify(str(made))
    assert report.problems == []
    assert report.ok
    assert report.steps == tuple(report.whole_steps) == step_names(*roots.STEPS)
    assert report.vanished == ()
    assert report.chunks == len(rows)
    lists = {(row.refs, row.rule, row.digest) for row in rows}
    assert report.chunks_decoded == len(lists) < len(rows)
    packs = made / STORE / "packs"
    assert report.packs == len(packs_named(made)) > len(roots.STEPS)
    assert report.pack_bytes == strategies.disk_bytes(packs)
    assert report.unnamed_packs == []


def test_nothing_is_changed(made):
    """Verification leaves every file as it is."""
    before = strategies.listing(made)
    check.verify(str(made))
    assert strategies.listing(made) == before


def test_some_steps(made):
    """Only the named steps are looked at, by number or by folder."""
    report = check.verify(str(made), ["3", "0005"])
    assert report.ok
    assert report.steps == step_names(3, 5)
    assert report.chunks == sum(len(read_step(made, n).rows) for n in (3, 5))


def test_one_step_by_its_folder(made):
    """The folder of a step, or of its item, can be named instead of the root."""
    for folder in (made / "4", made / "4" / "default"):
        report = check.verify(str(folder))
        assert report.ok
        assert report.steps == ("4",)
        assert report.packs == len(read_manifest(made / "4/default/MANIFEST").packs)


def test_progress_is_complete(made):
    """Each thing counted goes up by what is done and ends at its total."""
    told = []
    report = check.verify(str(made), progress=lambda *what: told.append(what))
    totals = {"MANIFESTs": 4, "packs": report.packs, "chunks": report.chunks}
    for what, total in totals.items():
        seen = [(done, of) for name, done, of in told if name == what]
        assert {of for _, of in seen} == {total}
        counts = [done for done, _ in seen]
        assert counts == sorted(set(counts))
        assert counts[-1] == total


@st.composite
def damages(draw):
    """Which file, and what happens to it."""
    kind = draw(st.sampled_from(["flip", "cut", "append", "zero", "delete", "empty"]))
    return draw(st.integers(0, 10_000)), kind, draw(st.floats(0, 1, exclude_max=True))


def damage(path: Path, kind: str, share: float) -> None:
    """Damage one file; `share` says where in it."""
    data = path.read_bytes()
    position = int(len(data) * share)
    if kind == "flip":
        flip(path, position)
    elif kind == "cut":
        path.write_bytes(data[:position])
    elif kind == "append":
        path.write_bytes(data + b"\0")
    elif kind == "zero":
        path.write_bytes(bytes(len(data)))
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@hypothesis.given(damages())
def test_any_damage_is_found(made, what):
    """A file damaged in any way is blamed; whole steps are just those that restore."""
    number, kind, share = what
    candidates = [
        *sorted((made / STORE / "packs").iterdir()),
        *sorted(made.glob("*/default/part-*")),
        *sorted(made.glob("*/default/MANIFEST")),
    ]
    path = candidates[number % len(candidates)]
    if kind == "delete" and path.name == "MANIFEST":
        kind = "empty"  # a step without MANIFEST is none
    data = path.read_bytes()
    try:
        damage(path, kind, share)
        report = check.verify(str(made))
        whole = [str(n) for n in roots.STEPS if restores(made, str(n))]
    finally:
        path.write_bytes(data)
    assert str(path.relative_to(made)) in files(report)
    assert not report.ok
    assert report.whole_steps == whole


def test_a_damaged_record_names_leaf_chunk_and_steps(run):
    """A record that several steps need: each chunk made of it, with all of them."""
    steps = {str(n): read_step(run, n) for n in roots.STEPS}
    leaves = steps["2"].manifest.leaves
    (first, *_) = (
        row for row in steps["2"].rows if leaves[row.leaf].name == "params/w"
    )
    record = first.refs[0]
    flip(run / STORE / "packs" / record.pack, record.offset + record.length // 2)
    expected = {}
    for name, step in steps.items():
        for row in step.rows:
            if record in row.refs:
                box = ", ".join(f"{start}:{stop}" for start, stop in row.box)
                key = leaves[row.leaf].name, f"[{box}]", len(row.refs)
                expected.setdefault(key, []).append(name)
    report = check.verify(str(run))
    chunks = [problem for problem in report.problems if problem.leaf]
    assert {leaf for leaf, _, _ in expected} == {
        "params/w",
        "params/half",
        "params/copy",
    }
    assert sorted((p.leaf, p.chunk, p.steps) for p in chunks) == sorted(
        (leaf, chunk, tuple(names)) for (leaf, chunk, _), names in expected.items()
    )
    assert {problem.file for problem in chunks} == {f"{STORE}/packs/{record.pack}"}
    assert {problem.item for problem in chunks} == {"default"}
    assert all("checksum" in problem.what for problem in chunks)


def test_one_damage_does_not_hide_another(run):
    """A lost pack, a damaged part and a damaged MANIFEST are all found at once."""
    lost = sorted(read_manifest(run / "2/default/MANIFEST").packs)[0]
    (run / STORE / "packs" / lost).unlink()
    (part,) = (run / "3/default").glob("part-*")
    flip(part, 100)
    flip(run / "4/default/MANIFEST", 300)
    report = check.verify(str(run))
    assert {
        f"{STORE}/packs/{lost}",
        str(part.relative_to(run)),
        "4/default/MANIFEST",
    } <= files(report)
    by_pack = Problem(
        what="the pack is missing",
        file=f"{STORE}/packs/{lost}",
        steps=tuple(
            str(n)
            for n in (2, 3, 5)
            if lost in read_manifest(run / f"{n}/default/MANIFEST").packs
        ),
    )
    assert by_pack in report.problems


def _idle_records(run):
    """A record of a needed pack that no step needs, or none, with ever fewer steps."""
    for first in range(len(roots.STEPS)):
        needed = {
            (ref.pack, ref.offset)
            for number in roots.STEPS[first:]
            for row in read_step(run, number).rows
            for ref in row.refs
        }
        names = {name for name, _ in needed}
        packs = [p for p in (run / STORE / "packs").iterdir() if p.name in names]
        yield next(
            (
                (pack, offset)
                for pack in sorted(packs)
                for offset, _ in records.parse_pack(memoryview(pack.read_bytes())).spans
                if (pack.name, offset) not in needed
            ),
            None,
        )
        shutil.rmtree(run / str(roots.STEPS[first]))


def test_damage_that_no_step_needs(run):
    """A bad record that nothing refers to is a problem, but every step is whole."""
    pack, offset = next(idle for idle in _idle_records(run) if idle)
    flip(pack, offset + 40)
    report = check.verify(str(run))
    (problem,) = report.problems
    assert problem.file == f"{STORE}/packs/{pack.name}"
    assert f"at {offset}" in problem.what
    assert problem.leaf == ""
    assert list(report.steps) == list(report.whole_steps)


def test_packs_that_changed_names(run):
    """Two intact packs under each other's names do not belong to their headers."""
    packs = run / STORE / "packs"
    first, second = sorted(packs.iterdir())[:2]
    first.rename(packs / "aside")
    second.rename(first)
    (packs / "aside").rename(second)
    report = check.verify(str(run))
    said = {p.file for p in report.problems if "not what its name says" in p.what}
    assert said == {f"{STORE}/packs/{first.name}", f"{STORE}/packs/{second.name}"}


def test_a_pack_that_cannot_be_read(run):
    """A folder in a pack's place fails to be read, and the rest is still looked at."""
    names = sorted(read_manifest(run / "2/default/MANIFEST").packs)
    path = run / STORE / "packs" / names[0]
    path.unlink()
    path.mkdir()
    report = check.verify(str(run))
    assert files(report) == {f"{STORE}/packs/{names[0]}"}
    assert "2" not in report.whole_steps
    assert report.chunks == sum(len(read_step(run, n).rows) for n in roots.STEPS)


def test_parts_of_two_steps_exchanged(run):
    """A whole part of another step is not taken for the step's own."""
    (two,) = (run / "2/default").glob("part-*")
    (three,) = (run / "3/default").glob("part-*")
    two.write_bytes(three.read_bytes())
    report = check.verify(str(run))
    assert files(report) == {f"2/default/{two.name}"}
    assert report.whole_steps == ["3", "4", "5"]


def test_store_file_missing(run):
    """Without STORE.json nothing restores; what verification prints mends that."""
    path = run / STORE / "STORE.json"
    path.unlink()
    report = check.verify(str(run))
    assert files(report) == {f"{STORE}/STORE.json"}
    assert report.whole_steps == []
    first = report.problems[0]
    assert first.steps == ()
    path.write_text(first.what.partition("must hold ")[2])
    assert check.verify(str(run)).ok


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not the file of a delta store"),
        (b'{"magic": "orbax-delta-store", "format_version": 1}', "its digest is"),
        (b'{"magic": 1, "magic": "orbax-delta-store"}', "names 'magic' twice"),
        (b'{"magic": "orbax-delta-store", "format_version": 9}', "format version 9"),
    ],
)
def test_store_file_damaged(run, content, message):
    """A damaged STORE.json is the store's problem and that of every step."""
    (run / STORE / "STORE.json").write_bytes(content)
    report = check.verify(str(run))
    assert files(report) == {f"{STORE}/STORE.json"}
    assert message in report.problems[0].what
    assert "must hold" in report.problems[0].what
    assert report.whole_steps == []


def test_store_of_another_root(run):
    """Steps whose store was replaced say which store they need."""
    path = run / STORE / "STORE.json"
    document = json.loads(path.read_text())
    path.write_bytes(store_document("f" * 32))
    report = check.verify(str(run))
    assert report.whole_steps == []
    assert all(document["uuid"] in problem.what for problem in report.problems)


def test_marker_missing(run):
    """The file that keeps Orbax from deleting the store is missed."""
    (run / STORE / "commit_success.txt").unlink()
    report = check.verify(str(run))
    assert files(report) == {f"{STORE}/commit_success.txt"}
    assert list(report.whole_steps) == list(report.steps)


@pytest.mark.parametrize("folder", ["pins", "condemned"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is damaged"),
        (b"notes", "is damaged"),
        (b'{"format_version": 3}', "format version 3"),
        (PIN, "is not named like a"),
        (PIN.replace(b"7", b"8"), "remove it. Until then prune refuses to run"),
    ],
    ids=["cut", "foreign", "newer", "foreign name", "damaged"],
)
def test_marks_damaged(run, folder, content, message):
    """A damaged, newer or foreign pin or mark stops or misleads prune: a problem."""
    (run / STORE / folder).mkdir(exist_ok=True)
    (run / STORE / folder / "some").write_bytes(content)
    report = check.verify(str(run))
    (problem,) = report.problems
    assert problem.file == f"{STORE}/{folder}/some"
    assert message in problem.what


def test_a_marker_that_is_not_empty(run):
    """The marker holds nothing; what wrote into it did not know the store."""
    (run / STORE / "commit_success.txt").write_bytes(b"ok")
    (problem,) = check.verify(str(run)).problems
    assert problem.file == f"{STORE}/commit_success.txt"
    assert "holds 2 bytes, not none" in problem.what


@pytest.mark.parametrize("name", ["notes.txt", "sub/x"])
def test_foreign_file_among_packs(run, name):
    """A file that is no pack stops prune, so it is a problem."""
    Folder(str(run / STORE / "packs")).write(name, b"mine")
    report = check.verify(str(run))
    assert files(report) == {f"{STORE}/packs/{name}"}
    with pytest.raises(FormatError, match=r"not named like a pack.*Move it away"):
        prune.plan(DeltaStore.open(Folder(str(run))))


def test_files_of_the_file_system(run):
    """Dot files and unfinished writes of killed processes stop nothing: no problem."""
    for folder in ("packs", "pins", "condemned"):
        (run / STORE / folder).mkdir(exist_ok=True)
        (run / STORE / folder / ".nfs00001").write_bytes(b"?")
        (run / STORE / folder / f"{'0f' * 16}-p0-0.__lock").write_bytes(b"half")
    assert check.verify(str(run)).ok
    prune.plan(DeltaStore.open(Folder(str(run))))


def test_foreign_file_called_manifest(run):
    """It stops prune, which says so as verification does: move it away."""
    (run / "src").mkdir()
    (run / "src" / "MANIFEST").write_text("include README.md")
    report = check.verify(str(run))
    assert files(report) == {"src/MANIFEST"}
    assert list(report.whole_steps) == ["2", "3", "4", "5"]
    with pytest.raises(FormatError, match=r"src/MANIFEST .*move it out of this root"):
        prune.plan(DeltaStore.open(Folder(str(run))))


def test_a_step_that_lost_its_manifest(run, capsys):
    """Beside its part it is still a step, which does not restore."""
    (run / "3/default/MANIFEST").unlink()
    report = check.verify(str(run))
    (problem,) = report.problems
    assert problem.file == "3/default/MANIFEST"
    assert (problem.steps, problem.item) == (("3",), "default")
    assert "holds no MANIFEST, beside part-" in problem.what
    assert "Put the MANIFEST back from a copy, or delete the folder" in problem.what
    assert report.steps == ("2", "3", "4", "5")
    assert report.whole_steps == ["2", "4", "5"]
    assert check.verify(str(run), ["2", "4", "5"]).ok
    assert cli.main(["ls", str(run)]) == CorruptionError.exit_code
    out = capsys.readouterr().out
    assert "3     default  damaged" in out
    assert "step 3, item 'default'" in out
    assert cli.main(["show", str(run), "3"]) == CorruptionError.exit_code
    # Nothing is said of it once the folder has gone.
    shutil.rmtree(run / "3")
    assert check.verify(str(run)).ok


def test_one_of_two_items_lost_its_manifest(root):
    """The other item is whole; the step is not."""
    registry = orbax_delta.handler_registry(item=("params", "opt"), keep_bases=0)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in range(2):
            tree = {"w": np.arange(10.0) + step}
            saves = {name: ocp.args.StandardSave(tree) for name in ("params", "opt")}
            manager.save(step, args=ocp.args.Composite(**saves))
            manager.wait_until_finished()
    assert check.verify(str(root)).ok
    (root / "1/opt/MANIFEST").unlink()
    report = check.verify(str(root))
    assert [(p.steps, p.item) for p in report.problems] == [(("1",), "opt")]
    assert report.whole_steps == ["0"]


def test_a_lost_manifest_of_a_self_contained_checkpoint(tmp_path):
    """Its packs lie beside it, so it is no step of a manager."""
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        tree = {"w": np.arange(2000.0)}
        checkpointer.save(tmp_path / "runs3/7", args=orbax_delta.DeltaSave(tree))
    (tmp_path / "runs3/7/MANIFEST").unlink()
    report = check.verify(str(tmp_path / "runs3"))
    assert [(p.file, p.steps) for p in report.problems] == [("7/MANIFEST", ("7",))]


def test_a_step_that_goes_while_its_manifest_is_missed(run):
    """A deletion that takes the MANIFEST first is no loss once it is done."""
    (run / "3/default/MANIFEST").unlink()

    def delete(what, done, total):
        if what == "packs":
            shutil.rmtree(run / "3", ignore_errors=True)

    report = check.verify(str(run), progress=delete)
    assert report.ok
    assert report.vanished == ("3",)


def test_the_newest_step_of_a_running_job_lost_its_manifest(tmp_path):
    """Its pin stays until the next save, and hides nothing."""
    with strategies.open_run(tmp_path / "run") as opened:
        opened.save(0, roots.state(0))
        (tmp_path / "run/0/default/MANIFEST").unlink()
        report = check.verify(str(tmp_path / "run"))
    assert files(report) == {"0/default/MANIFEST"}


@pytest.mark.parametrize(
    ("pinned", "lost"),
    [("live", False), ("elsewhere", False), ("dead", True), ("damaged", True)],
)
def test_a_save_that_has_not_put_its_manifest_yet(run, pinned, lost):
    """Where a marker commits a step it is written under its final name: no problem."""
    attempt = "0f" * 16
    (run / "9/default").mkdir(parents=True)
    (run / f"9/default/part-{attempt}-p0").write_bytes(b"")
    me = owners.this_process()
    owner = {
        "live": me,
        "damaged": me,
        "elsewhere": dataclasses.replace(me, host="elsewhere"),
        "dead": dataclasses.replace(me, start="0"),
    }[pinned]
    pin = run / STORE / "pins" / f"{attempt}-p0"
    pin.parent.mkdir(exist_ok=True)
    pin.write_bytes(Mark(owner=owner, packs=[]).encode()[pinned == "damaged" :])
    said = files(check.verify(str(run)))
    assert ("9/default/MANIFEST" in said) == lost
    assert (f"{STORE}/pins/{pin.name}" in said) == (pinned == "damaged")


def test_temporary_folders(run):
    """A part without MANIFEST, or a MANIFEST, in one is what a crash leaves there."""
    for name, tmp in (("6", "default.orbax-checkpoint-tmp"), ("7", "default")):
        folder = run / f"{name}.orbax-checkpoint-tmp" / tmp
        shutil.copytree(run / "5/default", folder)
    (run / "6.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp/MANIFEST").unlink()
    assert check.verify(str(run)).ok


def test_saves_under_way_and_other_handlers(root, monkeypatch):
    """Looked at just before and after each write of a save, all is well."""
    found = []
    with ocp.CheckpointManager(root) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.arange(10.0)}))
    strategies.skip_disk_sync(monkeypatch)
    write = Folder.write

    def looked_at(self, key, data):
        if root.exists() and not key.startswith("STORE"):
            found.append(check.verify(str(root)).problems)
        write(self, key, data)
        found.append(check.verify(str(root)).problems)

    with strategies.open_run(root, chunk_bytes=4096, pack_bytes=8192) as run:
        for step in range(1, 4):
            run.save(step, roots.state(step))
        monkeypatch.setattr(Folder, "write", looked_at)
        for step in range(4, 6):
            run.save(step, roots.state(step))
    assert found == [[]] * len(found)
    assert len(found) > 10


def test_a_step_copied_to_another_number(run):
    """It restores, as what it was and not what its name says; both are named."""
    shutil.copytree(run / "3", run / "9")
    report = check.verify(str(run))
    misnamed, copied = report.problems
    assert (misnamed.file, misnamed.steps) == ("9/default/MANIFEST", ("9",))
    assert "by its MANIFEST it is step 3" in misnamed.what
    assert "Give the folder its right name, or delete it" in misnamed.what
    assert copied.steps == ("3", "9")
    assert "3/default, 9/default are one save" in copied.what
    assert report.whole_steps == ["2", "3", "4", "5", "9"]
    shutil.rmtree(run / "9")
    assert check.verify(str(run)).ok


def test_two_steps_exchanged(run):
    """Each is called what the other is."""
    (run / "3").rename(run / "x")
    (run / "4").rename(run / "3")
    (run / "x").rename(run / "4")
    report = check.verify(str(run))
    assert [(p.file, p.steps) for p in report.problems] == [
        ("3/default/MANIFEST", ("3",)),
        ("4/default/MANIFEST", ("4",)),
    ]
    assert "it is step 4" in report.problems[0].what
    assert "it is step 3" in report.problems[1].what


def test_an_item_under_another_name(run):
    """The MANIFEST knows the name of its item."""
    (run / "4/default").rename(run / "4/params")
    (problem,) = check.verify(str(run)).problems
    assert (problem.file, problem.item) == ("4/params/MANIFEST", "params")
    assert "it is item 'default', not 'params'" in problem.what


def test_links_to_steps(run):
    """`latest` is no copy, wherever it points."""
    (run / "latest").symlink_to(run / "5")
    assert check.verify(str(run)).ok


def test_copies_that_anybody_may_make(tmp_path):
    """A self-contained checkpoint may be copied and renamed."""
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        args = orbax_delta.DeltaSave({"w": np.arange(2000.0)})
        checkpointer.save(tmp_path / "runs/final", args=args)
    for name in ("7", "other"):
        shutil.copytree(tmp_path / "runs/final", tmp_path / "runs" / name)
    assert check.verify(str(tmp_path / "runs")).ok


@pytest.mark.parametrize("damaged", ["final", "other"])
def test_damage_to_one_of_two_copies(tmp_path, damaged):
    """Packs of one name in two folders are two packs: the other copy is whole."""
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        args = orbax_delta.DeltaSave({"w": np.arange(2000.0)})
        checkpointer.save(tmp_path / "runs/final", args=args)
    shutil.copytree(tmp_path / "runs/final", tmp_path / "runs/other")
    (pack,) = (tmp_path / "runs" / damaged / "packs").iterdir()
    flip(pack, 60)
    report = check.verify(str(tmp_path / "runs"))
    assert [name for name in report.steps if name not in report.whole_steps] == [
        damaged
    ]
    assert {name for p in report.problems for name in p.steps} == {damaged}


def test_a_folder_that_was_listed_twice(run):
    """One that is renamed while it is listed can be found under both names."""
    shutil.copytree(run / "4", run / "step_4")
    (problem,) = check.verify(str(run)).problems
    assert problem.steps == ("4", "step_4")

    def renamed(what, done, total):
        if what == "MANIFESTs" and done == total:
            shutil.rmtree(run / "4")

    report = check.verify(str(run), progress=renamed)
    assert report.ok
    assert "step_4" in report.whole_steps


def test_newer_manifest(run):
    """A MANIFEST of a newer format is a problem of its step alone."""
    path = run / "3/default/MANIFEST"
    path.write_bytes(path.read_bytes().replace(b"MANIFEST 1 ", b"MANIFEST 7 ", 1))
    report = check.verify(str(run))
    (problem,) = report.problems
    assert problem.steps == ("3",)
    assert "format version 7" in problem.what
    assert report.whole_steps == ["2", "4", "5"]


def test_unnamed_packs_are_garbage(run):
    """Packs that no step names are counted and are no problem."""
    before = packs_on_disk(run)
    shutil.rmtree(run / "2")
    dead = before - packs_named(run)
    assert dead
    report = check.verify(str(run))
    assert report.ok
    assert report.unnamed_packs == sorted(dead)


def test_steps_in_a_trash_folder(run):
    """Steps that Orbax moved below the root are looked at under their folder's name."""
    (run / "trash").mkdir()
    (run / "2").rename(run / "trash" / "2")
    report = check.verify(str(run))
    assert report.ok
    assert sorted(report.steps) == ["3", "4", "5", "trash/2"]


def test_a_step_that_goes_meanwhile(run):
    """A step deleted and pruned in the middle is left out, whatever was found of it."""
    only_two = set(read_manifest(run / "2/default/MANIFEST").packs)
    for number in (3, 4, 5):
        only_two -= set(read_manifest(run / f"{number}/default/MANIFEST").packs)
    assert only_two

    def delete(what, done, total):
        if what == "MANIFESTs" and done == total:
            shutil.rmtree(run / "2")
            for name in only_two:
                (run / STORE / "packs" / name).unlink()

    report = check.verify(str(run), progress=delete)
    assert report.ok
    assert report.vanished == ("2",)
    assert report.steps == step_names(3, 4, 5)


@pytest.mark.parametrize("name", ["final", "7"])
def test_self_contained_checkpoint(tmp_path, name):
    """A plain Checkpointer's save is verified with the packs beside its MANIFEST."""
    folder = tmp_path / "models3" / name
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        tree = {"w": np.arange(2000.0)}
        checkpointer.save(folder, args=orbax_delta.DeltaSave(tree))
    for place in (folder, folder.parent):
        report = check.verify(str(place))
        assert report.ok
        assert report.steps == (name,)
        assert report.chunks == 1
    (pack,) = (folder / "packs").iterdir()
    flip(pack, 60)
    report = check.verify(str(folder))
    assert [(p.leaf, p.steps) for p in report.problems] == [
        ("", (name,)),
        ("w", (name,)),
    ]
    assert files(report) == {f"packs/{pack.name}"}


def test_no_such_step(made):
    """A step that is not there is named with those that are."""
    with pytest.raises(NotFoundError, match=r"no step '9'.*there are 2, 3, 4, 5"):
        check.verify(str(made), ["3", "9"])


def test_nothing_to_verify(tmp_path):
    """A folder that is missing, or holds nothing of the package, is an error."""
    with pytest.raises(NotFoundError, match="there is no folder"):
        check.verify(str(tmp_path / "none"))
    with pytest.raises(NotFoundError, match="holds no _delta_store and no MANIFEST"):
        check.verify(str(tmp_path))


def test_a_folder_inside_the_store(made):
    """Who names the store's folder is told the root."""
    with pytest.raises(NotFoundError, match=f"A store lies in {made}; name that"):
        check.verify(str(made / STORE))


def test_an_error_is_never_taken_for_health(run, monkeypatch):
    """A store that fails in the middle of decoding leaves its step a problem."""
    fetch = reader.fetch

    def failing(*arguments, **named):
        yield next(fetch(*arguments, **named))
        raise errors.StorageError("the network is gone")

    monkeypatch.setattr(reader, "fetch", failing)
    report = check.verify(str(run), ["3"])
    assert [problem.what for problem in report.problems] == ["the network is gone"]
    assert report.whole_steps == []


def test_corrupted_content_behind_a_good_checksum(run):
    """A record that is intact but not the one that the row means is found by digest."""
    step = read_step(run, 5)
    leaves = step.manifest.leaves
    record = next(row.refs[0] for row in step.rows if leaves[row.leaf].name == "noise")
    path = run / STORE / "packs" / record.pack
    data = bytearray(path.read_bytes())
    span = slice(record.offset, record.offset + record.length)
    parsed = records.parse_record(memoryview(bytes(data[span])))
    content = codecs.decode(
        parsed.form, parsed.payload, None, parsed.content_bytes, parsed.word_bytes
    )
    content[0] ^= 1
    payload = codecs.encode_full(content, parsed.word_bytes)
    assert len(payload) == len(parsed.payload)
    data[span] = dataclasses.replace(parsed, payload=payload).encode()
    path.write_bytes(data)
    report = check.verify(str(run))
    (problem,) = report.problems
    assert (problem.leaf, problem.steps) == ("noise", ("5",))
    assert "its content has digest" in problem.what
    with pytest.raises(CorruptionError, match="leaf noise"):
        orbax_delta.DeltaCheckpointHandler().restore(epath.Path(run / "5/default"))


def test_one_of_two_steps_expects_other_content(run):
    """A list that is right for one step is still checked against what another says."""
    number, wrong = next(
        (number, row)
        for number in (3, 4, 5)
        for earlier in [{row.refs for row in read_step(run, number - 1).rows}]
        for row in read_step(run, number).rows
        if row.refs in earlier and row.refs[0].pack and row.rule is Rule.NONE
    )
    step = read_step(run, number)
    manifest = step.manifest
    leaf = manifest.leaves[wrong.leaf].name
    rows = [
        dataclasses.replace(row, digest=bytes(16)) if row == wrong else row
        for row in step.rows
    ]
    data = parts.encode_part(bytes.fromhex(manifest.attempt), rows, manifest.packs)
    (part,) = manifest.parts
    part = dataclasses.replace(
        part, length=len(data), digest=records.digest(data).hex()
    )
    (run / f"{number}/default" / part.name).write_bytes(data)
    (run / f"{number}/default/MANIFEST").write_bytes(
        encode_manifest(dataclasses.replace(manifest, parts=[part]))
    )
    report = check.verify(str(run))
    (problem,) = report.problems
    assert (problem.leaf, problem.steps) == (leaf, (str(number),))
    assert f"expected {'0' * 32}" in problem.what
    assert report.whole_steps == [str(n) for n in roots.STEPS if n != number]
