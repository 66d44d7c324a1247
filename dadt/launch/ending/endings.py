"""Decides what the launcher does when a rank fails or ends, when a host is lost or preempted, and when the user ends
the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from signal import SIGTERM

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.launch.actions import EndOutput, Event, Outbox
from dadt.launch.ending.cause import Cause
from dadt.launch.ending.failure import Ending, signal_name, steps_text
from dadt.launch.ending.outcome import Outcome
from dadt.launch.ending.preemption import Preemption, ranks
from dadt.launch.ending.record import ErrorRecord
from dadt.launch.ending.signals import ENDING_SIGNALS, of_checkpoint
from dadt.launch.ending.termination import END_SECONDS, Termination
from dadt.launch.hosts.slot import Slot
from dadt.launch.members.islands import with_islands
from dadt.launch.members.joining import Joining
from dadt.launch.members.member import Member
from dadt.launch.members.membership import Membership
from dadt.launch.members.node import Node
from dadt.launch.members.rendezvous import Rendezvous

EXIT_SECONDS = 1.0
"""Seconds that a worker may take to exit after it has reported an uncaught exception."""
PRIMARY_SECONDS = 1.0
"""If a rank's failure was caused by another rank's failure, seconds to wait for a report of that other failure before
the job is ended."""


@dataclass(eq=False)
class Endings:
    """Decides, when a rank or host is lost, whether the remaining ranks continue training or the job ends."""

    _config: Config
    _nodes: Sequence[Node]
    _slots: Sequence[Slot]
    _rendezvous: Rendezvous
    _cause: Cause
    _termination: Termination
    _membership: Membership
    _joining: Joining | None
    """Lets new hosts join the running job; None if lost hosts are not replaced."""
    _outcome: Outcome
    _patience: float
    """Seconds for which ranks wait for a rank that cannot continue."""
    _outbox: Outbox
    saves: int = 0
    """Number of checkpoint signals (--checkpoint-signal) that were sent to the workers."""
    _leaving: set[Node] = field(default_factory=set)
    """Nodes whose agents received SIGTERM from something other than the launcher. Their workers save a checkpoint and
    end."""
    _follows: dict[int, tuple[float, str]] = field(default_factory=dict)
    """With islands: ranks that have failed because another rank of their islands has, each with the time until which a
    report of that other rank is awaited, and a text about its own end."""
    _held_since: float = float("-inf")
    """Time (time.monotonic) since when no living rank can continue, while other ranks have ended; the current time if
    some rank can."""

    def signal(self, caught: set[int], now: float) -> None:
        """Handle signals that `dadt run` received. SIGINT, SIGTERM and SIGHUP end the job, at first with time for its
        workers to end, and at once when repeated. All other signals are sent to the workers."""
        for number in caught - ENDING_SIGNALS:
            counted = number == of_checkpoint(self._config)
            self.saves += counted
            self._outbox.send_all(Frame("signal", {"number": number} | ({"saves": self.saves} if counted else {})))
        if number := min(caught & ENDING_SIGNALS, default=0):
            if number == SIGTERM and of_checkpoint(self._config) and not self._outcome.signal:
                preemption = Preemption(f"dadt run was told to end ({signal_name(number)})")
                self._termination.preempt(preemption, now)
            else:
                self._termination.end(number, signal_name(number), now)

    def preempted(self, event: Event) -> None:
        """Handle an agent's report that it received SIGTERM from something other than the launcher, which asks this
        host to end."""
        node, now = event.node, event.now
        self._leaving.add(node)
        who = f"{node.name or 'this host'} was told to end (SIGTERM)"
        here = [slot.rank for slot in self._slots if self._nodes[slot.cross_rank] in self._leaving]
        if self._termination.goes_on and self._membership.can_lose(here):
            self._outbox.say(f"{who}: its workers save and end", "warning")
            self._save_elsewhere(node)
        else:
            self._termination.preempt(Preemption(who, host=True), now)

    def _save_elsewhere(self, node: Node) -> None:
        """Have ranks of other hosts save that are in an island with ranks of this host, as its agent has asked only
        those of its own."""
        islands = with_islands(node.ranks, self._slots)
        for other in [each for each in self._nodes if each not in self._leaving]:
            if ranks := [rank for rank in islands if self._nodes[self._slots[rank].cross_rank] is other]:
                order = {"number": of_checkpoint(self._config), "saves": 0, "ranks": ranks}
                self._outbox.send(other, Frame("signal", order))

    def _is_leaving(self, rank: int) -> bool:
        """Return whether a host of this rank, or of its island, was asked to end."""
        return any(
            self._nodes[self._slots[each].cross_rank] in self._leaving for each in with_islands([rank], self._slots)
        )

    def unheeded(self, event: Event) -> None:
        """Warn the user that workers on a host did not save: the checkpoint signal was not sent to them, because they
        have no handler for it, or because not all ranks of their island can save yet."""
        where = f" on {event.node.name}" if event.node.name else ""
        name, deaf = signal_name(event.frame["number"]), ranks(event.frame["ranks"])
        why = f"no handler of {name}" if not event.frame["handled"] else "not all of the island trains"
        self._outbox.say(f"{deaf}{where}: {why}, so it was not sent; nothing saved", "warning")

    def lost(self, event: Event) -> None:
        """Handle the loss of a host's agent. If enough ranks are left, they continue training; otherwise the job
        ends."""
        node, frame, now = event.node, event.frame, event.now
        here = [slot.rank for slot in self._slots if slot.cross_rank == self._nodes.index(node)]
        why = f"{node.name or 'this host'}: {frame['message']}"
        if self._termination.goes_on and self._membership.lose(here, why, now):
            node.works = False
        else:
            if not (node.told or self._goes_on_without(node)):
                self._termination.lost(node.heard, now)
            text = f"{frame['message']}; all its workers were stopped"
            self.lose(node, text, now, frame.get("time", float("inf")))
        for rank in here:
            member = self._rendezvous.members[rank]
            member.ended = True
            member.sign("is on a host whose agent is gone", now)

    def lose(self, node: Node, text: str, now: float, at: float = float("inf")) -> None:
        """End the job because it cannot continue without this host. at: when the host was lost, as uptime of the
        launcher's host."""
        self._cause.lose(f"{node.name}: {text}" if node.name else text, at)
        self._stop_without(node, now)

    def _stop_without(self, node: Node, now: float) -> None:
        node.works = False
        if any(other.works for other in self._nodes):
            self._termination.fail_by(0.0, now)

    def miss(self, now: float) -> None:
        """Handle that agents have missed their deadline to end. One that was silent since before others were asked to
        end is the reason for that, like one that is known to be lost, if these are all others or it was silent for
        long."""
        needed = [node for node in self._nodes if not self._goes_on_without(node)]
        silent = [node for node in needed if node.works and not node.told]
        told = all(node.told for node in needed if node not in silent)
        for node in silent:
            self._termination.lost(node.heard if told else node.heard + END_SECONDS, now)

    def _goes_on_without(self, node: Node) -> bool:
        """Return whether the job has gone on without the ranks of this host, so that its loss ends nothing."""
        return all(self._rendezvous.members[rank].lost for rank in node.ranks)

    def unstarted(self, event: Event) -> None:
        """Handle the report of an agent that could not start its workers."""
        if self._joining is None or not self._joining.unstarted(event):
            name, message = event.node.name, event.frame["message"]
            self._cause.lose(f"{name}: {message}" if name else message)
            self._termination.fail_by(0.0, event.now)

    def failed(self, event: Event) -> None:
        """Handle a rank's report of an uncaught exception."""
        frame, now = event.frame, event.now
        record = ErrorRecord.from_header({**frame.header, "time": frame["time"] - event.node.clock})
        self._cause.give_up(frame["rank"], record, now)
        if record.thread:
            return
        member = self._rendezvous.members[frame["rank"]]
        self._membership.failed(member, record.type)
        why = f"rank {member.rank} ({member.place}) failed with {record.brief}"
        # All ranks raise a Mismatch, and before the first step all ranks are likely to raise the same error, except for
        # one that tells of the end of another rank of the same island. In both cases training without this rank would
        # not help the others.
        follows = self._follows_other(record)
        alike = not member.joined and (record.type == "Mismatch" or (member.step <= 0 and not follows))
        goes_on = not alike and self._termination.goes_on
        # The end of the other rank, if it is one of an island, will show the reason.
        if goes_on and (
            (follows and self._membership.can_lose([member.rank])) or self._membership.lose([member.rank], why, now)
        ):
            self._membership.kill(member.rank, now + EXIT_SECONDS)
        elif not member.lost:
            self._termination.fail_by(EXIT_SECONDS, now, lets_leave=record.secondary)

    def _follows_other(self, record: ErrorRecord | None) -> bool:
        """Return whether another rank of the same island has caused this failure."""
        return self._membership.island_size > 0 and record is not None and record.tells_of_peer

    def done(self, event: Event) -> None:
        """Handle a rank's report that its training has ended."""
        if event.node in self._leaving:
            self._leaves(event.node, event.frame["rank"], event.now)

    def exit(self, event: Event) -> None:
        """Handle the end of a rank's process."""
        node, frame, now = event.node, event.frame, event.now
        ending = Ending(**{**frame.header, "time": frame["time"] - node.clock})
        record = self._cause.end(ending)
        member, present = self._rendezvous.members[ending.rank], self._rendezvous.present
        trains = member.claimed and not member.finished
        what = self._text(ending)
        member.ended = True
        self._outbox.put(EndOutput(member.rank))
        member.sign(ending.text, now)
        if node in self._leaving or not ending.code or ending.stopped:
            self._leaves(node, ending.rank, now)
        # If all ranks in the job have finished training, this exit code is only the script's result, not a failure.
        over = ending.code > 0 and all(each.finished for each in present)
        if not (ending.stopped or member.lost):
            if ending.code:
                self._ended_badly(member, what, record, now, over=over)
            elif trains:
                self._ended_early(member, f"{what}, while others went on", max(0, ending.step))
            elif member.finished and not self._membership.exits.is_over:
                self._membership.leaves(member.rank, f"{what}, while others went on")
        self._membership.exited(member, self._termination.goes_on and not self._is_leaving(member.rank), now)
        self._rendezvous.settle(now)

    def _ended_badly(self, member: Member, what: str, record: ErrorRecord | None, now: float, *, over: bool) -> None:
        """Handle a rank's exit by a signal or with an exit code other than 0. over: whether all ranks had already
        finished training."""
        secondary = record is not None and record.secondary
        goes_on = self._termination.goes_on and not over
        if goes_on and self._follows_other(record) and self._membership.can_lose([member.rank]):
            self._follows[member.rank] = now + PRIMARY_SECONDS, what
            return
        if goes_on and self._membership.lose([member.rank], what, now):
            return
        if not secondary:
            self._membership.tell_of_death(what)
        leaves = secondary or member.finished
        self._termination.fail_by(PRIMARY_SECONDS if secondary else 0.0, now, lets_leave=leaves)

    def _lose_followers(self, now: float) -> None:
        """Remove islands of which a rank has failed because of another one, named by that other rank if it is known to
        have left."""
        for rank, (until, what) in list(self._follows.items()):
            left = self._early_exit_of_island(rank)
            if self._rendezvous.members[rank].lost or not self._termination.goes_on:
                del self._follows[rank]
            elif left or now >= until:
                del self._follows[rank]
                if not self._membership.lose([rank], left or what, now):
                    self._termination.fail_by(PRIMARY_SECONDS, now, lets_leave=True)

    def _early_exit_of_island(self, rank: int) -> str:
        """Return a text about the first rank of this rank's island that has exited with code 0; empty if none has."""
        known = (self._cause.endings.get(each) for each in with_islands([rank], self._slots))
        left = [ending for ending in known if ending is not None and ending.code == 0 and not ending.stopped]
        first = min(left, key=lambda ending: ending.time, default=None)
        return f"{self._text(first)}, while others went on" if first is not None else ""

    def _text(self, ending: Ending) -> str:
        member = self._rendezvous.members[ending.rank]
        return f"rank {member.rank} ({member.place}) {ending.text} after {steps_text(ending.step)}"

    def _ended_early(self, member: Member, why: str, steps: int) -> None:
        self._cause.leave(member.rank)
        if not self._membership.leaves(member.rank, why):
            self._membership.tell_of_death(why, steps)

    def _leaves(self, node: Node, rank: int, now: float) -> None:
        """Handle the end of a rank. If its host was asked to end, the other ranks continue training without this
        rank."""
        member = self._rendezvous.members[rank]
        if not self._is_leaving(rank) or not self._termination.goes_on or member.lost:
            return
        whose = "its host" if node in self._leaving else "a host of its island"
        why = f"rank {rank} ({member.place}) has left, as {whose} was told to end"
        if not self._membership.lose([rank], why, now):
            preemption = Preemption(f"{node.name or 'this host'} was told to end (SIGTERM)", host=True)
            self._termination.preempt(preemption, now)

    def end(self, event: Event) -> None:
        """Handle an agent's last report, that all workers of its host have ended or that it cannot end the rest."""
        node = event.node
        if number := event.frame["signal"]:
            text = f"the agent of this host (pid {node.report['pid']}) was told to end by signal {number}"
            text = f"{text} ({signal_name(number)}); all its workers were stopped"
            self._cause.tell_to_end(f"{node.name}: {text}" if node.name else text)
            self._stop_without(node, event.now)
        node.works = False

    def turn(self, now: float) -> None:
        """Fail the job if none of the remaining ranks can continue (with islands: if each island has a rank that
        cannot). None of them would report this, as no rank waits for another. A job all of whose ranks are stopped by
        SIGSTOP counts as suspended and does not fail."""
        self._lose_followers(now)
        living = [member for member in self._rendezvous.present if not member.ended]
        held, size = [member for member in living if member.held], self._membership.island_size or 1
        islands = {member.rank // size for member in held}
        goes_on = not held or any(member.rank // size not in islands for member in living)
        if goes_on or len(held) == len(self._rendezvous.members):
            self._held_since = now
        elif now - self._held_since > self._patience and self._termination.grace == float("inf"):
            self._cause.hold(held[0])
            self._termination.fail_by(0.0, now)
