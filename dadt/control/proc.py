"""Reads facts about processes from the kernel's files in /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def stat_fields(folder: Path) -> list[str]:
    """Return the fields of the file `stat` of a process or thread, from the state onwards; empty if it has ended.
    folder: the folder of the process or thread in /proc."""
    try:
        # The process's name, which stands before the state in parentheses, may itself contain spaces and parentheses.
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def ancestors() -> Iterator[int]:
    """Yield the ids of this process's ancestors, nearest first, without process 1. Stops at an ancestor that has ended
    or that this user may not see."""
    pid = os.getppid()
    while pid > 1:
        yield pid
        fields = stat_fields(Path(f"/proc/{pid}"))
        pid = int(fields[1]) if fields else 0


def status(pid: int | str, name: str) -> str:
    """Return the first word of a line of the process's file `status`; empty if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "")
