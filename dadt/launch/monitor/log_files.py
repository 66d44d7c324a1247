"""Paths of each rank's files in the folder of a job's logs."""

from __future__ import annotations

from pathlib import Path


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the path of the file for the rank's stacks, which exists only if stacks were written."""
    return folder / f"rank{rank}.stacks"
