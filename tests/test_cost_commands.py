"""The commands about costs: what each shows, its JSON, its exit codes, its plots."""

import dataclasses
import errno
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import roots
import strategies
from prometheus_client.parser import text_string_to_metric_families
from strategies import STORE, open_run

from orbax_delta import (
    cli,
    costplots,
    costs,
    costviews,
    differing,
    errors,
    listing,
    testing,
    usage,
    watching,
)

ANSWER_SECONDS = 60
PNG = b"\x89PNG\r\n"


# --- history --------------------------------------------------------------------------


def test_history(made, command, document):
    """A line for each save, also of the step that is gone, and what comes next."""
    code, out, err = command("history", made)
    assert (code, err) == (0, "")
    head, *saves = roots.lines_of(out)[:6]
    assert head == [
        *("step", "item", "saved at", "blocked s", "total s", "written", "smaller"),
        *("raw", "host", "chunks by form"),
    ]
    assert [line[0] for line in saves] == ["1", "2", "3", "4", "5"]
    assert "A save writes 23." in out
    assert "Steps are deleted, 4 are there" in out
    code, found = document("history", made)
    assert code == 0
    assert set(found) == {"root", "saves", "restores", "forecast", "problems"}
    known = costs.read(str(made))
    assert [save["attempt"] for save in found["saves"]] == [
        save.attempt for save in known.saves
    ]
    assert found["forecast"]["bytes_per_save"] == costs.forecast(known).bytes_per_save
    assert found["forecast"]["growth_bytes_of_100_saves"] == 0


def test_history_of_a_growing_run(root, command):
    """Nothing deleted so far, and a restore in between."""
    for step in range(2):
        with open_run(root) as run:
            if step:
                run.restore(0)
            run.save(step, {"w": np.arange(900.0) + step})
    _, out, _ = command("history", root)
    assert "Restores known: 1; the last one, of step 0, took 0." in out
    assert "No step has been deleted so far" in out


def test_history_of_an_earlier_version(run, command):
    """What MANIFESTs know, with no host."""
    shutil.rmtree(run / STORE / "history")
    code, out, _ = command("history", run)
    assert code == 0
    lines = roots.lines_of(out)[1:6]
    # The first one is known from the kept base.
    assert [line[0] for line in lines] == ["1", "2", "3", "4", "5"]
    assert {line[8] for line in lines} == {"-"}


def test_history_without_saves(run, command, document):
    """A store that has lost all its steps has nothing to tell, which is no error."""
    for name in ("2", "3", "4", "5", f"{STORE}/bases", f"{STORE}/history"):
        shutil.rmtree(run / name)
    code, out, _ = command("history", run)
    assert code == 0
    assert "No save is known yet." in out
    assert document("history", run)[1]["forecast"] is None
    code, _, err = command("advise", run, "--mtbf", "1d")
    assert code == errors.NotFoundError.exit_code
    assert "no save to" in err


def test_history_of_a_damaged_root(run, command):
    """The damage is named, the rest shown."""
    (run / "3/default/MANIFEST").write_bytes(b"garbled")
    (path,) = (run / STORE / "history").iterdir()
    path.write_bytes(path.read_bytes() + b"garbled\n")
    code, out, _ = command("history", run)
    assert code == errors.FormatError.exit_code
    assert [line[0] for line in roots.lines_of(out)[1:6]] == ["1", "2", "3", "4", "5"]
    assert "3/default/MANIFEST does not begin" in out
    assert "line 6 of" in out


# --- du -------------------------------------------------------------------------------


def test_du(made, command, document):
    """The same figures as text and JSON, which add up to the disk."""
    code, out, err = command("du", made)
    assert (code, err) == (0, "")
    total = strategies.disk_bytes(made)
    rows = {line[0]: line[1] for line in roots.lines_of(out) if len(line) > 1}
    assert rows["all"] == f"{total:,}"
    parts = [
        int(line[1].replace(",", ""))
        for line in roots.lines_of(out.partition("where")[2])
        if len(line) == 3 and line[0] != "all"
    ]
    assert sum(parts) == total
    assert [line[:2] for line in roots.lines_of(out)[1:6]] == [
        *([str(step), "step"] for step in roots.STEPS),
        ["1", "kept base"],
    ]
    code, found = document("du", made)
    used = usage.measure(listing.read_root(str(made)))
    assert code == 0
    assert found["total_bytes"] == total
    assert [owner["freed_bytes"] for owner in found["owners"]] == [
        owner.freed_bytes for owner in used.owners
    ]
    assert found["problems"] == []


def test_du_leaves(made, command):
    """The dearest first, with shares that add up."""
    code, out, _ = command("du", made, "--leaves")
    assert code == 0
    head, *leaves = roots.lines_of(out)
    assert head[:4] == ["leaf", "item", "stored", "share"]
    assert [leaf[0] for leaf in leaves][:2] == ["noise", "params/copy"]
    assert leaves[-1][4] == "100.0%"


def test_du_of_many_leaves(root, command):
    """A terminal is no place for all of them."""
    rng = np.random.default_rng(0)
    with open_run(root) as run:
        run.save(0, {f"leaf{n}": rng.standard_normal(9) for n in range(43)})
    _, out, _ = command("du", root, "--leaves")
    assert "and 3 more; --json names all" in out


def test_du_of_a_shared_store(tmp_path, command):
    """What the store holds beside it is said."""
    for name in ("a", "b"):
        with open_run(tmp_path / name, store=str(tmp_path / "store")) as run:
            rng = np.random.default_rng(len(name + str(tmp_path / name)) + ord(name))
            run.save(0, {"w": rng.standard_normal(900)})
    code, out, _ = command("du", tmp_path / "a")
    assert code == 0
    assert "The shared store holds 6." in out


def test_du_of_damage(run, command):
    """Named, with its exit code."""
    (part,) = (run / "4/default").glob("part-*")
    part.unlink()
    code, out, _ = command("du", run)
    assert code == errors.CorruptionError.exit_code
    assert f"the part {part} is missing" in out


# --- diff -----------------------------------------------------------------------------


def test_diff(made, command, document):
    """Leaves that differ; how much was read."""
    code, out, err = command("diff", made, 2, 5)
    assert (code, err) == (0, "")
    rows = {line[0]: line for line in roots.lines_of(out)}
    assert rows["params/w"][1:6] == [
        *("changed", "float32[64,64]", "9", "4,096", "0.22%"),
    ]
    assert rows["params/w"][6] == "1"
    assert rows["step"][1:5] == ["changed", "int", "1", "1"]
    assert "4 of 10 leaves have the same bits. Read " in out
    code, found = document("diff", made, 2, 5)
    assert (code, found["before"], found["after"]) == (0, "2", "5")
    (expected,) = differing.between(str(made), "2", "5")
    (item,) = found["items"]
    assert item["read_bytes"] == expected.read_bytes
    assert [leaf["changed"] for leaf in item["leaves"]] == [
        leaf.changed for leaf in expected.leaves
    ]
    assert all("share" in leaf for leaf in item["leaves"])


def test_diff_of_equal_steps(root, command):
    """There is no table of nothing."""
    with open_run(root) as run:
        for step in range(2):
            run.save(step, {"w": np.arange(9.0)})
    _, out, _ = command("diff", root, 0, 1)
    assert out.startswith("Item default: 1 of 1 leaves have the same bits. Read 0 B")


def test_diff_of_damage(root, command):
    """A leaf that cannot be compared is named; the exit code says so."""
    rng = np.random.default_rng(0)
    with open_run(root) as run:
        for step in range(2):
            run.save(step, {"w": rng.random(900)})
    for pack in (root / STORE / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    code, out, _ = command("diff", root, 0, 1)
    assert code == errors.CorruptionError.exit_code
    assert roots.lines_of(out)[1][:2] == ["w", "damaged"]
    assert "w: leaf w, chunk [0:900]" in out
    packs = root / STORE / "packs"
    for pack in packs.iterdir():
        pack.unlink()
        pack.mkdir()  # which the system refuses to read, whatever is in it
    assert command("diff", root, 0, 1)[0] == errors.StorageError.exit_code


# --- advise ---------------------------------------------------------------------------


def test_advise(made, command, document):
    """Two schemes side by side, and what they rest on."""
    code, out, err = command(
        *("advise", made, "--hosts", 8, "--host-mtbf", "2.5d", "--restore", "90"),
        *("--restart", "5m"),
    )
    assert (code, err) == (0, "")
    assert roots.lines_of(out)[0][1:] == ["deltas", "full saves"]
    assert "One failure in 7 h 30 min; after one it takes 6 min 30 s until" in out
    assert "(as given)" in out
    assert "kept with 4 steps" in out
    assert "whatever is deleted (1 so far, keep_bases)" in out
    assert "Now a save begins every 0." in out
    code, found = document("advise", made, "--mtbf", "90", "--keep", 9)
    assert (code, found["mtbf_seconds"], found["keep"]) == (0, 90.0, 9)
    assert found["restore_from"] == "assumed"
    assert [scheme["kind"] for scheme in found["schemes"]] == ["deltas", "full"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "give either --mtbf, or both --hosts and --host-mtbf"),
        (["--hosts", "3"], "give either --mtbf"),
        (["--mtbf", "1d", "--hosts", "3", "--host-mtbf", "1d"], "give either --mtbf"),
        (["--mtbf", "0"], "mtbf is 0.0 s; expected a time that is finite and above 0"),
        (["--mtbf", "1w"], "'1w' is no time; expected 90, 90s, 15m, 12h or 2.5d"),
        (["--mtbf", "-3"], "'-3' is no time"),
        (["--mtbf", "1d", "--keep", "0"], "0 is not in the range x>=1"),
        (["--mtbf", "9" * 400], "mtbf is inf s; expected a time that is finite"),
        (["--mtbf", "1d", "--keep", "9" * 400], "steps; expected 1 to 1,000,000,000"),
        (["--hosts", "9" * 400, "--host-mtbf", "1d"], "is not in the range 1<=x<="),
    ],
)
def test_advise_refuses(made, command, arguments, match):
    """Times and counts that are none; both ways of giving the same, or neither."""
    code, _, err = command("advise", made, *arguments)
    assert code == errors.InvalidInputError.exit_code
    assert match in err


def test_advice_to_wait(root, command):
    """Nothing blocks: the best interval is the save itself, which is said."""
    with open_run(root) as run:
        for step in range(3):
            run.save(step, {"w": np.arange(90_000.0) + step})
    code, out, _ = command("advise", root, "--mtbf", "0.01s")
    assert code == 0
    assert "waits until the last one is committed" in out


# --- plots ----------------------------------------------------------------------------


def test_plots(made, tmp_path, command):
    """Both are written as PNG files, beside the text."""
    for name, more in (("history", []), ("advise", ["--mtbf", "1h"])):
        path = tmp_path / f"{name}.png"
        code, out, _ = command(name, made, *more, "--plot", path)
        assert code == 0
        assert out
        assert path.read_bytes().startswith(PNG)


def test_plots_of_long_and_short_runs(tmp_path):
    """One save, many saves, saves of nothing."""
    step = costs.StepCost(
        step="1" * 40,
        started=0.0,
        blocking_seconds=0.1,
        total_seconds=1.0,
        written_bytes=0,
        full_bytes=8,
        is_full=True,
    )
    odd = dataclasses.replace(step, step="$\\foo$")  # no formula
    for steps in ([step], [step] * 200, [odd]):
        costplots.draw_history(steps, tmp_path / "run.png")
        assert (tmp_path / "run.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["history", "advise"])
def test_a_plot_that_cannot_be_written(made, tmp_path, command, document, name):
    """Says where it should have gone."""
    more = ["--mtbf", "1h"] if name == "advise" else []
    where = tmp_path / "nowhere" / "x.png"
    code, _, err = command(name, made, *more, "--plot", where)
    assert code == errors.StorageError.exit_code
    assert f"could not write the plot to {where}" in err
    code, found = document(name, made, *more, "--plot", where)  # one document
    assert (code, found["error"]["kind"]) == (errors.StorageError.exit_code, "storage")


def test_a_plot_that_fails_leaves_the_old_one(made, tmp_path, command, monkeypatch):
    """A full disk, or whatever else."""
    path = tmp_path / "x.png"
    assert command("history", made, "--plot", path)[0] == 0
    old = path.read_bytes()

    def full(self, data):
        self.open("xb").close()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    code, _, err = command("history", made, "--plot", path)
    assert code == errors.StorageError.exit_code
    assert "could not write the plot to" in err
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["x.png"]


def test_a_plot_without_matplotlib(made, tmp_path, command, monkeypatch):
    """Which extra brings it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = command("history", made, "--plot", tmp_path / "x.png")
    assert code == errors.InvalidInputError.exit_code
    assert 'pip install "orbax-delta[demo]"' in err


# --- roots and steps that are not there -----------------------------------------------


@pytest.mark.parametrize("name", ["history", "du", "advise", "diff"])
def test_a_wrong_root(tmp_path, command, name):
    """No such folder, and one with nothing in it."""
    more = {"advise": ["--mtbf", "1h"], "diff": ["1", "2"]}.get(name, [])
    for root, match in (("no", "there is no folder"), ("", "holds no _delta_store")):
        code, out, err = command(name, tmp_path / root, *more)
        assert (code, out) == (errors.NotFoundError.exit_code, "")
        assert match in err


@pytest.mark.parametrize("name", ["history", "du", "advise", "diff", "watch"])
def test_a_root_that_is_no_path(command, document, name):
    """A variable that is not set; bytes that are no UTF-8."""
    more = {"advise": ["--mtbf", "1h"], "diff": ["1", "2"]}.get(name, [])
    for root, match in (("", "an empty text"), ("a\udcff", "be written in UTF-8")):
        code, out, err = command(name, root, *more)
        assert (code, out) == (errors.InvalidInputError.exit_code, "")
        assert match in err
        assert match in document(name, root, *more)[1]["error"]["message"]


def test_a_wrong_step(made, command, document):
    """Named, with those that there are; as JSON too."""
    code, _, err = command("diff", made, 2, 17)
    assert code == errors.NotFoundError.exit_code
    assert "holds no step '17'" in err
    assert document("diff", made, 2, 17)[1]["error"]["kind"] == "not_found"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0.000 s"),
        (59.999, "60.00 s"),
        (60, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
    ],
)
def test_times_in_words(seconds, text):
    """At the edges of the units."""
    assert costviews.human_seconds(seconds) == text


def test_on_a_terminal(made, monkeypatch, capfd):
    """Tables fit a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (
        ["history", made],
        ["du", made],
        ["du", made, "--leaves"],
        ["diff", made, 2, 5],
        ["advise", made, "--mtbf", "1d"],
    ):
        assert cli.main(list(map(str, arguments))) == 0
        out, _ = capfd.readouterr()
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
        table = plain.splitlines()[:7]
        assert max(map(len, table)) <= 80, plain
        if arguments[0] == "history":
            # A line for each save; what has no room is left out.
            assert [line.split()[0] for line in plain.splitlines()[3:8]] == [
                "1",
                "2",
                "3",
                "4",
                "5",
            ]


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_on_a_narrow_terminal(made, monkeypatch, capfd, columns):
    """No figure is cut off, which would read as another one, and no name vanishes."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")

    def shown(width, *arguments):
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.main(list(map(str, arguments))) == 0
        out, _ = capfd.readouterr()
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)

    for arguments in (
        ["history", made],
        ["du", made],
        ["du", made, "--leaves"],
        ["diff", made, 2, 5],
        ["ls", made],
    ):
        figures = re.compile(r"(?<!\S)[\d.,]+(?: [kMG]?B|%)?(?!\S)")
        known = set(figures.findall(shown(300, *arguments)))
        assert set(figures.findall(shown(columns, *arguments))) <= known
    assert re.search(r"^ params", shown(columns, "diff", made, 2, 5), re.MULTILINE)


PROGRAM = """
import sys
from orbax_delta import cli
codes = [cli.main(line.split("|")) for line in sys.argv[1:]]
heavy = {"jax", "jaxlib", "orbax", "flax", "optax", "matplotlib"} & set(sys.modules)
sys.exit(f"codes {codes}, imported {sorted(heavy)}")
"""


def test_starts_without_jax(made):
    """None of them imports jax, Orbax or Flax."""
    lines = [
        f"history|{made}",
        f"du|{made}",
        f"diff|{made}|2|5",
        f"advise|{made}|--mtbf|1d",
        "watch|--help",
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lines], capture_output=True, text=True
    )
    assert done.stderr.strip() == "codes [0, 0, 0, 0, 0], imported []"


# --- watch ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "match"),
    [
        ("nan", "'nan' is no time"),
        ("inf", "'inf' is no time"),
        ("0", "'0' is not from 0.1s to 1d"),
        ("2d", "'2d' is not from 0.1s to 1d"),
    ],
)
def test_watch_refuses(made, command, interval, match):
    """Times that nobody can wait for."""
    code, _, err = command("watch", made, "--interval", interval)
    assert code == errors.InvalidInputError.exit_code
    assert match in err


def test_watch_says_at_once_where_it_cannot_write(root, tmp_path, command):
    """Before there is anything to write."""
    code, _, err = command("watch", root, "--prometheus", tmp_path / "no" / "x.prom")
    assert code == errors.StorageError.exit_code
    assert "could not write the metrics to" in err


def test_looks_take_at_most_half_of_the_time(made):
    """The next look waits as long as the last one took, and never less than asked."""
    waits = []
    looks = watching.follow(str(made), seconds=1e-9, wait=waits.append)
    for _ in range(3):
        assert isinstance(next(looks), costs.Costs)
    assert len(waits) == 2
    assert min(waits) > 1e-9
    looks = watching.follow(str(made / "no"), seconds=5.0, wait=waits.append)
    assert [next(looks), next(looks)] == [None, None]
    assert waits[-1] == 5.0


def test_a_storage_that_fails_for_a_while(made, monkeypatch):
    """Is shown, and looked at again."""
    looks = watching.follow(str(made), seconds=1.0, wait=lambda _: None)
    with testing.faults(testing.fail(5, testing.Match(url="*MANIFEST"))):
        found = next(looks)
    assert isinstance(found, costs.Costs | errors.StorageError)
    assert isinstance(next(looks), costs.Costs)


class Watching:
    """`orbax-delta watch` in a process of its own, with what it has written so far."""

    def __init__(self, root, *arguments, terminal=False):
        self.master, out = pty.openpty() if terminal else os.pipe()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "300"}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "orbax_delta", "watch", str(root)),
                *("--interval", "0.1", *arguments),
            ],
            stdout=out,
            stderr=out if terminal else subprocess.PIPE,
            env=environment,
        )
        os.close(out)
        self.text = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        os.close(self.master)

    def read_until(self, pattern):
        """Wait until something is shown; the match."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            self._read()
        return found

    def _read(self):
        ready, _, _ = select.select([self.master], [], [], ANSWER_SECONDS)
        assert ready, f"nothing came after {self.text!r}"
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # how a pseudo-terminal says that the other side has gone
            data = b""
        assert data, f"it ended after {self.text!r}"
        self.text += data.decode()

    def end(self):
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(ANSWER_SECONDS)

    def read_error(self):
        """The next line of standard error, without end of line."""
        ready, _, _ = select.select([self.process.stderr], [], [], ANSWER_SECONDS)
        assert ready, "nothing came on standard error"
        return self.process.stderr.readline().decode().rstrip("\n")


def test_watch_in_a_pipe(root, tmp_path):
    """A root that is not there yet; a line for each save; the metrics; Ctrl-C."""
    path = tmp_path / "run.prom"
    with Watching(root, "--prometheus", str(path)) as watched:
        said = watched.read_error()
        assert said == f"orbax-delta: Nothing has been saved to {root} yet."
        with open_run(root) as run:
            for step in range(2):
                run.save(step, {"w": np.arange(900.0) + step})
                watched.read_until(rf"step {step} \(default\): 7\.20 kB as .*\n")
        watched.read_until(r"step 1 .*\n")
        assert watched.end() == 0
        assert watched.text.count("\n") == 2
    families = text_string_to_metric_families(path.read_text())
    (saves,) = [f for f in families if f.name == "orbax_delta_saves"]
    assert saves.samples[0].value >= 1


def test_watch_as_json(root):
    """One object a line."""
    with open_run(root) as run, Watching(root, "--json") as watched:
        for step in range(2):
            run.save(step, {"w": np.arange(900.0) + step})
        watched.read_until(r'"step": "1".*\n')
        assert watched.end() == 0
        lines = [json.loads(line) for line in watched.text.splitlines()]
    assert [line["step"] for line in lines] == ["0", "1"]


def test_watch_says_what_is_wrong(run):
    """Once, on standard error; the saves that are known all the same."""
    (run / "4" / "default" / "MANIFEST").write_bytes(b"garbled")
    with Watching(run, "--json") as watched:
        assert "does not begin with a ORBAX-DELTA" in watched.read_error()
        watched.read_until(r'"step": "5".*\n')
        shutil.rmtree(run)  # and a step of what was told goes with it
        assert "Nothing has been saved to" in watched.read_error()
        assert watched.end() == 0
    assert all(json.loads(line) for line in watched.text.splitlines())


def test_metrics_follow_steps_that_go(run, tmp_path):
    """Without a new save."""
    path = tmp_path / "run.prom"
    with Watching(run, "--prometheus", str(path)) as watched:
        watched.read_until(r"step 5 .*\n")
        shutil.rmtree(run / "3")
        deadline, text = time.monotonic() + ANSWER_SECONDS, ""
        while 'steps{root="' not in text or "} 3\n" not in text:
            assert time.monotonic() < deadline, text
            # The lines come before the metrics, which may not be there yet.
            text = path.read_text() if path.exists() else ""
        assert watched.end() == 0


def test_watch_on_a_terminal(root):
    """The table is drawn again and again; the terminal is left as it was."""
    with Watching(root, terminal=True) as watched:
        watched.read_until("Nothing has been saved to .* yet")
        with open_run(root) as run:
            for step in range(2):
                run.save(step, {"w": np.arange(900.0) + step})
                watched.read_until(f"Saves known: {step + 1}. Ctrl-C ends")
        assert watched.end() == 0
        while watched.text.count("\x1b[?25h") < 1:
            watched._read()
    assert "blocked s" in watched.text
    # The cursor is hidden once and shown again.
    assert watched.text.rindex("\x1b[?25h") > watched.text.rindex("\x1b[?25l")
