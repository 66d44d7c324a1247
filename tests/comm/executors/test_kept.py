"""Connections over TCP that ranks keep when their group has failed, and those that they then make anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pytest
import torch
from harness.board import Board
from harness.patience import PATIENCE

from dadt._core import KeptLink
from dadt.comm.executors import tcp
from dadt.comm.executors.kept import Kept, KeptGroup
from dadt.comm.executors.meet import Apart, Equals
from dadt.config import Config
from dadt.errors import PeerLost
from dadt.world import World

STREAMS = 2
PAIR = 2 * (2 + STREAMS)
"""Number of sockets of two ranks."""


@dataclass(frozen=True)
class Seat(Equals):
    """One rank's part in the rendezvous."""

    mine: KeptGroup

    @property
    def kept(self) -> KeptGroup:
        return self.mine


class Rank:
    """One rank of a job, by its number in it."""

    def __init__(self, board: Board, number: int, timeout: float = PATIENCE) -> None:
        self.board, self.number = board, number
        self.config = Config(timeout=timeout, start_timeout=PATIENCE, streams=STREAMS)
        self.kept = Kept(())

    def connect(self, members: Sequence[int], generation: int) -> None:
        self.kept.members = members
        self.place, self.size = members.index(self.number), len(members)
        world = World(rank=self.place, world_size=self.size, generation=generation)
        seat = Seat(self.board, members, self.place, KeptGroup(self.kept, members))
        self.group = tcp.join(Apart(seat, f"generation {generation}"), world, range(self.size), self.config)

    def fail(self, left: Sequence[int]) -> None:
        """Fail in the midst of an operation and a message, before the ranks `left` form the next group."""
        flat, sent = torch.ones(1_000_000), torch.ones(100_000)
        layout, address = tcp._layout(flat), [flat.data_ptr()]
        work = self.group._engine.allreduce(layout, address, address, "under way")
        self.group.send(sent, 0)
        self.kept.enter(left)
        self.group._connection.abort("a rank has ended", lost=True)
        with suppress(PeerLost):
            work.wait(PATIENCE)
        self.group.close()

    def use(self) -> None:
        flat = torch.ones(300_000)
        self.group.allreduce(flat, "sum")
        assert torch.equal(flat, torch.full_like(flat, float(self.size)))
        received = torch.empty(100_000)
        works = [
            self.group.send(torch.full_like(received, float(self.number)), (self.place + 1) % self.size),
            self.group.receive(received, None),
        ]
        for each in works:
            each.wait(PATIENCE)


def each(ranks: Sequence[Rank], call: Callable[[Rank], None]) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(call, ranks))


def inodes() -> set[int]:
    """The inodes of all TCP sockets of this process that are connected."""
    found = set()
    for one in psutil.Process().net_connections("tcp"):
        with suppress(OSError):  # it may have been closed in the meantime
            found |= {os.fstat(one.fd).st_ino} if one.status == psutil.CONN_ESTABLISHED else set()
    return found


def regrouped(
    before: Sequence[int],
    after: Sequence[int],
    meanwhile: Callable[[dict[int, Rank]], None] = lambda ranks: None,
    timeout: float = PATIENCE,
) -> tuple[int, Board]:
    """Let ranks form a group, fail, and form another one. meanwhile: called between both. Returns how many sockets of
    the first group serve the second one."""
    board = Board()
    ranks = {number: Rank(board, number, timeout) for number in {*before, *after}}
    first, second = ([ranks[number] for number in numbers] for numbers in (before, after))
    others = inodes()
    each(first, lambda rank: rank.connect(before, 1))
    each(first, Rank.use)
    old = inodes() - others
    each(first, lambda rank: rank.fail(after))
    for rank in first:
        if rank.number not in after:
            rank.kept.end()  # as its process has ended
    meanwhile(ranks)
    each(second, lambda rank: rank.connect(after, 2))
    for _ in range(3):
        each(second, Rank.use)
    kept = len(old & inodes())
    each(second, lambda rank: rank.group.close())
    for rank in ranks.values():
        rank.kept.end()
    return kept, board


def test_those_that_are_left_keep_all_of_theirs_in_any_order() -> None:
    assert regrouped([0, 1, 2, 3], [3, 0, 1])[0] == 3 * PAIR


def test_a_new_rank_connects_with_those_that_keep_theirs() -> None:
    assert regrouped([0, 1], [0, 5, 1])[0] == PAIR


def test_two_ranks_of_which_one_has_lost_its_connections_make_new_ones() -> None:
    def lose(ranks: dict[int, Rank]) -> None:
        del ranks[2].kept.links["", 0]

    assert regrouped([0, 1, 2], [2, 1, 0], lose)[0] == 2 * PAIR


def test_connections_that_break_before_they_are_used_again_are_replaced() -> None:
    def cut(ranks: dict[int, Rank]) -> None:
        ranks[1].kept.links["", 2].end()

    assert regrouped([0, 1, 2], [1, 2, 0], cut)[0] == 2 * PAIR


class Mute:
    """A rank's connections of which it never says that it enters the next group."""

    def __init__(self, link: KeptLink) -> None:
        self._link = link

    def enter(self, generation: int) -> None: ...

    def clear(self, generation: int, seconds: float) -> bool:
        return self._link.clear(generation, seconds)

    def take(self) -> list[int]:
        return self._link.take()


def test_a_rank_that_does_not_say_where_its_bytes_end_is_named_and_connected_anew() -> None:
    def mute(ranks: dict[int, Rank]) -> None:
        ranks[2].kept.links["", 0] = Mute(ranks[2].kept.links["", 0])  # type: ignore[assignment]

    kept, board = regrouped([0, 1, 2, 3], [0, 1, 2], mute, timeout=8.0)
    assert kept == 2 * PAIR
    assert board.said == ["rank 2 has not said where its bytes end: its connections are made anew"]


def test_a_group_that_ends_well_keeps_none() -> None:
    board = Board()
    ranks = [Rank(board, number) for number in range(2)]
    each(ranks, lambda rank: rank.connect([0, 1], 1))
    each(ranks, Rank.use)
    for rank in ranks:
        rank.kept.enter([1, 0])
    each(ranks, lambda rank: rank.group.close())
    assert not any(rank.kept.links for rank in ranks)


@pytest.mark.parametrize(("members", "kept"), [([0, 2], [("", 2)]), ([0, 1, 2], []), ([0, 3], [])])
def test_connections_are_kept_with_ranks_that_train_on_if_others_are_lost(members: list[int], kept: list) -> None:
    rank = Kept([0, 1, 2], links={("", 1): object(), ("", 2): object()})  # type: ignore[dict-item]
    rank.enter(members)
    assert list(rank.links) == kept
    rank.end()
    assert not rank.links
