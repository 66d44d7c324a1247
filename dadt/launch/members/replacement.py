"""Starts new workers in place of lost ones. This is possible if each rank trains at its own speed, or if the script can
be replayed up to the step of the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dadt.config import Config
from dadt.config.check import NEVER, UNEQUAL, in_islands
from dadt.control.frame import Frame
from dadt.launch.actions import Outbox
from dadt.launch.members.member import Member

LONGEST_SECONDS = 30.0
"""Longest pause in seconds before a lost worker is started again. The first pause is 1 s, and each further one is twice
as long."""


def replaces(config: Config) -> bool:
    """Return whether this job starts new workers in place of lost ones. Never with islands, since all ranks of a lost
    island would have to return together."""
    return config.min_np > 0 and not in_islands(config.island) and (config.algorithm == "gossip" or replays(config))


def replays(config: Config) -> bool:
    """Return whether a new worker replays its script up to the current step before it joins, which is necessary if all
    ranks step together."""
    takes = config.snapshot_every != NEVER and config.compression != "auto" and config.batch not in UNEQUAL
    return takes and config.algorithm in ("pipe", "sync")


class Replacements:
    """Starts a new worker for each lost rank whose process has ended, as long as the rank's host is in the job and
    reaches the hosts of the other ranks."""

    def __init__(self, outbox: Outbox, hears: Callable[[int, float], bool]) -> None:
        """hears: called with a lost rank and the time. It returns whether the rank may be replaced, because its host
        receives heartbeats from the other ranks' hosts or is gone."""
        self._outbox = outbox
        self._hears = hears
        self._due: dict[int, float] = {}
        self._tries: Counter[int] = Counter()
        self._members: dict[int, Member] = {}
        self._away: set[int] = set()

    def send_away(self, rank: int) -> None:
        """Start no further workers in place of this rank's worker."""
        self._away.add(rank)

    def exited(self, member: Member, now: float) -> None:
        """Record that a lost rank's process has ended, so that a new worker will be started after a pause."""
        if member.rank in self._away:
            return
        pause = min(2.0 ** min(self._tries[member.rank], 10), LONGEST_SECONDS)
        self._tries[member.rank] += 1
        self._members[member.rank] = member
        self._due[member.rank] = now + pause

    def turn(self, now: float) -> None:
        """Start those new workers for which the pause has ended."""
        for rank in [rank for rank, at in self._due.items() if now >= at and self._hears(rank, now)]:
            del self._due[rank]
            member = self._members[rank]
            if not member.ended:  # a worker of this rank already runs on another host
                continue
            member.start_anew(now)
            self._outbox.send_all(Frame("worker", {"rank": rank}))
            self._outbox.say(f"a new worker starts in place of rank {rank}")
