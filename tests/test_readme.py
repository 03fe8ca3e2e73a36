"""The README's Python blocks run, in order, in one namespace; some by themselves."""

import re
from pathlib import Path

import buckets
import orbax.checkpoint as ocp
import pytest
import strategies

import orbax_delta

README = Path(__file__).parent.parent / "README.md"
RECIPE = "Resuming exactly"
BUCKETS = "Object stores"


def blocks():
    """Title of the section and text of each Python block."""
    for section in README.read_text().split("\n## "):
        for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            yield section.partition("\n")[0], block


def test_every_python_block_runs(root, capsys):
    """What a newcomer copies works, and prints the report's line."""
    texts = [block for title, block in blocks() if title not in (RECIPE, BUCKETS)]
    namespace = {"root": root}
    for block in texts:
        exec(compile(block, str(README), "exec"), namespace)
    assert len(texts) == 15
    out = capsys.readouterr().out
    assert "times smaller" in out
    assert namespace["step"] in range(5)
    assert "No space left on device" in out


def test_the_recipe_resumes_exactly(tmp_path):
    """Stopped, damaged and gone on with: the bits of a run that was never stopped."""
    pytest.importorskip("grain", reason="Grain has no wheel for this platform")
    (recipe,) = (block for title, block in blocks() if title == RECIPE)
    namespace = {}
    exec(compile(recipe, str(README), "exec"), namespace)
    train, root = namespace["train"], tmp_path / "run"
    wanted = train(tmp_path / "whole", 47)
    train(root, 7)
    train(root, 23)
    (root / "20" / "default" / "MANIFEST").write_bytes(b"")
    train(root, 38)
    got = train(root, 47)
    assert int(got["step"]) == 47
    strategies.assert_same_tree(got, wanted)
    assert orbax_delta.save_report(root / "40").chunks_by_form.keys() > {"difference"}


def test_the_block_for_buckets_runs(s3):
    """The manager that it opens saves and restores there."""
    pytest.importorskip("s3fs", reason=buckets.NEEDS_S3FS)
    (block,) = (block for title, block in blocks() if title == BUCKETS)
    namespace = {"ocp": ocp, "orbax_delta": orbax_delta}
    exec(compile(block, str(README), "exec"), namespace)
    with namespace["manager"] as manager:
        manager.save(0, args=ocp.args.StandardSave({"step": 0}))
        manager.wait_until_finished()
        assert manager.restore(0) == {"step": 0}
