"""Which lost workers are started anew, and when."""

from __future__ import annotations

import pytest

from dadt.launch.actions import Action, Outbox, SendFrame
from dadt.launch.members.member import Member
from dadt.launch.members.replacement import Replacements


def started(outbox: Outbox) -> list[int]:
    found = list[int]()

    def perform(action: Action) -> None:
        if isinstance(action, SendFrame):
            found.append(action.frame["rank"])

    outbox.empty(perform)
    return found


@pytest.mark.parametrize(("ranks", "tries"), [((2,), 1), ((2, 3), 3)])
def test_what_cannot_be_replayed_is_sent_away_an_island_after_three_tries(ranks: tuple[int, ...], tries: int) -> None:
    """In an island the script of one worker fails where another one has ended, as if it could not be replayed."""
    outbox = Outbox()
    replacements = Replacements(outbox, lambda ranks, now: True)
    members = [Member(rank=rank, ended=True) for rank in ranks]
    now = 0.0
    for _ in range(tries):
        replacements.exited(members, now)
        assert started(outbox) == []
        now += 100.0
        replacements.turn(now)
        assert started(outbox) == list(ranks)
        for member in members:
            replacements.refused(ranks)  # each of them may say so
            member.ended = True
    replacements.exited(members, now)
    replacements.turn(now + 100.0)
    assert started(outbox) == []


def test_workers_that_run_already_are_not_started_again() -> None:
    outbox = Outbox()
    replacements = Replacements(outbox, lambda ranks, now: True)
    members = [Member(rank=rank, ended=True) for rank in (2, 3)]
    replacements.exited(members, 0.0)
    members[0].ended = False  # on another host
    replacements.turn(100.0)
    assert started(outbox) == []
