"""Replaces functions and methods of libraries by DADT's."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def replaces(name: str, *owners: Any) -> Callable[[Any], Any]:
    """Return a decorator for a function that replaces the function `name` in each of these modules or classes. The new
    function gets the original's name and docstring, and calls the original as its own attribute `__wrapped__`."""
    original = getattr(owners[0], name)
    static = isinstance(inspect.getattr_static(owners[0], name), staticmethod)

    def put(function: Any) -> Any:
        functools.update_wrapper(function, original)
        for owner in owners:
            setattr(owner, name, staticmethod(function) if static else function)
        return function

    return put


def rebind(name: str, original: Any, function: Any) -> None:
    """Put `function` in the place of `original` in all modules that have imported it by this name already."""
    for module in list(sys.modules.values()):
        # In place of vars(), which would load a module that is to be loaded at its first use. Objects that only pose as
        # modules (cffi's libraries) may have no dictionary.
        names = object.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else {}
        if names.get(name) is original:
            names[name] = function
