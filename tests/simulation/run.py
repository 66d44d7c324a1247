"""`dadt run` in the simulated world: the attempts to run a job, and what is asked for hosts before each.

Carries out what `Restarts` and `Discovery` decide, as dadt/launch/launch.py and dadt/launch/hosts/reader.py do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dadt.errors import ConfigError, DadtError
from dadt.launch.actions import SayText
from dadt.launch.agent.launcher_contact import FIRST_SECONDS
from dadt.launch.ending.outcome import Outcome
from dadt.launch.ending.restart import NoteRestart, Restarts
from dadt.launch.hosts.discovery import ASK_SECONDS, Discovery
from dadt.launch.hosts.host import Host
from simulation.data_invariants import SnapshotInvariants
from simulation.disk import Disk, DiskSnapshots
from simulation.fault import Fault
from simulation.job import SimulatedJob
from simulation.run_invariants import RunInvariants
from simulation.scenario import Scenario
from simulation.world import BEGIN, Broken, Network, Process, World

LOOK_SECONDS = 0.1
"""Seconds between two looks for hosts, while there are too few."""
LEFT_SECONDS = 30.0
"""How long it may take until nothing is left, beyond the times for which that was asked."""


@dataclass(slots=True)
class HostList:
    """What is asked for hosts: a script of the user's, or a hostfile."""

    hosts: list[Host]
    """The hosts that it names now."""
    seconds: float = 0.02
    """How long it takes to answer."""
    problem: str = ""
    """Why it cannot be read; empty if it can."""
    changed_at: float = BEGIN

    def change(self, hosts: list[Host], now: float) -> None:
        self.hosts, self.changed_at = hosts, now


class SimulatedRun:
    """The world, the process of `dadt run`, and its attempts, of one scenario."""

    def __init__(self, scenario: Scenario, *, logs: bool = False) -> None:
        self.scenario, self.config = scenario, scenario.config
        self.world = world = World(scenario.seed, logs=logs)
        self.network = Network(world)
        self.process = Process(world, "launcher")
        self.clock = 0.0
        """Seconds by which its host's clock has jumped."""
        self.down: set[int] = set()
        """Hosts that are gone."""
        self.list = HostList(scenario.every_host)
        self.discovery = Discovery(scenario.every_host, world.now, changes=scenario.discovers)
        self.restarts = Restarts(self.config, self.discovery)
        self.said: list[tuple[float, str, str]] = []
        """Time, level and text of each line that the user reads."""
        self.caught: set[int] = set()
        """Signals that `dadt run` has received and not handled yet."""
        self.killed = False
        """Whether `dadt kill` has asked this job to end while it waited for hosts."""
        self.listed = {host.name for host in scenario.every_host}
        """Hosts that are there as far as `dadt run` has been told."""
        self.outcome: Outcome | None = None
        self.error: DadtError | None = None
        """What `dadt run` raised in place of an outcome."""
        self.over = False
        self.waits = True
        """Whether it waits for hosts."""
        self.dooms: dict[int, list[Exception]] = {}
        """What the script of a rank raises in each attempt to come."""
        self.refuses: dict[int, Callable[[int], Exception | None]] = {}
        """Whether the script of a rank can go on from its snapshot, by the number of the restart."""
        self.late_shims: dict[int, float] = {}
        """Seconds by which mpirun starts the shim of a rank later than others."""
        self._told_to_wait = False
        """Whether it has waited since it last looked, so that it has heeded signals."""
        self._asked = self._taken = 0
        self.questions: list[tuple[float, float]] = []
        """When it was asked for hosts, and when each answer comes, which tells of the hosts at the question."""
        self._answer: Sequence[Host] | ConfigError | None = None
        self._hosts: Sequence[Host] = ()
        self.disks: dict[int, Disk] = {}
        """The disk of each host with the job's snapshots; only that of host 0 where all hosts share it."""
        self.snapshots = SnapshotInvariants(self)
        self.invariants = RunInvariants(self)
        self.attempts = [SimulatedJob(self)]

    @property
    def snapshot_files(self) -> DiskSnapshots:
        """The snapshots that the launcher sees, which shares a disk with host 0."""
        return DiskSnapshots(self.attempt.disk_of(0))

    @property
    def attempt(self) -> SimulatedJob:
        """The newest attempt."""
        return self.attempts[-1]

    def run(self) -> None:
        """Raises Broken if something does not hold that has to."""
        world, scenario = self.world, self.scenario
        self._let_come([fault for fault in scenario.faults if fault.from_start or scenario.early])
        self.process.after(0.0, self._look)
        if not self._ends():
            for worker in self.attempt.standing:
                world.note("fault", f"{worker.process.name} goes on, as the user sees that nothing moves")
                worker.process.stops = 1
                worker.go_on()
            if not self._ends():
                raise Broken(f"the job has not ended within {scenario.limit:.0f} s")
        lasting = sum(fault.seconds for fault in scenario.faults)
        agents = [agent for attempt in self.attempts for agent in attempt.every_agent]
        unasked = any(agent.process.alive and agent.ready_at > world.now for agent in agents)
        patience = max(self.config.orphan_timeout, FIRST_SECONDS if unasked else 0.0)
        left = patience + 2 * self.config.grace + LEFT_SECONDS + lasting
        world.run(lambda: not any(agent.process.alive for agent in agents), world.now + left)
        self.invariants.ended()

    def _ends(self) -> bool:
        return self.world.run(lambda: self.over, self.world.now + self.scenario.limit)

    def workers_start(self) -> None:
        """The first workers are started."""
        if not self.scenario.early:
            self._let_come([fault for fault in self.scenario.faults if not fault.from_start])

    def _let_come(self, faults: Sequence[Fault]) -> None:
        """Have each of these faults come after its number of seconds from now."""
        for fault in faults:
            self.world.after(fault.at, lambda fault=fault: self.over or fault.strike(self.attempt))  # type: ignore[misc]

    def doom(self, rank: int) -> Exception | None:
        """What the script of a rank raises as it starts, if it does."""
        if dooms := self.dooms.get(rank):
            doom: Exception | None = dooms.pop(0)
        else:
            doom = self.refuses[rank](self.restarts.count) if rank in self.refuses and self.restarts.count else None
        if doom is not None:
            self.attempt.invariants.raises(rank, doom)
        return doom

    # Waiting for hosts -----------------------------------------------------------------------------------------------

    def poll(self, seconds: float = ASK_SECONDS) -> None:
        """Do what HostReader.poll does."""
        if self._answer is not None:
            answer, self._answer, self._taken = self._answer, None, self._taken + 1
            if not isinstance(answer, ConfigError):
                self.listed = {host.name for host in answer}
            if warning := self.discovery.take(answer):
                self.say(warning, "warning")
        if self.discovery.asks(self.world.now, seconds):
            listed, self._asked = self.list, self._asked + 1
            answer = ConfigError(listed.problem) if listed.problem else list(listed.hosts)
            self.questions.append((self.world.now, self.world.now + listed.seconds))
            self.world.after(listed.seconds, lambda: setattr(self, "_answer", answer))

    @property
    def answered(self) -> bool:
        """Whether no question for the hosts is open."""
        return self._asked == self._taken

    def _look(self) -> None:
        """Do what Launch._await_hosts does in one turn."""
        restarts = self.restarts
        if self.over:
            return
        try:
            if self.caught and self._told_to_wait:
                caught, self.caught = self.caught, set()
                restarts.signal(caught)
            if self.killed:
                restarts.kill()
            self.poll(restarts.ask_seconds(self.world.now))
            hosts = restarts.hosts(self.world.now)
        except DadtError as error:
            self._end(None, error)
            return
        restarts.outbox.empty(self._perform)
        self._told_to_wait = hosts is None
        if hosts is None:
            self.process.after(LOOK_SECONDS, self._look)
            return
        self._hosts, self.waits = hosts, False
        self.invariants.begins(self.attempt, hosts)
        self.attempt.begin(hosts, restarts.count)

    def _perform(self, action: SayText | NoteRestart) -> None:
        match action:
            case SayText(text, level):
                self.say(text, level)
            case NoteRestart(number, why):
                self.world.note("launcher", f"restarts the job ({number}): {why}")

    def say(self, text: str, level: str) -> None:
        """The user reads a line."""
        self.world.note("user", f"reads: {text}")
        self.said.append((self.world.now, level, text))
        self.invariants.said(level, text)

    # After an attempt ------------------------------------------------------------------------------------------------

    def attempt_over(self, outcome: Outcome | None, error: DadtError | None) -> None:
        """Nothing of the newest attempt is left, as far as `dadt run` knows. Does what Launch._run does then."""
        if outcome is not None:
            again = self.restarts.ended(outcome)
        else:
            assert error is not None
            began = any(attempt.launcher.job is not None for attempt in self.attempts)
            again = self.restarts.failed(error, self._hosts, self.world.now, began=began)
        self.restarts.outbox.empty(self._perform)
        if not again:
            self._end(outcome, error)
            return
        self.attempts.append(SimulatedJob(self, self.attempt))
        self.waits = True
        self._look()

    def _end(self, outcome: Outcome | None, error: DadtError | None) -> None:
        self.outcome, self.error = outcome, error
        self.world.note("launcher", f"{error or 'ends'}, exit code {self.exit_code}")
        self.die()

    def die(self) -> None:
        """The process ends, and its connections with it."""
        self.process.alive, self.over = False, True

    @property
    def exit_code(self) -> int | None:
        if self.error is not None:
            return self.error.exit_code
        return self.outcome.exit_code if self.outcome is not None else None
