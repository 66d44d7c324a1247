"""Measures how long a job takes to start in a Ray cluster, by `dadt run --launcher ray` and ray.train.TorchTrainer, in
turn.

    RAY_ADDRESS=head:6379 python -m benchmarks.ray_start -np 4 --rounds 5

Both run the same unmodified script; TorchTrainer's driver runs it in its loop. Counted are the seconds from the start
of the command to the last worker's first optimizer step, and to the command's end. All nodes have to see the folder for
temporary files: set TMPDIR=/shared if they have disks of their own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, time, torch
rank = os.environ.get("RANK") or os.environ["WORLD_RANK"]
model = torch.nn.Linear(100, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 100)).pow(2).mean().backward()
    optimizer.step()
    if step == 0:
        with open(f"{folder}/{rank}", "w") as file:
            file.write(str(time.time()))
"""
TRAINER = """
import runpy, sys
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

script, folder, workers = sys.argv[1:]


def loop():
    runpy.run_path(script)


TorchTrainer(
    loop,
    scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=False),
    run_config=RunConfig(storage_path=folder),
).fit()
"""


def seconds(command: list[str], folder: Path, workers: int) -> tuple[float, float]:
    """Return the seconds until the last worker has taken its first step, and until the end."""
    begin = time.time()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    end = time.time()
    if done.returncode:
        sys.exit(done.stdout.decode(errors="replace"))
    steps = [float((folder / str(rank)).read_text()) for rank in range(workers)]
    return max(steps) - begin, end - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-np", type=int, default=4, help="workers")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"dadt run": [], "TorchTrainer": []}
    with tempfile.TemporaryDirectory() as root:
        for number in range(args.rounds + 1):
            for name, times in found.items():
                folder = Path(root, f"{name.split()[0]}{number}")
                folder.mkdir()
                script, trainer = folder / "train.py", folder / "trainer.py"
                script.write_text(f"folder = {str(folder)!r}" + SCRIPT)
                trainer.write_text(TRAINER)
                workers = str(args.np)
                command = {
                    "dadt run": [
                        *(sys.executable, "-m", "dadt_cli", "run", "--launcher", "ray", "-np", workers),
                        *("--ray-resources", "GPU=0", "--algorithm", "sync", str(script)),
                    ],
                    "TorchTrainer": [sys.executable, str(trainer), str(script), str(folder), workers],
                }[name]
                took = seconds(command, folder, args.np)
                if number:  # the first round only loads files into the cache
                    times.append(took)
                    print(
                        f"round {number}: {name} {took[0]:.1f} s to the first step, {took[1]:.1f} s in all", flush=True
                    )
    for index, what in enumerate(("to the first step", "to the end")):
        ratios = sorted(a[index] / b[index] for a, b in zip(*found.values(), strict=True))
        print(f"{what}: {statistics.median(ratios):.2f} of TorchTrainer's time [{ratios[0]:.2f}, {ratios[-1]:.2f}]")


if __name__ == "__main__":
    main()
