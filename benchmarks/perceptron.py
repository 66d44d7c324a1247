"""A perceptron of 25 million weights: 100 MB to exchange for little compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LAYERS, WIDTH = 5, 2240


def wide() -> tuple[Any, ...]:
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, WIDTH), torch.randn(size, WIDTH)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(*layers), batch, loss
