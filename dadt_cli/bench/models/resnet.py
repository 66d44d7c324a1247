"""Residual networks, which classify images (arXiv:1512.03385)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from dadt_cli.bench.models.workload import Workload, images, installed


class Residual(nn.Module):
    """A residual block: x + body(x); x is projected if the block changes its shape."""

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


def basic(inputs: int, width: int, stride: int) -> Residual:
    body = [*convolution(inputs, width, 3, stride), nn.ReLU(), *convolution(width, width, 3)]
    return Residual(nn.Sequential(*body), inputs, width, stride)


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    body = [
        *convolution(inputs, width, 1),
        nn.ReLU(),
        *convolution(width, width, 3, stride),
        nn.ReLU(),
        *convolution(width, 4 * width, 1),
    ]
    return Residual(nn.Sequential(*body), inputs, 4 * width, stride)


def resnet(
    block: Callable[[int, int, int], Residual], expansion: int, depths: list[int], classes: int
) -> nn.Sequential:
    layers: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for i in range(depth):
            layers.append(block(inputs, width, 2 if stage > 0 and i == 0 else 1))
            inputs = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


DEPTHS: dict[str, tuple[Callable[[int, int, int], Residual], int, list[int]]] = {
    "resnet18": (basic, 1, [2, 2, 2, 2]),
    "resnet50": (bottleneck, 4, [3, 4, 6, 3]),
    "resnet101": (bottleneck, 4, [3, 4, 23, 3]),
}


def own(name: str) -> nn.Sequential:
    return resnet(*DEPTHS[name], classes=1000)


def _workload(name: str) -> Workload:
    found, source = installed("torchvision.models", lambda library: getattr(library, name)())
    return images(own(name) if found is None else found, source, 224)


resnet18, resnet50, resnet101 = (partial(_workload, name) for name in DEPTHS)
"""Models with 11.7, 25.6 and 44.5 million parameters, for images of 224 x 224 pixels."""
