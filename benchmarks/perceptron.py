"""A perceptron of 25 million weights: 100 MB to exchange for little compute."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.asleep import regression

LAYERS, WIDTH = 5, 2240


def wide() -> tuple[Any, ...]:
    layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return regression(nn.Sequential(*layers), WIDTH)
