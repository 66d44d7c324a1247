"""Records the timeline of a rank's training, and merges the timelines of all ranks at the end."""

from __future__ import annotations

from dadt.comm.trace import gather as trace
from dadt.comm.trace.merge import merge
from dadt.comm.trace.recorder import Timeline
from dadt.train.ranks import Ranks

_MERGE_SECONDS = 300.0  # seconds allowed for merging all ranks' timelines into one


def record(ranks: Ranks, timeline: Timeline) -> None:
    """Start the rank's timeline, or continue it on a new connection."""
    if ranks.timeline is None:
        timeline.start(_peers(ranks, ranks.config.timeout))
        timeline.count(ranks.progress.links.totals)
        ranks.timeline = timeline
    if ranks.connection is not None:
        timeline.record(ranks.connection, "exchange")


def merge_all(ranks: Ranks) -> None:
    """Merge the timelines of all ranks into one. Every rank calls this function."""
    if ranks.timeline is not None and (text := merge(ranks.timeline, _peers(ranks, _MERGE_SECONDS), ranks.members)):
        ranks.say(text)


def _peers(ranks: Ranks, timeout: float) -> trace.TimelinePeers:
    if ranks.connection is None:
        return trace.Alone()
    return trace.Through(ranks.connection.engine, ranks.group.world_size, timeout)
