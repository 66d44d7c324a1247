"""What the launcher decides before workers run, without any process: it awaits agents, which try addresses."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from dadt.config.version import VERSION
from dadt.control.frame import Frame
from dadt.errors import LaunchError, StartTimeout
from dadt.launch.actions import Action, AskHost, DismissHosts, Event, Outbox, SayText, SendFrame, Steps, TimeReached
from dadt.launch.hosts.candidates import Candidates
from dadt.launch.hosts.host import Host
from dadt.launch.members.node import Node
from dadt.launch.start.startup import agree, gather

T = TypeVar("T")
READY = {"version": VERSION, "torch": "2.13", "python": "3.11", "executable": "python", "problems": []}


class Begin:
    """The startup of a job on these hosts, and all actions so far."""

    def __init__(self, hosts: int) -> None:
        self.nodes = [Node(n, Host(name=f"host{n}")) for n in range(hosts)]
        self.all = list(self.nodes)
        self.outbox = Outbox()
        self.actions: list[Action] = []
        self.candidates = Candidates([node.host for node in self.nodes])

    def run(self, steps: Steps[T], events: list[tuple[float, int, Frame]]) -> T:
        """Go through the steps with these events, each at its time from its host, and then only wait."""
        try:
            until = next(steps)
            for now, host, frame in events:
                until = steps.send(Event(self.all[host], frame, now))
            while True:
                until = steps.send(TimeReached(until))
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            self.outbox.empty(self.actions.append)

    def gather(self, events: list[tuple[float, int, Frame]], *, all_needed: bool = True) -> float:
        steps = gather(self.nodes, 60.0, "job", self.candidates, self.outbox, 0.0, all_needed=all_needed)
        return self.run(steps, events)

    def said(self) -> list[str]:
        return [action.text for action in self.actions if isinstance(action, SayText)]


def ready(**facts: Any) -> Frame:
    return Frame("ready", {**READY, **facts})


def test_all_agents_are_asked_and_awaited() -> None:
    begin = Begin(2)
    connected = [(1.0, host, Frame("connected")) for host in (0, 1)]
    assert begin.gather([*connected, (2.0, 0, ready()), (3.0, 1, ready())]) == 3.0
    assert [action.node for action in begin.actions if isinstance(action, AskHost)] == begin.nodes
    assert all(node.reached for node in begin.nodes)


def test_those_that_do_not_come_in_time_are_named() -> None:
    begin = Begin(2)
    with pytest.raises(StartTimeout, match="nothing was started within --start-timeout 60 s"):
        begin.gather([(1.0, 0, ready())])
    assert begin.said() == ["host1: is not connected after 60 s"]
    assert begin.candidates.usable(60.5) == [begin.all[0].host]


def test_the_launchers_own_absence_is_no_fault_of_hosts() -> None:
    """`dadt run` is stopped while agents connect, for longer than they may take, and reads all that has come then."""
    begin = Begin(2)
    begin.gather([(1.0, 0, Frame("connected")), (90.0, 1, Frame("connected")), (90.0, 0, ready()), (91.0, 1, ready())])
    assert begin.nodes == begin.all and begin.said() == []


def test_a_restart_that_fails_says_so() -> None:
    begin = Begin(1)
    steps = gather(begin.nodes, 60.0, "job", begin.candidates, begin.outbox, 0.0, again=True)
    with pytest.raises(LaunchError, match="it was not started again; exit code 3"):
        begin.run(steps, [(1.0, 0, Frame("lost", {"message": "refused"}))])


def test_after_one_has_failed_the_others_get_little_time() -> None:
    begin = Begin(3)
    with pytest.raises(LaunchError, match="nothing was started; exit code 3"):
        begin.gather([(1.0, 0, ready(problems=["no such file"])), (2.0, 1, ready())])
    assert begin.said() == ["host0: no such file", "host2: is not connected, given up"]


def test_hosts_that_cannot_be_reached_are_left_out_where_fewer_do() -> None:
    begin = Begin(2)
    begin.gather([(1.0, 0, ready()), (2.0, 1, Frame("lost", {"message": "refused"}))], all_needed=False)
    assert begin.nodes == begin.all[:1]
    assert begin.actions[-1] == DismissHosts(begin.all[1:])
    assert begin.said() == ["host1: refused: training begins without it"]
    begin = Begin(2)
    begin.gather([(1.0, 0, ready())], all_needed=False)
    assert begin.nodes == begin.all[:1]
    assert begin.said() == ["host1: is not connected after 60 s: training begins without it"]


def test_each_host_tries_the_others_addresses() -> None:
    begin = Begin(2)
    for number, node in enumerate(begin.nodes):
        address = {"interface": "eth0", "address": f"10.0.0.{number}", "speed": 1e3}
        node.report = {"machine": str(number), "addresses": [address], "probe_port": 1, "token": "00"}
    answers = [
        (1.0, number, Frame("probed", {"reached": {str(1 - number): {f"10.0.0.{1 - number}": 0.1}}}))
        for number in (0, 1)
    ]
    begin.run(agree(begin.nodes, "", begin.outbox, 0.0), answers)
    assert [node.address for node in begin.nodes] == ["10.0.0.0", "10.0.0.1"]
    targets = [action.frame["targets"][0]["index"] for action in begin.actions if isinstance(action, SendFrame)]
    assert targets == [1, 0]
    with pytest.raises(LaunchError, match="host1: did not tell within 10 s"):
        begin.run(agree(begin.nodes, "", begin.outbox, 0.0), answers[:1])
