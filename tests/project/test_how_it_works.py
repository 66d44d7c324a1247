"""docs/how-it-works.md walks along files that are there, and that import each other in this order."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest
from harness import ROOT

PAGE = (ROOT / "docs" / "how-it-works.md").read_text()
WALKS = ("A gradient", "A job", "A snapshot")


def steps(walk: str) -> list[str]:
    """The first file that each step of the walk names."""
    section = PAGE.partition(f"## {walk}, file by file")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.M)


def imported(file: str) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{each.name}" for each in node.names)))
    return found


def module(file: str) -> str:
    return str(Path(file).with_suffix("")).replace("/", ".")


@pytest.mark.parametrize("walk", WALKS)
def test_each_file_of_a_walk_imports_the_next_or_is_imported_by_it(walk: str) -> None:
    files = steps(walk)
    assert len(files) >= 5
    assert not [file for file in files if not (ROOT / file).is_file()]
    apart = [
        f"{one} and {other}"
        for one, other in pairwise(files)
        if module(other) not in imported(one) and module(one) not in imported(other)
    ]
    assert not apart
