"""The traces of this user's jobs on this machine: folders, sockets, processes."""

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
    """The traces of one job. A job that was launched elsewhere has agents here, but no launcher."""

    job: str
    launcher: Path | None = None
    """The socket of its launcher, which may be dead."""
    agents: list[Path] = field(default_factory=list)
    """The socket for local rank 0 of each of its agents."""
    pids: list[int] = field(default_factory=list)
    """Processes that carry its mark: the workers and their descendants."""
    workers: dict[int, int] = field(default_factory=dict)
    """Rank to process id, for the workers on this machine."""

    def call(self) -> CallerLine | None:
        """A connection to its launcher; None if it does not listen."""
        return _call(self.launcher) if self.launcher is not None else None

    def steps(self) -> list[int]:
        """Steps done by each of this machine's ranks; -1 for none."""
        steps = []
        for agent in self.agents:
            try:
                pulse = Heartbeat(agent.with_name("pulse"))
            except (OSError, ValueError):
                continue  # not there yet, or removed
            steps += [pulse.read(rank)[0] for rank in range(pulse.local_size)]
            pulse.close()
        return steps

    @property
    def is_abandoned(self) -> bool:
        """Whether its processes run without a launcher or agent that would end them."""
        sockets = [*self.agents, *filter(None, [self.launcher])]
        return bool(self.pids) and not any(_listener(path) for path in sockets)

    @property
    def since(self) -> float:
        """Time at which the first of its folders was made, or the first process started."""
        folders = [path.parent for path in [self.launcher, *self.agents] if path is not None]
        paths = [*folders, *(Path(f"/proc/{pid}") for pid in self.pids)]
        return min(filter(None, map(_begin, paths)), default=0.0)

    def kill(self) -> list[int]:
        """End its agents and processes on this machine, gently and then by force, even without its launcher.

        Returns the processes that did not die.
        """
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
    """The traces of all jobs that run or have left something running, oldest first."""
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
    """Whether more than folders is left. A killed job may leave these, and the next job removes them."""
    sockets = [*trace.agents, *filter(None, [trace.launcher])]
    return bool(trace.pids) or any(_listener(path) for path in sockets)


def _marked() -> Iterator[tuple[int, dict[str, str]]]:
    """This user's processes that carry a job's mark, and their DADT_* variables."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "environ").read_text(errors="replace") if entry.stat().st_uid == os.getuid() else ""
        except OSError:
            continue  # it has just ended, or we may not read it
        pairs = (pair.partition("=") for pair in text.split("\0") if pair.startswith("DADT_"))
        marks = {name: value for name, _, value in pairs}
        if NAME.fullmatch(marks.get("DADT_JOB", "")) and is_alive(int(entry.name)):
            yield int(entry.name), marks


def _call(path: Path) -> CallerLine | None:
    try:
        return CallerLine(path)
    except OSError:
        return None  # nobody listens any more


def _listener(path: Path) -> int:
    """The process that listens there; 0 if none does."""
    line = _call(path)
    if line is None:
        return 0
    with line:
        return line.pid


def _begin(path: Path) -> float:
    """Time at which a folder was made or a process started; 0 if it is gone."""
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
    """Wait for the processes to end. They are polled, as the kernel reports an end only to the parent."""
    deadline = time.monotonic() + seconds
    while (any(agent.is_alive for agent in agents) or members(f"DADT_JOB={job}")) and time.monotonic() < deadline:
        time.sleep(0.02)
