"""Which ranks are in a job: when some are lost, the launcher decides who trains on, and tells the agents."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence

from dadt.control import schema
from dadt.control.frame import Frame
from dadt.launch.agents import Agents
from dadt.launch.cause import Cause
from dadt.launch.hosts.slot import Slot
from dadt.launch.monitor.members import Rendezvous
from dadt.launch.monitor.watch import Loss, Watch

EXIT_SECONDS = 1.0
"""How long a worker may take to exit after it reported an uncaught exception."""


class Membership:
    """Each loss begins a new generation of ranks, which meet anew."""

    def __init__(
        self,
        least: int,
        slots: Sequence[Slot],
        rendezvous: Rendezvous,
        cause: Cause,
        agents: Agents,
        watch: Watch,
        say: Callable[[str, str], None],
    ) -> None:
        """least: training goes on while so many ranks are left; 0: it ends with any."""
        self._least = least
        self._slots = slots
        self._rendezvous = rendezvous
        self._cause = cause
        self._agents = agents
        self._watch = watch
        self._say = say
        self._overdue: dict[int, float] = {}
        """Lost ranks that have not exited yet, and when they are killed."""

    def lose(self, ranks: Collection[int], why: str) -> bool:
        """Have the others train on; whether enough are left. why: how these ranks were lost."""
        lost = [member for member in self._rendezvous.present if member.rank in ranks]
        if not lost or not self._left_without(ranks) >= self._least > 0:
            return False
        self._rendezvous.regroup(ranks, why)
        self._watch.regroups([Loss(rank=m.rank, host=m.host, step=m.step, time=m.lost, why=why) for m in lost])
        self._cause.excuse(ranks)
        left = [member.rank for member in self._rendezvous.present]
        hosts = [self._slots[rank].cross_rank for rank in left]
        told = {
            "generation": self._rendezvous.generation,
            "members": left,
            "firsts": [left[hosts.index(host)] for host in dict.fromkeys(hosts)],
            "text": why[: schema.TEXT],
        }
        self._agents.send_all(Frame("regroup", told))
        self._say(f"{why}: training goes on without it", "warning")
        return True

    def refusal(self, question: Frame) -> Frame | None:
        """The answer to a rank that has not heard of the newest generation yet, where it asks for what others do."""
        if question.kind not in ("exchange", "put", "get"):
            return None
        if question.get("generation", 0) == self._rendezvous.generation:
            return None
        return self._rendezvous.outdated(self._watch.losses[-1].why)

    def expect_end(self, rank: int) -> None:
        """A lost rank is about to exit: kill it if it does not."""
        self._overdue[rank] = time.monotonic() + EXIT_SECONDS

    def turn(self) -> None:
        """Call it as time passes."""
        now = time.monotonic()
        for rank in [rank for rank, at in self._overdue.items() if now >= at]:
            del self._overdue[rank]
            self._agents.send_all(Frame("signal", {"number": int(signal.SIGKILL), "rank": rank}))

    def _left_without(self, ranks: Collection[int]) -> int:
        """How many ranks train, or have trained to their end, if these do not."""
        present = self._rendezvous.present
        return sum(not (member.rank in ranks or (member.ended and not member.finished)) for member in present)
