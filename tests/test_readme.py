"""The README's Python blocks run, in order, in one namespace."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_every_python_block_runs(root, capsys):
    """What a newcomer copies works, and prints the report's line."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    namespace = {"root": root}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert len(blocks) == 6
    out = capsys.readouterr().out
    assert "times smaller" in out
    assert namespace["step"] in range(5)
    assert "No space left on device" in out
