"""What the launcher does for each rank does not grow with their number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dadt.config import Config
from dadt.control.agent_client import report_seconds
from dadt.control.frame import Frame
from dadt.launch.actions import Action, Event, Outbox, SendFrame
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slot import Slot
from dadt.launch.job import LOOK_SECONDS, Job
from dadt.launch.members.node import Node
from dadt.launch.members.rendezvous import Rendezvous
from dadt.launch.members.silence import MOST_TOLD


def calls(do: Callable[[], None]) -> int:
    """How many calls of functions, and turns of generators, this takes."""
    count = 0

    def see(frame: Any, event: str, what: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        do()
    finally:
        sys.setprofile(None)
    return count


def meet(size: int) -> None:
    """An exchange of so many ranks, with a look at what is due after each."""
    meeting = Rendezvous([""] * size, Outbox(), 0.0)
    answers: list[Frame] = []
    for rank in range(size):
        meeting.give("key", rank, b"blob", 10.0, lambda frame, now: answers.append(frame), 0.0)
    assert len(answers) == size


def test_each_rank_costs_as_little_in_an_exchange_of_very_many() -> None:
    few, many = (calls(lambda size=size: meet(size)) / size for size in (100, 1000))  # type: ignore[misc]
    assert many < 1.5 * few


def refuse(size: int) -> None:
    """A rank has ended, and all others have waited for it."""
    meeting = Rendezvous([""] * size, Outbox(), 0.0)
    answers: list[Frame] = []
    for rank in range(1, size):
        meeting.give("key", rank, b"blob", 10.0, lambda frame, now: answers.append(frame), 0.0)
    meeting.members[0].ended = True
    meeting.settle(1.0)
    assert len(answers) == size - 1 and "rank 0 (" in answers[-1]["message"]


def test_each_rank_costs_as_little_where_very_many_wait_in_vain() -> None:
    few, many = (calls(lambda size=size: refuse(size)) / size for size in (100, 1000))  # type: ignore[misc]
    assert many < 1.5 * few


def test_of_very_many_missing_ranks_some_are_named() -> None:
    meeting = Rendezvous([""] * 1000, Outbox(), 0.0)
    answers: list[Frame] = []
    meeting.give("key", 0, b"blob", 10.0, lambda frame, now: answers.append(frame), 0.0)
    meeting.settle(11.0)
    message = answers[0]["message"]
    assert message.startswith("rank 1 (") and "983 more ranks did not arrive within 10 s for 'key'" in message


def test_reports_of_very_many_ranks_come_no_more_often_together() -> None:
    assert [report_seconds(ranks) for ranks in (4, 1000, 10_000)] == [0.2, 0.2, 2.0]


class Large:
    """A job of one worker on each of very many hosts, and all actions so far."""

    def __init__(self, size: int) -> None:
        self.now = 100.0
        self.nodes = [Node(n, Host(name=f"host{n}"), report={"pid": 1, "version": "1"}) for n in range(size)]
        shape = {"world_size": size, "local_rank": 0, "local_size": 1}
        slots = [Slot(rank=n, cross_rank=n, host=f"host{n}", **shape) for n in range(size)]
        self.job = Job(Config(min_np=1), self.nodes, slots, Path("logs"), self.now, 0.0)
        self.job.start([Frame("job") for _ in range(size)], self.now, 0.0)
        for rank in range(size):
            self.say(rank, "beat", steps={str(rank): [5, 0.0]}, memory={}, conditions={}, clock=0.0)
        self.take()

    def say(self, host: int, kind: str, **facts: Any) -> None:
        self.job.take(Event(self.nodes[host], Frame(kind, facts), self.now))

    def take(self) -> list[Frame]:
        actions: list[Action] = []
        self.job.outbox.empty(actions.append)
        return [each.frame for each in actions if isinstance(each, SendFrame)]

    def peers_of(self, rank: int) -> list[dict[str, Any]]:
        self.say(rank, "peers", rank=rank, line=1)
        answer: dict[str, Any] = self.take()[-1]["answer"]
        peers: list[dict[str, Any]] = answer["peers"]
        return peers


def test_a_rank_that_waits_hears_of_those_that_matter() -> None:
    job = Large(1000)
    job.say(700, "beat", steps={"700": [3, 0.0]}, memory={}, conditions={}, clock=0.0)
    job.say(800, "beat", steps={"800": [5, 0.0]}, memory={}, conditions={"800": "stopped"}, clock=0.0)
    job.say(900, "ending", rank=900, steps=4, gathered=0)
    told = {peer["rank"]: peer["state"] for peer in job.peers_of(5)}
    assert len(told) <= MOST_TOLD and told[700] == "at step 3" and told[900] == "has ended after 4 steps"
    assert "is stopped (SIGSTOP" in told[800]


def test_a_rank_that_waits_hears_of_those_that_its_host_does_not_hear() -> None:
    job = Large(100)
    job.say(5, "silent", peer=60, port=4060, seconds=3.0)
    assert "is unreachable, as host5 has heard nothing from host60" in {
        peer["rank"]: peer["state"] for peer in job.peers_of(5)
    }[60]  # fmt: skip
    assert 60 not in {peer["rank"] for peer in job.peers_of(6)}


def test_a_large_job_looks_at_all_ranks_now_and_then() -> None:
    job = Large(1000)
    assert calls(lambda: job.job.turn(job.now)) > 1000
    job.now += 500 * LOOK_SECONDS
    assert calls(lambda: job.job.turn(job.now)) < 100
    left = job.job.patience(job.now)
    assert 0.0 < left <= 500 * LOOK_SECONDS, "it is looked at them as soon as it may be"
    job.now += 2 * left
    assert calls(lambda: job.job.turn(job.now)) > 1000
