"""Determines which ranks average with each other in gossip, by pure functions of the rank, the number of ranks and the
number of the exchange.

Even ranks send requests and odd ranks answer them. Every edge joins an even and an odd rank, so ranks can never wait
for each other in a circle (AD-PSGD, arXiv:1710.06952). An odd number of ranks forms a row instead of a ring, because in
a ring its first and last rank would both be even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def asks(rank: int) -> bool:
    """Whether this rank sends requests for averages to its neighbours; the other ranks only answer requests."""
    return rank % 2 == 0


def ring(rank: int, world_size: int) -> list[int]:
    """Return the ranks before and after `rank`, in a ring or (with an odd number of ranks) in a row."""
    return _neighbours(rank, world_size, [1])


def exponential(rank: int, world_size: int) -> list[int]:
    """Return the ranks at distances 1, 3, 5, 9, 17, ...: few neighbours for each rank, and few hops between any two
    ranks.

    (The bipartite exponential graph in the code of Stochastic Gradient Push, arXiv:1811.10792.)
    """
    distances = [1] + [1 + 2**k for k in range(1, world_size.bit_length())]
    return _neighbours(rank, world_size, distances)


def complete(rank: int, world_size: int) -> list[int]:
    """Return all even ranks for an odd rank, and all odd ranks for an even rank."""
    return _neighbours(rank, world_size, range(1, world_size, 2))


TOPOLOGIES: dict[str, Callable[[int, int], list[int]]] = {
    "ring": ring,
    "exponential": exponential,
    "complete": complete,
}


def neighbours(topology: str, rank: int, world_size: int) -> list[int]:
    """Return all ranks that `rank` averages with, in the order in which a rank that sends requests chooses them in
    turn."""
    return TOPOLOGIES[topology](rank, world_size)


def partner(topology: str, rank: int, world_size: int, number: int) -> int:
    """Return the neighbour to which a rank sends its request number `number`, counted from 0.

    With an even number of ranks, no two ranks send requests of the same number to the same neighbour.
    """
    known = neighbours(topology, rank, world_size)
    return known[number % len(known)]


def _neighbours(rank: int, world_size: int, distances: Iterable[int]) -> list[int]:
    """Return the ranks at these distances from `rank`, on both sides, without the rank itself. All distances are
    odd."""
    both = [rank + sign * distance for distance in distances if distance < world_size for sign in (1, -1)]
    if world_size % 2 == 0:
        return list(dict.fromkeys(other % world_size for other in both))
    return [other for other in both if 0 <= other < world_size]
