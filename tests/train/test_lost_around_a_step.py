"""Ranks end while the others wait for them outside of a step: where these add parameters or average buffers."""

from __future__ import annotations

import pytest
from harness.survivors import survivors

SCRIPT = """
import hashlib, os, re, signal, subprocess, sys, time, torch
from torch import nn
from torch.optim.swa_utils import update_bn
from dadt.inject import worker

rank = int(re.search("DADT_RANK=([0-9]+)", open("/proc/self/environ").read())[1])
where, lost = sys.argv[1], int(sys.argv[2])
step, around = 0, False

def wait(work, ordinary=worker.runtime.ranks.wait):
    if around and rank == (lost + 1) % 3:
        subprocess.run(["touch", "waiting"], check=True)  # what Python writes here stays apart
    ordinary(work)
worker.runtime.ranks.wait = wait

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(rank)
late = nn.Linear(4, 4)
for step in range(30):
    x = torch.randn(16, 8)
    if step == 15 and rank == lost:
        while not os.path.exists("waiting"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 15 and where == "statistics":
        around = True
        update_bn([x], model)
        around = False
    if step == 15 and where == "added":
        optimizer.add_param_group({"params": late.parameters()})
    around = step == 15 and where == "added"
    y = model(x)
    around = False
    if where == "added" and step >= 15:
        y = late(y)
    optimizer.zero_grad()
    y.pow(2).mean().backward()
    optimizer.step()
parts = [*model.state_dict().values(), *(late.state_dict().values() if where == "added" else ())]
print("ends with", hashlib.sha256(b"".join(t.numpy().tobytes() for t in parts)).hexdigest(), flush=True)
"""


@pytest.mark.parametrize(
    ("where", "algorithm", "lost"),
    [
        ("statistics", "sync", 2),
        ("added", "sync", 0),
        pytest.param("statistics", "pipe", 0, marks=pytest.mark.slow),
        pytest.param("added", "pipe", 2, marks=pytest.mark.slow),
    ],
)
def test_the_others_train_on(launch, where: str, algorithm: str, lost: int) -> None:
    options = ["-np", "3", "--min-np", "1", "--warmup-steps", "5", "--algorithm", algorithm]
    result = launch(SCRIPT, *options, "train.py", where, str(lost))
    assert result.code == 0, result.err
    ends = survivors(result)
    assert ends.keys() == {0, 1, 2} - {lost}
    assert len(set(ends.values())) == 1


LBFGS = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters())
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum() ** 2
    loss.backward()
    return loss
optimizer.step(closure)
"""


def test_an_optimizer_that_evaluates_by_itself_is_refused(launch) -> None:
    result = launch(LBFGS, "-np", "2", "--min-np", "1", "train.py")
    assert result.code == 2
    assert "--min-np 1: LBFGS evaluates its closure more than once in a step" in result.err
