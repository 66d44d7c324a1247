"""A model that computes elsewhere: its host waits for it, as for a GPU, and the processor is free meanwhile.

For trying what communication costs on a machine that has no cores to spare: 8 layers with 32 MB of weights; a forward
waits 40 ms and a backward 80 ms. `dadt bench advise benchmarks.asleep:model --link 1gbit --check`, from the root.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

LAYERS, WIDTH = 8, 1000
FORWARD, BACKWARD = 0.005, 0.010
"""Seconds of a layer."""


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD)
        return gradients[0]


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = Wait.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return waited


def model() -> tuple[Any, ...]:
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, WIDTH), torch.randn(size, WIDTH)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    return nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS))), batch, loss
