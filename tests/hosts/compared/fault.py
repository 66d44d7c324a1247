"""The faults, each with the moment at which it strikes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.machine import Machine, Network
from hosts.compared.system import System
from hosts.compared.watch import Watch

BRIEF = 3.0


@dataclass(frozen=True)
class Victim:
    """A training that a fault strikes."""

    network: Network
    system: System
    watch: Watch

    def signal(self, ranks: Sequence[int], number: int = signal.SIGKILL) -> None:
        pids = self.watch.pids()
        for rank in ranks:
            os.kill(pids[rank], number)

    def agents(self, host: Machine) -> list[int]:
        """The processes there that own workers, but not the shells beside them."""
        found = {
            pid: command
            for pid, command in host.processes().items()
            if self.system.agent in command and not command.startswith("sh ")
        }
        return list(found)


@dataclass(frozen=True)
class Fault:
    """Something that befalls a training. ranks: which lose their process or their way to others, as ranks begin."""

    name: str
    step: int
    strike: Callable[[Victim], None]


def kill(*ranks: int) -> Callable[[Victim], None]:
    return lambda victim: victim.signal(ranks)


def stop(rank: int) -> Callable[[Victim], None]:
    return lambda victim: victim.signal([rank], signal.SIGSTOP)


def brief_stop(rank: int) -> Callable[[Victim], None]:
    def strike(victim: Victim) -> None:
        pid = victim.watch.pids()[rank]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(BRIEF)
        os.kill(pid, signal.SIGCONT)

    return strike


def kill_agents(host: int) -> Callable[[Victim], None]:
    def strike(victim: Victim) -> None:
        for pid in victim.agents(victim.network[host]):
            os.kill(pid, signal.SIGKILL)

    return strike


def kill_host(host: int) -> Callable[[Victim], None]:
    """It is gone from the network, too, as where its power is cut."""

    def strike(victim: Victim) -> None:
        machine = victim.network[host]
        victim.network.cut(machine)
        for pid in machine.processes():
            os.kill(pid, signal.SIGKILL)

    return strike


def cut_data(victim: Victim) -> None:
    victim.network.divide(victim.network[0], victim.network[1])


def cut_host(host: int) -> Callable[[Victim], None]:
    return lambda victim: victim.network.cut(victim.network[host])


FAULTS = (
    *(Fault("kill -9 of a worker", step, kill(rank)) for rank, step in ((1, 60), (2, 140), (3, 230))),
    *(Fault("kill -9 of rank 0", step, kill(0)) for step in (80, 130, 240)),
    *(Fault("kill -9 of two workers", step, kill(*ranks)) for ranks, step in (((2, 3), 90), ((0, 2), 160))),
    *(Fault("kill -9 of a host's agent", step, kill_agents(host)) for host, step in ((1, 70), (0, 190))),
    *(Fault("a host without power", step, kill_host(host)) for host, step in ((1, 110), (0, 220))),
    *(Fault("SIGSTOP of a worker", step, stop(rank)) for rank, step in ((1, 75), (3, 180), (0, 210))),
    *(Fault(f"SIGSTOP of a worker for {BRIEF:g} s", step, brief_stop(rank)) for rank, step in ((2, 85), (0, 170))),
    *(Fault("data cut for good", step, cut_data) for step in (65, 205)),
    Fault("a host cut off for good", 150, cut_host(1)),
)
