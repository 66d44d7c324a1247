"""Models of many small tensors, whose steps consist mostly of Python's and torch's own calls, and of DADT's hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.asleep import regression

TENSORS = (10, 100, 1_000, 10_000)
MILLISECOND = 24
"""Number of tensors with which a step takes about a millisecond."""
WIDTH = 4


class ManyLayers(nn.Module):
    """A model of small layers side by side."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers]).mean(0)


def many(tensors: int) -> tuple[Any, ...]:
    return regression(ManyLayers(tensors), WIDTH)


tensors_10, tensors_100, tensors_1000, tensors_10000 = (partial(many, n) for n in TENSORS)
tensors_24 = partial(many, MILLISECOND)
