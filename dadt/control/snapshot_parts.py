"""Decides from the descriptions that ranks write beside their parts of a snapshot which snapshots are complete, which
are kept, and from which parts a rank resumes. A rank that is lost later may have written a part, a rank that catches up
after a loss takes its snapshot later than the others, and a host's disk may hold parts of an earlier attempt to run the
job. Therefore only parts that the same generation of ranks has written in the same attempt belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Part = Mapping[str, Any]
"""Description of a rank's part; `snapshots.ABOUT` lists its values."""
Snapshot = TypeVar("Snapshot")
Ordered = TypeVar("Ordered", int, Path)

KEPT = 2
"""Number of complete snapshots that are kept. Training resumes from the newest one."""


@dataclass(frozen=True, slots=True)
class Source:
    """The parts of a snapshot from which one rank resumes."""

    common: int
    """The rank whose part contains the state that all ranks have in common, or all that hold the same part of the model
    as the resuming rank."""
    own: int | None
    """The resuming rank's own number if it has a part in the snapshot; None if the rank was lost when the snapshot was
    taken."""
    is_exact: bool
    """Whether the ranks that resume are exactly those that took the snapshot, each with a state of its own besides the
    common state."""
    batch: str
    """Hash of the arguments of the first training forward after the snapshot; empty if unknown."""


def taken_together(parts: Mapping[int, Part]) -> Mapping[int, Part]:
    """Return the parts that the newest generation of ranks has written, in the order of ranks. parts: a rank's
    description of its part, by rank; not empty."""
    ages = {rank: (parts[rank]["attempt"], parts[rank]["generation"]) for rank in sorted(parts)}
    newest = max(ages.values())
    return {rank: parts[rank] for rank, age in ages.items() if age == newest}


def is_whole(parts: Mapping[int, Part]) -> bool:
    """Return whether all ranks that were training when the snapshot was taken have written their parts. parts: the
    descriptions of all complete parts, by rank."""
    if not parts:
        return False
    together = taken_together(parts)
    return all(rank in together for rank in next(iter(together.values()))["members"])


def outdated(complete: Sequence[Snapshot]) -> Sequence[Snapshot]:
    """Return the snapshots that need not be kept. complete: the complete snapshots in the order of their steps."""
    return complete[:-KEPT]


def superseded(taken: Iterable[Ordered], last: Ordered) -> list[Ordered]:
    """Return the snapshots that are newer than `last`. They must be removed before an attempt resumes from `last`, as
    the attempt will take snapshots after the same steps. taken: all snapshots, also incomplete ones, as steps or
    folders."""
    return [each for each in taken if each > last]


def source(parts: Mapping[int, Part], rank: int, world_size: int) -> Source:
    """Return the parts from which this rank resumes. parts: the descriptions of the existing parts, by rank; not empty.
    world_size: the number of ranks that resume."""
    together = taken_together(parts)
    # with islands, only ranks at the same place in theirs hold the same part of the model
    equals = {each: part for each, part in together.items() if (each - rank) % part["parts"] == 0} or together
    common = next((each for each, part in equals.items() if part["common"]), next(iter(equals)))
    is_there = rank in together
    told = together[rank if is_there else common]
    all_took = list(told["members"]) == list(range(world_size)) and told["shares"] == told["world"] == world_size
    return Source(
        common,
        rank if is_there else None,
        is_there and all_took,
        told["next"] if is_there and len(told["members"]) == world_size else "",
    )
