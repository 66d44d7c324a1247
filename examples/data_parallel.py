"""Train on all GPUs that one process sees, by nn.DataParallel.

python examples/data_parallel.py                  one process, all its GPUs
dadt run -np 2 examples/data_parallel.py          two processes, a GPU each: the script need not be rewritten for DDP
"""

import argparse
import gzip
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def digits(folder, name):
    """Images (n, 784) and labels of a pair of IDX files (`train` or `t10k`)."""
    with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), dtype=np.uint8, offset=16).astype(np.float32)
    with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), dtype=np.uint8, offset=8).astype(np.int64)
    return TensorDataset(torch.from_numpy(pixels).view(-1, 784) / 255 - 0.1307, torch.from_numpy(labels))


def main():
    parser = argparse.ArgumentParser(description="Learn handwritten digits by nn.DataParallel.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "mnist")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="data_parallel.pt", help="where the trained weights go")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    try:
        train_data, test_data = digits(args.data, "train"), digits(args.data, "t10k")
    except OSError as error:
        sys.exit(f"no digits in {args.data} ({error}): give the folder of the IDX files with --data")
    train_loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=500)

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)).to(args.device)
    model = nn.DataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(1, args.epochs + 1):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(args.device)), y.to(args.device))
            loss.backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            right = sum((model(x.to(args.device)).argmax(1).cpu() == y).sum().item() for x, y in test_loader)
        print(f"epoch {epoch}  loss {loss.item():.3f}  accuracy {right / len(test_data):.3f}")

    torch.save(model.module.state_dict(), args.save)


if __name__ == "__main__":
    main()
