"""Train on CIFAR-10 by DistributedDataParallel, in a script as torchrun starts it.

torchrun --nproc-per-node 2 examples/ddp_cifar.py --data cifar-10-batches-py      DDP averages
dadt run -np 2 examples/ddp_cifar.py --data cifar-10-batches-py                   DADT does, in the same script
dadt run -np 2 examples/ddp_cifar.py --epochs 2                                   with patterns in place of images
"""

import argparse
import os
import pickle
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


def cifar(folder, names):
    """Images (n, 3, 32, 32) around 0 and their labels, of files of the version for Python."""
    x, y = [], []
    for name in names:
        with (folder / name).open("rb") as file:
            batch = pickle.load(file, encoding="latin1")
        x.append(batch["data"])
        y += batch["labels"]
    images = torch.from_numpy(np.concatenate(x)).view(-1, 3, 32, 32)
    return TensorDataset((images / 255 - 0.473) / 0.251, torch.tensor(y))


def synthetic(count, seed):
    """Much noise on a pattern for each of ten classes."""
    generator = torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.randn(10, 3, 4, 4, generator=generator), size=(32, 32))
    labels = torch.arange(count) % 10
    generator.manual_seed(seed)
    return TensorDataset(patterns[labels] + 8 * torch.randn(count, 3, 32, 32, generator=generator), labels)


def network(width):
    def block(channels, out):
        return [nn.Conv2d(channels, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(3, width), *block(width, 2 * width), *block(2 * width, 4 * width)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * width, 10))


def main():
    parser = argparse.ArgumentParser(description="Train on CIFAR-10 by DistributedDataParallel.")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10's files for Python; default: patterns and noise")
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", default="ddp_cifar.pt", help="where the trained weights go")
    args = parser.parse_args()

    # torchrun and dadt set these; under plain python it is a world of one.
    for name, alone in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, alone)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank = dist.get_rank()
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)

    if args.data:
        try:
            train_data = cifar(args.data, [f"data_batch_{number}" for number in range(1, 6)])
            test_data = cifar(args.data, ["test_batch"])
        except OSError as error:
            sys.exit(f"no CIFAR-10 in {args.data} ({error}): give the folder cifar-10-batches-py with --data")
    else:
        train_data, test_data = synthetic(2000, seed=1), synthetic(500, seed=2)
    sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(test_data, batch_size=256)

    model = DistributedDataParallel(network(args.width).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        scheduler.step()

        model.eval()
        with torch.no_grad():
            right = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in test_loader)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.3f}  accuracy {right / len(test_data):.3f}")

    if rank == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
