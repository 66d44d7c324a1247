"""Who averages with whom."""

from __future__ import annotations

import pytest

from dadt.algorithms.gossip.topology import asks, complete, exponential, neighbours, partner, ring
from dadt.config.check import TOPOLOGIES

SIZES = [*range(2, 10), 15, 16, 17, 33]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size", SIZES)
def test_edges_join_one_that_asks_and_one_that_answers_and_both_know(topology, size) -> None:
    for rank in range(size):
        known = neighbours(topology, rank, size)
        assert known and len(set(known)) == len(known)
        for other in known:
            assert asks(rank) != asks(other)
            assert rank in neighbours(topology, other, size)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_is_reached_from_every_other(topology, size) -> None:
    reached, new = {0}, {0}
    while new:
        new = {other for rank in new for other in neighbours(topology, rank, size)} - reached
        reached |= new
    assert reached == set(range(size))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size", SIZES)
def test_each_edge_is_met_in_turn(topology, size) -> None:
    for rank in filter(asks, range(size)):
        known = neighbours(topology, rank, size)
        turns = [partner(topology, rank, size, number) for number in range(3 * len(known))]
        assert turns == known * 3


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size", [size for size in SIZES if size % 2 == 0])
def test_in_a_circle_those_that_ask_take_different_partners(topology, size) -> None:
    for number in range(2 * size):
        taken = [partner(topology, rank, size, number) for rank in filter(asks, range(size))]
        assert len(set(taken)) == len(taken)


def test_known_neighbourhoods() -> None:
    assert ring(0, 2) == [1]
    assert ring(0, 6) == [1, 5]
    assert ring(4, 5) == [3]  # a row: its ends would both ask
    assert exponential(0, 16) == [1, 15, 3, 13, 5, 11, 9, 7]
    assert exponential(0, 64) == [1, 63, 3, 61, 5, 59, 9, 55, 17, 47, 33, 31]
    assert complete(1, 5) == [2, 0, 4]
    assert sorted(complete(2, 8)) == [1, 3, 5, 7]
