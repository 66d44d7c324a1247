"""Tracks ranks that exited with code 0 before training had ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dadt.launch.members.rendezvous import Rendezvous


class EarlyExits:
    """Ranks that exited with code 0 while other ranks still trained. These go on without them once they need them."""

    def __init__(self, rendezvous: Rendezvous, *, apart: bool, island_size: int) -> None:
        """apart: whether each rank trains at its own speed without waiting for the others, as with `gossip`.
        island_size: ranks of an island, each of which meets those of its own position in the others; 0 without."""
        self._rendezvous = rendezvous
        self._apart = apart
        self._positions = island_size or 1
        self.left: dict[int, str] = {}
        """For each rank, until it is missed, a text that says how it exited."""
        self._over = -1
        """Number of the latest generation of which all ranks have finished training; -1 if there is none."""

    def add(self, rank: int, why: str) -> None:
        self.left[rank] = why

    def losses(self, rank: int) -> list[int]:
        """Return those ranks that would count as lost if this rank exited as well."""
        return [each for each in (*self.left, rank) if not self.is_at_end(each)]

    def is_at_end(self, rank: int) -> bool:
        """Return whether a rank that has exited is not lost for the others, as it trained at its own speed, and has
        finished."""
        return self._apart and self._rendezvous.members[rank].finished

    def begin_anew(self) -> None:
        """Record that a rank that had finished trains again."""
        self._over = -1

    @property
    def is_over(self) -> bool:
        """Whether training has ended, so that a rank that has finished may exit: all ranks that began the job, and are
        in the current generation, have finished."""
        if self._over != self._rendezvous.generation:
            began = [each for each in self._rendezvous.present if not (self._apart and each.joined)]
            if not all(each.finished or each.ended for each in began):
                return False
            self._over = self._rendezvous.generation
        return True

    def take_missed(self, asking: Collection[int], now: float) -> Mapping[int, str]:
        """Return the ranks that are missed now, each with a text that says how it exited, and forget them: others wait
        for them or, with gossip, connect anew and still train. asking: ranks that ask to connect anew."""
        if not self.left:
            return {}
        members = self._rendezvous.members
        here = [member for member in members if not (member.lost or member.ended)]
        if self._apart:
            missed = self.left if here and any(not members[rank].finished for rank in (*self.left, *asking)) else {}
        else:
            waiting = {*asking, *(member.rank for member in here if member.waits(now) and not member.finished)}
            positions = {rank % self._positions for rank in waiting}
            missed = {rank: why for rank, why in self.left.items() if rank % self._positions in positions}
        self.left = {rank: why for rank, why in self.left.items() if rank not in missed}
        return missed
