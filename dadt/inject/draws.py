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
"""Modules that are not examined, because they define base classes of every optimizer."""


def draws_from_torch_alone(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's steps can draw random numbers from torch only, because no module that defines its
    classes imports `random` or numpy."""
    kind: Any = type(optimizer)
    return _draws_from_torch_alone(kind)


@functools.cache
def _draws_from_torch_alone(kind: Any) -> bool:
    modules = [sys.modules.get(base.__module__) for base in kind.__mro__ if base.__module__ not in _KNOWN]
    return not any(value is random or value is np for module in modules for value in vars(module or object).values())


def random_state(only_torch: bool) -> str:
    """Return the state of the global random generators as text; it changes whenever a number is drawn. only_torch:
    leave out those of Python and NumPy."""
    state = torch.default_generator.get_state().numpy().tobytes()
    return repr((state, () if only_torch else (random.getstate(), np.random.get_state())))
