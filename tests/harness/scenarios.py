"""Small trainings that run twice: under `dadt run`, and in a single-process simulator of all ranks."""

from __future__ import annotations

import copy
import dataclasses
import math
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
    ahead: int = 1  # displacements that prediction adds to the delay, where it goes by them; -1: it predicts nothing
    own: bool = True  # at delay 1, prediction goes by the optimizer's own step
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
    "sgd": Scenario(lambda p: torch.optim.SGD(p, lr=0.1), ahead=-1),
    "momentum": Scenario(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": Scenario(
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2), ahead=0
    ),
    "zero": Scenario(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), set_to_none=False),
    "adam": Scenario(lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw_foreach": Scenario(lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True)),
    "adamw_fused": Scenario(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "rmsprop": Scenario(lambda p: torch.optim.RMSprop(p, lr=0.01), ahead=-1, own=False),
    "adagrad": Scenario(lambda p: torch.optim.Adagrad(p, lr=0.05), ahead=-1, own=False),
    "adadelta": Scenario(lambda p: torch.optim.Adadelta(p, lr=1.0), ahead=-1, own=False),
    "nadam": Scenario(lambda p: torch.optim.NAdam(p, lr=0.01), ahead=0, own=False),
    "adamax": Scenario(lambda p: torch.optim.Adamax(p, lr=0.01), own=False),
    "amsgrad": Scenario(lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, maximize=True)),
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


def factors(scenario: Scenario) -> tuple[float, float]:
    """Of the last displacement and of the one before."""
    if scenario.ahead < 0:
        return (0.0, 0.0)
    if scenario.ahead == 0:
        return (1.0, 0.0)
    return (1.8, -0.9)


Gradients = list[torch.Tensor | None]


def expected(own: Gradients, before: Gradients | None, applied: Gradients, clip: float) -> Gradients:
    """0.9 of the rank's own gradient and 0.1 of the last averages; as far as the gradient before was off these, 0.45
    of that. Own ones are shortened as the averages were."""
    parts = [(0.9 * clip, own), (0.1, applied)]
    if before is not None:
        parts = [(0.45 * clip, before), (0.9 * clip, own), (-0.35, applied)]

    def total(i: int) -> torch.Tensor | None:
        there = [share * values[i] for share, values in parts if values[i] is not None]
        return sum(there[1:], there[0]) if there else None

    return [total(i) for i in range(len(own))]


def next_weights(optimizer: torch.optim.Optimizer, parameters: list[Any], gradients: Gradients) -> list[torch.Tensor]:
    """Where the optimizer itself puts the weights; all is as before."""
    before = [p.detach().clone() for p in parameters]
    state = copy.deepcopy(optimizer.state_dict())
    for p, g in zip(parameters, gradients):
        p.grad = None if g is None else g.clone()
    optimizer.step()
    after = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, b in zip(parameters, before):
            p.copy_(b)
    optimizer.load_state_dict(state)
    return after


class Simulation:
    """All ranks in one process, from the algorithm's definition: nothing of dadt is used."""

    def __init__(self, name: str, world: int, algorithm: str, warmup: int) -> None:
        self.scenario = SCENARIOS[name]
        self.world = world
        self.late_from = math.inf if algorithm == "sync" else warmup
        torch.manual_seed(0)
        self.model = self.scenario.model()
        self.parameters = list(self.model.parameters())
        self.optimizer = self.scenario.optimizer(self.parameters)
        self.scheduler = self.scenario.scheduler(self.optimizer) if self.scenario.scheduler else None
        self.own = self.scenario.own
        self.displacements: list[list[torch.Tensor]] = []
        self.pending: list[Gradients] = []
        self.fresh: list[Gradients] = []
        self.previous: list[Gradients] = []
        self.applied: Gradients = []
        self.clip = 1.0
        self.tracked = [False] * len(self.parameters)

    def predicted(self, rank: int) -> list[torch.Tensor]:
        """Where the rank's gradient is computed."""
        true = [p.detach().clone() for p in self.parameters]
        if not self.pending or not self.displacements:
            return true
        if self.own:
            gradients = expected(
                self.fresh[rank], self.previous[rank] if self.previous else None, self.applied, self.clip
            )
            there = next_weights(self.optimizer, self.parameters, gradients)
        else:
            factor, before = factors(self.scenario)
            last, older = self.displacements[0], self.displacements[-1] if len(self.displacements) > 1 else None
            older = older or [torch.zeros_like(t) for t in true]
            there = [t + (o * before).add_(d, alpha=factor) for t, d, o in zip(true, last, older)]
        return [a if was_trained else t for a, t, was_trained in zip(there, true, self.tracked)]

    def put(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self.parameters, values):
                p.copy_(value)

    def gradients(self, step: int) -> None:
        """Each rank's own."""
        true = [p.detach().clone() for p in self.parameters]
        points = [self.predicted(rank) for rank in range(self.world)]
        self.previous, self.fresh = self.fresh if self.pending else [], []
        for rank, point in enumerate(points):
            self.scenario.before(self.model, rank, step)
            self.put(point)
            for p in self.parameters:
                p.grad = None
            backward(self.scenario, self.model, rank, step)
            self.fresh.append([None if p.grad is None else p.grad.clone() for p in self.parameters])
        self.put(true)
        self.tracked = [p.requires_grad for p in self.parameters]

    def mean(self) -> Gradients:
        present = [[g for g in each if g is not None] for each in zip(*self.fresh)]
        return [sum(some[1:], some[0]) / self.world if some else None for some in present]

    def step(self, step: int) -> None:
        self.scenario.before(self.model, 0, step)
        self.gradients(step)
        arrived: Gradients | None = self.mean()
        if step >= self.late_from:
            self.pending.append(self.mean())
            arrived = self.pending.pop(0) if len(self.pending) > 1 else None
        for p, g in zip(self.parameters, arrived or [None] * len(self.parameters)):
            p.grad = g if p.requires_grad else None
        if arrived is not None:
            self.apply()
        else:
            self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()

    def apply(self) -> None:
        true = [p.detach().clone() for p in self.parameters]
        if self.scenario.clip:
            before = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
            nn.utils.clip_grad_norm_(self.parameters, self.scenario.clip)
            after = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
            self.clip = float(after / before)
        self.applied = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        self.optimizer.step()
        self.displacements = [[p.detach() - t for p, t in zip(self.parameters, true)], *self.displacements[:1]]


def simulate(
    name: str, world: int, algorithm: str, warmup: int = WARMUP, steps: int = STEPS
) -> dict[str, torch.Tensor]:
    simulation = Simulation(name, world, algorithm, warmup)
    for step in range(steps):
        simulation.step(step)
    return snapshot(simulation.model, simulation.optimizer)
