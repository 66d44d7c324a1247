"""A step over NCCL never makes the host wait for the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import pytest
from harness import ROOT, forkserver
from harness.patience import PATIENCE


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=env)


GPU = [
    pytest.param("cuda", "nccl", *each, marks=pytest.mark.gpu) for each in product(("sync", "pipe"), ("sgd", "adamw"))
]


@pytest.mark.parametrize(("device", "executor", "algorithm", "optimizer"), [*GPU, ("cpu", "shm", "pipe", "adamw")])
def test_a_step_waits_for_no_gpu(device: str, executor: str, algorithm: str, optimizer: str) -> None:
    """On the CPU, where nothing can be waited for, the script below is seen to work."""
    python = sys.executable if device == "cuda" else forkserver.python()
    command = [python, str(Path(__file__).with_name("steps.py")), device, executor, algorithm, optimizer]
    done = run(command)
    assert done.returncode == 0 and done.stdout.endswith("DONE\n"), done.stdout + done.stderr


TIMED = """
import sys, torch
from benchmarks import itself
itself.hook(algorithm="sync", executor="nccl", timeline=sys.argv[1], seeding="0")
model = torch.nn.Linear(1000, 1000).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(20):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 1000, device="cuda")).pow(2).mean()
    torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
    loss.backward()
    optimizer.step()
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_a_timeline_shows_when_the_gpu_averaged(tmp_path: Path) -> None:
    """The host is far ahead: its steps take less than the GPU's."""
    done = run([sys.executable, "-c", TIMED, str(tmp_path / "t.json")])
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    (track,) = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == "exchange on cuda:0"}
    averages = [e for e in events if e.get("cat") == "gpu"]
    assert {e["tid"] for e in averages} == {track}
    assert [e["name"] for e in averages] == [f"step {number}, bucket 0" for number in range(20)]
    steps = {e["args"]["step"]: e for e in events if e.get("cat") == "step"}
    behind = [average["ts"] - steps[number]["ts"] for number, average in enumerate(averages)]
    apart = [b["ts"] - a["ts"] for a, b in pairwise(averages[10:])]
    assert min(behind) > 0 and min(apart) > 20_000, (behind, apart)
    assert max(each["dur"] for each in averages[10:]) < 20_000
