"""What averaging a LoRA's factors apart costs: a small GPT that has read Shakespeare learns to read it in capitals.

python -m benchmarks.lora --base base.pt                                            trains the base, if it is not there
dadt run -np 4 --batch global --algorithm pipe -m benchmarks.lora --base base.pt    fine-tunes it
python -m benchmarks.lora --base base.pt --ranks 4 --every 32 [--fold]              local SGD in one process: how far
                                            the mean of the factors is from that of their products
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.convergence.data import CONTEXT, FOLDER, Letters
from benchmarks.convergence.model import GPT

BATCH, RANK = 16, 8


class LoRA(nn.Module):
    """A frozen linear layer, and beside it two thin ones that are trained, named as in PEFT."""

    def __init__(self, base: nn.Linear, rank: int = RANK, alpha: float = 16.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.lora_B(self.lora_A(x)) * self.scale
        return out

    def product(self) -> torch.Tensor:
        return self.lora_B.weight.detach() @ self.lora_A.weight.detach() * self.scale


def text(*, capitals: bool) -> tuple[Letters, Letters]:
    """Return Shakespeare's text for training and for the verdict, both with the same alphabet. capitals: whether all
    letters are capitals."""
    raw = gzip.decompress((FOLDER / "tinyshakespeare" / "input.txt.gz").read_bytes())
    numbers = {letter: i for i, letter in enumerate(sorted(set(raw)))}
    coded = torch.tensor([numbers[letter] for letter in (raw.upper() if capitals else raw)])
    cut = len(coded) * 9 // 10
    return Letters(coded[:cut], 1), Letters(coded[cut:], CONTEXT)


def batches(data: Letters, seed: int, steps: int) -> Iterator[list[torch.Tensor]]:
    order = torch.Generator().manual_seed(seed)
    return islice(DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True, generator=order), steps)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def verdict(model: nn.Module, data: Letters) -> float:
    every = list(islice(DataLoader(data, batch_size=50), 16))
    return sum(float(loss_of(model, batch)) for batch in every) / len(every)


def base(path: Path) -> GPT:
    torch.manual_seed(0)
    model = GPT(width=64, depth=2)
    if not path.exists():
        data = text(capitals=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1500)
        for batch in batches(data[0], 0, 1500):
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        print(f"base: loss {verdict(model, data[1]):.4f}, of capitals {verdict(model, text(capitals=True)[1]):.4f}")
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path))
    return model


def adapted(model: GPT, seed: int, *, frozen_a: bool) -> GPT:
    torch.manual_seed(seed)
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention, block.projection = LoRA(block.attention), LoRA(block.projection)
        block.perceptron[0], block.perceptron[2] = LoRA(block.perceptron[0]), LoRA(block.perceptron[2])
    for layer in adapters(model) if frozen_a else ():
        layer.lora_A.requires_grad_(False)
    return model


def adapters(model: nn.Module) -> list[LoRA]:
    return [module for module in model.modules() if isinstance(module, LoRA)]


def share(step: int, steps: int) -> float:
    """Return the factor of the learning rate, which rises for a twentieth of the steps and falls to 0 along a
    cosine."""
    rises = steps // 20
    return (step + 1) / rises if step < rises else (1 + math.cos(math.pi * (step - rises) / (steps - rises))) / 2


def local(model: GPT, options: argparse.Namespace, data: Letters) -> tuple[GPT, list[float]]:
    """Train `options.ranks` copies that average every `options.every` steps. Returns the model and, for each average,
    how far the mean of the products is from the product of the means, in units of the products' mean movement."""
    copies = [copy.deepcopy(model) for _ in range(options.ranks)]
    optimizers = [torch.optim.AdamW((p for p in c.parameters() if p.requires_grad), lr=options.rate) for c in copies]
    off, size = list[float](), BATCH // options.ranks
    before = [layer.product() for layer in adapters(copies[0])]
    for step, (x, y) in enumerate(batches(data, options.seed, options.steps)):
        for rank, (each, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = options.rate * share(step, options.steps)
            optimizer.zero_grad()
            part = slice(rank * size, (rank + 1) * size)
            loss_of(each, [x[part], y[part]]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if (step + 1) % options.every and step + 1 < options.steps:
            continue
        exact = [torch.stack([p.product() for p in same]).mean(0) for same in zip(*map(adapters, copies), strict=True)]
        with torch.no_grad():
            for same in zip(*(c.parameters() for c in copies), strict=True):
                mean = torch.stack([p.data for p in same]).mean(0)
                for p in same:
                    p.copy_(mean)
            residuals = [product - layer.product() for product, layer in zip(exact, adapters(copies[0]), strict=True)]
            moved = [product - old for product, old in zip(exact, before, strict=True)]
            off.append(float(_norm(residuals) / _norm(moved)))
            if options.fold:
                for each in copies:
                    for layer, residual in zip(adapters(each), residuals, strict=True):
                        layer.base.weight += residual
        before = [layer.product() for layer in adapters(copies[0])]
    return copies[0], off


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.pow(2).sum() for t in tensors]).sum().sqrt()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frozen-a", action="store_true", help="train B only")
    parser.add_argument("--ranks", type=int, default=0, help="simulate as many ranks of local SGD in this process")
    parser.add_argument("--every", type=int, default=32, help="steps between two of their averages")
    parser.add_argument("--fold", action="store_true", help="add to the base what the mean of the factors leaves out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, data = adapted(base(options.base), options.seed, frozen_a=options.frozen_a), text(capitals=True)
    off: list[float] = []
    if options.ranks:
        model, off = local(model, options, data[0])
    else:
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=options.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share(step, options.steps))
        for batch in batches(data[0], options.seed, options.steps):
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        model.eval()
    told = {"loss": round(verdict(model, data[1]), 4), "off": round(sum(off) / len(off), 4) if off else None}
    print(json.dumps({**told, "trained": sum(p.numel() for p in model.parameters() if p.requires_grad)}), flush=True)


if __name__ == "__main__":
    main()
