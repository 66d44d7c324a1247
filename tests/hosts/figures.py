"""The launcher's figures, over simulated machines: `make figures` (as root).

Start, 64 agents, the end after a failure, and much output. Whatever a job leaves behind on a machine is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.machine import Machine, Network, missing
from harness.patience import PATIENCE, await_that

import dadt_cli.bench
from dadt_cli.bench.figure import conditions
from dadt_cli.bench.ratio import Interval, interval, ratio

DADT = [sys.executable, "-m", "dadt_cli", "run"]
FIRST_STEP = Path(dadt_cli.bench.__file__).with_name("first_step.py")
PORT = 29500
SAMPLE_SECONDS = 0.05
MEBIBYTE = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")
TRAIN = """
import os, signal, sys, time, torch
from pathlib import Path
ignore = sys.argv[1] == "ignore"
if ignore: signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank, size = sys.argv[2:]
model = torch.nn.Linear(100, 10); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step(): optimizer.zero_grad(); model(torch.randn(8, 100)).sum().backward(); optimizer.step()
for _ in range(3): step()
Path("ready" + rank).touch()
if rank == "1":
    while len(list(Path().glob("ready*"))) < int(size): time.sleep(0.01)
    Path("died.new").write_text(str(time.time())); Path("died.new").rename("died")
    os.kill(os.getpid(), signal.SIGKILL)
while True: time.sleep(600) if ignore else step()
"""
PRINT = Path(__file__).with_name("print.c")


@dataclass(frozen=True)
class Row:
    """One figure: what was measured, its median and interval, and the goal it has to meet."""

    name: str
    unit: str
    value: Interval
    goal: float | None = None

    @property
    def is_met(self) -> bool:
        return self.goal is None or self.value.median <= self.goal


class Bench:
    """Machines for one figure, and a folder for what the jobs write."""

    def __init__(self, folder: Path, count: int) -> None:
        self.network = Network(folder / "network", count)
        self.network.know()
        self.folder = folder
        self.ended = 0.0
        """When the last job has (time.time)."""

    def start(self, *arguments: object, **streams: Any) -> subprocess.Popen[bytes]:
        """`dadt run` on the machine named launcher; what it says goes to the file `said`."""
        command = [*DADT, "--ssh-config", self.network.config, *arguments]
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen(
                self.network.launcher.enter(command, self.folder),
                env={**os.environ, "HOME": str(self.network.launcher.home), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                **{"stdout": said, "stderr": said, **streams},
            )

    def said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")[-2000:]

    def run(self, *arguments: object, code: int = 0) -> float:
        """Seconds until it has ended, with this exit code, and left nothing."""
        begin = time.monotonic()
        process = self.start(*arguments)
        ended = process.wait(PATIENCE)
        seconds = time.monotonic() - begin
        self.ended = time.time()
        assert ended == code, f"exit code {ended}: {self.said()}"
        self.check_clean()
        return seconds

    def check_clean(self) -> None:
        await_that(lambda: not self.network.leftovers(), f"the end of {self.network.leftovers()}")


@contextmanager
def bench(count: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="dadt-figures-") as name:
        folder = Path(name)
        (folder / "network").mkdir()
        made = Bench(folder, count)
        try:
            yield made
        finally:
            made.network.close()


def in_turn(rounds: int, ways: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Each way once a round. The first round warms the disk's cache and is left out."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            value = way()
            say(f"  {name}: {value:.3f} s" + ("" if turn else " (not counted)"))
            if turn:
                values[name].append(value)
    return values


def start(rounds: int) -> list[Row]:
    """From the command to the first step, one worker per host."""
    return [row for count in (2, 4) for row in start_on(count, rounds)]


def start_on(count: int, rounds: int) -> list[Row]:
    with bench(count) as hosts:
        stamps = hosts.folder / "stamps"

        def by_dadt(*options: str) -> float:
            stamps.unlink(missing_ok=True)
            begin = time.time()
            hosts.run("-np", count, "-H", hosts.network.list(), "-x", "OMP_NUM_THREADS", *options, FIRST_STEP, stamps)
            return last_stamp(stamps, count) - begin

        def by_hand() -> float:
            stamps.unlink(missing_ok=True)
            begin = time.time()
            processes = [torchrun(host, rank, count, stamps) for rank, host in enumerate(hosts.network.hosts)]
            for process in processes:
                process.wait(PATIENCE)  # how it ends does not matter: Gloo's threads sometimes abort after the step
            hosts.check_clean()
            return last_stamp(stamps, count) - begin

        ways: dict[str, Callable[[], float]] = {
            "torchrun by hand": by_hand,
            "dadt run": by_dadt,
            "dadt run --ssh-backend openssh": lambda: by_dadt("--ssh-backend", "openssh"),
        }
        times = in_turn(rounds, ways)
    hand, paramiko, openssh = times.values()
    title = f"{count} hosts"
    return [
        *(Row(f"{title}: {name}", "s", interval(values)) for name, values in times.items()),
        Row(f"{title}: dadt run / torchrun", "", ratio(paramiko, hand), 1.3),
        Row(f"{title}: dadt run --ssh-backend openssh / torchrun", "", ratio(openssh, hand), 1.3),
        Row(f"{title}: paramiko / openssh", "", ratio(paramiko, openssh)),
    ]


def torchrun(host: Machine, rank: int, count: int, stamps: Path) -> subprocess.Popen[bytes]:
    nodes = ["--nnodes", count, "--node-rank", rank, "--nproc-per-node", 1, "--master-addr", "h0"]
    program = ["--master-port", PORT, FIRST_STEP, stamps, "--ddp"]
    return subprocess.Popen(
        host.enter([sys.executable, "-m", "torch.distributed.run", *nodes, *program]),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def last_stamp(stamps: Path, count: int) -> float:
    taken = [float(line) for line in stamps.read_text().split()]
    assert len(taken) == count, f"{len(taken)} of {count} took a step"
    return max(taken)


def agents(rounds: int) -> list[Row]:
    """64 agents on one machine, which has 64 names and sshd's usual limits: from the command to its end."""
    with bench(1) as hosts:
        names = [f"a{number}" for number in range(64)]
        for name in names:
            hosts.network.configure(name, HostName=hosts.network[0].address)
        trivial = ("-np", 64, "-H", ",".join(names), "--output", "errors", "--no-python", "true")
        times = in_turn(
            rounds,
            {
                "64 agents": lambda: hosts.run(*trivial),
                "64 agents, --ssh-backend openssh": lambda: hosts.run("--ssh-backend", "openssh", *trivial),
            },
        )
    return [Row(name, "s", interval(values), 20.0) for name, values in times.items()]


def end(rounds: int) -> list[Row]:
    """From a worker's death to the launcher's exit."""
    rows = []
    for count in (2, 4):
        with bench(count) as hosts:
            (hosts.folder / "train.py").write_text(TRAIN)

            def until_exit(workers: int, how: str, hosts: Bench = hosts) -> float:
                for path in (*hosts.folder.glob("ready*"), hosts.folder / "died"):
                    path.unlink(missing_ok=True)
                where = ("-np", workers, "-H", hosts.network.list(workers // len(hosts.network.hosts)))
                hosts.run(*where, "-x", "OMP_NUM_THREADS", "train.py", how, "{rank}", "{world_size}", code=137)
                return hosts.ended - float((hosts.folder / "died").read_text())

            ways = {
                f"{workers} workers on {count} hosts, {what}": lambda workers=workers, how=how: until_exit(workers, how)
                for workers in (count, 16)
                for how, what in (("train", "the others train"), ("ignore", "the others ignore SIGTERM"))
            }
            rows += [Row(name, "s", interval(values), 2.0) for name, values in in_turn(rounds, ways).items()]
    return rows


@dataclass(frozen=True)
class Flood:
    """What much output cost: cores are CPU seconds per second."""

    launcher: float
    agents: float
    workers: float
    memory: float
    seconds: float


class Gauge:
    """CPU seconds and peak memory of a process while it lives."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._status = Path(f"/proc/{pid}/status")
        self.cpu = 0.0
        self.memory = 0.0

    def read(self) -> bool:
        """False once it is gone."""
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
            peak = self._status.read_text().partition("VmHWM:")[2].split()
        except OSError:
            return False
        if not peak:
            return False  # a zombie
        self.cpu = (int(fields[11]) + int(fields[12])) / TICKS
        self.memory = int(peak[0]) * 1024 / MEBIBYTE
        return True


def output(rounds: int, lines: int = 10_000) -> list[Row]:
    """64 workers that print 1,000 lines a second each for 10 s, read from a pipe."""
    rows = []
    for count in (0, 4):
        with bench(max(count, 1)) as hosts:
            subprocess.run(["cc", "-O2", "-o", hosts.folder / "print", PRINT], check=True)
            where = ["-H", hosts.network.list(16)] if count else []
            floods = [flood(hosts, where, lines) for _ in range(rounds)]
        title = f"64 workers on {count} hosts" if count else "64 workers on this host"
        values = {name: interval([getattr(each, name) for each in floods]) for name in Flood.__annotations__}
        rows += [
            Row(f"{title}: launcher's CPU", "cores", values["launcher"], 1.0),
            Row(f"{title}: agents' CPU", "cores", values["agents"]),
            Row(f"{title}: workers' CPU", "cores", values["workers"]),
            Row(f"{title}: launcher's peak memory", "MiB", values["memory"]),
            Row(f"{title}: slowest worker took", "s", values["seconds"]),
        ]
    return rows


def flood(hosts: Bench, where: Sequence[object], lines: int) -> Flood:
    """Raises AssertionError if a line is lost, doubled, changed or out of order, on the console or in a log."""
    program = ("--no-python", "./print", "{rank}", lines)
    process = hosts.start("-np", 64, *where, "--log-dir", "logs", *program, stdout=subprocess.PIPE)
    assert process.stdout is not None
    stream, data = process.stdout, bytearray()
    launcher = Gauge(process.pid)
    data += stream.read(1)  # the workers have begun
    launcher.read()
    begin, before = time.monotonic(), launcher.cpu
    reader = threading.Thread(target=lambda: data.extend(stream.read()))
    reader.start()
    gauges = {pid: Gauge(pid) for pid in agent_pids(hosts, process.pid)}
    seconds = 0.0
    while launcher.read():
        seconds = time.monotonic() - begin
        for gauge in gauges.values():
            gauge.read()
        time.sleep(SAMPLE_SECONDS)
    reader.join()
    assert process.wait(PATIENCE) == 0, hosts.said()
    stream.close()
    hosts.check_clean()
    console = [line.partition(b"] ")[2] for line in bytes(data).splitlines()]
    took = check_lines(console, lines, "the console")
    (logs,) = (hosts.folder / "logs").iterdir()
    logged = [line for rank in range(64) for line in (logs / f"rank{rank}.log").read_bytes().splitlines()]
    check_lines(logged, lines, "the logs")
    for path in logs.iterdir():
        path.unlink()
    logs.rmdir()
    found = Flood(
        launcher=(launcher.cpu - before) / seconds,
        agents=sum(gauge.cpu for gauge in gauges.values()) / seconds,
        workers=sum(cpu for cpu, _ in took) / seconds,
        memory=launcher.memory,
        seconds=max(wall for _, wall in took),
    )
    say(f"  {found}")
    return found


def agent_pids(hosts: Bench, launcher: int) -> list[int]:
    """Of a job that runs; those on the launcher's own host are its children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    everywhere = [pid for host in hosts.network.hosts for pid in host.processes()]
    named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [*map(int, children), *everywhere]}
    return [pid for pid, command in named.items() if b"dadt.launch.agent" in command]


def check_lines(found: Sequence[bytes], lines: int, where: str) -> list[tuple[float, float]]:
    """Of each rank all lines in order. Returns CPU and wall-clock seconds of each."""
    next_line = [0] * 64
    took = []
    for line in found:
        kind, rank, *words = line.split()
        if kind == b"took":
            assert next_line[int(rank)] == lines, f"{where}: rank {int(rank)} lost lines"
            took.append((float(words[0]), float(words[1])))
        else:
            expected = b"line %d %d: what a worker prints of a step" % (int(rank), next_line[int(rank)])
            assert line == expected, f"{where}: expected {expected!r}, got {line!r}"
            next_line[int(rank)] += 1
    assert len(took) == 64, f"{where}: {len(took)} of 64 workers are complete"
    return took


FIGURES: dict[str, tuple[Callable[[int], list[Row]], int]] = {
    "start": (start, 7),
    "agents": (agents, 3),
    "end": (end, 3),
    "output": (output, 3),
}
"""Each with its usual number of rounds."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], help="which; all where none is named")
    parser.add_argument("--rounds", type=int, help="of each figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    kept: dict[str, Any] = {"conditions": conditions() | {"commit": commit()}, "figures": {}}
    missed = []
    for name in options.figures or FIGURES:
        measure, usual = FIGURES[name]
        rounds = options.rounds or usual
        say(f"{name}: {rounds} rounds")
        load = os.getloadavg()[0]
        rows = measure(rounds)
        kept["figures"][name] = {"rounds": rounds, "load": load, "rows": [asdict(row) for row in rows]}
        print("\n".join(["", *table(measure, rounds, rows)]), flush=True)
        missed += [row.name for row in rows if not row.is_met]
        if options.json:
            options.json.write_text(json.dumps(kept, indent=2) + "\n")
    sys.exit(f"missed: {', '.join(missed)}" if missed else 0)


def table(measure: Callable[[int], list[Row]], rounds: int, rows: Sequence[Row]) -> Iterator[str]:
    """Markdown."""
    yield f"{(measure.__doc__ or '').strip()} Rounds: {rounds}."
    yield ""
    yield "| | median (95 % interval) | goal |"
    yield "|---|---|---|"
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:g}: {'met' if row.is_met else 'missed'}"
        yield f"| {row.name} | {' '.join(filter(None, (str(row.value), row.unit)))} | {goal} |"


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
