"""A real Ray cluster over simulated machines: a head without CPUs, and nodes beside it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from harness import ROOT
from harness.machine import Machine, Network
from harness.patience import PATIENCE, await_that
from harness.run import Run

BIN = ROOT / ".venv-ray" / "bin"
PORT = 6379
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    "PATH": f"{BIN}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}  # fmt: skip


class Cluster:
    """Ray's head on h0, where jobs are launched, and nodes on h1, h2, ..."""

    def __init__(self, folder: Path, *resources: str, head: Sequence[str] = ()) -> None:
        """resources: flags of `ray start` for each node. head: more for the head."""
        self.network = Network(folder, 1 + len(resources))
        self.head = self.network[0]
        self.address = f"{self.head.address}:{PORT}"
        self.nodes: dict[Machine, subprocess.Popen[bytes]] = {}
        self._flags: dict[Machine, tuple[str, ...]] = {}
        try:
            dashboard = f"--dashboard-host={self.head.address}"
            self.begin(self.head, "--head", f"--port={PORT}", "--num-cpus=0", dashboard, *head)
            await_that(lambda: self.asks("ray.cluster_resources()") != "", "Ray's head")
            for machine, flags in zip(self.network.hosts[1:], resources, strict=True):
                self.begin(machine, f"--address={self.address}", *flags.split())
            await_that(lambda: self.alive == 1 + len(resources), "Ray's nodes")
        except BaseException:
            self.close()
            raise

    def begin(self, machine: Machine, *flags: str) -> None:
        """Start a node of Ray's, with a /tmp/ray of its own."""
        self._flags[machine] = flags
        machine.run("mkdir", "-p", "/tmp/ray")
        machine.run("mount", "-t", "tmpfs", "none", "/tmp/ray")
        command = [BIN / "ray", "start", "--block", f"--node-ip-address={machine.address}", *flags]
        with (machine.folder / "ray.log").open("ab") as log:
            self.nodes[machine] = subprocess.Popen(
                machine.enter([*command, "--object-store-memory=100000000"]),
                env={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0,1"}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def again(self, machine: Machine) -> None:
        """Begin a node anew that has ended."""
        await_that(lambda: self.nodes[machine].poll() is not None, "Ray's end on the node")
        await_that(lambda: not machine.processes(), f"the end of {machine.processes()}")
        machine.run("umount", "--lazy", "/tmp/ray")
        self.begin(machine, *self._flags[machine])
        await_that(lambda: self.alive == len(self.nodes), "Ray's nodes")

    def asks(self, expression: str) -> str:
        """Python's str of an expression about Ray, on the head; empty if Ray is not there."""
        quiet = "log_to_driver=False, logging_level='ERROR'"
        script = f"import ray; ray.init('{self.address}', {quiet}); print({expression})"
        done = subprocess.run(
            self.head.enter([BIN / "python", "-c", script]),
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else ""

    @property
    def alive(self) -> int:
        return int(self.asks("sum(node['Alive'] for node in ray.nodes())") or 0)

    def left(self) -> str:
        """Placement groups that are not removed, and what their jobs hold."""
        groups = "[g['name'] for g in ray.util.placement_group_table().values() if g['state'] != 'REMOVED']"
        return self.asks(f"({groups}, ray.cluster_resources()['CPU'] - ray.available_resources().get('CPU', 0))")

    def run(self, folder: Path, *arguments: object, **env: str) -> RayRun:
        return RayRun(self, folder, [BIN / "dadt", "run", "--launcher", "ray", *arguments], env)

    def processes(self, words: str) -> list[int]:
        """Of the nodes', those whose command lines have these words."""
        return [pid for machine in self.network.hosts for pid in self.of(machine, words)]

    def of(self, machine: Machine, words: str) -> list[int]:
        return [pid for pid, command in machine.processes().items() if words in command]

    def workers(self) -> list[int]:
        return [pid for machine in self.network.hosts[1:] for pid in self.of(machine, "train.py")]

    def close(self) -> None:
        for process in self.nodes.values():
            process.terminate()
        self.network.close()
        for process in self.nodes.values():
            process.wait()


class RayRun(Run):
    """A command on the head's machine."""

    def __init__(self, cluster: Cluster, folder: Path, command: Sequence[object], env: dict[str, str]) -> None:
        self.folder = folder
        self.head = cluster.head
        self.process = subprocess.Popen(
            cluster.head.enter(command, folder),
            env={**ENVIRONMENT, "RAY_ADDRESS": cluster.address, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def signal(self, number: int) -> None:
        """`process` is nsenter, and the command its child."""
        (pid,) = [pid for pid, command in self.head.processes().items() if "/dadt run " in command]
        os.kill(pid, number)
