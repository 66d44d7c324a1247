"""What a step costs beside its computation: models of many small tensors, on one host: python -m benchmarks.small_steps

A step of such a model is little but Python's and torch's own calls, and so are DADT's hooks. DDP, `sync` and `pipe` by
two workers take turns with one worker alone; then one worker under `dadt run -np 1`, where nothing is to be exchanged,
with the same script under `python`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dadt_cli.bench.figure import Figures, Outputs, Table, cell
from dadt_cli.bench.ratio import Interval, interval, ratio
from dadt_cli.bench.training import Contender, Task, alone, measure

TENSORS = (10, 100, 1_000, 10_000)
MILLISECOND = 24
"""Number of tensors with which a step takes about a millisecond."""
WIDTH = 4
DDP = Contender("DDP", 2, peer="ddp")
TOGETHER = [DDP, *(Contender(name, 2, ("--algorithm", name)) for name in ("sync", "pipe")), alone()]
ALONE = [alone(), Contender("dadt run -np 1", 1)]


class Many(nn.Module):
    """Small layers side by side."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers]).mean(0)


def many(tensors: int) -> tuple[Any, ...]:
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, WIDTH), torch.randn(size, WIDTH)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    return Many(tensors), batch, loss


tensors_10, tensors_100, tensors_1000, tensors_10000 = (partial(many, n) for n in TENSORS)
tensors_24 = partial(many, MILLISECOND)


@dataclass(frozen=True, slots=True)
class Row:
    """A contender with one model; ratios are taken round by round."""

    tensors: int
    name: str
    seconds: Interval
    """Seconds that a step takes on the slowest rank."""
    cpu: Interval
    """Seconds of the processor that a step takes, on the rank that needs the most."""
    per_first: Interval
    """Seconds, over those of the first contender with this model."""
    cpu_per_first: Interval


def compare(contenders: Sequence[Contender], tensors: int, steps: int, rounds: int) -> list[Row]:
    """The first one is what others are compared with."""
    task = Task(f"{__package__}.small_steps:tensors_{tensors}")
    measured = measure(contenders, task, steps=steps, rounds=rounds)
    of_each = zip(contenders, measured.turns, measured.cpu, strict=True)
    first, first_cpu = measured.turns[0], measured.cpu[0]
    return [
        Row(tensors, c.name, interval(seconds), interval(cpu), ratio(seconds, first), ratio(cpu, first_cpu))
        for c, seconds, cpu in of_each
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - for stdout")
    parser.add_argument("--tensors", type=int, nargs="*", default=TENSORS, choices=TENSORS, help="of the models")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each contender (20)")
    parser.add_argument("--alone-rounds", type=int, default=200, help="turns with one worker; 0 leaves them out (200)")
    asked = parser.parse_args()
    outputs = Outputs(json=asked.json)
    rows = []
    for tensors in asked.tensors:
        rows += compare(TOGETHER, tensors, max(3, 20_000 // tensors // 4), asked.rounds)
    if asked.alone_rounds:
        rows += compare(ALONE, MILLISECOND, 100, asked.alone_rounds)
    head = ["tensors", "", "ms", "CPU ms", "/ first", "CPU / first"]
    lines = [
        [
            f"{row.tensors:,}",
            row.name,
            cell(row.seconds, 1e3),
            cell(row.cpu, 1e3),
            cell(row.per_first),
            cell(row.cpu_per_first),
        ]
        for row in rows
    ]
    title = f"steps of models of small tensors, {asked.rounds} and {asked.alone_rounds} rounds"
    command = " ".join(["python", "-m", f"{__package__}.small_steps", *sys.argv[1:]])
    Figures(rows, [Table(title, head, lines)], about={"command": command}).report(title, outputs)


if __name__ == "__main__":
    main()
