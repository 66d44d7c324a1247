"""Which ranks are in a job: when some are lost, or their connections break, the launcher decides who trains on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dadt.config import Config
from dadt.control import schema, shared_folder
from dadt.control.condition import HELD
from dadt.control.frame import Frame
from dadt.errors import NotResumed, Unproved
from dadt.launch.agents import Agents, Node
from dadt.launch.cause import Cause
from dadt.launch.handovers import Handovers
from dadt.launch.hosts.slot import Slot
from dadt.launch.joining import Joining
from dadt.launch.monitor.members import Member, Rendezvous
from dadt.launch.monitor.silence import Silences
from dadt.launch.monitor.waits import Reply
from dadt.launch.monitor.watch import Gauge, Loss, Watch
from dadt.launch.preemption import ranks
from dadt.launch.replacement import Replacements, replaces

NATURAL_SECONDS = 0.5
"""How long processes left by successful workers may take to end by themselves."""
EXIT_SECONDS = 1.0
"""How long a worker may take to exit after it reported an uncaught exception."""
EXPLAIN_SECONDS = 1.0
"""How long it may take from a broken connection until the end of the rank that has caused it is known."""
TRIALS = 3
"""Most times that all ranks connect again without a step between."""


@dataclass(frozen=True, slots=True)
class Request:
    """A rank's connection has failed, and it does not know why."""

    begun: float
    deadline: float
    why: str
    reply: Reply

    def answer(self, anew: bool, text: str = "") -> None:
        """anew: all connect again. text: why not, if the rank's own error does not say it."""
        self.reply(Frame("reconnect", {"anew": anew, "text": text}))


class Membership:
    """Each loss begins a new generation of ranks, which connect again. So does a connection that has failed though
    nobody was lost."""

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
        """Training goes on while at least this many ranks are left; 0: it ends when any is lost."""
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
        self._left: dict[int, str] = {}
        """Ranks that ended well before they came to their end, and what is to be said of them: they are lost once
        another rank waits, as all may be about to do the same."""
        self._requests: dict[int, Request] = {}
        """Rank to its request, made when its connection has failed, until that is answered."""
        self._trials: list[str] = []
        """The reasons why all have connected again since the last step, one for each time."""
        self._tried_at = -1
        """The furthest step of any rank when they last did so."""
        self._apart = config.algorithm == "gossip"
        """Whether no rank waits for another, as in gossip."""
        self._replacements = Replacements(agents.send_all, say, self._hears) if replaces(config) else None
        self._handovers = Handovers(agents.send_all, lambda rank: self.expect_end(rank, 0.0), patience)
        self._handed = 0
        """The newest generation that began with a new worker for which the others had waited."""
        self.joining: Joining | None = None
        """Hosts that come in the place of lost ones; None if none may."""
        self._told_to_end = False

    def can_lose(self, ranks: Collection[int]) -> bool:
        """Whether training goes on without these."""
        return self._left_without(ranks) >= self._least > 0

    def lose(self, ranks: Collection[int], why: str, it: str = "it") -> bool:
        """Have the others train on; whether enough are left. why: how these ranks were lost. it: who was."""
        lost = [member for member in self._rendezvous.present if member.rank in ranks]
        if not self.can_lose(ranks):
            return False
        if not lost:  # a host whose ranks were lost before
            return True
        self._rendezvous.regroup(ranks, why)
        losses = [Loss(rank=m.rank, host=m.host, step=m.step, time=m.lost, why=why) for m in lost]
        self._watch.regroups(losses, why)
        self._cause.excuse(ranks)
        self._tell(why)
        self._say(f"{why}: training goes on without {it}", "warning")
        return True

    def leaves(self, rank: int, why: str) -> bool:
        """A rank has ended with exit code 0, amid its training. Returns whether the others can train on without it."""
        if self.can_lose([*self._left, rank]):
            self._left[rank] = why
            return True
        return False

    def _lose_left(self) -> None:
        """Lose those that have left, if others need them."""
        waits = any(gauge.waits and not gauge.member.finished for gauge in self._here)
        if self._requests or waits or (self._apart and self._here):
            left, self._left = self._left, {}
            for rank, why in left.items():
                self.lose([rank], why)

    def reconnect(self, question: Frame, reply: Reply) -> None:
        """A rank's connection with the others has failed. It gets its answer once it is clear what follows."""
        now = time.monotonic()
        why = f"{self._rendezvous.members[question['rank']].named}: {question['text']}"
        request = Request(now, now + question["timeout"], why, reply)
        if question.get("generation", 0) == self._rendezvous.generation:
            self._requests[question["rank"]] = request
        else:
            request.answer(True)

    def takes(self, node: Node, frame: Frame) -> bool:
        """Whether a frame is about a host that is about to come."""
        return self.joining is not None and self.joining.takes(node, frame)

    def approach(self, question: Frame, reply: Reply) -> None:
        """A new worker asks how far the others are."""
        if self._replacements is None or self._apart or not self._rendezvous.members[question["rank"]].lost:
            reply(Frame("error", {"type": "DadtError", "message": "this rank is not one that could join"}))
        else:
            self._handovers.ask(question, reply)

    def give(self, answer: Frame, reply: Reply) -> None:
        """Pass a rank's answer on to a new worker."""
        reply(Frame("taken"))
        present = [member.rank for member in self._rendezvous.present]
        if self._replacements is not None and self._handovers.give(answer, self._rendezvous.generation, present):
            self._begin_anew("a new worker has ended before it could join")

    def _begin_anew(self, why: str) -> None:
        """Have all ranks connect again, though nobody is lost."""
        self._rendezvous.regroup([], why)
        self._watch.regroups([], why)
        self._tell(why)

    def failed(self, member: Member, error: str) -> None:
        """Send away a new worker whose script cannot be made again: no other starts in its place."""
        if self._replacements is not None and error == NotResumed.__name__:
            self._replacements.send_away(member.rank)

    def greeted(self, member: Member, pid: int) -> list[Frame]:
        """Note that a process of this rank has imported torch. If the rank had begun to train, its process has replaced
        itself since: returns the frame for all ranks that says so, for those that do not do so as well; else
        nothing."""
        if not member.claimed or member.ended or member.pid != pid:
            return []
        why = f"rank {member.rank} ({member.place}) has replaced itself (exec) after it had begun to train"
        death = Frame("death", {"text": why, "steps": max(0, member.step)})
        return [death] if self._rendezvous.start_over(member, why) else []

    def claimed(self, member: Member) -> None:
        """A process trains as this rank: if it is a lost one, it joins the others."""
        if member.lost and not self._apart and self._handovers.awaited != (member.rank, self._rendezvous.generation):
            self.expect_end(member.rank, 0.0)  # they have gone on without it
        elif member.lost:
            why = f"rank {member.rank} ({member.place}) joins"
            self._rendezvous.join(member, why)
            self._handed = self._rendezvous.generation if not self._apart else 0
            self._watch.joins(member)
            self._tell(why)

    def exited(self, member: Member, goes_on: bool) -> None:
        """Note that a rank's process has ended. goes_on: nothing has ended the job so far."""
        self._overdue.pop(member.rank, None)  # else a new worker in its place would be killed
        if self._handovers.ended(member.rank) and goes_on:
            self._begin_anew(f"rank {member.rank} ({member.place}) has ended before it could join")
        if self._replacements is not None and goes_on and member.lost and not self._at_end:
            self._replacements.exited(member)

    def _tell(self, why: str) -> None:
        """Send all ranks the list of those in the job now. New workers write no files where others do, on any host."""
        present = self._rendezvous.present
        firsts: dict[int, int] = {}
        for member in present:
            if not member.joined or all(each.joined for each in present):
                firsts.setdefault(self._slots[member.rank].cross_rank, member.rank)
        told: dict[str, object] = {
            "generation": self._rendezvous.generation,
            "members": [member.rank for member in present],
            "firsts": list(firsts.values()),
            "text": why[: schema.TEXT],
            "handed": self._handed,
        }
        places = {each.rank: self._slots[each.rank].cross_rank for each in present}
        seen = {rank: (place, self._agents.nodes[place].folder) for rank, place in places.items()}
        if writers := shared_folder.writers(seen, firsts.values()):
            told["writers"] = [writers.get(rank, -1) for rank in places]
        self._agents.send_all(Frame("regroup", told))
        self._handovers.begin_anew()
        self._answer_all(True)

    def refusal(self, question: Frame) -> Frame | None:
        """The answer to a rank that has not heard of the newest generation yet, where it asks for what others do."""
        if question.kind not in ("exchange", "put", "get"):
            return None
        if question.get("generation", 0) == self._rendezvous.generation:
            return None
        return self._rendezvous.outdated

    def expect_end(self, rank: int, seconds: float = EXIT_SECONDS) -> None:
        """A lost rank is about to exit: kill it if it does not within these seconds."""
        self._overdue[rank] = time.monotonic() + seconds

    def turn(self, goes_on: bool) -> None:
        """Call it as time passes. goes_on: nothing has ended the job so far."""
        now = time.monotonic()
        self._handovers.turn()
        if self._left and goes_on:
            self._lose_left()
        if self._least and goes_on:
            self._give_up_silent()
            self._connect_anew(now)
        if not (self._least and goes_on):
            self._answer_all(False, self._cut(now))
        for rank in [rank for rank, request in self._requests.items() if now >= request.deadline]:
            self._requests.pop(rank).answer(False, self._cut(now))
        if self._replacements is not None and goes_on and not self._told_to_end:
            self._replace(self._replacements)
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
            if self.joining is not None:
                self.joining.turn()
        elif self._apart and (new := [member for member in present if member.joined and not member.finished]):
            why = f"rank {new[0].rank} ({new[0].place}) leaves, as those that began the job are at their end"
            self._say(why, "info")
            ranks = [member.rank for member in new]
            self._rendezvous.regroup(ranks, why)
            self._cause.excuse(ranks)
            self._tell(why)
            for rank in ranks:
                self.expect_end(rank, 0.0)

    def _hears(self, rank: int) -> bool:
        """Whether heartbeats pass between the host of a lost rank and those of all that train, or it is gone: then
        another host may take its place."""
        here, places = self._slots[rank].cross_rank, {self._slots[gauge.rank].cross_rank for gauge in self._here}
        cut = any(self._silences.between(here, place) for place in places - {here})
        return not cut or self._agents.nodes[here].ended

    @property
    def _at_end(self) -> bool:
        """Whether the ranks that began the job, as far as they are left, have all trained to their end."""
        began = [member for member in self._rendezvous.present if not member.joined]
        return bool(began) and all(member.finished for member in began)

    def _give_up_silent(self) -> None:
        """Lose the ranks for which all others wait too long. Where every rank waits, a way between hosts may be cut:
        lose one of them."""
        here = self._here
        since = time.monotonic() - self._patience
        if self._apart:
            self._give_up_held(here, since)
            return
        silent = [gauge for gauge in here if not self._waits(gauge)]
        trains = any(gauge.waits and not (gauge.member.finished or gauge.waiting.starts) for gauge in here)
        some_finished = any(member.finished for member in self._rendezvous.present)
        ends = some_finished and all(gauge.member.held for gauge in silent)
        if not (trains or ends):  # the start has a deadline of its own, and at the end a rank may take its time
            return
        if silent and all(gauge.acted < since for gauge in silent):
            self._give_up([gauge.member for gauge in silent])
        elif not silent:
            self._give_up_cut_off(here, since)

    def _give_up(self, silent: Sequence[Member]) -> None:
        """Lose these ranks, which were silent for `_patience` seconds. Where too few are left, all that wait learn of
        it."""
        many = len(silent) > 1
        it = "them" if many else "it"
        names = [f"rank {m.rank} ({m.place}{f'; {HELD[m.condition]}' if many and m.held else ''})" for m in silent]
        why = f"{' and '.join(names)} {'were' if many else 'was'} silent for {self._patience:g} s"
        why += f", {HELD[silent[0].condition]}" if silent[0].held and not many else ""
        if self._kill([member.rank for member in silent], why, it):
            return
        why += f", and too few are left without {it}"
        self._least = 0  # nobody trains on
        self._answer_all(False, why)
        self._rendezvous.refuse(Frame("error", {"type": "CommTimeout", "message": why[: schema.TEXT]}))

    def _give_up_cut_off(self, here: Sequence[Gauge], since: float) -> None:
        places = {self._slots[gauge.rank].cross_rank for gauge in here}
        if (cut := self._silences.cut_off(places, since)) is not None:
            place, why = cut
            self._kill([gauge.rank for gauge in here if self._slots[gauge.rank].cross_rank == place], why)

    def _cut(self, now: float) -> str:
        """What is known of a cut between hosts whose ranks are in the job, of which a library says less; else empty."""
        places = {self._slots[member.rank].cross_rank for member in self._rendezvous.present}
        return cut[1] if (cut := self._silences.cut_off(places, now)) is not None else ""

    def _give_up_held(self, here: Sequence[Gauge], since: float) -> None:
        """Where no rank waits for another, lose those that are stopped for too long, and those that make no step while
        all others are at their end. At the end all wait for all, so there a cut way counts, too."""
        others_ended = sum(gauge.member.finished for gauge in here)
        for member in [gauge.member for gauge in here if not gauge.member.finished and gauge.member.seen < since]:
            if member.held or 0 < others_ended == len(here) - 1:
                why = f"rank {member.rank} ({member.place}) was silent for {self._patience:g} s"
                self._kill([member.rank], why + (f", {HELD[member.condition]}" if member.held else ""))
        if others_ended == len(here):
            self._give_up_cut_off(here, since)

    def _connect_anew(self, now: float) -> None:
        """Have all ranks connect again where a connection has failed, every rank waits, and nothing is known to be lost
        or cut: not before each agent has been heard since, as it would have reported a rank that has ended."""
        here = self._here
        first = min(self._requests.values(), key=lambda request: request.begun, default=None)
        if first is None or now - first.begun < EXPLAIN_SECONDS or not (self._apart or all(map(self._waits, here))):
            return
        places = {self._slots[gauge.rank].cross_rank for gauge in here}
        heard = min(self._agents.nodes[place].heard for place in places)
        if heard < first.begun or self._silences.cut_off(places, now) is not None:
            return
        if (step := max(gauge.member.step for gauge in here)) > self._tried_at:
            self._trials.clear()
        self._tried_at = step
        new = [gauge.rank for gauge in here if gauge.member.joined and gauge.member.step < 0]
        if new:  # with the others all went well
            self._kill(new, f"{first.why}: since {ranks(new)} joined, connecting fails")
        elif len(here) < len(self._rendezvous.present):  # some have left
            self._answer_all(False)
        elif len(self._trials) == TRIALS:
            self._least = 0  # it is the same for all: nobody would be better off without another
            self._answer_all(
                False, f"{self._trials[0]}; since then all ranks have connected anew {TRIALS} times in vain"
            )
        else:
            # One rank knows who answered in the place of another, of which others know that it has not.
            every = [request.why for request in self._requests.values()]
            why = next((why for why in every if Unproved.answered in why), first.why)
            self._trials.append(why)
            self._begin_anew(why)
            self._say(f"{why}: all ranks connect anew", "warning")

    def _answer_all(self, anew: bool, text: str = "") -> None:
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.answer(anew, text[: schema.TEXT])

    @property
    def _here(self) -> list[Gauge]:
        return [gauge for gauge in self._watch.gauges if not (gauge.member.lost or gauge.member.ended)]

    def _waits(self, gauge: Gauge) -> bool:
        return (gauge.waits or gauge.member.finished) and not gauge.member.held

    def _kill(self, ranks: Collection[int], why: str, it: str = "it") -> bool:
        """Lose ranks that still run, as `lose` does, and have their processes killed."""
        goes_on = self.lose(ranks, why, it)
        for rank in ranks if goes_on else ():
            self.expect_end(rank, 0.0)
        return goes_on

    def _left_without(self, ranks: Collection[int]) -> int:
        """How many ranks train, or have trained to their end, if these do not."""
        present = self._rendezvous.present
        return sum(not (member.rank in ranks or (member.ended and not member.finished)) for member in present)
