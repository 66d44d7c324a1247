"""The script that `dadt bench step` runs: trains on random images when it is told to, and says how long steps took.

Plain PyTorch: whether it trains data-parallel is decided by how it is started.
"""

from __future__ import annotations

import argparse
import os
from multiprocessing.connection import Client
from time import perf_counter

import torch
from torch import nn

from dadt.benchmarks.model import MODELS
from dadt.inject import worker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--name", required=True)
    arguments = parser.parse_args()
    make, side = MODELS[arguments.model]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    own_data = torch.Generator().manual_seed(os.getpid())  # another on each rank
    images = torch.randn(arguments.batch_size, 3, side, side, generator=own_data)
    labels = torch.randint(0, 1000, (arguments.batch_size,), generator=own_data)

    def step() -> float:
        begun = perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return perf_counter() - begun

    with Client(arguments.connect, "AF_UNIX") as line:
        line.send(arguments.name)
        while (steps := line.recv()) > 0:
            before = own_seconds()
            times = [step() for _ in range(steps)]
            line.send((times, own_seconds() - before))


def own_seconds() -> float:
    """What DADT's hooks around steps have taken so far, waiting included; nothing under plain python."""
    return worker.runtime.seconds if worker.runtime is not None else 0.0


if __name__ == "__main__":
    main()
