"""Simulates all ranks of a training in one process, from the algorithms' definitions, without DADT's runtime.

Batches, weights, optimizer state and BatchNorm statistics have the bits that `dadt run --batch global` gives (see
tests/benchmarks/test_convergence.py): each rank computes the gradient of its part of the batch, and sums are in rank
order.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from benchmarks.convergence.family import Batch, Family
from benchmarks.convergence.method import Method, own_step
from dadt.algorithms.pipe.divergence import Divergence

Tensors = list[torch.Tensor]
EVERY = 25
"""Number of steps whose mean loss is one point of a curve."""


class Simulation:
    """One training of `ranks` ranks."""

    def __init__(self, family: Family, method: Method, ranks: int, rate: float, seed: int) -> None:
        self.family = family
        self.method = method
        self.ranks = ranks
        self.seed = seed
        self.model, self.optimizers, self.schedules = family.begin(seed, rate)
        self.parameters: Tensors = [p for p in self.model.parameters() if p.requires_grad]
        self.share = method.share(ranks)
        self.factor, self.older = method.factors(self.optimizers[0])
        self.buffers = [b for b in self.model.buffers() if b.is_floating_point()]
        """BatchNorm's statistics. Each rank has its own, and a script reads their mean."""
        self.counts = [b for b in self.model.buffers() if not b.is_floating_point()]
        self.own = [[b.clone() for b in self.buffers] for _ in range(ranks)]
        self.official = [b.clone() for b in self.buffers]
        self.pending: deque[tuple[Tensors, Tensors, bool]] = deque()
        """Averages under way: of gradients, of buffers, and whether gradients had blown up when they were launched."""
        self.divergence = Divergence() if method.delayed and method.fall_back else None
        self.norm: float | None = None
        """Norm of the averaged gradients that arrived last; None before the first, and once the norm was checked."""
        self.late = method.delayed
        """Whether gradients are late after the warm-up; False once they have blown up."""
        self.displacements: deque[Tensors] = deque(maxlen=2)
        """Displacements of the weights by the last two updates, the last one first."""
        self.applied: Tensors | None = None
        self.fresh: list[Tensors] = []
        """Each rank's own gradients of the last step."""
        self.previous: list[Tensors] = []
        """Each rank's own gradients of the step before, from which the last average was made, if averages are late."""
        self.step = 0

    def run(self) -> dict[str, Any]:
        begun = time.process_time()
        losses = [self.take(batch) for batch in self.family.batches(self.seed)]
        self.read()
        parts = [losses[i : i + EVERY] for i in range(0, len(losses), EVERY)]
        curve = [round(sum(part) / len(part), 5) for part in parts]
        return {**self.family.verdict(self.model), "curve": curve, "cpu_seconds": round(time.process_time() - begun, 1)}

    def take(self, batch: Batch) -> float:
        """Take one step, and return the ranks' mean loss."""
        true = copies(self.parameters)
        self.predict()
        loss, gradients, statistics = self.average(batch, true)
        put(self.parameters, true)
        arrived = self.exchange(gradients, statistics)
        if arrived is not None:
            for p, g in zip(self.parameters, arrived, strict=True):
                p.grad = g
            for optimizer in self.optimizers:
                optimizer.step()
            self.shorten(true)
            self.displace(true)
            self.applied = arrived
        for schedule in self.schedules:
            schedule.step()
        self.step += 1
        return loss

    def predict(self) -> None:
        """Set the weights to those to which the gradient of this step will be applied, predicted from displacements."""
        if not self.predicts or not self.displacements or self.share is not None:
            return
        late = self.step - self.method.warmup
        share = min(1.0, late / self.method.ramp) if self.method.ramp else 1.0
        ahead = [torch.zeros_like(d) for d in self.displacements[0]]
        if self.older and len(self.displacements) > 1:
            torch._foreach_add_(ahead, self.displacements[1], alpha=self.older * share)
        if self.factor:
            torch._foreach_add_(ahead, self.displacements[0], alpha=self.factor * share)
        torch._foreach_add_([p.data for p in self.parameters], ahead)

    @property
    def predicts(self) -> bool:
        return len(self.pending) == 1

    def predict_for(self, rank: int, true: Tensors) -> None:
        """Set the weights to those predicted from what this rank alone knows of the gradients in flight."""
        if not self.predicts or self.share is None or self.applied is None:
            return
        put(self.parameters, true)
        put(self.parameters, own_step(self.optimizers, self.expected(rank, self.applied, self.share)))

    def expected(self, rank: int, applied: Tensors, share: float) -> Tensors:
        """Return the gradients that this rank expects as the average in flight."""
        own = [g * share for g in self.fresh[rank]]
        if not self.previous:
            return [a * (1 - share) + g for a, g in zip(applied, own, strict=True)]
        back = self.method.damping(share)
        own = [before * back + g for before, g in zip(self.previous[rank], own, strict=True)]
        return [g + a * (1 - share - back) for a, g in zip(applied, own, strict=True)]

    def average(self, batch: Batch, true: Tensors) -> tuple[float, Tensors, Tensors]:
        """Return the mean loss, gradients and buffers of all ranks, each computed on its part of the batch."""
        size = len(batch[0]) // self.ranks
        assert size * self.ranks == len(batch[0]), "the batch must be divisible among the ranks"
        losses, gradients, statistics = 0.0, [], []
        counts = copies(self.counts)
        for rank in range(self.ranks):
            put(self.counts, counts)
            put(self.buffers, self.own[rank])
            self.predict_for(rank, true)
            self.model.zero_grad()
            loss = self.family.loss(self.model, (part(batch[0], rank, size), part(batch[1], rank, size)))
            loss.backward()  # type: ignore[no-untyped-call]
            losses += float(loss.detach())
            self.own[rank] = copies(self.buffers)
            gradients.append([p.grad for p in self.parameters if p.grad is not None])
            statistics.append(self.own[rank])
        self.previous, self.fresh = self.fresh if self.pending else [], gradients
        return losses / self.ranks, mean(gradients), mean(statistics)

    def exchange(self, gradients: Tensors, statistics: Tensors) -> Tensors | None:
        """Return the averages that arrive in this step; None if none has arrived yet."""
        blown_up = self.blows_up()
        if not self.late or self.step < self.method.warmup:
            self.official = statistics
            self.norm = norm(gradients)
            return gradients
        self.pending.append((gradients, statistics, blown_up))
        if len(self.pending) <= 1:
            return None
        arrived, averages, blown_up = self.pending.popleft()
        if blown_up:  # all later steps are synchronous
            self.late, self.divergence = False, None
            self.pending.clear()
            arrived, averages = gradients, statistics
        self.official = averages
        self.norm = norm(arrived)
        return arrived

    def blows_up(self) -> bool:
        """Return whether DADT's own detection finds that the last averages blow up."""
        last, self.norm = self.norm, None
        if self.divergence is None or last is None:
            return False
        if self.step <= self.method.warmup:
            self.divergence.learn(last)
            return False
        return self.divergence.see(last)

    def shorten(self, true: Tensors) -> None:
        """Take only a part of the step, in the first delayed steps."""
        late = self.step - self.method.warmup
        if not self.late or not 0 < late < self.method.rise:
            return
        for p, t in zip(self.parameters, true, strict=True):
            p.data.copy_(t + late / self.method.rise * (p.detach() - t))

    def displace(self, true: Tensors) -> None:
        moved = [p.detach() - t for p, t in zip(self.parameters, true, strict=True)]
        mix = self.method.mix
        if mix and self.step > self.method.warmup and self.displacements:
            for p, t, now, before in zip(self.parameters, true, moved, self.displacements[0], strict=True):
                p.data.copy_(t + (1 + mix) * now - mix * before)
        self.displacements.appendleft(moved)

    def read(self) -> None:
        """Set the model's buffers to those that a script reads."""
        put(self.buffers, self.official)


def simulate(family: Family, method: str, ranks: int, rate: float, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return Simulation(family, Method.parse(method), ranks, rate, seed).run()


def part(values: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return values[rank * size : (rank + 1) * size].clone()


def mean(ranks: list[Tensors]) -> Tensors:
    """Return the means over ranks, summed in rank order."""
    means = []
    for values in zip(*ranks, strict=True):
        total = values[0].detach().clone()
        for value in values[1:]:
            total += value
        means.append(total / len(values))
    return means


def norm(tensors: Tensors) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t).double() for t in tensors])))


def copies(tensors: Tensors) -> Tensors:
    return [t.detach().clone() for t in tensors]


def put(tensors: Tensors, values: Tensors) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data.copy_(value)
