"""Who starts the agents of a simulated job, and what follows from that for the launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from signal import SIGTERM
from typing import TYPE_CHECKING

from dadt.launch.agents import EXPLAIN_SECONDS
from dadt.launch.launchers.mpi import END_SECONDS
from dadt.launch.launchers.ray import DEATH_SHARE
from simulation.door import SRUN, Dialer, Door
from simulation.world import address_of

if TYPE_CHECKING:
    from dadt.launch.hosts.host import Host
    from dadt.launch.members.node import Node
    from simulation.agent import Agent
    from simulation.job import SimulatedJob

CONTROL_LATENCY = 0.004
STEP_ENDS_SECONDS = 0.2
"""After about how long Slurm ends the other agents of a step once one has failed."""
ABORT_SECONDS = 0.5
"""About after so many seconds mpirun ends all ranks once one has been killed."""
MPIRUN = "mpirun ended with code"
"""How the launcher says that it has lost its agents by that (Mpirun.why)."""
APART_SECONDS = 5.0
"""Within about so many seconds a user calls `dadt run` on all hosts."""


class Starter:
    """The launcher itself, as by SSH: it has a connection with each agent that it starts."""

    door: Door | None = None
    """Where agents connect that it does not start itself."""

    def __init__(self, job: SimulatedJob, hosts: Sequence[Host]) -> None:
        self._job = job

    def come(self, node: Node, machine: int, let_in: Callable[[], None]) -> None:
        """An agent runs: have it connected with the launcher."""
        let_in()

    def joins(self, node: Node) -> None:
        """The agent of another host is awaited."""

    def agent_ended(self, agent: Agent) -> None:
        """An agent has ended badly."""

    def explains_in(self) -> float:
        """For how long the launcher waits, and does nothing else, to learn why an agent is gone."""
        return 0.0

    def close(self) -> None:
        """The launcher awaits no agents any more."""
        if self.door is not None:
            self.door.close()


class ConnectBack(Starter):
    """Another program: agents call the launcher."""

    def __init__(self, job: SimulatedJob, hosts: Sequence[Host]) -> None:
        super().__init__(job, hosts)
        self.door = Door(job.world, job.run.process, job.config, hosts)

    def come(self, node: Node, machine: int, let_in: Callable[[], None]) -> None:
        assert self.door is not None
        seconds, address = self._job.config.start_timeout, address_of(machine)
        Dialer(self._job.world, self.door, address, CONTROL_LATENCY, node.name, seconds).call(let_in)


class Slurm(ConnectBack):
    """One step of Slurm, which ends all agents once one has failed, where all are needed (--kill-on-bad-exit)."""

    def agent_ended(self, agent: Agent) -> None:
        job = self._job
        if not job.config.min_np:
            for other in job.every_agent:
                if other is not agent and other.process.alive:
                    other.ended_by = SRUN
                    job.world.after(job.world.spread(STEP_ENDS_SECONDS), lambda other=other: other.signal(SIGTERM))  # type: ignore[misc]


class Hand(ConnectBack):
    """The user, who calls `dadt run` on each host. The agent of the first one is a child of the launcher."""

    def come(self, node: Node, machine: int, let_in: Callable[[], None]) -> None:
        if machine == 0:
            let_in()
        else:
            call = super().come
            self._job.world.after(self._job.world.spread(APART_SECONDS), lambda: call(node, machine, let_in))


class Ray(ConnectBack):
    """Actors of Ray, which says only after a while why one is gone: the launcher waits for that."""

    def joins(self, node: Node) -> None:
        assert self.door is not None
        self.door.expect(node.name)

    def explains_in(self) -> float:
        config = self._job.config
        most = max(EXPLAIN_SECONDS, 0.0 if config.min_np else DEATH_SHARE * config.orphan_timeout)
        return self._job.world.random.uniform(0.0, most)


class Mpi(ConnectBack):
    """mpirun: the first shim of each host starts its agent (`agent_shims.py`)."""

    def abort(self, code: int) -> None:
        """A rank of MPI's is gone without a word: mpirun ends all others, then itself."""
        for agent in self._job.every_agent:
            for rank in agent.host.ranks if agent.host is not None else ():
                seconds = self._job.world.spread(ABORT_SECONDS)
                self._job.world.after(seconds, lambda agent=agent, rank=rank: agent.shims.kill(rank))  # type: ignore[misc]
        self._job.world.after(2 * ABORT_SECONDS, lambda: self.end(code))

    def end(self, code: int) -> None:
        """mpirun has ended. Does what MpiLauncher._give_up does."""
        launcher = self._job.launcher
        self._job.world.after(END_SECONDS, lambda: launcher.process.get(lambda: launcher.hang_up(f"{MPIRUN} {code}")))


STARTERS: Mapping[str, type[Starter]] = {"ssh": Starter, "slurm": Slurm, "hand": Hand, "ray": Ray, "mpi": Mpi}
