"""Learn handwritten digits, in a script that was written for Horovod.

dadt run -np 2 examples/horovod_mnist.py                       as with Horovod
dadt run -np 2 --algorithm pipe examples/horovod_mnist.py      gradients come one step late
"""

import argparse
import gzip
import sys
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    """Images of 28x28 grey values and their labels, from a pair of IDX files (`train` or `t10k`)."""

    def __init__(self, folder: Path, name: str):
        with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as f:
            pixels = np.frombuffer(f.read(), dtype=np.uint8, offset=16)
        with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz") as f:
            labels = np.frombuffer(f.read(), dtype=np.uint8, offset=8)
        images = torch.from_numpy(pixels.reshape(-1, 1, 28, 28).astype(np.float32))
        self.images = (images / 255 - 0.1307) / 0.3081
        self.labels = torch.from_numpy(labels.astype(np.int64))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5)
        self.conv2 = nn.Conv2d(8, 16, 5)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(256, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(self.dropout(x))


def train(model, loader, optimizer):
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return hvd.allreduce(torch.tensor(total / len(loader)), name="loss").item()


def test(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum().item()
    return hvd.allreduce(torch.tensor(correct), name="correct", op=hvd.Sum).item() / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description="Learn handwritten digits.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "mnist")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--optimizer", choices=["adadelta", "sgd"], default="adadelta")
    parser.add_argument("--lr", type=float, help="default: 1.0 with adadelta, 0.05 with sgd")
    parser.add_argument("--gamma", type=float, default=0.7, help="the learning rate's factor per epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="mnist.pt", help="where the trained weights go")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())

    try:
        train_data, test_data = Digits(args.data, "train"), Digits(args.data, "t10k")
    except OSError as error:
        sys.exit(f"no digits in {args.data} ({error}): give the folder of the IDX files with --data")
    sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)
    own = range(hvd.rank(), len(test_data), hvd.size())  # unlike a sampler's share, none comes twice
    test_loader = DataLoader(test_data, batch_size=500, sampler=own)

    model = Net()
    if args.optimizer == "sgd":
        optimizer = optim.SGD(model.parameters(), lr=args.lr or 0.05, momentum=0.9)
    else:
        optimizer = optim.Adadelta(model.parameters(), lr=args.lr or 1.0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train(model, train_loader, optimizer)
        accuracy = test(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch}  loss {loss:.3f}  accuracy {accuracy:.3f}")
        scheduler.step()

    if hvd.rank() == 0:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
