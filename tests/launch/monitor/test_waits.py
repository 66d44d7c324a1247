"""Every wait counts, of whatever kind, and names whom it waits for."""

from __future__ import annotations

import time

import pytest

from dadt.control.frame import Frame
from dadt.launch.monitor.members import Rendezvous
from dadt.launch.monitor.waits import ASKED_SECONDS, Waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_rank_waits_as_long_as_its_question_is_open(clock: list[float]) -> None:
    waiting, answers = Waiting(), list[Frame]()
    reply = waiting.begin(answers.append)
    clock[0] += 1000.0
    assert waiting.lasts(seen=0.0)
    reply(Frame("taken"))
    assert not waiting.lasts(seen=0.0)
    assert waiting.acted == clock[0], "it goes on from here"
    assert [answer.kind for answer in answers] == ["taken"]


def test_a_rank_that_asks_for_the_others_waits_until_it_does_something_else(clock: list[float]) -> None:
    waiting = Waiting()
    waiting.ask(starts=False)
    assert waiting.lasts(seen=clock[0] - 1.0)
    assert not waiting.lasts(seen=clock[0] + 1.0), "it has made a step since"
    clock[0] += 1.0
    waiting.begin(lambda frame: None)(Frame("taken"))
    assert not waiting.lasts(seen=0.0)
    waiting.ask(starts=False)
    clock[0] += ASKED_SECONDS
    assert not waiting.lasts(seen=0.0)


def test_who_waits_for_whom_is_found_once(clock: list[float]) -> None:
    meeting = Rendezvous(["", "", ""])
    meeting.give("key", 0, b"", 60.0, lambda frame: None)
    meeting.put("group/1", 1, b"")
    meeting.get(["group/1", "group/2"], 1, 60.0, lambda frame: None)
    clock[0] += 9.0
    assert meeting.stalled(10.0) == []
    clock[0] += 2.0
    stalls = {stall.key: (stall.ranks, [member.rank for member in stall.missing]) for stall in meeting.stalled(10.0)}
    assert stalls == {"key": ({0}, [1, 2]), "group": ({1}, [0, 2])}
    assert meeting.stalled(10.0) == []
