"""Trajectories equal the algorithm's definition, simulated in one process; replicas are equal bit for bit."""

from __future__ import annotations

import pytest
import torch
from checks import assert_equal
from scenarios import SCENARIOS, WARMUP, simulate

ALL = """
    import gc, scenarios
    found = {}
    for name in scenarios.SCENARIOS:
        found[name] = scenarios.train(name, rank)
        gc.collect()
    report(found)
"""


@pytest.mark.parametrize(
    ("algorithm", "executor"),
    [
        ("pipe", "shm"),
        ("sync", "gloo"),
        pytest.param("pipe", "gloo", marks=pytest.mark.slow),
        pytest.param("sync", "shm", marks=pytest.mark.slow),
    ],
)
def test_trajectories_equal_the_definition(dadt_run, algorithm, executor) -> None:
    torch.set_num_threads(1)
    run = dadt_run(ALL, "--algorithm", algorithm, "--executor", executor, "--warmup-steps", str(WARMUP))
    for name in SCENARIOS:
        assert_equal(run.ranks[0][name], run.ranks[1][name], f"{name}: replicas")
        assert_equal(run.ranks[0][name], simulate(name, 2, algorithm), f"{name}: definition")
    steps = 24 * len(SCENARIOS)
    delayed = (24 - WARMUP) * len(SCENARIOS) if algorithm == "pipe" else 0
    assert f"{steps} steps, {delayed} of them delayed by one" in run.lines()[-1] or not delayed
