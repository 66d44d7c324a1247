"""Tensors that a forward leaves in attributes of its modules, as an auxiliary loss: results beside what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

PLAIN = (torch.Tensor, list, tuple, dict)
"""Kinds of attributes that are looked into."""


def left_by(module: nn.Module, call: Callable[[], Any]) -> tuple[Any, list[tuple[nn.Module, str, Any]]]:
    """What the call returns, and the attributes with tensors that it has set, of this module and those within it."""
    before = {(id(part), name): _tensors(value) for part, name, value in _attributes(module)}
    result = call()
    changed = [
        (part, name, value)
        for part, name, value in _attributes(module)
        if (now := _tensors(value)) and now != before.get((id(part), name))
    ]
    return result, changed


def put(part: nn.Module, name: str, value: Any) -> None:
    """Set the attribute to what the call left there. A list or dict that the script may hold stays the same object."""
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
            # Parameters, buffers and modules stand in dicts of torch's.
            if isinstance(value, PLAIN) and name not in _TORCHS:
                yield part, name, value


def _tensors(value: Any) -> list[int]:
    return [id(each) for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


_TORCHS = frozenset(nn.Module().__dict__)
