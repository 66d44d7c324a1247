"""Trajectories equal the algorithm's definition, simulated in one process; replicas are equal bit for bit.

Where prediction goes by the optimizer's step, the simulator lets the optimizer itself take it: equal but for rounding.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness.checks import assert_equal, assert_near
from harness.scenarios import SCENARIOS, WARMUP, simulate

ALL = """
    import gc
    from harness import scenarios
    found = {}
    for name in scenarios.SCENARIOS:
        found[name] = scenarios.train(name, rank)
        gc.collect()
    report(found)
"""


def test_the_definition_tells_predictions_apart() -> None:
    """By far more than rounding."""
    torch.set_num_threads(1)
    by_displacement = dataclasses.replace(SCENARIOS["momentum"], own=False)
    SCENARIOS["by displacement"] = by_displacement
    try:
        one, other = simulate("momentum", 2, "pipe"), simulate("by displacement", 2, "pipe")
    finally:
        del SCENARIOS["by displacement"]
    assert max(float((one[name] - other[name]).abs().max()) for name in one) > 1e-3


@pytest.mark.parametrize(
    ("algorithm", "executor"),
    [
        ("pipe", "shm"),
        ("sync", "tcp"),
        pytest.param("pipe", "tcp", marks=pytest.mark.slow),
        pytest.param("pipe", "gloo", marks=pytest.mark.slow),
        pytest.param("sync", "shm", marks=pytest.mark.slow),
    ],
)
def test_trajectories_equal_the_definition(dadt_run, algorithm, executor) -> None:
    torch.set_num_threads(1)
    run = dadt_run(ALL, "--algorithm", algorithm, "--executor", executor, "--warmup-steps", str(WARMUP))
    for name in SCENARIOS:
        assert_equal(run.ranks[0][name], run.ranks[1][name], f"{name}: replicas")
        same = assert_near if algorithm == "pipe" and SCENARIOS[name].own else assert_equal
        same(run.ranks[0][name], simulate(name, 2, algorithm), f"{name}: definition")
    steps = 24 * len(SCENARIOS)
    delayed = (24 - WARMUP) * len(SCENARIOS) if algorithm == "pipe" else 0
    assert f"{steps} steps, {delayed} of them delayed by one" in run.lines()[-1] or not delayed
