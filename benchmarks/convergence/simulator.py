"""All ranks of a training in one process, from the algorithms' definitions: no line of DADT's runtime takes part.

Batches, weights, optimizer state and BatchNorm statistics have the bits that `dadt run --batch global` gives (see
tests/benchmarks/test_convergence.py): each rank computes the gradient of its part of the batch, sums go in rank order.
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
"""Steps whose mean loss makes a point of a curve."""


class Simulation:
    """One training of `ranks` ranks."""

    def __init__(self, family: Family, method: Method, ranks: int, rate: float, seed: int) -> None:
        self.family = family
        self.method = method
        self.ranks = ranks
        self.seed = seed
        self.model, self.optimizer, self.schedule = family.begin(seed, rate)
        self.parameters: Tensors = [p for p in self.model.parameters() if p.requires_grad]
        self.share = method.share(ranks)
        self.factor, self.older = method.factors(self.optimizer)
        self.buffers = [b for b in self.model.buffers() if b.is_floating_point()]
        """BatchNorm's statistics: each rank has its own, and reads their mean."""
        self.counts = [b for b in self.model.buffers() if not b.is_floating_point()]
        self.own = [[b.clone() for b in self.buffers] for _ in range(ranks)]
        self.official = [b.clone() for b in self.buffers]
        self.pending: deque[tuple[Tensors, Tensors, bool]] = deque()
        """Averages under way: of gradients and of buffers, and whether gradients blew up when they were launched."""
        self.divergence = Divergence() if method.delayed and method.fall_back else None
        self.norm: float | None = None
        """The norm of the averages of gradients that came last; None before, and once it has been looked at."""
        self.late = method.delayed
        """Gradients are late, once the warm-up is over: unless they blow up."""
        self.displacements: deque[Tensors] = deque(maxlen=2)
        """How far the last two updates moved the weights, the last one first."""
        self.applied: Tensors | None = None
        self.fresh: list[Tensors] = []
        """Each rank's own gradients of the last step."""
        self.previous: list[Tensors] = []
        """Each rank's own gradients of the step before, once averages are late: the last average is made of them."""
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
            self.optimizer.step()
            self.shorten(true)
            self.displace(true)
            self.applied = arrived
        self.schedule.step()
        self.step += 1
        return loss

    def predict(self) -> None:
        """Put the weights where the gradient that is computed now will be applied."""
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
        """The same by what this rank alone knows of the gradients in flight."""
        if not self.predicts or self.share is None or self.applied is None:
            return
        put(self.parameters, true)
        put(self.parameters, own_step(self.optimizer, self.expected(rank, self.applied, self.share)))

    def expected(self, rank: int, applied: Tensors, share: float) -> Tensors:
        """What this rank takes for the gradients in flight."""
        own = [g * share for g in self.fresh[rank]]
        if not self.previous:
            return [a * (1 - share) + g for a, g in zip(applied, own, strict=True)]
        back = self.method.damping(share)
        own = [before * back + g for before, g in zip(self.previous[rank], own, strict=True)]
        return [g + a * (1 - share - back) for a, g in zip(applied, own, strict=True)]

    def average(self, batch: Batch, true: Tensors) -> tuple[float, Tensors, Tensors]:
        """Mean loss, gradients and buffers of all ranks, each on its part of the batch."""
        size = len(batch[0]) // self.ranks
        assert size * self.ranks == len(batch[0]), "the batch must be divisible among the ranks"
        losses, gradients, statistics = 0.0, [], []
        counts = copies(self.counts)
        for rank in range(self.ranks):
            put(self.counts, counts)
            put(self.buffers, self.own[rank])
            self.predict_for(rank, true)
            self.optimizer.zero_grad()
            loss = self.family.loss(self.model, (part(batch[0], rank, size), part(batch[1], rank, size)))
            loss.backward()  # type: ignore[no-untyped-call]
            losses += float(loss.detach())
            self.own[rank] = copies(self.buffers)
            gradients.append([p.grad for p in self.parameters if p.grad is not None])
            statistics.append(self.own[rank])
        self.previous, self.fresh = self.fresh if self.pending else [], gradients
        return losses / self.ranks, mean(gradients), mean(statistics)

    def exchange(self, gradients: Tensors, statistics: Tensors) -> Tensors | None:
        """What arrives in this step; None where nothing has yet."""
        blown_up = self.blows_up()
        if not self.late or self.step < self.method.warmup:
            self.official = statistics
            self.norm = norm(gradients)
            return gradients
        self.pending.append((gradients, statistics, blown_up))
        if len(self.pending) <= 1:
            return None
        arrived, averages, blown_up = self.pending.popleft()
        if blown_up:  # synchronous from here on, for good
            self.late, self.divergence = False, None
            self.pending.clear()
            arrived, averages = gradients, statistics
        self.official = averages
        self.norm = norm(arrived)
        return arrived

    def blows_up(self) -> bool:
        """What DADT's own watch says of the averages that came last."""
        last, self.norm = self.norm, None
        if self.divergence is None or last is None:
            return False
        if self.step <= self.method.warmup:
            self.divergence.learn(last)
            return False
        return self.divergence.see(last)

    def shorten(self, true: Tensors) -> None:
        """Go only a part of the way, in the first delayed steps."""
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
        """Put the buffers that a script reads into the model."""
        put(self.buffers, self.official)


def simulate(family: Family, method: str, ranks: int, rate: float, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return Simulation(family, Method.parse(method), ranks, rate, seed).run()


def part(values: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return values[rank * size : (rank + 1) * size].clone()


def mean(ranks: list[Tensors]) -> Tensors:
    """The means over ranks, whose tensors are summed in the order of ranks."""
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
