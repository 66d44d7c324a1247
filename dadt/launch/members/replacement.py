"""New workers in place of lost ones: in a job whose ranks train each at its own speed, and where scripts are made again
up to where the others are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dadt.config import Config
from dadt.config.check import NEVER
from dadt.control.frame import Frame
from dadt.launch.actions import Outbox
from dadt.launch.members.member import Member

LONGEST_SECONDS = 30.0
"""The longest pause before a worker is started again; the first is 1 s, and each is twice the one before."""


def replaces(config: Config) -> bool:
    """Whether new workers join in place of lost ones."""
    return config.min_np > 0 and (config.algorithm == "gossip" or replays(config))


def replays(config: Config) -> bool:
    """Whether scripts are made again for that, so that ranks that step together stay together."""
    takes = config.snapshot_every != NEVER and config.compression != "auto"
    return takes and config.algorithm in ("pipe", "sync")


class Replacements:
    """A worker is started again where its process has ended and its host is there, and not cut off from the others."""

    def __init__(self, outbox: Outbox, hears: Callable[[int, float], bool]) -> None:
        """hears: whether the host of a rank and those of the others hear each other."""
        self._outbox = outbox
        self._hears = hears
        self._due: dict[int, float] = {}
        self._tries: Counter[int] = Counter()
        self._members: dict[int, Member] = {}
        self._away: set[int] = set()

    def send_away(self, rank: int) -> None:
        """Start no other worker in the place of this one."""
        self._away.add(rank)

    def exited(self, member: Member, now: float) -> None:
        """Note that a lost rank's process has ended: another worker is due after a pause."""
        if member.rank in self._away:
            return
        pause = min(2.0 ** min(self._tries[member.rank], 10), LONGEST_SECONDS)
        self._tries[member.rank] += 1
        self._members[member.rank] = member
        self._due[member.rank] = now + pause

    def turn(self, now: float) -> None:
        """Start the workers that are due."""
        for rank in [rank for rank, at in self._due.items() if now >= at and self._hears(rank, now)]:
            del self._due[rank]
            member = self._members[rank]
            if not member.ended:  # another host has taken its place
                continue
            member.start_anew(now)
            self._outbox.send_all(Frame("worker", {"rank": rank}))
            self._outbox.say(f"a new worker starts in place of rank {rank}")
