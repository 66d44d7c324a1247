"""Measures how long averaging takes with DADT's shared memory and with torch's Gloo, compared with a bare memcpy, side
by side in one run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from dadt.errors import ConfigError
from dadt_cli.bench.ranks import TIMEOUT, BenchRanks, slowest, take_turns
from dadt_cli.bench.ratio import Interval, cell, interval, ratio
from dadt_cli.terminal.table import short

TENSORS = 60
"""Number of tensors, of unequal sizes, that are averaged together as one bucket."""


@dataclass(frozen=True, slots=True)
class AllreduceRow:
    """Results for one message size. Seconds are those of the slowest rank; the seconds of DADT and Gloo include packing
    separate tensors and unpacking into them."""

    bytes: int
    count: int
    """Number of float32 elements that are averaged."""
    ranks: int
    dadt: Interval
    gloo: Interval
    memcpy: Interval
    """Seconds of a memcpy of as many bytes, done by all ranks at once."""
    gloo_per_dadt: Interval
    dadt_per_memcpy: Interval
    wrong: int
    """Number of elements, over all ranks, that were not exactly the mean."""

    def algbw(self, seconds: Interval) -> Interval:
        """Return the algorithm bandwidth as nccl-tests defines it: bytes of the message divided by `seconds`."""
        return Interval(self.bytes / seconds.median, self.bytes / seconds.high, self.bytes / seconds.low)

    def busbw(self, seconds: Interval) -> Interval:
        """Return the bus bandwidth as nccl-tests defines it: `algbw` times 2 (n - 1) / n for n ranks, the bytes per
        second that each rank's link carries. It can be compared between different numbers of ranks."""
        factor = 2 * (self.ranks - 1) / self.ranks
        speed = self.algbw(seconds)
        return Interval(factor * speed.median, factor * speed.low, factor * speed.high)


COLUMNS: dict[str, Callable[[AllreduceRow], str]] = {
    "bytes": lambda row: f"{row.bytes:,}",
    "dadt\nµs": lambda row: cell(row.dadt, 1e6),
    "algbw\nGB/s": lambda row: short(1e-9 * row.algbw(row.dadt).median),
    "busbw\nGB/s": lambda row: short(1e-9 * row.busbw(row.dadt).median),
    "wrong": lambda row: str(row.wrong),
    "gloo\nµs": lambda row: cell(row.gloo, 1e6),
    "memcpy\nµs": lambda row: short(1e6 * row.memcpy.median),
    "gloo\n/ dadt": lambda row: cell(row.gloo_per_dadt),
}


def measure(
    *, ranks: int, sizes: Sequence[int], rounds: int, progress: Callable[[str], None] = lambda what: None
) -> list[AllreduceRow]:
    """Measure averaging for each size in bytes of float32, in `ranks` new processes of one thread each. Returns one row
    per size.

    Raises ConfigError for arguments out of range, DadtError if a worker fails.
    """
    if ranks < 2:
        raise ConfigError(f"-np {ranks}: an allreduce needs 2 workers or more")
    if rounds < 10:
        raise ConfigError(f"--rounds {rounds}: an interval needs 10 rounds or more")
    for size in sizes:
        if size < 4 * TENSORS:
            raise ConfigError(f"--sizes {size}: give {4 * TENSORS} bytes or more, for {TENSORS} tensors")
    with BenchRanks(ranks, _worker, list(sizes), rounds) as workers:
        workers.send(workers.receive())  # every worker receives the endpoints of all workers
        rows = []
        for size in sizes:
            progress(f"{size:,} bytes")
            rows.append(_row(size, workers.receive(600.0)))
        return rows


def _row(size: int, results: Sequence[tuple[dict[str, list[float]], int]]) -> AllreduceRow:
    seconds = slowest([times for times, _ in results])
    return AllreduceRow(
        bytes=size,
        count=size // 4,
        ranks=len(results),
        **{name: interval(values) for name, values in seconds.items()},
        gloo_per_dadt=ratio(seconds["gloo"], seconds["dadt"]),
        dadt_per_memcpy=ratio(seconds["dadt"], seconds["memcpy"]),
        wrong=sum(wrong for _, wrong in results),
    )


def _counts(size: int) -> list[int]:
    """Divide `size` bytes of float32 into TENSORS tensors, many small and some large as in a network; return their
    numbers of elements."""
    total = size // 4
    weights = [1.0 + (i * 7919 % TENSORS) ** 2 for i in range(TENSORS)]
    counts = [max(1, int(total * w / sum(weights))) for w in weights]
    counts[counts.index(max(counts))] += total - sum(counts)
    return counts


def _worker(rank: int, world_size: int, pipe: Connection, store: str, sizes: list[int], rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from dadt import _core

    torch.set_num_threads(1)
    executor = _core.ShmExecutor(rank, world_size)
    pipe.send(executor.endpoint())
    executor.connect(pipe.recv(), TIMEOUT)
    engine = _core.Engine(executor, rank, world_size, TIMEOUT)
    files = dist.FileStore(store, world_size)  # type: ignore[attr-defined]
    gloo = dist.ProcessGroupGloo(files, rank, world_size, timedelta(seconds=TIMEOUT))
    for size in sizes:
        pipe.send(_Bucket(engine, gloo, rank, world_size, _counts(size)).run(rounds))
    engine.close(TIMEOUT)


class _Bucket:
    """The tensors of one message size, and the three functions to measure with them: averaging by dadt, by Gloo, and a
    memcpy."""

    def __init__(self, engine: Any, gloo: Any, rank: int, world_size: int, counts: list[int]) -> None:
        import torch

        from dadt import _core

        self.engine, self.gloo, self.world_size, self.counts = engine, gloo, world_size, counts
        self.tensors = self.fresh(rank)
        self.flat = torch.empty(sum(counts))
        self.views = list(torch.split(self.flat, counts))
        self.copy = torch.empty_like(self.flat)
        self.layout = _core.Layout(_core.DType.float32, counts)

    def fresh(self, rank: int) -> list[Any]:
        import torch

        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(count, generator=generator) for count in self.counts]

    def run(self, rounds: int) -> tuple[dict[str, list[float]], int]:
        """Measure dadt, Gloo and memcpy in turn. Returns the seconds of each by round, and the number of wrong
        elements."""
        wrong = self.check()
        contenders = {"dadt": self.by_dadt, "gloo": self.by_gloo, "memcpy": self.by_memcpy}
        return take_turns(contenders, rounds, 3, self.meet), wrong

    def meet(self, name: str, number: int) -> None:
        self.engine.allgather(b"", "together").wait(TIMEOUT)

    def check(self) -> int:
        """Average once with DADT and return how many elements differ from the mean of all ranks' inputs."""
        import torch

        inputs = [self.fresh(rank) for rank in range(self.world_size)]
        mean = [sum(tensors[1:], start=tensors[0]) for tensors in zip(*inputs, strict=True)]
        self.by_dadt()
        return sum(
            int(torch.count_nonzero(got != want * (1 / self.world_size)))
            for got, want in zip(self.tensors, mean, strict=True)
        )

    def by_dadt(self) -> None:
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.engine.allreduce(self.layout, addresses, addresses, "bench").wait(TIMEOUT)

    def by_gloo(self) -> None:
        import torch

        torch._foreach_copy_(self.views, self.tensors)
        self.gloo.allreduce([self.flat]).wait()
        self.flat.mul_(1 / self.world_size)
        torch._foreach_copy_(self.tensors, self.views)

    def by_memcpy(self) -> None:
        ctypes.memmove(self.copy.data_ptr(), self.flat.data_ptr(), 4 * sum(self.counts))
