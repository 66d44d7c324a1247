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
