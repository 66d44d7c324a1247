"""A Slurm of the tests' own on this machine: munged, slurmctld, and a slurmd for each of its nodes."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from harness.patience import PATIENCE, await_that

from dadt.control.machine import free_ports

PROGRAMS = {"munge": "munged", "slurmctld": "slurmctld", "slurmd": "slurmd", "slurm-client": "srun"}
"""What each Debian package brings."""
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
NODES = ("n1", "n2")
CORES = 4
UNTIL_DEATH = ["setpriv", "--pdeathsig", "KILL"]
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=1
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
MailProg=/bin/true
ReturnToService=2
KillWait=5
PartitionName=all Nodes={names} Default=YES State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} RealMemory=1000\n"


class Cluster:
    """Two nodes, n1 and n2. `env` is the environment in which Slurm's commands find it."""

    def __init__(self) -> None:
        # Not under pytest's folder: the path of a socket must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="dadt-slurm-"))
        self.env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        for name in ("munge", "state", *NODES):
            (self.folder / name).mkdir(mode=0o755)
        self.folder.chmod(0o755)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._write_config()
        munge = self.folder / "munge"
        paths = [f"--{name}={munge / name}" for name in ("socket", "pid-file", "log-file", "seed-file", "key-file")]
        paths[-1] = f"--key-file={key}"
        self._start("munged", "--foreground", "--force", "--num-threads=2", *paths)
        await_that((munge / "socket").exists, "munged")
        self._start("slurmctld", "-D", "-i")
        for name in NODES:
            self._start("slurmd", "-D", "-N", name)
        await_that(lambda: self.run("sinfo", "-h", "-o", "%t").stdout.split() == ["idle"], "the nodes")

    def _write_config(self) -> None:
        host = socket.gethostname()
        ports = free_ports(1 + len(NODES))
        text = CONFIG.format(host=host, port=ports[0], folder=self.folder, names=",".join(NODES))
        for name, port in zip(NODES, ports[1:], strict=True):
            text += NODE.format(name=name, host=host, port=port, cores=CORES)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    [*UNTIL_DEATH, *command], env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            )

    def run(
        self, *command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)),
            cwd=cwd or self.folder,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def start(self, *command: object, cwd: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            list(map(str, command)),
            cwd=cwd,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def batch(self, *arguments: object, cwd: Path, env: Mapping[str, str] | None = None) -> list[int]:
        """sbatch with these arguments; the exit codes of the job's tasks, once all have ended."""
        # sbatch --wait looks only now and then.
        submitted = self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env)
        assert submitted.returncode == 0, submitted.stderr
        self.await_idle()
        text = self.run("scontrol", "show", "job", submitted.stdout.strip()).stdout
        return [int(code) for code in re.findall(r" ExitCode=(\d+):", text)]

    def jobs(self) -> list[str]:
        """Ids of those that have not ended."""
        return self.run("squeue", "-h", "-o", "%A").stdout.split()

    def await_idle(self) -> None:
        await_that(lambda: not self.jobs(), "the end of all jobs")

    def close(self) -> None:
        if len(self._daemons) > 1:
            for job in self.jobs():
                self.run("scancel", job)
            self.await_idle()
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder)


def missing() -> str:
    """Why no Slurm can be started here; empty if it can."""
    if os.geteuid() != 0:
        return "a Slurm of the tests' own needs root"
    absent = [package for package, program in PROGRAMS.items() if shutil.which(program, path=PATH) is None]
    return f"a Slurm of the tests' own needs {', '.join(absent)} (apt-get install)" if absent else ""
