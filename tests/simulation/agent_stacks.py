"""The stacks of a host's workers, as its agent gathers them: before workers are stopped, and for those who ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dadt.control.frame import Frame
from dadt.launch.agent.dump import ANSWER_SECONDS
from dadt.launch.agent.host_job import HostJob
from dadt.launch.agent.supervisor import STACK_SECONDS

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.worker import Worker

WRITE_SECONDS = 0.02
"""What a worker takes to write its stacks."""


class AgentStacks:
    """Stacks that are being written, which a worker that stands still does not write."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._inquiries: list[tuple[float, Frame]] = []
        self._dump: tuple[float, Sequence[Worker]] | None = None  # when stacks are complete, and who writes them

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._inquiries)

    def answers(self) -> list[Frame]:
        """The answers that are due now, each once."""
        if not self._inquiries:
            return []
        now = self._agent.world.now
        due, self._inquiries = (
            [frame for at, frame in self._inquiries if now >= at],
            [each for each in self._inquiries if now < each[0]],
        )
        return due

    def inquire(self, host: HostJob, number: int, ranks: Sequence[int]) -> None:
        """Ask these ranks for their stacks."""
        agent = self._agent
        offers = {rank for rank, *_ in host.registry.dumps.values()}
        late = any(not agent.workers[rank].process.runs for rank in ranks)
        at = agent.world.now + (ANSWER_SECONDS if late else WRITE_SECONDS)
        for rank in ranks:
            problem = "" if rank in offers and agent.workers[rank].process.runs else "it did not answer"
            header = {"number": number, "rank": rank, "problem": problem}
            self._inquiries.append((at, Frame("stack", header, b"" if problem else b"stack\n")))

    def dump(self, asked: Sequence[Worker]) -> None:
        """Have these workers write their stacks before they are stopped."""
        written = [worker for worker in asked if worker.process.runs]
        seconds = 0.0 if not asked else WRITE_SECONDS if len(written) == len(asked) else STACK_SECONDS
        self._dump = self._agent.world.now + seconds, written

    def read(self, host: HostJob) -> None:
        """Read what was written, once it is complete."""
        if self._dump is not None and self._agent.world.now >= self._dump[0]:
            written, self._dump = self._dump[1], None
            host.dumped([(worker.rank, worker.pid, b"stack\n") for worker in written])
