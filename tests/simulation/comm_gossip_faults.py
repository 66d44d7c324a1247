"""What goes wrong among ranks that train by gossip. Each fault is one class, with a line in `draw_gossip_fault`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from simulation.comm_gossip import GossipJob
    from simulation.comm_gossip_rank import GossipRank


@dataclass(frozen=True, slots=True)
class GossipFault(ABC):
    """Something that happens to a rank at a time."""

    at: float
    rank: int
    seconds: ClassVar[float] = 20.0
    holds: ClassVar[bool] = False
    """Whether it may let ranks wait for each other, or fail."""

    def strike(self, job: GossipJob) -> bool:
        """Do it. Returns whether it has any effect."""
        rank = job.ranks[self.rank]
        return rank.process.alive and not rank.ended and self.hit(job, rank)

    @abstractmethod
    def hit(self, job: GossipJob, rank: GossipRank) -> bool: ...


class IsKilled(GossipFault):
    """The rank's process is killed."""

    __slots__ = ()

    def hit(self, job: GossipJob, rank: GossipRank) -> bool:
        rank.die(silent=False)
        return True


class LosesPower(GossipFault):
    """The rank's machine is gone, and no library notices."""

    __slots__ = ()
    seconds = 40.0

    def hit(self, job: GossipJob, rank: GossipRank) -> bool:
        rank.die(silent=True)
        return True


class IsReplaced(GossipFault):
    """The rank's process is killed, and another one comes in its place."""

    __slots__ = ()
    seconds = 40.0

    def hit(self, job: GossipJob, rank: GossipRank) -> bool:
        if not job.scenario.min_np:
            return False
        rank.die(silent=False)
        wait = 1.5 * job.scenario.notice_seconds + job.world.spread(1.0)
        job.world.after(wait, lambda: job.replace(rank))
        return True


class Naps(GossipFault):
    """The rank's process is stopped for a while."""

    __slots__ = ()
    holds = True

    def hit(self, job: GossipJob, rank: GossipRank) -> bool:
        rank.process.stop()
        job.world.after(job.world.spread(3.0), rank.process.go_on)
        return True


class IsCutOff(GossipFault):
    """Messages between the rank and another one do not get through for a while."""

    __slots__ = ()
    holds = True

    def hit(self, job: GossipJob, rank: GossipRank) -> bool:
        other = (self.rank + job.world.random.randrange(1, job.scenario.size)) % job.scenario.size
        ways = {(self.rank, other), (other, self.rank)} if job.world.random.random() < 0.5 else {(self.rank, other)}
        ways -= job.cuts
        job.cuts |= ways
        job.world.after(job.world.spread(8.0), lambda: job.cuts.difference_update(ways))
        return True


def draw_gossip_fault(random: Random, at: float, size: int) -> GossipFault:
    kind = random.choices([IsKilled, LosesPower, IsReplaced, Naps, IsCutOff], [4, 1, 2, 2, 2])[0]
    return kind(at, random.randrange(size))
