"""Processes on this host that take part in a measurement, each with a rank and with a pipe to the process that
measures."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from dadt.errors import DadtError
from dadt_cli.bench.folder import folder

TIMEOUT = 120.0
"""Seconds that a rank waits for another rank."""
Target = Callable[..., None]
"""The function that each process runs: called with its rank, the number of ranks, its pipe, the path of a file for
torch's FileStore, and any further arguments of BenchRanks."""


def take_turns(
    contenders: Mapping[str, Callable[[], float | None]], rounds: int, warmup: int, before: Callable[[str, int], object]
) -> dict[str, list[float]]:
    """Return the seconds of each contender, round by round. The first `warmup` rounds are not counted.

    contenders: functions to measure; a function that returns a number has measured its seconds itself. before: called
    before each turn with the contender's name and the number of the round, which is below 1 during warm-up.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(1 - warmup, rounds + 1):
        for name, take in contenders.items():
            before(name, number)
            begun = time.perf_counter()
            measured = take()
            seconds = time.perf_counter() - begun if measured is None else measured
            if number > 0:
                found[name].append(seconds)
    return found


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return, for each contender and round, the seconds of the slowest rank."""
    return {name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


class BenchRanks:
    """Processes that run one function each and are killed at the end of the block: `with BenchRanks(2, target, ...) as
    ranks`."""

    def __init__(self, count: int, target: Target, *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._stack = ExitStack()
        store = str(self._stack.enter_context(folder()) / "store")
        pipes = [spawn.Pipe() for _ in range(count)]
        self._pipes: list[Connection] = [ours for ours, _ in pipes]
        self._processes = [
            spawn.Process(target=target, args=(rank, count, theirs, store, *arguments), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def __enter__(self) -> BenchRanks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._stack.close()

    def send(self, what: Any) -> None:
        """Send the object `what` to every process."""
        for pipe in self._pipes:
            pipe.send(what)

    def receive(self, seconds: float = TIMEOUT) -> list[Any]:
        """Receive one message from each process, ordered by rank. Raises DadtError if a process has failed or sends
        nothing for `seconds` seconds."""
        return [self._receive(rank, pipe, seconds) for rank, pipe in enumerate(self._pipes)]

    def _receive(self, rank: int, pipe: Connection, seconds: float) -> Any:
        if not pipe.poll(seconds):
            raise DadtError(f"rank {rank} of the measurement was silent for {seconds:g} s")
        try:
            return pipe.recv()
        except EOFError:
            raise DadtError(f"rank {rank} of the measurement has failed; its error stands above") from None
