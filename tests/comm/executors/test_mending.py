"""Connections over TCP that break while both ranks live."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic

import pytest
import torch
from harness.board import Board
from harness.patience import PATIENCE, await_that

from dadt import _core
from dadt.comm.executors import mending, sockets
from dadt.comm.executors.meet import Equals
from dadt.comm.executors.point_to_point import CoreMessages
from dadt.comm.executors.tcp import USES, _layout
from dadt.config import Config
from dadt.control.connection import Reach, Refused, Unreached, dial
from dadt.errors import PeerLost
from dadt.world import World

RANKS = 3


class Rank:
    def __init__(self, board: Board, place: int, streams: int = 1) -> None:
        world, config = World(rank=place, world_size=RANKS), Config(timeout=PATIENCE, streams=streams)
        meet = Equals(board, range(RANKS), place)
        found = sockets.connect(USES, "tcp", meet, world, range(RANKS), config)
        assert found.mender is not None
        self.mender = found.mender
        self.sockets = [[each.detach() for use in USES for each in found.sockets[use][other]] for other in range(RANKS)]
        """By rank: for notices, for messages, and those for data."""
        self.executor = _core.TcpExecutor(place, self.sockets, PATIENCE / 2)
        self.mender.start(self.executor, [len(those) for those in self.sockets], PATIENCE / 2, 0.0)
        self.engine = _core.Engine(self.executor, place, RANKS, PATIENCE)
        self.mail = CoreMessages(_core.TcpMailbox(self.executor))
        self.place = place

    def cut(self, *descriptors: int) -> None:
        for each in descriptors:
            with socket.socket(fileno=os.dup(each)) as found, suppress(OSError):  # it may be broken already
                found.shutdown(socket.SHUT_RDWR)

    def sum(self, flat: torch.Tensor) -> torch.Tensor:
        address = [flat.data_ptr()]
        work = self.engine.allreduce(_layout(flat), address, address, "sum", reduction=_core.Reduction.sum)
        work.wait(2 * PATIENCE)
        return flat


def joined(board: Board, streams: int = 1) -> list[Rank]:
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda place: Rank(board, place, streams), range(RANKS)))


def sums(ranks: Sequence[Rank], count: int) -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(lambda rank: rank.sum(torch.ones(count)), ranks))
    assert all(torch.equal(each, torch.full((count,), float(RANKS))) for each in found)


def close(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.engine.close(PATIENCE)
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda rank: rank.mail.close(), ranks))
    names = ("dadt-tcp-mend", "dadt-listen")
    await_that(lambda: not [each for each in threading.enumerate() if each.name in names], "the menders' end")


@pytest.mark.parametrize("streams", [1, 3])
def test_operations_go_on_over_connections_that_are_replaced(streams: int) -> None:
    ranks = joined(Board(), streams)

    def work(rank: Rank) -> None:
        for step in range(30):
            other = (rank.place + 1 + step % (RANKS - 1)) % RANKS
            rank.cut(rank.sockets[other][step % (2 + streams)])
            flat = torch.arange(10 if step % 2 else 300_000, dtype=torch.float64) * (rank.place + step)
            assert torch.equal(rank.sum(flat), torch.arange(len(flat), dtype=torch.float64) * (3 + 3 * step))

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(work, ranks))
    close(ranks)


def test_messages_go_on_over_connections_that_are_replaced() -> None:
    ranks = joined(Board())

    def work(rank: Rank) -> None:
        other, before = (rank.place + 1) % RANKS, (rank.place - 1) % RANKS
        for step in range(20):
            sent = torch.arange(50 if step % 3 else 2_000_000) + rank.place + step
            got = torch.empty_like(sent)
            send, receive = rank.mail.send(sent, other), rank.mail.receive(got, before)
            rank.cut(rank.sockets[other if step % 2 else before][step % 3])
            send.wait(PATIENCE)
            receive.wait(PATIENCE)
            assert torch.equal(got, sent - rank.place + before)

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(work, ranks))
    close(ranks)


def test_all_connections_of_a_rank_may_break_at_once() -> None:
    ranks = joined(Board(), 2)
    ranks[1].cut(*ranks[1].sockets[0], *ranks[1].sockets[2])
    sums(ranks, 100_000)
    close(ranks)


def test_a_rank_that_cannot_be_reached_any_more_is_named_at_once() -> None:
    ranks = joined(Board())
    ranks[2].mender.close()  # nobody listens there any more
    begun = monotonic()
    ranks[2].cut(*ranks[2].sockets[0], *ranks[2].sockets[1])
    for rank in ranks[:2]:
        with pytest.raises(PeerLost, match=r"rank 2 .*is gone; waited for it in a receive"):
            rank.mail.receive(torch.ones(5), 2).wait(PATIENCE)
        with pytest.raises(PeerLost, match=r"rank 2 .*is gone"):
            rank.sum(torch.ones(5))
    assert monotonic() - begun < PATIENCE / 2  # when else the connection would count as silent
    for rank in ranks:
        rank.engine.abort("the test ends")
    close(ranks)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"place": 0}, {"place": 3}, {"group": "other"}, {"received": 0}, {"received": [0]}, {"received": [0, -1]},
     {"received": [7, 0]}, {"received": [0, 7]}, {"attempt": "1"}, {"attempt": 0}, {"number": 3},
     {"use": mending.BROKEN, "place": 9}],
)  # fmt: skip
def test_who_may_not_replace_a_connection_changes_nothing(wrong: dict[str, object]) -> None:
    board = Board()
    ranks = joined(board)
    reach = Reach.from_text(json.loads(board.get(["tcp endpoints/of rank 0"])[0])[0])
    hello = {"use": mending.MENDED, "place": 1, "group": "tcp", "number": 0, "received": [0, 0], "attempt": 1}
    stranger = Reach(addresses=reach.addresses, port=reach.port, key=b"t" * 32, silence=PATIENCE)
    with pytest.raises(Unreached, match="another key"):
        dial(lambda: stranger, hello, 0.0)
    known = Reach(addresses=reach.addresses, port=reach.port, key=board.secret, silence=PATIENCE)
    if not wrong or "received" in wrong:  # one of the job who is right in all else ends the connection alone
        with suppress(Refused):
            dial(lambda: known, {**hello, **wrong}, 0.0)[0].socket.close()
    else:
        with pytest.raises(Refused):
            dial(lambda: known, {**hello, **wrong}, 0.0)
    sums(ranks, 5)
    close(ranks)
