"""Decides which ranks are in a job after some were lost or connections between them have failed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from signal import SIGKILL

from dadt.config import Config
from dadt.control import schema
from dadt.control.condition import HELD
from dadt.control.frame import Frame
from dadt.errors import NotResumed, Unproved
from dadt.launch.actions import Event, Outbox
from dadt.launch.ending import preemption
from dadt.launch.ending.cause import Cause
from dadt.launch.ending.processes import NATURAL_SECONDS
from dadt.launch.hosts.slot import Slot
from dadt.launch.members import islands
from dadt.launch.members.early_exits import EarlyExits
from dadt.launch.members.generation import regroup
from dadt.launch.members.handovers import Handovers
from dadt.launch.members.joining import Joining
from dadt.launch.members.member import Member
from dadt.launch.members.node import Node
from dadt.launch.members.reconnect_request import ReconnectRequest
from dadt.launch.members.rendezvous import Rendezvous
from dadt.launch.members.replacement import Replacements, replaces
from dadt.launch.members.silence import Silences
from dadt.launch.members.waits import SAID_SECONDS
from dadt.launch.monitor.watch import Watch

EXPLAIN_SECONDS = 1.0
"""Seconds that may pass between a failed connection and the report that its other rank has ended."""
TRIALS = 3
"""Number of times that all ranks may connect again without completing a step in between."""


@dataclass(eq=False)
class Membership:
    """Decides which ranks train. After a loss or a failed connection a new generation of ranks connects again."""

    _config: Config
    _slots: Sequence[Slot]
    _rendezvous: Rendezvous
    _cause: Cause
    _nodes: Sequence[Node]
    _watch: Watch
    _silences: Silences
    _patience: float
    """Seconds for which ranks wait for a silent rank."""
    _joining: Joining | None
    """Lets new hosts join the running job; None if lost hosts are not replaced."""
    _outbox: Outbox
    _overdue: dict[int, float] = field(default_factory=dict)
    """Lost ranks whose processes have not exited yet, each with the time at which the process is killed."""
    _requests: dict[int, ReconnectRequest] = field(default_factory=dict)
    """Unanswered requests of ranks to connect again because a connection has failed, by rank."""
    _scarce: tuple[Collection[int], float, str] = ((), 0.0, "")
    """Ranks for which others waited in vain while too few ranks would be left without them, the time, and a text."""
    _trials: list[str] = field(default_factory=list)
    """Reasons for which all ranks have connected again since the last completed step, one for each time."""
    _tried_at: int = -1
    """The highest step of any rank when all ranks last connected again."""
    _handed: int = 0
    """Number of the latest generation that began with a new worker for which others had waited; 0 if none has."""
    _moved: float = float("-inf")
    _told_to_end: bool = False
    _deaths: list[Frame] = field(default_factory=list)
    """Frames that report ends of ranks and have not been sent to all ranks yet."""

    def __post_init__(self) -> None:
        self.island_size = self._slots[0].island_size
        self._least = self._config.min_np * (self.island_size or 1)
        """Minimum number of ranks with which training continues; 0 means that it ends when any rank is lost."""
        self._apart = self._config.algorithm == "gossip"
        """Whether each rank trains at its own speed without waiting for the others, as with the algorithm `gossip`."""
        self.exits = EarlyExits(self._rendezvous, apart=self._apart, island_size=self.island_size)
        self._replacements = Replacements(self._outbox, self._silences.hear) if replaces(self._config) else None
        self._handovers = Handovers(self._outbox, self.kill, self._patience, self.island_size or 1)

    def can_lose(self, ranks: Collection[int]) -> bool:
        """Return whether training could continue without these ranks and those that cannot train without them."""
        gone = islands.lost_with(ranks, self._rendezvous.present, self._slots, apart=self._apart)
        left = sum(not (m.rank in gone or (m.ended and not m.finished)) for m in self._rendezvous.present)
        return left >= self._least > 0

    def lose(self, ranks: Collection[int], why: str, now: float, it: str = "it") -> bool:
        """Remove lost ranks from the job, with all that cannot train without them, whose processes are killed. Returns
        False, and removes none, if too few ranks would remain. why: cause of the loss. it: pronoun that stands for the
        lost ranks in messages."""
        if not self.can_lose(ranks):
            return False
        named, ranks = ranks, islands.lost_with(ranks, self._rendezvous.present, self._slots, apart=self._apart)
        it = islands.text(ranks, self.island_size) if len(ranks) > len(named) else it
        lost = [member for member in self._rendezvous.present if member.rank in ranks]
        if not lost:  # all of these ranks were lost already, for example before their host
            return True
        self._rendezvous.regroup(ranks, why, now)
        self._watch.regroups(lost, why, now)
        self._cause.excuse(ranks)
        self._tell(why, now)
        self._overdue |= {member.rank: now for member in lost if not (member.rank in named or member.ended)}
        self._outbox.say(f"{why}: training goes on without {it}", "warning")
        return True

    def leaves(self, rank: int, why: str) -> bool:
        """Handle a rank that exits with code 0 before training has ended, without which the others go on once they need
        it. Returns whether they can."""
        if goes_on := self.can_lose(self.exits.losses(rank)):
            self.exits.add(rank, why)
        return goes_on

    def _go_on_without_missed(self, now: float) -> None:
        """Remove ranks that exited early and are missed now."""
        missed = self.exits.take_missed(self._requests, now)
        if at_end := [rank for rank in missed if self.exits.is_at_end(rank)]:
            ranks = islands.with_islands(at_end, self._slots)
            self._leave_out(ranks, f"{preemption.ranks(at_end)} finished before the others, which train on", now)
        for rank in [rank for rank in missed if rank not in at_end]:
            self.lose([rank], missed[rank], now)

    def _leave_out(self, ranks: Collection[int], why: str, now: float) -> None:
        """Have the others connect again without these ranks, none of which is lost, and end those that still train."""
        self._least = self._least and max(1, self._least - len(ranks))  # these have trained for long enough
        self._overdue |= {m.rank: now for m in self._here if m.rank in ranks and not m.finished}
        self._outbox.say(why)
        self._rendezvous.regroup(ranks, why, now)
        self._watch.regroups([], why, now)
        self._cause.excuse(ranks)
        self._tell(why, now)

    def reconnect(self, event: Event) -> None:
        """Handle a rank's report of a failed connection. `turn` replies whether all ranks are to connect again."""
        question, reply, now = event.frame, self._rendezvous.reply_to(event), event.now
        why = f"{self._rendezvous.members[question['rank']].named}: {question['text']}"
        request = ReconnectRequest(now, now + question["timeout"], why, self._obstacle(now, question["rank"]), reply)
        if question.get("generation", 0) == self._rendezvous.generation:
            self._requests[question["rank"]] = request
        else:
            request.answer(True, "", now)

    def approach(self, event: Event) -> None:
        """Handle a new worker's question about the state of training of the other ranks."""
        reply = self._rendezvous.reply_to(event)
        if self._replacements is None or self._apart or not self._rendezvous.members[event.frame["rank"]].lost:
            reply(Frame("error", {"type": "DadtError", "message": "this rank is not one that could join"}), event.now)
        else:
            self._handovers.ask(event, reply)

    def give(self, event: Event) -> None:
        """Pass a training rank's answer on to the new worker that has asked."""
        self._rendezvous.reply_to(event)(Frame("taken"), event.now)
        present = [member.rank for member in self._rendezvous.present]
        if self._replacements is not None and self._handovers.give(event, self._rendezvous.generation, present):
            self._begin_anew("a new worker has ended before it could join", event.now)

    def _begin_anew(self, why: str, now: float) -> None:
        """Have all ranks connect again although no rank is lost."""
        self._rendezvous.regroup([], why, now)
        self._watch.regroups([], why, now)
        self._tell(why, now)

    def failed(self, member: Member, error: str) -> None:
        """Start no further workers for a rank whose script could not be replayed up to the current step."""
        if self._replacements is not None and error == NotResumed.__name__:
            self._replacements.refused(islands.with_islands([member.rank], self._slots))

    def hello(self, event: Event) -> None:
        """Handle a process's report that it has imported torch. One that trained already has replaced itself (exec)."""
        member, now = self._rendezvous.members[event.frame["rank"]], event.now
        if member.claimed and not member.ended and member.pid == event.frame["pid"]:
            why = f"rank {member.rank} ({member.place}) has replaced itself (exec) after it had begun to train"
            steps = max(0, member.step)
            self.exits.begin_anew()
            if self._rendezvous.start_over(member, why, now):
                self.tell_of_death(why, steps)
        member.sign("has imported torch, not begun to train", now)

    def tell_of_death(self, text: str, steps: int | None = None) -> None:
        """Queue a report of a rank's end to all ranks, which stop waiting when they receive it. The next `turn` sends
        it, after requests for stack traces. steps: the rank's number of steps, if it did not fail."""
        self._deaths.append(Frame("death", {"text": text} | ({} if steps is None else {"steps": steps})))

    def claim(self, event: Event) -> None:
        """Handle a process's report that it begins to train. A new worker of a lost rank joins the other ranks."""
        member, now = self._rendezvous.members[event.frame["rank"]], event.now
        member.pid, member.claimed = event.frame["pid"], True
        member.sign("has begun to train", now)
        awaited = self._apart or self._handovers.awaits(member.rank, self._rendezvous.generation)
        claimed = partial(islands.that_join, self._rendezvous.members, self._slots)
        come = claimed if self._apart else self._handovers.come
        if member.lost and (self._told_to_end or not awaited):
            self.kill(member.rank, now)  # the other ranks continued without this worker
        elif member.lost and (ranks := come(member.rank)):
            joining = [self._rendezvous.members[rank] for rank in ranks]
            why = f"{' and '.join(each.placed for each in joining)} {'join' if len(joining) > 1 else 'joins'}"
            self._rendezvous.join(joining, why, now)
            self._handed = self._rendezvous.generation if not self._apart else 0
            self._watch.joins(joining, now)
            self._cause.join(ranks)
            self._tell(why, now)

    def exited(self, member: Member, goes_on: bool, now: float) -> None:
        """Record that a rank's process has ended. goes_on: whether the job is not being ended."""
        self._overdue.pop(member.rank, None)  # else the deadline would kill a new worker of this rank
        self._requests.pop(member.rank, None)
        if self._handovers.ended(member.rank) and goes_on:
            self._begin_anew(f"rank {member.rank} ({member.place}) has ended before it could join", now)
        if self._replacements is None or not (goes_on and member.lost):
            return
        island = [self._rendezvous.members[rank] for rank in islands.with_islands([member.rank], self._slots)]
        if left := {each.rank: now for each in island if not each.ended}:
            self._overdue |= left  # they cannot go on without the others of their island
        elif not (self._at_end or (self.island_size and islands.has_lost_host(island, self._slots, self._nodes))):
            self._replacements.exited(island, now)

    def _tell(self, why: str, now: float) -> None:
        """Tell all ranks which ranks are now in the job, and those with failed connections to connect again."""
        self._outbox.send_all(regroup(self._rendezvous, self._slots, self._nodes, self._handed, why))
        self._handovers.begin_anew()
        self._answer_all(True, "", now)

    def kill(self, rank: int, at: float) -> None:
        """Have the process of a lost rank killed at this time (time.monotonic), unless it ends before."""
        self._overdue[rank] = at

    def turn(self, goes_on: bool, now: float) -> None:
        """Remove ranks that are silent, gone or cut off, answer requests, and kill processes of lost ranks, whichever
        is due. Call regularly. goes_on: whether the job is not being ended."""
        self._handovers.turn(now)
        if goes_on:
            self._go_on_without_missed(now)
        if self._least and goes_on:
            self._give_up_silent(now)
            self._connect_anew(now)
        ends = not (self._least and goes_on)
        due = [rank for rank, request in self._requests.items() if ends or now >= request.deadline]
        if due and not ends:  # something of a host that is cut off may have come late, so that it was not silent
            self._give_up_cut_off(self._here, now - self._patience, now)
        for request in [self._requests.pop(rank) for rank in due if rank in self._requests]:
            request.answer(False, self._obstacle(now) or request.obstacle, now)
        if goes_on and not self._told_to_end:
            self._look_after_lost(now)
        for rank in [rank for rank, at in self._overdue.items() if now >= at]:
            del self._overdue[rank]
            self._outbox.send_all(Frame("signal", {"number": int(SIGKILL), "rank": rank}))
        for death in self._deaths:
            self._outbox.send_all(death)
        self._deaths.clear()

    def _look_after_lost(self, now: float) -> None:
        """Start new workers for lost ranks. Once all other ranks have ended, end the processes of lost ranks."""
        present, replacements = self._rendezvous.present, self._replacements
        if all(member.ended for member in present):
            if replacements is not None or any(each.lost and not each.ended for each in self._rendezvous.members):
                self._told_to_end = True
                self._outbox.send_all(Frame("stop", {"natural": NATURAL_SECONDS}))
        elif replacements is not None and not self._at_end:
            replacements.turn(now)
            if self._joining is not None:
                self._joining.turn(now)
        elif self._apart and (new := [member for member in present if member.joined and not member.finished]):
            why = f"rank {new[0].rank} ({new[0].place}) leaves, as those that began the job are at their end"
            self._leave_out(islands.with_islands([member.rank for member in new], self._slots), why, now)

    @property
    def _at_end(self) -> bool:
        """Whether all ranks that began the job and are still in it have finished their training."""
        began = [member for member in self._rendezvous.present if not member.joined]
        return bool(began) and all(member.finished for member in began)

    def _give_up_silent(self, now: float) -> None:
        """Remove ranks for which all others have waited too long, or those of one host if all wait as it is cut off."""
        here = self._here
        since = now - self._patience
        if self._apart:
            self._give_up_held(here, since, now)
            return
        silent = [member for member in here if not self._waits(member, now)]
        trains = any(member.waits(now) and not (member.finished or member.waiting.starts) for member in here)
        some_finished = any(member.finished for member in self._rendezvous.present)
        ends = some_finished and all(member.held for member in silent)
        if not (trains or ends):  # the start and the end of training have deadlines of their own
            self._moved = now
        if now - self._moved < SAID_SECONDS:  # ranks may be waiting without having reported this yet
            return
        if all(member.acted < since for member in silent):
            # In islands a rank is not seen to wait for others of its island, which may wait for a host that is cut off.
            cut = (not silent or self.island_size) and self._give_up_cut_off(here, since, now)
            if silent and not cut:
                self._give_up(silent, now)

    def _give_up(self, silent: Sequence[Member], now: float) -> None:
        """Remove these ranks from the job, because they were silent for `_patience` seconds."""
        many = len(silent) > 1
        names = [f"rank {m.rank} ({m.place}{f'; {HELD[m.condition]}' if many and m.held else ''})" for m in silent]
        why = f"{' and '.join(names)} {'were' if many else 'was'} silent for {self._patience:g} s"
        why += f", {HELD[silent[0].condition]}" if silent[0].held and not many else ""
        self._cause.give_up_silent(ranks := [member.rank for member in silent])
        self._lose_awaited(ranks, why, now, "them" if many else "it")

    def _lose_awaited(self, ranks: Collection[int], why: str, now: float, it: str = "it") -> None:
        """Remove these ranks, for which the others wait, or send these an error if too few ranks would be left."""
        if self._lose_running(ranks, why, now, it):
            return
        why += f", and too few are left without {it}"
        self._least = 0  # too few ranks would be left, so no further ranks are removed
        self._scarce = ranks, now, why[: schema.TEXT]
        self._answer_all(False, why, now)
        self._rendezvous.give_up(Frame("error", {"type": "PeerLost", "message": why[: schema.TEXT]}), now)

    def _give_up_cut_off(self, here: Sequence[Member], since: float, now: float) -> bool:
        places = {self._slots[member.rank].cross_rank for member in here}
        if (cut := self._silences.cut_off(places, since, now)) is not None:
            self._lose_awaited([each.rank for each in here if self._slots[each.rank].cross_rank == cut[0]], cut[1], now)
        return cut is not None

    def _cut(self, now: float) -> str:
        """Return a text about a known outage of the network between hosts; empty if there is none."""
        places = {self._slots[member.rank].cross_rank for member in self._rendezvous.present}
        return cut[1] if (cut := self._silences.known_cut(places, now)) is not None else ""

    def _obstacle(self, now: float, asking: int = -1) -> str:
        """Return why ranks cannot connect (an outage, stopped or silent ranks); empty if no reason is known. asking:
        the rank that is told, perhaps one for which others had waited in vain."""
        ranks, since, why = self._scarce
        if why and (asking in ranks or all(self._rendezvous.members[rank].acted < since for rank in ranks)):
            return why
        held = ", ".join(member.named for member in self._here if member.held)
        return self._cut(now) or (f"{held} did not connect"[: schema.TEXT] if held else "")

    def _give_up_held(self, here: Sequence[Member], since: float, now: float) -> None:
        """For an algorithm in which no rank waits for another: remove silent ranks that could not continue for too
        long. A silent rank is also removed if only it, or its island, has not finished, as all others then wait."""
        left = {member.rank for member in here if not member.finished}
        for member in [each for each in here if not (each.finished or each.waiting.is_starting) and each.acted < since]:
            island = islands.with_islands([member.rank], self._slots)
            if member.held or (len(left) < len(here) and left.issubset(island)):
                why = islands.silence(member, self._rendezvous.members, self.island_size, self._patience)
                self._lose_running([member.rank], why, now)
        if not left:
            self._give_up_cut_off(here, since, now)

    def _connect_anew(self, now: float) -> None:
        """Have all ranks connect again if a connection failed, every rank waits and no loss is known. Does nothing
        until each agent has sent a frame after the first request to connect again, because an agent would have reported
        the end of a rank."""
        here = self._here
        first = min(self._requests.values(), key=lambda request: request.begun, default=None)
        if first is None or not here or now - first.begun < EXPLAIN_SECONDS:
            return
        if not (self._apart or all(self._waits(member, now) for member in here)):
            return
        places = {self._slots[member.rank].cross_rank for member in here}
        late = min(self._nodes[place].heard for place in places) < first.begun
        if late or self._silences.known_cut(places, now) is not None:
            return
        if (step := max(member.step for member in here)) > self._tried_at:
            self._trials.clear()
        self._tried_at = step
        crossed = islands.crossed(self._requests, here, self.island_size) if self._trials else []
        if crossed and self._lose_running(crossed, f"{first.why}: islands wait for each other", now):
            return
        new = [member.rank for member in here if member.joined and member.step < 0]
        if new and not any(member.held for member in here):  # it worked before these joined, so they are removed
            self._lose_running(new, f"{first.why}: since {preemption.ranks(new)} joined, connecting fails", now)
        elif len(here) < len(self._rendezvous.present):  # some ranks have exited, so not all can connect again
            self._answer_all(False, "", now)
        elif len(self._trials) == TRIALS:
            self._least = 0  # the failure affects all ranks alike, so none is removed
            text = f"{self._trials[0]}; since then all ranks have connected anew {TRIALS} times in vain"
            self._answer_all(False, text, now)
        else:
            # A report that a foreign process answered at a rank's address says more than the others.
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
        return islands.waits(member, self._rendezvous.members, self.island_size, now)

    def _lose_running(self, ranks: Collection[int], why: str, now: float, it: str = "it") -> bool:
        """Remove ranks that still run from the job, and kill their processes. Returns whether training continues."""
        goes_on = self.lose(ranks, why, now, it)
        self._overdue |= dict.fromkeys(ranks if goes_on else (), now)
        return goes_on
