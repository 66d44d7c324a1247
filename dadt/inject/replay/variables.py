"""Finds tensors in the script's variables, such as sums of losses, a hidden state, or the last loss. A tensor's name
says at which place it was found."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from dadt.comm.shards import has_memory, local

SMALL = 1 << 20
"""Size in bytes up to which any tensor is considered; larger ones are usually data or results of a model. A larger
tensor is considered only if it has the shape of a model's tensor, since it may be a copy, such as the best weights so
far."""
DEPTH = 6
"""Maximum nesting depth of containers and objects to search for tensors."""
MANY = 10_000
"""Maximum length of a container that is searched for tensors."""
_NOT_THEIRS = frozenset({"dadt", "dadt_cli", "torch", "numpy", "builtins", "_io", "collections"})


def held(
    frame: FrameType | None, models: Collection[torch.Tensor], attributes: Iterable[tuple[str, torch.Tensor]] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the local variables of `frame` and all its callers, with names that are the same whenever
    the script reaches the same place again. models: the models' tensors, which are left out. attributes: tensors in
    attributes of modules, with their names.
    """
    known, kinds = set(map(id, models)), {(local(t).shape, t.dtype) for t in models}

    def counts(tensor: torch.Tensor) -> bool:
        part = local(tensor)
        small = part.numel() * part.element_size() <= SMALL
        return id(tensor) not in known and has_memory(part) and (small or (part.shape, part.dtype) in kinds)

    for name, tensor in attributes:
        if counts(tensor):
            yield name, tensor
    calls = []
    while frame is not None:
        if _package(frame.f_globals.get("__name__", "")) not in _NOT_THEIRS:
            calls.append(frame)
        frame = frame.f_back
    seen: set[int] = set()
    for depth, call in enumerate(reversed(calls)):
        for path, tensor in _within(f"{depth} {call.f_code.co_name}", dict(call.f_locals), DEPTH, seen):
            if counts(tensor):
                yield path, tensor


def _within(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if not depth or id(value) in seen:
        return
    items = _items(value)
    if items:
        seen.add(id(value))
    for name, item in items:
        yield from _within(f"{path}.{name}", item, depth - 1, seen)


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return the names and values of the items in a container or object, in order. The list is empty if this type is
    not searched."""
    if isinstance(value, Mapping) and len(value) <= MANY:
        return [(key, item) for key, item in value.items() if isinstance(key, str | int)]
    if isinstance(value, list | tuple | deque) and len(value) <= MANY:
        return list(enumerate(value))
    if isinstance(value, type | ModuleType | FunctionType) or _package(type(value).__module__) in _NOT_THEIRS:
        return []
    return list(getattr(value, "__dict__", {}).items())


def _package(name: str) -> str:
    return name.partition(".")[0]
