"""The systems that are compared: how each starts four workers on two hosts."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import ROOT
from harness.machine import Machine, Network
from harness.run import DADT

SCRIPTS = Path(__file__).with_name("scripts")
TORCHFT = ROOT / ".venv-torchft/bin"
PORT = 29400
RESTARTS = ["--max-restarts", "20", "--monitor-interval", "0.1", "--shutdown-timeout", "1"]
STORE = f"""
import time, torch.distributed as dist
store = dist.TCPStore("0.0.0.0", {PORT}, is_master=True, wait_for_workers=False)
time.sleep(3600)
"""
"""Where agents of torchrun meet: not on one of the hosts that may be lost."""


@dataclass
class Processes:
    """What was started. `parts` end by themselves, `servers` do not."""

    folder: Path
    variables: Mapping[str, str]
    parts: list[subprocess.Popen[bytes]] = field(default_factory=list)
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, machine: Machine, command: Sequence[object], server: bool = False, **more: str) -> None:
        with (self.folder / f"{machine.name}.out").open("ab") as out:
            process = subprocess.Popen(
                machine.enter(command, self.folder),
                env={**os.environ, "HOME": str(machine.home), **self.variables, **more},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        (self.servers if server else self.parts).append(process)

    def close(self) -> None:
        for process in [*self.parts, *self.servers]:
            process.kill()
            process.wait()


def dadt(network: Network, processes: Processes) -> None:
    options = ["--min-np", "1", "--timeout", "6", "--stall-warning", "3", "--heartbeat-timeout", "4"]
    options += ["--orphan-timeout", "6", "--ssh-config", str(network.config), "--warmup-steps", "20"]
    # New workers take the place of lost ones, which needs snapshots in a folder that all hosts see.
    options += ["--snapshot-every", "25steps", "--snapshot-dir", str(processes.folder / "snapshots")]
    options += ["-x", "TRACE_SOCKET", "-x", "OMP_NUM_THREADS"]
    command = [*DADT, "run", "-np", "4", "-H", network.list(2), *options, SCRIPTS / "plain.py"]
    processes.start(network.launcher, command, PYTHONWARNINGS="default")


def torchrun(network: Network, processes: Processes) -> None:
    processes.start(network.launcher, [sys.executable, "-c", STORE], server=True)
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{network.launcher.address}:{PORT}", "--rdzv-id", "job"]
    meet += ["--rdzv-conf", "is_host=false,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"]
    for host in network.hosts:
        places = ["--nnodes", "1:2", "--nproc-per-node", "2", "--local-addr", host.address]
        command = [Path(sys.executable).with_name("torchrun"), *places, *meet, *RESTARTS, SCRIPTS / "ddp.py"]
        # Else workers meet under the number of the restart, of which the two agents may have different ones.
        processes.start(host, command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def torchft(network: Network, processes: Processes) -> None:
    light = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "1000"]
    light += ["--heartbeat_timeout_ms", "4000", "--bind", f"[::]:{PORT}"]
    processes.start(network.launcher, [TORCHFT / "torchft_lighthouse", *light], server=True)
    for rank in range(4):
        host = network[rank // 2]
        meet = ["--nnodes", "1", "--nproc-per-node", "1", "--master-addr", host.name]
        meet += ["--master-port", str(29500 + rank)]
        lighthouse = f"http://{network.launcher.address}:{PORT}"
        command = [TORCHFT / "python", "-m", "torch.distributed.run", *meet, *RESTARTS, SCRIPTS / "ft.py"]
        processes.start(host, command, REPLICA_GROUP_ID=str(rank), TORCHFT_LIGHTHOUSE=lighthouse)


@dataclass(frozen=True)
class System:
    """One of them."""

    name: str
    script: str
    start: Callable[[Network, Processes], None]
    agent: str
    """What stands in the command lines of the processes that own workers."""

    @property
    def changed(self) -> tuple[int, int]:
        """Lines that were added to the plain script, and removed from it."""
        plain, mine = ((SCRIPTS / name).read_text().splitlines() for name in ("plain.py", self.script))
        lines = [line[:2] for line in difflib.ndiff(plain, mine)]
        return lines.count("+ "), lines.count("- ")


SYSTEMS = (
    System("DADT", "plain.py", dadt, "dadt.launch.agent"),
    System("torchrun", "ddp.py", torchrun, "torchrun"),
    System("torchft", "ft.py", torchft, "torch.distributed.run"),
)
