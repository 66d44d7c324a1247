"""What ranks give each other at the launcher is bounded, and whoever gives too much is told so."""

from __future__ import annotations

import pytest

from dadt.control.frame import Frame
from dadt.launch.actions import Action, Event, Outbox, Reply, SendFrame
from dadt.launch.hosts.host import Host
from dadt.launch.members import board, rendezvous
from dadt.launch.members.board import Board, Want
from dadt.launch.members.node import Node
from dadt.launch.members.rendezvous import Rendezvous


@pytest.fixture
def answers() -> list[Frame]:
    return []


@pytest.fixture
def reply(answers: list[Frame]) -> Reply:
    return lambda frame, now: answers.append(frame)


def test_all_ranks_get_what_all_have_given_and_nothing_of_it_stays(answers: list[Frame], reply: Reply) -> None:
    meeting = Rendezvous(["", ""], Outbox(), 0.0)
    for rank, blob in enumerate((b"a", b"bc")):
        meeting.give("key", rank, blob, 10.0, reply, 0.0)
    assert [(answer["sizes"], answer.body) for answer in answers] == [([1, 2], b"abc")] * 2
    meeting.give("key", 0, b"again", 10.0, reply, 0.0)
    assert "rank 0 gives 5 bytes for 'key', which all have given already" in answers[-1]["message"]


def test_a_rank_gives_no_more_than_the_bound_while_others_are_awaited(
    answers: list[Frame], reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "MOST_GIVEN", 100)
    meeting = Rendezvous(["", ""], Outbox(), 0.0)
    meeting.give("one", 0, bytes(60), 10.0, reply, 0.0)
    meeting.give("two", 0, bytes(41), 10.0, reply, 0.0)
    [refusal] = answers
    assert "rank 0 gives 41 bytes for 'two', beside 60 that others have not met" in refusal["message"]
    meeting.give("one", 1, bytes(60), 10.0, reply, 0.0)  # each rank has a bound of its own
    meeting.give("three", 0, bytes(41), 10.0, reply, 0.0)
    assert [answer.kind for answer in answers] == ["error", "exchanged", "exchanged"]


def test_where_one_rank_has_waited_in_vain_no_rank_gets_the_values(answers: list[Frame], reply: Reply) -> None:
    meeting = Rendezvous(["", "", ""], Outbox(), 0.0)
    meeting.give("key", 0, b"a", 10.0, reply, 0.0)
    meeting.give("key", 1, b"b", 10.0, reply, 5.0)
    meeting.settle(9.0)
    assert not answers
    meeting.settle(10.0)
    meeting.give("key", 2, b"c", 10.0, reply, 11.0)
    told = "rank 2 (has not imported torch) did not arrive within 10 s for 'key'"
    assert [(answer.kind, answer["message"]) for answer in answers] == [("error", told)] * 3
    meeting.regroup([2], "rank 2 has ended", 12.0)
    for rank in (0, 1):
        meeting.give("key", rank, b"a", 10.0, reply, 12.0)
    assert [answer.kind for answer in answers[3:]] == ["exchanged"] * 2


def test_only_ranks_of_the_current_generation_exchange(answers: list[Frame]) -> None:
    outbox = Outbox()
    meeting = Rendezvous(["", "", ""], outbox, 0.0)
    meeting.regroup([2], "rank 2 has ended", 1.0)
    for rank, generation in ((2, 1), (0, 0), (0, 1), (1, 1)):  # a new worker, and one that has not heard of the loss
        asks = {"rank": rank, "key": "key", "timeout": 10.0, "generation": generation, "line": 1}
        meeting.exchange(Event(Node(0, Host(name="here")), Frame("exchange", asks, b"a"), 2.0))
    told: list[tuple[str, object]] = []

    def perform(action: Action) -> None:
        assert isinstance(action, SendFrame)
        answer = action.frame["answer"]
        told.append((answer["kind"], answer.get("message", answer.get("sizes"))))

    outbox.empty(perform)
    assert told == [("error", "rank 2 has ended")] * 2 + [("exchanged", [1, 1])] * 2


def test_a_rank_puts_no_more_than_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "MOST_BYTES", 100)
    held = Board()
    assert held.put("group/1", 0, bytes(60), 0.0) == ""
    assert "which is there already" in held.put("group/1", 1, b"", 0.0)
    assert "rank 0 puts 2 keys of 134 bytes for other ranks" in held.put("group/2", 0, bytes(60), 0.0)
    assert held.put("group/2", 1, bytes(60), 0.0) == ""
    monkeypatch.setattr(board, "MOST_KEYS", 1)
    assert "rank 1 puts 2 keys of " in held.put("group/3", 1, b"", 0.0)


def test_one_answer_is_bounded_too(answers: list[Frame], reply: Reply, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "MOST_TOGETHER", 100)
    held = Board()
    for rank in range(2):
        held.put(f"group/{rank}", rank, bytes(60), 0.0)
    for keys in (["group/0"], ["group/0", "group/1"], ["group/0", "group/0"]):
        held.want(Want(0, keys, 10.0, 10.0, reply), 0.0)
    assert [answer.kind for answer in answers] == ["exchanged", "error", "error"]
    assert "rank 0 asks for more at once than 100 bytes, or for a key twice" in answers[-1]["message"]


def asks(meeting: Rendezvous, kind: str, rank: int, now: float = 1.0, body: bytes = b"", **facts: object) -> None:
    header = {"rank": rank, "timeout": 10.0, "generation": meeting.generation, "line": rank, **facts}
    getattr(meeting, kind)(Event(Node(0, Host(name="here")), Frame(kind, header, body), now))


def told(outbox: Outbox) -> dict[int, list[tuple[str, str]]]:
    """By rank, the kinds and texts of answers."""
    found: dict[int, list[tuple[str, str]]] = {}

    def perform(action: Action) -> None:
        assert isinstance(action, SendFrame)
        answer = action.frame["answer"]
        found.setdefault(action.frame["line"], []).append((answer["kind"], answer.get("message", "")))

    outbox.empty(perform)
    return found


def test_in_islands_nobody_waits_for_ranks_of_another_position_that_have_ended() -> None:
    meeting = Rendezvous([""] * 4, outbox := Outbox(), 0.0, island_size=2)
    for rank in range(4):
        asks(meeting, "put", rank, key=f"machine/of rank {rank}")
    for rank in (0, 2):
        member = meeting.members[rank]
        member.claimed = member.ended = member.finished = True
    asks(meeting, "put", 1, key="the end/of rank 1")
    asks(meeting, "get", 1, keys=["the end/of rank 1", "the end/of rank 3"])
    meeting.settle(2.0)
    assert [kind for kind, _ in told(outbox)[1]] == ["taken", "taken"]
    meeting.settle(11.0)
    text = "rank 3 (has not imported torch) did not arrive within 10 s for 'the end/of rank 3'"
    assert told(outbox) == {1: [("error", text)]}
    asks(meeting, "get", 1, keys=["the end/of rank 1", "the end/of rank 3"])
    meeting.members[3].ended = True
    meeting.settle(12.0)
    assert "cannot arrive any more" in told(outbox)[1][0][1]


def test_ranks_of_an_island_exchange_values_among_themselves() -> None:
    meeting = Rendezvous([""] * 4, outbox := Outbox(), 0.0, island_size=2)
    for rank in (2, 3, 0):
        asks(meeting, "exchange", rank, key="step", island=True)
    assert told(outbox) == {2: [("exchanged", "")], 3: [("exchanged", "")]}
    asks(meeting, "exchange", 3, key="step", island=True)
    assert "which all have given already" in told(outbox)[3][0][1]
    for number in range(100):  # of those that are over only the last one is remembered
        for rank in (2, 3):
            asks(meeting, "exchange", rank, key=f"step {number}", island=True)
    assert all(answer == ("exchanged", "") for each in told(outbox).values() for answer in each)
    assert meeting._over == {"step 99 in island 1"}
    meeting.members[1].ended = True
    meeting.settle(2.0)
    assert told(outbox) == {
        0: [("error", "rank 1 (has not imported torch) cannot arrive any more for 'step in island 0'")]
    }


def test_who_comes_to_an_exchange_that_was_given_up_is_refused_at_once() -> None:
    meeting = Rendezvous([""] * 3, outbox := Outbox(), 0.0)
    asks(meeting, "exchange", 0, key="step")
    meeting.give_up(Frame("error", {"type": "PeerLost", "message": "rank 2 was silent"}), 2.0)
    asks(meeting, "exchange", 1, key="step")
    assert told(outbox) == {rank: [("error", "rank 2 was silent")] for rank in (0, 1)}
