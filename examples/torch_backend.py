"""torch.distributed over DADT: the script says itself what its processes send each other.

dadt run -np 2 examples/torch_backend.py                   two processes
torchrun --nproc-per-node 2 examples/torch_backend.py      two, by another launcher
"""

import argparse
import gzip
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dadt  # noqa: F401  makes the backend known; under `dadt run` it is


def digits(folder, name):
    """Images (n, 784) and labels of a pair of IDX files (`train` or `t10k`)."""
    with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), dtype=np.uint8, offset=16).astype(np.float32)
    with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), dtype=np.uint8, offset=8).astype(np.int64)
    return TensorDataset(torch.from_numpy(pixels).view(-1, 784) / 255 - 0.1307, torch.from_numpy(labels))


def test(model, data, device):
    """Accuracy. Each process judges every so-manieth image, and all add up what they found."""
    own = range(dist.get_rank(), len(data), dist.get_world_size())
    right = torch.zeros((), device=device)
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=500, sampler=own):
            right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
    dist.all_reduce(right)
    return right.item() / len(data)


def main():
    parser = argparse.ArgumentParser(description="Learn handwritten digits over torch.distributed's backend dadt.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "mnist")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    # torchrun and dadt set these; under plain python it is a world of one.
    for name, alone in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, alone)
    dist.init_process_group("dadt")
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)

    try:
        train_data, test_data = digits(args.data, "train"), digits(args.data, "t10k")
    except OSError as error:
        sys.exit(f"no digits in {args.data} ({error}): give the folder of the IDX files with --data")
    sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        accuracy = test(model, test_data, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  loss {loss.item():.3f}  accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
