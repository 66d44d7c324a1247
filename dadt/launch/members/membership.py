"""Which ranks are in a job: when some are lost, or their connections break, the launcher decides who trains on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from signal import SIGKILL

from dadt.config import Config
from dadt.control import schema
from dadt.control.condition import HELD
from dadt.control.frame import Frame
from dadt.errors import NotResumed, Unproved
from dadt.launch.actions import Event, Outbox, Reply
from dadt.launch.ending.cause import Cause
from dadt.launch.ending.preemption import ranks
from dadt.launch.hosts.slot import Slot
from dadt.launch.members.generation import regroup
from dadt.launch.members.handovers import Handovers
from dadt.launch.members.joining import Joining
from dadt.launch.members.member import Member
from dadt.launch.members.node import Node
from dadt.launch.members.rendezvous import Rendezvous
from dadt.launch.members.replacement import Replacements, replaces
from dadt.launch.members.silence import Silences
from dadt.launch.members.waits import SAID_SECONDS
from dadt.launch.monitor.watch import Watch

NATURAL_SECONDS = 0.5
"""How long processes left by successful workers may take to end by themselves."""
EXIT_SECONDS = 1.0
"""How long a worker may take to exit after it reported an uncaught exception."""
EXPLAIN_SECONDS = 1.0
"""How long it may take from a broken connection until the end of the rank that has caused it is known."""
TRIALS = 3
"""Most times that all ranks connect again without a step between."""


@dataclass(frozen=True, slots=True)
class ReconnectRequest:
    """A rank's connection has failed, and it does not know why."""

    begun: float
    deadline: float
    why: str
    reply: Reply

    def answer(self, anew: bool, text: str, now: float) -> None:
        """anew: all connect again. text: why not, if the rank's own error does not say it."""
        self.reply(Frame("reconnect", {"anew": anew, "text": text}), now)


class Membership:
    """Each loss begins a new generation of ranks, which connect again. So does a connection that has failed though
    nobody was lost."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[Slot],
        rendezvous: Rendezvous,
        cause: Cause,
        nodes: Sequence[Node],
        watch: Watch,
        silences: Silences,
        patience: float,
        joining: Joining | None,
        outbox: Outbox,
    ) -> None:
        """patience: seconds for which ranks wait for a silent one. joining: None where no host may come."""
        self._least = config.min_np
        """Training goes on while at least this many ranks are left; 0: it ends when any is lost."""
        self._slots = slots
        self._rendezvous = rendezvous
        self._cause = cause
        self._nodes = nodes
        self._watch = watch
        self._silences = silences
        self._patience = patience
        self._outbox = outbox
        self._overdue: dict[int, float] = {}
        """Lost ranks that have not exited yet, and when they are killed."""
        self._left: dict[int, str] = {}
        """Ranks that ended well before they came to their end, and what is to be said of them: they are lost once
        another rank waits, as all may be about to do the same."""
        self._requests: dict[int, ReconnectRequest] = {}
        """Rank to its request, made when its connection has failed, until that is answered."""
        self._trials: list[str] = []
        """The reasons why all have connected again since the last step, one for each time."""
        self._tried_at = -1
        """The furthest step of any rank when they last did so."""
        self._apart = config.algorithm == "gossip"
        """Whether no rank waits for another, as in gossip."""
        self._replacements = Replacements(outbox, self._hears) if replaces(config) else None
        self._handovers = Handovers(outbox, self.kill, patience)
        self._handed = 0
        """The newest generation that began with a new worker for which the others had waited."""
        self._joining = joining
        self._moved, self._told_to_end = float("-inf"), False
        self._deaths: list[Frame] = []
        """Frames about ended ranks that must still be sent to all ranks."""

    def can_lose(self, ranks: Collection[int]) -> bool:
        """Whether training goes on without these."""
        return self._left_without(ranks) >= self._least > 0

    def lose(self, ranks: Collection[int], why: str, now: float, it: str = "it") -> bool:
        """Have the others train on; whether enough are left. why: how these ranks were lost. it: who was."""
        lost = [member for member in self._rendezvous.present if member.rank in ranks]
        if not self.can_lose(ranks):
            return False
        if not lost:  # a host whose ranks were lost before
            return True
        self._rendezvous.regroup(ranks, why, now)
        self._watch.regroups(lost, why, now)
        self._cause.excuse(ranks)
        self._tell(why, now)
        self._outbox.say(f"{why}: training goes on without {it}", "warning")
        return True

    def leaves(self, rank: int, why: str) -> bool:
        """A rank has ended with exit code 0, amid its training. Returns whether the others can train on without it."""
        if self.can_lose([*self._left, rank]):
            self._left[rank] = why
            return True
        return False

    def _lose_left(self, now: float) -> None:
        """Lose those that have left, if others need them."""
        waits = any(member.waits(now) and not member.finished for member in self._here)
        if self._requests or waits or (self._apart and self._here):
            left, self._left = self._left, {}
            for rank, why in left.items():
                self.lose([rank], why, now)

    def reconnect(self, event: Event) -> None:
        """A rank's connection with the others has failed. It gets its answer once it is clear what follows."""
        question, reply, now = event.frame, self._rendezvous.reply_to(event), event.now
        why = f"{self._rendezvous.members[question['rank']].named}: {question['text']}"
        request = ReconnectRequest(now, now + question["timeout"], why, reply)
        if question.get("generation", 0) == self._rendezvous.generation:
            self._requests[question["rank"]] = request
        else:
            request.answer(True, "", now)

    def approach(self, event: Event) -> None:
        """A new worker asks how far the others are."""
        reply = self._rendezvous.reply_to(event)
        if self._replacements is None or self._apart or not self._rendezvous.members[event.frame["rank"]].lost:
            reply(Frame("error", {"type": "DadtError", "message": "this rank is not one that could join"}), event.now)
        else:
            self._handovers.ask(event, reply)

    def give(self, event: Event) -> None:
        """Pass a rank's answer on to a new worker."""
        self._rendezvous.reply_to(event)(Frame("taken"), event.now)
        present = [member.rank for member in self._rendezvous.present]
        if self._replacements is not None and self._handovers.give(event, self._rendezvous.generation, present):
            self._begin_anew("a new worker has ended before it could join", event.now)

    def _begin_anew(self, why: str, now: float) -> None:
        """Have all ranks connect again, though nobody is lost."""
        self._rendezvous.regroup([], why, now)
        self._watch.regroups([], why, now)
        self._tell(why, now)

    def failed(self, member: Member, error: str) -> None:
        """Send away a new worker whose script cannot be made again: no other starts in its place."""
        if self._replacements is not None and error == NotResumed.__name__:
            self._replacements.send_away(member.rank)

    def hello(self, event: Event) -> None:
        """A process of a rank has imported torch. If the rank had begun to train, its process has replaced itself
        since: all ranks hear of it, for those that do not do so as well."""
        member, now = self._rendezvous.members[event.frame["rank"]], event.now
        if member.claimed and not member.ended and member.pid == event.frame["pid"]:
            why = f"rank {member.rank} ({member.place}) has replaced itself (exec) after it had begun to train"
            steps = max(0, member.step)
            if self._rendezvous.start_over(member, why, now):
                self.tell_of_death(why, steps)
        member.sign("has imported torch, not begun to train", now)

    def tell_of_death(self, text: str, steps: int | None = None) -> None:
        """Have all ranks hear of the end of one, once the stacks are asked for, as they move on when they hear of it.
        steps: those that it has done, where it ended well."""
        self._deaths.append(Frame("death", {"text": text} | ({} if steps is None else {"steps": steps})))

    def claim(self, event: Event) -> None:
        """A process trains as a rank: if it is a lost one, it joins the others."""
        member, now = self._rendezvous.members[event.frame["rank"]], event.now
        member.pid, member.claimed = event.frame["pid"], True
        member.sign("has begun to train", now)
        awaited = self._apart or self._handovers.awaited == (member.rank, self._rendezvous.generation)
        if member.lost and (self._told_to_end or not awaited):
            self.kill(member.rank, now)  # they have gone on without it
        elif member.lost:
            why = f"rank {member.rank} ({member.place}) joins"
            self._rendezvous.join(member, why, now)
            self._handed = self._rendezvous.generation if not self._apart else 0
            self._watch.joins(member, now)
            self._tell(why, now)

    def exited(self, member: Member, goes_on: bool, now: float) -> None:
        """Note that a rank's process has ended. goes_on: nothing has ended the job so far."""
        self._overdue.pop(member.rank, None)  # else a new worker in its place would be killed
        self._requests.pop(member.rank, None)
        if self._handovers.ended(member.rank) and goes_on:
            self._begin_anew(f"rank {member.rank} ({member.place}) has ended before it could join", now)
        if self._replacements is not None and goes_on and member.lost and not self._at_end:
            self._replacements.exited(member, now)

    def _tell(self, why: str, now: float) -> None:
        """Send all ranks the list of those in the job now."""
        self._outbox.send_all(regroup(self._rendezvous, self._slots, self._nodes, self._handed, why))
        self._handovers.begin_anew()
        self._answer_all(True, "", now)

    def expect_end(self, rank: int, now: float) -> None:
        """A lost rank is about to exit: kill it if it does not do so soon."""
        self._overdue[rank] = now + EXIT_SECONDS

    def kill(self, rank: int, now: float) -> None:
        """Have the process of a lost rank killed."""
        self._overdue[rank] = now

    def turn(self, goes_on: bool, now: float) -> None:
        """Call it as time passes. goes_on: nothing has ended the job so far."""
        self._handovers.turn(now)
        if self._left and goes_on:
            self._lose_left(now)
        if self._least and goes_on:
            self._give_up_silent(now)
            self._connect_anew(now)
        if not (self._least and goes_on):
            self._answer_all(False, self._obstacle(now), now)
        for rank in [rank for rank, request in self._requests.items() if now >= request.deadline]:
            self._requests.pop(rank).answer(False, self._obstacle(now), now)
        if self._replacements is not None and goes_on and not self._told_to_end:
            self._replace(self._replacements, now)
        for rank in [rank for rank, at in self._overdue.items() if now >= at]:
            del self._overdue[rank]
            self._outbox.send_all(Frame("signal", {"number": int(SIGKILL), "rank": rank}))
        for death in self._deaths:
            self._outbox.send_all(death)
        self._deaths.clear()

    def _replace(self, replacements: Replacements, now: float) -> None:
        present = self._rendezvous.present
        if all(member.ended for member in present):
            self._told_to_end = True
            self._outbox.send_all(Frame("stop", {"natural": NATURAL_SECONDS}))
            return
        if not self._at_end:
            replacements.turn(now)
            if self._joining is not None:
                self._joining.turn(now)
        elif self._apart and (new := [member for member in present if member.joined and not member.finished]):
            why = f"rank {new[0].rank} ({new[0].place}) leaves, as those that began the job are at their end"
            self._outbox.say(why)
            ranks = [member.rank for member in new]
            self._rendezvous.regroup(ranks, why, now)
            self._cause.excuse(ranks)
            self._tell(why, now)
            for rank in ranks:
                self.kill(rank, now)

    def _hears(self, rank: int, now: float) -> bool:
        """Whether heartbeats pass between the host of a lost rank and those of all that train, or it is gone: then
        another host may take its place."""
        here, places = self._slots[rank].cross_rank, {self._slots[member.rank].cross_rank for member in self._here}
        cut = any(self._silences.between(here, place, now) for place in places - {here})
        return not cut or self._nodes[here].ended

    @property
    def _at_end(self) -> bool:
        """Whether the ranks that began the job, as far as they are left, have all trained to their end."""
        began = [member for member in self._rendezvous.present if not member.joined]
        return bool(began) and all(member.finished for member in began)

    def _give_up_silent(self, now: float) -> None:
        """Lose the ranks for which all others wait too long. Where every rank waits, a way between hosts may be cut:
        lose one of them."""
        here = self._here
        since = now - self._patience
        if self._apart:
            self._give_up_held(here, since, now)
            return
        silent = [member for member in here if not self._waits(member, now)]
        trains = any(member.waits(now) and not (member.finished or member.waiting.starts) for member in here)
        some_finished = any(member.finished for member in self._rendezvous.present)
        ends = some_finished and all(member.held for member in silent)
        if not (trains or ends):  # the start has a deadline of its own, and at the end a rank may take its time
            self._moved = now
        if now - self._moved < SAID_SECONDS:  # the others may wait as well
            return
        if silent and all(member.acted < since for member in silent):
            self._give_up(silent, now)
        elif not silent:
            self._give_up_cut_off(here, since, now)

    def _give_up(self, silent: Sequence[Member], now: float) -> None:
        """Lose these ranks, which were silent for `_patience` seconds."""
        many = len(silent) > 1
        names = [f"rank {m.rank} ({m.place}{f'; {HELD[m.condition]}' if many and m.held else ''})" for m in silent]
        why = f"{' and '.join(names)} {'were' if many else 'was'} silent for {self._patience:g} s"
        why += f", {HELD[silent[0].condition]}" if silent[0].held and not many else ""
        self._lose_awaited([member.rank for member in silent], why, now, "them" if many else "it")

    def _lose_awaited(self, ranks: Collection[int], why: str, now: float, it: str = "it") -> None:
        """Lose ranks for which others wait. Where too few are left, all that wait learn of it."""
        if self._lose_running(ranks, why, now, it):
            return
        why += f", and too few are left without {it}"
        self._least = 0  # nobody trains on
        self._answer_all(False, why, now)
        self._rendezvous.refuse(Frame("error", {"type": "CommTimeout", "message": why[: schema.TEXT]}), now)

    def _give_up_cut_off(self, here: Sequence[Member], since: float, now: float) -> None:
        places = {self._slots[member.rank].cross_rank for member in here}
        if (cut := self._silences.cut_off(places, since, now)) is not None:
            place, why = cut
            ranks = [member.rank for member in here if self._slots[member.rank].cross_rank == place]
            self._lose_awaited(ranks, why, now)

    def _cut(self, now: float) -> str:
        """What is known of a cut between hosts whose ranks are in the job, of which a library says less; else empty."""
        places = {self._slots[member.rank].cross_rank for member in self._rendezvous.present}
        return cut[1] if (cut := self._silences.cut_off(places, now, now)) is not None else ""

    def _obstacle(self, now: float) -> str:
        """What keeps ranks from connecting, as far as it is known: a cut, or ranks that cannot go on; else empty."""
        held = ", ".join(member.named for member in self._here if member.held)
        return self._cut(now) or (f"{held} did not connect"[: schema.TEXT] if held else "")

    def _give_up_held(self, here: Sequence[Member], since: float, now: float) -> None:
        """Where no rank waits for another, lose those that are stopped for too long, and those that make no step while
        all others are at their end. At the end all wait for all, so there a cut way counts, too."""
        others_ended = sum(member.finished for member in here)
        for member in [member for member in here if not member.finished and member.seen < since]:
            if member.held or 0 < others_ended == len(here) - 1:
                why = f"rank {member.rank} ({member.place}) was silent for {self._patience:g} s"
                self._lose_running([member.rank], why + (f", {HELD[member.condition]}" if member.held else ""), now)
        if others_ended == len(here):
            self._give_up_cut_off(here, since, now)

    def _connect_anew(self, now: float) -> None:
        """Have all ranks connect again where a connection has failed, every rank waits, and nothing is known to be lost
        or cut: not before each agent has been heard since, as it would have reported a rank that has ended."""
        here = self._here
        first = min(self._requests.values(), key=lambda request: request.begun, default=None)
        if first is None or not here or now - first.begun < EXPLAIN_SECONDS:
            return
        if not (self._apart or all(self._waits(member, now) for member in here)):
            return
        places = {self._slots[member.rank].cross_rank for member in here}
        heard = min(self._nodes[place].heard for place in places)
        if heard < first.begun or self._silences.cut_off(places, now, now) is not None:
            return
        if (step := max(member.step for member in here)) > self._tried_at:
            self._trials.clear()
        self._tried_at = step
        new = [member.rank for member in here if member.joined and member.step < 0]
        if new:  # with the others all went well
            self._lose_running(new, f"{first.why}: since {ranks(new)} joined, connecting fails", now)
        elif len(here) < len(self._rendezvous.present):  # some have left
            self._answer_all(False, "", now)
        elif len(self._trials) == TRIALS:
            self._least = 0  # it is the same for all: nobody would be better off without another
            text = f"{self._trials[0]}; since then all ranks have connected anew {TRIALS} times in vain"
            self._answer_all(False, text, now)
        else:
            # One rank knows who answered in the place of another, of which others know that it has not.
            why = next((each.why for each in self._requests.values() if Unproved.answered in each.why), first.why)
            self._trials.append(why)
            self._begin_anew(why, now)
            self._outbox.say(f"{why}: all ranks connect anew", "warning")

    def _answer_all(self, anew: bool, text: str, now: float) -> None:
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.answer(anew, text[: schema.TEXT], now)

    @property
    def _here(self) -> list[Member]:
        return [member for member in self._rendezvous.members if not (member.lost or member.ended)]

    def _waits(self, member: Member, now: float) -> bool:
        return (member.waits(now) or member.finished) and not member.held

    def _lose_running(self, ranks: Collection[int], why: str, now: float, it: str = "it") -> bool:
        """Lose ranks that still run, as `lose` does, and have their processes killed."""
        goes_on = self.lose(ranks, why, now, it)
        for rank in ranks if goes_on else ():
            self.kill(rank, now)
        return goes_on

    def _left_without(self, ranks: Collection[int]) -> int:
        """How many ranks train, or have trained to their end, if these do not."""
        present = self._rendezvous.present
        return sum(not (member.rank in ranks or (member.ended and not member.finished)) for member in present)
