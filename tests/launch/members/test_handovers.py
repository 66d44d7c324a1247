"""What the new workers of an island ask, and what they are told, passes the launcher together."""

from __future__ import annotations

from typing import Any

import pytest

from dadt.control.frame import Frame
from dadt.launch.actions import Action, Event, Outbox, SendFrame
from dadt.launch.hosts.host import Host
from dadt.launch.members.handovers import Handovers
from dadt.launch.members.node import Node

NODE = Node(0, Host(name="here"))


class Asked:
    """Two islands of two, the second of which is lost; its new workers ask."""

    def __init__(self, size: int = 2) -> None:
        self.outbox, self.killed = Outbox(), list[int]()
        self.handovers = Handovers(self.outbox, lambda rank, now: self.killed.append(rank), 60.0, size)
        self.answers: dict[int, Frame] = {}

    def ask(self, rank: int, *, known: int = 0, last: bool = False, now: float = 0.0) -> None:
        frame = Frame("approach", {"rank": rank, "known": known, "last": last, "timeout": 100.0})
        self.handovers.ask(Event(NODE, frame, now), lambda answer, now: self.answers.update({rank: answer}))

    def sent(self) -> list[dict[str, Any]]:
        found = list[dict[str, Any]]()

        def perform(action: Action) -> None:
            assert isinstance(action, SendFrame)
            found.append(dict(action.frame.header))

        self.outbox.empty(perform)
        return found

    def give(
        self, rank: int, number: int, body: bytes, *, last: bool = False, generation: int = 1, **facts: Any
    ) -> bool:
        told = {"rank": rank, "number": number, "last": last, "generation": generation, "more": False, "text": ""}
        told |= facts
        return self.handovers.give(Event(NODE, Frame("give", told, body), 1.0), 1, [0, 1])


def test_an_island_asks_once_all_of_its_new_workers_have_and_gets_answers_of_one_step() -> None:
    asked = Asked()
    asked.ask(3, known=7, last=True)
    assert asked.sent() == []
    asked.ask(2)
    assert asked.sent() == [{"number": 1, "rank": 2, "known": [0, 7], "last": False}]
    asked.give(1, 1, b"for 3")
    assert not asked.answers
    asked.handovers.begin_anew()  # whoever has answered does so again, at the step of the others
    assert asked.sent() == [{"number": 1, "rank": 2, "known": [0, 7], "last": False}]
    asked.give(0, 1, b"old", generation=0)
    asked.give(0, 1, b"for 2")
    assert not asked.answers
    asked.give(1, 1, b"for 3 anew")
    assert {rank: answer.body for rank, answer in asked.answers.items()} == {2: b"for 2", 3: b"for 3 anew"}
    assert not asked.handovers.awaits(2, 1)


def test_the_others_wait_for_all_new_workers_of_an_island() -> None:
    asked = Asked()
    for rank in (2, 3):
        asked.ask(rank, last=True)
    for rank in (0, 1):
        assert not asked.give(rank, 1, b"last", last=True)
    assert asked.handovers.awaits(2, 1) and asked.handovers.awaits(3, 1) and not asked.handovers.awaits(2, 2)
    assert asked.handovers.come(3) == [] and asked.handovers.come(2) == [2, 3]
    asked.handovers.turn(62.0)
    assert asked.killed == [2, 3]
    assert asked.handovers.ended(3) and not asked.handovers.ended(2)


@pytest.mark.parametrize("rank", [0, 1])
def test_new_workers_ask_again_before_they_replay_where_one_of_them_lacks_values(rank: int) -> None:
    asked = Asked()
    for each in (2, 3):
        asked.ask(each)
    for each in (0, 1):
        asked.give(each, 1, b"some", more=each == rank)
    assert [answer["more"] for answer in asked.answers.values()] == [True, True]


def test_ranks_that_refuse_new_workers_wait_for_nobody() -> None:
    asked = Asked()
    for rank in (2, 3):
        asked.ask(rank, last=True)
    assert not asked.give(0, 1, b"", last=True, text="no")  # each rank refuses the worker that it serves
    assert not asked.give(1, 1, b"", last=True, text="no")
    assert [(answer["type"], answer["message"]) for answer in asked.answers.values()] == [("NotResumed", "no")] * 2
    assert asked.give(1, 1, b"last", last=True)  # it was to give its state, and waits


@pytest.mark.parametrize("alone", [False, True])
def test_no_question_waits_for_ever(alone: bool) -> None:
    asked = Asked()
    for rank in (2,) if alone else (2, 3):
        asked.ask(rank)
    asked.handovers.turn(99.0)
    assert not asked.answers
    asked.handovers.turn(100.0)
    why = "others of its island have not come so far in time" if alone else "the others have taken no step in time"
    assert {answer["message"] for answer in asked.answers.values()} == {why}
    assert len(asked.answers) == (1 if alone else 2)


def test_what_a_worker_asked_that_is_gone_is_not_passed_on() -> None:
    asked = Asked()
    asked.ask(2)
    asked.handovers.ended(2)
    asked.ask(3)
    assert asked.sent() == []
    asked.ask(2, known=5)
    assert asked.sent() == [{"number": 1, "rank": 2, "known": [5, 0], "last": False}]
    asked.ask(2, known=6)  # the island has begun anew
    asked.give(1, 1, b"late")
    assert not asked.answers


def test_without_islands_each_new_worker_asks_by_itself() -> None:
    asked = Asked(size=1)
    asked.ask(3, known=4)
    assert asked.sent() == [{"number": 1, "rank": 3, "known": [4], "last": False}]
    asked.give(0, 1, b"for 3")
    assert asked.answers[3].body == b"for 3"
