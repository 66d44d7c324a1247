"""The script that `dadt bench startup` runs: it trains one step, writes the time to a file and ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn


def main() -> None:
    model: nn.Module = nn.Linear(10, 10)
    if "--ddp" in sys.argv:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    with Path(sys.argv[1]).open("a") as f:
        f.write(f"{time.time()}\n")
    if "--ddp" in sys.argv:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
