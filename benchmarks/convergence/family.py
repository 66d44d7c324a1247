"""Describes a training, the same for every algorithm: model, data, optimizer, batch size and number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

from benchmarks.convergence.data import digits, shakespeare
from benchmarks.convergence.model import GPT, cnn, perceptron

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One kind of training. batch: number of samples in the joint batch of all ranks."""

    name: str
    model: Callable[[], nn.Module]
    optimizers: Callable[[nn.Module, float], Sequence[torch.optim.Optimizer]]
    data: Callable[[], tuple[Dataset[Any], Dataset[Any]]]
    """Returns the data for training, and the data for the verdict."""
    batch: int
    steps: int
    rates: tuple[float, ...]
    """Learning rates of the sweep."""
    counts: bool
    """Whether trainings are judged by accuracy; if not, by loss."""
    rises: float = 0.0
    """Share of the steps in which the learning rate rises from 0."""

    def loader(self, seed: int) -> DataLoader[Any]:
        """Return the loader of the training data, whose order depends on the seed only."""
        order = torch.Generator().manual_seed(seed)
        return DataLoader(self.data()[0], batch_size=self.batch, shuffle=True, drop_last=True, generator=order)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Return one batch for each step."""
        return islice(endless(self.loader(seed)), self.steps)

    def begin(
        self, seed: int, rate: float, shard: Callable[[nn.Module], None] = lambda model: None
    ) -> tuple[nn.Module, Sequence[torch.optim.Optimizer], list[LRScheduler]]:
        """Return model, optimizers and their schedules: the learning rate rises if `rises` is set, then falls to 0
        along a cosine. shard: called with the model before its optimizers are made."""
        torch.manual_seed(seed)
        model = self.model()
        shard(model)
        optimizers = self.optimizers(model, rate)
        if not self.rises:
            return model, optimizers, [CosineAnnealingLR(optimizer, self.steps) for optimizer in optimizers]
        rising = int(self.steps * self.rises)
        falling = self.steps - rising

        def share(step: int) -> float:
            if step < rising:
                return (step + 1) / rising
            return (1 + math.cos(math.pi * (step - rising) / falling)) / 2

        return model, optimizers, [LambdaLR(optimizer, share) for optimizer in optimizers]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def verdict(self, model: nn.Module, most: int = 0) -> dict[str, float]:
        """Return loss and accuracy on data that is not used for training. most: number of samples to use; 0 for all."""
        model.eval()
        loss, right, total = 0.0, 0, 0
        loader = DataLoader(self.data()[1], batch_size=50)
        with torch.no_grad():
            for x, y in islice(loader, -(-most // 50) or None):
                logits = model(x).flatten(0, -2)
                loss += float(nn.functional.cross_entropy(logits, y.flatten(), reduction="sum"))
                right += int((logits.argmax(-1) == y.flatten()).sum())
                total += y.numel()
        model.train()
        return {"loss": loss / total, "accuracy": right / total}


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def momentum(model: nn.Module, rate: float) -> Sequence[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)]


def adam(model: nn.Module, rate: float) -> Sequence[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=rate)]


def adamax(model: nn.Module, rate: float) -> Sequence[torch.optim.Optimizer]:
    return [torch.optim.Adamax(model.parameters(), lr=rate)]


def adamw(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


def adamw_alone(model: nn.Module, rate: float) -> Sequence[torch.optim.Optimizer]:
    return [adamw(model.parameters(), rate)]


def muon(model: nn.Module, rate: float) -> Sequence[torch.optim.Optimizer]:
    """Return Muon for the matrices within the blocks, with steps as large as AdamW's at this rate, and AdamW for the
    rest."""
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    within = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in within]
    return [torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw"), adamw(rest, rate)]


def both_digits() -> tuple[Dataset[Any], Dataset[Any]]:
    return digits("train"), digits("t10k")


TEXTS = (shakespeare, 16, 600, (1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2), False, 0.1)
"""Data, joint batch, steps, rates and schedule of the families that read letters."""
FAMILIES = {
    family.name: family
    for family in (
        Family("cnn", cnn, momentum, both_digits, 128, 300, (0.025, 0.05, 0.1, 0.2, 0.4, 0.8), True),
        Family("mlp", perceptron, adam, both_digits, 128, 300, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), True),
        Family("mlp-adamax", perceptron, adamax, both_digits, 128, 300, (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), True),
        Family("mlp-sgd", perceptron, momentum, both_digits, 128, 300, (0.025, 0.05, 0.1, 0.2, 0.4, 0.8), True),
        Family("gpt", GPT, adamw_alone, *TEXTS),
        Family("gpt-muon", GPT, muon, *TEXTS),
        Family("gpt-10m", partial(GPT, 320, 5, 8), adamw_alone, *TEXTS),
    )
}
