"""Losses of trainings that a job and its simulator compute alike."""

from __future__ import annotations

import torch
from torch import nn

from harness.scenarios import batch

STEPS = 20


def optimizers(G: nn.Module, D: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    make = torch.optim.Adam
    return make(G.parameters(), lr=0.01, betas=(0.5, 0.9)), make(D.parameters(), lr=0.02, betas=(0.5, 0.9))


def judge(G: nn.Module, D: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The discriminator's backward; gives the fakes with their graph."""
    real, noise = batch(rank, step, 0)[0], batch(rank, step, 1)[0]
    fake = G(noise)
    ones, zeros = torch.ones(4, 1), torch.zeros(4, 1)
    loss = nn.functional.binary_cross_entropy_with_logits
    (loss(D(real), ones) + loss(D(fake.detach()), zeros)).backward()
    return fake


def fool(D: nn.Module, fake: torch.Tensor) -> None:
    nn.functional.binary_cross_entropy_with_logits(D(fake), torch.ones(4, 1)).backward()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step, 0)
    factor = float("inf") if rank == 1 and step == 12 else 1.0
    return nn.functional.cross_entropy(model(x), y) * factor
