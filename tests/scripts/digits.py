"""A CNN with BatchNorm on the digits, as a plain script: prints the mean test accuracy over seeds."""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from harness import light  # noqa: F401 (faster to start)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DATA = Path(__file__).parents[2] / "examples" / "data" / "mnist"


def read(name: str) -> TensorDataset:
    images = gzip.decompress((DATA / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((DATA / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
    x = torch.frombuffer(bytearray(images), dtype=torch.uint8).view(-1, 1, 28, 28).float() / 255
    return TensorDataset((x - 0.1307) / 0.3081, torch.frombuffer(bytearray(labels), dtype=torch.uint8).long())


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2, 2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(seed: int, lr: float, steps: int) -> float:
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loader = DataLoader(read("train"), batch_size=128, shuffle=True)
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            done += 1
            if done == steps:
                break
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in DataLoader(read("t10k"), batch_size=500):
            right += int((model(x).argmax(1) == y).sum())
    return right / 2000


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    accuracies = [train(seed, arguments.lr, arguments.steps) for seed in range(arguments.seeds)]
    print(f"accuracy {sum(accuracies) / len(accuracies):.4f}  {accuracies}")
