"""The command line: what each command shows and changes, its JSON, its exit codes."""

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys

import hypothesis
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import roots
import strategies
from hypothesis import strategies as st
from rich.console import Console
from strategies import STORE, open_run, packs_named, packs_on_disk, read_step

import orbax_delta
from orbax_delta import check, cli, demo, errors, owners, views
from orbax_delta.manifests import encode_manifest
from orbax_delta.marks import Mark
from orbax_delta.reports import human_bytes
from orbax_delta.store import DeltaStore, Folder

# ls


def test_ls(made, command):
    """One line a step with what its save wrote, and the store's totals at the end."""
    code, out, err = command("ls", made)
    assert (code, err) == (0, "")
    head, *steps, last, kept = roots.lines_of(out)
    assert kept[0].startswith("Kept whatever is deleted: the state of step 1. More: ")
    assert head == [
        *("step", "item", "saved at", "raw", "written", "smaller", "packs"),
        *("records", "after"),
    ]
    assert [line[0] for line in steps] == ["2", "3", "4", "5"]
    for line in steps:
        report = orbax_delta.save_report(made / line[0])
        assert line[1] == "default"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", line[2])
        assert line[3] == human_bytes(report.full_bytes)
        assert line[4] == human_bytes(report.written_bytes)
        assert line[5] == f"{report.times_smaller:.2f}"
        assert line[7] == (
            f"{report.records_per_chunk_mean:.2f}/{report.records_per_chunk_max}"
        )
        assert line[8] == str(int(line[0]) - 1)
    packs = made / STORE / "packs"
    total = human_bytes(strategies.disk_bytes(packs))
    assert last[0].startswith(f"Store: {len(packs_on_disk(made))} packs ({total}).")


def test_ls_of_bases_of_several_items(tmp_path, command):
    """A step is named once; a damaged base keeps none, whatever digits end its name."""
    root = tmp_path / "run"
    names = ("opt", "params")
    registry = orbax_delta.handler_registry(item=names)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        trees = {name: orbax_delta.DeltaSave({"w": np.ones(9)}) for name in names}
        manager.save(3, args=ocp.args.Composite(**trees))
        manager.wait_until_finished()
    code, out, _ = command("ls", root)
    assert code == 0
    assert "the state of step 3. More" in out
    for base in (root / STORE / "bases").iterdir():
        (base / "MANIFEST").write_bytes(b"garbled")
        base.rename(base.with_name(base.name[:-2] + "d7"))
    code, out, _ = command("ls", "--bases", root)
    assert code == errors.FormatError.exit_code
    assert "Kept" not in out
    assert [line[0] for line in roots.lines_of(out)[1:3]] == ["-", "-"]


def test_ls_as_json(made, document):
    """The same as numbers."""
    code, found = document("ls", made)
    assert code == 0
    assert set(found) == {"root", "store", "steps", "bases", "other_steps"}
    assert found["root"] == f"{made}/"
    assert found["store"] == {
        "url": f"{made}/{STORE}/",
        "uuid": DeltaStore.open(Folder(str(made))).uuid,
        "shared": False,
        "packs": len(packs_on_disk(made)),
        "bytes": strategies.disk_bytes(made / STORE / "packs"),
    }
    assert [entry["number"] for entry in found["steps"]] == list(roots.STEPS)
    for entry in found["steps"]:
        report = orbax_delta.save_report(made / entry["step"])
        manifest = read_step(made, entry["number"]).manifest
        saved_at = entry.pop("saved_at")
        assert saved_at.endswith(("Z", "+00:00")) or re.search(
            r"[+-]\d\d:\d\d$", saved_at
        )
        assert entry == {
            "step": str(entry["number"]),
            "number": entry["number"],
            "item": "default",
            "finished": True,
            "full_bytes": report.full_bytes,
            "written_bytes": report.written_bytes,
            "times_smaller": report.times_smaller,
            "packs": len(manifest.packs),
            "self_contained": False,
            "records_per_chunk_mean": report.records_per_chunk_mean,
            "records_per_chunk_max": report.records_per_chunk_max,
            "predecessor": str(entry["number"] - 1),
            "key_id": None,
        }


def test_ls_reads_only_manifests(run, command):
    """Neither packs nor parts are needed for a list."""
    for path in (*(run / STORE / "packs").iterdir(), *run.glob("*/default/part-*")):
        path.write_bytes(b"?")
    code, out, _ = command("ls", run)
    assert code == 0
    assert len(roots.lines_of(out)) == 7


def test_ls_of_a_damaged_root(run, command, document):
    """A damaged MANIFEST is a line of its own, and every other step is listed."""
    (run / "3/default/MANIFEST").write_bytes(b"?")
    code, out, _ = command("ls", run)
    assert code == 20
    assert [line[0] for line in roots.lines_of(out)[1:5]] == ["2", "3", "4", "5"]
    assert roots.lines_of(out)[2] == ["3", "default", "damaged"]
    assert "3/default/MANIFEST does not begin with" in out.splitlines()[-1]
    code, found = document("ls", run)
    assert code == 20
    assert found["steps"][1]["error"]["kind"] == "format"
    assert found["steps"][2]["packs"] > 0


def test_ls_of_a_step_with_a_damaged_report(run, command, document):
    """A report that cannot be read is said, and keeps nothing from being restored."""
    path = run / "3/default/MANIFEST"
    manifest = strategies.read_manifest(path)
    report = {**manifest.report, "chunks": "green"}
    path.write_bytes(encode_manifest(dataclasses.replace(manifest, report=report)))
    code, out, _ = command("ls", run)
    assert code == 20
    assert roots.lines_of(out)[2] == ["3", "default", "damaged"]
    assert "MANIFEST is damaged in chunks" in out.splitlines()[-1]
    code, found = document("verify", run)
    assert code == 22
    assert [problem["file"] for problem in found["problems"]] == ["3/default/MANIFEST"]
    assert found["whole_steps"] == found["steps"]


def test_ls_with_a_damaged_store_file(run, command, document):
    """The steps are listed although their store cannot be told."""
    (run / STORE / "STORE.json").write_bytes(b"?")
    code, out, _ = command("ls", run)
    assert code == 20
    assert "STORE.json is not JSON" in out.splitlines()[-1]
    assert [line[0] for line in roots.lines_of(out)[1:5]] == ["2", "3", "4", "5"]
    assert document("ls", run)[1]["store"]["error"]["kind"] == "format"


def test_ls_of_steps_of_other_handlers(root, command, document):
    """Steps that Orbax's own handlers saved are listed as such."""
    tree = {"w": np.arange(4.0)}
    with ocp.CheckpointManager(root) as manager:
        for step in (8, 9, 10):
            manager.save(step, args=ocp.args.StandardSave(tree))
    assert document("ls", root)[1]["other_steps"] == ["8", "9", "10"]
    assert document("verify", root)[1]["others"] == ["8", "9", "10"]
    _, out, _ = command("verify", root)
    assert "Saved by other handlers, not looked at: 8, 9, 10." in out
    with open_run(root) as run:
        run.save(11, tree)
    code, out, _ = command("ls", root)
    assert code == 0
    assert [line[:3] for line in roots.lines_of(out)[2:5]] == [
        ["8", "-", "other"],
        ["9", "-", "other"],
        ["10", "-", "other"],
    ]
    assert roots.lines_of(out)[1][0] == "11"


def test_ls_of_unfinished_and_discarded_steps(run, command):
    """A step that is still being saved, or lies in the trash, is told apart."""
    (run / "trash").mkdir()
    (run / "2").rename(run / "trash/2")
    (run / "5").rename(run / "5.orbax-checkpoint-tmp")
    _, out, _ = command("ls", run)
    assert [line[0] for line in roots.lines_of(out)[1:5]] == [
        "trash/2",
        "3",
        "4",
        "5.orbax-checkpoint-tmp (unfinished)",
    ]


def test_ls_of_self_contained_checkpoints(tmp_path, command, document):
    """Checkpoints of plain Checkpointers are listed by their folders."""
    for name in ("final", "best"):
        with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
            save = orbax_delta.DeltaSave({"w": np.arange(100.0)})
            checkpointer.save(tmp_path / name, args=save)
    code, out, _ = command("ls", tmp_path)
    assert code == 0
    assert [line[:2] for line in roots.lines_of(out)[1:]] == [
        ["best", "-"],
        ["final", "-"],
    ]
    _, found = document("ls", tmp_path / "final")
    assert [entry["self_contained"] for entry in found["steps"]] == [True]
    code, out, _ = command("show", tmp_path, "final")
    assert code == 0
    assert "a checkpoint of its own" in out


# show


def test_show(made, command):
    """What the MANIFEST says, and every leaf with its lists and forms."""
    code, out, err = command("show", made, 5)
    assert (code, err) == (0, "")
    facts, _, leaves = out.partition("\n\n")
    facts = {line[0]: line[1] for line in roots.lines_of(facts)}
    manifest = read_step(made, 5).manifest
    assert facts["step"] == "5"
    assert facts["built on"] == "step 4"
    assert facts["store"] == manifest.store_uuid
    assert facts["packs"] == f"{len(manifest.packs)} in {made}/{STORE}/packs/"
    assert "chunk_bytes 4096" in facts["options"]
    assert f"orbax-checkpoint {ocp.__version__}" in facts["versions"]
    assert facts["custom metadata"] == "none"
    head, *leaves = roots.lines_of(leaves)
    assert head == [
        *("leaf", "kind", "dtype", "shape", "chunks", "records", "stored"),
        "forms",
    ]
    by_path = {line[0]: line[1:] for line in leaves}
    assert len(by_path) == len(manifest.leaves)
    assert by_path["fresh"] == [
        *("jax", "float32", "64 x 64", "4", "1.00/1", "0 B", "constant 4")
    ]
    assert by_path["step"] == ["int", "-", "-", "0", "-", "-", "-"]
    assert by_path["params/half"][-1] == "derived 4"
    assert by_path["params/w"][-1] == "planes 4, sparse 4"


def test_show_as_json(made, document):
    """The same as numbers; stored bytes are those of the records its lists name."""
    code, found = document("show", made, 5)
    assert code == 0
    (item,) = found["items"]
    step = read_step(made, 5)
    assert item["report"] == dict(step.manifest.report)
    assert item["predecessor"]["step"] == "4"
    assert item["pack_names"] == list(step.manifest.packs)
    assert item["store_uuid"] == step.manifest.store_uuid
    for index, leaf in enumerate(item["leaves"]):
        rows = [row for row in step.rows if row.leaf == index]
        assert leaf["path"] == step.manifest.leaves[index].name
        assert leaf["chunks"] == len(rows)
        spans = {(r.pack, r.offset): r.length for row in rows for r in row.refs}
        assert leaf["stored_bytes"] == sum(spans.values())
        longest = max((len(row.refs) for row in rows), default=0)
        assert leaf["records_per_chunk_max"] == longest


def test_show_custom_metadata_and_odd_names(root, command):
    """What the caller kept with a step is shown; a name is shown as it is."""
    tree = {"[red]x[/red]": jnp.arange(3.0), "a" * 150: 1}
    with open_run(root) as run:
        save = orbax_delta.DeltaSave(tree, custom_metadata={"loss": 0.5})
        run.manager.save(0, args=save)
    code, out, _ = command("show", root, 0)
    assert code == 0
    assert "custom metadata  {'loss': 0.5}" in out
    assert "[red]x[~1red]" in out
    assert "a" * 150 in out


def test_show_of_several_items(root, command, document):
    """All items of the step that are ours are shown."""
    registry = orbax_delta.handler_registry(item=["params", "opt"])
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        both = {name: orbax_delta.DeltaSave({"w": 1}) for name in ("params", "opt")}
        manager.save(0, args=ocp.args.Composite(**both))
    code, found = document("show", root, 0)
    assert code == 0
    assert [item["item"] for item in found["items"]] == ["opt", "params"]
    assert command("show", root, 0)[1].count("built on") == 2


def test_show_of_what_is_damaged(run, command):
    """A damaged part is said in one line, as is a damaged MANIFEST."""
    (part,) = (run / "4/default").glob("part-*")
    part.write_bytes(b"?")
    (run / "3/default/MANIFEST").write_bytes(b"?")
    for step, expected in ((4, 22), (3, 20)):
        code, out, err = command("show", run, step)
        assert (code, out) == (expected, "")
        assert err.startswith("orbax-delta: ")
        assert err.count("\n") == 1


# verify


def test_verify(made, command, document):
    """A healthy root: what was looked at, and that nothing is wrong."""
    code, out, err = command("verify", made)
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith("4 steps, 1 kept base, ")
    assert second == "Nothing is wrong."
    code, found = document("verify", made, 2, 3)
    assert code == 0
    assert found["ok"] is True
    assert found["problems"] == []
    assert found["steps"] == found["whole_steps"] == ["2", "3"]


def test_verify_damage(run, command, document):
    """Damage: leaf, chunk, steps, file and reason; exit code; newest whole step."""
    record = next(
        row.refs[0]
        for row in read_step(run, 5).rows
        if read_step(run, 5).manifest.leaves[row.leaf].name == "noise"
    )
    path = run / STORE / "packs" / record.pack
    data = bytearray(path.read_bytes())
    data[record.offset + 50] ^= 1
    path.write_bytes(data)
    code, out, _ = command("verify", run)
    assert code == 22
    assert "leaf noise, chunk [0:" in out
    assert "   step 5, item default\n" in out
    assert f"   {STORE}/packs/{record.pack}\n" in out
    assert "checksum" in out
    assert out.endswith("2 problems; the newest whole step is 4.\n")
    code, found = document("verify", run)
    assert code == 22
    assert found["ok"] is False
    assert found["whole_steps"] == ["2", "3", "4"]
    chunk = found["problems"][-1]
    fields = {"what", "file", "steps", "item", "leaf", "chunk", "healed_by"}
    assert set(chunk) == fields
    assert (chunk["leaf"], chunk["steps"]) == ("noise", ["5"])


def test_verify_says_when_nothing_is_whole(run, command):
    """If no step restores, the last line says so."""
    shutil.rmtree(run / STORE / "packs")
    code, out, _ = command("verify", run)
    assert code == 22
    assert out.endswith("; no step is whole.\n")


# prune


def test_prune(run, command, document):
    """A dry run tells and deletes nothing; a prune deletes just that."""
    shutil.rmtree(run / "2")
    shutil.rmtree(run / "4")
    dead = packs_on_disk(run) - packs_named(run)
    assert dead
    size = sum((run / STORE / "packs" / name).stat().st_size for name in dead)
    before = strategies.listing(run)
    code, out, err = command("prune", run, "--dry-run")
    assert (code, err) == (0, "")
    assert {line[0] for line in roots.lines_of(out)} >= dead
    assert f"Dead: {len(dead)} packs ({human_bytes(size)}), named by none." in out
    assert "named by 3 MANIFESTs and 0 pins" in out  # of a kept base, too
    assert out.endswith("Nothing was deleted.\n")
    assert strategies.listing(run) == before
    code, found = document("prune", run, "--dry-run")
    assert code == 0
    assert found["dry_run"] is True
    assert {entry["pack"] for entry in found["dead"]} == dead
    assert found["dead_bytes"] == size
    assert found["deleted"] == []
    assert strategies.listing(run) == before
    code, out, _ = command("prune", run)
    assert code == 0
    assert out.endswith(f"Deleted: {len(dead)} packs ({human_bytes(size)}).\n")
    assert packs_on_disk(run) == packs_named(run)
    code, found = document("prune", run)
    assert code == 0
    assert (found["dead"], found["deleted"], found["deleted_bytes"]) == ([], [], 0)


def test_prune_and_pins_of_other_hosts(run, document, command):
    """Pins of other hosts hold unless they are broken."""
    shutil.rmtree(run / "2")
    dead = packs_on_disk(run) - packs_named(run)
    elsewhere = owners.Owner(host="elsewhere boot namespace", pid=1, start="1")
    pin = Mark(owner=elsewhere, packs=sorted(dead))
    DeltaStore.open(Folder(str(run))).pins.write("there", pin.encode())
    _, found = document("prune", run)
    assert (found["deleted"], found["pins"]) == ([], ["there"])
    assert found["hosts"] == ["elsewhere"]
    _, out, _ = command("prune", run)
    assert "of other hosts (elsewhere), and" in out
    assert "orbax-delta prune --break-pins." in out
    _, out, _ = command("prune", run, "--break-pins", "--dry-run")
    assert "Pins and marks left behind, would be removed: 1." in out
    assert "other hosts" not in out
    _, found = document("prune", run, "--break-pins")
    assert {entry["pack"] for entry in found["deleted"]} == dead
    assert found["stale"] == ["pins/there"]


def test_prune_of_many(run, command):
    """Of many packs the first are named, the rest counted."""
    packs = DeltaStore.open(Folder(str(run))).packs
    for number in range(30):
        packs.write(f"{7:032x}-p0-{number}", b"")
    _, out, _ = command("prune", run, "--dry-run")
    assert "and 10 more; --json names all" in out


def test_prune_stops_at_damage(run, command):
    """What cannot be read stops a prune, with the reader's exit code."""
    (run / "3/default/MANIFEST").write_bytes(b"?")
    before = strategies.listing(run)
    code, out, err = command("prune", run)
    assert (code, out) == (20, "")
    assert "3/default/MANIFEST does not begin with" in err
    assert strategies.listing(run) == before


def test_prune_without_a_store(tmp_path, command):
    """Self-contained checkpoints have nothing to prune; other folders even less."""
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "final", args=orbax_delta.DeltaSave({"w": 1}))
    code, _, err = command("prune", tmp_path)
    assert code == 10
    assert "has no store, so there is nothing to prune" in err
    code, _, err = command("prune", tmp_path / "none")
    assert code == 10
    assert "there is no folder" in err


# demo


@dataclasses.dataclass(frozen=True)
class FakeResult:
    """What the demo returns, as far as the command line looks at it."""

    exact: bool
    plot: str = "plot.png"


@pytest.mark.parametrize(("exact", "expected"), [(True, 0), (False, 22)])
def test_demo(monkeypatch, command, document, exact, expected, tmp_path):
    """Options reach the demo; a run that is not exact is an error."""
    calls = []

    def run(**options):
        options.pop("console").print("told")
        calls.append(options)
        return FakeResult(exact=exact)

    monkeypatch.setattr(demo, "run", run)
    code, out, _ = command("demo", "--folder", tmp_path, "--steps", 24, "--seed", 3)
    assert (code, out) == (expected, "told\n")
    assert calls == [{"folder": tmp_path, "plot": None, "steps": 24, "seed": 3}]
    code, found = document("demo", "--plot", tmp_path / "p.png")
    assert code == expected
    assert found == {"exact": exact, "plot": "plot.png"}
    assert calls[1]["plot"] == tmp_path / "p.png"


def test_demo_refuses_a_full_folder(tmp_path, command):
    """The demo's own errors are plain messages like any other."""
    (tmp_path / "mine").touch()
    code, _, err = command("demo", "--folder", tmp_path)
    assert code == 2
    assert "is not an empty folder" in err


# errors, exit codes, streams


def all_errors():
    """Every class of error that the package raises on purpose."""
    found = [errors.DeltaError]
    for error in found:
        found += error.__subclasses__()
    return found


@pytest.mark.parametrize("error", all_errors())
def test_errors_are_one_plain_message(monkeypatch, command, document, error):
    """Any error of ours: message, kind and exit code, no traceback."""

    def verify(*arguments, **named):
        raise error("something is wrong; do this")

    monkeypatch.setattr(check, "verify", verify)
    code, out, err = command("verify", "somewhere")
    assert (code, out) == (error.exit_code, "")
    assert err == "orbax-delta: something is wrong; do this\n"
    code, found = document("verify", "somewhere")
    assert code == error.exit_code
    assert found == {
        "error": {"kind": error.kind, "message": "something is wrong; do this"}
    }


def test_exit_codes_are_documented(command):
    """Help lists each code that a command can return, with its meaning."""
    code, out, _ = command("--help")
    assert code == 0
    listed = dict(re.findall(r"^ +(\d+)  (.+)$", out, flags=re.MULTILINE))
    expected = {error.exit_code for error in all_errors()} | {0, 130}
    assert {int(number) for number in listed} == expected
    assert expected == {0, 1, 2, 10, 12, 13, 20, 21, 22, 30, 130}
    assert listed["22"] == "damage found"


def test_an_output_that_is_full(made):
    """One plain message; a script that keeps what is printed must see it."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "orbax_delta", "ls", made],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_interruption(monkeypatch, command):
    """Ctrl-C is said and has its own exit code."""

    def verify(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "verify", verify)
    code, out, err = command("verify", "somewhere")
    assert (code, out) == (130, "")
    assert err.strip() == "orbax-delta: interrupted"


@pytest.mark.parametrize(
    "arguments", [["ls"], ["show", "a"], ["nonsense"], ["ls", ".", "--no-such-option"]]
)
def test_usage_errors(command, arguments):
    """A wrong command line is explained on stderr, and on stdout as JSON if asked."""
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: orbax-delta" in err
    code, out, _ = command(*arguments, "--json")
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "usage"


@pytest.mark.parametrize("name", ["ls", "show", "verify", "prune"])
def test_a_wrong_root(tmp_path, command, name):
    """A folder without a store says what was expected; a missing one too."""
    step = ["0"] if name == "show" else []
    code, out, err = command(name, tmp_path, *step)
    assert (code, out) == (10, "")
    assert "holds no _delta_store and no MANIFEST; expected the folder that" in err
    code, _, err = command(name, tmp_path / "none", *step)
    assert code == 10
    assert "there is no folder" in err


def test_a_wrong_step(made, command):
    """A step that is not there is answered with those that are."""
    for name in ("show", "verify"):
        code, _, err = command(name, made, 77)
        assert code == 10
        assert "holds no step '77'" in err
        assert "there are 2, 3, 4, 5" in err


def test_a_step_without_its_store(made, tmp_path, command):
    """A step copied alone says where its data are and what to do."""
    shutil.copytree(made / "3", tmp_path / "copied" / "3")
    code, _, err = command("show", tmp_path / "copied", 3)
    assert code == 10
    assert f"when it was saved the store was {made}/{STORE}/" in err


# Of marks that change the character before them rich takes another width to pad than
# to fold: beside them columns may be off by one, and nothing is lost.
LETTERS = st.characters(exclude_categories=("Cc", "Cf", "Cs", "M", "Sk", "Zl", "Zp"))
WORDS = st.text(LETTERS, max_size=6).map(str.strip)


@hypothesis.given(st.lists(st.tuples(WORDS, WORDS, WORDS), max_size=5), st.booleans())
def test_lines_in_a_pipe(rows, header):
    """What is made without rich, which is slow, is what rich makes; a line a row."""
    table = views.columns_table(["name", "saved at"], ["figure"])
    table.show_header = header
    for row in rows:
        table.add_row(*row)
    table.box, table.padding = None, (0, 2, 0, 0)
    out = Console(file=io.StringIO(), width=1000, highlight=False, emoji=False)
    out.print(table)
    slow = [line.rstrip() for line in out.file.getvalue().split("\n")]
    fast = list(views._plain_lines(table))
    assert len(fast) == len(rows) + header
    assert fast == slow[: len(fast)]


def test_relative_roots(made, monkeypatch, command):
    """A root is taken from the current folder."""
    monkeypatch.chdir(made)
    assert command("verify", ".")[0] == 0
    monkeypatch.chdir(made.parent)
    assert command("ls", made.name)[0] == 0


def test_on_a_terminal(made, run, monkeypatch, capfd):
    """Tables fit a terminal, colours and bars are there and go away."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["ls", made], ["show", made, 5], ["verify", made]):
        assert cli.main(list(map(str, arguments))) == 0
        out, err = capfd.readouterr()
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
        lines = plain.splitlines()
        table = [line for line in lines if not line.startswith(("Store", "Kept"))]
        # Sentences are wrapped by the terminal itself.
        assert arguments[0] == "verify" or max(map(len, table)) <= 80
        assert "MANIFESTs" in err
    assert "\x1b[32mNothing is wrong" in out
    assert cli.main(["prune", str(run)]) == 0
    assert "deleting 0 packs" in capfd.readouterr().err


PROGRAM = """
import sys
from orbax_delta import cli
codes = [cli.main(line.split("|")) for line in sys.argv[1:]]
heavy = {"jax", "jaxlib", "orbax", "flax", "optax", "matplotlib"} & set(sys.modules)
sys.exit(f"codes {codes}, imported {sorted(heavy)}")
"""


def test_starts_without_jax(made):
    """No command but the demo imports jax, Orbax or Flax."""
    lines = [
        f"ls|{made}",
        f"show|{made}|5",
        f"verify|{made}",
        f"prune|{made}|--dry-run",
        "--help",
        "demo|--help",
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lines], capture_output=True, text=True
    )
    assert done.stderr.strip() == "codes [0, 0, 0, 0, 0, 0], imported []"


def test_as_a_module(made):
    """`python -m orbax_delta` is the same command, exit code and all."""
    command = [sys.executable, "-m", "orbax_delta", "show", str(made), "77"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 10
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_prune_of_a_store_that_lost_its_file(run, command):
    """Not "nothing to prune": nothing is deleted, and the remedy is named."""
    (run / STORE / "STORE.json").unlink()
    before = strategies.listing(run)
    code, _, err = command("prune", run)
    assert code == 22
    assert "holds packs but no STORE.json" in err
    assert "orbax-delta repair" in err
    assert strategies.listing(run) == before
    code, out, _ = command("repair", run)
    assert code == 0
    assert "Nothing is wrong." in out
