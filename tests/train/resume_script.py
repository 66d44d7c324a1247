"""A plain script that trains two models on shuffled data, saves after every pass, and goes on from what it saved."""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 48, 4


def network(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--resume", default="")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed-passes", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,)))
    models = [network(arguments.dropout), network(arguments.dropout)]
    optimizers = [
        torch.optim.SGD(models[0].parameters(), lr=0.05, momentum=0.9),
        torch.optim.AdamW(models[1].parameters(), lr=0.01),
    ]
    first, losses = 0, []
    if arguments.resume:
        saved = torch.load(arguments.resume, weights_only=True)
        first = saved["passes"]
        for model, optimizer, m, o in zip(models, optimizers, saved["models"], saved["optimizers"]):
            model.load_state_dict(m)
            optimizer.load_state_dict(o)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for number in range(first, arguments.passes):
        if arguments.seed_passes:
            torch.manual_seed(100 + number)
        for x, y in loader:
            for model, optimizer in zip(models, optimizers):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        state = {
            "passes": number + 1,
            "models": [m.state_dict() for m in models],
            "optimizers": [o.state_dict() for o in optimizers],
        }
        torch.save(state, os.path.join(arguments.folder, f"pass{number + 1}.pt"))
    rank = os.environ.get("RANK", "0")
    with open(os.path.join(arguments.folder, f"losses{rank}.pt"), "wb") as f:
        torch.save(torch.stack(losses), f)


if __name__ == "__main__":
    main()
