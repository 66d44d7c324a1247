"""Finds tensors that a forward stores in attributes of its modules, such as an auxiliary loss, in addition to what it
returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dadt.comm.shards import has_memory

PLAIN = (torch.Tensor, list, tuple, dict)
"""Types of attributes that are searched for tensors."""


def left_by(module: nn.Module, call: Callable[[], Any]) -> tuple[Any, list[tuple[nn.Module, str, Any]]]:
    """Call the forward `call`. Return its result, and the attributes with tensors that it has set in this module and
    its submodules."""
    before = {(id(part), name): list(map(id, _tensors(value))) for part, name, value in _attributes(module)}
    result = call()
    changed = [
        (part, name, value)
        for part, name, value in _attributes(module)
        if (now := _tensors(value)) and list(map(id, now)) != before.get((id(part), name)) and all(map(has_memory, now))
    ]
    return result, changed


def put(part: nn.Module, name: str, value: Any) -> None:
    """Set the attribute `name` of the module `part` to a value that a forward stored in it. A list or dict is changed
    in place, since the script may hold a reference to it."""
    there = part.__dict__.get(name)
    if isinstance(there, list) and isinstance(value, list):
        there[:] = value
    elif isinstance(there, dict) and isinstance(value, dict):
        there.clear()
        there.update(value)
    else:
        part.__dict__[name] = value


def _attributes(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for part in module.modules():
        for name, value in part.__dict__.items():
            # Parameters, buffers and submodules are in dicts that torch itself adds to each module.
            if isinstance(value, PLAIN) and name not in _TORCHS:
                yield part, name, value


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


_TORCHS = frozenset(nn.Module().__dict__)
