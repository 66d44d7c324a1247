"""A job in the simulated world, from the start of its workers until nothing is left of it."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGKILL

from dadt.config import Config
from dadt.control import schema
from dadt.launch.ending.signals import of_checkpoint
from dadt.launch.members.node import Node
from simulation.agent import Agent
from simulation.data import Connection, Connections, Operation
from simulation.disk import Disk
from simulation.invariants import Invariants
from simulation.launcher import Launcher
from simulation.scenario import Scenario
from simulation.worker import Worker
from simulation.world import Broken, Network, World, frame_link

CONTROL_LATENCY = 0.004
LEFT_SECONDS = 30.0
"""How long it may take until nothing is left, beyond the times for which that was asked."""


class SimulatedJob:
    """The world, the hosts, the workers and the launcher of one scenario."""

    def __init__(self, scenario: Scenario, *, logs: bool = False) -> None:
        self.scenario = scenario
        self.config: Config = scenario.config
        self.hosts, self.per_host = scenario.hosts, scenario.per_host
        self.size = self.hosts * self.per_host
        self.checkpoint_signal = of_checkpoint(self.config)
        self.world = world = World(scenario.seed, logs=logs)
        self.network = Network(world)
        self.invariants = Invariants(self)
        self.connections = Connections(world, self.network, self._completed)
        self.printed: list[tuple[float, str]] = []
        """Time and text of each line that workers print as they end."""
        self.workers: list[Worker] = []
        """All processes of workers there have been."""
        self.disks: dict[int, Disk] = {}
        """The disk of each host with the job's snapshots; only that of host 0 where all hosts share it."""
        self.agents = [Agent(world, self, index, index, scenario.clocks[index]) for index in range(self.hosts)]
        """The newest agent in each place of the job."""
        self.machines = dict(enumerate(self.agents))
        """The newest agent on each host, by the host's number."""
        self.every_agent = list(self.agents)
        self.down: set[int] = set()
        """Hosts that are gone."""
        self.arrivals: list[str] = []
        """What is the matter with the hosts that are to join next."""
        self.awaited: list[tuple[str, Callable[[SimulatedJob, str], bool]]] = []
        """What happens as the next operation ends whose name begins so, until it says that it has happened."""
        self.launcher = Launcher(self, self.invariants.turned)
        for node, agent in zip(self.launcher.nodes, self.agents, strict=True):
            self._connect(node, agent)

    def _connect(self, node: Node, agent: Agent) -> None:
        agent.up = frame_link(
            self.world, schema.AGENT, CONTROL_LATENCY,
            lambda frame: self.launcher.hear(node, frame),
            lambda why: self.launcher.end_of(node, why),
        )  # fmt: skip
        agent.down = frame_link(self.world, schema.LAUNCHER, CONTROL_LATENCY, agent.hear, agent.hang_up)
        self.launcher.down[node] = agent.down

    def reach(self, node: Node) -> None:
        """Start the agent of a host that is to join."""
        machine, how = int(node.name.removeprefix("host")), self.arrivals.pop(0) if self.arrivals else ""
        if machine in self.down or how == "cannot be reached":
            self.world.after(2.0, lambda: self.launcher.unreached(node, "no route to host"))
        else:
            self.world.after(self.world.spread(0.5), lambda: self._reached(node, machine, how))

    def _reached(self, node: Node, machine: int, how: str) -> None:
        if node.ended or not self.launcher.process.alive:
            return
        agent = Agent(self.world, self, node.index, machine, 0.0, how)
        self.agents[node.index] = self.machines[machine] = agent
        self.every_agent.append(agent)
        self._connect(node, agent)
        agent.begin()
        self.launcher.connected(node)

    def run(self) -> None:
        """Raises Broken if something does not hold that has to."""
        world = self.world
        for fault in self.scenario.faults:
            world.after(fault.at, lambda fault=fault: fault.strike(self))
        for agent in self.agents:
            agent.begin()
        self.launcher.begin()
        if not self._ends():
            for worker in self._standing:
                world.note("fault", f"{worker.process.name} goes on, as the user sees that nothing moves")
                worker.process.stops = 1
                worker.go_on()
            if not self._ends():
                raise Broken(f"the job has not ended within {self.scenario.limit:.0f} s")
        lasting = sum(fault.seconds for fault in self.scenario.faults)
        left = self.config.orphan_timeout + 2 * self.config.grace + LEFT_SECONDS + lasting
        world.run(lambda: not any(agent.process.alive for agent in self.every_agent), world.now + left)
        self.invariants.ended()

    def _ends(self) -> bool:
        return self.world.run(lambda: self.launcher.ended_at is not None, self.world.now + self.scenario.limit)

    @property
    def _standing(self) -> list[Worker]:
        """All workers if each of them is stopped, as one may be without DADT: nobody waits for any of them."""
        living = [worker for worker in self.workers if worker.process.alive]
        return living if all(worker.process.stops for worker in living) else []

    # What the parts ask of the job ---------------------------------------------------------------------------------

    def spawn(self, agent: Agent, rank: int, *, joins: bool) -> Worker:
        pid = 1000 + len(self.workers)
        worker = Worker(self.world, agent, rank, pid, self.scenario.script, self.config, joins=joins)
        self.workers.append(worker)
        return worker

    def alone(self, here: int) -> bool:
        """Whether the other hosts train on where one with so many workers is preempted."""
        return 0 < self.config.min_np <= self.size - here

    @property
    def all_train(self) -> bool:
        """Whether all ranks take steps."""
        return all(worker.trains for agent in self.agents for worker in agent.workers.values())

    def disk_of(self, machine: int) -> Disk:
        """The disk on which the workers of a host write snapshots."""
        number = 0 if self.scenario.shares_disk else machine
        if number not in self.disks:
            disk = self.disks[number] = Disk(lambda: self.invariants.snapshots.seen(disk))
        return self.disks[number]

    def _completed(self, connection: Connection, operation: Operation) -> None:
        self.invariants.completed(connection, operation)
        self.comes_to(operation.name)

    def comes_to(self, what: str) -> None:
        """Let happen what waits for this."""
        for each in [each for each in self.awaited if what.startswith(each[0])]:
            if each[1](self, what):
                self.awaited.remove(each)

    # What faults do ------------------------------------------------------------------------------------------------

    def kill(self, rank: int) -> bool:
        """Kill the process of a rank. Returns whether there was one."""
        worker = self.agents[rank // self.per_host].workers.get(rank)
        if worker is None or not worker.process.alive:
            return False
        worker.die(-SIGKILL)
        return True

    def worker(self, rank: int) -> Worker | None:
        """The living process of a rank."""
        worker = self.agents[rank // self.per_host].workers.get(rank)
        return worker if worker is not None and worker.process.alive else None

    def ranks_of(self, host: int) -> set[int]:
        """The ranks of a host, those that it had first included."""
        places = {agent.index for agent in self.every_agent if agent.machine == host}
        return {rank for place in places for rank in range(place * self.per_host, (place + 1) * self.per_host)}
