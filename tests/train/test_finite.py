"""`--on-nan`: gradients that are not finite on one rank, and what all ranks make of them."""

from __future__ import annotations

import math

import pytest
from harness.checks import assert_equal, assert_replicas_equal

from dadt.config import Config
from dadt.errors import ConfigError

TRAIN = """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    before = []
    for step in range(40):
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=generator)
        if rank == 1 and step in (5, 20):
            x[0, 0] = float("nan")
        model(x).pow(2).mean().backward()
        before.append(model.state_dict()["0.bias"].clone())
        optimizer.step()
        moments = float(optimizer.state[model[0].weight]["step"]) if optimizer.state else 0.0
    report({"state": model.state_dict(), "before": before, "taken": moments})
"""
TOLD = "dadt: warning: step {}: the gradient of 0.weight is not finite on rank 1"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        ["--algorithm", "sync", "--bucket-mb", "0.0001"],
        ["--algorithm", "pipe"],
        ["--algorithm", "pipe", "--compression", "int8"],
        ["--algorithm", "sync", "--compression", "powersgd:1"],
    ],
    ids=" ".join,
)
def test_all_ranks_skip_what_is_not_finite_on_one(dadt_run, options: list[str]) -> None:
    run = dadt_run(TRAIN, "--on-nan", "skip", "--warmup-steps", "10", *options)
    assert_replicas_equal(run)
    rank = run.ranks[0]
    assert all(value.isfinite().all() for value in rank["state"].values())
    late = options[1] == "pipe"
    # Under pipe the gradient of step 20 would be applied in the next step, and that of step 9 is the last in time.
    skipped = [i for i in range(39) if rank["before"][i].equal(rank["before"][i + 1])]
    assert skipped == ([5, 10, 21] if late else [5, 20])
    assert rank["taken"] == 40 - len(skipped)
    for step in (5, 20):
        assert TOLD.format(step) + "; all ranks leave the step out\n" in run.output
    assert run.output.count("is not finite") == 2
    assert "; gradients of 2 steps were not finite" in run.output


@pytest.mark.slow
def test_without_any_it_changes_nothing(dadt_run) -> None:
    clean = TRAIN.replace("step in (5, 20)", "False")
    states = [
        dadt_run(clean, "--warmup-steps", "10", "--on-nan", choice).ranks[0]["state"] for choice in ("skip", "ignore")
    ]
    assert_equal(*states)


def test_reported_they_are_applied(dadt_run) -> None:
    run = dadt_run(TRAIN, "--on-nan", "report", "--algorithm", "sync")
    assert TOLD.format(5) + "\n" in run.output
    assert all(math.isnan(float(rank["state"]["0.bias"][0])) for rank in run.ranks)


def test_all_stop(dadt_run) -> None:
    run = dadt_run(TRAIN, "--on-nan", "stop", "--warmup-steps", "10", code=1)
    assert "DadtError: step 5: the gradient of 0.weight is not finite on rank 1 (--on-nan stop)" in run.output


def test_a_gradient_scaler_looks_itself(dadt_run) -> None:
    scaled = TRAIN.replace("model(x).pow(2).mean().backward()", "scaler.scale(model(x).pow(2).mean()).backward()")
    scaled = scaled.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()")
    scaled = scaled.replace("before = []", "before = []; scaler = torch.amp.GradScaler('cpu')")
    run = dadt_run(scaled, "--on-nan", "skip", "--algorithm", "sync")
    assert_replicas_equal(run)
    assert "is not finite" not in run.output
    assert run.ranks[0]["taken"] == 38


@pytest.mark.parametrize("algorithm", ["local", "gossip"])
def test_ranks_with_steps_of_their_own_have_no_say(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=f"--on-nan skip: with --algorithm {algorithm} each rank takes steps"):
        Config(algorithm=algorithm, on_nan="skip")


HELD = """
    import copy
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)
        def forward(self, x):
            return self.used(x)
    def begun():
        model = Two()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    generator = torch.Generator().manual_seed(rank)
    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad(set_to_none=False)
            x = torch.randn(8, 4, generator=generator)
            if rank == 1 and step == 25:
                x[0, 0] = float("nan")
            model(x).pow(2).mean().backward()
            optimizer.step()
    torch.manual_seed(0)
    model, optimizer = begun()
    before = model.unused.weight.detach().clone()
    train(model, optimizer, range(20))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    del optimizer
    model, optimizer = begun()
    model.load_state_dict(saved[0]), optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(20, 40))
    assert torch.equal(model.unused.weight, before) and model.unused.weight not in optimizer.state
    report({"state": model.state_dict()})
"""


@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_steps_that_apply_nothing_leave_what_has_no_gradient_as_it_is(dadt_run, algorithm: str) -> None:
    """Also where the script zeroes in place, so that zeros would stay. And steps are counted on from a checkpoint."""
    run = dadt_run(HELD, "--algorithm", algorithm, "--on-nan", "skip", "--warmup-steps", "5")
    assert_replicas_equal(run)
    assert "step 25 of optimizer #2: the gradient of used.weight is not finite on rank 1" in run.output
