"""What drives the decisions of a launcher in the simulated world, as dadt/launch/attempt.py and agents.py do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dadt.control.frame import Frame
from dadt.errors import DadtError
from dadt.launch.actions import (
    Action,
    AskHost,
    Event,
    GiveUpHost,
    ReachHost,
    SayText,
    SendFrame,
    StartWorkers,
    WriteJournal,
)
from dadt.launch.contact import Contact
from dadt.launch.ending.outcome import Outcome
from dadt.launch.ending.signals import ENDING_SIGNALS
from dadt.launch.ending.termination import END_SECONDS
from dadt.launch.hosts.candidates import Candidates
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slot import Slot
from dadt.launch.job import Job
from dadt.launch.members.node import Node
from dadt.launch.members.replacement import replaces
from simulation.world import Alarm, Link, Process, address_of

if TYPE_CHECKING:
    from simulation.job import SimulatedJob

LATE_SECONDS = 1.0
"""How late the launcher may be with what is due."""
READ_SECONDS = 0.0005
"""What comes within this time is read at once."""


class Launcher:
    """One `dadt run`, once all agents are ready."""

    def __init__(self, simulated: SimulatedJob, watch: Callable[[Launcher], None]) -> None:
        """watch: called after each turn."""
        self.world, self._simulated, self._watch = simulated.world, simulated, watch
        self.clock = 0.0
        """Seconds by which its host's clock has jumped."""
        world, config, hosts = self.world, simulated.config, simulated.hosts
        self.process = Process(world, "launcher")
        names = [f"host{index}" if hosts > 1 else "" for index in range(hosts)]
        self.slots = [
            Slot(rank=rank, world_size=simulated.size, local_rank=rank % simulated.per_host, host=names[place],
                 local_size=simulated.per_host, cross_rank=place)
            for rank in range(simulated.size) for place in [rank // simulated.per_host]
        ]  # fmt: skip
        report = {"pid": 100, "version": "1"}
        self.nodes = [
            Node(index, Host(name=name, slots=simulated.per_host), report=report, heard=world.now)
            for index, name in enumerate(names)
        ]
        for node in self.nodes:
            node.is_child, node.address = hosts == 1, address_of(node.index) if hosts > 1 else ""
            node.interface = "eth0" if hosts > 1 else ""
        self._contact = Contact(self.nodes, config.orphan_timeout, world.now)
        self.down: dict[Node, Link] = {}
        self.said: list[tuple[float, str, str]] = []
        """Time, level and text of each line that the user reads."""
        self.outcome: Outcome | None = None
        self.error: DadtError | None = None
        """What `dadt run` raised in place of an outcome."""
        self.ended_at: float | None = None
        self.crashed = False
        self.generation = 0
        """The newest that agents were told of."""
        self.open: dict[tuple[Node, int], tuple[int, float, str]] = {}
        """Questions of ranks that wait: their generation, when the answer has to come at last, and their text."""
        self.end_by = float("inf")
        """When all has to be over, as agents were told to stop their workers."""
        self.heeds: set[int] = set()
        """Signals of the user that end the job."""
        self._caught: set[int] = set()
        self._events: list[Event] = []
        self._alarm = Alarm(self.process, self._turn)
        every = [*(node.host for node in self.nodes), *simulated.scenario.spare_hosts]
        self.candidates = Candidates(every) if simulated.scenario.joins else None
        """Hosts that may replace lost ones; None where they are not replaced."""
        self.job = Job(config, self.nodes, self.slots, Path("logs"), world.now, world.epoch, self.candidates)

    def begin(self) -> None:
        for node in self.nodes:
            self._contact.hear(node, Frame("ready", {"clock": self._simulated.agents[node.index].epoch}), self._epoch)
        self.job.start([self._order(node) for node in self.nodes], self.world.now, self.world.epoch)
        self._turn()

    @property
    def _epoch(self) -> float:
        return self.world.epoch + self.clock

    def _order(self, node: Node, *, joins: bool = False) -> Frame:
        simulated, config = self._simulated, self._simulated.config
        mine = [slot for slot in self.slots if slot.cross_rank == node.index]
        workers = [
            {
                "rank": slot.rank,
                "local_rank": slot.local_rank,
                "env": {"DADT_JOINS": "1"} if joins else {},
                "command": ["python", "train.py"],
            }
            for slot in mine
        ]
        header = {
            "job": "job", "env": {}, "workers": workers, "cwd": "/work", "terminal": None, "adopt": 0.0,
            "stays": replaces(config), "secret": "00" * 32,
        }  # fmt: skip
        if number := simulated.checkpoint_signal:
            header["checkpoint"] = {"number": number, "grace": config.grace, "alone": simulated.alone(len(mine))}
        if simulated.hosts > 1:
            beats = {"index": node.index, "address": node.address, "timeout": config.heartbeat_timeout}
            header["heartbeat"] = beats
        return Frame("job", header)

    # What comes ----------------------------------------------------------------------------------------------------

    def hear(self, node: Node, frame: Frame) -> None:
        self.process.get(lambda: self._hear(node, frame))

    def _hear(self, node: Node, frame: Frame) -> None:
        if node.ended:
            return
        node.heard = self.world.now
        if refusal := self._contact.hear(node, frame, self._epoch):
            self._lose(node, refusal)
        else:
            self._put(node, frame)

    def end_of(self, node: Node, why: str) -> None:
        """The connection to an agent has ended."""
        self.process.get(lambda: self._end_of(node, why))

    def _end_of(self, node: Node, why: str) -> None:
        if node.ended:
            return
        if node.done and not why:
            node.ended = True
        else:
            self._lose(node, why or "the connection was closed")

    def _lose(self, node: Node, why: str) -> None:
        node.ended = True
        self.down[node].close()
        self._put(node, Frame("lost", {"message": why, "time": self._epoch}))

    def connected(self, node: Node) -> None:
        """The agent of a host that is to join runs."""
        node.heard = self.world.now
        self.process.get(lambda: self._put(node, Frame("connected")))

    def unreached(self, node: Node, why: str) -> None:
        """The agent of a host that is to join cannot be started."""
        if not node.ended:
            node.ended = True
            self.process.get(lambda: self._put(node, Frame("lost", {"message": why})))

    def signal(self, number: int) -> None:
        """The user signals `dadt run`."""
        self.world.note("user", f"sends signal {number} to dadt run")
        self.process.get(lambda: self._catch(number))

    def _catch(self, number: int) -> None:
        self._caught.add(number)
        self._alarm.set(0.0)

    def _put(self, node: Node, frame: Frame) -> None:
        self._events.append(Event(node, frame, self.world.now))
        self._alarm.set(READ_SECONDS)

    # What is done about it -----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if not self.process.alive or self.outcome is not None or self.error is not None:
            return
        now, job, contact = self.world.now, self.job, self._contact
        contact.excuse(now)
        if contact.is_beat_due(now):
            self._send_all(Frame("beat"))
        if self._caught:
            caught, self._caught = self._caught, set()
            self.heeds |= caught & ENDING_SIGNALS
            job.signal(caught, now)
            self._carry_out()
        for node, why in contact.silent(now):
            self._lose(node, why)
        events, self._events = self._events, []
        for event in events:
            if self.world.log is not None and event.frame.kind not in ("beat", "numbers"):
                self.world.note("launcher", f"hears from {event.node.name or 'the host'}: {_shown(event.frame)}")
            self._note_question(event)
            job.take(event)
            self._carry_out()
        job.turn(now)
        self._carry_out()
        self._watch(self)
        if job.over:
            self._finish()
            return
        self._alarm.set(max(0.001, min(job.patience(now), contact.beat_seconds)))

    def _carry_out(self) -> None:
        self.job.outbox.empty(self._perform)

    def _perform(self, action: Action) -> None:
        match action:
            case SendFrame(frame, node):
                if self.world.log is not None:
                    self.world.note("launcher", f"sends {_shown(frame)}")
                self._note_order(action)
                if node is None:
                    self._send_all(frame)
                else:
                    self._send(node, frame)
            case SayText(text, level):
                self.world.note("user", f"reads: {text}")
                self.said.append((self.world.now, level, text))
            case ReachHost(node):
                self.world.note("launcher", f"starts the agent of {node.name}")
                self._simulated.reach(node)
            case AskHost(node, place):
                hosts = len(self.nodes)
                look = {"job": "job", "index": place, "hosts": hosts, "cwd": "/work", "files": [], "prologue": "",
                        "orphan_timeout": self._simulated.config.orphan_timeout, "env": {}}  # fmt: skip
                self._send(node, Frame("look", look))
            case StartWorkers(node):
                self._send(node, self._order(node, joins=True))
            case GiveUpHost(node):
                node.ended = True
                if node in self.down:
                    self.down[node].close()
            case WriteJournal(kind, facts):
                self.world.note("launcher", f"writes down {kind}: {facts}")

    def _note_question(self, event: Event) -> None:
        frame = event.frame
        if frame.kind in ("exchange", "reconnect"):
            until = event.now + frame["timeout"] + LATE_SECONDS
            self.open[event.node, frame["line"]] = frame.get("generation", 0), until, _shown(frame)
        elif frame.kind == "lost":
            self.open = {asked: facts for asked, facts in self.open.items() if asked[0] is not event.node}

    def _note_order(self, action: SendFrame) -> None:
        frame = action.frame
        if frame.kind == "answer" and frame["answer"]["kind"] == "peers":
            for peer in frame["answer"]["peers"]:
                self._simulated.invariants.check_state(peer)
        if frame.kind == "answer" and action.node is not None:
            self.open.pop((action.node, frame["line"]), None)
        elif frame.kind == "regroup":
            self.generation = frame["generation"]
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

    def _finish(self) -> None:
        """Attempt._close, and the judgement."""
        try:
            self.outcome = self.job.judge(self.world.now, [], [])
        except DadtError as error:
            self.error = error
        self.die()
        shown = self.error or (self.outcome.failure.lines()[:3] if self.outcome and self.outcome.failure else "ends")
        self.world.note("launcher", f"{shown}, exit code {self.exit_code}")

    def die(self) -> None:
        """The process ends, and its connections with it."""
        self.process.alive, self.ended_at = False, self.world.now
        for wire in self.down.values():
            wire.close()

    def crash(self) -> None:
        """Its machine is gone."""
        self.process.alive, self.ended_at, self.crashed = False, self.world.now, True
        for wire in self.down.values():
            wire.vanish()

    def stop(self) -> None:
        self.process.stop()

    def go_on(self) -> None:
        self.process.go_on()
        self._alarm.set(0.0)

    @property
    def exit_code(self) -> int | None:
        if self.error is not None:
            return self.error.exit_code
        return self.outcome.exit_code if self.outcome is not None else None


def _shown(frame: Frame) -> str:
    return f"{frame.kind} {', '.join(f'{name} {value}' for name, value in frame.header.items())}"[:300]
