"""Engines in a simulated world: their operations run once all ranks have come to them, and must be the same on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dadt import _core
from dadt.comm.executors.base import Connection
from simulation.world import Broken, World

LATENCY = 0.0005
"""Seconds of an operation of a few bytes."""
ENDLESS = 1e9


class NoMail:
    """Stands for the messages between two ranks, which named tensors do not use."""

    def abort(self) -> None: ...


class EngineRun:
    """One operation, as far as ranks have come to it."""

    def __init__(self, what: tuple[Any, ...]) -> None:
        self.what = what
        self.jobs: dict[int, _core.Job] = {}


class Engines:
    """The C++ engines of all ranks, whose operations this world runs: the n-th of all ranks is one operation."""

    def __init__(self, world: World, size: int, done: Callable[[int], None]) -> None:
        """done: called with a rank of which an operation has ended."""
        self._world, self._size, self._done = world, size, done
        self.engines = [_core.Engine(None, rank, size, ENDLESS) for rank in range(size)]
        self.connections = [Connection(engine, NoMail(), lambda: True) for engine in self.engines]  # type: ignore[arg-type]
        self.runs: list[EngineRun] = []
        self._next = [0] * size
        self._busy: set[int] = set()
        self.gone: set[int] = set()
        """Ranks whose processes have ended."""

    def look(self, rank: int) -> None:
        """Begin the rank's next operation, if it has one and the last one has ended."""
        if rank in self._busy or rank in self.gone or (job := self.engines[rank].pull(0.0)) is None:
            return
        number = self._next[rank]
        self._next[rank] += 1
        self._busy.add(rank)
        counts = tuple(job.layout.counts) if job.layout is not None else ()
        what = (job.kind, job.name, counts, job.layout and job.layout.dtype.name, job.reduction.name)
        what = (*what, job.participants, job.root)
        if number == len(self.runs):
            self.runs.append(EngineRun(what))
            self._world.note("engines", f"operation {number}: {what}")
        run = self.runs[number]
        if what != run.what:
            raise Broken(f"operation {number} of rank {rank} is {what}, of others {run.what}")
        run.jobs[rank] = job
        if len(run.jobs) == self._size:
            self._check_weights(run)
            for each in range(self._size):
                self._world.after(self._world.spread(LATENCY), lambda each=each: self._end(each, run))

    def _check_weights(self, run: EngineRun) -> None:
        given = sum(job.weight for job in run.jobs.values())
        if given != (run.what[5] or self._size):
            raise Broken(f"{run.what} is of {run.what[5]} ranks, and {given:g} take part")

    def _end(self, rank: int, run: EngineRun) -> None:
        if rank not in self._busy or rank in self.gone:
            return
        job = run.jobs[rank]
        if self.engines[rank].error is not None:
            return
        if job.kind == "exchange":
            job.allocate([8] * self._size)
        job.finish([b""] * self._size, float(self._size), 0.0, 0.0)
        self._busy.discard(rank)
        self.look(rank)
        self._done(rank)

    def leave(self, rank: int) -> None:
        """The rank's process has ended. Some libraries notice that, others never do."""
        self.gone.add(rank)
        if self._world.random.random() < 0.5:
            for other in set(range(self._size)) - self.gone:
                self._world.after(self._world.spread(LATENCY), lambda other=other: self._break(other))

    def _break(self, rank: int) -> None:
        if rank in self._busy and rank not in self.gone:
            self.engines[rank].abort("the connection was closed by a peer", lost=True)
            self._busy.discard(rank)
            self._done(rank)

    def close(self) -> None:
        for engine in self.engines:
            engine.abort("the simulation is over")
            engine.close(0.0)
