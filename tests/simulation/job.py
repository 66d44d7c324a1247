"""One attempt to run a job in the simulated world, from the start of its agents until nothing is left of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from signal import SIGKILL
from typing import TYPE_CHECKING

from dadt.config import Config
from dadt.config.check import in_islands
from dadt.control import schema
from dadt.launch.ending.signals import of_checkpoint
from dadt.launch.hosts.host import Host
from dadt.launch.members.node import Node
from dadt.launch.start import resume
from simulation.agent import Agent
from simulation.data import Connection, Connections, Operation
from simulation.disk import Disk
from simulation.invariants import Invariants
from simulation.launcher import LOGS, Launcher
from simulation.starter import CONTROL_LATENCY, STARTERS, Starter
from simulation.worker import Worker
from simulation.world import World, frame_link

if TYPE_CHECKING:
    from simulation.run import SimulatedRun

REACH_SECONDS = 0.5
"""About how long it takes to start an agent."""
UNREACHED_SECONDS = 2.0
"""After how long that fails."""


class SimulatedJob:
    """The hosts, the workers and the launcher of one attempt."""

    def __init__(self, run: SimulatedRun, before: SimulatedJob | None = None) -> None:
        """before: the attempt before."""
        self.run, self.scenario, self.number = run, run.scenario, 0
        self.config: Config = run.config
        self.hosts, self.per_host = self.scenario.hosts, self.scenario.per_host
        self.size = self.hosts * self.per_host
        self.island_size = int(self.config.island) if in_islands(self.config.island) else 0
        self.checkpoint_signal = of_checkpoint(self.config)
        self.world: World = run.world
        self.network, self.down = run.network, run.down
        self.begun = self.world.now
        """When its workers were started, or else its agents."""
        self.resumes = False
        """Whether its script is given a snapshot to go on from."""
        self.invariants = Invariants(self, before.invariants if before is not None else None)
        self.connections = Connections(self.world, self.network, self._completed)
        self._islands: dict[int, Connection] = {}
        """What the script connects the ranks of each island with."""
        self.printed: list[tuple[float, str]] = []
        """Time and text of each line that workers print as they end."""
        self.workers: list[Worker] = []
        """All processes of workers there have been."""
        clocks = [*self.scenario.clocks, *([0.0] * self.scenario.spares)]
        if before is not None:
            clocks = [before.machines[machine].clock for machine in range(len(clocks))]
        self.machines = {machine: Agent(self.world, self, machine, clock) for machine, clock in enumerate(clocks)}
        """The newest agent on each host, by the host's number."""
        self.agents: list[Agent] = []
        """The newest agent in each place of the job."""
        self.every_agent: list[Agent] = []
        self.arrivals: list[str] = []
        """What is the matter with the hosts that are to join next."""
        self.awaited: list[tuple[str, Callable[[SimulatedJob, str, int], bool]]] = []
        """What happens as the next operation ends whose name begins so, until it says that it has happened."""
        self.bad_starts: dict[int, list[str]] = before.bad_starts if before is not None else {}
        """What is the matter with a host as its agent is started, by the host's number, in each attempt to come."""
        self.late_shims = run.late_shims
        self.starter = Starter(self, ())
        self.launcher = Launcher(self, self.invariants.turned)

    def begin(self, hosts: Sequence[Host], number: int) -> None:
        """Start the agents of these hosts. number: how many attempts there were before."""
        self.number, self.begun = number, self.world.now
        self.config = resume.configured(
            self.config, LOGS, len(hosts), number, self.run.restarts.refused, self.run.snapshot_files
        )
        self.run.snapshots.begins(self)
        self.starter = STARTERS[self.scenario.started_by](self, hosts)
        self.launcher.begin(hosts)

    def _connect(self, node: Node, agent: Agent) -> None:
        agent.up = frame_link(
            self.world, schema.AGENT, CONTROL_LATENCY,
            lambda frame: self.launcher.hear(node, frame),
            lambda why: self.launcher.end_of(node, why),
        )  # fmt: skip
        agent.down = frame_link(self.world, schema.LAUNCHER, CONTROL_LATENCY, agent.hear, agent.hang_up)
        self.launcher.down[node] = agent.down

    def start(self, node: Node) -> None:
        """Start the agent of a host at the start of the job."""
        machine = machine_of(node)
        bad = self.bad_starts.get(machine)
        if how := bad.pop(0) if bad else "":
            self.invariants.starts_badly(machine, how)
        self._reach(node, machine, how)

    def join(self, node: Node) -> None:
        """Start the agent of a host that is to join."""
        self.starter.joins(node)
        self._reach(node, machine_of(node), self.arrivals.pop(0) if self.arrivals else "")

    def _reach(self, node: Node, machine: int, how: str) -> None:
        world = self.world
        if how == "is never reached":
            return
        if machine in self.down or how == "cannot be reached":
            world.after(UNREACHED_SECONDS, lambda: self.launcher.unreached(node, "no route to host"))
            return
        late = world.random.uniform(2.0, 1.2 * self.config.start_timeout) if how == "is reached late" else 0.0
        world.after(late + world.spread(REACH_SECONDS), lambda: self._connects(node, machine, how))

    def _connects(self, node: Node, machine: int, how: str) -> None:
        """An agent is there."""
        if machine in self.down:
            self._reached(node, machine, how)
        else:
            self.starter.come(node, machine, lambda: self._reached(node, machine, how))

    def _reached(self, node: Node, machine: int, how: str) -> None:
        if node.ended or not self.launcher.expects:
            return
        if machine in self.down:
            self.launcher.unreached(node, "no route to host")
            return
        agent = self.machines[machine]
        if self.launcher.job is not None:  # it joins
            agent = self.machines[machine] = Agent(self.world, self, machine, 0.0, how)
            agent.index = self.launcher.nodes.index(node)
            self.agents[agent.index] = agent
        agent.how = how
        self.every_agent.append(agent)
        self._connect(node, agent)
        agent.begin()
        self.launcher.connected(node)

    def placed(self, nodes: Sequence[Node], size: int) -> None:
        """The agents of these hosts, in this order, are to start so many workers."""
        self.config = resume.settled(self.config, size, self.number, self.run.snapshot_files)
        self.size, self.begun = size, self.world.now
        self.run.snapshots.placed(self)
        self.agents = [self.machines[machine_of(node)] for node in nodes]
        for place, agent in enumerate(self.agents):
            agent.index = place
        self.run.invariants.placed(self)
        if not self.number:
            self.run.workers_start()

    @property
    def standing(self) -> list[Worker]:
        """All workers if each of them is stopped, as one may be without DADT: nobody waits for any of them."""
        living = [worker for worker in self.workers if worker.process.alive]
        return living if all(worker.process.stops for worker in living) else []

    def is_there(self, node: Node) -> bool:
        """Whether an agent runs on this host."""
        return self.machines[machine_of(node)].process.alive

    # What the parts ask of the job ---------------------------------------------------------------------------------

    def spawn(self, agent: Agent, rank: int, *, joins: bool) -> Worker:
        pid = 1000 + len(self.workers)
        worker = Worker(self.world, agent, rank, pid, self.scenario.script, self.config, joins=joins)
        worker.doom = self.run.doom(rank)
        self.workers.append(worker)
        return worker

    @property
    def all_train(self) -> bool:
        """Whether all ranks take steps."""
        return all(worker.trains for agent in self.agents for worker in agent.workers.values())

    def disk_of(self, machine: int) -> Disk:
        """The disk on which the workers of a host write snapshots."""
        disks = self.run.disks
        return disks.setdefault(0 if self.scenario.shares_disk else machine, Disk(self.run.snapshots.seen))

    def island_of(self, rank: int) -> Connection:
        """What connects the ranks of the island of a rank, for its new workers anew."""
        number, size = rank // self.island_size, self.island_size
        if number not in self._islands or self._islands[number].is_broken:
            self._islands[number] = Connection(self.world, self.network, 0, size, lambda *_: None)
        return self._islands[number]

    def _completed(self, connection: Connection, operation: Operation) -> None:
        self.invariants.completed(connection, operation)
        self.comes_to(operation.name, min(operation.values))

    def comes_to(self, what: str, rank: int) -> None:
        """Let happen what waits for this. rank: one that comes to it."""
        for each in [each for each in self.awaited if what.startswith(each[0])]:
            if each[1](self, what, rank):
                self.awaited.remove(each)

    # What faults do ------------------------------------------------------------------------------------------------

    def kill(self, rank: int) -> bool:
        """Kill the process of a rank. Returns whether there was one."""
        worker = self.worker(rank)
        if worker is not None:
            worker.die(-SIGKILL)
        return worker is not None

    def worker(self, rank: int) -> Worker | None:
        """The living process of a rank."""
        place = rank // self.per_host
        worker = self.agents[place].workers.get(rank) if place < len(self.agents) else None
        return worker if worker is not None and worker.process.alive else None

    def ranks_of(self, host: int) -> set[int]:
        """The ranks of a host, those that it had first included."""
        places = {agent.index for agent in self.every_agent if agent.machine == host and agent.index >= 0}
        return {rank for place in places for rank in range(place * self.per_host, (place + 1) * self.per_host)}


def machine_of(node: Node) -> int:
    """The number of the host of a node."""
    return int(node.name.removeprefix("host") or 0)
