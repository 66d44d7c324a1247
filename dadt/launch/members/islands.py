"""Islands: consecutive ranks that train one model together, so that each is lost with the others, and waits for them in
the script's own collectives, which the launcher does not see."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dadt.control.condition import HELD
from dadt.launch.ending.preemption import ranks as ranks_text
from dadt.launch.hosts.slot import Slot
from dadt.launch.members.member import Member
from dadt.launch.members.node import Node


def with_islands(ranks: Collection[int], slots: Sequence[Slot]) -> Collection[int]:
    """Return these ranks together with all other ranks of their islands, which cannot train without them. Without
    islands, return only these ranks."""
    size = slots[0].island_size
    return sorted({rank - rank % size + i for rank in ranks for i in range(size)}) if size else ranks


def text(ranks: Collection[int], size: int) -> str:
    """Return what users are told of the islands that have these ranks. size: ranks of an island."""
    return f"the island{'s' if len(ranks) > size else ''} of {ranks_text(ranks)}"


def lost_with(
    ranks: Collection[int], present: Collection[Member], slots: Sequence[Slot], *, apart: bool
) -> Collection[int]:
    """Return these ranks together with all that cannot train without them: the others of their islands, and new islands
    of which a rank has not begun to step, as its equal, from which it gets its part of the model, may be one of these
    ranks. present: ranks that train. apart: whether new workers begin in the midst of a job, as with `gossip`."""
    lost = with_islands(ranks, slots)
    begin = [member.rank for member in present if apart and slots[0].island_size and member.joined and member.step < 0]
    return sorted({*lost, *with_islands(begin, slots)}) if set(lost) - set(begin) else lost


def that_join(members: Sequence[Member], slots: Sequence[Slot], rank: int) -> Collection[int]:
    """Return this rank, whose new worker has claimed its place, together with all others of its island; none if others
    have not claimed theirs. members: all ranks of the job, by number."""
    ranks = with_islands([rank], slots)
    return ranks if all(members[each].claimed and not members[each].ended for each in ranks) else []


def has_lost_host(island: Collection[Member], slots: Sequence[Slot], nodes: Sequence[Node]) -> bool:
    """Return whether a host of these ranks is gone, so that they cannot be started anew where they were."""
    return any(nodes[slots[member.rank].cross_rank].ended for member in island)


def island_of(member: Member, members: Sequence[Member], size: int) -> Sequence[Member]:
    """Return the ranks of this rank's island; none without islands. members: all ranks of the job, by number. size:
    ranks of an island; 0 without islands."""
    first = member.rank - member.rank % size if size else 0
    return members[first : first + size]


def silence(member: Member, members: Sequence[Member], size: int, seconds: float) -> str:
    """Return why a rank that was silent for so many seconds is given up: another one of its island, for which it waits
    in vain, has ended its script, or else the rank's own condition. members: all ranks of the job, by number. size:
    ranks of an island; 0 without islands."""
    left = next((other for other in island_of(member, members, size) if other.finished), None)
    if left is not None:
        return f"{left.placed} {left.state}, while others of its island went on"
    return f"{member.placed} was silent for {seconds:g} s" + (f", {HELD[member.condition]}" if member.held else "")


def waits(member: Member, members: Sequence[Member], size: int, now: float) -> bool:
    """Return whether a rank waits for others. With islands it also does where another rank of its island waits: one
    that does not go on keeps all others of its island in collectives, which are not seen, so that none of them waits.
    members: all ranks of the job, by number. size: ranks of an island; 0 without islands."""
    others = (each for each in island_of(member, members, size) if not (each.lost or each.ended or each.held))
    return not member.held and (member.waits(now) or member.finished or any(other.waits(now) for other in others))


def crossed(asking: Collection[int], here: Collection[Member], size: int) -> Collection[int]:
    """Return ranks of the island without which the others can train on where islands wait for each other: a rank of
    each asks to connect with ranks that have completed a step which it has not, as a loss came in between, and these
    wait within their own islands for ranks that ask as well. Empty where that is not so. here: ranks that train. size:
    ranks of an island; 0 without islands."""
    late = [member for member in here if size and member.rank in asking]
    places = {member.rank // size for member in late}
    furthest: dict[int, int] = {}  # step of the ranks of these islands, by their position
    for member in here if len(places) > 1 else ():
        if member.rank // size in places:
            furthest[member.rank % size] = max(member.step, furthest.get(member.rank % size, member.step))
    behind = [each.rank for each in late if each.step < furthest.get(each.rank % size, each.step)]
    return behind[-1:] if len({rank // size for rank in behind}) > 1 else []
