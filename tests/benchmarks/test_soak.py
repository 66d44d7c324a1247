"""Two minutes of what `make soak` does for longer."""

from __future__ import annotations

import pytest

from benchmarks.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("executor", ["shm", "gloo"])
def test_nothing_grows_while_workers_are_lost(executor):
    found = soak(20_000, 60.0, ["--executor", executor])
    assert not found.faults
    assert found.losses
