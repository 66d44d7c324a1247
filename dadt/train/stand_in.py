"""Optimizers of torch that stand for optimizers of other libraries."""

from __future__ import annotations

from typing import Any

import torch


class StandIn(torch.optim.Optimizer):
    """An optimizer of torch that stands for another library's, which users know by its own name. If that one updates a
    momentum and a second moment as Adam does, this one shows both, where they are, under the names that torch's Adam
    gives them."""

    title: str
    """Name of the other optimizer, for users."""
    unsuited: str
    """The reason why DADT cannot compute with its moments; empty if it can, as with Adam's."""

    @property
    def betas(self) -> tuple[float, float]:
        """Factors of momentum and second moment in their updates, which Adam calls betas."""
        return 0.0, 0.0

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return 0.0

    def moments(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's `exp_avg`, `exp_avg_sq` and `step`; empty if the other optimizer has none of them."""
        return {}


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name by which users know the optimizer."""
    return optimizer.title if isinstance(optimizer, StandIn) else type(optimizer).__name__
