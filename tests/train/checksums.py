"""Prints a checksum of weights, buffers and optimizer state for each of 20 small jobs.

A change that must not alter results shows the same lines before and after it: python tests/train/checksums.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import hashlib, os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
name = sys.argv[1]
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 12), torch.randint(0, 4, (256,)))
model = nn.Sequential(nn.Linear(12, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 64), nn.ReLU(),
                      nn.Linear(64, 4))
make = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "clipped": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "scaled": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}
optimizer = make[name](model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5, enabled=name == "scaled")
for epoch in range(4):
    model.train()
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if name == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss
        if name == "lbfgs":
            optimizer.step(closure)
        else:
            closure()
            scaler.step(optimizer)
            scaler.update()
    model.eval()
digest = hashlib.sha256()
states = [model.state_dict(), *optimizer.state_dict()["state"].values()]
for value in (value for state in states for _, value in sorted(state.items(), key=str)):
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().contiguous().numpy().tobytes())
print("checksum", digest.hexdigest()[:16])
"""
FLAGS = ["--seed", "7", "--warmup-steps", "5", "--output", "all"]
JOBS = [
    ("sgd", 2, "--algorithm pipe --executor shm"),
    ("momentum", 4, "--algorithm pipe --executor shm"),
    ("nesterov", 2, "--algorithm pipe --executor gloo"),
    ("adam", 4, "--algorithm pipe --executor gloo --compression powersgd:2"),
    ("adamw", 2, "--algorithm pipe --executor shm --compression int8"),
    ("rmsprop", 2, "--algorithm pipe --executor shm --compression fp16"),
    ("lbfgs", 2, "--algorithm pipe --executor shm"),
    ("clipped", 4, "--algorithm pipe --executor shm --bucket-mb 0.01"),
    ("scaled", 2, "--algorithm pipe --executor gloo --bucket-mb 0.01"),
    ("momentum", 2, "--algorithm pipe --executor shm --predict 1.5"),
    ("adam", 2, "--algorithm sync --executor shm"),
    ("momentum", 4, "--algorithm sync --executor gloo --compression bf16"),
    ("clipped", 2, "--algorithm sync --executor shm --bucket-mb 0.01"),
    ("scaled", 4, "--algorithm sync --executor shm --compression powersgd:2"),
    ("sgd", 2, "--algorithm local --executor shm --sync-every 4 --overlap-steps 2"),
    ("adamw", 4, "--algorithm local --executor gloo --sync-every 4 --overlap-steps 2 --fragments 2 --compression int8"),
    (
        "momentum",
        2,
        "--algorithm local --executor shm --sync-every 4 --overlap-steps 2 --outer-momentum 0.9 --outer-lr 0.7",
    ),
    ("momentum", 2, "--algorithm pipe --executor mpi --launcher mpi"),
    ("adam", 4, "--algorithm sync --executor mpi --launcher mpi --compression int8"),
    ("momentum", 4, "--algorithm pipe --executor hierarchical:gloo --simulate-hosts 2"),
]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        for name, ranks, flags in JOBS:
            command = [
                sys.executable,
                "-m",
                "dadt_cli",
                "run",
                "-np",
                str(ranks),
                *FLAGS,
                *flags.split(),
                "train.py",
                name,
            ]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            found = re.findall(r"checksum (\w+)", done.stdout)
            assert done.returncode == 0 and len(found) == ranks, done.stderr
            print(f"{name:9} {ranks} ranks {flags:80} {' '.join(sorted(set(found)))}", flush=True)


if __name__ == "__main__":
    main()
