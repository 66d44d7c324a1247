"""Replaces functions and methods of libraries by DADT's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
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
