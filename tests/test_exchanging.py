"""The commands `export` and `import`: what they say, their JSON, their exit codes."""

import json
import re
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from strategies import assert_same_tree
from test_exports import restored, safetensors, save

from orbax_delta import cli

STATE = {"params": {"w": np.arange(3000.0), "b": np.ones(3)}, "step": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A root that no test changes."""
    return save(tmp_path_factory.mktemp("made") / "run", STATE)


@pytest.mark.parametrize("form", ["delta", "orbax", "safetensors"])
def test_there_and_back(made, tmp_path, command, form):
    """Each form is written, said in one line, and becomes a step again."""
    out = tmp_path / "out"
    code, said, err = command("export", made, 3, out, "--to", form)
    assert (code, err) == (0, "")
    assert said.startswith(f"Wrote {out}: 3 leaves of step 3, item 'default' ({made}/3")
    code, said, err = command("import", out, tmp_path / "back", 7)
    assert code == 0
    assert said.startswith(f"Saved step 7, item 'default' of {tmp_path / 'back'}: 3 le")
    assert_same_tree(restored(tmp_path / "back", 7), STATE)


def test_as_json(made, tmp_path, command):
    """The report, with numbers."""
    out = tmp_path / "out"
    code, said, _ = command(
        "export", made, 3, out, "--to", "orbax", "--include", "params/*", "--json"
    )
    report = json.loads(said)
    assert code == 0
    assert (report["leaves"], report["state_bytes"]) == (2, 24_024)
    assert report["written_bytes"] == strategies.disk_bytes(out)
    assert report["target"] == str(out)
    code, said, _ = command(
        "import", out, tmp_path / "back", 0, "--item", "p", "--include", "*/b", "--json"
    )
    assert code == 0
    assert json.loads(said)["leaves"] == 1
    step = strategies.read_step(tmp_path / "back", 0, "p")
    assert [leaf.name for leaf in step.manifest.leaves] == ["params/b"]


def test_options_of_safetensors(made, tmp_path, command, monkeypatch):
    """Size of files and names of one's own, from a module in the current folder."""
    safe_open = safetensors()
    (tmp_path / "naming_of_a_test.py").write_text(
        "def short(path):\n    return path[-1].upper()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = ["--to", "safetensors", "--shard-bytes", 100, "--include", "params/*"]
    names = ["--names", "naming_of_a_test:short"]
    code, *_ = command("export", made, 3, "out", *options, *names)
    assert code == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {"W", "B"}
    first = tmp_path / "out" / "model-00001-of-00002.safetensors"
    with safe_open(first, "np") as file:
        assert list(file.keys()) == ["B"]
    for wrong in ("nowhere:short", "naming_of_a_test:long", "naming_of_a_test"):
        code, _, err = command("export", made, 3, "x", *options, "--names", wrong)
        assert code == 2
        assert f"--names {wrong}: there is no such function" in err
    code, _, err = command(
        "export", made, 3, "x", "--to", "delta", "--shard-bytes", 100
    )
    assert code == 2
    assert "--shard-bytes and --names are for --to safetensors; leave them" in err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(:", r"SyntaxError"),
        ("raise RuntimeError('at import')", "RuntimeError: at import"),
        ("f = 3", "TypeError: f is a int"),
        ("def f(path):\n    return path[9]", "fails at leaf .* IndexError"),
    ],
)
def test_modules_that_fail(made, tmp_path, command, monkeypatch, text, why):
    """A function of somebody else fails in its own way; it is said where."""
    name = f"names_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    to = ["--to", "safetensors", "--include", "params/*", "--names", f"{name}:f"]
    code, _, err = command("export", made, 3, tmp_path / "out", *to)
    assert code == 2
    assert re.search(why, err)
    assert not (tmp_path / "out").exists()


def test_errors_have_their_codes(made, tmp_path, command):
    """Wrong root, step, item and target; as JSON too."""
    to = ["--to", "delta"]
    code, _, err = command("export", made, 4, tmp_path / "out", *to)
    assert code == 10
    assert "holds no step '4'" in err
    code, _, err = command("export", tmp_path / "none", 3, tmp_path / "out", *to)
    assert code == 10
    assert "there is no folder" in err
    code, _, err = command("export", made, 3, tmp_path / "out", *to, "--item", "ema")
    assert code == 10
    assert "step 3 has no item 'ema'; it has 'default'" in err
    code, said, err = command("export", made, 3, tmp_path, *to, "--json")
    assert code == 2
    assert "is there already; it was left as it is" in err
    assert json.loads(said)["error"]["kind"] == "invalid_input"
    code, _, err = command("import", tmp_path / "none", tmp_path / "back", 0)
    assert code == 10
    code, _, err = command("import", made, tmp_path / "back", -1)
    assert code == 2
    code, _, err = command("export", made, 3, tmp_path / "out")
    assert code == 2
    assert "--to" in err
    assert list(tmp_path.iterdir()) == []


def test_progress_on_a_terminal(made, tmp_path, monkeypatch, capfd):
    """A bar of chunks, on stderr."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = str(tmp_path / "out")
    assert cli.main(["export", str(made), "3", out, "--to", "safetensors"]) == 0
    assert "chunks" in capfd.readouterr().err


def test_an_import_that_fails_ends(made, tmp_path):
    """At once, with one line: of a folder that it cannot make Orbax waits for long."""
    save(tmp_path / "run", {"w": np.arange(9000.0)})
    out = tmp_path / "out"
    assert (
        cli.main(["export", str(tmp_path / "run"), "3", str(out), "--to", "orbax"]) == 0
    )
    (out / "w" / "0").unlink()
    (tmp_path / "file").write_text("mine")
    for root, code in (("file", 30), ("back", 22)):
        done = subprocess.run(
            [sys.executable, "-m", "orbax_delta", "import", out, tmp_path / root, "0"],
            capture_output=True,
            text=True,
            timeout=200,  # seconds; Orbax would take 300
        )
        assert done.returncode == code
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("orbax-delta: ")


def test_in_a_process_of_its_own(made, tmp_path):
    """Nothing but the line is said, whatever Orbax logs; accelerators stay alone."""
    program = "import sys; from orbax_delta import cli; code = cli.main(sys.argv[1:]);"
    program += "import jax; sys.exit(code or jax.default_backend() != 'cpu')"
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", program, "export", made, "3", out, "--to", "orbax"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert ocp.StandardCheckpointer().restore(out)["step"] == 3
