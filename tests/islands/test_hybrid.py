"""Scripts that shard on a mesh of their own over all ranks (HSDP): FSDP averages within its rows, and DADT between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness.run import Result
from islands.test_islands import ADAMW, SCRIPT, SGD, STEPS, alone, run, weights

TAKEN = "averaged between the 2 rows by --algorithm"


def train(launch: Callable[..., Result], script: str, *options: str, words: tuple[str, ...] = ()) -> Result:
    return launch(script, "-np", "4", *options, "train.py", "hsdp", *words)


def test_they_train_as_one_process_would(launch) -> None:
    found = train(launch, SCRIPT.format(steps=STEPS, optimizer=ADAMW), "--algorithm", "sync", words=("clip",))
    assert TAKEN in found.err
    torch.testing.assert_close(weights(found), alone(clip=True), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
@pytest.mark.parametrize("options", [[], ["--compression=int8"], ["--simulate-hosts=2"]])
def test_late_averages_are_those_of_islands(launch, options: list[str], optimizer: str) -> None:
    late = ["--warmup-steps=5", "--no-fall-back", *options]
    flags = [part for each in late for part in each.split("=")]
    found = train(launch, SCRIPT.format(steps=STEPS, optimizer=optimizer), *flags)
    assert TAKEN in found.err
    islands = run(launch, "fsdp2", *late, optimizer=optimizer)
    torch.testing.assert_close(weights(found), weights(islands), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_left_out_on_all_ranks(launch) -> None:
    bad = "    if number == 3 and step == 7:\n        x[0, 0] = float('nan')\n    optimizer.zero_grad()\n"
    script = SCRIPT.format(steps=STEPS, optimizer=ADAMW).replace("    optimizer.zero_grad()\n", bad)
    found = train(launch, script, "--on-nan", "skip", "--algorithm", "sync")
    assert torch.isfinite(weights(found)).all()
    assert "is not finite on one of ranks 2 to 3; all ranks leave the step out" in found.err


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_beside_a_model_that_is_not_sharded(launch, first: bool) -> None:
    """Ranks exchange with their equals in all things, so a model that each rank holds whole is not averaged so."""
    build = "optimizer = torch.optim."
    other = (
        "other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 3))\n"
        "beside = torch.optim.SGD(other.parameters(), lr=0.1)\n"
    )
    script = SCRIPT.format(steps=STEPS, optimizer=ADAMW)
    end = script.index(build) if first else script.index("\n", script.index(build)) + 1
    script = script[:end] + other + script[end:]
    steps = "    optimizer.step()\n    beside.zero_grad()\n    other(x).square().mean().backward()\n    beside.step()\n"
    script = script.replace("    optimizer.step()\n", steps)
    script = script.replace("dist.destroy", "print('beside', other.module.weight.tolist(), flush=True)\ndist.destroy")
    found = train(launch, script, "--algorithm", "sync")
    assert (TAKEN in found.err) is not first
    assert f"{'AdamW' if first else 'SGD'} is left alone" in found.err
    torch.testing.assert_close(weights(found), alone(), rtol=1e-4, atol=1e-5)
    printed = [line for line in found.out.decode().splitlines() if "beside" in line]
    assert len({line.partition("beside")[2] for line in printed}) == 1


@pytest.mark.parametrize("change", ["two optimizers", pytest.param("a wrapper", marks=pytest.mark.slow)])
def test_each_part_of_the_model_is_averaged(launch, change: str) -> None:
    """Also by an optimizer that is built second, and where the model becomes a part of another one afterwards."""
    script = SCRIPT.format(steps=STEPS, optimizer=ADAMW)
    build = script.index("optimizer = torch.optim.")
    end = script.index("\n", build) + 1
    if change == "two optimizers":
        made = (
            "one = torch.optim.AdamW(list(model.parameters())[:1], lr=0.01)\n"
            "other = torch.optim.AdamW(list(model.parameters())[1:], lr=0.01)\n"
        )
        script = script[:build] + made + script[end:]
        script = script.replace("optimizer.zero_grad()", "model.zero_grad()")
        script = script.replace("optimizer.step()", "one.step()\n    other.step()")
    else:
        script = script[:end] + "model = torch.nn.Sequential(model)\n" + script[end:]
    found = train(launch, script, "--algorithm", "sync")
    assert TAKEN in found.err and "is left alone" not in found.err
    torch.testing.assert_close(weights(found), alone(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_optimizer_of_such_a_model_and_of_others_is_refused(launch) -> None:
    script = SCRIPT.format(steps=STEPS, optimizer=ADAMW)
    build = script.index("optimizer = torch.optim.")
    end = script.index("\n", build) + 1
    made = (
        "optimizer = torch.optim.AdamW(list(model.parameters())[:1], lr=0.01)\n"
        "other = torch.optim.SGD([*list(model.parameters())[1:], torch.nn.Parameter(torch.ones(2))], lr=0.01)\n"
    )
    found = train(launch, script[:build] + made + script[end:], "--algorithm", "sync")
    assert found.code != 0 and "SGD trains parameters of a model whose rows DADT averages, and others" in found.err
