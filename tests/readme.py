"""The README's Python blocks, by section, for the tests that run them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"
RECIPES = "Recipes"
BUCKETS = "Object stores"
LOOP = "The loop"


def sections(text: str, mark: str) -> Iterator[tuple[str, str]]:
    """Title and text of each section; what precedes the first one has its first line.

    Args:
        text: Markdown.
        mark: `##` or `###`.
    """
    for section in text.split(f"\n{mark} "):
        title, _, body = section.partition("\n")
        yield title, body


def blocks(text: str) -> list[str]:
    """The Python blocks of a text, in order."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def recipes() -> dict[str, list[str]]:
    """Blocks of each recipe, by its title, in order."""
    body = dict(sections(README.read_text(), "##"))[RECIPES]
    return {title: blocks(text) for title, text in sections(body, "###")}


def run(texts: list[str], **names: Any) -> dict[str, Any]:
    """Run blocks in one namespace that has these names already; what it has then."""
    for text in texts:
        exec(compile(text, str(README), "exec"), names)
    return names
