"""The kinds of faults, each with what it does to a job and whom the job may lose by it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from harness import cgroup
from harness.disk import MOUNT, fill
from harness.patience import await_that
from hosts.chaos.struck import RANKS, SAVES, Struck

BRIEF = 3.0
"""Seconds of a fault that passes."""
LOGS = "disk"
"""Where the logs of a job lie that has a small disk for them."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `strike` returns the ranks that are to be lost."""

    name: str
    strike: Callable[[Struck], set[int]]
    hosts: int = 1
    """How many it needs."""
    tells: str = ""
    """What the user is told, beside who is lost."""
    disk: bool = False
    """Whether the logs lie on a small disk."""
    needs: Callable[[], str] = lambda: ""
    """Why it cannot be tried here; empty if it can."""


def kill(job: Struck) -> set[int]:
    rank = job.chance.choice([1, 2, 3])
    job.signal(rank)
    return {rank}


def kill_first(job: Struck) -> set[int]:
    job.signal(0)
    return {0}


def in_save(job: Struck, number: int) -> set[int]:
    """Rank 0 writes a file beside the one that is there, and renames it."""
    pid, saves = job.worker(0), job.folder / SAVES

    def begun() -> bool:
        return any(name.startswith(".dadt-") for name in os.listdir(saves))

    await_that(begun, "a save", meanwhile=lambda: None)  # it is there for a moment
    os.kill(pid, number)
    return {0}


def kill_in_save(job: Struck) -> set[int]:
    return in_save(job, signal.SIGKILL)


def stop_in_save(job: Struck) -> set[int]:
    return in_save(job, signal.SIGSTOP)


def kill_two(job: Struck) -> set[int]:
    ranks = job.chance.sample(sorted(RANKS), 2)
    for pid in [job.worker(rank) for rank in ranks]:
        os.kill(pid, signal.SIGKILL)
    return set(ranks)


def kill_while_recovering(job: Struck) -> set[int]:
    ranks = job.chance.sample(sorted(RANKS), 2)
    first, second = (job.worker(rank) for rank in ranks)
    os.kill(first, signal.SIGKILL)
    job.pause(job.chance.uniform(0.0, 0.1))
    os.kill(second, signal.SIGKILL)
    return set(ranks)


def kill_agent(job: Struck) -> set[int]:
    host = job.host()
    os.kill(job.agent(host), signal.SIGKILL)
    return job.ranks(host)


def kill_host(job: Struck) -> set[int]:
    """It is gone from the network, too, as where its power is cut."""
    host = job.host()
    job.network.cut(host)
    for pid in host.processes():
        os.kill(pid, signal.SIGKILL)
    job.dark = host.name
    return job.ranks(host)


def stop(job: Struck) -> set[int]:
    rank = job.chance.randrange(4)
    job.signal(rank, signal.SIGSTOP)
    return {rank}


def stop_for_a_while(job: Struck) -> set[int]:
    rank = job.chance.randrange(4)
    job.signal(rank, signal.SIGSTOP)
    job.pause(BRIEF)
    job.signal(rank, signal.SIGCONT)
    return set()


def stop_agent(job: Struck) -> set[int]:
    host = job.host()
    agent = job.agent(host)
    os.kill(agent, signal.SIGSTOP)
    job.healing.append(lambda: os.kill(agent, signal.SIGCONT))
    return job.ranks(host)


def stop_agent_for_a_while(job: Struck) -> set[int]:
    agent = job.agent(job.host())
    os.kill(agent, signal.SIGSTOP)
    job.pause(BRIEF)
    os.kill(agent, signal.SIGCONT)
    return set()


def cut_data(job: Struck) -> set[int]:
    job.network.divide(job.network[0], job.network[1])
    return job.ranks(job.network[1])


def cut_control(job: Struck) -> set[int]:
    host = job.host()
    job.network.divide(job.network.launcher, host)
    return job.ranks(host)


def cut_both(job: Struck) -> set[int]:
    host = job.host()
    job.network.cut(host)
    return job.ranks(host)


def at_once(job: Struck, numbers: dict[int, int]) -> None:
    """Signals by process, in a drawn order, within a second."""
    for pid in job.chance.sample(sorted(numbers), len(numbers)):
        os.kill(pid, numbers[pid])
        job.pause(job.chance.uniform(0.0, 0.3))


def stop_and_kill(job: Struck) -> set[int]:
    """One is silent, and one or two others end."""
    ranks = job.chance.sample(sorted(RANKS), job.chance.choice((2, 3)))
    numbers = dict.fromkeys(map(job.worker, ranks), signal.SIGKILL)
    at_once(job, numbers | {job.worker(ranks[0]): signal.SIGSTOP})
    return set(ranks)


def stop_and_kill_agent(job: Struck) -> set[int]:
    host = job.host()
    lost = job.ranks(host)
    rank = job.chance.choice(sorted(RANKS - lost))
    at_once(job, {job.worker(rank): signal.SIGSTOP, job.agent(host): signal.SIGKILL})
    return lost | {rank}


def stop_and_kill_in_save(job: Struck) -> set[int]:
    rank = job.chance.choice([1, 2, 3])
    silent = job.worker(rank)
    lost = in_save(job, signal.SIGKILL)
    job.pause(job.chance.uniform(0.0, 0.3))
    os.kill(silent, signal.SIGSTOP)
    return lost | {rank}


def for_a_while(cut: Callable[[Struck], set[int]]) -> Callable[[Struck], set[int]]:
    def strike(job: Struck) -> set[int]:
        cut(job)
        job.pause(BRIEF)
        for machine in job.network.all:
            job.network.heal(machine)
        return set()

    return strike


def slow_link(job: Struck) -> set[int]:
    job.host().slow("1mbit")
    return set()


def out_of_memory(job: Struck) -> set[int]:
    rank = job.chance.randrange(4)
    job.starve(rank)
    return {rank}


def fill_logs(job: Struck) -> set[int]:
    fill(job.folder / LOGS)
    return set()


def fill_logs_and_kill(job: Struck) -> set[int]:
    fill(job.folder / LOGS)
    return kill(job)


def fill_saves(job: Struck) -> set[int]:
    """One host's own disk, to which its first rank saves; when that has failed, the next one."""
    host = job.host()
    host.run(*MOUNT, job.folder / SAVES)
    fill(host.path(str(job.folder / SAVES)))
    return job.ranks(host)


KINDS = (
    Kind("kill -9 of a worker", kill),
    Kind("kill -9 of rank 0", kill_first),
    Kind("kill -9 of rank 0 while it saves", kill_in_save),
    Kind("kill -9 of two workers", kill_two),
    Kind("kill -9 of a worker, and of another while the rest recovers", kill_while_recovering),
    Kind("kill -9 of an agent", kill_agent, hosts=2),
    Kind("a host without power", kill_host, hosts=2),
    Kind("SIGSTOP of a worker", stop),
    Kind("SIGSTOP of rank 0 while it saves", stop_in_save),
    Kind(f"SIGSTOP of a worker for {BRIEF:g} s", stop_for_a_while),
    Kind("SIGSTOP of an agent", stop_agent, hosts=2),
    Kind(f"SIGSTOP of an agent for {BRIEF:g} s", stop_agent_for_a_while),
    Kind("SIGSTOP of a worker, and kill -9 of one or two others within a second", stop_and_kill),
    Kind("SIGSTOP of a worker, and kill -9 of another host's agent within a second", stop_and_kill_agent, hosts=2),
    Kind("kill -9 of rank 0 while it saves, and SIGSTOP of another within a second", stop_and_kill_in_save),
    Kind("data cut", cut_data, hosts=2),
    Kind(f"data cut for {BRIEF:g} s", for_a_while(cut_data), hosts=2),
    Kind("control cut", cut_control, hosts=2),
    Kind(f"control cut for {BRIEF:g} s", for_a_while(cut_control)),
    Kind("both cut", cut_both, hosts=2),
    Kind(f"both cut for {BRIEF:g} s", for_a_while(cut_both)),
    Kind("a link of 1 Mbit/s", slow_link),
    Kind("no memory, in a cgroup", out_of_memory, tells="lack of memory", needs=cgroup.missing),
    Kind("a full disk for logs", fill_logs, tells="No space left", disk=True),
    Kind("a full disk for logs, and kill -9 of a worker", fill_logs_and_kill, tells="No space left", disk=True),
    Kind("a full disk of one host for the script's files", fill_saves, hosts=2),
)
