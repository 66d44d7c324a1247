"""The job that a fault strikes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.cgroup import memory_limit
from harness.disk import MOUNT, fill
from harness.machine import Network
from harness.patience import await_that
from hosts.victim import Victim

SCRIPT = """
import hashlib, os, sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
rank, strike = os.environ["DADT_RANK"], int(sys.argv[1])
net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(4 * 8 * 60, 16), torch.randint(10, (4 * 8 * 60,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
step = 0
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
        step += 1
        if step == strike: open("here" + rank, "w").close()
        if step % 20 == 0: torch.save({"step": step, "model": net.state_dict()}, "saves/model.pt")
        if os.path.exists("hungry" + rank): taken = bytearray(os.urandom(1 << 20) * 1024)
digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in net.state_dict().values()))
print("weights", step, digest.hexdigest(), flush=True)
"""
SHARDED = """
import hashlib, os, subprocess, sys, time, torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
torch.manual_seed(0)
rank, strike = os.environ["DADT_RANK"], int(sys.argv[1])
dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
for layer in (net[0], net[3], net): fully_shard(layer)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(2 * 8 * 60, 16), torch.randint(10, (2 * 8 * 60,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
whole = StateDictOptions(full_state_dict=True)
step = 0
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
        step += 1
        if step == strike: subprocess.run(["touch", "here" + rank], check=True)  # what Python writes is kept apart
        if step % 20 == 0:
            state = get_model_state_dict(net, options=whole)
            if dist.get_rank() == 0: torch.save({"step": step, "model": state}, "saves/model.pt")
        if os.path.exists("hungry" + rank): taken = bytearray(os.urandom(1 << 20) * 1024)
state = {name: part.full_tensor() for name, part in net.state_dict().items()}
digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values()))
print("weights", step, digest.hexdigest(), flush=True)
"""
"""The same within islands of two, with FSDP."""
STEPS, BATCH = 240, 8
RANKS = {0, 1, 2, 3}
OPTIONS = ("--min-np", "1", "--warmup-steps", "20", "--timeout", "6", "--stall-warning", "3", "--grace", "1")
WAITS = ("--heartbeat-timeout", "4", "--orphan-timeout", "6")
SAVES = "saves"
LOGS = "disk"
"""Where the logs of a job lie that has a small disk for them."""


@dataclass(frozen=True)
class Training:
    """How a job trains."""

    name: str
    arguments: tuple[str, ...]
    hosts: int = 2
    equal: bool = True
    """Whether all ranks end with the same weights."""
    island: int = 1
    """Ranks that are lost together."""


ISLANDS = [
    Training(
        f"islands {algorithm} {executor}",
        ("--island", "2", "--algorithm", algorithm, "--executor", executor),
        hosts,
        island=2,
    )
    for algorithm in ("pipe", "sync")
    for executor, hosts in (("tcp", 2), ("shm", 1))
]
TRAININGS = [
    Training(
        " ".join([algorithm, executor, *more[1:]]),
        ("--algorithm", algorithm, "--executor", executor, *more),
        hosts,
        equal=algorithm in ("pipe", "sync"),
    )
    for algorithm in ("pipe", "sync", "local", "gossip")
    for executor, hosts in (("tcp", 2), ("hierarchical", 2), ("shm", 1))
    for more in ([], ["--compression", "int8"])
    # Where no rank waits for another, nobody is lost with a link: each trains on with those that it reaches.
    if not (more and executor == "shm") and (algorithm != "gossip" or hosts == 1)
]


class Struck(Victim):
    """A job of real processes whose ranks have all come to the step before the fault, as a fault finds it."""

    def __init__(self, network: Network, folder: Path, seed: int, chance: random.Random, stack: ExitStack) -> None:
        """stack: what a fault has changed is undone when it closes."""
        self.network = network
        self.folder = folder
        self.seed = seed
        self.chance = chance
        self.stack = stack
        self.healing: list[Callable[[], None]] = []
        self.dark = ""
        """The host without power, on which nobody can clear away."""
        self.hosts = range(len(network.hosts))
        self._workers = {rank: self._worker(rank) for rank in RANKS}
        self._agents = {host: self._agent(host) for host in self.hosts}

    def ranks(self, host: int) -> set[int]:
        return {rank for rank in RANKS if self.place(rank) == host}

    def place(self, rank: int) -> int:
        return rank * len(self.hosts) // len(RANKS)

    def _worker(self, rank: int) -> int:
        """Its pid, as seen from here."""
        for pid, command in self.network[self.place(rank)].processes().items():
            if "train.py" in command and f"DADT_RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text():
                return pid
        raise LookupError(f"rank {rank} does not run")

    def _agent(self, host: int) -> int:
        return min(pid for pid, command in self.network[host].processes().items() if "dadt.launch.agent" in command)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self._workers[rank], number)

    def signal_in_save(self, rank: int, number: int) -> None:
        """Rank 0 writes a file beside the one that is there, and renames it."""
        saves = self.folder / SAVES

        def begun() -> bool:
            return any(name.startswith(".dadt-") for name in os.listdir(saves))

        await_that(begun, "a save", meanwhile=lambda: None)  # it is there for a moment
        self.signal(rank, number)

    def signal_agent(self, host: int, number: int) -> None:
        os.kill(self._agents[host], number)
        if number == signal.SIGSTOP:
            self.healing.append(lambda: self._go_on(host))

    def _go_on(self, host: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._agents[host], signal.SIGCONT)

    def cut_power(self, host: int) -> None:
        """It is gone from the network, too."""
        machine = self.network[host]
        self.network.cut(machine)
        for pid in machine.processes():
            os.kill(pid, signal.SIGKILL)
        self.dark = machine.name

    def cut_data(self, host: int, other: int) -> None:
        self.network.divide(self.network[host], self.network[other])

    def cut_control(self, host: int) -> None:
        self.network.divide(self.network.launcher, self.network[host])

    def cut_both(self, host: int) -> None:
        self.network.cut(self.network[host])

    def heal(self) -> None:
        for machine in self.network.all:
            self.network.heal(machine)

    def slow(self, host: int) -> None:
        self.network[host].slow("1mbit")

    def pause(self, seconds: float) -> None:
        """In which the fault lasts."""
        time.sleep(seconds)

    def starve(self, rank: int) -> None:
        """Its host has not enough memory for what it takes now."""
        host = self.place(rank)
        limit = self.stack.enter_context(memory_limit(f"dadt-chaos-{os.getpid()}-{self.seed}", 256))
        limit.take([self._agents[host], *(self._workers[each] for each in self.ranks(host))])
        # Of processes that have about as much the kernel ends any.
        Path(f"/proc/{self._workers[rank]}/oom_score_adj").write_text("1000")
        (self.folder / f"hungry{rank}").touch()

    def fill_logs(self) -> None:
        fill(self.folder / LOGS)

    def fill_saves(self, host: int) -> None:
        """A disk of its own, which has no room."""
        machine = self.network[host]
        machine.run(*MOUNT, self.folder / SAVES)
        fill(machine.path(str(self.folder / SAVES)))
