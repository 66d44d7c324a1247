"""A job that keeps its links full, and what control frames and heartbeats wait there meanwhile."""

from __future__ import annotations

import pytest
from hosts.full_link import measure


@pytest.mark.slow
def test_control_goes_before_tensors(network_possible: None) -> None:
    found = measure(10, 20)
    assert not found["warnings"]
    for name in ("heartbeats between hosts", "control frames between hosts", "control frames from the launcher"):
        assert found["waits"][name]["99 %"] < found["waits"][f"{name} without priority"]["99 %"] / 2
