"""A benchmark's workload: a model with its batches and loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

Batch = tuple[torch.Tensor, ...]


class Workload(NamedTuple):
    """A model with the data to train it on and the loss to minimize."""

    model: nn.Module
    batch: Callable[[int], Batch]
    """Called with a number of samples: returns a synthetic batch in host memory; the first dimension of each tensor
    counts samples."""
    loss: Callable[..., torch.Tensor]
    """Called as loss(model, *batch), with the batch on the model's device. Returns a scalar."""
    unit: str = "samples"
    """The unit counted per second, such as images or tokens."""
    per_sample: int = 1
    """Number of units (see `unit`) in one sample."""
    source: str = ""
    """Text that names whose definition of the model is used, such as a library's; empty if the factory defines it."""
    real: Callable[[Path], Dataset[Any]] | None = None
    """Called with the path given to --data: returns real samples as tuples of tensors. None if the model cannot read
    real data."""
    shards: Sequence[nn.Module] = ()
    """Modules that FSDP shards, and whose parts it gathers one module at a time; empty if each worker holds the whole
    model."""


OURS = "dadt's definition"


def installed(module: str, factory: Callable[[Any], nn.Module]) -> tuple[nn.Module | None, str]:
    """Return a model built by a library, and a text that names whose definition of the model is used. The model is None
    if the library is missing or broken."""
    package = module.partition(".")[0]
    try:
        library = importlib.import_module(module)
        version = importlib.import_module(package).__version__
        return factory(library), f"{package} {version}'s definition"
    except ModuleNotFoundError as error:
        if error.name == package:
            return None, f"{OURS} ({package} is not installed)"
        return None, f"{OURS} ({package} cannot be imported: {error})"
    # Besides a missing library, this covers one that is broken, such as a library built for another version of torch.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, f"{OURS} ({package} cannot be imported: {str(error).splitlines()[0]})"


def images(model: nn.Module, source: str, side: int, classes: int = 1000) -> Workload:
    """Return a workload that classifies images of 3 x side x side."""

    def batch(size: int) -> Batch:
        return torch.randn(size, 3, side, side), torch.randint(0, classes, (size,))

    def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    def real(path: Path) -> Dataset[Any]:
        from dadt_cli.bench.data import Images

        return Images(path, side, classes)

    return Workload(model, batch, loss, "images", 1, source, real)


def tokens(model: nn.Module, source: str, loss: Callable[..., torch.Tensor], length: int, vocabulary: int) -> Workload:
    """Return a workload whose samples have `length` tokens; loss(model, tokens) derives its targets from the tokens."""

    def real(path: Path) -> Dataset[Any]:
        from dadt_cli.bench.data import Text

        return Text(path, length)

    return Workload(
        model, lambda size: (torch.randint(0, vocabulary, (size, length)),), loss, "tokens", length, source, real
    )
