"""Finds and kills the processes of a job, including those that are no longer descendants of the agent."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from dadt.control import guard
from dadt.control.proc import stat_fields, status

NATURAL_SECONDS = 0.5
"""Seconds that processes may take to end by themselves after all workers on the host have ended successfully."""
SWEEP_SECONDS = 4.0
STARTED = 19
"""Index of the start time in the list of fields of /proc/PID/stat that begins with the state."""
TRACKER = b"multiprocessing.resource_tracker"
TRACKER_SECONDS = 2.5
"""Seconds that a resource tracker of multiprocessing may take to remove the resources of dead processes, even on a busy
machine."""


class Process(NamedTuple):
    """A process of this machine. It is identified by its id and its start time, since ids are reused; neither changes
    when the process calls exec."""

    pid: int
    started: int
    """Start time of the process in clock ticks since the machine was started; 0 if there is no such process."""

    @classmethod
    def of(cls, pid: int) -> Process:
        fields = stat_fields(Path(f"/proc/{pid}"))
        return cls(pid, int(fields[STARTED]) if fields else 0)

    @property
    def is_alive(self) -> bool:
        return self.started > 0 and Process.of(self.pid) == self and is_alive(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal to this process, unless it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            if self.is_alive:  # while the pidfd is open, no other process can get this id
                signal.pidfd_send_signal(handle, number)
        except (ProcessLookupError, PermissionError):
            pass  # the process has just ended, or belongs to another user
        finally:
            os.close(handle)


def members(mark: str, descendants: bool = False) -> list[int]:
    """Return the processes of this user that have the mark, such as DADT_JOB=p7q2, in their environment.

    descendants: also include descendants of this process, which must be a subreaper. These include processes that have
    cleared their environment and whose parents have ended.
    """
    found = {int(entry.name) for entry in Path("/proc").iterdir() if _is_marked(entry, mark.encode())}
    if descendants:
        # Descendants that belong to other users, as after sudo or a setuid program, are left out, since this user
        # cannot kill them.
        found.update(pid for pid in _descendants(os.getpid()) if _is_own(Path(f"/proc/{pid}")))
    found.discard(os.getpid())
    found.difference_update([pid for pid in found if _is_marked(Path(f"/proc/{pid}"), guard.MARK.encode())])
    return sorted(pid for pid in found if is_alive(pid))


def _descendants(root: int) -> Iterator[int]:
    """Yield the ids of all descendants of a process. Processes that this user may not see are left out together with
    their own descendants."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_fields(entry)):
            children[int(fields[1])].append(int(entry.name))
    parents = [root]
    while parents:
        found = children[parents.pop()]
        parents.extend(found)
        yield from found


def kill(pids: Iterable[int], number: int) -> None:
    """Send a signal to each of the processes `pids` that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # the process is gone, or belongs to another user


def terminate(pids: Iterable[int], groups: Collection[int]) -> None:
    """Send SIGTERM to these processes, except those in the process groups `groups`, which have received it already."""
    kill((pid for pid in pids if _group(pid) not in {*groups, 0}), signal.SIGTERM)


def _group(pid: int) -> int:
    """Return the process group of a process; 0 if the process has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for this signal, so that the signal does not kill it; True also if the
    process has ended."""
    caught = status(pid, "SigCgt")
    return not caught or bool(int(caught, 16) >> (number - 1) & 1)


def without_trackers(pids: Iterable[int]) -> list[int]:
    """Return these processes without resource trackers of Python's multiprocessing. A tracker removes semaphores and
    shared memory of processes that have died, and then ends by itself."""
    return [pid for pid in pids if TRACKER not in _bytes(Path(f"/proc/{pid}/cmdline"))]


def sweep(mark: str) -> list[int]:
    """Kill all processes of this user on this machine that have the mark in their environment, repeatedly until none is
    left.

    Returns the ids of processes that cannot be killed because they hang in the kernel.
    """
    begin = time.monotonic()
    pause = 0.001
    while left := members(mark):
        now = time.monotonic()
        if now > begin + SWEEP_SECONDS:
            return left
        kill(left if now > begin + TRACKER_SECONDS else without_trackers(left), signal.SIGKILL)
        # The processes are polled, because the kernel reports the end of a process only to its parent, and this process
        # is not the parent.
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
    """Whether the process exists and is not a zombie."""
    return state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    """Return the letter by which the kernel describes the state of the process, such as S or D; empty if there is no
    such process."""
    return next(iter(stat_fields(Path(f"/proc/{pid}"))), "")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # the process has just ended, or may not be read
