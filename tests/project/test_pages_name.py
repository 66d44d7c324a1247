"""Files, folders and classes that the pages name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACE = re.compile(r"`((?:dadt|dadt_cli|csrc|tests|benchmarks|examples|docs)/[\w/.*-]*)`")
FILE = re.compile(r"`([\w/]+\.(?:pyi?|h|cc))`")
CLASS = re.compile(r"`([A-Z]\w*[a-z]\w*)`")
DEFINED = re.compile(r"^\s*(?:class|struct|enum class) (\w+)|^(\w+) = ", re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_places_are_there(page: Path) -> None:
    missing = [name for name in PLACE.findall(page.read_text()) if not [*ROOT.glob(name.rstrip("/"))]]
    assert not missing


def test_files_and_classes_of_the_architecture_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = ("dadt", "dadt_cli", "csrc", "tests", "benchmarks", "examples")
    kinds = (".py", ".pyi", ".h", ".cc")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    files = [f"/{path.relative_to(ROOT)}" for path in sources]
    assert [n for n in FILE.findall(page) if not any(file.endswith(f"/{n}") for file in files)] == []
    known = {name for source in sources for found in DEFINED.findall(source.read_text()) for name in found}
    assert sorted(set(CLASS.findall(page)) - known) == []


def test_a_newcomer_learns_few_words() -> None:
    words = (ROOT / "docs" / "architecture.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    assert len([line for line in words.splitlines() if line.startswith("| ")]) - 1 <= 25  # without the head
