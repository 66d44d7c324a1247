"""`--verify-every`: a rank whose weights come to differ from the others' is found, told and repaired."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from harness.checks import assert_equal, assert_replicas_equal

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.train.replicas import checksum
from dadt.train.verification import TURNS, judge

# Gradients of a loss that is linear in the weights do not hang on these: what is repaired leaves no trace.
TRAIN = """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)) if DEEP else nn.Linear(4, 3)
    optimizer = torch.optim.OPTIMIZER
    generator = torch.Generator().manual_seed(rank)
    weights = []
    for step in range(60):
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=generator)
        (model(x).pow(2) if DEEP else model(x) * x[:, :3]).mean().backward()
        optimizer.step()
        if rank == WHO and step == 17:
            FAULT
        weights.append(next(model.parameters()).detach().clone())
    report({"state": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})
"""
FLIP = "next(model.parameters()).data.view(-1)[3] += 1"
SGD, ADAM = "SGD(model.parameters(), lr=0.01, momentum=0.9)", "Adam(model.parameters(), lr=0.01)"


def script(who: int = 1, fault: str = FLIP, *, deep: bool = False, optimizer: str = SGD) -> str:
    given = {"DEEP": str(deep), "OPTIMIZER": optimizer, "WHO": str(who), "FAULT": fault}
    text = TRAIN
    for name, value in given.items():
        text = text.replace(name, value)
    return text


def warnings(run) -> list[str]:
    return [line for line in run.output.splitlines() if "differs from that" in line]


@pytest.mark.parametrize(
    ("algorithm", "who"),
    [("sync", 1), ("pipe", 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sync", 0), ("pipe", 1)))],
)
def test_it_is_repaired_as_if_nothing_had_been(dadt_run, algorithm: str, who: int) -> None:
    options = ["--algorithm", algorithm, "--warmup-steps", "10", "--verify-every", "5"]
    run = dadt_run(script(who), *options, np=3)
    assert_replicas_equal(run)
    assert warnings(run) == [
        f"dadt: warning: step 22: the replica of rank {who} differs from that of rank {int(who == 0)}, first in weight"
        f" (equal after 15 steps, not after 20): it takes over that of rank {int(who == 0)}"
    ]
    assert f"; weights of rank {who} had come to differ from the others'" in run.output
    undisturbed = dadt_run(script(-1), *options[:4], np=3)
    assert_equal(run.ranks[2]["state"], undisturbed.ranks[2]["state"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name", "options"),
    [
        (FLIP, "0.weight", ["--algorithm", "pipe"]),
        ("optimizer.state[model[2].bias]['exp_avg'] *= 2", "2.bias", ["--compression", "int8"]),
        pytest.param(FLIP, "0.weight", ["--executor", "tcp"], marks=pytest.mark.slow),
    ],
)
def test_weights_and_state_of_a_deep_model(dadt_run, fault: str, name: str, options: list[str]) -> None:
    faulty = script(1, fault, deep=True, optimizer=ADAM)
    run = dadt_run(faulty, *options, "--warmup-steps", "10", "--verify-every", "1", np=3)
    averaged = [{k: v for k, v in rank["state"].items() if "running" not in k} for rank in run.ranks]
    for rank in (1, 2):
        assert_equal(averaged[0], averaged[rank])
        for mine, others in zip(run.ranks[0]["optimizer"].values(), run.ranks[rank]["optimizer"].values(), strict=True):
            assert_equal(mine, others)
    (warning,) = warnings(run)
    assert f"first in {name} (equal after 18 steps, not after 19): it takes over that of rank 0" in warning


def test_a_frozen_parameter_is_found_in_its_turn(dadt_run) -> None:
    """One value of a frozen matrix changes on one rank, without a sign: one of the next eight comparisons finds it."""
    text = script(1, "model[0].weight.data.view(-1)[3] += 1", deep=True)
    text = text.replace("    optimizer =", "    model[0].requires_grad_(False)\n    optimizer =", 1)
    run = dadt_run(text, "--algorithm", "sync", "--verify-every", "1", np=3)
    for other in run.ranks[1:]:
        assert torch.equal(run.ranks[0]["state"]["0.weight"], other["state"]["0.weight"])
    (warning,) = warnings(run)
    found = re.search(r"step (\d+): the replica of rank 1 differs .* first in 0.weight .* over that of rank 0", warning)
    assert found is not None and 18 < int(found[1]) <= 18 + TURNS + 1


@pytest.mark.slow
def test_of_two_the_first_counts(dadt_run) -> None:
    run = dadt_run(script(0), "--verify-every", "10", "--warmup-steps", "10")
    assert_replicas_equal(run)
    (warning,) = warnings(run)
    assert "rank 1 differs from that of rank 0" in warning
    assert warning.endswith("; no majority says whose is right, so that of the first rank counts")


@pytest.mark.slow
def test_what_is_found_last_is_told(dadt_run) -> None:
    run = dadt_run(
        script().replace("step == 17", "step == 58"), "--verify-every", "60", "--algorithm", "sync", np=3, code=1
    )
    (warning,) = warnings(run)
    assert warning.endswith("first in weight (equal after 0 steps, not after 60)")


@pytest.mark.slow
def test_equal_replicas_stay_what_they_are(dadt_run) -> None:
    for deep in (False, True):
        clean = script(-1, deep=deep)
        states = [dadt_run(clean, "--verify-every", every, "--warmup-steps", "10").ranks[0] for every in ("0", "3")]
        assert_equal(states[0]["state"], states[1]["state"])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", [pytest.param("sync", marks=pytest.mark.slow), "pipe"])
@pytest.mark.parametrize("when", ["step == 18", "step == 20", "step == 21", "step == 22", "False"])
def test_a_rank_is_lost_meanwhile(launch, algorithm: str, when: str) -> None:
    """when: False: in the midst of the repair."""
    text = f"""
import os, re, signal, torch
from torch import nn
from dadt.train.replicas import Replicas
torch.set_num_threads(1)
rank = int(re.search("DADT_RANK=([0-9]+)", open("/proc/self/environ").read())[1])
if rank == 3:
    Replicas.catch_up = lambda *_, **how: os.kill(os.getpid(), 9)
{"".join(line[4:] + chr(10) for line in script().splitlines())}
"""
    text = text.replace("(model(x)", f"rank == 3 and {when} and os.kill(os.getpid(), 9); (model(x)")
    text = text.replace("report(", "print('ends with', model.weight.tolist(), optimizer.state_dict()['state'][0]) #")
    options = ["--algorithm", algorithm, "--warmup-steps", "10", "--verify-every", "4"]
    result = launch(text, "-np", "4", "--min-np", "2", *options, "train.py")
    assert result.code == 0, result.err
    ends = [line.partition("ends with")[2] for line in result.out.decode().splitlines() if "ends with" in line]
    assert len(ends) == 3 and len(set(ends)) == 1
    assert result.err.count("the replica of rank 1 differs from that of rank 0, first in weight") == 1
    report = json.loads((result.logs / result.job / "report.json").read_text())
    assert [rank["differed"] for rank in report["ranks"] if rank["rank"] != 3] == [0, 1, 0]


def test_the_majority_is_right() -> None:
    a, b, c = [1, 2], [1, 3], [4, 2]
    assert judge([a, a, a]) == (0, [], True)
    assert judge([b, a, a]) == (1, [0], True)
    assert judge([a, b]) == (0, [1], False)
    assert judge([a, b, c]) == (0, [1, 2], False)
    assert judge([b, a, c, a]) == (0, [1, 2, 3], False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool])
def test_each_bit_counts(dtype: torch.dtype) -> None:
    for shape in [(), (1,), (7,), (64, 3), (2, 3, 4, 4)]:
        tensor = torch.zeros(math.prod(shape) + 1).to(dtype)[1:].view(shape)
        before = checksum(tensor)
        for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
            tensor.view(-1)[place] = 1
            assert checksum(tensor) != before
            tensor.view(-1)[place] = 0
        assert checksum(tensor) == before == checksum(tensor.clone())
    assert checksum(torch.zeros(0)) == 0


@pytest.mark.parametrize("algorithm", ["local", "gossip"])
def test_weights_that_differ_by_design_are_not_compared(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=f"--verify-every 5: with --algorithm {algorithm} each rank has weights"):
        Config(algorithm=algorithm, verify_every=5)
    with pytest.raises(ConfigError, match="--verify-every -1: must be 0 or more"):
        Config(verify_every=-1)
