"""The benchmarks run: their figures stand in documents that nobody measures daily.

Small and untimed; what they print is not looked at, only that all of it is there.
"""

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(program, *arguments, codes=(0,)):
    """What a benchmark prints; its exit code has to be one of `codes`."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode in codes, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Warmed-up weights, so that tests train them once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def modules(monkeypatch):
    """Lets a test import the benchmarks' own modules."""
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_rows(tmp_path):
    """Every cost of the smallest ladder, as JSON, and a picture of it."""
    files = ["--json", tmp_path / "rows.json", "--plot", tmp_path / "rows.png"]
    printed = run("rows.py", "--rows", 500, "--leaves", 40, *files)
    assert "480" in printed
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    found = json.dumps(json.loads((tmp_path / "rows.json").read_text()))
    for cost in ("encode part", "parse part", "open step", "plan prune", "MANIFEST"):
        assert cost in found


def test_forms(tmp_path, monkeypatch, capsys):
    """Every form and candidate of a pair, and the mix of the smallest."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    forms = importlib.import_module("forms")
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(300, 1000)).astype(np.float32)
    few, rows = weights.copy(), weights.copy()
    few.reshape(-1)[::97] += 0.01
    rows[5:9] *= 1.01
    pair = [
        {"few": weights, "rows": weights, "all": weights, "same": weights},
        {"few": few, "rows": rows, "all": weights * 1.001, "same": weights},
    ]
    monkeypatch.setitem(forms.WORKLOADS, "lora", lambda setup: iter(pair))
    file = tmp_path / "forms.json"
    arguments = ["forms.py", "--workloads", "lora", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert forms.main() == 0
    (found,) = json.loads(file.read_text())
    assert found["raw_bytes"] == 3_000_000
    assert found["alone"].keys() == {*forms.FORMS, *forms.CANDIDATES}
    assert {form for form, (count, _) in found["chosen"].items() if count} == {
        "DIFFERENCE",
        "SPARSE",
    }
    assert found["mix"] == sum(size for _, size in found["chosen"].values())
    assert all(size >= found["mix"] for size in found["without"].values())
    assert all(size <= found["mix"] for size in found["with_candidate"].values())
    printed = capsys.readouterr().out
    assert "bitmap + values" in printed


def test_speed(tmp_path, monkeypatch):
    """Every operation on one thread and on two, and nothing comes back changed."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    speed = importlib.import_module("speed")
    weights = np.random.default_rng(0).normal(size=(90, 100)).astype(np.float32)
    pair = [{"w": weights}, {"w": weights * 1.001}]
    monkeypatch.setitem(speed.WORKLOADS, "lora", lambda setup: iter(pair))
    file = tmp_path / "speed.json"
    arguments = ["speed.py", "--workloads", "lora", "--runs", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert speed.main() == 0
    found = [(one["operation"], one["threads"]) for one in json.loads(file.read_text())]
    names = ["compare", "encode", "encode full", "decode", "decode full"]
    assert found == [(name, threads) for name in names for threads in (1, 2)]


def test_device(tmp_path):
    """Programs are checked on what devices there are; each handler is in the table."""
    command = [sys.executable, BENCHMARKS / "device.py", "--megabytes", "16"]
    command += ["--saves", "1", "--json", tmp_path / "device.json"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=300
    )
    assert "30 programs right" in done.stdout
    found = json.loads((tmp_path / "device.json").read_text())["results"]
    assert len(found) == 9
    copied = [one["copied_bytes"] for one in found if one["handler"] != "orbax"]
    assert copied[0] < copied[1] // 4  # two of sixteen leaves
    assert copied[4] == copied[5]  # everything


def test_compare_pairs(tmp_path, cache):
    """Every handler and peer on a pair, in tables, JSON and pictures."""
    printed = run(
        "compare.py",
        *("--quick", "--parts", "pairs", "peers", "--cache", cache),
        *("--workloads", "rl_bf16", "--folder", tmp_path),
        *("--json", tmp_path / "compare.json", "--plot", tmp_path / "plots"),
        codes=(0, 1),  # nothing is wanted of so small a state
    )
    for title in ("saves", "restores of the last state", "advertised", "is wanted"):
        assert title in printed
    found = json.loads((tmp_path / "compare.json").read_text())
    (pair,) = found["pairs"]
    assert set(pair["samples"]) == {"orbax_delta", "Orbax", "Orbax uncompressed"}
    for samples in pair["samples"].values():
        assert all(saving["added_bytes"] > 0 for saving in samples[0]["saves"])
    # A peer was measured, or it stands there how to get it.
    assert len(pair["peers"]) == 7
    for peer in pair["peers"]:
        assert peer["install"] if not peer["added_bytes"] else peer["save_seconds"]
    assert {one["claim"] for one in found["headlines"]} >= {
        "size of a save",
        "time of a save",
    }
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"ratios.png", "wanted.png"} < names
    assert len(names) == 3


def test_compare_memory(tmp_path, cache):
    """Loops without saves and with each handler, each in a process that measures."""
    printed = run(
        "compare.py",
        *("--quick", "--parts", "memory", "--cache", cache, "--folder", tmp_path),
        *("--workloads", "rl_bf16", "--json", tmp_path / "compare.json"),
        codes=(0, 1),
    )
    assert "resident memory" in printed
    (memory,) = json.loads((tmp_path / "compare.json").read_text())["memory"]
    peaks = memory["peaks"]
    assert set(peaks) == {"no saves", "orbax_delta", "Orbax", "Orbax uncompressed"}
    for peak in peaks.values():
        assert peak["peak_bytes"] >= peak["before_bytes"] > 0


def test_compare_long_runs(tmp_path, cache):
    """Mean saves, and the disk against the live records on it."""
    printed = run(
        "compare.py",
        *("--quick", "--parts", "live", "disk", "--folder", tmp_path),
        *("--live", "rl_bf16", "--disk", "rl_bf16", "--cache", cache),
        *("--json", tmp_path / "compare.json"),
        codes=(0, 1),
    )
    assert "Mean save of a live run" in printed
    found = json.loads((tmp_path / "compare.json").read_text())
    (disk,) = found["disk"]
    assert len(disk["live_bytes"]) == len(disk["root_bytes"]) == 2
    for live, whole in zip(disk["live_bytes"], disk["root_bytes"], strict=True):
        assert 0 < live < whole
    wanted = [one["what"] for one in found["verdicts"]]
    assert wanted == [
        "times smaller, mean of 12 saves",
        "bytes on disk after 12 saves, of live records",
    ]


def test_growth(tmp_path):
    """Two sizes, two counts of leaves and a short long run."""
    printed = run(
        "growth.py",
        *("--gigabytes", 0.001, "--exact", 0.001, "--leaves", 3, "--saves", 3),
        *("--folder", tmp_path, "--plot", tmp_path / "plots"),
        *("--json", tmp_path / "growth.json"),
    )
    for title in ("By size", "By leaves", "against the formula", "A long run"):
        assert title in printed
    found = json.loads((tmp_path / "growth.json").read_text())
    kinds = [cost["what"] for cost in found["sizes"][0]["costs"]]
    assert kinds == ["first save", "few changed", "all changed", "restore"]
    assert len(found["saves"]) == 3
    assert len(list((tmp_path / "plots").iterdir())) == 3


def test_idle_experts_do_not_move(modules):
    """Of the experts few move at a step, and the others keep every bit."""
    from experts import EXPERTS, expert_states

    first, second = itertools.islice(expert_states(seed=0), 2)
    moved = np.zeros(EXPERTS, bool)
    for group in ("master", "params"):
        for name in ("up", "down"):
            old, new = (
                np.asarray(state[group]["experts"][name]).view(np.uint8)
                for state in (first, second)
            )
            moved |= (old != new).any((1, 2))
    assert 1 <= moved.sum() <= 4
    for moment in ("mu", "nu"):
        old, new = (
            np.asarray(state["moments"][moment]["experts"]["up"])
            for state in (first, second)
        )
        assert not (old[~moved] != new[~moved]).any()


def test_columns_of_the_head(modules, cache):
    """Whole columns move, most do not, and nothing else does."""
    from workloads import WORKLOADS, Setup

    setup = Setup(scale="tiny", cache=cache)
    first, second = itertools.islice(WORKLOADS["head_columns"](setup), 2)
    moved = np.asarray(first["head"] != second["head"])
    assert 0 < moved.any(0).mean() < 0.5
    assert moved[:, moved.any(0)].mean() > 0.9
    frozen = np.asarray(first["backbone"]["embed"]["embedding"])
    assert (frozen == np.asarray(second["backbone"]["embed"]["embedding"])).all()


def test_headlines_give_reasons(modules):
    """A claim that does not hold says by how much, and why."""
    from contenders import Sample, Saving
    from headlines import headlines
    from sidebyside import Pair

    def samples(added, seconds):
        saving = Saving(added_bytes=added, blocking_seconds=0.01, total_seconds=seconds)
        return (
            Sample(
                saves=(saving, saving),
                restore_seconds=seconds,
                cold_seconds=None,
                warm_seconds=seconds if added < 50 else None,
            ),
        )

    pair = Pair(
        workload="rl_bf16",
        scale="medium",
        folder="/somewhere",
        in_memory=True,
        raw_bytes=1000,
        changed=0.01,
        samples={"orbax_delta": samples(10, 0.2), "Orbax": samples(900, 2.0)},
    )
    found = {one.claim: one for one in headlines([pair], [])}
    assert found["size of a save"].verdict == "reached"
    assert found["time of a save"].verdict.startswith("not reached: 90.0 %. Every byte")
    assert found["time of a restore"].verdict == "reached"


def test_bounds(cache, tmp_path):
    """Every policy on both pairs, every element within its bound, and a picture."""
    files = ["--json", tmp_path / "b.json", "--plot", tmp_path / "b.png"]
    printed = run(
        *("bounds.py", "--scale", "tiny", "--repetitions", 1, "--cache", cache, *files),
        codes=(0, 1),  # tiny states are not as small as is wanted of large ones
    )
    for row in ("lossless", "fp32 master exact", "bf16 weights exact", "adamw(lr)"):
        assert row in printed
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    sizes = json.loads((tmp_path / "b.json").read_text())
    assert {size["workload"] for size in sizes} == {"dense", "dense_k100"}
    exact = [size for size in sizes if size["policy"] == "lossless"]
    assert all(set(size["largest"].values()) == {0.0} for size in exact)


def test_sealed(cache, tmp_path):
    """Two workloads; sealed records take a few bytes more."""
    file = tmp_path / "s.json"
    printed = run(
        *("sealed.py", "--scale", "tiny", "--repetitions", 1, "--cache", cache),
        *("--workloads", "dense", "rl_bf16", "--json", file),
    )
    assert "rl_bf16" in printed
    for found in json.loads(file.read_text()).values():
        plain, sealed = (samples[0]["saves"] for samples in found.values())
        for one, other in zip(plain, sealed, strict=True):
            assert 0 < other["added_bytes"] - one["added_bytes"] < 10_000


def test_floors():
    """Both handlers, then one and two threads."""
    printed = run("floors.py", "--saves", 2, "--chunks", 4)
    for text in ("orbax_delta", "Orbax", "search", "digest", "GB/s"):
        assert text in printed


def test_quality(tmp_path):
    """Every policy in both phases, and a picture."""
    files = ["--json", tmp_path / "q.json", "--plot", tmp_path / "q.png"]
    printed = run("quality.py", "--quick", *files)
    for text in ("pre-training", "fine-tune", "adamw(lr)", "verdict"):
        assert text in printed
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
    outcomes = json.loads((tmp_path / "q.json").read_text())
    assert {len(outcome["differences"]) for outcome in outcomes} == {1}


def test_archives(cache):
    """A row for each kind of run, and the archive is whole."""
    arguments = ["--scale", "tiny", "--saves", 4, "--every", 2, "--cache", cache]
    printed = run("archives.py", *arguments)
    for name in ("dense", "rl_bf16", "frozen_backbone"):
        assert name in printed
