"""The notebooks' code runs from top to bottom."""

import json
import tempfile
from pathlib import Path

import matplotlib as mpl
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
PRINTS = {
    "a_follower_of_a_training_run": "and has the same bits",
    "choosing_a_remat_policy": "gradients agree",
    "damage_and_healing": "none silently wrong",
    "first_delta_checkpoint": "resumes exactly",
    "lora_and_frozen_backbone": "of the state",
    "many_hosts": "have the same bits",
}
"""What each says at its end."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, capsys, tmp_path, monkeypatch):
    """Cells in order in one namespace; no plot window, and outputs are not kept."""
    mpl.use("Agg")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cells = json.loads(path.read_text())["cells"]
    namespace = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs before committing"
            exec(compile("".join(cell["source"]), str(path), "exec"), namespace)
    assert PRINTS[path.stem] in capsys.readouterr().out
    assert namespace["figure"].axes
    namespace["plt"].close("all")
