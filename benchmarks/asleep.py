"""Models whose computation leaves the processor free: each layer sleeps, like the host of a GPU that waits for it.

They show what communication costs on a machine without spare cores. Each layer waits in its forward and twice as long
in its backward, and has real gradients. Use `dadt bench advise benchmarks.asleep:model --link 1gbit --check`, from the
root of the repository. The last factories have 100 MB of weights, and say how long their exchange takes compared with a
step's computation.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

WIDTH = 1000
LAYERS = 25
"""Number of layers, each with weights of 4 MB."""
EXCHANGE = 0.84
"""Seconds that two hosts need to exchange 100 MB each over 1 Gbit/s, with the headers of their packets."""
PRODUCTS = 0.05
"""Approximate seconds in which a forward and a backward of one sample do use the processor."""


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Layer(nn.Linear):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = Wait.apply(super().forward(x), self.seconds)  # type: ignore[no-untyped-call]
        return waited


def regression(model: nn.Module, width: int) -> tuple[Any, ...]:
    """Return a workload of `dadt bench`: the model learns random vectors of this width from random ones."""

    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, width), torch.randn(size, width)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    return model, batch, loss


def asleep(layers: int, seconds: float, width: int = WIDTH) -> tuple[Any, ...]:
    """Return a workload of `layers` layers, whose forward and backward together wait `seconds` seconds."""
    return regression(nn.Sequential(*(Layer(width, seconds / layers / 3) for _ in range(layers))), width)


def model() -> tuple[Any, ...]:
    """Return a workload of 32 MB of weights and 120 ms per step."""
    return asleep(8, 0.12)


def medium() -> tuple[Any, ...]:
    """Return a workload of 8 MB of weights and 120 ms per step."""
    return asleep(8, 0.12, 500)


def small() -> tuple[Any, ...]:
    """Return a workload of 1 MB of weights and 120 ms per step."""
    return asleep(8, 0.12, 180)


def even() -> tuple[Any, ...]:
    """Return a workload whose exchange over 1 Gbit/s takes as long as a forward and backward."""
    return asleep(LAYERS, EXCHANGE - PRODUCTS)


def half() -> tuple[Any, ...]:
    """Return a workload whose exchange over 1 Gbit/s takes half as long as a forward and backward."""
    return asleep(LAYERS, 2 * EXCHANGE - PRODUCTS)


def tenfold() -> tuple[Any, ...]:
    """Return a workload whose exchange over 1 Gbit/s takes ten times as long as a forward and backward, where these use
    the processor for PRODUCTS seconds only."""
    return asleep(LAYERS, EXCHANGE / 10 - PRODUCTS)


def fourfold() -> tuple[Any, ...]:
    """Return a workload whose exchange over 1 Gbit/s takes as long as four forwards and backwards, which a step may
    have."""
    return asleep(LAYERS, EXCHANGE / 4 - PRODUCTS)
