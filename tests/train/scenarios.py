"""Small trainings that run twice: under `dadt run`, and in a single-process simulator of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

STEPS = 24
WARMUP = 5


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Branches(nn.Module):
    """Its second branch is used on odd steps only, on rank 1 only; its third never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 3) for _ in range(3))
        self.use_second = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) if self.use_second else self.first(x)


@dataclasses.dataclass
class Scenario:
    optimizer: Callable[[Any], torch.optim.Optimizer]
    factors: tuple[float, float] = (1.8, -0.9)  # the prediction that auto picks at delay 1
    model: Callable[[], nn.Module] = mlp
    accumulate: int = 1
    clip: float = 0.0
    set_to_none: bool = True
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    before: Callable[[nn.Module, int, int], None] = lambda model, rank, step: None


def use_second(model: nn.Module, rank: int, step: int) -> None:
    model.use_second = rank == 1 and step % 2 == 1


def freeze(model: nn.Module, rank: int, step: int) -> None:
    """The first layer is frozen from step 12 to 16."""
    for p in model[0].parameters():
        p.requires_grad_(not 12 <= step < 17)


SCENARIOS = {
    "sgd": Scenario(lambda p: torch.optim.SGD(p, lr=0.1), factors=(0.0, 0.0)),
    "momentum": Scenario(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": Scenario(
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2), factors=(1.0, 0.0)
    ),
    "zero": Scenario(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), set_to_none=False),
    "adam": Scenario(lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw_foreach": Scenario(lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True)),
    "adamw_fused": Scenario(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "rmsprop": Scenario(lambda p: torch.optim.RMSprop(p, lr=0.01), factors=(0.0, 0.0)),
    "adagrad": Scenario(lambda p: torch.optim.Adagrad(p, lr=0.05), factors=(0.0, 0.0)),
    "adadelta": Scenario(lambda p: torch.optim.Adadelta(p, lr=1.0), factors=(0.0, 0.0)),
    "accumulate": Scenario(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), accumulate=3),
    "accumulate_zero": Scenario(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), accumulate=2, set_to_none=False),
    "clip": Scenario(lambda p: torch.optim.AdamW(p, lr=0.01), clip=0.05),
    "unused": Scenario(
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1), model=Branches, before=use_second
    ),
    "schedule": Scenario(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
    ),
    "frozen": Scenario(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), before=freeze),
}


def batch(rank: int, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def backward(scenario: Scenario, model: nn.Module, rank: int, step: int) -> None:
    for part in range(scenario.accumulate):
        x, y = batch(rank, step, part)
        (nn.functional.cross_entropy(model(x), y) / scenario.accumulate).backward()


def train(name: str, rank: int, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """As a script does it; under `dadt run` it becomes data-parallel."""
    scenario = SCENARIOS[name]
    torch.manual_seed(rank)  # the replicas start apart: rank 0's weights are everybody's
    model = scenario.model()
    optimizer = scenario.optimizer(model.parameters())
    scheduler = scenario.scheduler(optimizer) if scenario.scheduler else None
    for step in range(steps):
        scenario.before(model, rank, step)
        backward(scenario, model, rank, step)
        if scenario.clip:
            nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
        optimizer.step()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad(set_to_none=scenario.set_to_none)
    return snapshot(model, optimizer)


def snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state, by name."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for i, optimizer in enumerate(optimizers):
        for j, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                if value is not None:
                    state[f"optimizer{i}.{j}.{key}"] = torch.as_tensor(value).clone()
    return state


def factors(scenario: Scenario, staleness: int) -> tuple[float, float]:
    """Of the last displacement and of the one before."""
    if staleness == 1 or not scenario.factors[0]:
        return scenario.factors
    return (staleness + (scenario.factors[0] != 1.0), 0.0)


def simulate(
    name: str, world: int, algorithm: str, warmup: int = WARMUP, steps: int = STEPS, staleness: int = 1
) -> dict[str, torch.Tensor]:
    """All ranks in one process, from the algorithm's definition: nothing of dadt is used."""
    scenario = SCENARIOS[name]
    torch.manual_seed(0)
    model = scenario.model()
    parameters = list(model.parameters())
    optimizer = scenario.optimizer(parameters)
    scheduler = scenario.scheduler(optimizer) if scenario.scheduler else None
    displacement: list[torch.Tensor] | None = None
    older = [torch.zeros_like(p) for p in parameters]
    pending: list[list[torch.Tensor | None]] = []
    factor, before = factors(scenario, staleness)
    tracked = [False] * len(parameters)
    for step in range(steps):
        scenario.before(model, 0, step)
        true = [p.detach().clone() for p in parameters]
        if len(pending) == staleness and displacement is not None:
            with torch.no_grad():
                for p, d, o, was_trained in zip(parameters, displacement, older, tracked):
                    if was_trained:
                        p.add_((o * before).add_(d, alpha=factor))
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for rank in range(world):
            scenario.before(model, rank, step)
            for p in parameters:
                p.grad = None
            backward(scenario, model, rank, step)
            for i, p in enumerate(parameters):
                if p.grad is not None:
                    sums[i] = p.grad.clone() if sums[i] is None else sums[i] + p.grad
        tracked = [p.requires_grad for p in parameters]
        mean = [None if g is None else g / world for g in sums]
        with torch.no_grad():
            for p, t in zip(parameters, true):
                p.copy_(t)
        if algorithm == "sync" or step < warmup:
            apply: list[torch.Tensor | None] | None = mean
        else:
            pending.append(mean)
            apply = pending.pop(0) if len(pending) > staleness else None
        for p, g in zip(parameters, apply or [None] * len(parameters)):
            p.grad = g if p.requires_grad else None
        if scenario.clip and apply:
            nn.utils.clip_grad_norm_(parameters, scenario.clip)
        optimizer.step()
        if apply is not None:
            older = displacement or older
            displacement = [p.detach() - t for p, t in zip(parameters, true)]
        if scheduler:
            scheduler.step()
    return snapshot(model, optimizer)
