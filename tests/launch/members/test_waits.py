"""Every wait counts, of whatever kind, and names whom it waits for."""

from __future__ import annotations

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox
from dadt.launch.hosts.host import Host
from dadt.launch.members.node import Node
from dadt.launch.members.rendezvous import Rendezvous
from dadt.launch.members.waits import ASKED_SECONDS, Waiting

NODE = Node(0, Host(name=""))


def test_a_rank_waits_as_long_as_its_question_is_open() -> None:
    waiting, answers = Waiting(), list[tuple[Frame, float]]()
    reply = waiting.begin(lambda frame, now: answers.append((frame, now)), starts=False, now=1000.0)
    assert waiting.lasts(seen=0.0, now=2000.0)
    reply(Frame("taken"), 2000.0)
    assert not waiting.lasts(seen=0.0, now=2000.0)
    assert waiting.acted == 2000.0, "it goes on from here"
    assert answers == [(Frame("taken"), 2000.0)]


def test_a_rank_that_asks_for_the_others_waits_until_it_does_something_else() -> None:
    waiting = Waiting()
    waiting.ask(starts=False, now=1000.0)
    assert waiting.lasts(seen=999.0, now=1000.0)
    assert not waiting.lasts(seen=1001.0, now=1000.0), "it has made a step since"
    waiting.begin(lambda frame, now: None, starts=False, now=1001.0)(Frame("taken"), 1001.0)
    assert not waiting.lasts(seen=0.0, now=1001.0)
    waiting.ask(starts=False, now=1001.0)
    assert not waiting.lasts(seen=0.0, now=1001.0 + ASKED_SECONDS)


def test_who_waits_for_whom_is_found_once() -> None:
    meeting = Rendezvous(["", "", ""], Outbox(), 1000.0)
    asks = {"rank": 1, "line": 1, "timeout": 60.0}
    meeting.exchange(Event(NODE, Frame("exchange", {**asks, "rank": 0, "key": "key"}), 1000.0))
    meeting.put(Event(NODE, Frame("put", {**asks, "key": "group/1"}), 1000.0))
    meeting.get(Event(NODE, Frame("get", {**asks, "keys": ["group/1", "group/2"]}), 1000.0))
    assert meeting.stalled(10.0, 1009.0) == []
    found = meeting.stalled(10.0, 1011.0)
    stalls = {stall.key: (stall.ranks, [member.rank for member in stall.missing]) for stall in found}
    assert stalls == {"key": ({0}, [1, 2]), "group": ({1}, [0, 2])}
    assert meeting.stalled(10.0, 1011.0) == []
