"""Train a ResNet on folders of images: DATA/train/<class>/*.jpg and DATA/val/<class>/*.jpg, as ImageNet is unpacked.

python examples/imagenet.py /data/imagenet --amp                          one process
dadt run -np 4 examples/imagenet.py /data/imagenet --amp                  four, with the same script
dadt run -np 4 examples/imagenet.py /data/imagenet --amp --resume         again, from the last checkpoint
dadt run -np 2 examples/imagenet.py --synthetic --size 32 --epochs 2      without any images
"""

import argparse
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

MEAN, DEVIATION = (torch.tensor(values).view(3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))


class Folder(Dataset):
    """Images in a folder for each class. For training a random part of each, sometimes mirrored; else its middle."""

    def __init__(self, path, size, train):
        self.classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        self.images = [(file, y) for y, name in enumerate(self.classes) for file in sorted((path / name).iterdir())]
        self.size, self.train = size, train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        from PIL import Image

        file, y = self.images[index]
        image = Image.open(file).convert("RGB")
        side = int(min(image.size) * (random.uniform(0.5, 1.0) if self.train else 0.875))
        left, top = image.width - side, image.height - side
        left, top = (random.randint(0, left), random.randint(0, top)) if self.train else (left // 2, top // 2)
        part = image.resize((self.size, self.size), Image.BILINEAR, (left, top, left + side, top + side))
        x = torch.from_numpy(np.array(part)).permute(2, 0, 1) / 255
        if self.train and random.random() < 0.5:
            x = x.flip(2)
        return (x - MEAN) / DEVIATION, y


class Synthetic(Dataset):
    """Much noise on a pattern for each of ten classes: whether a network learns and what it costs, without images."""

    def __init__(self, size, train):
        self.classes = range(10)
        self.count, self.first = (512, 0) if train else (128, 512)
        coarse = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self.patterns = F.interpolate(coarse, size=(size, size))

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.randn(self.patterns.shape[1:], generator=torch.Generator().manual_seed(self.first + index))
        return self.patterns[index % 10] + 4 * noise, index % 10


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet(classes, depth, width):
    """depth: blocks in each of four stages. ResNet-18 has 2, 2, 2, 2 and width 64, ResNet-34 3, 4, 6, 3."""
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, blocks in enumerate(depth):
        for index in range(blocks):
            out = width * 2**stage
            layers.append(Block(channels, out, 2 if stage > 0 and index == 0 else 1))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@torch.no_grad()
def test(model, loader, device, amp):
    model.eval()
    right = 0
    for x, y in loader:
        with amp:
            right += (model(x.to(device)).argmax(1).cpu() == y).sum().item()
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description="Train a ResNet on folders of images.")
    parser.add_argument("data", type=Path, nargs="?", help="has the folders train and val")
    parser.add_argument("--synthetic", action="store_true", help="patterns and noise in place of images")
    parser.add_argument("--size", type=int, default=224, help="height and width of an image, in pixels")
    parser.add_argument("--depth", type=int, nargs=4, default=[2, 2, 2, 2], help="blocks in each stage of the ResNet")
    parser.add_argument("--width", type=int, default=64, help="channels of its first stage")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")
    parser.add_argument("--amp", action="store_true", help="mixed precision")
    parser.add_argument("--checkpoint", type=Path, default="imagenet.pt")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not args.synthetic and not (args.data and (args.data / "train").is_dir()):
        sys.exit(f"no images: {args.data} has no folder train; give one that has, or --synthetic")

    torch.manual_seed(args.seed)
    if args.synthetic:
        train_data, test_data = (Synthetic(args.size, train) for train in (True, False))
    else:
        train_data, test_data = (Folder(args.data / part, args.size, part == "train") for part in ("train", "val"))
    settings = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": args.device == "cuda"}
    train_loader = DataLoader(train_data, shuffle=True, drop_last=True, **settings)
    test_loader = DataLoader(test_data, **settings)

    model = resnet(len(train_data.classes), args.depth, args.width).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = OneCycleLR(optimizer, args.lr, epochs=args.epochs, steps_per_epoch=len(train_loader))
    # float16 needs its losses scaled, so that small gradients do not vanish; bfloat16, which CPUs have, does not.
    half = torch.float16 if args.device == "cuda" else torch.bfloat16
    amp = torch.autocast(args.device, half, enabled=args.amp)
    scaler = torch.amp.GradScaler(args.device, enabled=args.amp and half == torch.float16)

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    begin = 1
    if args.resume and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=args.device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        begin = saved["epoch"] + 1
        print(f"goes on from {args.checkpoint}, after epoch {saved['epoch']}")

    for epoch in range(begin, args.epochs + 1):
        model.train()
        start = time.perf_counter()
        for x, y in train_loader:
            optimizer.zero_grad()
            with amp:
                loss = F.cross_entropy(model(x.to(args.device)), y.to(args.device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        speed = len(train_loader) * args.batch_size / (time.perf_counter() - start)
        accuracy = test(model, test_loader, args.device, amp)
        print(f"epoch {epoch}  loss {loss.item():.3f}  accuracy {accuracy:.3f}  {speed:.0f} images/s", flush=True)
        torch.save({"epoch": epoch, **{name: part.state_dict() for name, part in parts.items()}}, args.checkpoint)


if __name__ == "__main__":
    main()
