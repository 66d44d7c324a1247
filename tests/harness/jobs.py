"""The job that strangers meet: it trains, waits in the middle until they have done all they can, and goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil

from harness.journal import whole_lines

TRAIN = """
import hashlib, os, pathlib, time, torch
{}
model = torch.nn.Linear(100, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(60):
    optimizer.zero_grad(); model(torch.randn(8, 100)).pow(2).mean().backward(); optimizer.step()
    if step == 30:
        pathlib.Path("half" + os.environ["RANK"]).write_text(str(os.getpid()))
        while not pathlib.Path("attacked").exists():
            time.sleep(0.01)
print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""
SEED = ("--seed", "7")


def weights(out: str) -> set[str]:
    """What the ranks ended with: one, where they are replicas."""
    return set(re.findall(r"weights (\w{64})", out))


def journal(folder: Path) -> list[dict[str, Any]]:
    """What happened in the one job whose logs are there."""
    (path,) = folder.glob("dadt-logs/*/events.jsonl")
    return whole_lines(path)


def refusals(folder: Path) -> list[str]:
    return [line["why"] for line in journal(folder) if line["kind"] == "refused"]


def held(pids: list[int]) -> list[tuple[int, int]]:
    """Descriptors and resident bytes of each."""
    return [(process.num_fds(), process.memory_info().rss) for process in map(psutil.Process, pids)]


def assert_flat(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
    """Neither has a stranger's connections, nor memory for what it announced."""
    for (files, memory), (files_now, memory_now) in zip(before, after, strict=True):
        assert files_now <= files + 3, f"{files} descriptors became {files_now}"
        assert memory_now <= memory + (32 << 20), f"{memory >> 20} MiB became {memory_now >> 20}"
