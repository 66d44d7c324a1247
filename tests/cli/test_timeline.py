"""`dadt run --timeline FILE` and `dadt timeline FILE`, end to end."""

from __future__ import annotations

import json
import subprocess

import pytest
from harness import forkserver
from harness.trace import check_format

TRAIN = """\
import os, torch
model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
os.chdir("/")
for step in range(12):
    if step == {fail} and os.environ["RANK"] == "1": raise ValueError("enough")
    optimizer.zero_grad(); model(torch.randn(8, 20)).pow(2).mean().backward(); optimizer.step()
"""


@pytest.mark.parametrize("executor", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_job_leaves_one_file(launch, tmp_path, executor):
    result = launch(
        TRAIN.format(fail=-1), "-np", "2", "--executor", executor, "--bucket-mb", "0.001", "--timeline", "out/t.json",
        "--warmup-steps", "4", "train.py",
    )  # fmt: skip
    assert result.code == 0, result.err
    path = tmp_path / "out" / "t.json"
    assert f"timeline: {path}" in result.err
    assert [p.name for p in path.parent.iterdir()] == ["t.json"]
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    events = json.loads(path.read_text())["traceEvents"]
    check_format(events)
    stages = {"pack", "exchange", "wait"} if executor == "shm" else {"pack", "exchange", "unpack"}
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        assert [event["args"]["step"] for event in mine if event.get("cat") == "step"] == list(range(12))
        buckets = {e["name"] for e in mine if e.get("cat") == "allreduce"}
        assert {f"step {step}, bucket {bucket}" for step in range(12) for bucket in (0, 1)} <= buckets
        assert {event["name"] for event in mine if event.get("cat") == "stage"} == stages
        assert {event["cat"] for event in mine if event["ph"] == "b"} == {"queue"}
    done = subprocess.run([forkserver.dadt(), "timeline", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and "time per step" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_job_that_failed_leaves_what_each_rank_has_recorded(launch, tmp_path):
    result = launch(TRAIN.format(fail=6), "-np", "2", "--timeline", "t.json", "train.py")
    assert result.code == 1
    assert sorted(p.name for p in tmp_path.glob("t.json*")) == ["t.json.rank0", "t.json.rank1"]
    done = subprocess.run([forkserver.dadt(), "timeline", str(tmp_path / "t.json")], capture_output=True, text=True)
    assert done.returncode == 0 and "reading its 2 parts" in done.stdout, done.stderr


def test_a_place_that_cannot_be_is_refused_before_anything_starts(launch, tmp_path):
    result = launch(TRAIN.format(fail=-1), "-np", "2", "--timeline", "train.py", "train.py")
    assert result.code == 2 and not (tmp_path / "dadt-logs").exists()
    assert (
        result.err
        == f"dadt: --timeline {tmp_path / 'train.py'}: this file is no timeline; give another name, or remove it\n"
    )


@pytest.mark.parametrize("name", ["train.py", "missing.json"])
def test_a_wrong_file_is_one_sentence(tmp_path, name):
    (tmp_path / "train.py").write_text("import torch\n")
    done = subprocess.run([forkserver.dadt(), "timeline", name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"dadt: {name}: ") and done.stderr.count("\n") == 1
