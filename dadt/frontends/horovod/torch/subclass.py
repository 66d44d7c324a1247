"""More methods for an optimizer that a script has made."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=torch.optim.Optimizer)


def subclassed(optimizer: T, mixin: type, extra: Any) -> T:
    """Give the optimizer the methods of a mixin, which finds `extra` as `_averaging`. Its class keeps its name."""
    own = type(optimizer)
    optimizer.__class__ = type(own.__name__, (mixin, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    optimizer._averaging = extra  # type: ignore[attr-defined]
    return optimizer
