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
from dadt.launch.agent.host_job import TICK_SECONDS, TURN_SECONDS, HostJob
from dadt.launch.agent.launcher_contact import LauncherContact
from dadt.launch.agent.registry import Line, Saying
from dadt.launch.ending import processes
from dadt.launch.ending.signals import ENDING_SIGNALS
from simulation.agent_heartbeat import AgentHeartbeat
from simulation.agent_shims import AgentShims
from simulation.agent_stacks import AgentStacks
from simulation.host_facts import probed, report_of
from simulation.worker import LINE_SECONDS, Worker
from simulation.world import Alarm, Broken, Link, Process, World

if TYPE_CHECKING:
    from simulation.job import SimulatedJob

READ_SECONDS = 0.0005
"""What comes within this time is looked at in one turn."""
NO_TIMEOUT = float("inf")
PORT = 4000
"""The first port of heartbeats."""
BOOT_SECONDS = 100.0
"""Between the starts of two hosts."""
NOT_RUN = 127
"""Exit code of a worker whose command cannot be run."""
FOLDER = Path("/tmp/dadt/job")

Answer = Callable[[Frame], Any]


class Agent:
    """One host: its agent, the processes of its workers, and the host's clock."""

    def __init__(self, world: World, job: SimulatedJob, machine: int, clock: float, how: str = "") -> None:
        """clock: seconds by which the host's date is ahead. how: what is the matter with it as it is started."""
        self.world, self.job, self.machine, self.clock, self.how = world, job, machine, clock, how
        self.index = -1
        """Its place in the job; -1 before it has one."""
        self.ready_at = float("inf")
        """When it has reported about its host."""
        self.lacks = ""
        """What is used up on this host: `descriptors` of the agent, or the `disk`."""
        self.ended_by = ""
        """Why another program has ended it, as the launcher is told."""
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
        self._contact, self._heartbeat = LauncherContact(world.now), AgentHeartbeat(self, PORT, NO_TIMEOUT)
        self._pulse: dict[int, tuple[int, float]] = {}
        """The memory that workers share with their agent: for each rank its step, and when it was written."""
        self._lines: dict[int, tuple[Worker, Answer | None]] = {}
        """Open connections: the worker, and what takes the answer to its question; None where it only reports."""
        self.shims = AgentShims(self)
        self._reports: dict[Worker, Line] = {}
        self._numbered, self._gone = 0, False
        self.heard = self._stopped_at = world.now
        """When the launcher was last heard, or this process last began to run."""
        self.lost = float("inf")  # when the connection to the launcher has ended
        self._stacks = AgentStacks(self)
        self._alarm = Alarm(self.process, self._turn)

    @property
    def uptime(self) -> float:
        """Seconds since this host was started, by the clock that nobody sets."""
        return self.world.now + BOOT_SECONDS * self.machine

    @property
    def left(self) -> list[Worker]:
        """The workers' processes that run."""
        return [worker for worker in self.processes if worker.process.alive]

    @property
    def is_heard(self) -> bool:
        """Whether what it tells comes to the launcher at once."""
        return self.process.runs and not self.up.cuts and not self.up.slow

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
        self._send(report_of(self.machine, self.uptime, self.world.epoch + self.clock, self.how))

    def _probe(self, order: Frame) -> None:
        answer = probed(self.job, self.machine, order)
        self.process.after(self.world.spread(0.1), lambda: self._send(answer))

    def _start(self, job: Frame) -> None:
        own = job.get("heartbeat", {"timeout": NO_TIMEOUT})
        port = PORT + len(self.job.every_agent)  # not one of those before it
        self._heartbeat = AgentHeartbeat(self, port, own["timeout"])
        if self.lacks == "disk":  # Agent._serve
            self._send(Frame("unstarted", {"message": "/tmp/dadt/job: cannot be written (No space left on device)"}))
            self._send(Frame("end", {"stuck": [], "signal": 0}))
            self.die()
            return
        host = self.host = HostJob(job, FOLDER, self.world.now)
        self._pulse = dict.fromkeys(host.ranks, (-1, self.world.now))
        if job.get("heartbeat") is not None:
            self._send(Frame("heartbeat", {"port": self._heartbeat.port}))
        for worker in job["workers"] if self.lacks != "descriptors" and not job["adopt"] else ():
            self._start_worker(worker["rank"], joins=bool(worker["env"]["DADT_JOINS"]))
        if job["adopt"]:
            self.shims.begin(host.ranks)
        if self.lacks == "descriptors":
            host.unstarted("no pipe for the output of a worker", self.world.now)
            self._carry_out()

    def _start_worker(self, rank: int, *, joins: bool) -> None:
        worker = self.job.spawn(self, rank, joins=joins)
        self.processes.append(worker)
        self.own(worker)

    def own(self, worker: Worker) -> None:
        """What Supervisor._own does."""
        assert self.host is not None
        self.workers[worker.rank] = worker
        self.host.started(worker.rank, identity(worker))
        self._carry_out()

    def next_line(self) -> int:
        """The number of a new connection."""
        self._numbered += 1
        return self._numbered

    def hear_shim(self, saying: Saying) -> None:
        """A shim says something."""
        assert self.host is not None
        self.host.hear(saying)
        self._carry_out()
        self._alarm.set(READ_SECONDS)

    def hear_end(self, number: int) -> None:
        """The connection of a shim has ended."""
        assert self.host is not None
        self.host.hung_up(number)
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
            line = Line(self.next_line(), worker.rank, identity(worker))
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
        if not self.shims.reap(worker, code):
            self.ended(worker.rank, code)
        for number in [number for number, (each, _) in self._lines.items() if each is worker]:
            self._hang_up(number)
        self._carry_out()
        self._alarm.set(READ_SECONDS)

    def ended(self, rank: int, code: int) -> None:
        """What Supervisor._tell_end does."""
        assert self.host is not None
        memory = {"peak_memory": 0, "memory_limit": 0, "memory_kills": self.memory_kills}
        self.host.ended(rank, code, {"step": self._pulse[rank][0], "time": self.uptime, **memory})
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

    def hear_host(self, place: tuple[str, int]) -> None:
        """A heartbeat of another host has come from this address and port."""
        if self.host is not None:
            self._heartbeat.hear(place)

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
            for frame in self._stacks.answers():
                self._send(frame)
            for frame in self._heartbeat.turn(now):
                self._send(frame)
            steps = {rank: (step, now - at) for rank, (step, at) in self._pulse.items()}
            host.turn(now, steps, launcher_gone=self._gone)
            self._carry_out()
            self._stacks.read(host)
            self._carry_out()
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
        self._alarm.set(TURN_SECONDS if host is None else TICK_SECONDS if self._stacks.awaited else host.patience)

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
                    self.ended(rank, NOT_RUN)
                else:
                    self._start_worker(rank, joins=True)
            case actions.AdmitShim() | actions.OwnWorker() | actions.EndWorker():
                self.shims.perform(action)
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
                self._stacks.inquire(host, number, list(ranks))
            case actions.DumpStacks():
                self._stacks.dump([worker for worker in self.left if identity(worker) in host.registry.dumps])
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
                self._heartbeat.begin(hosts)
            case _:
                raise Broken(f"the agent is asked for what there is not in this world: {action}")

    def _beat(self, action: actions.SendBeat) -> None:
        held = {worker.pid for worker in self.left if worker.process.stops}
        conditions = {str(rank): "stopped" for rank in action.still if action.pids[rank] in held}
        steps = {str(rank): list(step) for rank, step in action.steps.items()}
        memory = dict.fromkeys(map(str, action.pids), 1 << 28)
        told = {"steps": steps, "memory": memory, "conditions": conditions, "clock": self.uptime}
        self._send(Frame("beat", told))

    # The end -----------------------------------------------------------------------------------------------------

    def die(self, why: str = "") -> None:
        """The agent's process ends, and the kernel kills its workers. why: how, as the launcher is told."""
        if self.process.alive:
            self.process.alive = False
            over = self.host is not None and self.host.over
            self.up.close("" if over else why or self.ended_by)
            if not over:
                self.job.starter.agent_ended(self)
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
