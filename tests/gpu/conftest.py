"""What follows needs a CUDA device that torch sees; it is skipped, and says so, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dadt.control.machine import free_ports

MISSING = "no CUDA device: torch.cuda.is_available() is false"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    for item in items:
        if not item.get_closest_marker("gpu") or not str(item.path).startswith(here):
            continue
        needed = item.get_closest_marker("gpu").kwargs.get("devices", 1)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=MISSING), append=False)
        elif torch.cuda.device_count() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices: there is 1"), append=False)


@pytest.fixture
def unused_port() -> int:
    return free_ports(1)[0]
