"""Finding and killing the processes of a job, even those that got away from their parents."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from dadt.control import guard

SWEEP_SECONDS = 4.0
STARTED = 19
"""Place, after state and parent, of the time of a process's start in /proc/PID/stat."""
TRACKER = b"multiprocessing.resource_tracker"
TRACKER_SECONDS = 2.5
"""How long a resource tracker may take to remove the resources of dead processes, on a machine with much to do."""


class Process(NamedTuple):
    """A process of this machine. Once it has ended, its pid may become another's; `exec` changes neither field."""

    pid: int
    started: int
    """Clock ticks from the machine's start to its own; 0 if there is no such process."""

    @classmethod
    def of(cls, pid: int) -> Process:
        fields = _stat(pid)
        return cls(pid, int(fields[STARTED]) if fields else 0)

    @property
    def is_alive(self) -> bool:
        return self.started > 0 and Process.of(self.pid) == self and is_alive(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            if self.is_alive:  # what has that pid now cannot lose it to another while it is open
                signal.pidfd_send_signal(handle, number)
        except (ProcessLookupError, PermissionError):
            pass  # it has just ended, or is another user's
        finally:
            os.close(handle)


def members(mark: str, descendants: bool = False) -> list[int]:
    """Processes of this user that carry the mark, such as DADT_JOB=p7q2, in their environment.

    With `descendants` also those of this process, which is a subreaper: this finds processes that left their parent
    and cleared their environment.
    """
    found = {int(entry.name) for entry in Path("/proc").iterdir() if _is_marked(entry, mark.encode())}
    if descendants:
        # Processes of other users (by sudo or a setuid program) are left out, as they cannot be killed.
        found.update(pid for pid in _descendants(os.getpid()) if _is_own(Path(f"/proc/{pid}")))
    found.discard(os.getpid())
    found.difference_update([pid for pid in found if _is_marked(Path(f"/proc/{pid}"), guard.MARK.encode())])
    return sorted(pid for pid in found if is_alive(pid))


def kill(pids: Iterable[int], number: int) -> None:
    """Send a signal to those that still exist."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # already gone, or another user's


def terminate(pids: Iterable[int], groups: Collection[int]) -> None:
    """Send SIGTERM to those that are in none of these process groups, which have it already."""
    kill((pid for pid in pids if _group(pid) not in {*groups, 0}), signal.SIGTERM)


def _group(pid: int) -> int:
    """The process group of a process; 0 once it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal, so that it does not die of it; also once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return True
    caught = next(line for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def without_trackers(pids: Iterable[int]) -> list[int]:
    """The processes without multiprocessing's resource trackers, which remove the semaphores and segments of dead
    processes and then end by themselves."""
    return [pid for pid in pids if TRACKER not in _bytes(Path(f"/proc/{pid}/cmdline"))]


def sweep(mark: str) -> list[int]:
    """Kill all processes on this machine that carry the mark, repeatedly until none is left.

    Returns the processes that do not die (stuck in the kernel).
    """
    begin = time.monotonic()
    pause = 0.001
    while left := members(mark):
        now = time.monotonic()
        if now > begin + SWEEP_SECONDS:
            return left
        kill(left if now > begin + TRACKER_SECONDS else without_trackers(left), signal.SIGKILL)
        # The kernel reports the end of a process only to its parent, and these are not our children.
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return []


def _is_marked(entry: Path, mark: bytes) -> bool:
    return entry.name.isdigit() and _is_own(entry) and mark in _bytes(entry / "environ").split(b"\0")


def _is_own(entry: Path) -> bool:
    try:
        return entry.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def is_alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    return state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    """The kernel's letter for the state of the process, such as S or D; empty once it is gone."""
    return _state_and_parent(pid)[0]


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            pid = int(entry.name)
            children.setdefault(_state_and_parent(pid)[1], []).append(pid)
    found: set[int] = set()
    frontier = children.get(root, [])
    while frontier:
        found.update(frontier)
        frontier = [child for pid in frontier for child in children.get(pid, [])]
    return found


def _state_and_parent(pid: int) -> tuple[str, int]:
    fields = _stat(pid)
    return (fields[0], int(fields[1])) if fields else ("", 0)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if it is gone."""
    try:
        # The name, in parentheses, may itself contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has just ended, or we may not read it
