"""Tells the shims of a host which workers to start. mpirun starts one shim per rank in place of the worker."""

from __future__ import annotations

from collections.abc import Iterable

from dadt.launch.agent.actions import AdmitShim, AgentOutbox, EndWorker, OwnWorker
from dadt.launch.agent.registry import Saying


class Shims:
    """Tracks the shims of one host, from the launcher's order to start workers until the worker of each shim has
    ended."""

    def __init__(self, ranks: Iterable[int], seconds: float, outbox: AgentOutbox, now: float) -> None:
        """ranks: ranks whose workers are started by shims. seconds: time within which all shims must connect."""
        self._awaited = set(ranks)
        self._deadline = now + seconds
        self._outbox = outbox
        self._lines: set[int] = set()
        """Numbers of the connections of shims that have received their orders."""
        self._started: set[int] = set()
        """Numbers of the connections of shims that have started their workers."""

    @property
    def pending(self) -> bool:
        """Whether some workers have not been started yet."""
        return bool(self._awaited) or self._lines > self._started

    def missing(self, now: float) -> str:
        """Return a sentence that names the ranks whose shims have not connected in time; empty if there are none."""
        if not self._awaited or now < self._deadline:
            return ""
        return f"mpirun did not start rank {', '.join(map(str, sorted(self._awaited)))} here in time"

    def dismiss(self) -> None:
        """Send no orders to start workers to shims from now on."""
        self._awaited.clear()
        self._lines &= self._started

    def shim(self, saying: Saying) -> None:
        """Handle a shim's request for the order to start its worker. A shim that comes too late gets no answer."""
        line, rank = saying.line.number, saying.frame["rank"]
        if rank in self._awaited:
            self._awaited.discard(rank)
            self._lines.add(line)
            self._outbox.put(AdmitShim(line, rank))

    def spawned(self, saying: Saying) -> None:
        """Handle a shim's report that it has started its worker."""
        line = saying.line.number
        if line in self._lines and line not in self._started:
            self._started.add(line)
            self._outbox.put(OwnWorker(line, saying.frame["pid"]))

    def admitted(self, line: int) -> bool:
        """Whether the shim on this connection has received its order."""
        return line in self._lines

    def ended(self, line: int, status: int, peak_memory: int) -> None:
        """Handle the end of the worker of the shim at connection `line`. Does nothing if no shim there was ordered to
        start one. status: the worker's exit status."""
        self._started.discard(line)
        if line in self._lines:
            self._lines.discard(line)
            self._outbox.put(EndWorker(line, status, peak_memory))
