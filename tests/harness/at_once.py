"""A training in which several faults strike within a second, and how long the others stand still for that."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from harness.run import Result
from harness.survivors import survivors

SCRIPT = r"""
import ctypes, hashlib, os, re, signal, sys, time, torch
from torch import nn
from dadt.inject import worker

torch.set_num_threads(1)
environment = open("/proc/self/environ").read()  # a script that is seen to ask for its rank writes on every rank
rank, np = (int(re.search(name, environment)[1]) for name in ("DADT_RANK=([0-9]+)", "DADT_WORLD_SIZE=([0-9]+)"))
faults = {int(who): (what, where) for what, where, who in (f.split(":") for f in sys.argv[1].split(",") if f)}
runtime, step, within = worker.runtime, 0, ""

def spin():
    while True:
        pass

FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(600),
    "spin": spin,
    "raise": lambda: 1 / 0,
    "agent": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)),
}

def comes(where):
    if step >= 30 and faults.get(rank, ("", ""))[1] == where:
        what = faults[rank][0]
        # All strike at once, or as soon as they come to it: the others may be waiting for one by then.
        ctypes.CDLL(None).mkdir(f"here {rank}".encode(), 0o777)  # what Python writes here stays apart
        end = time.monotonic() + 0.5
        while time.monotonic() < end and not all(os.path.exists(f"here {each}") for each in faults):
            time.sleep(0.005)
        FAULTS[what]()

class Here(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        comes("backward")
        return gradient

class Saved:
    def __reduce__(self):
        comes("save")
        return str, ("saved",)

def wait(work, ordinary=runtime.ranks.wait):
    if within == "step":
        comes("exchange")
    ordinary(work)
runtime.ranks.wait = wait

def connect(ordinary=runtime.recovery.connect):
    comes("meeting")
    return ordinary()

def tell(name, data, ordinary=runtime.ranks.tell):
    if name.startswith(("position", "replicas")) and runtime.ranks.generation:
        comes("compare")
    return ordinary(name, data)
runtime.ranks.tell = tell

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(16, 8)
for step in range(41):
    if step == 30:
        runtime.recovery.connect = connect
    comes("forward")
    optimizer.zero_grad()
    y = model(Here.apply(x.requires_grad_()))
    y.pow(2).mean().backward()
    comes("step")
    within = "step"
    optimizer.step()
    within = ""
    if step == 30:
        torch.save({"model": model.state_dict(), "saved": Saved()}, "model.pt")
        comes("save")  # of those that do not write
        comes("evaluation")
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    x = torch.randn(16, 8)
step = 30
comes("end")
weights = b"".join(t.numpy().tobytes() for t in model.state_dict().values())
print("ends with", hashlib.sha256(weights).hexdigest(), flush=True)
"""
RANKS, TIMEOUT, WARNING = 6, 8.0, 3.0
SILENT = ("stop", "sleep", "spin")
PHASES = ("forward", "backward", "step", "exchange", "save", "evaluation", "end")
MARGIN = 1.9
"""A wait of `--timeout`, with the time in which connections are made, on a machine that has other work; two waits one
after the other take longer."""


@dataclass(frozen=True)
class Struck:
    """A job, and what befalls which of its ranks, where."""

    faults: Mapping[int, tuple[str, str]]
    options: tuple[str, ...]
    equal: bool = True

    @property
    def lost(self) -> set[int]:
        hosts = {rank // (RANKS // 2) for rank, (what, _) in self.faults.items() if what == "agent"}
        return {*self.faults, *(rank for rank in range(RANKS) if rank // (RANKS // 2) in hosts)}

    @property
    def told(self) -> str:
        return ",".join(f"{what}:{where}:{rank}" for rank, (what, where) in self.faults.items())


def drawn(seed: int) -> Struck:
    """Two or three faults, one of them a silence and one a death."""
    chance = random.Random(seed)
    algorithm = chance.choice(("pipe", "sync", "local"))
    executor, hosts = chance.choice((("shm", 1), ("tcp", 1), ("gloo", 1), ("tcp", 2), ("hierarchical", 2)))
    ranks = chance.sample(range(RANKS), chance.choice((2, 3)))
    deaths = ("kill", "raise", "agent") if hosts == 2 else ("kill", "raise")
    kinds = [chance.choice(SILENT), chance.choice(deaths), chance.choice((*SILENT, "kill"))]
    where = [chance.choice(PHASES), chance.choice(PHASES[:-1]), chance.choice((*PHASES, "meeting", "compare"))]
    # At the end a rank may take its time, unless it is held.
    faults = {
        rank: ("stop" if place == "end" and kind in SILENT else kind, place)
        for rank, kind, place in zip(ranks, kinds, where, strict=False)
    }
    options = ["--algorithm", algorithm, "--sync-every", "4"] if algorithm == "local" else ["--algorithm", algorithm]
    options += ["--executor", executor, *(["--simulate-hosts", "2"] if hosts == 2 else [])]
    return Struck(faults, tuple(options), equal=algorithm != "local")


def strike(launch: Callable[..., Result], job: Struck, code: int = 0) -> Result:
    """Run it, and look whether what is promised is kept. code: the exit code; not 0 where too few are left."""
    settings = ["-np", str(RANKS), "--min-np", "1", "--warmup-steps", "10", "--timeout", f"{TIMEOUT:g}"]
    waits = ["--start-timeout", "100", "--stall-warning", f"{WARNING:g}"]
    result = launch(SCRIPT, *settings, *waits, *job.options, "train.py", job.told)
    said = (job, result.err)
    assert result.code == code, said
    if code:
        return result
    ends = survivors(result)
    assert ends.keys() == set(range(RANKS)) - job.lost, said
    assert len(set(ends.values())) == 1 or not job.equal, said
    assert stood(result) < MARGIN * TIMEOUT, said
    return result


def stood(result: Result) -> float:
    """The most seconds from a loss to the next one."""
    events = [json.loads(line) for line in (result.logs / result.job / "events.jsonl").read_text().splitlines()]
    times = [event["time"] for event in events if event["kind"] == "regroup"]
    return max((after - before for before, after in pairwise(times)), default=0.0)
