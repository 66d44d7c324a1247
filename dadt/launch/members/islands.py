"""Islands: consecutive ranks that train one model together, so that each is lost with the others, and waits for them in
the script's own collectives, which the launcher does not see."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dadt.launch.hosts.slot import Slot
from dadt.launch.members.member import Member
from dadt.launch.members.node import Node


def with_islands(ranks: Collection[int], slots: Sequence[Slot]) -> Collection[int]:
    """Return these ranks together with all other ranks of their islands, which cannot train without them. Without
    islands, return only these ranks."""
    size = slots[0].island_size
    return sorted({rank - rank % size + i for rank in ranks for i in range(size)}) if size else ranks


def has_lost_host(island: Collection[Member], slots: Sequence[Slot], nodes: Sequence[Node]) -> bool:
    """Return whether a host of these ranks is gone, so that they cannot be started anew where they were."""
    return any(nodes[slots[member.rank].cross_rank].ended for member in island)


def is_ahead_of_waiting(member: Member, members: Sequence[Member], size: int, now: float) -> bool:
    """Return whether another rank of this rank's island waits for its counterparts in an exchange that this rank has
    completed. This rank will then soon wait for the other one, or does so already, and is not to blame for its silence.
    members: all ranks of the job, by number. size: ranks of an island; 0 without islands."""
    first = member.rank - member.rank % size if size else 0
    island = [other for other in members[first : first + size] if not (other.lost or other.ended)]
    return any(_progress(other) < _progress(member) and other.waits(now) for other in island)


def _progress(member: Member) -> tuple[int, int]:
    return member.step, member.gathered
