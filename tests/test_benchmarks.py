"""The benchmarks run: their figures stand in documents that nobody measures daily.

Small and untimed; what they print is not looked at, only that all of it is there.
"""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_rows(tmp_path):
    """Every cost of the smallest ladder, as JSON, and a picture of it."""
    command = [
        sys.executable,
        BENCHMARKS / "rows.py",
        "--rows",
        "500",
        "--leaves",
        "40",
    ]
    files = ["--json", tmp_path / "rows.json", "--plot", tmp_path / "rows.png"]
    done = subprocess.run(
        [*command, *files], check=True, capture_output=True, text=True, timeout=300
    )
    assert "480" in done.stdout
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    found = json.dumps(json.loads((tmp_path / "rows.json").read_text()))
    for cost in ("encode part", "parse part", "open step", "plan prune", "MANIFEST"):
        assert cost in found
