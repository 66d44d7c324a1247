"""What an executor's allreduce costs beside the library called directly: one rank of a run, contenders in turn.

Ranks are started by whoever fits: processes on one host or several, or mpirun. They meet in a file that all see.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from dadt import _core
from dadt.comm import executors
from dadt.comm.backend.rendezvous import GroupRendezvous
from dadt.comm.collectives import operation
from dadt.comm.collectives.ordered import Pending, start
from dadt.comm.executors import c10d
from dadt.comm.executors.base import Connection
from dadt.comm.executors.keys import Keys
from dadt.comm.executors.meet import Apart, Meet
from dadt.config import Config
from dadt.world import World
from dadt_cli.bench.ratio import Interval, interval, ratio

TIMEOUT = 120.0
Library = Callable[[torch.Tensor], tuple[Callable[[], bool], Callable[[], object]]]
"""Starts a sum in place; whether it is done, and waiting for it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One size; seconds of the slowest rank."""

    bytes: int
    library: Interval
    dadt: Interval
    ratio: Interval
    """dadt / library, pair by pair."""
    over: Interval
    """dadt - library, in seconds, pair by pair."""
    loaded_library: Interval
    loaded_dadt: Interval
    """The same while the training thread runs Python."""
    processor_library: float
    processor_dadt: float
    """Median processor time of a rank's process in seconds, of whichever rank took most."""


class Contest:
    """The same flat float32 tensor, summed by dadt and by the library.

    On a GPU dadt does what it does with gradients: averages them where they are if the executor can, else stages them.
    """

    def __init__(self, connection: Connection, library: Library, count: int, world_size: int, device: str) -> None:
        self._connection = connection
        self._library = library
        self._world_size = world_size
        self._tensor = torch.zeros(count, device=device)
        self._layout = _core.Layout(_core.DType.float32, [count])
        self._wait: Callable[[], object] = lambda: None

    def start_dadt(self) -> Callable[[], bool]:
        engine, tensor = self._connection.engine, self._tensor
        if not tensor.is_cuda:
            address = [tensor.data_ptr()]
            work = engine.allreduce(self._layout, address, address, "bench", reduction=_core.Reduction.sum)
            self._wait = lambda: work.wait(TIMEOUT)
            return lambda: work.done
        if (device := self._connection.device) is not None:
            averaging = device.average([tensor], [tensor], tensor, name="bench", weight=1.0, lane=b"")
            self._wait = lambda: averaging.wait(TIMEOUT)
            return lambda: averaging.done
        call = operation.all_reduce(tensor, tensor, "sum", self._world_size)
        staged = Pending(start(engine, call, "bench"), call)
        self._wait = lambda: staged.wait(TIMEOUT)
        return lambda: staged.done

    def start_library(self) -> Callable[[], bool]:
        done, self._wait = self._library(self._tensor)
        return done

    def seconds(self, start: Callable[[], Callable[[], bool]], loaded: bool) -> tuple[float, float]:
        """Seconds, and seconds of processor time of all threads."""
        begun, used = time.perf_counter(), time.process_time()
        done = start()
        if loaded:
            while not done():
                sum(range(100))
        self._wait()
        if self._tensor.is_cuda:
            torch.cuda.synchronize(self._tensor.device)
        return time.perf_counter() - begun, time.process_time() - used


def measure(
    contest_of: Callable[[int], Contest], engine: _core.Engine, meet: Meet, sizes: Sequence[int], seconds: float
) -> list[Row]:
    """One row per size in bytes; each takes about `seconds`. Every rank calls it."""
    rows = []
    for size in sizes:
        contest = contest_of(max(1, size // 4))
        ways = {
            (who, loaded): (start, loaded)
            for loaded in (False, True)
            for who, start in (("library", contest.start_library), ("dadt", contest.start_dadt))
        }
        times: list[list[tuple[float, float]]] = [[] for _ in ways]
        rounds = 3
        turn = 0
        while turn < rounds:
            for taken, (begin, loaded) in zip(times, ways.values(), strict=True):
                engine.allgather(b"", "together").wait(TIMEOUT)
                taken.append(contest.seconds(begin, loaded))
            turn += 1
            if turn == 3:  # the first three are not counted; how long they took says how many more there will be
                round_ = float(meet.exchange(f"{size} taken", repr(sum(t[-1][0] for t in times)).encode())[0])
                rounds = 3 + min(200, max(11, int(seconds / round_)))
        every = [json.loads(blob) for blob in meet.exchange(f"{size} times", json.dumps(times).encode())]
        slowest = {
            way: [max(seconds for seconds, _ in at) for at in zip(*(t[number][3:] for t in every), strict=True)]
            for number, way in enumerate(ways)
        }
        used = {
            who: max(median(used for _, used in t[number][3:]) for t in every)
            for number, (who, loaded) in enumerate(ways)
            if not loaded
        }
        rows.append(_row(size, slowest, used))
    return rows


def repeat(contest: Contest, who: str, times: int) -> None:
    """For who counts bytes outside."""
    for _ in range(times):
        contest.seconds(contest.start_dadt if who == "dadt" else contest.start_library, loaded=False)


def _row(size: int, times: dict[tuple[str, bool], list[float]], used: dict[str, float]) -> Row:
    library, dadt = times["library", False], times["dadt", False]
    return Row(
        bytes=size,
        library=interval(library),
        dadt=interval(dadt),
        ratio=ratio(dadt, library),
        over=interval([a - b for a, b in zip(dadt, library, strict=True)]),
        loaded_library=interval(times["library", True]),
        loaded_dadt=interval(times["dadt", True]),
        processor_library=used["library"],
        processor_dadt=used["dadt"],
    )


def by_group(group: Any) -> Library:
    """A process group of torch's."""

    def start(tensor: torch.Tensor) -> tuple[Callable[[], bool], Callable[[], object]]:
        work = group.allreduce([tensor])
        return work.is_completed, work.wait

    return start


def by_mpi4py() -> Library:
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()

    def start(tensor: torch.Tensor) -> tuple[Callable[[], bool], Callable[[], object]]:
        array = tensor.numpy()
        done: list[bool] = []

        def test() -> bool:
            if not done:
                world.Allreduce(MPI.IN_PLACE, array)
                done.append(True)
            return True

        return test, test

    return start


def arguments_of(program: str, description: str | None) -> argparse.ArgumentParser:
    """Where a rank is, and what it measures."""
    parser = argparse.ArgumentParser(prog=f"python tests/benchmarks/{program}.py", description=description)
    parser.add_argument("executor")
    parser.add_argument("--rank", type=int, default=-1, help="-1: as the launcher says")
    parser.add_argument("--np", type=int, default=0)
    parser.add_argument("--local-size", type=int, default=0)
    parser.add_argument("--store", required=True, help="a file that all ranks see; a new one for each run")
    parser.add_argument("--address", default="", help="at which others reach this host")
    return parser


def place(options: argparse.Namespace) -> tuple[World, Meet]:
    """This rank, and where it meets the others."""
    world = World.from_launcher()
    if options.rank >= 0:
        local_size = options.local_size or options.np
        world = World(
            rank=options.rank,
            world_size=options.np,
            local_rank=options.rank % local_size,
            local_size=local_size,
            cross_rank=options.rank // local_size,
            address=options.address,
        )
    store = FileStore(options.store, world.world_size)
    return world, GroupRendezvous(store, world.rank, world.world_size, TIMEOUT)


def library_group(name: str, world: World, meet: Meet) -> Any:
    """The library's own."""
    store = Keys(Apart(meet, "library"), world.rank, world.world_size)
    return c10d.group(name, store, world, range(world.world_size), TIMEOUT, "library")


def main(arguments: Sequence[str]) -> None:
    parser = arguments_of("executor", __doc__)
    parser.add_argument("--against", choices=("gloo", "nccl", "mpi4py"), default="gloo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are")
    parser.add_argument("--sizes", default="64,4096,65536,1048576,8388608,67108864,268435456")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size")
    parser.add_argument("--only", choices=("dadt", "library"), help="run this one, as often as --repeat says")
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (not torch.cuda.is_available() or options.against == "mpi4py"):
        parser.error("--device cuda: needs a CUDA device that torch sees, and --against gloo or nccl")
    if options.device == "cpu" and options.against == "nccl":
        parser.error("--against nccl: moves tensors of GPUs only; give --device cuda, too")
    torch.set_num_threads(1)
    world, meet = place(options)
    config = Config(executor=options.executor, timeout=TIMEOUT, start_timeout=TIMEOUT)
    connection = executors.connect(config, world, meet)
    library = by_mpi4py() if options.against == "mpi4py" else by_group(library_group(options.against, world, meet))

    def contest_of(count: int) -> Contest:
        return Contest(connection, library, count, world.world_size, options.device)

    sizes = [int(size) for size in options.sizes.split(",")]
    rows = []
    if options.only:
        repeat(contest_of(sizes[0] // 4), options.only, options.repeat)
    else:
        rows = measure(contest_of, connection.engine, meet, sizes, options.seconds)
    connection.engine.close(TIMEOUT)
    connection.close()
    if world.rank == 0:
        sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
