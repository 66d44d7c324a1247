"""Ranks whose gradients are averaged on a device are lost, and the others go on.

The CPU stands for the GPU, and Gloo for NCCL: what fails raises nothing where it is begun, and leaves anything.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from harness import as_nccl
from harness.patience import PATIENCE
from harness.survivors import OPTIONS, script, survivors
from torch.distributed import HashStore

from dadt import _core
from dadt.comm.executors import c10d
from dadt.comm.executors.device import Device
from dadt.errors import PeerLost

USE = """
from dadt.config import extensions
extensions.EXECUTORS["gloo"] = "as_nccl:connect"
step = 0
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("faults", "options", "left"),
    [
        ("1:5:forward", [], {0, 2}),
        ("0:30:exchange", [], {1, 2}),
        ("2:30:backward", ["--compression", "int8"], {0, 1}),
        ("1:30:backward,2:31:forward", [], {0}),
    ],
    ids=["early", "first", "compressed", "one is left"],
)
def test_the_others_train_on(
    launch, tmp_path: Path, algorithm: str, faults: str, options: list[str], left: set[int]
) -> None:
    shutil.copy(as_nccl.__file__, tmp_path)
    text = script().replace("\nstep = 0\n", USE)
    result = launch(text, *OPTIONS, "--executor", "gloo", "--algorithm", algorithm, *options, "train.py", faults)
    assert result.code == 0, result.err
    ends = survivors(result)
    assert ends.keys() == left
    assert len(set(ends.values())) == 1
    assert "nan" not in result.out.decode()


def test_what_was_aborted_is_no_average() -> None:
    """The device has come to its end, and all ranks have told each other that they are there."""
    engine = _core.Engine(_core.NullExecutor(0, 1), 0, 1, 60.0)
    group = c10d.C10d("gloo", c10d.gloo_group(HashStore(), "127.0.0.1", 0, 1, 60.0), 0, 1)
    device = Device(as_nccl.AsNccl(group), engine, torch.device("cpu"), 0, 1, survives=True)
    flat = torch.zeros(4)
    whole = device.average([torch.ones(4)], [flat], flat, name="step 0", weight=1.0, lane=b"")
    whole.wait(PATIENCE)
    assert flat.tolist() == [1.0] * 4
    given_up = device.average([torch.ones(4)], [flat], flat, name="step 1", weight=1.0, lane=b"")
    device.abort()
    with pytest.raises(PeerLost, match="step 1: the average on cpu was given up"):
        given_up.wait(PATIENCE)
    engine.close(5.0)
    device.close(failed=True)
