"""Rounds of `local` with all ranks in one process, from the definition in the docs. Nothing of dadt is used."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from harness.scenarios import batch, mlp

WARMUP = 3
STEPS = 21
SAVED = 12
"""Steps; a round's average is in flight then."""


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def lower(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the learning rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * (1 - step / (2 * STEPS))


def backward(model: nn.Module, rank: int, step: int) -> None:
    x, y = batch(rank, step, 0)
    nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def at_the_end(call) -> None:
    """After the ranks have made their last average."""
    import gc

    from dadt.train.runtime import Runtime

    (runtime,) = [o for o in gc.get_objects() if type(o) is Runtime]
    runtime.events.on_end.append(call)


@dataclass
class Outer:
    every: int = 4
    lr: float = 1.0
    momentum: float = 0.0
    fragments: Sequence[Sequence[int]] = ((0, 1, 2, 3),)
    """Parameters by number."""
    overlap: int = 2
    """Steps from the end of a round to the merge of its mean."""

    def options(self) -> list[str]:
        return [
            *("--algorithm", "local", "--warmup-steps", str(WARMUP), "--sync-every", str(self.every)),
            *("--outer-lr", str(self.lr), "--outer-momentum", str(self.momentum)),
            *("--fragments", str(len(self.fragments)), "--overlap-steps", str(self.overlap)),
        ]

    def moved(
        self, a: torch.Tensor, v: torch.Tensor, p: torch.Tensor, growth: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        v = v * (self.momentum * growth) + p
        return torch.add(a, torch.add(p, v, alpha=self.momentum), alpha=self.lr), v


def mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(parts[1:], parts[0]) * (1.0 / len(parts)) if parts[0].is_floating_point() else parts[0]


class Rounds:
    """All ranks' rounds of one optimizer, from the definition in the docs. Nothing of dadt is used."""

    def __init__(self, outer: Outer, weights: list[list[torch.Tensor]]) -> None:
        """weights: by rank, the same on all ranks."""
        self.outer = outer
        self.weights = weights
        self.anchors = [p.detach().clone() for p in weights[0]]
        self.velocities = [torch.zeros_like(a) for a in self.anchors]
        self.flying: dict[int, list[torch.Tensor]] = {}
        """By parameter: each rank's progress, of which the mean is to come."""
        self.ahead: dict[int, list[torch.Tensor]] = {}
        """Where each rank went on from then."""
        self.alone = 0
        self.loaded = False
        self.rate = dict.fromkeys(range(len(self.anchors)), 0.0)
        self.rate_before = dict(self.rate)
        """By parameter: the learning rates of this round and of the one before, each summed over its steps."""
        self.growth = dict.fromkeys(range(len(self.anchors)), 1.0)
        """By parameter: the ratio of the two when a round ended."""

    def stepped(self, optimizer: torch.optim.Optimizer, event: str = "") -> None:
        """Every rank has stepped. optimizer: of any rank. event: the script has "loaded" weights, or "changed" which
        parameters it trains."""
        outer = self.outer
        self.alone += 1
        self.loaded |= event == "loaded"
        if event == "changed":
            self.settle()
            for p, v in zip(self.weights[0], self.velocities):
                if not p.requires_grad:
                    v.zero_()
        for k in self.rate:
            self.rate[k] += sum(group["lr"] for group in optimizer.param_groups)
        for number, fragment in enumerate(outer.fragments):
            since = self.alone - number * outer.every // len(outer.fragments)
            if (since - outer.overlap) % outer.every == 0 and outer.overlap and not self.loaded:
                for k in set(fragment) & set(self.flying):
                    self.merge(k)
            if since % outer.every:
                continue
            if self.loaded:
                self.velocities = [torch.zeros_like(a) for a in self.anchors]
                self.flying.clear()
                self.settle()
                self.loaded = False
                continue
            for k in fragment:
                if self.weights[0][k].requires_grad:
                    self.send(k)
                    if not outer.overlap:
                        self.merge(k)

    def send(self, k: int) -> None:
        self.growth[k] = growth = self.rate[k] / self.rate_before[k] if self.rate_before[k] else 1.0
        self.rate_before[k], self.rate[k] = self.rate[k], 0.0
        self.flying[k] = [w[k].detach() - self.anchors[k] for w in self.weights]
        self.ahead[k] = [self.outer.moved(self.anchors[k], self.velocities[k], p, growth)[0] for p in self.flying[k]]
        for w, then in zip(self.weights, self.ahead[k]):
            w[k].data.copy_(then)

    def merge(self, k: int) -> None:
        moved = self.outer.moved(self.anchors[k], self.velocities[k], mean(self.flying.pop(k)), self.growth[k])
        self.anchors[k], self.velocities[k] = moved
        for w, then in zip(self.weights, self.ahead[k]):
            w[k].data.copy_(self.anchors[k] + (w[k].detach() - then))

    def settle(self) -> None:
        for k, progress in self.flying.items():
            self.velocities[k] = self.velocities[k] * (self.outer.momentum * self.growth[k]) + mean(progress)
        self.flying.clear()
        self.rate = dict.fromkeys(self.rate, 0.0)
        self.anchors = [mean([w.detach() for w in same]) for same in zip(*self.weights)]
        for weights in self.weights:
            for p, anchor in zip(weights, self.anchors):
                p.data.copy_(anchor)


def averages(own: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """What the ranks have at the end: the mean, and what is no float each its own."""
    return [{n: mean([o[n] for o in own]) if v.is_floating_point() else v for n, v in each.items()} for each in own]


@dataclass
class Ranks:
    """All ranks in one process."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    rounds: Rounds | None = None

    @property
    def weights(self) -> list[list[torch.Tensor]]:
        return [list(m.parameters()) for m in self.models]

    def train(self, outer: Outer, steps: Iterable[int]) -> Ranks:
        for step in steps:
            for rank, model in enumerate(self.models):
                backward(model, rank, step)
            if self.rounds is None:
                for same in zip(*self.weights):
                    average = mean([p.grad for p in same])
                    for p in same:
                        p.grad = average.clone()
            for each in self.optimizers:
                lower(each, step)
                each.step()
                each.zero_grad()
            if self.rounds is not None:
                self.rounds.stepped(self.optimizers[0])
            elif step + 1 == WARMUP:
                self.rounds = Rounds(outer, self.weights)
        return self

    def resumed(self, outer: Outer) -> Ranks:
        """From what rank 0 saves: what is in flight is to have brought what rank 0 has sent."""
        models = [copy.deepcopy(self.models[0]) for _ in self.models]
        optimizers = [optimizer(m) for m in models]
        for each in optimizers:
            each.load_state_dict(copy.deepcopy(self.optimizers[0].state_dict()))
        after = Ranks(models, optimizers)
        after.rounds = Rounds(outer, after.weights)
        after.rounds.alone = self.rounds.alone
        after.rounds.rate, after.rounds.rate_before = dict(self.rounds.rate), dict(self.rounds.rate_before)
        for k, anchor in enumerate(self.rounds.anchors):
            v = self.rounds.velocities[k]
            if k in self.rounds.flying:
                anchor, v = (
                    self.rounds.ahead[k][0],
                    v * (outer.momentum * self.rounds.growth[k]) + self.rounds.flying[k][0],
                )
            after.rounds.anchors[k], after.rounds.velocities[k] = anchor.clone(), v.clone()
        return after


def ranks(world: int) -> Ranks:
    torch.manual_seed(0)
    first = mlp()
    models = [copy.deepcopy(first) for _ in range(world)]
    return Ranks(models, [optimizer(m) for m in models])


def simulate(world: int, outer: Outer) -> list[dict[str, torch.Tensor]]:
    """Each rank's weights after the last step."""
    return [values(m) for m in ranks(world).train(outer, range(STEPS)).models]
