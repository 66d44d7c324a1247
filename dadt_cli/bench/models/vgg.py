"""VGG-16 (arXiv:1409.1556), configuration D, without BatchNorm: most of its parameters are in one dense layer."""

from __future__ import annotations

from torch import nn

from dadt_cli.bench.models.workload import Workload, images, installed

WIDTHS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and number of convolutions of each block; after each block, pooling halves the image's sides."""


def vgg16() -> Workload:
    """Return VGG-16 with 138.4 million parameters, for images of 224 x 224 pixels."""
    found, source = installed("torchvision.models", lambda library: library.vgg16())
    return images(own() if found is None else found, source, 224)


def own(classes: int = 1000) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for width, depth in WIDTHS:
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for inputs in (512 * 7 * 7, 4096):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, classes))
