"""Checks before workers are started whether a class of the user, which a flag names, exists in its source file."""

from __future__ import annotations

import ast
from pathlib import Path

from dadt.errors import ConfigError


def check(asked: str, name: str, folder: Path) -> None:
    """Raise ConfigError if the source file does not define the class. asked: the flag, for the message. name: the class
    as "package.module:Class". folder: where workers look for the module first.

    The source is parsed, as importing the module here would import torch. A module that is not in the folder is not
    checked, since only workers can find it.
    """
    path, _, cls = name.partition(":")
    base = folder.joinpath(*path.split("."))
    source = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
    if source is None:
        return
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{asked} {name}: {source} cannot be read: {error}") from error
    if cls not in (names := _names(tree)) and "*" not in names:
        raise ConfigError(f"{asked} {name}: {source} has no {cls}")


def _names(tree: ast.Module) -> set[str]:
    """Return all names that the module may define. They include "*" if the module imports everything from another
    one."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            names.add("*")
    return names
