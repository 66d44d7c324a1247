"""The paths of each rank's files in the job's log folder."""

from __future__ import annotations

from pathlib import Path


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the path of the file for the rank's stack traces. The file exists only if stack traces were written."""
    return folder / f"rank{rank}.stacks"
