"""Tests wait with one patience, so that a slow machine needs one change and not one for each wait."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from harness import TESTS
from harness.patience import FACTOR, PATIENCE

WAITS = {"run", "communicate", "wait", "join", "get", "poll", "settimeout", "create_connection", "urlopen"}
WAITS |= {"await_that", "finish"}
"""Functions and methods that give up after some seconds, by name."""
LEAST = 5.0
"""Seconds below which a wait is what is tested, such as that nothing comes."""
APART = TESTS / "programs/optimizers/sweep.py"
"""It has an environment of its own, without these tests."""
Functions = dict[str, ast.FunctionDef]


def name_of(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def ends(node: ast.AST) -> list[ast.expr]:
    """The expressions that say when a wait ends, or what is added to the time for that."""
    if isinstance(node, ast.BinOp) and ast.unparse(node.left) == "time.monotonic()":
        return [node.right]
    if not isinstance(node, ast.Call) or name_of(node.func) not in WAITS:
        return []
    first = node.args[:1] if isinstance(node.func, ast.Attribute) else []
    return first + [keyword.value for keyword in node.keywords if keyword.arg in ("timeout", "seconds")]


def own_deadlines(path: Path) -> list[str]:
    found = [each for node in ast.walk(ast.parse(path.read_text())) for each in ends(node)]
    given = [each for each in found if isinstance(each, ast.Constant) and isinstance(each.value, int | float)]
    return [f"{path.relative_to(TESTS)}:{each.lineno}" for each in given if each.value >= LEAST]


def test_no_test_has_a_deadline_of_its_own() -> None:
    tests = [path for path in TESTS.rglob("*.py") if path != APART]
    assert sorted(each for path in tests for each in own_deadlines(path)) == []


def longest_wait(name: str, functions: Functions, seen: set[str]) -> float:
    """How often PATIENCE a function waits at most for one thing, with those of its module that it names and its
    fixtures."""
    seen.add(name)
    nodes = list(ast.walk(functions[name]))
    factors = [
        each.left.value
        for each in nodes
        if isinstance(each, ast.BinOp) and isinstance(each.left, ast.Constant) and name_of(each.right) == "PATIENCE"
    ]
    named = {each.id for each in nodes if isinstance(each, ast.Name)} | {
        each.arg for each in nodes if isinstance(each, ast.arg)
    }
    others = [longest_wait(each, functions, seen) for each in sorted(named & set(functions)) if each not in seen]
    return max([1.0, *factors, *others])


def impatient(path: Path) -> list[str]:
    """Tests that pytest ends before their longest wait does."""
    text = path.read_text()
    if not re.search(r"\d \* PATIENCE", text):
        return []
    module = ast.parse(text)
    functions = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef)}
    marks = [each for each in module.body if isinstance(each, ast.Assign) and name_of(each.targets[0]) == "pytestmark"]
    found = []
    for name, function in functions.items():
        if not name.startswith("test_") or (longest := longest_wait(name, functions, set())) <= 1:
            continue
        given = [node for each in [*marks, *function.decorator_list] for node in ast.walk(each)]
        limits = [each for each in given if isinstance(each, ast.Call) and name_of(each.func) == "timeout"]
        numbers = [node.value for each in limits for node in ast.walk(each) if isinstance(node, ast.Constant)]
        if not numbers or max(numbers) <= longest * PATIENCE / FACTOR:
            found.append(f"{path.relative_to(TESTS)}::{name} waits for {longest:g} * PATIENCE")
    return found


def test_a_test_may_take_longer_than_its_longest_wait() -> None:
    assert [each for path in sorted(TESTS.rglob("test_*.py")) for each in impatient(path)] == []
