"""The job that a fault strikes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness.cgroup import memory_limit
from harness.machine import Machine, Network

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
STEPS, BATCH = 240, 8
RANKS = {0, 1, 2, 3}
OPTIONS = ("--min-np", "1", "--warmup-steps", "20", "--timeout", "6", "--stall-warning", "3", "--grace", "1")
WAITS = ("--heartbeat-timeout", "4", "--orphan-timeout", "6")
SAVES = "saves"


@dataclass(frozen=True)
class Training:
    """How a job trains."""

    name: str
    arguments: tuple[str, ...]
    hosts: int = 2
    equal: bool = True
    """Whether all ranks end with the same weights."""


TRAININGS = [
    Training(
        " ".join([algorithm, executor, *more[1:]]),
        ("--algorithm", algorithm, "--executor", executor, *more),
        hosts,
        equal=algorithm in ("pipe", "sync"),
    )
    for algorithm in ("pipe", "sync", "local", "gossip")
    for executor, hosts in (("gloo", 2), ("hierarchical", 2), ("shm", 1))
    for more in ([], ["--compression", "int8"])
    # Where no rank waits for another, nobody is lost with a link: each trains on with those that it reaches.
    if not (more and executor == "shm") and (algorithm != "gossip" or hosts == 1)
]


class Struck:
    """A job whose ranks have all come to the step before the fault."""

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

    def host(self) -> Machine:
        """One of them, drawn."""
        return self.chance.choice(self.network.hosts)

    def ranks(self, host: Machine) -> set[int]:
        return {rank for rank in RANKS if self.place(rank) is host}

    def place(self, rank: int) -> Machine:
        return self.network[rank * len(self.network.hosts) // len(RANKS)]

    def worker(self, rank: int) -> int:
        """Its pid, as seen from here."""
        for pid, command in self.place(rank).processes().items():
            if "train.py" in command and f"DADT_RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text():
                return pid
        raise LookupError(f"rank {rank} does not run")

    def agent(self, host: Machine) -> int:
        return min(pid for pid, command in host.processes().items() if "dadt.launch.agent" in command)

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.worker(rank), number)

    def pause(self, seconds: float) -> None:
        """In which the fault lasts."""
        time.sleep(seconds)

    def starve(self, rank: int) -> None:
        """Its host has not enough memory for what it takes now."""
        host = self.place(rank)
        limit = self.stack.enter_context(memory_limit(f"dadt-chaos-{os.getpid()}-{self.seed}", 256))
        limit.take([self.agent(host), *map(self.worker, self.ranks(host))])
        # Of processes that have about as much the kernel ends any.
        Path(f"/proc/{self.worker(rank)}/oom_score_adj").write_text("1000")
        (self.folder / f"hungry{rank}").touch()
