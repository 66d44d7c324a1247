"""Ranks that take Adam's steps on their own: with momentum read from the mean progress and a common v, as defined."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from harness.job import joined
from harness.rounds import backward, mean
from harness.scenarios import mlp
from harness.survivors import KILL_ONCE_DELIVERED, OPTIONS, lacks, script, survivors

WARMUP, STEPS, EVERY = 5, 26, 4
RATE, BETA1, BETA2, EPS, DECAY = 0.01, 0.9, 0.95, 1e-8, 0.1

TRAIN = """
    from harness.rounds import backward
    from harness.scenarios import mlp
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr={rate}, betas=(0.9, 0.95), weight_decay=0.1{more})
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {steps})
    for step in range({steps}):
        backward(model, rank, step)
        {clip}
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    report({{
        "weights": [p.detach().clone() for p in model.parameters()],
        "momenta": [optimizer.state[p]["exp_avg"] for p in model.parameters()],
        "squares": [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()],
    }})
"""
"""A training of which each rank tells the weights and moments that it has after the last step."""


def script_of(steps: int = STEPS, more: str = "", clip: str = "") -> str:
    return TRAIN.format(rate=RATE, steps=steps, more=more, clip=clip)


class Rank:
    def __init__(self, model: torch.nn.Module, state: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.model = model
        self.m = [m.clone() for m, _ in state]
        self.v = [v.clone() for _, v in state]
        """Without bias."""

    def step(self, number: int, rate: float) -> None:
        for i, p in enumerate(self.model.parameters()):
            self.m[i] = BETA1 * self.m[i] + (1 - BETA1) * p.grad
            self.v[i] = torch.maximum(self.v[i], self.m[i] ** 2)
            moved = self.m[i] / (1 - BETA1**number) / (self.v[i].sqrt() + EPS)
            p.data.copy_(p.data * (1 - rate * DECAY) - rate * moved)
            p.grad = None

    def factor(self, i: int, number: int, rates: float) -> torch.Tensor:
        return (self.v[i].sqrt() + EPS) * (1 - BETA1**number) / rates


def simulate(world: int, overlap: int) -> list[Rank]:
    """All ranks in one process, from the definition in the docs. Nothing of dadt is used."""
    torch.manual_seed(0)
    first = mlp().double()
    models = [copy.deepcopy(first) for _ in range(world)]
    kind = {"lr": RATE, "betas": (BETA1, BETA2), "weight_decay": DECAY}
    optimizers = [torch.optim.AdamW(model.parameters(), **kind) for model in models]
    rates = [RATE * (1 + math.cos(math.pi * step / STEPS)) / 2 for step in range(STEPS)]
    for step in range(WARMUP):
        for rank, model in enumerate(models):
            backward(model, rank, step)
        for same in zip(*(model.parameters() for model in models)):
            average = mean([p.grad for p in same])
            for p in same:
                p.grad = average.clone()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rates[step]
            optimizer.step()
            optimizer.zero_grad()
    states = [optimizers[0].state[p] for p in models[0].parameters()]
    state = [(s["exp_avg"], s["exp_avg_sq"] / (1 - BETA2**WARMUP)) for s in states]
    ranks = [Rank(model, state) for model in models]
    anchors = [p.detach().clone() for p in models[0].parameters()]
    flying: list[list[torch.Tensor]] = []
    total = sent = 0.0
    for alone, step in enumerate(range(WARMUP, STEPS), 1):
        for rank, each in enumerate(ranks):
            backward(each.model, rank, step)
            each.step(step + 1, rates[step])
        total += rates[step]
        if alone % EVERY == 0:
            flying = [[p.detach() - a for p, a in zip(each.model.parameters(), anchors)] for each in ranks]
            for each, progress in zip(ranks, flying):
                for i, (p, a) in enumerate(zip(progress, anchors)):
                    each.m[i] = -each.factor(i, step + 1, total) * (p + DECAY * total * a)
            total, sent = 0.0, total
        if (alone - overlap) % EVERY == 0 and flying:
            for i, progress in enumerate(zip(*flying)):
                before, anchors[i] = anchors[i], anchors[i] + mean(progress)
                for each, own in zip(ranks, progress):
                    each.m[i] -= BETA1**overlap * each.factor(i, step + 1, sent) * (mean(progress) - own)
                    p = list(each.model.parameters())[i]
                    p.data.copy_(anchors[i] + (p.data - (before + own)))
            flying = []
    return ranks


@pytest.mark.parametrize("overlap", [0, 2])
def test_each_rank_equals_the_definition(dadt_run, overlap: int) -> None:
    torch.set_num_threads(1)
    options = ["--algorithm", "local", "--warmup-steps", str(WARMUP), "--sync-every", str(EVERY)]
    both = joined(plain=script_of(), fused=script_of(more=", fused=True"))
    run = dadt_run(both, *options, "--overlap-steps", str(overlap), np=3)
    for name in ("plain", "fused"):
        for found, expected in zip(run.of(name).ranks, simulate(3, overlap), strict=True):
            for i, p in enumerate(expected.model.parameters()):
                assert torch.allclose(found["weights"][i], p, rtol=1e-6, atol=1e-9), (name, i)
                assert torch.allclose(found["momenta"][i], expected.m[i], rtol=1e-5, atol=1e-9), (name, i)
                v = found["squares"][i] / (1 - BETA2**STEPS)
                assert torch.allclose(v, expected.v[i], rtol=1e-5, atol=1e-12), (name, i)


@pytest.mark.parametrize("warmup", [WARMUP, pytest.param(0, marks=pytest.mark.slow)])
def test_ranks_have_one_v_once_it_was_shared(dadt_run, warmup: int) -> None:
    """After its 50th step alone."""
    clip = "nn.utils.clip_grad_norm_(model.parameters(), 0.5)"
    steps = warmup + 50
    options = ["--algorithm", "local", "--warmup-steps", str(warmup), "--sync-every", "5", "--overlap-steps", "0"]
    run = dadt_run(script_of(steps, clip=clip), *options)
    first, second = (rank["squares"] for rank in run.ranks)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_whose_step_is_not_known_goes_on_by_itself(dadt_run) -> None:
    options = ["--algorithm", "local", "--warmup-steps", str(WARMUP), "--sync-every", "4"]
    run = dadt_run(script_of(more=", amsgrad=True"), *options)
    assert "local: what AdamW computes from gradients stays each rank's own, since AdamW has amsgrad" in run.output


@pytest.mark.parametrize("late", [3, 55])  # the factors are measured, and v is shared
def test_a_rank_is_lost_while_v_is_shared(launch, late: int) -> None:
    text = script(KILL_ONCE_DELIVERED).replace("\nstep = 0\n", lacks(late, "sums of v") + "\nstep = 0\n")
    more = ["--algorithm", "local", "--warmup-steps", "4", "--sync-every", "4", "--overlap-steps", "0"]
    result = launch(text, *OPTIONS, *more, "train.py", f"2:{late + 1}:forward")
    assert result.code == 0, result.err
    assert survivors(result).keys() == {0, 1}


RESUMED = """
    from harness.rounds import backward
    from harness.scenarios import mlp
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 26)
    if {begin}:
        saved = torch.load({path!r}, weights_only=True)
        for each, state in zip((model, optimizer, schedule), saved):
            each.load_state_dict(state)
    for step in range({begin}, 26):
        backward(model, 0, step)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 13 and not {begin}:
            torch.save([each.state_dict() for each in (model, optimizer, schedule)], {path!r})
    report([p.detach().clone() for p in model.parameters()])
"""


def test_a_resumed_training_goes_on_with_its_momentum(dadt_run, tmp_path) -> None:
    """All ranks have the same data, so that what a rank has at a checkpoint is what all have."""
    options = ["--algorithm", "local", "--warmup-steps", str(WARMUP), "--sync-every", "4", "--overlap-steps", "2"]
    path = str(tmp_path / "saved.pt")
    whole, resumed = (dadt_run(RESUMED.format(begin=begin, path=path), *options).ranks for begin in (0, 14))
    for found in (whole[1], *resumed):
        for a, b in zip(whole[0], found, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_adamax_divides_by_no_gradient_of_a_rank_alone(dadt_run) -> None:
    run = dadt_run(
        """
        from harness.rounds import backward
        from harness.scenarios import mlp
        torch.manual_seed(0)
        model, seen = mlp(), []
        optimizer = torch.optim.Adamax(model.parameters(), lr=0.01, weight_decay=0.1)
        for step in range(20):
            backward(model, rank, step)
            before = [optimizer.state[p].get("exp_inf", torch.zeros(())).clone() for p in model.parameters()]
            optimizer.step()
            seen.append([(r, optimizer.state[p]["exp_inf"].clone(), optimizer.state[p]["exp_avg"].clone())
                         for r, p in zip(before, model.parameters())])
            optimizer.zero_grad()
        report(seen)
        """,
        *("--algorithm", "local", "--warmup-steps", "5", "--sync-every", "4", "--overlap-steps", "0"),
    )
    assert "divides by its own" not in run.output
    grown = 0
    for seen in run.ranks:
        for before, after, momentum in (row for rows in seen[-10:] for row in rows):
            assert torch.allclose(after, torch.maximum(0.999 * before, momentum.abs()), rtol=1e-5)
            grown += int((after > before).sum())
    assert grown
