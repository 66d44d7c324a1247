"""Decides for the launcher about a running job, from the start of the workers until all of them have ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.errors import DadtError, LaunchError
from dadt.launch.actions import Event, Outbox, PrintOutput
from dadt.launch.ending.cause import Cause
from dadt.launch.ending.endings import Endings
from dadt.launch.ending.outcome import Outcome, Unread
from dadt.launch.ending.preemption import Preempted
from dadt.launch.ending.results import Results
from dadt.launch.ending.termination import Termination
from dadt.launch.hosts.candidates import Candidates
from dadt.launch.hosts.slot import Slot
from dadt.launch.members.joining import Joining
from dadt.launch.members.membership import Membership
from dadt.launch.members.node import Node
from dadt.launch.members.proposals import Proposals
from dadt.launch.members.rendezvous import Rendezvous
from dadt.launch.members.silence import Silences
from dadt.launch.members.stalls import Stalls, patience
from dadt.launch.monitor.watch import Watch

TURN_SECONDS = 0.5
WAITING_SECONDS = 0.05
"""Largest number of seconds between two calls of `Job.turn` while ranks wait for values of other ranks; at all other
times, TURN_SECONDS applies."""

LOOK_SECONDS = 2e-5
"""Seconds per rank of the job that must pass before `Job.turn` examines all ranks again. This is about five times as
long as the examination takes."""
SMALL = 256
"""In a job of at most this many ranks, `Job.turn` examines all ranks at every call."""
MOST_TEXTS = 10_000
"""Largest number of different messages from ranks that are shown to the user."""

Handler = Callable[[Event], None]


class Job:
    """Passes each event to the objects that handle it. They put the actions that follow into the outbox."""

    def __init__(
        self,
        config: Config,
        nodes: list[Node],
        slots: list[Slot],
        logs: Path,
        now: float,
        begin: float,
        candidates: Candidates | None = None,
    ) -> None:
        """nodes: the job's hosts, whose agents are ready. now, begin: the current time, as time.monotonic and in
        seconds since the epoch. candidates: hosts that may replace lost ones; None if lost hosts are not replaced."""
        self.outbox = outbox = Outbox()
        self._nodes = nodes
        self._slots = slots
        self._outcome = outcome = Outcome(seconds=0.0)
        self._rendezvous = rendezvous = Rendezvous([slot.host for slot in slots], outbox, now, slots[0].island_size)
        members = rendezvous.members
        self.watch = watch = Watch(members, outbox, now, begin)
        self._silences = silences = Silences(nodes, slots, rendezvous, outbox, config.verbose)
        self._cause = cause = Cause(slots, members, logs, min(patience(config), config.start_timeout), silences.blame)
        self._termination = Termination(outbox, watch, outcome, config.grace, now)
        self._joining = Joining(config, nodes, slots, members, candidates, outbox) if candidates is not None else None
        facts = (rendezvous, cause, nodes, watch, silences, patience(config), self._joining, outbox)
        self._membership = membership = Membership(config, slots, *facts)
        parts = (rendezvous, cause, self._termination, membership, self._joining, outcome, patience(config), outbox)
        self._endings = endings = Endings(config, nodes, slots, *parts)
        self._stalls = stalls = Stalls(config, rendezvous, logs, outbox)
        results, proposals = Results(outcome, members, outbox), Proposals(rendezvous, outbox)
        self._next_turn = float("-inf")
        """Time (time.monotonic) before which `turn` does nothing."""
        self._put_off = False
        """Whether the last call of `turn` did nothing."""
        self._said: set[str] = set()
        """Messages from ranks that were shown to the user."""
        self.overdue = False
        """Whether agents have missed their deadline to end, so that they and their workers have to be killed."""
        self.routes: Mapping[str, Sequence[Handler]] = {
            # Handlers of events in the life of a host.
            "connected": (),
            "ready": (),
            "probed": (self._joining.probed,) if self._joining is not None else (),
            "refused": (),
            "heartbeat": (silences.heartbeat,),
            "silent": (silences.silent,),
            "heard": (silences.heard,),
            "unheard": (silences.unheard,),
            "unstarted": (endings.unstarted,),
            "preempted": (endings.preempted,),
            "unheeded": (endings.unheeded,),
            "end": (results.end, endings.end),
            "lost": (endings.lost,),
            # Handlers of events in the life of a rank.
            "started": (watch.started, rendezvous.started),
            "hello": (results.hello, membership.hello),
            "claim": (membership.claim,),
            "beat": (watch.beat, rendezvous.beat),
            "numbers": (watch.numbers, rendezvous.numbers),
            "out": (watch.printed, self._print),
            "err": (watch.printed, cause.complained, self._print),
            "say": (self._say,),
            "failed": (watch.failed, endings.failed),
            "exits": (cause.exits,),
            "ending": (rendezvous.ending, cause.ending),
            "done": (watch.done, endings.done, results.done),
            "result": (results.result,),
            "exit": (watch.exit, results.exit, endings.exit),
            # Handlers of requests by which ranks exchange data or learn about each other.
            "exchange": (rendezvous.exchange,),
            "put": (rendezvous.put,),
            "get": (rendezvous.get,),
            "peers": (silences.peers,),
            "reconnect": (membership.reconnect,),
            "approach": (membership.approach,),
            "give": (membership.give,),
            "propose": (proposals.propose,),
            "wrote": (self._pass_on,),
            # Handlers of requests for ranks' stack traces, and of the answers.
            "dump": (stalls.dump,),
            "stacks": (stalls.stacks,),
            "stack": (stalls.stack,),
        }
        """For each kind of event, its handlers in the order in which they are called; none if the event needs no
        decision."""

    def start(self, orders: Iterable[Frame], now: float, uptime: float) -> None:
        """Send each node's agent the order to start its workers. now, uptime: the current time, as time.monotonic and
        as uptime of the launcher's host."""
        self._begun, self._uptime = now, uptime
        ranks = defaultdict[int, list[int]](list)
        for slot in self._slots:
            ranks[slot.cross_rank].append(slot.rank)
        for place, (node, order) in enumerate(zip(self._nodes, orders, strict=True)):
            node.ranks, node.works = frozenset(ranks[place]), True
            self.outbox.send(node, order)
        for node in self._nodes:
            if node.ended:
                self._endings.lose(node, "was lost before it could start its workers", now)

    def take(self, event: Event) -> None:
        """Handle an event: a frame from an agent, or a change of the connection to an agent."""
        if self._joining is not None and self._joining.awaits(event.node):
            self._joining.take(event)
            return
        for handle in self.routes[event.frame.kind]:
            handle(event)

    def signal(self, caught: set[int], now: float) -> None:
        """Handle the signals `caught`, which `dadt run` received."""
        self._endings.signal(caught, now)

    def kill(self, now: float) -> float:
        """End the job on request of `dadt kill`. Returns the seconds until its workers receive SIGKILL."""
        return self._termination.end(SIGTERM, "dadt kill", now)

    def turn(self, now: float) -> None:
        """Do everything that is due because time has passed. As this examines all ranks, calls that follow soon after
        another one do nothing in a large job."""
        self._put_off = now < self._next_turn
        if self._put_off:
            return
        self._next_turn = now + LOOK_SECONDS * (len(self._slots) if len(self._slots) > SMALL else 0)
        self._rendezvous.settle(now)
        self._stalls.turn(now)
        self._silences.turn(now)
        self.watch.turn(now)
        self.overdue = self._termination.turn(now)
        if self.overdue:
            self._endings.miss(now)
        self._endings.turn(now)
        self._membership.turn(self._termination.goes_on, now)

    def patience(self, now: float) -> float:
        """Return the seconds until `turn` must be called next, if no event comes before."""
        turn = WAITING_SECONDS if self._rendezvous.waiting else TURN_SECONDS
        put_off = self._next_turn - now if self._put_off else turn
        return max(0.0, min(turn, put_off, self._termination.deadline - now))

    def stand_still(self, caught: set[int], now: float) -> None:
        """Handle the signals `caught`, of which there may be none, while output to the user is blocked and so no events
        are handled."""
        self._termination.excuse(now)
        self.signal(caught, now)

    @property
    def unread(self) -> DadtError | None:
        """The error with which `dadt run` has to end because the user has asked twice to end the job while its output
        is blocked; None if the user has not."""
        if not self._termination.at_once:
            return None
        if (preemption := self._outcome.preemption) is not None:
            return Preempted(f"{preemption.who} while nobody read the output; all workers stopped")
        return Unread(self._outcome.signal)

    @property
    def grows(self) -> bool:
        """Whether new hosts may still join in place of lost ones."""
        return self._joining is not None and self._termination.goes_on

    @property
    def saves(self) -> int:
        """Number of checkpoint signals that were sent to the workers."""
        return self._endings.saves

    @property
    def over(self) -> bool:
        """Whether all workers have ended on all hosts, as far as this can be known."""
        return self.overdue or not any(node.works for node in self._nodes)

    def judge(self, now: float, stuck: Sequence[int], stacks: Sequence[Path]) -> Outcome:
        """Return the outcome of a job that is over. stuck: processes that could not be ended. stacks: files with the
        ranks' stacks. Raises LaunchError if the workers could not be started or an agent was lost."""
        outcome = self._outcome
        outcome.seconds = now - self._begun
        outcome.stuck = stuck or outcome.stuck
        outcome.losses = self.watch.losses
        if (preemption := outcome.preemption) is not None and preemption.follows:
            preemption = outcome.preemption = None
        if preemption is not None:
            outcome.preemption = replace(preemption, endings=self._cause.endings, done=outcome.summaries)
        elif not outcome.signal:
            try:
                outcome.failure = self._cause.judge(self._uptime, stacks)
            except LaunchError as error:
                error.is_last = outcome.told_to_end
                raise
        return outcome

    def _pass_on(self, event: Event) -> None:
        """Forward a rank's report that it has written a file to the other hosts that see the same working folder."""
        header = {name: value for name, value in event.frame.header.items() if name != "line"}
        for node in self._nodes:
            if node is not event.node and node.folder is not None and node.folder == event.node.folder:
                self.outbox.send(node, Frame(event.frame.kind, header))

    def _say(self, event: Event) -> None:
        """Show the user a message from a rank. If several ranks send the same message, it is shown once."""
        text = event.frame["text"]
        if text not in self._said and len(self._said) < MOST_TEXTS:
            self._said.add(text)
            self.outbox.say(text, event.frame["level"])

    def _print(self, event: Event) -> None:
        self.outbox.put(PrintOutput(event.frame["rank"], event.frame.kind, event.frame.body))
