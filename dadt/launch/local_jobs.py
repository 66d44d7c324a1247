"""Finds this user's jobs on this machine by their folders, sockets and processes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dadt.control.heartbeat import Heartbeat
from dadt.control.job_folder import SOCKET, line_of, remove_stale, root
from dadt.launch.ending.processes import Process, is_alive, members, sweep
from dadt.launch.query import CallerLine

NAME = re.compile(r"(?P<job>[a-z0-9]{4})(?:\.(?P<index>\d+))?")
LAUNCHER = "launcher"
GRACE_SECONDS = 5.0
END_SECONDS = 5.0


@dataclass(slots=True)
class Trace:
    """The sockets and processes of one job on this machine. A job that was started on another host has agents here, but
    no launcher."""

    job: str
    launcher: Path | None = None
    """Path of the launcher's socket, which may be left over from a launcher that has ended; None if the job was started
    on another host."""
    agents: list[Path] = field(default_factory=list)
    """Paths of the agents' sockets for local rank 0, one for each agent of the job on this machine."""
    pids: list[int] = field(default_factory=list)
    """Processes with the job's id in their environment: the workers and their descendants."""
    workers: dict[int, int] = field(default_factory=dict)
    """Process id by rank, for the job's workers on this machine."""

    def call(self) -> CallerLine | None:
        """Return a connection to the job's launcher; None if no launcher listens."""
        return _call(self.launcher) if self.launcher is not None else None

    def steps(self) -> list[int]:
        """Return the number of steps that each of the job's ranks on this machine has done; -1 for a rank without a
        step."""
        steps = []
        for agent in self.agents:
            try:
                pulse = Heartbeat(agent.with_name("pulse"))
            except (OSError, ValueError):
                continue  # the heartbeat file does not exist yet, or was removed
            steps += [pulse.read(rank)[0] for rank in range(pulse.local_size)]
            pulse.close()
        return steps

    @property
    def is_abandoned(self) -> bool:
        """Whether processes of the job run without a launcher or an agent that would end them."""
        sockets = [*self.agents, *filter(None, [self.launcher])]
        return bool(self.pids) and not any(_listener(path) for path in sockets)

    @property
    def since(self) -> float:
        """The earliest time at which one of the job's folders was created or one of its processes started; 0 if all are
        gone."""
        folders = [path.parent for path in [self.launcher, *self.agents] if path is not None]
        paths = [*folders, *(Path(f"/proc/{pid}") for pid in self.pids)]
        return min(filter(None, map(_begin, paths)), default=0.0)

    def kill(self) -> list[int]:
        """End the job's agents and processes on this machine, even if its launcher still runs: first by SIGTERM, then
        by SIGKILL. Returns the processes that could not be killed."""
        agents = [Process.of(pid) for path in self.agents if (pid := _listener(path))]
        for process in {*agents, *map(Process.of, self.pids)}:
            process.signal(signal.SIGTERM)
        _await_end(agents, self.job, GRACE_SECONDS)
        for agent in agents:
            agent.signal(signal.SIGKILL)
        _await_end(agents, self.job, END_SECONDS if any(agent.is_alive for agent in agents) else 0.0)
        stuck = sorted({*sweep(f"DADT_JOB={self.job}"), *(agent.pid for agent in agents if agent.is_alive)})
        remove_stale()
        return stuck


def traces() -> list[Trace]:
    """Return a Trace of each job that runs or has left something running on this machine, oldest first."""
    found: dict[str, Trace] = {}
    for path in sorted(root().iterdir()):
        if (name := NAME.fullmatch(path.name)) is None:
            continue
        trace = found.setdefault(name["job"], Trace(name["job"]))
        if name["index"] is None:
            trace.launcher = path / LAUNCHER
        else:
            trace.agents.append(line_of(path / SOCKET, 0))
    for pid, marks in _marked():
        trace = found.setdefault(marks["DADT_JOB"], Trace(marks["DADT_JOB"]))
        trace.pids.append(pid)
        if (rank := marks.get("DADT_RANK", "")).isdigit() and _leads_session(pid):
            trace.workers[int(rank)] = pid
    return sorted(filter(_exists, found.values()), key=lambda trace: (trace.since, trace.job))


def _exists(trace: Trace) -> bool:
    """Return whether processes of the job run or listen at its sockets. A killed job may leave only its folders behind,
    which the next job removes."""
    sockets = [*trace.agents, *filter(None, [trace.launcher])]
    return bool(trace.pids) or any(_listener(path) for path in sockets)


def _marked() -> Iterator[tuple[int, dict[str, str]]]:
    """Yield this user's processes that have a job's id in their environment, each with its DADT_* variables."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "environ").read_text(errors="replace") if entry.stat().st_uid == os.getuid() else ""
        except OSError:
            continue  # the process has just ended, or may not be read
        pairs = (pair.partition("=") for pair in text.split("\0") if pair.startswith("DADT_"))
        marks = {name: value for name, _, value in pairs}
        if NAME.fullmatch(marks.get("DADT_JOB", "")) and is_alive(int(entry.name)):
            yield int(entry.name), marks


def _call(path: Path) -> CallerLine | None:
    try:
        return CallerLine(path)
    except OSError:
        return None  # no process listens at this socket any more


def _listener(path: Path) -> int:
    """Return the id of the process that listens at this socket; 0 if there is none."""
    line = _call(path)
    if line is None:
        return 0
    with line:
        return line.pid


def _begin(path: Path) -> float:
    """Return the time at which a job's folder was created or a process started; 0 if it is gone. path: the folder, or
    the process's folder in /proc."""
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _await_end(agents: list[Process], job: str, seconds: float) -> None:
    """Wait for the job's processes to end. Their state is polled, because the kernel reports the end of a process only
    to its parent."""
    deadline = time.monotonic() + seconds
    while (any(agent.is_alive for agent in agents) or members(f"DADT_JOB={job}")) and time.monotonic() < deadline:
        time.sleep(0.02)
