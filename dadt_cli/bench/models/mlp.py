"""A small perceptron, for quick runs: much communication for little compute."""

from __future__ import annotations

from torch import nn

from dadt_cli.bench.models.workload import OURS, Workload, images

SIDE = 32


def mlp() -> Workload:
    """Return a perceptron with 4.1 million parameters in two layers, for images of 32 x 32 pixels."""
    layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 1000), nn.ReLU(), nn.Linear(1000, 1000))
    return images(layers, OURS, SIDE)
