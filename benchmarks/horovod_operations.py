"""Compares operations of Horovod's API in DADT and in Horovod itself: python -m benchmarks.horovod_operations --horovod
BIN

The same script runs by `dadt run` and by Horovod's own launcher, with two workers on this host, in turn. BIN is the
`bin` folder of a Python environment that has Horovod 0.28, built with Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.page import table

SCRIPT = """
import json, sys, time, torch
import horovod.torch as hvd
hvd.init()
torch.set_num_threads(1)
found = {}

def timed(call, times):
    for _ in range(3): call()
    took = []
    for _ in range(times):
        hvd.barrier() if hasattr(hvd, "barrier") else None
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return sorted(took)[len(took) // 2]

for size in (1 << 10, 1 << 16, 1 << 20, 10 << 20, 100 << 20):
    tensor = torch.ones(size // 4)
    times = 200 if size < 1 << 20 else 20 if size < 100 << 20 else 7
    found[f"allreduce {size}"] = timed(lambda: hvd.allreduce_(tensor, name="t", op=hvd.Sum), times)
    if size <= 10 << 20:
        found[f"allgather {size}"] = timed(lambda: hvd.allgather(tensor, name="t"), times)
        found[f"broadcast {size}"] = timed(lambda: hvd.broadcast_(tensor, 0, name="t"), times)

layers = []
for _ in range(40):
    layers += [torch.nn.Linear(256, 256), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
hvd.broadcast_parameters(model.state_dict(), 0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
x = torch.randn(64, 256)

def step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

for _ in range(20): step()
found["step of 80 tensors, 10 MB"] = timed(step, 60)
if hvd.rank() == 0:
    print("found", json.dumps(found), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.horovod_operations", description="Beside Horovod itself.")
    parser.add_argument("--horovod", required=True, type=Path, metavar="BIN")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found: dict[str, dict[str, list[float]]] = {"dadt": defaultdict(list), "horovod": defaultdict(list)}
    with tempfile.TemporaryDirectory(prefix="dadt-beside-horovod-") as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        own = [str(Path(sys.executable).with_name("dadt")), "run", "-np", "2", "train.py"]
        bin = options.horovod.resolve()
        theirs = [str(bin / "horovodrun"), "-np", "2", "--gloo", str(bin / "python"), "train.py"]
        paths = {"dadt": environment["PATH"], "horovod": f"{bin}:{environment['PATH']}"}
        for number in range(options.rounds):
            for name, command in (("dadt", own), ("horovod", theirs)):
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, env={**environment, "PATH": paths[name]}
                )
                line = next((text for text in done.stdout.splitlines() if "found {" in text), "")
                if not line:
                    sys.exit(f"{name}: {done.stdout}{done.stderr}")
                for what, seconds in json.loads(line.partition("found ")[2]).items():
                    found[name][what].append(seconds)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    lines = []
    for what, mine in found["dadt"].items():
        other = found["horovod"][what]
        ratios = sorted(b / a for a, b in zip(mine, other, strict=True))
        medians = [statistics.median(values) * 1e3 for values in (mine, other)]
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        lines.append([what, *(f"{each:.3f}" for each in medians), f"{statistics.median(ratios):.2f}", spread])
    print(table(["", "DADT (ms)", "Horovod (ms)", "Horovod / DADT", "of each round"], lines))


if __name__ == "__main__":
    main()
