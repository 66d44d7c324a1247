"""Two networks with an optimizer each: one draws digits, the other tells them from real ones.

python examples/gan.py                  one process
dadt run -np 2 examples/gan.py          two, with the same script
"""

import argparse
import gzip
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

NOISE = 64


class Generator(nn.Module):
    """Noise (batch, 64) to images (batch, 1, 28, 28) between -1 and 1."""

    def __init__(self, width):
        super().__init__()
        self.start = nn.Linear(NOISE, 2 * width * 49)
        self.layers = nn.Sequential(
            nn.Unflatten(1, (2 * width, 7, 7)),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.layers(self.start(noise))


def discriminator(width):
    """Images to a number that is positive for real ones."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(2 * width * 49, 1),
    )


def distance(one, other):
    """The Fréchet distance of two sets of images, seen at 7x7: between Gaussians of their means and covariances."""
    one, other = (F.avg_pool2d(images, 4).flatten(1).double() for images in (one, other))
    a, b = torch.cov(one.T), torch.cov(other.T)
    cross = torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt().sum()
    return ((one.mean(0) - other.mean(0)).square().sum() + a.trace() + b.trace() - 2 * cross).item()


@torch.no_grad()
def draw(generator, count, device):
    generator.eval()
    images = generator(torch.randn(count, NOISE, device=device)).cpu()
    generator.train()
    return images


def digits(folder, name):
    with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), dtype=np.uint8, offset=16)
    return torch.from_numpy(pixels.astype(np.float32)).view(-1, 1, 28, 28) / 127.5 - 1


def show(images, path):
    """64 images, in eight rows, as a picture without colours."""
    rows = images[:64].view(8, 8, 28, 28).transpose(1, 2).reshape(8 * 28, 8 * 28)
    path.write_bytes(b"P5 224 224 255\n" + ((rows + 1) * 127.5).byte().numpy().tobytes())


def main():
    parser = argparse.ArgumentParser(description="Learn to draw handwritten digits.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "mnist")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=32, help="channels of the finest layer")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, default="gan.pgm", help="where a picture of what it draws goes")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    try:
        train_data, test_data = digits(args.data, "train"), digits(args.data, "t10k")
    except OSError as error:
        sys.exit(f"no digits in {args.data} ({error}): give the folder of the IDX files with --data")
    loader = DataLoader(TensorDataset(train_data), batch_size=args.batch_size, shuffle=True, drop_last=True)

    generator, judge = Generator(args.width).to(args.device), discriminator(args.width).to(args.device)
    draws = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    judges = torch.optim.Adam(judge.parameters(), lr=args.lr, betas=(0.5, 0.999))
    before = distance(draw(generator, 1000, args.device), test_data)

    for epoch in range(1, args.epochs + 1):
        for (real,) in loader:
            real = real.to(args.device)
            fake = generator(torch.randn(len(real), NOISE, device=args.device))

            judges.zero_grad()
            loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
            loss.backward()
            judges.step()

            draws.zero_grad()
            F.softplus(-judge(fake)).mean().backward()
            draws.step()
        drawn = draw(generator, 1000, args.device)
        print(f"epoch {epoch}  loss {loss.item():.3f}  distance {distance(drawn, test_data):.2f}")

    if os.environ.get("RANK", "0") == "0":  # a picture is not torch.save: each worker would write it
        show(drawn, args.picture)
    real = distance(train_data[:1000], test_data)
    print(f"distance to real digits: {before:.2f} before, {distance(drawn, test_data):.2f} now, {real:.2f} among them")


if __name__ == "__main__":
    main()
