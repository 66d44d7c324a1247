"""Which ranks are in a job: when some are lost, the launcher decides who trains on, and tells the agents."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence

from dadt.config import Config
from dadt.control import schema
from dadt.control.condition import HELD
from dadt.control.frame import Frame
from dadt.launch.agents import Agents
from dadt.launch.cause import Cause
from dadt.launch.hosts.slot import Slot
from dadt.launch.monitor.members import Member, Rendezvous
from dadt.launch.monitor.silence import Silences
from dadt.launch.monitor.watch import Loss, Watch
from dadt.launch.replacement import Replacements, replaces

NATURAL_SECONDS = 0.5
"""How long processes left by successful workers may take to end by themselves."""
EXIT_SECONDS = 1.0
"""How long a worker may take to exit after it reported an uncaught exception."""


class Membership:
    """Each loss begins a new generation of ranks, which meet anew."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[Slot],
        rendezvous: Rendezvous,
        cause: Cause,
        agents: Agents,
        watch: Watch,
        silences: Silences,
        patience: float,
        say: Callable[[str, str], None],
    ) -> None:
        """patience: seconds for which ranks wait for a silent one."""
        self._least = config.min_np
        """Training goes on while so many ranks are left; 0: it ends with any."""
        self._slots = slots
        self._rendezvous = rendezvous
        self._cause = cause
        self._agents = agents
        self._watch = watch
        self._silences = silences
        self._patience = patience
        self._say = say
        self._overdue: dict[int, float] = {}
        """Lost ranks that have not exited yet, and when they are killed."""
        self._replacements = Replacements(agents.send_all, say) if replaces(config) else None
        self._told_to_end = False

    def can_lose(self, ranks: Collection[int]) -> bool:
        """Whether training goes on without these."""
        return self._left_without(ranks) >= self._least > 0

    def lose(self, ranks: Collection[int], why: str) -> bool:
        """Have the others train on; whether enough are left. why: how these ranks were lost."""
        lost = [member for member in self._rendezvous.present if member.rank in ranks]
        if not self.can_lose(ranks):
            return False
        if not lost:  # a host whose ranks were lost before
            return True
        self._regroup(ranks, why)
        self._watch.regroups([Loss(rank=m.rank, host=m.host, step=m.step, time=m.lost, why=why) for m in lost])
        self._say(f"{why}: training goes on without it", "warning")
        return True

    def claimed(self, member: Member) -> None:
        """A process trains as this rank: if it is a lost one, it joins the others."""
        if member.lost:
            why = f"rank {member.rank} ({member.place}) joins"
            self._rendezvous.join(member, why)
            self._tell(why)
            self._watch.joins(member)

    def exited(self, member: Member, goes_on: bool) -> None:
        """Its process has ended. goes_on: nothing has ended the job so far."""
        if self._replacements is not None and goes_on and member.lost and not self._at_end:
            self._replacements.exited(member)

    def _regroup(self, ranks: Collection[int], why: str) -> None:
        self._rendezvous.regroup(ranks, why)
        self._cause.excuse(ranks)
        self._tell(why)

    def _tell(self, why: str) -> None:
        """All ranks, who is in the job now. New workers write no files where others do."""
        present = self._rendezvous.present
        firsts: dict[int, int] = {}
        for member in present:
            if not member.joined or all(each.joined for each in present):
                firsts.setdefault(self._slots[member.rank].cross_rank, member.rank)
        told = {
            "generation": self._rendezvous.generation,
            "members": [member.rank for member in present],
            "firsts": list(firsts.values()),
            "text": why[: schema.TEXT],
        }
        self._agents.send_all(Frame("regroup", told))

    def refusal(self, question: Frame) -> Frame | None:
        """The answer to a rank that has not heard of the newest generation yet, where it asks for what others do."""
        if question.kind not in ("exchange", "put", "get"):
            return None
        if question.get("generation", 0) == self._rendezvous.generation:
            return None
        return self._rendezvous.outdated(self._watch.losses[-1].why)

    def expect_end(self, rank: int, seconds: float = EXIT_SECONDS) -> None:
        """A lost rank is about to exit: kill it if it does not within these seconds."""
        self._overdue[rank] = time.monotonic() + seconds

    def turn(self, goes_on: bool) -> None:
        """Call it as time passes. goes_on: nothing has ended the job so far."""
        if self._least and goes_on:
            self._give_up_silent()
        if self._replacements is not None and goes_on and not self._told_to_end:
            self._replace(self._replacements)
        now = time.monotonic()
        for rank in [rank for rank, at in self._overdue.items() if now >= at]:
            del self._overdue[rank]
            self._agents.send_all(Frame("signal", {"number": int(signal.SIGKILL), "rank": rank}))

    def _replace(self, replacements: Replacements) -> None:
        present = self._rendezvous.present
        if all(member.ended for member in present):
            self._told_to_end = True
            self._agents.send_all(Frame("stop", {"natural": NATURAL_SECONDS}))
            return
        if not self._at_end:
            replacements.turn()
        elif new := [member for member in present if member.joined and not member.finished]:
            why = f"rank {new[0].rank} ({new[0].place}) leaves, as those that began the job are at their end"
            self._regroup([member.rank for member in new], why)
            self._say(why, "info")
            for member in new:
                self.expect_end(member.rank, 0.0)

    @property
    def _at_end(self) -> bool:
        """Those that began the job, as far as they are left, have trained to their end."""
        began = [member for member in self._rendezvous.present if not member.joined]
        return bool(began) and all(member.finished for member in began)

    def _give_up_silent(self) -> None:
        """Lose the ranks for which all others wait too long. Where every rank waits, a way between hosts may be cut:
        lose one of them."""
        here = [gauge for gauge in self._watch.gauges if not (gauge.member.lost or gauge.member.ended)]
        silent = [gauge.member for gauge in here if not (gauge.waits or gauge.member.finished)]
        if not any(gauge.waits and not gauge.member.finished for gauge in here):
            return  # at the end of training a rank may take its time
        since = time.monotonic() - self._patience
        if silent and all(member.seen < since for member in silent):
            first = silent[0]
            why = f"rank {first.rank} ({first.place}) was silent for {self._patience:g} s"
            why += f", {HELD[first.condition]}" if first.held else ""
            self._kill([member.rank for member in silent], why)
        elif not silent:
            places = {self._slots[gauge.rank].cross_rank for gauge in here}
            if (cut := self._silences.cut_off(places, since)) is not None:
                place, why = cut
                self._kill([gauge.rank for gauge in here if self._slots[gauge.rank].cross_rank == place], why)

    def _kill(self, ranks: Collection[int], why: str) -> None:
        if self.lose(ranks, why):
            for rank in ranks:
                self.expect_end(rank, 0.0)

    def _left_without(self, ranks: Collection[int]) -> int:
        """How many ranks train, or have trained to their end, if these do not."""
        present = self._rendezvous.present
        return sum(not (member.rank in ranks or (member.ended and not member.finished)) for member in present)
