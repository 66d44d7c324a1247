"""Compares a rank's clock with that of rank 0."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from time import perf_counter

from dadt.comm.trace.gather import TimelinePeers
from dadt.world import World

_PAIR = struct.Struct("<dd")
_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Difference between this rank's clock and rank 0's (perf_counter). All values are seconds."""

    offset: float = 0.0
    """Seconds by which rank 0's clock is ahead."""
    error: float = 0.0
    """Largest possible error of the offset in seconds, in either direction."""
    at: float = 0.0
    """perf_counter of this rank when the clocks were compared."""
    origin: float = 0.0
    """Time at which rank 0 began to compare clocks, as this rank's perf_counter would have shown it."""


def align(peers: TimelinePeers, world: World) -> ClockOffset:
    """Compare this rank's clock with rank 0's. All ranks must call it. Raises CommError.

    An allgather ends only after every rank has entered it. So rank 0 entered before this rank left, and this rank
    entered before rank 0 left: each round bounds the offset from both sides.
    """
    now = perf_counter()
    one_host = world.local_size == world.world_size
    low, high = float("-inf"), float("inf")
    mine = (now, now)
    for round_number in range(2 if one_host else _ROUNDS + 1):
        entered = perf_counter()
        every = peers.allgather(_PAIR.pack(*mine), f"clock {round_number}")
        left = perf_counter()
        first = _PAIR.unpack(every[0])
        if round_number == 0:
            origin = first[0]
        # The pairs received in this round are the entry and exit times of the previous round, on rank 0 and on this
        # rank.
        else:
            low, high = max(low, first[0] - mine[1]), min(high, first[1] - mine[0])
        mine = (entered, left)
    if one_host:  # ranks of one host share the kernel's clock
        return ClockOffset(at=now, origin=origin)
    offset = 0.0 if world.rank == 0 else (low + high) / 2
    return ClockOffset(offset, 0.0 if world.rank == 0 else (high - low) / 2, now, origin - offset)
