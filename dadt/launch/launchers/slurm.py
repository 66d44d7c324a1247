"""The launcher inside a Slurm allocation: one srun step starts an agent per node, which connects back."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from dadt.config import Config
from dadt.control import mpi_library
from dadt.control.connection import Listener, SealedConnection, Words
from dadt.errors import LaunchError
from dadt.launch.agent.connect import REACH
from dadt.launch.channel import AgentRequest, Channel, Launcher
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slurm import forget_step
from dadt.launch.launchers.connect_back import Arrivals, SocketChannel

END_SECONDS = 5.0
TAIL_LINES = 20
LABELLED = re.compile(r"(?P<task>\d+): ?(?P<text>.*)")
VERDICT = re.compile(r"srun: error: \S+: tasks? (?P<tasks>[\d,-]+): (?P<verdict>.*)")


def launcher(request: AgentRequest) -> Launcher:
    return SlurmLauncher(request.config, request.hosts, request.turned_away)


class SlurmLauncher:
    """Starts all agents by one srun, whose output explains failures."""

    extends = False

    def __init__(self, config: Config, hosts: Sequence[Host], turned_away: Callable[[str], None]) -> None:
        self._turned_away = turned_away
        self._config = config
        self._python = config.python or sys.executable
        self._hosts = hosts
        self._arrivals = Arrivals(host.name for host in hosts)
        self._listener: Listener | None = None
        self._step: SlurmStep | None = None

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        key = secrets.token_bytes(32)
        self._listener = Listener(
            key, self._config.orphan_timeout, self._arrivals.greet, self._take, turned_away=self._turned_away
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith("DADT_")}
        forget_step(env)
        # SLURM_OVERLAP lets this step share the nodes with the step in which this process may run; srun before 20.11
        # ignores the variable.
        env |= {REACH: self._listener.reach(self._config.network_interface).to_text(), "SLURM_OVERLAP": "1"}
        try:
            self._step = SlurmStep(self._srun(hosts), env, self._python, self._give_up)
        except OSError as error:
            self._listener.close()
            raise LaunchError(f"srun: cannot be run ({error.strerror}); is Slurm in PATH?") from error
        return [self._arrivals.futures[host.name] for host in hosts]

    def command(self, host: Host) -> str:
        return shlex.join(self._srun(self._hosts))

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._step is not None:
            self._step.close(at_once=not all(self._arrivals.has(host.name) for host in self._hosts))

    def _srun(self, hosts: Sequence[Host]) -> list[str]:
        count = len(hosts)
        return [
            "srun",
            "--job-name=dadt",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(host.name for host in hosts)}",
            # If training may continue without a lost host (--min-np), the end of one agent must not end the other
            # agents.
            *(["--kill-on-bad-exit=0", "--no-kill"] if self._config.min_np else ["--kill-on-bad-exit=1"]),
            "--wait=0",  # an agent whose workers end early must not end the other agents
            "--export=ALL",
            "--cpu-bind=none",
            "--mem=0",
            "--mpi=none",
            "--input=none",
            "--label",
            # `python -m` first looks for modules in the current folder, where the user may have a module of the same
            # name.
            "--chdir=/",
            self._python,
            "-u",
            "-m",
            "dadt.launch.agent",
            "--connect",
        ]

    def _take(self, hello: Words, connection: SealedConnection) -> None:
        name = hello["name"]
        self._arrivals.admit(name, SocketChannel(connection, lambda seconds: self._explain(name, seconds)))

    def _explain(self, name: str, seconds: float) -> str:
        assert self._step is not None
        return self._step.why(self._index(name), seconds)

    def _give_up(self, step: SlurmStep) -> None:
        """Handle the end of srun: agents that have not connected before never will."""
        for host in self._hosts:
            if not self._arrivals.has(host.name):
                self._arrivals.refuse(host.name, LaunchError(step.why(self._index(host.name), 0.0)))

    def _index(self, name: str) -> int:
        return [host.name for host in self._hosts].index(name)


def ranks_of_mpi(
    srun: str, names: Sequence[str], shares: Sequence[int], extra: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the srun command line that starts ranks of the MPI library that mpi4py loads on this machine. Raises
    ConfigError."""
    kind = "pmix" if mpi_library.loaded().startswith("Open MPI") else "pmi2"
    return [
        srun,
        "--job-name=dadt",
        f"--nodes={len(names)}",
        f"--ntasks={sum(shares)}",
        f"--ntasks-per-node={max(shares)}",
        f"--nodelist={','.join(names)}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        "--wait=0",  # a rank that ends early must not end the other ranks
        "--export=ALL",
        "--cpu-bind=none",
        "--mem=0",
        f"--mpi={kind}",
        "--input=none",
        "--chdir=/",
        *extra,
        *command,
    ]


class SlurmStep:
    """A running srun, and the output of it and its agents."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], python: str, ended: Callable[[SlurmStep], None]
    ) -> None:
        """ended: called in another thread when srun has ended. Raises OSError if there is no srun."""
        self._python = python
        self._ended = ended
        self._said: dict[int, deque[str]] = {}
        """The last lines that each Slurm task has printed, by task number."""
        self._verdicts: dict[int, str] = {}
        """How each Slurm task ended, in the words of srun, by task number."""
        self._complaints: deque[str] = deque(maxlen=TAIL_LINES)
        self._news = threading.Condition()
        self._over = False
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._thread = threading.Thread(target=self._read, name="dadt-srun", daemon=True)
        self._thread.start()

    def why(self, task: int, seconds: float) -> str:
        """Return why the agent with this task number is gone or has not come, if the reason becomes known within
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
        # If srun ends the whole step while an agent prints, the agent's last output is lost.
        lost = verdict.startswith("Exited") and any(words for other, words in self._said.items() if other != task)
        if not said and (verdict == "Terminated" or lost):
            return "srun ended the agent, because another node's had failed, or the job was cancelled"
        if verdict:
            return f"the agent has ended (srun: {verdict})" + (f"; its last words: {said[-1]}" if said else "")
        if complaint or steps:
            return f"srun: {complaint or steps[-1]}"
        return f"srun ended with code {self._process.returncode}" if self._over else ""

    def close(self, at_once: bool) -> None:
        """Wait until srun has ended. at_once: do not wait for the agents to end by themselves. Idempotent."""
        for patience, number in ((0.0 if at_once else END_SECONDS, signal.SIGTERM), (END_SECONDS, signal.SIGKILL)):
            try:
                self._process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                self._process.send_signal(number)  # SIGTERM makes srun kill the whole step
        self._thread.join(END_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._hear(line.strip())
        self._process.wait()
        with self._news:
            self._over = True
            self._news.notify_all()
        self._ended(self)

    def _hear(self, line: str) -> None:
        with self._news:
            if (found := LABELLED.match(line)) is not None:
                said = self._said.setdefault(int(found["task"]), deque(maxlen=TAIL_LINES))
                if found["text"]:
                    said.append(found["text"])
            elif (found := VERDICT.match(line)) is not None:
                for task in _numbers(found["tasks"]):
                    self._verdicts.setdefault(task, found["verdict"])
            elif line.startswith("srun: error: "):
                self._complaints.append(line.removeprefix("srun: error: "))
            self._news.notify_all()


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers in one of srun's lists of tasks: "0,2-3" gives 0, 2, 3."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
