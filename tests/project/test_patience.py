"""Tests wait with one patience, so that a slow machine needs one change and not one for each wait."""

from __future__ import annotations

import ast
from pathlib import Path

from harness import TESTS

WAITS = {"run", "communicate", "wait", "join", "get", "poll", "settimeout", "create_connection", "urlopen"}
"""Functions and methods that give up after some seconds, by name."""
LEAST = 5.0
"""Seconds below which a wait is what is tested, such as that nothing comes."""


def numbers(node: ast.AST) -> list[ast.expr]:
    """The expressions that say when a wait ends, or what is added to the time for that."""
    if isinstance(node, ast.BinOp) and ast.unparse(node.left) == "time.monotonic()":
        return [node.right]
    if not isinstance(node, ast.Call) or getattr(node.func, "attr", getattr(node.func, "id", "")) not in WAITS:
        return []
    first = node.args[:1] if isinstance(node.func, ast.Attribute) else []
    return first + [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]


def own_deadlines(path: Path) -> list[str]:
    found = [each for node in ast.walk(ast.parse(path.read_text())) for each in numbers(node)]
    given = [each for each in found if isinstance(each, ast.Constant) and isinstance(each.value, int | float)]
    return [f"{path.relative_to(TESTS)}:{each.lineno}" for each in given if each.value >= LEAST]


def test_no_test_has_a_deadline_of_its_own() -> None:
    tests = [*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py"), *(TESTS / "harness").glob("*.py")]
    assert sorted(each for path in tests for each in own_deadlines(path)) == []
