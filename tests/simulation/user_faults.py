"""What the user, or who runs the machines, does to a job."""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING

from dadt.launch.ending.signals import ENDING_SIGNALS
from simulation.fault import Fault, host_guilt, later
from simulation.starter import Hand

if TYPE_CHECKING:
    from simulation.job import SimulatedJob


@dataclass(frozen=True, slots=True)
class UserSignals(Fault):
    number: int
    again: float
    """After how many seconds the same comes once more; infinite: never."""

    def strike(self, job: SimulatedJob, *, once_more: bool = False) -> None:
        if job.launcher.process.alive:
            ends = self.number in ENDING_SIGNALS
            # Some ranks end by a signal for which they have no handler yet, or save and end while others begin, or
            # before one that is stopped, and so cannot agree with them on a step.
            all_train = job.checkpoint_signal == self.number and job.all_train
            agree = all_train and not any(worker.process.stops for worker in job.workers)
            deaf = {} if ends or agree else host_guilt(*job.machines)
            self._struck(job, f"the user sends signal {self.number}", user=ends, **deaf)
            job.launcher.signal(self.number)
            if not once_more:
                later(job, self.again, lambda: self.strike(job.run.attempt, once_more=True))


@dataclass(frozen=True, slots=True)
class HostPreempted(Fault):
    host: int

    def strike(self, job: SimulatedJob) -> None:
        agent = job.machines[self.host]
        if agent.process.alive:
            self._struck(job, f"host{self.host} is told to end", user=True, **host_guilt(self.host))
            agent.signal(SIGTERM)


@dataclass(frozen=True, slots=True)
class NodeInterrupted(Fault):
    """Ctrl-C on another host than the launcher's, on which `dadt run` was called by hand as well, or the end of the
    terminal there."""

    host: int
    again: float
    """After how many seconds it comes once more; infinite: never."""
    number: int = SIGINT

    def strike(self, job: SimulatedJob) -> None:
        agent = job.machines[self.host]
        if isinstance(job.starter, Hand) and agent.process.alive:
            self._struck(job, f"signal {self.number} on host{self.host}", **host_guilt(self.host))
            agent.signal(self.number)
            later(job, self.again, lambda: agent.signal(self.number))
