"""Which worker a shim is to run: mpirun starts one per rank, and each asks the agent."""

from __future__ import annotations

from collections.abc import Iterable

from dadt.control.frame import Frame
from dadt.launch.agent.actions import AdmitShim, AgentOutbox, EndWorker, OwnWorker


class Shims:
    """The shims of one host, from the order to start workers until each has ended."""

    def __init__(self, ranks: Iterable[int], seconds: float, outbox: AgentOutbox, now: float) -> None:
        """ranks: whose workers shims start. seconds: in which these have to come."""
        self._awaited = set(ranks)
        self._deadline = now + seconds
        self._outbox = outbox
        self._lines: dict[int, int] = {}
        """Line to the rank of a shim that has its order."""
        self._started: set[int] = set()
        """Lines of shims that have started their workers."""

    @property
    def pending(self) -> bool:
        """Whether some workers have not been started yet."""
        return bool(self._awaited) or self._lines.keys() > self._started

    def missing(self, now: float) -> str:
        """A sentence that names the overdue shims; empty as long as none is."""
        if not self._awaited or now < self._deadline:
            return ""
        return f"mpirun did not start rank {', '.join(map(str, sorted(self._awaited)))} here in time"

    def dismiss(self) -> None:
        """Give no order to the shims that come from now on."""
        self._awaited.clear()
        self._lines = {line: rank for line, rank in self._lines.items() if line in self._started}

    def shim(self, line: int, frame: Frame) -> None:
        """A shim asks for its order. Where it was dismissed, it sees its line closed."""
        rank = frame["rank"]
        if rank in self._awaited:
            self._awaited.discard(rank)
            self._lines[line] = rank
            self._outbox.put(AdmitShim(line, rank))

    def spawned(self, line: int, frame: Frame) -> None:
        """A shim has started its worker."""
        if line in self._lines and line not in self._started:
            self._started.add(line)
            self._outbox.put(OwnWorker(line, frame["pid"]))

    def admitted(self, line: int) -> bool:
        """Whether the shim on this connection has received its order."""
        return line in self._lines

    def ended(self, line: int, status: int, peak_memory: int) -> None:
        """The worker of a shim has ended with this status, if there is a shim on this line."""
        self._started.discard(line)
        if self._lines.pop(line, None) is not None:
            self._outbox.put(EndWorker(line, status, peak_memory))
