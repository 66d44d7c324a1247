"""Ranks that take steps of their own and average now and then: equal to the definition, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
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
    model = t.mlp()
    optimizer = t.optimizer(model)
    for step in range(t.STEPS):
        t.backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    own = t.values(model)
    t.at_the_end(lambda: report({"own": own, "end": t.values(model)}))
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

    def stepped(self, event: str = "") -> None:
        """Every rank has stepped. event: the script has "loaded" weights, or "changed" which parameters it trains."""
        outer = self.outer
        self.alone += 1
        self.loaded |= event == "loaded"
        if event == "changed":
            self.settle()
        for number, fragment in enumerate(outer.fragments):
            since = self.alone - number * outer.every // len(outer.fragments)
            if (since - -(-outer.every // 2)) % outer.every == 0 and not self.loaded:
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

    def send(self, k: int) -> None:
        self.flying[k] = [w[k].detach() - self.anchors[k] for w in self.weights]
        self.ahead[k] = [self.outer.moved(self.anchors[k], self.velocities[k], p)[0] for p in self.flying[k]]
        for w, then in zip(self.weights, self.ahead[k]):
            w[k].data.copy_(then)

    def merge(self, k: int) -> None:
        moved = self.outer.moved(self.anchors[k], self.velocities[k], mean(self.flying.pop(k)))
        self.anchors[k], self.velocities[k] = moved
        for w, then in zip(self.weights, self.ahead[k]):
            w[k].data.copy_(self.anchors[k] + (w[k].detach() - then))

    def settle(self) -> None:
        for k, progress in self.flying.items():
            self.velocities[k] = self.velocities[k] * self.outer.momentum + mean(progress)
        self.flying.clear()
        self.anchors = [mean([w.detach() for w in same]) for same in zip(*self.weights)]
        for weights in self.weights:
            for p, anchor in zip(weights, self.anchors):
                p.data.copy_(anchor)


def averages(own: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """What the ranks have at the end: the mean, and what is no float each its own."""
    return [
        {n: mean([o[n] for o in own]) if v.is_floating_point() else v for n, v in each.items()} for each in own
    ]


def simulate(world: int, outer: Outer) -> list[dict[str, torch.Tensor]]:
    """Each rank's weights after the last step."""
    torch.manual_seed(0)
    first = mlp()
    models = [copy.deepcopy(first) for _ in range(world)]
    optimizers = [optimizer(m) for m in models]
    weights = [list(m.parameters()) for m in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            backward(model, rank, step)
        if step < WARMUP:
            for same in zip(*weights):
                average = mean([p.grad for p in same])
                for p in same:
                    p.grad = average.clone()
        for each in optimizers:
            each.step()
            each.zero_grad()
        if step + 1 == WARMUP:
            rounds = Rounds(outer, weights)
        elif step >= WARMUP:
            rounds.stepped()
    return [values(m) for m in models]


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
    run = dadt_run(SCRIPT, *outer.options(), *options, np=world)
    own = simulate(world, outer)
    for rank in range(world):
        assert_equal(run.ranks[rank]["own"], own[rank], f"rank {rank}")
        assert_equal(run.ranks[rank]["end"], averages(own)[rank], f"rank {rank}, at the end")
    assert not torch.equal(own[0]["0.weight"], own[1]["0.weight"])
    assert any(f"every {outer.every} steps" in line for line in run.lines())


# What scripts do: each kind gives a model, its optimizers, and a generator that goes on from step to step ------------

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
    own = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3 + rank)

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
    for kind in (accumulating, scaling, evaluating, loading, freezing, normalizing, judging)
}

ALL_KINDS = """
    import test_local as t
    made, own = {}, {}
    for name, kind in t.KINDS.items():
        torch.manual_seed(0)
        made[name] = kind(rank)
        for _ in made[name][2]:
            pass
        own[name] = t.values(made[name][0])
    torch.manual_seed(0)
    collected, _, steps = t.accumulating(rank)
    for _ in steps:
        pass
    del _, steps
    t.at_the_end(lambda: report({
        "own": own, "end": {name: t.values(model) for name, (model, *_) in made.items()}, "collected": t.values(collected)
    }))
"""


def simulate_kind(name: str, world: int, outer: Outer) -> list[dict[str, torch.Tensor]]:
    ranks = []
    for rank in range(world):
        torch.manual_seed(0)
        ranks.append(KINDS[name](rank))
    optimizers = range(len(ranks[0][1]))
    rounds = [
        Rounds(outer, [[p for g in each[k].param_groups for p in g["params"]] for _, each, _ in ranks])
        for k in optimizers
    ]
    for steps in zip(*[train for _, _, train in ranks]):
        number, event = steps[0]
        rounds[number].stepped(event)
    return [values(model) for model, _, _ in ranks]


def test_what_scripts_do_equals_the_definition(dadt_run) -> None:
    torch.set_num_threads(1)
    outer = Outer(every=4, lr=0.7, momentum=0.9)
    options = ["--algorithm", "local", "--warmup-steps", "0", "--sync-every", "4"]
    run = dadt_run(ALL_KINDS, *options, "--outer-lr", "0.7", "--outer-momentum", "0.9")
    for name in KINDS:
        own = simulate_kind(name, 2, outer)
        for rank in range(2):
            assert_equal(run.ranks[rank]["own"][name], own[rank], f"{name}, rank {rank}")
            assert_equal(run.ranks[rank]["end"][name], averages(own)[rank], f"{name}, rank {rank}, at the end")
        assert not torch.equal(*[each[n] for each in own for n in list(own[0])[:1]]), name
    for rank, each in enumerate(run.ranks):
        assert_equal(each["collected"], each["own"]["accumulating"], f"without its optimizer, rank {rank}")
