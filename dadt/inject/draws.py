"""Finds out from which generators an optimizer's steps draw random numbers."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

_KNOWN = ("builtins", "abc", "torch.optim.optimizer")
"""Modules of base classes that are ignored, since every optimizer has them."""


def draws_from_torch_alone(optimizer: Optimizer) -> bool:
    """Return whether no module that defines the optimizer's classes imports `random` or numpy, from which steps could
    draw as well."""
    kind: Any = type(optimizer)
    return _draws_from_torch_alone(kind)


@functools.cache
def _draws_from_torch_alone(kind: Any) -> bool:
    modules = [sys.modules.get(base.__module__) for base in kind.__mro__ if base.__module__ not in _KNOWN]
    return not any(value is random or value is np for module in modules for value in vars(module or object).values())


def random_state(only_torch: bool) -> str:
    """Return the generators' state as text, to find out whether any random number was drawn."""
    state = torch.default_generator.get_state().numpy().tobytes()
    return repr((state, () if only_torch else (random.getstate(), np.random.get_state())))
