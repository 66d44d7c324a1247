"""Shapes of training in which scripts shard models (as torch's own tests of `fully_shard` try them), within islands."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.job import starter
from harness.patience import PATIENCE
from harness.run import Result

SHAPES = Path(__file__).with_name("shapes.py")
OF_FSDP2 = [
    *("plain", "bf16", "keep", "keep+eval", "eval", "look", "keep+look", "offload", "checkpoint", "wrapper+keep"),
    *("accumulate", "accumulate+bf16", "fused", "compile", "frozen", "frozen+checkpoint", "tied", "twice+checkpoint"),
    *("state", "switched", "muon"),
]
EVERY = [
    ("fsdp2", OF_FSDP2[:10]),
    ("fsdp2", OF_FSDP2[10:]),
    ("fsdp1", ["accumulate", "keep", "bf16", "look"]),
    ("flat", ["accumulate", "eval", "look"]),
    ("ddp", ["accumulate", "muon", "eval"]),
]
AT_ONCE = ("fsdp2", ["keep+eval+accumulate+tied"])
ROUNDING = {"muon": 5e-2, "bf16": 1e-5, "accumulate+bf16": 1e-5}
"""Differences that rounding makes where it is to less than 64 bits."""
LATE = ("--warmup-steps", "5", "--no-fall-back")
Ranks = list[dict[str, Any]]
"""What each rank tells of one training."""


def told(out: str, shapes: Sequence[str], ranks: int) -> dict[str, Ranks]:
    """By shape; ranks that average with each other must tell the same."""
    lines = re.findall(r'^(?:\[(\d+)\] )?({"weights": .*)$', out, re.MULTILINE)
    by_rank = [[json.loads(text) for who, text in lines if int(who or 0) == rank] for rank in range(ranks)]
    found = {shape: list(each) for shape, each in zip(shapes, zip(*by_rank, strict=True), strict=True)}
    for shape, each in found.items():
        for name in ("weights", "norms", "looks"):
            assert all(one[name] == each[0][name] for one in each), f"{name} of {shape}"
    return found


def run(
    launch: Callable[..., Result], kind: str, shapes: Sequence[str], *options: str, ranks: int = 4
) -> dict[str, Ranks]:
    result = launch(SHAPES.read_text(), "-np", str(ranks), *options, "train.py", kind, *shapes)
    assert result.code == 0, result.err
    return told(result.out.decode(), shapes, ranks)


def by_torch(shapes: Sequence[str], ranks: int = 4) -> dict[str, Ranks]:
    """What the first of torch's own ranks tells, on a mesh of two rows."""
    env = {**os.environ, "DADT_INJECT": "none"}
    command = [*starter("torchrun", ranks), str(SHAPES), "mesh", *shapes]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    return told(done.stdout, shapes, 1)


def assert_alike(kind: str, found: dict[str, Ranks], expected: dict[str, Ranks]) -> None:
    for shape, each in found.items():
        tolerance = ROUNDING.get(shape, 1e-3 if kind in ("fsdp1", "flat") else 1e-8)
        for name in ("weights", "norms", "looks"):
            pair = [torch.tensor(one[0][name], dtype=torch.float64) for one in (each, expected[shape])]
            difference = float((pair[0] - pair[1]).abs().max()) if pair[0].numel() else 0.0
            assert len(pair[0]) == len(pair[1]) and difference < tolerance, f"{name} of {shape}: {difference}"


def assert_near(found: Ranks, expected: Ranks) -> None:
    """Both have trained about as far."""

    def mean(ranks: Ranks, part: slice) -> float:
        return sum(sum(one["losses"][part]) / len(one["losses"][part]) for one in ranks) / len(ranks)

    first, wanted, last = mean(expected, slice(4)), mean(expected, slice(-4, None)), mean(found, slice(-4, None))
    assert abs(last - wanted) < 0.1 * abs(first - wanted)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "shapes"), EVERY)
def test_they_train_as_torch_does_on_a_mesh(launch: Callable[..., Result], kind: str, shapes: list[str]) -> None:
    found = run(launch, kind, shapes, "--island", "2", "--algorithm", "sync")
    assert_alike(kind, found, by_torch(shapes))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "shapes"), [AT_ONCE, *(pytest.param(*each, marks=pytest.mark.slow) for each in EVERY)]
)
def test_late_averages_are_those_of_ranks_without_islands(
    launch: Callable[..., Result], kind: str, shapes: list[str]
) -> None:
    """Ranks without islands that each train on an island's batch, in 64 bits."""
    found = run(launch, kind, shapes, "--island", "2", *LATE)
    expected = run(launch, "whole:2", shapes, *LATE, ranks=2)
    for shape in [shape for shape in shapes if "bf16" in shape]:
        assert_near(found.pop(shape), expected[shape])
    assert_alike(kind, found, expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_islands_of_four_ranks(launch: Callable[..., Result]) -> None:
    """Some ranks have nothing of a parameter."""
    shapes = ["keep+eval"]
    found = run(launch, "fsdp2", shapes, "--island", "4", "--algorithm", "sync", ranks=8)
    assert_alike("fsdp2", found, by_torch(shapes, 8))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [1, 2])
def test_three_islands(launch: Callable[..., Result], size: int) -> None:
    shapes = ["accumulate", "frozen+checkpoint"]
    found = run(launch, "fsdp2", shapes, "--island", str(size), *LATE, ranks=3 * size)
    assert_alike("fsdp2", found, run(launch, f"whole:{size}", shapes, *LATE, ranks=3))
