"""Puts functions of DADT in the place of a library's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def replaces(name: str, *owners: Any) -> Callable[[Any], Any]:
    """Return a decorator for the function that takes the place of the function `name` in each of these modules or
    classes. It looks like the original, which it calls as its own `__wrapped__`."""
    original = getattr(owners[0], name)
    static = isinstance(inspect.getattr_static(owners[0], name), staticmethod)

    def put(function: Any) -> Any:
        functools.update_wrapper(function, original)
        for owner in owners:
            setattr(owner, name, staticmethod(function) if static else function)
        return function

    return put
