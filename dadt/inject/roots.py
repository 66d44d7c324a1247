"""All modules of a process, and an order of those that an optimizer trains."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn


def by_parameters(roots: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """The roots in the order of the optimizer's parameters below them, which is the same on all ranks and in each
    run."""
    every = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    numbers = {id(p): i for i, p in enumerate(every)}
    below = {m: [numbers[id(p)] for p in m.parameters() if id(p) in numbers] for m in roots}
    return sorted(below, key=lambda m: (below[m], type(m).__qualname__))


def all_modules() -> list[nn.Module]:
    """Every module there is: built by hand, unpickled or copied. Garbage collections change their order."""
    # By type, not isinstance: a proxy's __class__ may run code of the script's.
    return [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
