"""The time of rank 0, as another rank sees it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dadt.comm.trace.gather import TimelinePeers
    from dadt.world import World

_PAIR = struct.Struct("<dd")
_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How this rank's perf_counter compares with rank 0's, in seconds."""

    offset: float = 0.0
    """Seconds by which rank 0's clock is ahead."""
    error: float = 0.0
    """Seconds by which the offset may be wrong, either way."""
    at: float = 0.0
    """When it was compared, by this rank's."""
    origin: float = 0.0
    """When rank 0 began to compare, by this rank's."""


def align(peers: TimelinePeers, world: World) -> ClockOffset:
    """Compare this rank's clock with rank 0's. All ranks call it. Raises CommError.

    Nobody leaves an allgather before everybody has entered it. So rank 0's entry was before this rank's exit, and this
    rank's entry before rank 0's exit: each round bounds the offset from both sides.
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
        else:  # of the round before: the entry and exit of both
            low, high = max(low, first[0] - mine[1]), min(high, first[1] - mine[0])
        mine = (entered, left)
    if one_host:  # the kernel's clock, the same for all
        return ClockOffset(at=now, origin=origin)
    offset = 0.0 if world.rank == 0 else (low + high) / 2
    return ClockOffset(offset, 0.0 if world.rank == 0 else (high - low) / 2, now, origin - offset)
