"""A plain script that trains two models on shuffled data, saves after every pass, and goes on from what it saved."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from harness import light  # noqa: F401 (faster to start)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 48, 4


def network(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 3))


class Training:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder = arguments.folder
        self.rank = int(os.environ.get("RANK", "0"))
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,)))
        self.models = [network(arguments.dropout), network(arguments.dropout)]
        self.optimizers = [
            torch.optim.SGD(self.models[0].parameters(), lr=0.05, momentum=0.9),
            torch.optim.AdamW(self.models[1].parameters(), lr=0.01),
        ]
        # Its momentum goes from 0.95 down to 0.85 and up again.
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizers[0], 0.05, total_steps=60)
        self.loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        self.losses: list[torch.Tensor] = []

    def one_pass(self) -> None:
        for x, y in self.loader:
            for model, optimizer in zip(self.models, self.optimizers):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.losses.append(loss.detach())
            self.schedule.step()

    def path(self, number: int) -> str:
        return os.path.join(self.folder, f"pass{number}.pt")

    def save(self, number: int) -> None:
        models = [m.state_dict() for m in self.models]
        optimizers = [o.state_dict() for o in self.optimizers]
        schedule = self.schedule.state_dict()
        saved = {"passes": number, "models": models, "optimizers": optimizers, "schedule": schedule}
        torch.save(saved, self.path(number))

    def load(self, path: str, schedule_only: bool = False) -> int:
        saved = torch.load(path, weights_only=True)
        self.schedule.load_state_dict(saved["schedule"])
        if schedule_only:
            return saved["passes"]
        for model, optimizer, m, o in zip(self.models, self.optimizers, saved["models"], saved["optimizers"]):
            optimizer.load_state_dict(o)
            model.load_state_dict(m)
        return saved["passes"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--resume", default="")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed-passes", action="store_true")
    parser.add_argument("--alone", action="store_true", help="only rank 0 loads and saves")
    parser.add_argument("--back", type=int, default=0, help="go back to the state after this pass, once, from the next")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(arguments)
    acts = training.rank == 0 or not arguments.alone
    number = 0
    if arguments.resume:
        number = training.load(arguments.resume, schedule_only=not acts)
    while number < arguments.passes:
        if arguments.seed_passes:
            torch.manual_seed(100 + number)
        training.one_pass()
        number += 1
        if acts:
            training.save(number)
        if arguments.back and number == arguments.back + 1:
            number = training.load(training.path(arguments.back))
            arguments.back = 0
    with open(os.path.join(arguments.folder, f"losses{training.rank}.pt"), "wb") as f:
        torch.save(torch.stack(training.losses), f)


if __name__ == "__main__":
    main()
