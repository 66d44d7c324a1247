"""Starts new workers in place of lost ones. This is possible if each rank trains at its own speed, or if the script can
be replayed up to the step of the other ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence

from dadt.config import Config
from dadt.config.check import NEVER, UNEQUAL
from dadt.control.frame import Frame
from dadt.launch.actions import Outbox
from dadt.launch.ending.preemption import ranks as ranks_text
from dadt.launch.members.member import Member

LONGEST_SECONDS = 30.0
"""Longest pause in seconds before a lost worker is started again. The first pause is 1 s, and each further one is twice
as long."""

ISLAND_TRIES = 3
"""Number of tries in which a script of an island could not be replayed, after which no new workers are started."""


def replaces(config: Config) -> bool:
    """Return whether this job starts new workers in place of lost ones."""
    return config.min_np > 0 and (replays(config) or config.algorithm == "gossip")


def replays(config: Config) -> bool:
    """Return whether a new worker replays its script up to the current step before it joins, which is necessary if all
    ranks step together."""
    takes = config.snapshot_every != NEVER and config.compression != "auto" and config.batch not in UNEQUAL
    return takes and config.algorithm in ("pipe", "sync", "local")


class Replacements:
    """Starts a new worker for each lost rank whose process has ended, as long as the rank's host is in the job and
    reaches the hosts of the other ranks. The workers of an island are started together, once all of them have ended."""

    def __init__(self, outbox: Outbox, hears: Callable[[Collection[int], float], bool]) -> None:
        """hears: called with lost ranks and the time. It returns whether the ranks may be replaced, because their hosts
        receive heartbeats from the other ranks' hosts or are gone."""
        self._outbox = outbox
        self._hears = hears
        self._due: dict[tuple[int, ...], float] = {}
        """For lost ranks that are started together, the time when they are."""
        self._tries: Counter[tuple[int, ...]] = Counter()
        self._members: dict[tuple[int, ...], Sequence[Member]] = {}
        self._refused: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        """For lost ranks, the tries in which their script could not be replayed."""
        self._away: set[int] = set()

    def refused(self, ranks: Collection[int]) -> None:
        """Record that a script of these ranks, one rank or all of an island, could not be replayed, so that no further
        workers are started. In an island that may be because another of its workers has ended, so it gets ISLAND_TRIES
        tries."""
        group = tuple(ranks)
        self._refused[group].add(self._tries[group])
        if len(self._refused[group]) >= (ISLAND_TRIES if len(group) > 1 else 1):
            self._away.update(group)

    def exited(self, members: Sequence[Member], now: float) -> None:
        """Record that the processes of lost ranks have ended: of one rank, or of all of an island. New workers will be
        started after a pause."""
        ranks = tuple(member.rank for member in members)
        if not self._away.isdisjoint(ranks):
            return
        pause = min(2.0 ** min(self._tries[ranks], 10), LONGEST_SECONDS)
        self._tries[ranks] += 1
        self._members[ranks] = members
        self._due[ranks] = now + pause

    def turn(self, now: float) -> None:
        """Start those new workers for which the pause has ended."""
        for ranks in [ranks for ranks, at in self._due.items() if now >= at and self._hears(ranks, now)]:
            del self._due[ranks]
            if not all(member.ended for member in self._members[ranks]):  # they already run on another host
                continue
            for member in self._members[ranks]:
                member.start_anew(now)
                self._outbox.send_all(Frame("worker", {"rank": member.rank}))
            started = "a new worker starts" if len(ranks) == 1 else "new workers start"
            self._outbox.say(f"{started} in place of {ranks_text(ranks)}")
