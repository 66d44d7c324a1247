"""How much of both ranks' speed a job gets where one is three times as slow: `--batch speed` beside equal batches.

python -m benchmarks.unequal [--rounds 3]

Ranks compute asleep, a millisecond for each sample on the fast one, as GPUs do that leave the processor free.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = (0.001, 0.003)
"""Seconds that a sample takes on each rank."""
BATCH, STEPS, PASSES = 64, 40, 4
KINDS = {
    "sync": ("--algorithm", "sync"),
    "sync --batch speed": ("--algorithm", "sync", "--batch", "speed"),
    "pipe": ("--warmup-steps", "30"),
    "pipe --batch speed": ("--warmup-steps", "30", "--batch", "speed"),
}


def train(rank: int, size: int) -> None:
    """Print the samples that this rank trains on in a second, in the last pass."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(size * BATCH * STEPS, 16), torch.randint(0, 10, (size * BATCH * STEPS,)))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(PASSES):
        begun, seen = time.perf_counter(), 0
        for x, y in loader:
            time.sleep(len(x) * SECONDS[rank])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen += len(x)
        speed = seen / (time.perf_counter() - begun)
    print("speed", json.dumps(speed), flush=True)


def speeds(ranks: int, *options: str, stands_for: int = 0) -> float:
    """Return the samples that all ranks of a job train on in a second. stands_for: the rank whose speed one has."""
    command = [sys.executable, "-m", "dadt_cli", "run", "-np", str(ranks), *options]
    command += ["-m", "benchmarks.unequal", "--train", str(stands_for)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    return sum(float(line.partition("speed ")[2]) for line in text.splitlines() if "speed " in line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", type=int, default=-1)
    args = parser.parse_args()
    if args.train >= 0:
        train(int(os.environ.get("DADT_RANK", "0")) or args.train, int(os.environ.get("DADT_WORLD_SIZE", "1")))
        return
    parts: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(args.rounds):
        both = speeds(1) + speeds(1, stands_for=1)
        for kind, options in KINDS.items():
            parts[kind].append(speeds(2, *options) / both)
    print(f"of the sum of both ranks' speeds alone, median of {args.rounds} rounds (least to most):")
    for kind, found in parts.items():
        print(f"{kind:22} {statistics.median(found):.0%} ({min(found):.0%} to {max(found):.0%})")


if __name__ == "__main__":
    main()
