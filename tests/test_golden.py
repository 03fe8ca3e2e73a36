"""What was written when the format was made is still read, bit for bit.

`golden.py` writes the store, and says when it may be written anew.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import golden
import pytest
import second_reader
import strategies
from etils import epath

import orbax_delta
from orbax_delta import check

ITEMS = (
    *(f"run/{step}/default" for step in golden.STEPS),
    "alone",
    *(f"together/{step}/default" for step in golden.TOGETHER),
)


@pytest.fixture
def store(tmp_path):
    """A copy of the golden store, somewhere else than where it was written."""
    assert golden.FOLDER.exists(), "`python tests/golden.py` writes it"
    return Path(shutil.copytree(golden.FOLDER, tmp_path / "moved"))


@pytest.mark.parametrize("item", ITEMS)
def test_the_package_reads_it(store, item):
    """Restored leaves have the bits that were written down beside the store."""
    # Of two processes only one is here: a target says where its leaves go.
    target = golden.shared_state(0) if item.startswith("together") else None
    tree = orbax_delta.DeltaCheckpointHandler().restore(
        epath.Path(store / item), orbax_delta.DeltaRestore(target)
    )
    assert golden.leaves(tree) == golden.expected_leaves(store)[item]


@pytest.mark.parametrize("item", ITEMS)
def test_the_second_reader_reads_it(store, item):
    """So do those of the reader that knows the format document alone."""
    found = {
        json.dumps(path): _bits(value)
        for path, value in second_reader.read_step(store / item).items()
    }
    assert found == golden.expected_leaves(store)[item]


def _bits(value):
    """A value of the second reader as `golden.bits` writes it."""
    if not isinstance(value, second_reader.Array):
        return golden.bits(value)
    kind = value.kind + (f" {value.key_type}" if value.key_type else "")
    return [kind, value.dtype, list(value.shape), value.data.hex()]


def test_the_state_is_still_what_was_written(store):
    """The states are made by a rule that has not changed since."""
    expected = golden.expected_leaves(store)
    for step in golden.STEPS:
        assert golden.leaves(golden.state(step)) == expected[f"run/{step}/default"]
    for step in golden.TOGETHER:
        found = golden.leaves(golden.shared_state(step))
        assert found == expected[f"together/{step}/default"]


def test_a_run_goes_on_from_it(store):
    """A manager restores the latest step and its next save builds on it."""
    with strategies.open_run(store / "run") as run:
        latest = run.manager.latest_step()
        state = run.restore(latest)
        state["weights"] = state["weights"].at[5].set(3.5)
        run.save(latest + 1, state)
        strategies.assert_same_tree(run.restore(latest + 1), state)
        assert run.handler.last_save_report.chunks_by_form["reference"] > 20
    assert list(check.verify(str(store / "run")).problems) == []


def test_it_holds_every_form_and_rule(store):
    """All forms, rules, methods of planes and kinds of leaves are in it."""
    forms, rules, kinds = set(), set(), set()
    for step in golden.STEPS:
        opened = strategies.read_step(store / "run", step)
        forms |= {int(ref.form) for row in opened.rows for ref in row.refs}
        rules |= {int(row.rule) for row in opened.rows}
        kinds |= {leaf.kind for leaf in opened.manifest.leaves}
    assert forms == {1, 2, 3, 4, 5}
    assert rules == {0, 1, 2}
    assert len(kinds) == 10


def test_it_says_nothing_of_the_machine_that_wrote_it(store):
    """No path, no host; small, and plain files only."""
    files = [path for path in golden.FOLDER.rglob("*") if not path.is_dir()]
    assert not any(path.is_symlink() for path in files)
    assert sum(path.stat().st_size for path in files) <= golden.MOST_BYTES
    for path in store.rglob("MANIFEST"):
        document = second_reader.read_manifest(path.read_bytes())
        assert document["store_url"] in ("", "golden/_delta_store/")
        del document["store_url"], document["leaves"], document["tree"]
        assert "/" not in json.dumps(document)
    for path in store.rglob("commit_success.txt"):
        assert not path.read_text() or " to golden/" in path.read_text()
    assert not list(store.glob("run/_delta_store/pins/*"))


def test_it_is_not_written_anew_by_accident():
    """The script refuses while the version is the same."""
    ended = subprocess.run(
        [sys.executable, golden.__file__], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "--force does it all the same" in ended.stderr
