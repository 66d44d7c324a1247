"""Decides which snapshots are complete, which are kept, and what a rank resumes from, by what the parts of ranks say of
themselves.

Ranks that are lost may have written a part, a rank that has caught up after a loss takes its snapshot later than the
others, and a disk of a host may hold parts of an earlier attempt to run the job. So only parts of one generation of
ranks in one attempt belong together.
"""

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
    """What one rank resumes from."""

    common: int
    """The rank whose part holds what all ranks have in common."""
    own: int | None
    """This rank, if it has a part of its own; None if it was lost when the snapshot was taken."""
    is_exact: bool
    """Whether all ranks that took the snapshot, and no others, resume from it, each with its own state, and not only
    with the state that all ranks have in common."""
    batch: str
    """Hash of the arguments of the first training forward after the snapshot; empty if unknown."""


def taken_together(parts: Mapping[int, Part]) -> Mapping[int, Part]:
    """Return the parts of the newest generation of ranks, in the order of ranks. parts: of at least one rank."""

    def age(part: Part) -> tuple[int, int]:
        return part["attempt"], part["generation"]

    newest = max(map(age, parts.values()))
    return {rank: parts[rank] for rank in sorted(parts) if age(parts[rank]) == newest}


def is_whole(parts: Mapping[int, Part]) -> bool:
    """Return whether all ranks that were training at this step have written their parts. parts: those that are there,
    and not torn, by rank."""
    if not parts:
        return False
    together = taken_together(parts)
    return all(rank in together for rank in next(iter(together.values()))["members"])


def outdated(complete: Sequence[Snapshot]) -> Sequence[Snapshot]:
    """Return which snapshots need not be kept. complete: the complete ones in the order of steps."""
    return complete[:-KEPT]


def superseded(taken: Iterable[Ordered], last: Ordered) -> list[Ordered]:
    """Return which snapshots an attempt that resumes from `last` must not find, as it takes others after the same
    steps. taken: the complete ones and those that are not, by their steps or folders."""
    return [each for each in taken if each > last]


def source(parts: Mapping[int, Part], rank: int, world_size: int) -> Source:
    """Return what a rank resumes from. parts: those that are there, at least one, by rank. world_size: the number of
    ranks that resume."""
    together = taken_together(parts)
    common = next((each for each, part in together.items() if part["common"]), next(iter(together)))
    is_there = rank in together
    told = together[rank if is_there else common]
    all_took = list(told["members"]) == list(range(world_size)) and told["shares"] == told["world"] == world_size
    return Source(
        common,
        rank if is_there else None,
        is_there and all_took,
        told["next"] if is_there and len(told["members"]) == world_size else "",
    )
