"""What a snapshot costs the training: python -m benchmarks.snapshots

Two workers train a perceptron of 25 million weights with Adam: 300 MB of weights and state. Steps with and without
snapshots are of the same job, so they differ in nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import json, sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2048, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4096))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
ends = []
for step in range(int(sys.argv[1])):
    x = torch.randn(32, 2048)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    ends.append(time.perf_counter())
print("ends", json.dumps(ends), flush=True)
"""
WARMUP = 60
"""Steps that do not count."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.snapshots", description="What a snapshot costs.")
    parser.add_argument("--every", type=int, default=40, help="steps between snapshots")
    parser.add_argument("--snapshots", type=int, default=10, help="how many")
    options = parser.parse_args()
    steps = WARMUP // options.every * options.every + options.every * (options.snapshots + 2)
    with tempfile.TemporaryDirectory(prefix="dadt-snapshots-") as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        command = [str(Path(sys.executable).with_name("dadt")), "run", "-np", "2", "--output", "rank0"]
        command += ["--snapshot-every", f"{options.every}steps", "train.py", str(steps)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if "ends [" in line)
    ends = json.loads(line.partition("ends ")[2])
    times = [after - before for before, after in itertools.pairwise(ends)]
    # The snapshot of step N is taken before step N + 1 ends, and written while the next ones run.
    parts = [times[start : start + options.every] for start in range(options.every - 1, steps - 1, options.every)]
    parts = [part for part in parts[WARMUP // options.every :] if len(part) == options.every]
    usual = statistics.median(time for part in parts for time in part[options.every // 2 :])
    costs = [sum(time - usual for time in part[: options.every // 2]) for part in parts]
    stalls = [part[0] - usual for part in parts]
    cost = statistics.median(costs)
    print(f"a step takes {usual * 1e3:.0f} ms; over {len(parts)} snapshots, the median of each:")
    print(f"a snapshot holds the training up for {statistics.median(stalls) * 1e3:.0f} ms in its step,")
    print(f"and for {cost * 1e3:.0f} ms with what its writing takes from the steps after it,")
    print(f"which is {cost / 600:.3%} of 10 min; it is 2 % where snapshots come every {cost / 0.02:.0f} s")


if __name__ == "__main__":
    main()
