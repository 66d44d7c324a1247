"""Finds the objects that a data set can use when it reads an item: attributes, transforms, and global names in its
code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from dadt.inject.failure import is_users

DEPTH = 8
"""Maximum number of references to follow from the data set to an object."""
MOST = 10_000
"""Maximum number of objects to visit."""
ELEMENTS = 64
"""Maximum number of elements to visit in a container: lists of transforms are short, while lists of samples may have
millions."""
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, np.ndarray, ModuleType, type)


def reachable(root: Any) -> Iterator[Any]:
    """Yield the objects that can be reached from `root`, each once, nearest first."""
    seen: set[int] = set()
    level = [root]
    for _ in range(DEPTH):
        found = [each for value in level for each in _inside(value)]
        level = []
        for each in found:
            if not isinstance(each, PLAIN) and id(each) not in seen and len(seen) < MOST:
                seen.add(id(each))
                level.append(each)
                yield each


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        yield from _named(value)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (each for each, _ in zip(value, range(ELEMENTS), strict=False))
    elif isinstance(value, Mapping):
        yield from (each for each, _ in zip(value.values(), range(ELEMENTS), strict=False))
    elif isinstance(members := getattr(value, "__dict__", None), dict):
        yield from members.values()
        yield from _methods(type(value))  # type: ignore[arg-type]


def _named(function: FunctionType) -> Iterator[Any]:
    """Yield the global and enclosing variables that a function's code uses."""
    if not is_users(function.__code__.co_filename):
        return
    with_cells = inspect.getclosurevars(function)
    yield from with_cells.nonlocals.values()
    yield from with_cells.globals.values()


@functools.cache
def _methods(kind: type) -> list[FunctionType]:
    """Return the methods of a class, including inherited ones, that were written by the user, not by a library."""
    members = [member for base in kind.__mro__ for member in vars(base).values()]
    return [each for each in members if isinstance(each, FunctionType) and is_users(each.__code__.co_filename)]
