"""docs/errors.md and docs/ssh.md hold what dadt says when something is wrong."""

from __future__ import annotations

import ast
import builtins
import copy
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT

from dadt import errors

TYPES = {name for name, value in vars(errors).items() if isinstance(value, type)}
CALLS = {"ValueError", "TypeError"}
"""Of Python's own: what a verb says of its arguments."""
INSIDE = ("dadt/launch/", "dadt/control/", "dadt_cli/bench/ratio.py")
"""Where these are caught, and told in another sentence."""
VERDICTS = "dadt/launch/ssh/refusals.py"
THROWN = re.compile(r'Error\(Code::k(?!Internal)\w+,\s*(?:[\w.()]+ \+ )?"(?P<text>[^"]+)"')
REMEDY = re.compile(r"; | -> |: (?=give|use|choose|run|start|send)|\? | \((?=is|see)|, and ")
"""Where a sentence goes on with what to do, or with more than it takes to know it again."""
HOLE = "\0"
ENOUGH, TOO_FEW = 22, 8
"""Parts of a message by which it is known."""


def template(node: ast.expr) -> str:
    """A message with a hole for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return HOLE


class Inlined(ast.NodeTransformer):
    """Puts texts that a function keeps in a variable, assigned once, where it uses the variable."""

    def __init__(self) -> None:
        self._texts: dict[str, ast.expr] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer = self._texts
        inner = list(ast.walk(node))
        assigned = [each for each in inner if isinstance(each, ast.Assign) and len(each.targets) == 1]
        names = Counter(each.id for each in inner if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        names.update(each.arg for each in inner if isinstance(each, ast.arg))
        texts = (ast.Constant, ast.JoinedStr, ast.BinOp)
        self._texts = {
            name: copy.deepcopy(each.value)
            for each in assigned
            if names[name := ast.unparse(each.targets[0])] == 1 and isinstance(each.value, texts)
        }
        self.generic_visit(node)
        self._texts = outer
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        known = self._texts.get(node.value.id) if isinstance(node.value, ast.Name) else None
        return node if known is None else known

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._texts.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def raised(path: Path) -> Iterator[tuple[int, str]]:
    """Messages of the errors and warnings in a Python file, each with its line."""
    name = str(path.relative_to(ROOT))
    types = TYPES if name.startswith(INSIDE) else TYPES | CALLS
    for node in ast.walk(Inlined().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.Return) and name == VERDICTS and node.value is not None:
            yield node.lineno, template(node.value)
        elif isinstance(node, ast.Call) and node.args:
            warns = any(getattr(each, "value", "") == "warning" for each in (*node.args[1:], *_values(node)))
            if _name(node) in types or (_name(node) == "say" and warns):
                yield node.lineno, template(node.args[0])


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


def _values(call: ast.Call) -> list[ast.expr]:
    return [keyword.value for keyword in call.keywords]


def messages() -> list[tuple[str, str]]:
    """Each message with its place. Those that are one value alone are made elsewhere."""
    found = []
    for path in sorted([*ROOT.glob("dadt/**/*.py"), *ROOT.glob("dadt_cli/**/*.py")]):
        found += [(text, f"{path.relative_to(ROOT)}:{line}") for line, text in raised(path)]
    for path in sorted(ROOT.glob("csrc/**/*.cc")):
        found += [(thrown["text"], path.name) for thrown in THROWN.finditer(path.read_text())]
    return found


def known_by(text: str) -> re.Pattern[str] | None:
    """What a line of the page must hold: the beginning. None for too few words to be found by."""
    for part in (REMEDY.split(text)[0], text):
        words = [word.strip("`:,") for word in part.replace(HOLE, f" {HOLE} ").split()]
        first = list(itertools.takewhile(lambda at: sum(map(len, words[:at])) < ENOUGH, range(len(words))))
        said = [word for word in words[: len(first)] if word not in (HOLE, "")]
        if sum(map(len, said)) >= TOO_FEW:
            return re.compile(".*?".join(map(re.escape, said)))
    return None


def test_the_page_holds_every_message() -> None:
    found = messages()
    assert len(found) > 300
    assert sum(known_by(message) is not None for message, _ in found) > 280
    text = "\n".join((ROOT / "docs" / name).read_text() for name in ("errors.md", "ssh.md"))
    text = re.sub(r"\n *(?![-|#\s])", " ", text)  # a paragraph is one line
    lines = [line.replace("`", "").replace(r"\|", "|") for line in text.splitlines()]
    missing = [
        f"{where}: {message.replace(HOLE, '{}')}"
        for message, where in found
        if (pattern := known_by(message)) is not None and not any(map(pattern.search, lines))
    ]
    assert not missing, "tell of these in docs/errors.md:\n" + "\n".join(missing)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_types_are_pythons_own(name: str) -> None:
    assert issubclass(getattr(builtins, name), Exception)
