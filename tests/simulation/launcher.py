"""What drives the decisions of a launcher in the simulated world, as dadt/launch/attempt.py and agents.py do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import TYPE_CHECKING

from dadt.control.frame import Frame
from dadt.errors import DadtError
from dadt.launch.actions import (
    Action,
    AskHost,
    DismissHosts,
    Event,
    GiveUpHost,
    Outbox,
    ReachHost,
    SayPart,
    SayText,
    SendFrame,
    StartWorkers,
    Steps,
    TimeReached,
    WriteJournal,
)
from dadt.launch.agents import FURTHER_SECONDS
from dadt.launch.contact import Contact
from dadt.launch.ending.outcome import Outcome, end_early
from dadt.launch.ending.signals import ENDING_SIGNALS
from dadt.launch.ending.termination import END_SECONDS
from dadt.launch.hosts.host import Host
from dadt.launch.job import Job
from dadt.launch.members.node import Node
from dadt.launch.start.orders import look, order_to_join, orders
from dadt.launch.start.placement import Placed, place_workers
from dadt.launch.start.plan import Plan
from dadt.launch.start.startup import gather
from simulation.open_questions import LATE_SECONDS, OpenQuestions, described
from simulation.world import Alarm, Link

if TYPE_CHECKING:
    from simulation.job import SimulatedJob

JOB = "job"
LOGS = Path("/work/dadt_logs", JOB)
COMMAND = ("python", "train.py")
HANG_UP_SECONDS = 4.0
"""How long agents may take to go once the launcher has hung up (dadt/launch/attempt.py)."""
READ_SECONDS = 0.0005
"""What comes within this time is read at once."""


class Launcher:
    """What `dadt run` does in one attempt to run the job."""

    def __init__(self, simulated: SimulatedJob, watch: Callable[[Launcher], None]) -> None:
        """watch: called after each turn in which there are workers."""
        self.world, self._simulated, self._watch = simulated.world, simulated, watch
        self._run = simulated.run
        self.process = self._run.process
        self.nodes: list[Node] = []
        self.down: dict[Node, Link] = {}
        self.job: Job | None = None
        """What is decided of the workers; None before they are placed."""
        self.outcome: Outcome | None = None
        self.error: DadtError | None = None
        """What the attempt raised in place of an outcome."""
        self.ended_at: float | None = None
        self.generation = 0
        """The newest that agents were told of."""
        self.open = OpenQuestions()
        self.end_by = float("inf")
        """When all has to be over, as agents were told to stop their workers."""
        self.heeds: set[int] = set()
        """Signals of the user that end the job."""
        self._runs_until = 0.0
        """When it was last stopped."""
        self.lost_at: dict[Node, float] = {}
        """When it has lost an agent."""
        self.exits: set[int] = set()
        """Ranks of which it has heard that a process of theirs has ended."""
        self.at_end: set[int] = set()
        """Ranks that have told it of the end of their script."""
        self.said: list[tuple[float, str, str]] = []
        """Time, level and text of each line that the user reads in this attempt."""
        self._events: list[Event] = []
        self._losses: list[tuple[Node, Frame]] = []
        """Agents that are gone and are not in `_events` yet."""
        self._alarm = Alarm(self.process, self._turn)
        self._open_ends: set[Node] = set()
        """Nodes whose agents have not closed their connections."""
        self._close_by = float("inf")
        """When the launcher waits no longer for its agents to go, once it has hung up."""

    @property
    def _epoch(self) -> float:
        return self.world.epoch + self._run.clock

    @property
    def expects(self) -> bool:
        """Whether agents may still come."""
        return self.process.alive and self.ended_at is None

    # The start -----------------------------------------------------------------------------------------------------

    def begin(self, hosts: Sequence[Host]) -> None:
        config = self._simulated.config
        self.nodes = [Node(index, host) for index, host in enumerate(hosts)]
        self._plan = Plan(config=config, command=COMMAND, hosts=hosts, cwd="/work")
        self._contact = Contact(self.nodes, config.orphan_timeout, self.world.now)
        for node in self.nodes:
            self._simulated.start(node)
        self._outbox = Outbox()
        self._steps: Steps[Placed] = self._startup()
        try:
            self._until = next(self._steps)
        except DadtError as error:
            self._end(None, error)
        self._turn()

    def _startup(self) -> Steps[Placed]:
        """Attempt._startup."""
        config, nodes, outbox = self._simulated.config, self.nodes, self._outbox
        needs = {"all_needed": not config.min_np, "again": self._simulated.number > 0}
        candidates = self._run.discovery.candidates
        now = yield from gather(nodes, config.start_timeout, JOB, candidates, outbox, self.world.now, **needs)
        return (yield from place_workers(self._plan, nodes, JOB, outbox, now))

    def _advance(self, now: float) -> None:
        """Agents.go_through, in one turn."""
        try:
            if caught := self._take_signals():
                end_early(caught, self._simulated.checkpoint_signal, again=self._simulated.number > 0)
            while self._events:
                self._until = self._steps.send(self._next_event())
                self._outbox.empty(self._perform)
            self._until = self._steps.send(TimeReached(now))
        except StopIteration as end:
            self._place(end.value)
        except DadtError as error:
            self._outbox.empty(self._perform)
            self._end(None, error)

    def _place(self, placed: Placed) -> None:
        """The rest of Attempt._place, Attempt._prepare, and the order to start the workers."""
        simulated, now = self._simulated, self.world.now
        self._outbox.empty(self._perform)
        self.slots = placed.slots
        simulated.placed(self.nodes, len(self.slots))
        self._placed = replace(placed, restarts=simulated.number, config=simulated.config)
        candidates = self._run.discovery.candidates
        joining = candidates if simulated.scenario.joins else None
        job = self.job = Job(simulated.config, self.nodes, self.slots, LOGS, now, self._epoch, joining)
        candidates.served((node.host for node in self.nodes), now)
        job.start(orders(self._placed), now, now)
        self._carry_out(job)

    # What comes ----------------------------------------------------------------------------------------------------

    def hear(self, node: Node, frame: Frame) -> None:
        self.process.get(lambda: self._hear(node, frame))

    def _hear(self, node: Node, frame: Frame) -> None:
        if node.ended or self.ended_at is not None:
            return
        node.heard = self.world.now
        if refusal := self._contact.hear(node, frame, self.world.now):
            self._lose(node, refusal)
        else:
            self._put(node, frame)

    def end_of(self, node: Node, why: str) -> None:
        """The connection to an agent has ended."""
        self.process.get(lambda: self._end_of(node, why))

    def _end_of(self, node: Node, why: str) -> None:
        self._open_ends.discard(node)
        node.closed = True
        if self.ended_at is not None:
            self._close()
        if node.ended or self.ended_at is not None:
            return
        if node.done and not why:
            node.ended = True
        else:
            seconds = FURTHER_SECONDS if self._losses else self._simulated.starter.explains_in()
            self._lose(node, why or "the connection was closed", seconds)

    def _lose(self, node: Node, why: str, seconds: float = 0.0) -> None:
        """seconds: how long the launcher waits to learn why the agent is gone."""
        node.ended = True
        self.down[node].close()
        self.lost_at[node] = self.world.now
        self._losses.append((node, Frame("lost", {"message": why, "time": self.world.now})))
        if seconds:
            self.stop()
            self.world.after(seconds, self.go_on)
        else:
            self._tell_losses()

    def _tell_losses(self) -> None:
        """What has come while the launcher waited to learn why agents are gone is read first."""
        if self.process.runs:
            losses, self._losses = self._losses, []
            for loss in losses:
                self._put(*loss)

    def hang_up(self, why: str) -> None:
        """All connections that are left are closed on this side."""
        for node in [node for node in self.nodes if node in self.down and not node.ended]:
            self._end_of(node, why)

    def connected(self, node: Node) -> None:
        """The agent of a host runs."""
        self._open_ends.add(node)
        self.process.get(lambda: self._connected(node))

    def _connected(self, node: Node) -> None:
        node.heard, node.state, node.is_child = self.world.now, "has not answered yet", self._simulated.hosts == 1
        self._put(node, Frame("connected"))

    def unreached(self, node: Node, why: str) -> None:
        """The agent of a host cannot be started."""
        if not node.ended and self.expects:
            node.ended = True
            self.process.get(lambda: self._put(node, Frame("lost", {"message": why})))

    def signal(self, number: int) -> None:
        """The user signals `dadt run`."""
        self.world.note("user", f"sends signal {number} to dadt run")
        self._run.caught.add(number)  # the kernel keeps it while the process is stopped
        self.process.get(self._wake)

    def kill(self) -> None:
        """`dadt kill` asks this job to end."""
        assert self.job is not None
        self.heeds.add(SIGTERM)
        self.job.kill(self.world.now)
        self._carry_out(self.job)

    def _wake(self) -> None:
        if self.expects:
            self._alarm.set(0.0)

    def _take_signals(self) -> set[int]:
        caught, self._run.caught = self._run.caught, set()
        self.heeds |= caught & ENDING_SIGNALS
        return caught

    def _put(self, node: Node, frame: Frame) -> None:
        if frame.kind == "lost":
            self.lost_at.setdefault(node, self.world.now)
        self._events.append(Event(node, frame, self.world.now))
        self._alarm.set(READ_SECONDS)

    # What is done about it -----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self._losses or not self.process.alive or not self.nodes:
            return  # it turns again once the losses are told
        if self.ended_at is not None:
            self._close()
            return
        now, job, contact = self.world.now, self.job, self._contact
        contact.excuse(now)
        if contact.is_beat_due(now):
            self._send_all(Frame("beat"))
        for node, why in contact.silent(now):
            self._lose(node, why)
        if job is None:
            self._advance(now)
            wait = self._until - now
        else:
            self._work(job, now)
            wait = job.patience(now)
        if self.ended_at is None:
            self._alarm.set(max(0.001, min(wait, contact.beat_seconds)))

    def _work(self, job: Job, now: float) -> None:
        """Attempt._wait, in one turn."""
        if caught := self._take_signals():
            job.signal(caught, now)
            self._carry_out(job)
        if job.grows:
            self._run.poll()
        while self._events:
            event = self._next_event()
            self.open.note(event)
            if event.frame.kind == "exit":
                self.exits.add(event.frame["rank"])
            elif event.frame.kind == "ending":
                self.at_end.add(event.frame["rank"])
            elif event.frame.kind == "hello":
                self.at_end.discard(event.frame["rank"])
            job.take(event)
            self._carry_out(job)
        job.turn(now)
        self._carry_out(job)
        self._watch(self)
        if job.over:
            self._judge(job)

    def _next_event(self) -> Event:
        event = self._events.pop(0)
        if self.world.log is not None and event.frame.kind not in ("beat", "numbers"):
            self.world.note("launcher", f"hears from {event.node.name or 'the host'}: {described(event.frame)}")
        return event

    def _carry_out(self, job: Job) -> None:
        job.outbox.empty(self._perform)

    def _perform(self, action: Action) -> None:
        match action:
            case SendFrame(frame, node):
                if self.world.log is not None:
                    self.world.note("launcher", f"sends {described(frame)}")
                self._note_order(action)
                if node is None:
                    self._send_all(frame)
                else:
                    self._send(node, frame)
            case SayText(text, level):
                self.said.append((self.world.now, level, text))
                self._run.say(text, level)
            case SayPart(text, last):
                self.world.note("user", f"reads: {text}{'' if last else ' ...'}")
            case ReachHost(node):
                self.world.note("launcher", f"starts the agent of {node.name}")
                self._simulated.join(node)
            case AskHost(node, place):
                facts = look(self._plan, JOB, node)
                self._send(node, Frame("look", {**facts, "index": place, "hosts": len(self.nodes)}))
            case StartWorkers(node, place):
                self._send(node, order_to_join(self._placed, place, self.job.saves))
            case GiveUpHost(node):
                self._hang_up(node)
            case DismissHosts(nodes):
                for node in nodes:
                    self._hang_up(node)
                self._events = [event for event in self._events if event.node in self.nodes]
            case WriteJournal(kind, facts):
                self.world.note("launcher", f"writes down {kind}: {facts}")

    def _note_order(self, action: SendFrame) -> None:
        frame = action.frame
        if frame.kind == "answer" and frame["answer"]["kind"] == "peers":
            heard = action.node is not None and self._simulated.is_there(action.node)
            for peer in frame["answer"]["peers"] if heard else ():
                self._simulated.invariants.check_state(peer)
        if frame.kind == "answer" and action.node is not None:
            self.open.answered(action.node, frame["line"])
        elif frame.kind == "signal" and frame["number"] == SIGKILL:
            self.open.ended(frame["rank"])
        elif frame.kind == "regroup":
            self.generation = frame["generation"]
            self._simulated.invariants.regrouped(frame["members"])
        elif frame.kind == "worker":
            self._simulated.invariants.starts_anew(self, frame["rank"])
        elif frame.kind in ("stop", "interrupt", "preempt") and "natural" not in frame.header:
            grace = frame.get("grace", self._simulated.config.grace)
            seconds = grace if frame.kind == "stop" else 2 * grace
            self.end_by = min(self.end_by, self.world.now + seconds + END_SECONDS + LATE_SECONDS)

    def _send(self, node: Node, frame: Frame) -> None:
        if not node.ended and node in self.down:
            self.down[node].send(frame)

    def _send_all(self, frame: Frame) -> None:
        for node in self.nodes:
            self._send(node, frame)

    def _hang_up(self, node: Node) -> None:
        node.ended = True
        if node in self.down:
            self.down[node].close()

    # The end -------------------------------------------------------------------------------------------------------

    def _judge(self, job: Job) -> None:
        try:
            self._end(job.judge(self.world.now, [], []), None, at_once=job.overdue)
        except DadtError as error:
            self._end(None, error, at_once=job.overdue)

    def _end(self, outcome: Outcome | None, error: DadtError | None, *, at_once: bool = False) -> None:
        """The rest of Attempt.run: hang up, and wait until the agents are gone."""
        self.outcome, self.error, self.ended_at = outcome, error, self.world.now
        shown = self.error or (self.outcome.failure.lines()[:3] if self.outcome and self.outcome.failure else "ends")
        self.world.note("launcher", f"{shown}, exit code {self.exit_code}")
        self._simulated.invariants.ended()
        for wire in self.down.values():
            wire.close()
        self._simulated.starter.close()
        self._close_by = self.world.now + (0.0 if at_once else HANG_UP_SECONDS)
        self._close()

    def _close(self) -> None:
        if self._run.over or self._simulated is not self._run.attempt:
            return
        if self._open_ends and self.world.now < self._close_by:
            self._alarm.set(self._close_by - self.world.now)
            return
        if self._simulated.hosts == 1:
            self._simulated.machines[0].die()  # LocalChannel.end kills it, and `sweep` its workers
        for node in self.nodes:
            node.ended |= node in self._open_ends
            if node.failed:
                busy_until = node.busy_until(self._simulated.config.orphan_timeout)
                self._run.discovery.candidates.failed(node.host, self.world.now, busy_until)
        self._run.attempt_over(self.outcome, self.error)

    def die(self) -> None:
        """The process ends, and its connections with it."""
        self.ended_at = self.ended_at or self.world.now
        self._leave(Link.close)

    def crash(self) -> None:
        """Its machine is gone."""
        self._leave(Link.vanish)

    def _leave(self, end: Callable[[Link], None]) -> None:
        self._run.die()
        self._simulated.starter.close()
        for wire in self.down.values():
            end(wire)

    def stop(self) -> None:
        self._runs_until = self.world.now if self.process.runs else self._runs_until
        self.process.stop()

    def go_on(self) -> None:
        if self.process.stops == 1:
            self.end_by += self.world.now - self._runs_until  # what agents have told meanwhile is read first
        self.process.go_on()
        self._tell_losses()
        self._alarm.set(0.0)

    @property
    def exit_code(self) -> int | None:
        if self.error is not None:
            return self.error.exit_code
        return self.outcome.exit_code if self.outcome is not None else None
