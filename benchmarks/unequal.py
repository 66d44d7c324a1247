"""How much of all ranks' speed a job gets where they are not alike: `--batch speed` beside equal batches.

python -m benchmarks.unequal [--rounds 3]     two ranks, of which one is three times as slow
python -m benchmarks.unequal --changing       three ranks that exchange their speeds every 100 s, for ten minutes

Ranks compute asleep, a millisecond for each sample on the fastest one, as GPUs do that leave the processor free.
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
CHANGING = (0.001, 0.002, 0.003)
"""The same of three ranks, until each gets the speed of the next one."""
PERIOD = 100.0
"""Seconds between two such changes."""
CHANGING_PASSES = 135
"""Passes over the data of three ranks in ten minutes."""
BATCH, STEPS, PASSES = 64, 40, 4
KINDS = {
    "sync": ("--algorithm", "sync"),
    "sync --batch speed": ("--algorithm", "sync", "--batch", "speed"),
    "pipe": ("--warmup-steps", "30"),
    "pipe --batch speed": ("--warmup-steps", "30", "--batch", "speed"),
}


def train(rank: int, size: int, seconds: tuple[float, ...], passes: int, changes: bool) -> None:
    """Print the samples that this rank trains on in a second: in the last pass, or in all where speeds change."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(size * BATCH * STEPS, 16), torch.randint(0, 10, (size * BATCH * STEPS,)))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    start = begun = time.perf_counter()
    seen = 0
    for _ in range(passes):
        if not changes:
            begun, seen = time.perf_counter(), 0
        for x, y in loader:
            turn = int((time.perf_counter() - start) / PERIOD) if changes else 0
            time.sleep(len(x) * seconds[(rank + turn) % len(seconds)])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen += len(x)
    print("speed", json.dumps(seen / (time.perf_counter() - begun)), flush=True)


def speeds(ranks: int, *options: str, stands_for: int = 0, more: tuple[str, ...] = ()) -> float:
    """Return the samples that all ranks of a job train on in a second. stands_for: the rank whose speed one has.
    more: further arguments of the script."""
    command = [sys.executable, "-m", "dadt_cli", "run", "-np", str(ranks), *options]
    command += ["-m", "benchmarks.unequal", "--train", str(stands_for), *more]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800).stdout
    return sum(float(line.partition("speed ")[2]) for line in text.splitlines() if "speed " in line)


def compare_while_speeds_change() -> None:
    """Print what three ranks that exchange their speeds get of the sum of these."""
    three = sum(speeds(1, stands_for=rank, more=("--changing", "--passes", "2")) for rank in range(3))
    print("of the sum of three ranks' speeds alone, which they exchange:")
    for kind, passes in (("sync", CHANGING_PASSES // 12), ("sync --batch speed", CHANGING_PASSES)):
        found = speeds(3, *KINDS[kind], more=("--changing", "--passes", str(passes)))
        print(f"{kind:22} {found / three:.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", type=int, default=-1, help="be a rank of a job that has the speed of this one")
    parser.add_argument("--changing", action="store_true")
    parser.add_argument("--passes", type=int, default=PASSES)
    args = parser.parse_args()
    if args.train >= 0:
        rank, size = int(os.environ.get("DADT_RANK", "0")) or args.train, int(os.environ.get("DADT_WORLD_SIZE", "1"))
        train(rank, size, CHANGING if args.changing else SECONDS, args.passes, changes=args.changing and size > 1)
        return
    if args.changing:
        compare_while_speeds_change()
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
