"""Faults that befall jobs with --min-np, drawn by seed: `make chaos` (as root).

Each job has four workers on two simulated hosts, joined by SSH. A fault strikes it in the midst of a step; what follows
is promised before, by its kind. The same seed draws the same fault, algorithm and moment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from harness.host_run import HostRun
from harness.machine import Network, await_that, missing

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
digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in net.state_dict().values()))
print("weights", step, digest.hexdigest(), flush=True)
"""
STEPS = 240
RANKS = {0, 1, 2, 3}
OPTIONS = ("--min-np", "1", "--warmup-steps", "20", "--timeout", "6", "--stall-warning", "3", "--grace", "1")
WAITS = ("--heartbeat-timeout", "4", "--orphan-timeout", "6")
BRIEF = 3.0
"""Seconds of a fault that passes."""
SECONDS = 90.0
AT_ONCE = 4
"""Jobs that run at the same time."""


class Struck:
    """A job whose ranks have all come to the step before the fault."""

    def __init__(self, network: Network, run: HostRun, chance: random.Random) -> None:
        self.network = network
        self.run = run
        self.chance = chance
        self.healing: list[Callable[[], None]] = []
        self.dark = ""
        """The host without power, on which nobody can clear away."""

    def worker(self, rank: int) -> int:
        """Its pid, as seen from here."""
        for pid, command in self.network[rank // 2].processes().items():
            if "train.py" in command and f"DADT_RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text():
                return pid
        raise LookupError(f"rank {rank} does not run")

    def agent(self, host: int) -> int:
        return min(pid for pid, command in self.network[host].processes().items() if "dadt.launch.agent" in command)

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.worker(rank), number)

    def pause(self, seconds: float) -> None:
        """In which the fault lasts."""
        time.sleep(seconds)


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `strike` returns the ranks that are to be lost."""

    name: str
    strike: Callable[[Struck], set[int]]


def kill(job: Struck) -> set[int]:
    rank = job.chance.choice([1, 2, 3])
    job.signal(rank)
    return {rank}


def kill_first(job: Struck) -> set[int]:
    job.signal(0)
    return {0}


def kill_two(job: Struck) -> set[int]:
    ranks = job.chance.sample(sorted(RANKS), 2)
    for pid in [job.worker(rank) for rank in ranks]:
        os.kill(pid, signal.SIGKILL)
    return set(ranks)


def kill_while_recovering(job: Struck) -> set[int]:
    ranks = job.chance.sample(sorted(RANKS), 2)
    first, second = (job.worker(rank) for rank in ranks)
    os.kill(first, signal.SIGKILL)
    job.pause(job.chance.uniform(0.0, 0.1))
    os.kill(second, signal.SIGKILL)
    return set(ranks)


def kill_agent(job: Struck) -> set[int]:
    host = job.chance.randrange(2)
    os.kill(job.agent(host), signal.SIGKILL)
    return {2 * host, 2 * host + 1}


def kill_host(job: Struck) -> set[int]:
    """It is gone from the network, too, as where its power is cut."""
    host = job.chance.randrange(2)
    job.network.cut(job.network[host])
    for pid in job.network[host].processes():
        os.kill(pid, signal.SIGKILL)
    job.dark = job.network[host].name
    return {2 * host, 2 * host + 1}


def stop(job: Struck) -> set[int]:
    rank = job.chance.randrange(4)
    job.signal(rank, signal.SIGSTOP)
    return {rank}


def stop_for_a_while(job: Struck) -> set[int]:
    rank = job.chance.randrange(4)
    job.signal(rank, signal.SIGSTOP)
    job.pause(BRIEF)
    job.signal(rank, signal.SIGCONT)
    return set()


def stop_agent(job: Struck) -> set[int]:
    host = job.chance.randrange(2)
    agent = job.agent(host)
    os.kill(agent, signal.SIGSTOP)
    job.healing.append(lambda: os.kill(agent, signal.SIGCONT))
    return {2 * host, 2 * host + 1}


def cut_data(job: Struck) -> set[int]:
    job.network.divide(job.network[0], job.network[1])
    return {2, 3}


def cut_control(job: Struck) -> set[int]:
    host = job.chance.randrange(2)
    job.network.divide(job.network.launcher, job.network[host])
    return {2 * host, 2 * host + 1}


def cut_both(job: Struck) -> set[int]:
    host = job.chance.randrange(2)
    job.network.cut(job.network[host])
    return {2 * host, 2 * host + 1}


def for_a_while(cut: Callable[[Struck], set[int]]) -> Callable[[Struck], set[int]]:
    def strike(job: Struck) -> set[int]:
        cut(job)
        job.pause(BRIEF)
        for machine in job.network.all:
            job.network.heal(machine)
        return set()

    return strike


def slow_link(job: Struck) -> set[int]:
    job.network[job.chance.randrange(2)].slow("1mbit")
    return set()


KINDS = (
    Kind("kill -9 of a worker", kill),
    Kind("kill -9 of rank 0", kill_first),
    Kind("kill -9 of two workers", kill_two),
    Kind("kill -9 of a worker, and of another while the rest recovers", kill_while_recovering),
    Kind("kill -9 of an agent", kill_agent),
    Kind("a host without power", kill_host),
    Kind("SIGSTOP of a worker", stop),
    Kind(f"SIGSTOP of a worker for {BRIEF:g} s", stop_for_a_while),
    Kind("SIGSTOP of an agent", stop_agent),
    Kind("data cut", cut_data),
    Kind(f"data cut for {BRIEF:g} s", for_a_while(cut_data)),
    Kind("control cut", cut_control),
    Kind(f"control cut for {BRIEF:g} s", for_a_while(cut_control)),
    Kind("both cut", cut_both),
    Kind(f"both cut for {BRIEF:g} s", for_a_while(cut_both)),
    Kind("a link of 1 Mbit/s", slow_link),
)
TRAININGS = [
    ["--algorithm", algorithm, "--executor", executor, *more]
    for algorithm in ("pipe", "sync")
    for executor in ("gloo", "hierarchical")
    for more in ([], ["--compression", "int8"])
]


@dataclass(frozen=True)
class Row:
    """What was promised, and what came."""

    seed: int
    kind: str
    training: str
    promised: frozenset[int]
    """Ranks that train to the end."""
    survivors: frozenset[int]
    code: int
    equal: bool
    told: float | None
    """Seconds from the fault until the last loss was told."""
    went_on: float | None
    """Seconds from then until training went on."""
    left: Sequence[str]
    text: str

    @property
    def kept(self) -> bool:
        return self.promised == self.survivors and self.code == 0 and self.equal and not self.left


def drawn(seed: int) -> tuple[Kind, list[str], random.Random]:
    chance = random.Random(seed)
    return KINDS[seed % len(KINDS)], chance.choice(TRAININGS), chance


def try_out(seed: int) -> Row:
    kind, training, chance = drawn(seed)
    with tempfile.TemporaryDirectory(prefix="dadt-chaos-") as name:
        folder = Path(name)
        (folder / "network").mkdir()
        network = Network(folder / "network", 2)
        try:
            return _try_out(seed, kind, training, chance, folder, network)
        finally:
            network.close()


def _try_out(seed: int, kind: Kind, training: list[str], chance: random.Random, folder: Path, network: Network) -> Row:
    step = chance.randint(5, 120)
    options = [*OPTIONS, *WAITS, *training]
    run = HostRun(network, folder, SCRIPT, ["-np", "4", "-H", network.list(2), *options, "train.py", str(step)], {})
    try:
        await_that(lambda: all((folder / f"here{rank}").exists() for rank in RANKS), f"step {step}", SECONDS)
        job = Struck(network, run, chance)
        job.pause(chance.uniform(0.0, 0.02))  # so that it strikes anywhere in a step
        at = time.time()
        lost = kind.strike(job)
        result = run.finish()
    except subprocess.TimeoutExpired:
        return Row(seed, kind.name, " ".join(training), frozenset(), frozenset(), -1, False, None, None, [], "it hangs")
    finally:
        run.process.kill()
    for heal in job.healing:
        heal()
    for machine in network.all:
        network.heal(machine)
    found = {
        int(m[1]): (int(m[2]), m[3]) for m in re.finditer(r"\[(\d) \w+\] weights (\d+) (\w+)", result.out.decode())
    }
    events = [json.loads(line) for line in (result.logs / result.job / "events.jsonl").read_text().splitlines()]
    told = [event["time"] for event in events if event["kind"] == "regroup"]
    ons = [event["time"] for event in events if event["kind"] == "said" and "train on from step" in event["text"]]
    return Row(
        seed=seed,
        kind=kind.name,
        training=" ".join(word for word in training if not word.startswith("--")),
        promised=frozenset(RANKS - lost),
        survivors=frozenset(found),
        code=result.code,
        equal=len({digest for _, digest in found.values()}) == 1 and all(steps == STEPS for steps, _ in found.values()),
        told=max(told) - at if told else None,
        went_on=max(ons) - max(told) if told and ons else None,
        left=_left(network, job.dark),
        text=result.err,
    )


def _left(network: Network, dark: str) -> list[str]:
    """Processes and files, once they have had some seconds to go."""
    machines = [machine for machine in network.all if machine.name != dark]
    deadline = time.monotonic() + 20.0
    while (found := [left for machine in machines for left in machine.leftovers()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def page(rows: Sequence[Row]) -> str:
    kept = sum(row.kept for row in rows)
    lines = [
        "# Chaos: faults in jobs that train on",
        "",
        f"Made on {date.today()} with `make chaos` (as root), on a shared virtual machine of {os.cpu_count()} cores,",
        f"with {AT_ONCE} jobs at a time, each of four workers on two simulated hosts joined by SSH. Faults, moments",
        "and trainings are drawn by seed. Settings:",
        f"`{' '.join([*OPTIONS, *WAITS])}`.",
        "",
        "A promise is kept if exactly the ranks that the fault does not take have trained to the end, with equal",
        "weights, in as many steps as without the fault, the job has ended with 0 and nothing is left on any host that",
        "has power. Told: seconds from the fault to the line that tells the loss. Back: from then until the survivors",
        "train. Of faults that pass, no rank may be lost.",
        "",
        f"**{kept} of {len(rows)} promises were kept.**",
        "",
        "| Fault | Kept | Told, median (s) | worst | Back, median (s) | worst |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        mine = [row for row in rows if row.kind == kind.name]
        if mine:
            told, back = ([s for row in mine if (s := getattr(row, name)) is not None] for name in ("told", "went_on"))
            cells = [kind.name, f"{sum(row.kept for row in mine)} of {len(mine)}", *_spread(told), *_spread(back)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| Training | Kept |", "|---|---|"]
    for training in sorted({row.training for row in rows}):
        mine = [row for row in rows if row.training == training]
        lines.append(f"| {training} | {sum(row.kept for row in mine)} of {len(mine)} |")
    if broken := [row for row in rows if not row.kept]:
        lines += ["", "| Seed | Fault | Training | Promised | Came | Exit code | Equal | Left |", "|---|" + "---|" * 7]
        for row in broken:
            ranks = [", ".join(map(str, sorted(each))) or "none" for each in (row.promised, row.survivors)]
            cells = [str(row.seed), row.kind, row.training, *ranks, str(row.code), "yes" if row.equal else "no"]
            lines.append(f"| {' | '.join([*cells, '; '.join(row.left) or 'nothing'])} |")
    return "\n".join([*lines, ""])


def _spread(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-199", metavar="N-M")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    first, last = map(int, options.seeds.split("-"))
    rows: list[Row] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row in pool.map(try_out, range(first, last + 1)):
            rows.append(row)
            title = f"{row.seed}: {row.kind} ({row.training}): {'kept' if row.kept else 'NOT kept'}"
            came = f"{sorted(row.survivors)}, code {row.code}, told {row.told}, back {row.went_on}, left {row.left}"
            print(f"{title}: {came}", *([] if row.kept else [row.text]), sep="\n", file=sys.stderr, flush=True)
    print(page(rows))
    if options.write:
        options.write.write_text(page(rows))
    sys.exit(not all(row.kept for row in rows))


if __name__ == "__main__":
    main()
