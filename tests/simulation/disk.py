"""The files of snapshots on one disk: written whole, half written where a process was killed, or refused by a full
disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dadt.control import snapshot_parts, snapshots
from dadt.errors import NotResumed


class Content(NamedTuple):
    """What one rank has written of its training."""

    rank: int
    step: int
    weights: tuple[int, ...]
    generation: int
    """That in which it was taken: what is under way between ranks differs from one to the next."""
    attempt: int
    """How often the job had been restarted then."""


@dataclass(slots=True)
class PartFiles:
    """The files of one rank in a snapshot."""

    content: Content | None = None
    """None as long as it is half written, under another name."""
    told: dict[str, Any] | None = None


@dataclass(slots=True)
class Disk:
    """A disk of one host, or one that all hosts share."""

    seen: Callable[[Disk], None]
    """Called whenever a part has become complete."""
    full: bool = False
    snapshots: dict[int, dict[int, PartFiles]] = field(default_factory=dict)
    """For each step the files of each rank."""

    def files(self, step: int, rank: int) -> PartFiles:
        return self.snapshots.setdefault(step, {}).setdefault(rank, PartFiles())

    def holds(self, step: int, rank: int, files: PartFiles) -> bool:
        """Whether these files are still those of a rank: an attempt that follows removes what is too new for it."""
        return self.snapshots.get(step, {}).get(rank) is files

    def describe(self, files: PartFiles, told: dict[str, Any]) -> None:
        """Write the description of a part, by which it is complete."""
        files.told = told
        self.seen(self)

    def discard(self, step: int, rank: int) -> None:
        """Remove what is half written of a part."""
        if step in self.snapshots and self.files(step, rank).content is None:
            del self.snapshots[step][rank]

    def parts(self, step: int) -> dict[int, dict[str, Any]]:
        """What the complete parts of a snapshot say (snapshots.described)."""
        every = self.snapshots.get(step, {}).items()
        return {rank: each.told for rank, each in every if each.told is not None and each.content is not None}

    @property
    def whole(self) -> list[int]:
        """The steps of complete snapshots, in order (snapshots.whole)."""
        return [step for step in sorted(self.snapshots) if snapshot_parts.is_whole(self.parts(step))]

    def drop_old(self) -> None:
        """What snapshots.drop_old does."""
        for step in snapshot_parts.outdated(self.whole):
            del self.snapshots[step]


class DiskSnapshots:
    """The snapshots on the launcher's disk, as it looks at them (dadt/control/snapshots.py)."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def newest(self, root: Path) -> Path | None:
        whole = self._disk.whole
        return snapshots.folder_of(root, whole[-1]) if whole else None

    def set_aside(self, root: Path, last: Path | None, attempt: int) -> None:
        disk = self._disk
        if last is None:
            disk.snapshots = {}  # the folder gets another name
        else:
            for step in snapshot_parts.superseded(disk.snapshots, int(last.name)):
                del disk.snapshots[step]

    def told(self, folder: Path) -> dict[str, Any]:
        parts = self._disk.parts(int(folder.name))
        if not parts:
            raise NotResumed(f"{folder}: has no whole part: resume from another one")
        return parts[min(parts)]
