"""Finds all modules of a process, and a reproducible order of those that an optimizer trains."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn


def by_parameters(roots: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """Sort the modules by the positions of their parameters in the optimizer, so that the order is the same on all
    ranks and in each run."""
    every = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    numbers = {id(p): i for i, p in enumerate(every)}
    below = {m: [numbers[id(p)] for p in m.parameters() if id(p) in numbers] for m in roots}
    return sorted(below, key=lambda m: (below[m], type(m).__qualname__))


def all_modules() -> list[nn.Module]:
    """Return all modules of the process, whether they were built, unpickled or copied, in no fixed order."""
    # Not isinstance, which reads an object's __class__ and so may run a proxy's code.
    return [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
