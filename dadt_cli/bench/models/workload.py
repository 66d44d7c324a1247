"""One step of a benchmark."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

Batch = tuple[torch.Tensor, ...]


class Workload(NamedTuple):
    """A model, what it is fed, and what it is to make small."""

    model: nn.Module
    batch: Callable[[int], Batch]
    """Makes up this many samples in the host's memory: the first dimension of each tensor is the sample."""
    loss: Callable[..., torch.Tensor]
    """loss(model, *batch), a scalar. The batch is on the model's device."""
    unit: str = "samples"
    """The unit that is counted per second: images, tokens, ..."""
    per_sample: int = 1
    """How many of these units a sample has."""
    source: str = ""
    """Who defines the model; empty: the factory itself."""
    real: Callable[[Path], Dataset[Any]] | None = None
    """Samples as tuples of tensors from what --data names, where the model can read such data."""


OURS = "dadt's definition"


def installed(module: str, factory: Callable[[Any], nn.Module]) -> tuple[nn.Module | None, str]:
    """The model that a library defines, and the words that say whose it is. None where it is missing or broken."""
    package = module.partition(".")[0]
    try:
        library = importlib.import_module(module)
        version = importlib.import_module(package).__version__
        return factory(library), f"{package} {version}'s definition"
    except ModuleNotFoundError as error:
        if error.name == package:
            return None, f"{OURS} ({package} is not installed)"
        return None, f"{OURS} ({package} cannot be imported: {error})"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # built for another torch
        return None, f"{OURS} ({package} cannot be imported: {str(error).splitlines()[0]})"


def images(model: nn.Module, source: str, side: int, classes: int = 1000) -> Workload:
    """Classifies images of 3 x side x side."""

    def batch(size: int) -> Batch:
        return torch.randn(size, 3, side, side), torch.randint(0, classes, (size,))

    def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    def real(path: Path) -> Dataset[Any]:
        from dadt_cli.bench.data import Images

        return Images(path, side, classes)

    return Workload(model, batch, loss, "images", 1, source, real)


def tokens(model: nn.Module, source: str, loss: Callable[..., torch.Tensor], length: int, vocabulary: int) -> Workload:
    """Reads `length` tokens a sample; loss(model, tokens) makes its targets from them."""

    def real(path: Path) -> Dataset[Any]:
        from dadt_cli.bench.data import Text

        return Text(path, length)

    return Workload(
        model, lambda size: (torch.randint(0, vocabulary, (size, length)),), loss, "tokens", length, source, real
    )
