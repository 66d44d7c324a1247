"""Ranks are weighed by what their losses are means over: `sync` then equals one process on the joint batch."""

from __future__ import annotations

import pytest
import torch
from harness.checks import assert_equal, assert_near
from harness.counted_losses import AS_BEFORE, EXACT

ALL = """
    import gc
    from harness import counted_losses
    found = {}
    for name, train in {**counted_losses.EXACT, **counted_losses.AS_BEFORE}.items():
        found[name] = train()
        gc.collect()
    report(found)
"""
WEIGHED = "that count in a rank's loss are not in proportion to its samples"


@pytest.fixture(scope="module")
def by_samples(shared_run):
    return shared_run(ALL, "--algorithm", "sync", "--batch", "global", "--weigh", "samples")


@pytest.mark.parametrize("executor", ["shm", pytest.param("tcp", marks=pytest.mark.slow), "gloo"])
def test_sync_equals_one_process(dadt_run, by_samples, executor) -> None:
    torch.set_num_threads(1)
    run = dadt_run(ALL, "--algorithm", "sync", "--batch", "global", "--executor", executor)
    for name, train in EXACT.items():
        assert_equal(run.ranks[0][name], run.ranks[1][name], f"{name}: replicas")
        assert_near(run.ranks[0][name], train(), f"{name}: one process")
    for name in AS_BEFORE:
        assert_equal(run.ranks[0][name], run.ranks[1][name], f"{name}: replicas")
        if executor == "shm":
            assert_equal(run.ranks[0][name], by_samples.ranks[0][name], f"{name}: by samples")
    lines = run.lines()
    assert any(WEIGHED in line for line in lines), run.output
    assert any("is not one mean of cross_entropy" in line and "weighed by samples" in line for line in lines)


def test_by_samples_differs(by_samples) -> None:
    """By far more than rounding, or the comparison would show nothing."""
    torch.set_num_threads(1)
    for name, train in EXACT.items():
        one, ranks = train(), by_samples.ranks[0][name]
        assert max(float((one[key] - ranks[key]).abs().max()) for key in one) > 1e-3, name
    assert not any("--weigh" in line for line in by_samples.lines())
