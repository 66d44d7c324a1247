"""Ranks that take steps of their own and average now and then: equal to the definition, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from checks import assert_equal
from scenarios import batch, mlp
from torch import nn

WARMUP = 3
STEPS = 21

SCRIPT = """
    import test_local as t
    torch.manual_seed(rank)                                    # rank 0's weights are everybody's
    model = {model}
    optimizer = t.optimizer(model)
    for step in range(t.STEPS):
        t.backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    own = t.values(model)
    t.at_the_end(lambda: report({{"own": own, "end": t.values(model)}}))
"""


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model: nn.Module, rank: int, step: int) -> None:
    x, y = batch(rank, step, 0)
    nn.functional.cross_entropy(model(x), y).backward()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def at_the_end(call) -> None:
    """After the ranks have made their last average."""
    import gc

    from dadt.runtime import Runtime

    (runtime,) = [o for o in gc.get_objects() if type(o) is Runtime]
    runtime.on_end.append(call)


@dataclass
class Outer:
    every: int = 4
    lr: float = 1.0
    momentum: float = 0.0
    fragments: Sequence[Sequence[int]] = ((0, 1, 2, 3),)
    """Parameters by number."""

    def options(self) -> list[str]:
        return [
            *("--algorithm", "local", "--warmup-steps", str(WARMUP), "--sync-every", str(self.every)),
            *("--outer-lr", str(self.lr), "--outer-momentum", str(self.momentum)),
            *("--fragments", str(len(self.fragments))),
        ]

    def moved(self, a: torch.Tensor, v: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = v * self.momentum + p
        return torch.add(a, torch.add(p, v, alpha=self.momentum), alpha=self.lr), v


def mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(parts[1:], parts[0]) * (1.0 / len(parts))


def simulate(world: int, outer: Outer, warmup: int = WARMUP) -> tuple[list[dict], dict]:
    """The ranks' weights after the last step, and their mean, from the definition in the docs."""
    torch.manual_seed(0)
    first = mlp()
    models = [copy.deepcopy(first) for _ in range(world)]
    optimizers = [optimizer(m) for m in models]
    weights = [list(m.parameters()) for m in models]
    anchors = [p.detach().clone() for p in first.parameters()]
    velocities = [torch.zeros_like(a) for a in anchors]
    starts: list[list[torch.Tensor]] = []
    flying: dict[int, list[torch.Tensor]] = {}  # by parameter: each rank's progress in the round before
    for step in range(STEPS):
        for rank, model in enumerate(models):
            backward(model, rank, step)
        if step < warmup:
            for same in zip(*weights):
                average = mean([p.grad for p in same])
                for p in same:
                    p.grad = average.clone()
        for each in optimizers:
            each.step()
            each.zero_grad()
        alone = step + 1 - warmup
        if alone <= 0:
            anchors = [p.detach().clone() for p in weights[0]]
            starts = [[a.clone() for a in anchors] for _ in models]
            continue
        for number, fragment in enumerate(outer.fragments):
            if (alone - number * outer.every // len(outer.fragments)) % outer.every:
                continue
            for k in fragment:
                progress = [w[k].detach() - s[k] for w, s in zip(weights, starts)]
                if k in flying:
                    anchors[k], velocities[k] = outer.moved(anchors[k], velocities[k], mean(flying[k]))
                flying[k] = progress
                for w, s, p in zip(weights, starts, progress):
                    s[k] = outer.moved(anchors[k], velocities[k], p)[0]
                    w[k].data.copy_(s[k])
    own = [values(m) for m in models]
    return own, {name: mean([each[name] for each in own]) for name in own[0]}


LOCAL_SGD = Outer()
DILOCO = Outer(every=3, lr=0.7, momentum=0.9)
STREAMING = Outer(every=5, lr=0.7, momentum=0.9, fragments=((0,), (1, 2, 3)))


@pytest.mark.parametrize(
    ("outer", "world", "options"),
    [
        (LOCAL_SGD, 2, ["--executor", "gloo"]),
        (DILOCO, 2, ["--bucket-mb", "0.0001"]),
        (STREAMING, 3, []),
    ],
    ids=["local SGD, gloo", "DiLoCo, many buckets", "streaming, 3 ranks"],
)
def test_each_rank_equals_the_definition(dadt_run, outer, world, options) -> None:
    torch.set_num_threads(1)
    run = dadt_run(SCRIPT.format(model="t.mlp()"), *outer.options(), *options, np=world)
    own, average = simulate(world, outer)
    for rank in range(world):
        assert_equal(run.ranks[rank]["own"], own[rank], f"rank {rank}")
        assert_equal(run.ranks[rank]["end"], average, f"rank {rank}, at the end")
    assert not torch.equal(own[0]["0.weight"], own[1]["0.weight"])
    assert any(f"every {outer.every} steps" in line for line in run.lines())
