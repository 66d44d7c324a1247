"""Deliberate faults in what ranks decide of their training when others are lost: who is behind, and who reads what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dadt.config import Config
from dadt.control import snapshot_parts
from dadt.control.frame import Frame
from dadt.control.snapshot_parts import Source
from dadt.inject.data import division
from dadt.inject.data.division import Division
from dadt.inject.replay.snapshot_timing import SnapshotTiming
from dadt.launch.members import generation, membership
from dadt.launch.members.handovers import Handovers
from dadt.launch.start import resume
from dadt.train.loss import position
from dadt.train.loss.position import Course


def without_weights(told: Any, members: Sequence[int]) -> Course:
    course = decide(told, members)
    return replace(course, catch_ups=[each._replace(behind=()) for each in course.catch_ups])


def from_one_behind(told: Any, members: Sequence[int]) -> Course:
    course = decide(told, members)
    return replace(course, catch_ups=[each._replace(root=min(each.behind)) for each in course.catch_ups])


def from_the_least(told: Any, members: Sequence[int]) -> Course:
    course = decide(told, members)
    return replace(course, furthest=[min(each) for each in zip(*(each.averaged for each in told), strict=True)])


def not_passed_on(told: Any, members: Sequence[int]) -> Course:
    course = decide(told, members)
    return replace(course, least=course.gathered)


def all_that_began(readers: Any, rank: int, shares: int) -> Division:
    return Division(rank, shares, shares)


def in_the_order_told(readers: Any, rank: int, shares: int) -> Division:
    return Division(rank % len(readers), len(readers), shares)


def not_handed(*given: Any) -> Frame:
    told = generation.regroup(*given)
    told.header["handed"] = 0
    return told


def of_any_attempt(parts: Any) -> Any:
    newest = max(part["generation"] for part in parts.values())
    return {rank: parts[rank] for rank in sorted(parts) if parts[rank]["generation"] == newest}


def from_the_start(config: Config, *given: Any) -> Config:
    return replace(config, resume="")


def never_refused(config: Config, logs: Path, hosts: int, restarts: int, refused: bool, *files: Any) -> Config:
    return configured(config, logs, hosts, restarts, False, *files)


def exact(parts: Any, rank: int, world_size: int) -> Source:
    found = source(parts, rank, world_size)
    return replace(found, is_exact=found.own is not None)


def nobody_first(*given: Any) -> Frame:
    told = generation.regroup(*given)
    told.header["firsts"] = []
    return told


def once_taken(self: SnapshotTiming, step: int, most_late: int, **state: bool) -> bool:
    taken = takes(self, step, most_late, **state)
    self.next = 10**9
    return taken


decide, source, takes = position.decide, snapshot_parts.source, SnapshotTiming.takes
configured = resume.configured

TRAINING_MUTATIONS: Mapping[str, tuple[Any, str, Any]] = {
    "a rank that is behind takes no weights": (position, "decide", without_weights),
    "a rank that is behind gives its weights": (position, "decide", from_one_behind),
    "ranks go on from the least that any has averaged": (position, "decide", from_the_least),
    "what some ranks have gathered is not passed on": (position, "decide", not_passed_on),
    "the data are divided among lost ranks, too": (division, "among", all_that_began),
    "a new worker reads what others have divided": (division, "spare", lambda shares: Division(0, shares, shares)),
    "a rank's place among those who read is its number": (division, "among", in_the_order_told),
    "the question of a new worker may take for ever": (Handovers, "turn", lambda self, now: None),
    "ranks do not learn that a new worker was waited for": (membership, "regroup", not_handed),
    "a snapshot is complete with its first part": (snapshot_parts, "is_whole", bool),
    "the oldest snapshots are kept": (snapshot_parts, "outdated", lambda complete: complete[2:]),
    "each rank resumes with all that was its own": (snapshot_parts, "source", exact),
    "no rank is the first of its host after a loss": (membership, "regroup", nobody_first),
    "parts of any attempt make a snapshot complete": (snapshot_parts, "taken_together", of_any_attempt),
    "a restart leaves snapshots that are too new": (snapshot_parts, "superseded", lambda taken, last: []),
    "a restart goes on from the first step": (resume, "settled", from_the_start),
    "a script that could not go on is given the snapshot again": (resume, "configured", never_refused),
    "one snapshot is taken, and no other": (SnapshotTiming, "takes", once_taken),
}
"""Each fault by what it is: what it replaces, and by what."""
