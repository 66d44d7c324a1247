"""Where the files of each rank lie in the folder of a job's logs."""

from __future__ import annotations

from pathlib import Path


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def stacks_path(folder: Path, rank: int) -> Path:
    """The file for the rank's stacks, if they are written."""
    return folder / f"rank{rank}.stacks"
