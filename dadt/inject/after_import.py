"""Changes modules of libraries that the script may import later, or never."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change` with the module `name` right after it is imported, or immediately if it is already imported."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, change))


class _AfterImport(importlib.abc.MetaPathFinder):
    """An import finder that lets the other finders locate the module, and calls `change` once the module was
    executed."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change
        self._looks = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._looks:
            return None
        self._looks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looks = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Removed only when the module is executed, because many callers look up a module's spec only to see whether
            # it is installed.
            sys.meta_path.remove(self)
            execute(module)
            self._change(module)

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec
