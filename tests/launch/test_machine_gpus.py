"""What a host's agent tells of its GPUs, by the driver's own tool."""

from __future__ import annotations

from pathlib import Path

import pytest

from dadt.control import machine

LISTED = """#!/bin/sh
echo 'GPU 0: NVIDIA H200 (UUID: GPU-11111111-2222-3333-4444-555555555555)'
echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-66666666-7777-8888-9999-000000000000)'
echo '  MIG 1g.10gb     Device  0: (UUID: MIG-11111111-2222-3333-4444-555555555555)'
echo 'GPU 2: NVIDIA H200 (UUID: GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee)'
"""


def test_models_and_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(LISTED)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    told = machine.report({})
    assert told["gpus"] == ["0", "1", "2"]
    assert told["gpu_models"] == ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]
    assert machine.report({"CUDA_VISIBLE_DEVICES": "2"})["gpus"] == ["2"]
