"""The kinds of faults, each with what it does to a job and whom the job may lose by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from signal import SIGCONT, SIGKILL, SIGSTOP

from harness import cgroup
from hosts.chaos.struck import RANKS
from hosts.victim import Victim

BRIEF = 3.0
"""Seconds of a fault that passes."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault, in both worlds. `strike` returns the ranks that are to be lost."""

    name: str
    strike: Callable[[Victim], set[int]]
    hosts: int = 1
    """How many it needs."""
    tells: str = ""
    """What the user is told, beside who is lost."""
    disk: bool = False
    """Whether the logs lie on a small disk."""
    needs: Callable[[], str] = lambda: ""
    """Why it cannot be tried here; empty if it can."""


def kill(job: Victim) -> set[int]:
    rank = job.chance.choice([1, 2, 3])
    job.signal(rank, SIGKILL)
    return {rank}


def kill_first(job: Victim) -> set[int]:
    job.signal(0, SIGKILL)
    return {0}


def kill_in_save(job: Victim) -> set[int]:
    job.signal_in_save(0, SIGKILL)
    return {0}


def stop_in_save(job: Victim) -> set[int]:
    job.signal_in_save(0, SIGSTOP)
    return {0}


def kill_two(job: Victim) -> set[int]:
    ranks = job.chance.sample(sorted(RANKS), 2)
    for rank in ranks:
        job.signal(rank, SIGKILL)
    return set(ranks)


def kill_while_recovering(job: Victim) -> set[int]:
    first, second = job.chance.sample(sorted(RANKS), 2)
    job.signal(first, SIGKILL)
    job.pause(job.chance.uniform(0.0, 0.1))
    job.signal(second, SIGKILL)
    return {first, second}


def any_host(job: Victim) -> int:
    return job.chance.choice(job.hosts)


def kill_agent(job: Victim) -> set[int]:
    host = any_host(job)
    job.signal_agent(host, SIGKILL)
    return job.ranks(host)


def kill_host(job: Victim) -> set[int]:
    host = any_host(job)
    job.cut_power(host)
    return job.ranks(host)


def stop(job: Victim) -> set[int]:
    rank = job.chance.randrange(4)
    job.signal(rank, SIGSTOP)
    return {rank}


def stop_for_a_while(job: Victim) -> set[int]:
    rank = job.chance.randrange(4)
    job.signal(rank, SIGSTOP)
    job.pause(BRIEF)
    job.signal(rank, SIGCONT)
    return set()


def stop_agent(job: Victim) -> set[int]:
    host = any_host(job)
    job.signal_agent(host, SIGSTOP)
    return job.ranks(host)


def stop_agent_for_a_while(job: Victim) -> set[int]:
    host = any_host(job)
    job.signal_agent(host, SIGSTOP)
    job.pause(BRIEF)
    job.signal_agent(host, SIGCONT)
    return set()


def cut_data(job: Victim) -> set[int]:
    job.cut_data(0, 1)
    return job.ranks(1)


def cut_control(job: Victim) -> set[int]:
    host = any_host(job)
    job.cut_control(host)
    return job.ranks(host)


def cut_both(job: Victim) -> set[int]:
    host = any_host(job)
    job.cut_both(host)
    return job.ranks(host)


def stop_and_kill(job: Victim) -> set[int]:
    """One is silent, and one or two others end."""
    silent, *dead = job.chance.sample(sorted(RANKS), job.chance.choice((2, 3)))
    strikes = [lambda: job.signal(silent, SIGSTOP), *(partial(job.signal, rank, SIGKILL) for rank in dead)]
    at_once(job, strikes)
    return {silent, *dead}


def stop_and_kill_agent(job: Victim) -> set[int]:
    host = any_host(job)
    lost = job.ranks(host)
    rank = job.chance.choice(sorted(RANKS - lost))
    at_once(job, [lambda: job.signal(rank, SIGSTOP), lambda: job.signal_agent(host, SIGKILL)])
    return lost | {rank}


def at_once(job: Victim, strikes: Sequence[Callable[[], None]]) -> None:
    """In a drawn order, within a second."""
    for strike in job.chance.sample(strikes, len(strikes)):
        strike()
        job.pause(job.chance.uniform(0.0, 0.3))


def stop_and_kill_in_save(job: Victim) -> set[int]:
    rank = job.chance.choice([1, 2, 3])
    job.signal_in_save(0, SIGKILL)
    job.pause(job.chance.uniform(0.0, 0.3))
    job.signal(rank, SIGSTOP)
    return {0, rank}


def for_a_while(cut: Callable[[Victim], set[int]]) -> Callable[[Victim], set[int]]:
    def strike(job: Victim) -> set[int]:
        cut(job)
        job.pause(BRIEF)
        job.heal()
        return set()

    return strike


def slow_link(job: Victim) -> set[int]:
    job.slow(any_host(job))
    return set()


def out_of_memory(job: Victim) -> set[int]:
    rank = job.chance.randrange(4)
    job.starve(rank)
    return {rank}


def fill_logs(job: Victim) -> set[int]:
    job.fill_logs()
    return set()


def fill_logs_and_kill(job: Victim) -> set[int]:
    job.fill_logs()
    return kill(job)


def fill_saves(job: Victim) -> set[int]:
    """Its first rank saves there; when that has failed, the next one."""
    host = any_host(job)
    job.fill_saves(host)
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
