"""Docstrings, also those of attributes, can be read by themselves: none goes on where a name has left off."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT

GOES_ON = re.compile(r"(Of|By|As of|Those|And)\b")
LEAST_WORDS = 4


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each."""
    for node in ast.walk(ast.parse(path.read_text())):
        for each in body if isinstance(body := getattr(node, "body", None), list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.lineno, each.value.value.strip()


def test_docstrings_can_be_read_by_themselves() -> None:
    sources = [path for folder in ("dadt", "dadt_cli") for path in sorted((ROOT / folder).rglob("*.py"))]
    dark = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sources
        for line, text in docstrings(path)
        if GOES_ON.match(text) or len(text.split()) < LEAST_WORDS
    ]
    assert not dark, "\n".join(dark)
