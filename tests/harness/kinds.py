"""What scripts do in a step, each kind as a generator: under `dadt run`, and for all ranks in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from harness.rounds import STEPS, Outer, Rounds, backward, optimizer, values
from harness.scenarios import batch, mlp

Kind = tuple[nn.Module, list[torch.optim.Optimizer], Iterator[tuple[int, str]]]


def accumulating(rank: int) -> Kind:
    """Accumulation and clipping see the rank's own gradients."""
    model = mlp()
    own = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train() -> Iterator[tuple[int, str]]:
        for step in range(STEPS):
            for part in range(2):
                x, y = batch(rank, step, part)
                nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            own.step()
            own.zero_grad()
            yield 0, ""

    return model, [own], train()


def scaling(rank: int) -> Kind:
    """An infinity on one rank is that rank's business."""
    model = mlp()
    own = optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    def train() -> Iterator[tuple[int, str]]:
        for step in range(STEPS):
            x, y = batch(rank, step, 0)
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss * float("inf") if (rank, step) == (1, 6) else loss).backward()
            scaler.unscale_(own)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(own)
            scaler.update()
            own.zero_grad()
            yield 0, ""

    return model, [own], train()


def evaluating(rank: int) -> Kind:
    """A closure is evaluated as often as the rank likes."""
    model = mlp()
    own = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    def train() -> Iterator[tuple[int, str]]:
        for step in range(STEPS):

            def closure() -> torch.Tensor:
                own.zero_grad()
                x, y = batch(rank, step, 0)
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                return loss

            own.step(closure)
            yield 0, ""

    return model, [own], train()


class Statistic(nn.Module):
    """Has a statistic of its own, which training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return x


def observing(rank: int) -> Kind:
    """Nothing uses gradients but a closure's optimizer."""
    model = nn.Sequential(Statistic(), *mlp())
    own = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def train() -> Iterator[tuple[int, str]]:
        for step in range(STEPS):

            def closure() -> torch.Tensor:
                own.zero_grad()
                x, y = batch(rank, step, 0)
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            own.step(closure)
            yield 0, ""

    return model, [own], train()


def loading(rank: int) -> Kind:
    """Weights from a file, in the middle of a round."""
    model = mlp()
    own = optimizer(model)
    saved = values(model)

    def train() -> Iterator[tuple[int, str]]:
        for step in range(STEPS):
            if step == 9:
                model.load_state_dict(saved)
            backward(model, rank, step)
            own.step()
            own.zero_grad()
            yield 0, "loaded" if step == 9 else ""

    return model, [own], train()


def freezing(rank: int) -> Kind:
    """A layer stands still for a while."""
    model = mlp()
    own = optimizer(model)

    def train() -> Iterator[tuple[int, str]]:
        for step in range(STEPS):
            for p in model[0].parameters():
                p.requires_grad_(not 7 <= step < 13)
            backward(model, rank, step)
            own.step()
            own.zero_grad()
            yield 0, "changed" if step in (7, 13) else ""

    return model, [own], train()


def normalizing(rank: int) -> Kind:
    """A rank evaluates its own weights with its own statistics, and waits for nobody."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    own = optimizer(model)

    def train() -> Iterator[tuple[int, str]]:
        for step in range(STEPS):
            backward(model, rank, step)
            own.step()
            own.zero_grad()
            yield 0, ""
            seen = values(model.eval())
            assert all(torch.equal(v, seen[n]) for n, v in values(model.train()).items())

    return model, [own], train()


def judging(rank: int) -> Kind:
    """Two optimizers, of which one takes two steps where the other takes one."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    both = [optimizer(model[0]), torch.optim.Adam(model[1].parameters(), lr=0.01)]

    def train() -> Iterator[tuple[int, str]]:
        for step in range(STEPS):
            for number in (0, 1, 1):
                model.zero_grad()
                backward(model, rank, step)
                both[number].step()
                yield number, ""

    return model, both, train()


KINDS = {
    kind.__name__: kind
    for kind in (accumulating, scaling, evaluating, observing, loading, freezing, normalizing, judging)
}


def simulate_kind(name: str, world: int, outer: Outer) -> list[dict[str, torch.Tensor]]:
    ranks = []
    for rank in range(world):
        torch.manual_seed(0)
        ranks.append(KINDS[name](rank))
    rounds = []
    for k in range(len(ranks[0][1])):
        weights = [[p for group in each[k].param_groups for p in group["params"]] for _, each, _ in ranks]
        rounds.append(Rounds(replace(outer, fragments=[range(len(weights[0]))]), weights))
    for steps in zip(*[train for _, _, train in ranks]):
        number, event = steps[0]
        rounds[number].stepped(ranks[0][1][number], event)
    return [values(model) for model, _, _ in ranks]
