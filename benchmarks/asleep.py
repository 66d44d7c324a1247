"""Models that compute elsewhere: their host waits for them, as for a GPU, and the processor is free meanwhile.

For trying what communication costs on a machine that has no cores to spare: each layer waits in its forward and twice
as long in its backward, and has real gradients. `dadt bench advise benchmarks.asleep:model --link 1gbit --check`, from
the root; further factories have 100 MB of weights, and say how long their exchange takes beside a step's computation.
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
"""Seconds that two hosts need for 100 MB each over 1 Gbit/s, with the headers of their packets."""
PRODUCTS = 0.05
"""Seconds in which a forward and a backward of one sample do use the processor, about."""


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
    """A workload of `dadt bench`: the model learns random vectors of this width from random ones."""

    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, width), torch.randn(size, width)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    return model, batch, loss


def asleep(layers: int, seconds: float, width: int = WIDTH) -> tuple[Any, ...]:
    """A workload of `layers` layers, whose forward and backward together wait `seconds` seconds."""
    return regression(nn.Sequential(*(Layer(width, seconds / layers / 3) for _ in range(layers))), width)


def model() -> tuple[Any, ...]:
    """32 MB of weights, 120 ms."""
    return asleep(8, 0.12)


def medium() -> tuple[Any, ...]:
    """8 MB, 120 ms."""
    return asleep(8, 0.12, 500)


def small() -> tuple[Any, ...]:
    """1 MB, 120 ms."""
    return asleep(8, 0.12, 180)


def even() -> tuple[Any, ...]:
    """An exchange over 1 Gbit/s takes as long as a backward with its forward."""
    return asleep(LAYERS, EXCHANGE - PRODUCTS)


def half() -> tuple[Any, ...]:
    """An exchange over 1 Gbit/s takes half as long as a backward with its forward."""
    return asleep(LAYERS, 2 * EXCHANGE - PRODUCTS)


def fourfold() -> tuple[Any, ...]:
    """An exchange over 1 Gbit/s takes as long as four backwards with their forwards, which a step may have."""
    return asleep(LAYERS, EXCHANGE / 4 - PRODUCTS)
