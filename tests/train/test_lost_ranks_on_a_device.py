"""Ranks whose gradients are averaged on a device are lost, and the others go on.

The CPU stands for the GPU, and Gloo for NCCL: what fails in it stays as if under way until it is aborted, and ends as
if it were done, with anything in it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.survivors import KILL, OPTIONS, script, survivors

AS_NCCL = """
import threading, torch
from dadt.comm.executors import c10d, device
from dadt.comm.executors.meet import Apart


class Started:
    def __init__(self, executor, begin, flat):
        self.executor, self.flat, self.work = executor, flat, None
        try:
            self.work = begin()
        except RuntimeError:
            pass

    def wait(self):
        try:
            if self.work is not None:
                self.work.wait()
                return
        except RuntimeError:
            pass
        assert self.executor.aborted.wait(60)
        self.flat.view(torch.uint8).fill_(255)  # NaN, of floats


class AsNccl:
    def __init__(self, group):
        self.group, self.aborted = group, threading.Event()

    def start(self, flat):
        return Started(self, lambda: self.group.start(flat), flat)

    def alltoall(self, sent, received):
        return Started(self, lambda: self.group.alltoall(sent, received), received)

    def gather(self, mine, all):
        return Started(self, lambda: self.group.gather(mine, all), all)

    def abort(self):
        self.aborted.set()
        self.group.abort()

    def close(self):
        self.group.close()


def connect(config, world, meet):
    host = c10d.gloo(config, world, meet)
    group = c10d.join("gloo", Apart(meet, "device"), world, range(world.world_size), config)
    cpu = torch.device("cpu")
    mine = device.Device(AsNccl(group), host.engine, cpu, world.rank, world.world_size, survives=True)
    return device.beside(host, mine)
"""
USE = """
from dadt.config import extensions
extensions.EXECUTORS["gloo"] = "as_nccl:connect"
step = 0
"""
FAIL = """
    from dadt.inject import worker
    worker.runtime.device.abort(); worker.runtime.engine.abort("broken for the test")
"""


@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
@pytest.mark.parametrize(
    ("faults", "options", "fault", "left"),
    [
        ("1:5:forward", [], KILL, {0, 2}),
        ("0:30:exchange", [], KILL, {1, 2}),
        ("2:30:backward", ["--compression", "int8"], KILL, {0, 1}),
        ("1:30:backward,2:31:forward", [], KILL, {0}),
        ("1:30:exchange", [], FAIL, {0, 1, 2}),
    ],
    ids=["early", "first", "compressed", "one is left", "connection"],
)
def test_the_others_train_on(
    launch, tmp_path: Path, algorithm: str, faults: str, options: list[str], fault: str, left: set[int]
) -> None:
    (tmp_path / "as_nccl.py").write_text(AS_NCCL)
    text = script(fault).replace("\nstep = 0\n", USE)
    result = launch(text, *OPTIONS, "--executor", "gloo", "--algorithm", algorithm, *options, "train.py", faults)
    assert result.code == 0, result.err
    ends = survivors(result)
    assert ends.keys() == left
    assert len(set(ends.values())) == 1
    assert "nan" not in result.out.decode()
