"""The README's Python blocks run, in order, in one namespace; some by themselves."""

import buckets
import orbax.checkpoint as ocp
import pytest
import readme
import strategies

import orbax_delta


def test_every_python_block_runs(root, capsys):
    """What a newcomer copies works, and prints the report's line."""
    texts = [
        block
        for title, body in readme.sections(readme.README.read_text(), "##")
        if title not in (readme.RECIPES, readme.BUCKETS)
        for block in readme.blocks(body)
    ]
    names = readme.run(texts, root=root)
    assert len(texts) == 15
    out = capsys.readouterr().out
    assert "times smaller" in out
    assert names["step"] in range(5)
    assert "No space left on device" in out


def test_every_recipe_runs(root):
    """In order, in one namespace; `test_recipes` judges what each of them leaves."""
    pytest.importorskip("grain", reason="Grain has no wheel for this platform")
    recipes = readme.recipes()
    texts = [block for found in recipes.values() for block in found]
    assert len(texts) == 8
    names = readme.run(texts, root=root)
    assert names["half"]["w"].dtype == "bfloat16"


def test_the_loop_resumes_exactly(tmp_path):
    """Stopped, damaged and gone on with: the bits of a run that was never stopped."""
    pytest.importorskip("grain", reason="Grain has no wheel for this platform")
    train = readme.run(readme.recipes()[readme.LOOP])["train"]
    root = tmp_path / "run"
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
    body = dict(readme.sections(readme.README.read_text(), "##"))[readme.BUCKETS]
    names = readme.run(readme.blocks(body), ocp=ocp, orbax_delta=orbax_delta)
    with names["manager"] as manager:
        manager.save(0, args=ocp.args.StandardSave({"step": 0}))
        manager.wait_until_finished()
        assert manager.restore(0) == {"step": 0}
