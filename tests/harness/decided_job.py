"""A job as the launcher decides it, without any process: events and times go in, actions come out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.launch.actions import Action, Event, SayText, SendFrame
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slot import Slot
from dadt.launch.job import TURN_SECONDS, Job
from dadt.launch.members.node import Node

ENDED = {"time": 1.0, "step": 5, "peak_memory": 0, "memory_limit": 0, "memory_kills": 0, "stopped": False}
FAILED = {"frames": [], "step": 5, "thread": "", "around": [], "pid": 11}
WAITED = {**FAILED, "type": "CommError", "message": "the connection was closed by a peer", "secondary": True}


class DecidedJob:
    """A job of one worker on each of these hosts, and all actions so far."""

    def __init__(self, hosts: int, island_size: int = 0, **knobs: Any) -> None:
        self.now = 100.0
        self.nodes = [
            Node(n, Host(name=f"host{n}"), report={"pid": 1, "version": "1"}, clock=0.0) for n in range(hosts)
        ]
        shape = {"world_size": hosts, "local_rank": 0, "local_size": 1, "island_size": island_size}
        slots = [Slot(rank=n, cross_rank=n, host=f"host{n}", **shape) for n in range(hosts)]
        self.job = Job(Config(**knobs), self.nodes, slots, Path("logs"), self.now, 0.0)
        self.job.start([Frame("job") for _ in range(hosts)], self.now, 0.0)
        self.actions: list[Action] = []

    def say(self, host: int, kind: str, **facts: Any) -> None:
        self.job.take(Event(self.nodes[host], Frame(kind, facts), self.now))

    def train(self, step: int) -> None:
        for rank in range(len(self.nodes)):
            if step == 1:
                self.say(rank, "started", rank=rank, pid=10 + rank)
                self.say(rank, "claim", rank=rank, pid=10 + rank, line=1)
            self.say(rank, "beat", steps={str(rank): [step, 0.0]}, memory={}, conditions={}, clock=0.0)

    def later(self, seconds: float = 0.0, *, heard: Sequence[int] = ()) -> None:
        """Let time pass, until which the agents of the hosts `heard` go on to send."""
        until = self.now + seconds
        while True:
            self.now = min(until, self.now + TURN_SECONDS)
            for host in heard:
                self.nodes[host].heard = self.now
            self.job.turn(self.now)
            self.job.outbox.empty(self.actions.append)
            if self.now == until:
                return

    def sent(self, kind: str) -> list[Frame]:
        return [each.frame for each in self.actions if isinstance(each, SendFrame) and each.frame.kind == kind]

    def said(self) -> list[str]:
        return [each.text for each in self.actions if isinstance(each, SayText)]
