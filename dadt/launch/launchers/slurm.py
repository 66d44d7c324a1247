"""The launcher in a Slurm allocation: one srun starts an agent on each node, which connects to the launcher."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from dadt.control import mpi_library
from dadt.control.connection import SealedConnection, Words
from dadt.errors import LaunchError
from dadt.launch.agent.connect import REACH
from dadt.launch.channel import AgentRequest, Channel
from dadt.launch.child import AGENT, without_settings
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slurm import forget_step
from dadt.launch.launchers.connect_back import ConnectBackLauncher, SocketChannel, StartingProgram

TAIL_LINES = 20
LABELLED = re.compile(r"(?P<task>\d+): ?(?P<text>.*)")
VERDICT = re.compile(r"srun: error: \S+: tasks? (?P<tasks>[\d,-]+): (?P<verdict>.*)")


class SlurmLauncher(ConnectBackLauncher):
    """Starts all agents of a job by one srun, whose output explains their failures."""

    def __init__(self, request: AgentRequest) -> None:
        super().__init__(request, (host.name for host in request.hosts))
        self._python = self._config.python or sys.executable
        self._step: SlurmStep | None = None

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        env = without_settings(os.environ)
        forget_step(env)
        # SLURM_OVERLAP lets the agents share the nodes with the job step in which this process may run. srun before
        # version 20.11 ignores the variable.
        env |= {REACH: self._listen().to_text(), "SLURM_OVERLAP": "1"}
        try:
            self._step = SlurmStep(self._srun(hosts), env, self._python, self._give_up)
        except OSError as error:
            self.close()
            raise LaunchError(f"srun: cannot be run ({error.strerror}); is Slurm in PATH?") from error
        self._step.listen()
        return [self._arrivals[host.name] for host in hosts]

    def command(self, host: Host) -> str:
        return shlex.join(self._srun(self._request.hosts))

    def close(self) -> None:
        super().close()
        if self._step is not None:
            self._step.close(at_once=bool(self._missing))

    def _srun(self, hosts: Sequence[Host]) -> list[str]:
        # If training may continue without a lost host (--min-np), the end of one agent must not end the other agents.
        ends = ["--kill-on-bad-exit=0", "--no-kill"] if self._config.min_np else ["--kill-on-bad-exit=1"]
        words = [*ends, "--mpi=none", "--label", self._python, *AGENT, "--connect"]
        return _srun("srun", [host.name for host in hosts], len(hosts), 1, words)

    def _take(self, hello: Words, connection: SealedConnection) -> None:
        name = hello["name"]
        self._admit(name, SocketChannel(connection, lambda seconds: self._why(name, seconds)))

    def _why(self, name: str, seconds: float = 0.0) -> str:
        assert self._step is not None
        return self._step.why([host.name for host in self._request.hosts].index(name), seconds)

    def _give_up(self) -> None:
        """Handle the end of srun. Agents that have not connected before will not do so any more."""
        for name in self._missing:
            self._refuse(name, self._why(name))


def ranks_of_mpi(
    srun: str, names: Sequence[str], shares: Sequence[int], extra: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the srun command line that starts ranks of the MPI library that mpi4py loads on this machine. Raises
    ConfigError."""
    kind = "pmix" if mpi_library.loaded().startswith("Open MPI") else "pmi2"
    words = ["--distribution=block", "--kill-on-bad-exit=1", f"--mpi={kind}", *extra, *command]
    return _srun(srun, names, sum(shares), max(shares), words)


def _srun(srun: str, names: Sequence[str], tasks: int, each: int, words: Sequence[str]) -> list[str]:
    """Return an srun command line that starts tasks on these nodes, at most `each` per node. words: further options,
    followed by the command of the tasks."""
    size = [f"--nodes={len(names)}", f"--ntasks={tasks}", f"--ntasks-per-node={each}", f"--nodelist={','.join(names)}"]
    # --wait=0: a task that ends early must not end the others. --chdir: `python -m` first looks for modules in the
    # current folder, where the user may have a module of the same name.
    always = ["--wait=0", "--export=ALL", "--cpu-bind=none", "--mem=0", "--input=none", "--chdir=/"]
    return [srun, "--job-name=dadt", *size, *always, *words]


class SlurmStep(StartingProgram):
    """A running srun, with the output of srun itself and of the agents."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], python: str, ended: Callable[[], None]) -> None:
        super().__init__(command, env, ended)
        self._python = python
        self._said: dict[int, deque[str]] = {}
        """The last lines that each Slurm task has printed, by task number."""
        self._verdicts: dict[int, str] = {}
        """How each Slurm task ended, as srun has reported it, by task number."""
        self._complaints: deque[str] = deque(maxlen=TAIL_LINES)

    def why(self, task: int, seconds: float) -> str:
        """Return why the agent with this task number is gone or has not connected, if the reason becomes known within
        `seconds` seconds; else an empty text."""
        with self._news:
            self._news.wait_for(lambda: self._over or task in self._verdicts, seconds)
            said = [line for line in self._said.get(task, ()) if not line.startswith("slurmstepd")]
            steps = [line for line in self._said.get(task, ()) if line.startswith("slurmstepd")]
            verdict = self._verdicts.get(task, "")
            complaint = self._complaints[-1] if self._complaints else ""
        # A line about execve() says why the agent could not be started; srun's last line would only say that the step
        # was cancelled.
        if failed := [line for line in steps if "execve()" in line]:
            reason = failed[-1].rpartition(": ")[2]
            return f"{self._python} cannot be run there ({reason}) -> --python PATH"
        if said and "No module named" in said[-1]:
            return f"dadt is not installed for {self._python} there -> pip install it, or --python PATH"
        # The last output of an agent that prints while srun ends the whole step gets lost.
        lost = verdict.startswith("Exited") and any(words for other, words in self._said.items() if other != task)
        if not said and (verdict == "Terminated" or lost):
            return "srun ended the agent, because another node's had failed, or the job was cancelled"
        if verdict:
            return f"the agent has ended (srun: {verdict})" + (f"; its last words: {said[-1]}" if said else "")
        if complaint or steps:
            return f"srun: {complaint or steps[-1]}"
        return f"srun ended with code {self._process.returncode}" if self._over else ""

    def _hear(self, line: str) -> None:
        line = line.strip()
        if (found := LABELLED.match(line)) is not None:
            said = self._said.setdefault(int(found["task"]), deque(maxlen=TAIL_LINES))
            if found["text"]:
                said.append(found["text"])
        elif (found := VERDICT.match(line)) is not None:
            for task in _numbers(found["tasks"]):
                self._verdicts.setdefault(task, found["verdict"])
        elif line.startswith("srun: error: "):
            self._complaints.append(line.removeprefix("srun: error: "))


def _numbers(text: str) -> Iterator[int]:
    """Yield the task numbers that srun lists in a text such as "0,2-3", which means 0, 2 and 3."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
