"""A host and its agent: carries out what the agent's decisions (`HostJob`) ask for, as dadt/launch/agent does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any

from dadt.control import schema
from dadt.control.frame import Frame, Parser
from dadt.errors import DadtError
from dadt.launch.agent import actions
from dadt.launch.agent.dump import ANSWER_SECONDS
from dadt.launch.agent.host_job import TICK_SECONDS, TURN_SECONDS, HostJob
from dadt.launch.agent.launcher_contact import LauncherContact
from dadt.launch.agent.other_hosts import OtherHosts
from dadt.launch.agent.registry import Line, Saying
from dadt.launch.agent.supervisor import STACK_SECONDS
from dadt.launch.ending import processes
from dadt.launch.ending.signals import ENDING_SIGNALS
from simulation.host_facts import probed, report_of
from simulation.worker import LINE_SECONDS, Worker
from simulation.world import Alarm, Broken, Link, Process, World

if TYPE_CHECKING:
    from simulation.job import SimulatedJob

READ_SECONDS = 0.0005
"""What comes within this time is looked at in one turn."""
WRITE_SECONDS = 0.02
"""What a worker takes to write its stacks."""
NOT_RUN = 127
"""Exit code of a worker whose command cannot be run."""
FOLDER = Path("/tmp/dadt/job")

Answer = Callable[[Frame], Any]


class Agent:
    """One host: its agent, the processes of its workers, and the host's clock."""

    def __init__(self, world: World, job: SimulatedJob, machine: int, clock: float, how: str = "") -> None:
        """clock: seconds by which the host's clock is ahead. how: what is the matter with it as it is started."""
        self.world, self.job, self.machine, self.clock, self.how = world, job, machine, clock, how
        self.index = -1
        """Its place in the job; -1 before it has one."""
        self.ready_at = float("inf")
        """When it has reported about its host."""
        self.lacks = ""
        """What is used up on this host: `descriptors` of the agent, or the `disk`."""
        self.disk = job.disk_of(machine)
        self.memory_kills = 0
        """How many of its processes the kernel has killed for lack of memory."""
        self.process = Process(world, f"host{machine}")
        self.process.alive = False  # until it is started
        self.up: Link
        self.down: Link
        self.workers: dict[int, Worker] = {}
        """Rank to its newest process."""
        self.processes: list[Worker] = []
        """All processes of workers that were started here."""
        self.host: HostJob | None = None
        """What the agent decides; None before the order to start workers has come."""
        self._contact, self._others = LauncherContact(world.now), OtherHosts(-1, job.config.heartbeat_timeout)
        self._mail: set[int] = set()
        """Hosts whose heartbeats have come while this process was stopped."""
        self._pulse: dict[int, tuple[int, float]] = {}
        """The memory that workers share with their agent: for each rank its step, and when it was written."""
        self._lines: dict[int, tuple[Worker, Answer | None]] = {}
        """Open connections: the worker, and what takes the answer to its question; None where it only reports."""
        self._reports: dict[Worker, Line] = {}
        self._numbered, self._gone = 0, False
        self.heard = self._stopped_at = world.now
        """When the launcher was last heard, or this process last began to run."""
        self.lost = float("inf")  # when the connection to the launcher has ended
        self._inquiries: list[tuple[float, Frame]] = []
        self._dump: tuple[float, list[Worker]] | None = None  # when stacks are complete, and who writes them
        self._alarm = Alarm(self.process, self._turn)

    @property
    def epoch(self) -> float:
        """The time by this host's clock, in seconds since the epoch."""
        return self.world.epoch + self.clock

    @property
    def left(self) -> list[Worker]:
        """The workers' processes that run."""
        return [worker for worker in self.processes if worker.process.alive]

    # From the launcher -------------------------------------------------------------------------------------------

    def hear(self, frame: Frame) -> None:
        """A frame of the launcher has come."""
        self.process.get(lambda: self._obey(frame))

    def hang_up(self, why: str) -> None:
        """The connection to the launcher has ended."""
        self.process.get(self._lose_launcher)

    def _lose_launcher(self) -> None:
        self._gone, self.lost = True, min(self.lost, self.world.now)
        self._alarm.set(READ_SECONDS)

    def _obey(self, order: Frame) -> None:
        self._contact.hear(self.world.now)
        self.heard = self.world.now
        if order.kind == "look":
            self._contact.patience = order["orphan_timeout"] or float("inf")
            self._look()
        elif order.kind == "job":
            self._start(order)
        elif order.kind == "probe" and self.host is None:
            self._probe(order)
        elif self.host is not None:
            self.host.order(order, self.world.now)
            self._carry_out()
        self._alarm.set(READ_SECONDS)

    def _look(self) -> None:
        if self.how == "dies at once":
            self.die()
        elif self.how != "never answers":
            self.process.after(20.0 if self.how == "answers late" else 0.5, self._report)

    def _report(self) -> None:
        self.ready_at = self.world.now
        self._send(report_of(self.machine, self.epoch, self.how))

    def _probe(self, order: Frame) -> None:
        answer = probed(self.job, self.machine, order)
        self.process.after(self.world.spread(0.1), lambda: self._send(answer))

    def _start(self, job: Frame) -> None:
        self._others = OtherHosts(self.index, self.job.config.heartbeat_timeout)
        if self.lacks == "disk":  # Agent._serve
            self._send(Frame("unstarted", {"message": "/tmp/dadt/job: cannot be written (No space left on device)"}))
            self._send(Frame("end", {"stuck": [], "signal": 0}))
            self.die()
            return
        host = self.host = HostJob(job, FOLDER, self.world.now)
        self._pulse = dict.fromkeys(host.ranks, (-1, self.world.now))
        if job.get("heartbeat") is not None:
            self._send(Frame("heartbeat", {"port": 4000 + self.index}))
        for worker in job["workers"] if self.lacks != "descriptors" else ():
            self._own(worker["rank"], joins=bool(worker["env"]["DADT_JOINS"]))
        if self.lacks == "descriptors":
            host.unstarted("no pipe for the output of a worker", self.world.now)
            self._carry_out()

    def _own(self, rank: int, *, joins: bool) -> None:
        assert self.host is not None
        worker = self.workers[rank] = self.job.spawn(self, rank, joins=joins)
        self.processes.append(worker)
        self.host.started(rank, identity(worker))
        self._carry_out()

    # From workers and the kernel ---------------------------------------------------------------------------------

    def line(self, worker: Worker, frame: Frame, answer: Answer | None) -> None:
        """A worker says something, and waits for the answer on a line of its own if there is one."""
        self.world.after(LINE_SECONDS, lambda: self.process.get(lambda: self._receive(worker, frame, answer)))

    def _receive(self, worker: Worker, frame: Frame, answer: Answer | None) -> None:
        host = self.host
        assert host is not None
        if self.world.exact:
            Parser(schema.WORKER).feed(frame.encode())
        line = self._reports.get(worker) if answer is None else None
        if line is None:
            self._numbered += 1
            line = Line(self._numbered, worker.rank, identity(worker))
            self._lines[line.number] = worker, answer
            host.registry.connected(line)
            if answer is None:
                self._reports[worker] = line
        owner = host.registry.claims.get(worker.rank)
        lives = frame.kind == "claim" and owner is not None and any(owner.pid == each.pid for each in self.left)
        try:
            host.hear(Saying(line, frame, line.process, self.world.now, lives))
        except DadtError as error:
            raise Broken(f"the agent refuses what a worker says: {error}") from error
        self._carry_out()
        self._alarm.set(READ_SECONDS)

    def _answer(self, number: int, frame: Frame) -> None:
        if (found := self._lines.get(number)) is None:
            return
        worker, answer = found
        if answer is None:
            self.world.after(LINE_SECONDS, lambda: worker.process.get(lambda: worker.hear(frame)))
        else:
            self._hang_up(number)
            answer(frame)

    def _hang_up(self, number: int) -> None:
        assert self.host is not None
        del self._lines[number]
        self.host.hung_up(number)

    def beat_of(self, rank: int, step: int) -> None:
        """A worker writes its step into the memory that it shares with this agent."""
        self._pulse[rank] = step, self.world.now

    def reap(self, worker: Worker, code: int) -> None:
        """A worker's process has ended."""
        self._end(worker.rank, code)
        for number in [number for number, (each, _) in self._lines.items() if each is worker]:
            self._hang_up(number)
        self._carry_out()
        self._alarm.set(READ_SECONDS)

    def _end(self, rank: int, code: int) -> None:
        assert self.host is not None
        memory = {"peak_memory": 0, "memory_limit": 0, "memory_kills": self.memory_kills}
        self.host.ended(rank, code, {"step": self._pulse[rank][0], "time": self.epoch, **memory})
        self._carry_out()

    def signal(self, number: int) -> None:
        """Somebody signals this agent."""
        self.process.get(lambda: self._caught(number))

    def _caught(self, number: int) -> None:
        if self.host is None and number in ENDING_SIGNALS:  # Agent._await_order
            self.die()
        elif self.host is not None and number in ENDING_SIGNALS:
            self.host.told_to_end({number}, self.world.now)
            self._carry_out()
            self._alarm.set(READ_SECONDS)

    def hear_host(self, index: int) -> None:
        """A heartbeat of another host has come."""
        if self.process.stops and self.host is not None:
            self._mail.add(index)
        elif self.process.alive and self.host is not None:
            self._others.hear(index, self.world.now)

    # As time passes ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to serve."""
        self.process.alive = True
        self.heard = self.world.now
        self._contact.hear(self.world.now)
        self._alarm.set(0.0)

    def _turn(self) -> None:
        """What Supervisor._turn does."""
        if not self.process.runs:
            return
        now, host = self.world.now, self.host
        if self._contact.is_lost(now) and not self._gone:
            if now - self.heard <= self._contact.patience:
                raise Broken(f"{self.process.name} takes the launcher for lost after {now - self.heard:.1f} s")
            self._gone = True
        if host is not None:
            for at, frame in [each for each in self._inquiries if now >= each[0]]:
                self._inquiries.remove((at, frame))
                self._send(frame)
            self._look_at_hosts(now)
            steps = {rank: (step, now - at) for rank, (step, at) in self._pulse.items()}
            host.turn(now, steps, launcher_gone=self._gone)
            self._carry_out()
            self._read_dump(host)
            if host.stopping is not None:
                host.advance_stop([worker.pid for worker in self.left], now)
                self._carry_out()
            if host.over:
                host.leave()
                self._carry_out()
                self.die()
                return
        elif self._gone:  # before it has workers (Agent._await_order)
            self.die()
            return
        else:
            self._beat(actions.SendBeat({}, {}, ()))
        self._alarm.set(TURN_SECONDS if host is None else TICK_SECONDS if self._inquiries else host.patience)

    def _look_at_hosts(self, now: float) -> None:
        """What HostHeartbeat does."""
        for index in sorted(self._mail):
            self._others.hear(index, now)
        self._mail.clear()
        if self._others.is_beat_due(now):
            for other in self.job.agents:
                if other is not self and self.job.network.reaches(self.machine, other.machine):
                    other.hear_host(self.index)
        for frame in self._others.turn(now):
            self._send(frame)

    def _read_dump(self, host: HostJob) -> None:
        if self._dump is not None and self.world.now >= self._dump[0]:
            written, self._dump = self._dump[1], None
            host.dumped([(worker.rank, worker.pid, b"stack\n") for worker in written])
            self._carry_out()

    def _send(self, frame: Frame) -> None:
        if not self._gone:
            self.up.send(frame)

    # What is decided ---------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        assert self.host is not None
        host = self.host
        host.outbox.empty(lambda action: self._perform(host, action))

    def _perform(self, host: HostJob, action: actions.AgentAction) -> None:
        match action:
            case actions.TellLauncher(frame):
                self._send(frame)
            case actions.AnswerLine(number, frame):
                self._answer(number, frame)
            case actions.StartAnew(rank):
                self._pulse[rank] = -1, self.world.now
                if self.lacks == "descriptors":
                    self._end(rank, NOT_RUN)
                else:
                    self._own(rank, joins=True)
            case actions.SignalGroup(rank, number):
                self.workers[rank].signal(number)
            case actions.SignalProcess(process, number):
                for worker in [each for each in self.left if each.pid == process.pid]:
                    worker.signal(number)
            case actions.FindHandlers(asked):
                living = {worker.pid: worker for worker in self.left}
                found = {rank: living[process.pid] for rank, process in asked.items() if process.pid in living}
                host.save(action, found, [rank for rank, worker in found.items() if not worker.handles])
            case actions.GatherStacks(number, ranks):
                self._inquire(host, number, list(ranks))
            case actions.DumpStacks():
                asked = [worker for worker in self.left if identity(worker) in host.registry.dumps]
                written = [worker for worker in asked if worker.process.runs]
                seconds = 0.0 if not asked else WRITE_SECONDS if written == asked else STACK_SECONDS
                self._dump = self.world.now + seconds, written
            case actions.SendBeat():
                self._beat(action)
            case actions.TerminateAll():
                for worker in self.left:
                    worker.signal(SIGTERM)
            case actions.KillAll():
                for worker in self.left:
                    worker.signal(SIGKILL)
            case actions.ResetStep(rank):
                self._pulse[rank] = -1, self.world.now
            case actions.ProbeHosts(order):
                self._probe(order)
            case actions.HearHosts(hosts):
                self._others.begin(hosts, self.world.now)
            case _:
                raise Broken(f"the agent is asked for what there is not in this world: {action}")

    def _inquire(self, host: HostJob, number: int, ranks: list[int]) -> None:
        offers = {rank for rank, *_ in host.registry.dumps.values()}
        late = any(not self.workers[rank].process.runs for rank in ranks)
        at = self.world.now + (ANSWER_SECONDS if late else WRITE_SECONDS)
        for rank in ranks:
            problem = "" if rank in offers and self.workers[rank].process.runs else "it did not answer"
            header = {"number": number, "rank": rank, "problem": problem}
            self._inquiries.append((at, Frame("stack", header, b"" if problem else b"stack\n")))

    def _beat(self, action: actions.SendBeat) -> None:
        held = {worker.pid for worker in self.left if worker.process.stops}
        conditions = {str(rank): "stopped" for rank in action.still if action.pids[rank] in held}
        steps = {str(rank): list(step) for rank, step in action.steps.items()}
        memory = dict.fromkeys(map(str, action.pids), 1 << 28)
        told = {"steps": steps, "memory": memory, "conditions": conditions, "clock": self.epoch}
        self._send(Frame("beat", told))

    # The end -----------------------------------------------------------------------------------------------------

    def die(self, why: str = "") -> None:
        """The agent's process ends, and the kernel kills its workers. why: how, as the launcher is told."""
        if self.process.alive:
            self.process.alive = False
            self.up.close(why)
            for worker in self.processes:
                worker.die(-SIGKILL)

    def crash(self) -> None:
        """The machine is gone."""
        self.process.alive = False
        self.up.vanish()
        for worker in self.processes:
            worker.die(-SIGKILL, silent=True)

    def stop(self) -> None:
        """The agent's process stops, not its workers."""
        self.process.stop()
        self._stopped_at = self.world.now

    def go_on(self) -> None:
        if self.world.now - self._stopped_at > self._contact.patience / 2:
            self.heard = self.world.now  # a shorter stop may count as silence
        self.process.go_on()
        self._alarm.set(0.0)


def identity(worker: Worker) -> processes.Process:
    """The process as the kernel names it, whose ids are never used again in this world."""
    return processes.Process(worker.pid, 1)
