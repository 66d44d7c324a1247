"""Every verb x dtype x odd shape with tensors of a GPU, against NumPy."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.conformance import check, outputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("executor", "size"), [("nccl", 1), ("shm", 2), ("gloo", 2)])
def test_executor_agrees_with_numpy(executor: str, size: int, tmp_path: Path) -> None:
    """NCCL takes one rank for each GPU; the others stage through pinned memory, two ranks on one GPU."""
    check(outputs(executor, size, tmp_path, "cuda"))
