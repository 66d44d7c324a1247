"""Measures a step of DistributedDataParallel over the backend `dadt` and over torch's Gloo, in turn in the same
processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

from dadt.errors import ConfigError
from dadt_cli.bench.ranks import TIMEOUT, BenchRanks, slowest, take_turns
from dadt_cli.bench.ratio import Interval, cell, interval, ratio

LAYERS = 5


@dataclass(frozen=True, slots=True)
class DdpRow:
    """Seconds of a DDP step over each backend, on the slowest rank."""

    parameters: int
    batch_size: int
    dadt: Interval
    gloo: Interval
    alone: Interval
    """Seconds of the step without any exchange, while all ranks compute at once."""
    gloo_per_dadt: Interval


COLUMNS: dict[str, Callable[[DdpRow], str]] = {
    "parameters": lambda row: f"{row.parameters:,}",
    "dadt ms": lambda row: cell(row.dadt, 1e3),
    "gloo ms": lambda row: cell(row.gloo, 1e3),
    "alone ms": lambda row: cell(row.alone, 1e3),
    "gloo / dadt": lambda row: cell(row.gloo_per_dadt),
}


def measure(*, ranks: int, width: int, batch_size: int, rounds: int) -> DdpRow:
    """Measure training steps of a perceptron with LAYERS layers of width x width float32, in `ranks` processes of one
    thread each.

    Raises ConfigError for arguments out of range, DadtError if a worker fails.
    """
    if ranks < 2:
        raise ConfigError(f"-np {ranks}: an exchange needs 2 workers or more")
    if rounds < 6:
        raise ConfigError(f"--rounds {rounds}: an interval needs 6 rounds or more")
    with BenchRanks(ranks, _worker, width, batch_size, rounds) as workers:
        seconds = slowest(workers.receive(TIMEOUT + 10.0 * rounds))
    return DdpRow(
        parameters=LAYERS * (width + 1) * width,
        batch_size=batch_size,
        **{name: interval(values) for name, values in seconds.items()},
        gloo_per_dadt=ratio(seconds["gloo"], seconds["dadt"]),
    )


def _worker(rank: int, ranks: int, pipe: Connection, store: str, width: int, batch_size: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import dadt  # noqa: F401 (makes the backend known)

    torch.set_num_threads(1)
    patience = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=patience)

    def training(contender: str) -> Callable[[], None]:
        torch.manual_seed(0)
        layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU()))
        model: nn.Module = nn.Sequential(*layers)
        if contender != "alone":
            model = DistributedDataParallel(model, process_group=dist.new_group(backend=contender, timeout=patience))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = torch.randn(batch_size, width)

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return step

    contenders = {name: training(name) for name in ("dadt", "gloo", "alone")}
    # The first two rounds are not counted, since DDP rebuilds its buckets after the first step.
    seconds = take_turns(contenders, rounds, 2, lambda name, number: dist.barrier())
    dist.barrier()
    pipe.send(seconds)
