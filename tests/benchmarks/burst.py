"""Many small named tensors, submitted in another order on each rank, against one Gloo allreduce after the other."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from executor import TIMEOUT, arguments_of, library_group, place

from dadt.comm import executors
from dadt.comm.collectives import operation
from dadt.comm.collectives.named import Named
from dadt.config import Config
from dadt_cli.bench.ratio import interval, ratio


class Burst:
    """The same tensors by both ways, submission from Python included."""

    def __init__(self, named: Named, gloo: Any, count: int, elements: int) -> None:
        self._named = named
        self._gloo = gloo
        self._tensors = [torch.zeros(elements) for _ in range(count)]
        self._order = random.Random(named.rank)

    def by_names(self) -> None:
        order = list(enumerate(self._tensors))
        self._order.shuffle(order)
        pending = [
            self._named.submit(operation.all_reduce(tensor, tensor, "sum", self._named.size), f"tensor {number}")
            for number, tensor in order
        ]
        for each in pending:
            each.wait(TIMEOUT)

    def one_by_one(self) -> None:
        for tensor in self._tensors:
            self._gloo.allreduce([tensor]).wait()


def main(arguments: Sequence[str]) -> None:
    parser = arguments_of("burst", __doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--bytes", type=int, default=4096, help="of each tensor")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    world, meet = place(options)
    config = Config(executor=options.executor, timeout=TIMEOUT, start_timeout=TIMEOUT)
    named = Named(executors.connect(config, world, meet), config, world, meet)
    gloo = library_group("gloo", world, meet)
    burst = Burst(named, gloo, options.count, options.bytes // 4)
    ways: dict[str, Callable[[], None]] = {"dadt": burst.by_names, "gloo": burst.one_by_one}
    times: dict[str, list[float]] = {who: [] for who in ways}
    for turn in range(options.rounds + 2):
        for who, go in ways.items():
            gloo.barrier().wait()
            begun = time.perf_counter()
            go()
            if turn >= 2:
                times[who].append(time.perf_counter() - begun)
    every = [json.loads(blob) for blob in meet.exchange("times", json.dumps(times).encode())]
    slowest = {who: [max(at) for at in zip(*(t[who] for t in every), strict=True)] for who in ways}
    if world.rank == 0:
        figures = {who: asdict(interval(values)) for who, values in slowest.items()}
        figures["gloo_per_dadt"] = asdict(ratio(slowest["gloo"], slowest["dadt"]))
        sys.stdout.write(json.dumps(figures) + "\n")
    named.close(TIMEOUT)


if __name__ == "__main__":
    main(sys.argv[1:])
