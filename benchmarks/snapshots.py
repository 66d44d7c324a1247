"""Measures what a snapshot costs the training: python -m benchmarks.snapshots

Two workers train a perceptron of 25 million weights with Adam: 300 MB of weights and state. Steps with and without
snapshots are of the same job, so they differ in nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
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
spent = []
try:
    from dadt.inject.replay import taken
except ImportError:
    taken = None
def timed(kind, name):
    original = getattr(kind, name)
    def call(*args, **kwargs):
        begun = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent.append((name, time.perf_counter() - begun))
    setattr(kind, name, call)
if taken is not None:
    timed(taken.Taken, "observe")
    timed(taken.SeenSnapshot, "complete")
ends = []
for step in range(int(sys.argv[1])):
    x = torch.randn(32, 2048)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    ends.append(time.perf_counter())
print("spent", json.dumps(spent), flush=True)
print("ends", json.dumps(ends), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.snapshots", description="What a snapshot costs.")
    parser.add_argument("--every", type=int, default=120, help="steps between snapshots")
    parser.add_argument("--snapshots", type=int, default=6, help="how many")
    parser.add_argument("--warmup", type=int, default=60, help="steps that do not count")
    options = parser.parse_args()
    steps = options.warmup // options.every * options.every + options.every * (options.snapshots + 2)
    with tempfile.TemporaryDirectory(prefix="dadt-snapshots-") as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        command = [str(Path(sys.executable).with_name("dadt")), "run", "-np", "2", "--output", "rank0"]
        command += ["--warmup-steps", str(min(options.warmup, 50))]
        command += ["--snapshot-every", f"{options.every}steps", "train.py", str(steps)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(ends|spent) (\[.*\])", done.stdout))
    ends, spent = json.loads(found["ends"]), json.loads(found["spent"])
    times = [after - before for before, after in itertools.pairwise(ends)]
    # A snapshot is begun after step N, completed when step N + 1 begins, and written during the following steps.
    parts = [times[start : start + options.every] for start in range(options.every - 2, steps - 2, options.every)]
    parts = [part for part in parts[options.warmup // options.every :] if len(part) == options.every]
    usual = statistics.median(time for part in parts for time in part[options.every // 2 :])
    cost = statistics.median(sum(time - usual for time in part[: options.every // 2]) for part in parts)
    seen, complete = (
        statistics.median([seconds for name, seconds in spent if name == which][-len(parts) :])
        for which in ("observe", "complete")
    )
    thread = seen + complete
    print(f"a step takes {usual * 1e3:.0f} ms; over {len(parts)} snapshots, the median of each:")
    print(f"the training thread spends {seen * 1e3:.0f} ms behind the step and {complete * 1e3:.0f} ms before the next")
    print(f"(with what it waits for there in any case), which is {thread / 60:.3%} of the time at one a minute;")
    print(f"with what copying and writing take from the steps beside them, {cost * 1e3:.0f} ms, {cost / 60:.3%}")


if __name__ == "__main__":
    main()
