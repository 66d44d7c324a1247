"""A running job, as the launcher sees it: start, wait, terminate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from signal import SIGTERM
from typing import Any

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.control.job_folder import Folder
from dadt.launch.agents import Agents, Node
from dadt.launch.cause import Cause
from dadt.launch.failure import Ending, signal_name, steps_text
from dadt.launch.hosts.slot import Slot
from dadt.launch.joining import Joining
from dadt.launch.membership import EXIT_SECONDS, Membership
from dadt.launch.monitor.journal import Journal
from dadt.launch.monitor.members import Member, Rendezvous
from dadt.launch.monitor.notices import Notices
from dadt.launch.monitor.output import Output
from dadt.launch.monitor.silence import Silences
from dadt.launch.monitor.stalls import Stalls
from dadt.launch.monitor.watch import View, Watch
from dadt.launch.outcome import Outcome, Unread
from dadt.launch.preemption import Preempted, Preemption, ranks
from dadt.launch.processes import sweep
from dadt.launch.query import OWN_INQUIRY, Query
from dadt.launch.record import Record
from dadt.launch.signals import ENDING_SIGNALS, Interrupts, of_checkpoint
from dadt.launch.termination import Termination

TURN_SECONDS = 0.5
PRIMARY_SECONDS = 1.0
"""How long to wait, after a failure that another one caused, for that other one to show."""
HANG_UP_SECONDS = 4.0
"""How long an agent may take to end its workers after the launcher hangs up."""

Say = Callable[[str, str], None]  # takes a text and its level, info or warning


class Job:
    """The job of one `dadt run`. `wait` does all the work, in the thread that calls it."""

    def __init__(
        self,
        job: str,
        agents: Agents,
        slots: Sequence[Slot],
        output: Output,
        journal: Journal,
        say: Say,
        config: Config,
    ) -> None:
        """agents: they are all ready."""
        self._timeout = config.stall_warning if config.on_stall == "abort" else config.timeout
        """Seconds for which ranks wait for one that cannot go on."""
        self._job, self._held_since = job, 0.0
        self._agents = agents
        self._slots = slots
        self._output = output
        self._say = say
        self._checkpoint_signal = of_checkpoint(config)
        self._leaving: set[Node] = set()
        """Nodes that were asked to end from outside (SIGTERM): their workers save and end."""
        self._rendezvous = Rendezvous([slot.host for slot in slots])
        self.watch = Watch(self._rendezvous.members, journal)
        self._query: Query | None = None
        self._silences = Silences(agents.nodes, say, journal, verbose=config.verbose)
        self._views: list[View] = []
        self._notices = Notices(say)
        self._cause = Cause(slots, self._rendezvous.members, output, self._silences.blame)
        self._outcome = Outcome(seconds=0.0)
        self._termination = Termination(agents, self.watch, self._outcome, config.grace)
        facts = (self._rendezvous, self._cause, agents, self.watch, self._silences)
        self._membership = Membership(config, slots, *facts, self._timeout, say)
        self._stalls = Stalls(config, self._rendezvous, output, agents.send_all, say)
        self._working: set[Node] = set(agents.nodes)
        """Nodes that have not reported yet that all their workers have ended."""
        self._hang_up = HANG_UP_SECONDS
        self._deaths: list[Frame] = []
        """Frames about ended ranks that must still be sent to all ranks."""

    def start(self, orders: Iterable[Frame]) -> None:
        """Send each node's agent the order to start its workers."""
        self._begin = time.monotonic()
        self._begin_time = time.time()
        for cross_rank, (node, order) in enumerate(zip(self._agents.nodes, orders, strict=True)):
            self.order(node, [slot.rank for slot in self._slots if slot.cross_rank == cross_rank], order)
            if node.ended:
                self._lose(node, "was lost before it could start its workers")

    def order(self, node: Node, ranks: Sequence[int], order: Frame) -> None:
        """Have a node start the workers of these ranks."""
        node.ranks = frozenset(ranks)
        self._working.add(node)
        self._agents.send(node, order)

    def let_join(self, joining: Joining) -> None:
        """Hosts may come in the place of lost ones from now on."""
        self._membership.joining = joining

    def serve(self, base: Folder, facts: Mapping[str, Any]) -> None:
        """Answer other commands of this user at the socket in this folder. facts: constant facts about the job."""
        self._query = Query(base, self._agents, self.watch, facts, lambda: self._termination.end(SIGTERM, "dadt kill"))

    def show(self, view: View) -> None:
        """Keep this view up to date until the job is over, and then close it."""
        self._views.append(view)

    def wait(self, interrupts: Interrupts | None) -> Outcome:
        """Wait until nothing of the job is left. SIGINT, SIGTERM and SIGHUP end it gently, a second one at once; other
        signals among the interrupts go to all workers.

        Raises LaunchError if the workers could not be started or an agent is lost.
        """
        if interrupts is not None:
            self._agents.watch(interrupts, lambda: self._interrupt(interrupts.take()))
        try:
            while self._working:
                for node, frame in self._agents.turn(self._patience()):
                    self.watch.see(frame)
                    if (refusal := self._membership.refusal(frame)) is not None:
                        self._agents.reply(node, frame)(refusal)
                    elif not self._membership.takes(node, frame):  # kinds of the startup may come late
                        getattr(self, f"_on_{frame.kind}", _ignore)(node, frame)
                self._turn()
        finally:
            if interrupts is not None:
                self._agents.forget(interrupts)
            self._close()
        return self._judge()

    def attend(self, interrupts: Interrupts | None) -> None:
        """Handle heartbeats and signals while the output is blocked. Raises Unread if the user has asked twice."""
        self._termination.excuse()
        self._agents.beat()
        self._interrupt(interrupts.take() if interrupts is not None else set())
        if self._termination.at_once and self._outcome.preemption is not None:
            raise Preempted(f"{self._outcome.preemption.who} while nobody read the output; all workers stopped")
        if self._termination.at_once:
            raise Unread(self._outcome.signal)

    def _turn(self) -> None:
        now = time.monotonic()
        for text in self._termination.unsaid:
            self._say(text, "info")
        self._termination.unsaid.clear()
        self._rendezvous.settle()
        self._stalls.turn()
        self._silences.turn()
        overdue = self._termination.turn()
        self._look_for_held(now)
        self._membership.turn(self._termination.goes_on)
        for death in self._deaths:  # after the stacks are asked for, as ranks move on when they hear of a death
            self._agents.send_all(death)
        self._deaths.clear()
        if overdue:
            # A stuck agent is killed, and its workers with it.
            self._working.clear()
            self._hang_up = 0.0

    def _look_for_held(self, now: float) -> None:
        """Give up on ranks that cannot go on when all others have ended: no rank waits for them then."""
        living = [member for member in self._rendezvous.members if not member.ended]
        if not living or len(living) == len(self._rendezvous.members) or not all(member.held for member in living):
            self._held_since = now
        elif now - self._held_since > self._timeout and self._termination.grace == float("inf"):
            self._cause.hold(living[0])
            self._termination.fail_by(0.0)

    def _patience(self) -> float:
        now = time.monotonic()
        turn = 0.05 if self._rendezvous.waiting else TURN_SECONDS
        turn = min(turn, self._output.tick(), self._termination.deadline - now)
        if self._query is not None:
            turn = min(turn, self._query.turn())
        for view in self._views:
            turn = min(turn, view.tick())
        return max(0.0, turn)

    def _interrupt(self, caught: set[int]) -> None:
        for number in caught - ENDING_SIGNALS:
            self._agents.send_all(Frame("signal", {"number": number}))
        if number := min(caught & ENDING_SIGNALS, default=0):
            if number == SIGTERM and self._checkpoint_signal and not self._outcome.signal:
                self._termination.preempt(Preemption(f"dadt run was told to end ({signal_name(number)})"))
            else:
                self._termination.end(number, signal_name(number))

    def _on_preempted(self, node: Node, frame: Frame) -> None:
        self._leaving.add(node)
        who = f"{node.name or 'this host'} was told to end (SIGTERM)"
        here = [slot.rank for slot in self._slots if self._agents.nodes[slot.cross_rank] in self._leaving]
        if self._termination.goes_on and self._membership.can_lose(here):
            self._say(f"{who}: its workers save and end", "warning")
        else:
            self._termination.preempt(Preemption(who, host=True))

    def _leaves(self, node: Node, rank: int) -> None:
        """A rank ends. Where its host was asked to end, the others train on."""
        if node not in self._leaving or not self._termination.goes_on or self._rendezvous.members[rank].lost:
            return
        why = f"rank {rank} ({self._rendezvous.members[rank].place}) has left, as its host was told to end"
        if not self._membership.lose([rank], why):
            self._termination.preempt(Preemption(f"{node.name or 'this host'} was told to end (SIGTERM)", host=True))

    def _on_unheeded(self, node: Node, frame: Frame) -> None:
        where = f" on {node.name}" if node.name else ""
        name = signal_name(frame["number"])
        self._say(f"{ranks(frame['ranks'])}{where}: no handler of {name}, so it was not sent; nothing saved", "warning")

    def _on_lost(self, node: Node, frame: Frame) -> None:
        here = [slot.rank for slot in self._slots if slot.cross_rank == self._agents.nodes.index(node)]
        if self._termination.goes_on and self._membership.lose(here, f"{node.name or 'this host'}: {frame['message']}"):
            self._working.discard(node)
        else:
            self._lose(node, f"{frame['message']}; all its workers were stopped", frame.get("time", float("inf")))
        for rank in here:
            member = self._rendezvous.members[rank]
            member.ended = True
            member.sign("is on a host whose agent is gone")

    def _lose(self, node: Node, text: str, at: float = float("inf")) -> None:
        self._cause.lose(f"{node.name}: {text}" if node.name else text, at)
        self._working.discard(node)
        if self._working:
            self._termination.fail_by(0.0)

    def _on_started(self, node: Node, frame: Frame) -> None:
        self._rendezvous.members[frame["rank"]].pid = frame["pid"]

    def _on_unstarted(self, node: Node, frame: Frame) -> None:
        self._cause.lose(f"{node.name}: {frame['message']}" if node.name else frame["message"])
        self._termination.fail_by(0.0)

    def _on_out(self, node: Node, frame: Frame) -> None:
        self._output.write(frame["rank"], frame.kind, frame.body)

    _on_err = _on_out

    def _on_beat(self, node: Node, frame: Frame) -> None:
        for rank, (step, age) in frame["steps"].items():
            member = self._rendezvous.members[int(rank)]
            member.went_to(step, age)
            member.condition = frame["conditions"].get(rank, "")

    def _on_hello(self, node: Node, frame: Frame) -> None:
        self._outcome.hooked = True
        member = self._rendezvous.members[frame["rank"]]
        self._deaths += self._membership.greeted(member, frame["pid"])
        member.sign("has imported torch, not begun to train")

    def _on_claim(self, node: Node, frame: Frame) -> None:
        member = self._rendezvous.members[frame["rank"]]
        member.pid, member.claimed = frame["pid"], True
        member.sign("has begun to train")
        self._membership.claimed(member)

    def _on_numbers(self, node: Node, frame: Frame) -> None:
        self._rendezvous.members[frame["rank"]].went_to(frame["step"], 0.0)

    def _on_say(self, node: Node, frame: Frame) -> None:
        self._notices.say(frame["text"], frame["level"])

    def _on_failed(self, node: Node, frame: Frame) -> None:
        record = Record.from_header({**frame.header, "time": frame["time"] - node.clock})
        self._cause.give_up(frame["rank"], record)
        if record.thread:
            return
        member = self._rendezvous.members[frame["rank"]]
        self._membership.failed(member, record.type)
        why = f"rank {member.rank} ({member.place}) failed with {record.brief}"
        # At first all ranks are about to have the same error, and all receive what they do differently.
        alike = not member.joined and (member.step <= 0 or record.type == "Mismatch")
        if not alike and self._termination.goes_on and self._membership.lose([member.rank], why):
            self._membership.expect_end(member.rank)
        elif not member.lost:
            self._termination.fail_by(EXIT_SECONDS, lets_leave=record.secondary)

    def _on_exits(self, node: Node, frame: Frame) -> None:
        self._cause.say(frame["rank"], Record.of_exit(frame.header))

    def _on_ending(self, node: Node, frame: Frame) -> None:
        member = self._rendezvous.members[frame["rank"]]
        member.went_to(frame["steps"], 0.0)
        member.finished = True
        self._cause.leave(member.rank)
        member.sign(f"has ended after {frame['steps']} steps")

    def _on_done(self, node: Node, frame: Frame) -> None:
        self._leaves(node, frame["rank"])
        if not self._rendezvous.members[frame["rank"]].lost:
            self._outcome.summaries = {**self._outcome.summaries, frame["rank"]: frame["summary"]}
            self._rendezvous.members[frame["rank"]].finished = True

    def _on_exchange(self, node: Node, frame: Frame) -> None:
        reply = self.watch.waits(frame, self._agents.reply(node, frame))
        self._rendezvous.give(frame["key"], frame["rank"], frame.body, frame["timeout"], reply)

    def _on_put(self, node: Node, frame: Frame) -> None:
        self._agents.reply(node, frame)(self._rendezvous.put(frame["key"], frame["rank"], frame.body))

    def _on_get(self, node: Node, frame: Frame) -> None:
        reply = self.watch.waits(frame, self._agents.reply(node, frame))
        self._rendezvous.get(frame["keys"], frame["rank"], frame["timeout"], reply)

    def _on_reconnect(self, node: Node, frame: Frame) -> None:
        getattr(self._membership, frame.kind)(frame, self.watch.waits(frame, self._agents.reply(node, frame)))

    _on_approach = _on_give = _on_reconnect

    def _on_result(self, node: Node, frame: Frame) -> None:
        self._outcome.results = {**self._outcome.results, frame["rank"]: frame.body}
        self._agents.reply(node, frame)(Frame("taken"))

    def _on_peers(self, node: Node, frame: Frame) -> None:
        peers = [self._seen_from(frame["rank"], member) for member in self._rendezvous.present]
        self._agents.reply(node, frame)(Frame("peers", {"peers": peers}))

    def _seen_from(self, rank: int, member: Member) -> dict[str, Any]:
        told = {**member.describe(), "said": member.state}
        text = self._silences.between(self._slots[rank].cross_rank, self._slots[member.rank].cross_rank)
        return {**told, "state": f"is unreachable, as {text} ({told['state']})"} if text and not member.ended else told

    def _on_heartbeat(self, node: Node, frame: Frame) -> None:
        if (every := self._silences.hear(self._agents.nodes.index(node), frame)) is not None:
            self._agents.send_all(every)

    _on_silent = _on_heard = _on_unheard = _on_heartbeat

    def _on_exit(self, node: Node, frame: Frame) -> None:
        ending = Ending(**{**frame.header, "time": frame["time"] - node.clock})
        record = self._cause.end(ending)
        self._outcome.stepped |= ending.step > 0
        member, present = self._rendezvous.members[ending.rank], self._rendezvous.present
        trains = member.claimed and not member.finished
        what = f"rank {member.rank} ({member.place}) {ending.text} after {steps_text(ending.step)}"
        member.ended = True
        self._output.end(member.rank)
        member.sign(ending.text)
        self._leaves(node, ending.rank)
        over = ending.code > 0 and all(each.finished for each in present)  # the script says how training has ended
        if ending.code == 0 and trains and not (ending.stopped or member.lost):
            self._cause.leave(ending.rank)
            if not self._membership.leaves(ending.rank, why := f"{what}, while others went on"):
                self._deaths.append(Frame("death", {"text": why, "steps": max(0, ending.step)}))
        elif ending.code and not ending.stopped and not member.lost:
            if self._termination.goes_on and not over and self._membership.lose([ending.rank], what):
                self._membership.exited(member, self._termination.goes_on and node not in self._leaving)
                return
            secondary = record is not None and record.secondary
            if not secondary:
                self._deaths.append(Frame("death", {"text": what}))
            self._termination.fail_by(PRIMARY_SECONDS if secondary else 0.0, lets_leave=secondary or member.finished)
        self._membership.exited(member, self._termination.goes_on and node not in self._leaving)
        self._rendezvous.settle()

    def _on_stacks(self, node: Node, frame: Frame) -> None:
        self._stalls.stacks.write(frame["rank"], frame.body)

    def _on_dump(self, node: Node, frame: Frame) -> None:
        self._stalls.dump()

    def _on_stack(self, node: Node, frame: Frame) -> None:
        if frame["number"] == OWN_INQUIRY:
            self._stalls.stacks.write(frame["rank"], frame.body or frame["problem"].encode())
        elif self._query is not None:
            self._query.told(frame)

    def _on_end(self, node: Node, frame: Frame) -> None:
        self._outcome.stuck = [*self._outcome.stuck, *frame["stuck"]]
        if number := frame["signal"]:
            text = f"the agent of this host (pid {node.report['pid']}) was told to end by signal {number}"
            self._lose(node, f"{text} ({signal_name(number)}); all its workers were stopped")
        self._working.discard(node)

    def _close(self) -> None:
        """Close everything. No process of the job outlives this, even if its agents were killed."""
        self._agents.close(self._hang_up)
        self._outcome.stuck = sweep(f"DADT_JOB={self._job}") or self._outcome.stuck
        if self._query is not None:
            self._query.close()
        self._output.close()
        for view in self._views:
            view.close()

    def _judge(self) -> Outcome:
        self._outcome.seconds = time.monotonic() - self._begin
        self._outcome.losses = self.watch.losses
        if (preemption := self._outcome.preemption) is not None:
            self._outcome.preemption = replace(preemption, endings=self._cause.endings, done=self._outcome.summaries)
        elif not self._outcome.signal:
            self._outcome.failure = self._cause.judge(self._begin_time, self._stalls.stacks.paths)
        return self._outcome


def _ignore(node: Node, frame: Frame) -> None: ...
