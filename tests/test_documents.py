"""README.md and DESIGN.md against what is there: options, decisions, files, links.

Their Python blocks run in `test_readme`; FORMAT.md has `test_format_document`.
"""

import dataclasses
import re
from pathlib import Path

import pytest

from orbax_delta.options import DeltaOptions

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "orbax_delta"
DOCUMENTS = (
    REPOSITORY / "README.md",
    PACKAGE / "DESIGN.md",
    PACKAGE / "FORMAT.md",
    REPOSITORY / "remat_policies" / "DESIGN.md",
)
DESIGN = (PACKAGE / "DESIGN.md").read_text()
DECISIONS = [int(number) for number in re.findall(r"(?m)^\*\*(\d+)\. ", DESIGN)]


def test_every_option_is_in_the_readme():
    """One row of the table of options for each, in the order of the code."""
    readme = (REPOSITORY / "README.md").read_text()
    (table,) = re.findall(r"\| option \| default \|.*\n\|-.*\n((?:\|.*\n)+)", readme)
    rows = re.findall(r"(?m)^\| `(\w+)` \|", table)
    assert rows == [field.name for field in dataclasses.fields(DeltaOptions)]


def test_decisions_are_numbered_in_order():
    """None twice, none left out."""
    assert list(range(1, len(DECISIONS) + 1)) == DECISIONS


def test_decisions_that_are_referred_to_exist():
    """In code and documents alike."""
    files = [*PACKAGE.rglob("*.py"), *DOCUMENTS, REPOSITORY / "pyproject.toml"]
    named = [
        int(number)
        for path in files
        for number in re.findall(r"[Dd]ecision (\d+)", path.read_text())
    ]
    assert named
    assert set(named) <= set(DECISIONS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_lead_somewhere(path):
    """Files of tests and benchmarks that hold a claim, and links within the package."""
    text = path.read_text()
    files = re.findall(r"\b(?:tests|benchmarks|notebooks)/[\w./]*\w", text)
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert files
    assert all((REPOSITORY / name).exists() for name in files), files
    assert all((path.parent / name).exists() for name in links), links


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_line_is_wrapped_by_accident(path):
    """Prose is wrapped; tables and code are as wide as they are."""
    blocks = path.read_text().split("```")[::2]
    lines = [line for block in blocks for line in block.splitlines()]
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120


def test_the_readme_leads_to_all_its_sections():
    """Each is in the table at its top, under the anchor that it has."""
    readme = (REPOSITORY / "README.md").read_text()
    prose = "".join(readme.split("```")[::2])
    titles = re.findall(r"(?m)^## (.+)$", prose)
    links = dict(re.findall(r"\[([^]\n]+)\]\(#([\w-]+)\)", prose))
    assert {title: title.lower().replace(" ", "-") for title in titles} == {
        title: links.get(title) for title in titles
    }
