"""Trains the small model with one optimizer after the other, as a script does that knows nothing of DADT.

train.py FOLDER: reads the names from FOLDER/names.json, and adds what becomes of each to FOLDER/rank0.jsonl.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from recipes import STEPS, find
from torch import nn

BATCH = 8


class Features(nn.Module):
    """A kernel, matrices and vectors, since many optimizers treat these in ways of their own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.seen: nn.Module = nn.Flatten()
        if kind == "kernels":
            self.seen = nn.Conv2d(1, 4, 3)
        self.inner = nn.Linear(36 if kind == "matrices" else 64, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.inner(self.seen(x).tanh().flatten(1))).tanh())


class Sparse(nn.Module):
    """A table alone, of which each batch uses some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(36, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.flatten(1).argmax(1))


class Loss:
    """Of one batch."""

    def __init__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model, self.x, self.y = model, x, y

    def __call__(self) -> torch.Tensor:
        if "HALVES" not in os.environ:
            return nn.functional.cross_entropy(self.model(self.x), self.y)
        # The same value, rounded as two ranks round it.
        pairs = zip(self.x.chunk(2), self.y.chunk(2), strict=True)
        return sum(nn.functional.cross_entropy(self.model(x), y) for x, y in pairs) / 2


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 1, 6, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, x.flatten(1)[:, :3].argmax(1))


def train(name: str) -> dict[str, Any]:
    kind, recipe = find(name)
    torch.manual_seed(0)
    model = (Sparse() if recipe.model == "table" else Features(recipe.model)).to(recipe.dtype)
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH)
    optimizer = recipe.build(kind, model)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    losses = []
    for x, y in loader:
        losses.append(float(recipe.step(optimizer, model, Loss(model, x.to(next(model.parameters()).dtype), y))))
    weights = torch.cat([p.detach().double().reshape(-1) for p in model.state_dict().values()])
    return {"weights": weights.tolist(), "losses": losses, **under_dadt()}


def under_dadt() -> dict[str, Any]:
    """Which of its steps were late, and why others were not."""
    if "dadt.train.attachment" not in sys.modules:
        return {}
    from dadt.train.attachment import Attachment

    mine = [each for each in gc.get_objects() if isinstance(each, Attachment) and each.alive and each.step]
    return {"late": sum(each.measure.delayed for each in mine), "why": ", ".join(each.measure.why for each in mine)}


def main(folder: Path) -> None:
    rank = os.environ.get("RANK", "0")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = folder / f"rank{rank}.jsonl"
    for name in json.loads((folder / "names.json").read_text()):
        found: dict[str, Any] = {}
        try:
            found = train(name)
        except BaseException as error:
            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
            raise
        finally:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
                print(json.dumps({"name": name, **found}), file=file)
            gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
