"""What goes wrong in a worker, or in what it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.fault import FOR_GOOD, Fault, later
from simulation.worker_script import Exit, ScriptError

if TYPE_CHECKING:
    from simulation.job import SimulatedJob


@dataclass(frozen=True, slots=True)
class WorkerKilled(Fault):
    hinders = False
    rank: int
    for_memory: bool = False
    """Whether by the kernel, as the host has no memory left."""

    def strike(self, job: SimulatedJob) -> None:
        if (worker := job.worker(self.rank)) is not None:
            fatal = worker.trains and not worker.closing
            self._struck(job, f"rank {self.rank} is killed", ranks=frozenset([self.rank]), fatal=fatal)
            worker.agent.memory_kills += self.for_memory
            job.kill(self.rank)


@dataclass(frozen=True, slots=True)
class KilledAsItEnds(Fault):
    """A rank is killed as an operation of all ranks ends, so that some of them have its result, and others do not."""

    hinders = False
    rank: int
    operation: str
    """How the name of the operation begins."""

    def strike(self, job: SimulatedJob) -> None:
        job.awaited.append((self.operation, self._kill))

    def _kill(self, job: SimulatedJob, operation: str, by: int) -> bool:
        """Kill the rank if it takes part. Returns whether it was killed."""
        if (worker := job.worker(self.rank)) is None:
            return False
        fatal = worker.trains and not worker.closing
        self._struck(job, f"rank {self.rank} is killed as {operation} ends", ranks=frozenset([self.rank]), fatal=fatal)
        return job.kill(self.rank)


@dataclass(frozen=True, slots=True)
class NewWorkerKilled(Fault):
    """A new worker is killed before it trains with the others."""

    hinders = False
    stage: str
    """What it is about to do: ask, claim its rank, or take the state."""

    def strike(self, job: SimulatedJob) -> None:
        job.awaited.append((f"a new worker {self.stage}", self._kill))

    def _kill(self, job: SimulatedJob, what: str, by: int) -> bool:
        self._struck(job, f"{what}, and is killed: rank {by}", ranks=frozenset([by]), fatal=True)
        return job.kill(by)


@dataclass(frozen=True, slots=True)
class ScriptRaises(Fault):
    hinders = False
    rank: int
    kind: str = "RuntimeError"
    text: str = "an error of the script"

    def strike(self, job: SimulatedJob) -> None:
        if (worker := job.worker(self.rank)) is not None and not worker.closing:
            self._struck(job, f"the script of rank {self.rank} raises", ranks=frozenset([self.rank]))
            worker.doom = ScriptError(self.kind, self.text)


@dataclass(frozen=True, slots=True)
class ScriptExits(Fault):
    hinders = False
    rank: int
    code: int
    at_once: bool

    def strike(self, job: SimulatedJob) -> None:
        if (worker := job.worker(self.rank)) is not None and not worker.closing:
            how = "os._exit" if self.at_once else "sys.exit"
            self._struck(job, f"rank {self.rank} calls {how}({self.code})", ranks=frozenset([self.rank]))
            worker.doom = Exit(self.code, at_once=self.at_once)


@dataclass(frozen=True, slots=True)
class WorkerStops(Fault):
    hinders = False
    rank: int
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if (worker := job.worker(self.rank)) is not None:
            text = f"rank {self.rank} is stopped for {self.lasting:.1f} s"
            held = self.lasting == FOR_GOOD and worker.trains and not worker.closing
            self._struck(job, text, tries="ranks", ranks=frozenset([self.rank]), held=held)
            worker.stop()
            later(job, self.lasting, worker.go_on)


@dataclass(frozen=True, slots=True)
class StepSlow(Fault):
    hinders = False
    rank: int
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if (worker := job.worker(self.rank)) is not None:
            text = f"the next step of rank {self.rank} takes {self.lasting:.1f} s more"
            self._struck(job, text, tries="ranks", ranks=frozenset([self.rank]))
            worker.pause += self.lasting
