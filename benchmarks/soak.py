"""Trains for a long time while workers are lost, and samples what the processes hold: python -m benchmarks.soak

Four workers train a tiny model with `--min-np 2`. One of them is killed at regular intervals, and the job starts again
once fewer than two are left. Memory, threads, descriptors and shared segments of each process are sampled, and must not
grow between the first and the last third of its life, the first seconds excepted.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path

import psutil

from benchmarks.page import put, table

SCRIPT = """
import hashlib, os, sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.randn(3200, 16), torch.randint(4, (3200,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
step, steps, begun = 0, int(sys.argv[1]), False
if os.path.exists("soak.pt"):
    state = torch.load("soak.pt", weights_only=True)
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); step = state["step"]
while step < steps:
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not begun: print("trains as", os.getpid(), flush=True)
        begun = True
        step += 1
        if step == steps: break
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "soak.pt")
    print("step", step, flush=True)
digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()
print("weights", step, digest, flush=True)
"""
RANKS, LEAST = 4, 2
WARMUP = 20.0
"""Seconds at the beginning of a process's training that do not count."""
SAMPLES = 9
"""Number of samples after WARMUP that a process needs, so that its thirds have a median."""
SHARE, MEBIBYTES = 0.05, 2.0
"""Memory may grow by this share, plus this many MiB; nothing else may grow."""


@dataclass(frozen=True)
class Sample:
    """Resources that a process holds at one time."""

    pss: float
    """MiB of memory, with shared pages counted by their share."""
    uss: float
    """MiB of memory that no other process shares."""
    threads: float
    descriptors: float
    segments: float
    """Number of mappings of shared memory."""


MEASURES = [each.name for each in fields(Sample)]


@dataclass
class Life:
    """One process from its first sample to its last."""

    role: str
    began: float | None = None
    """Time of its first step; for launcher and agent, of any worker's first step. None before."""
    samples: list[tuple[float, Sample]] = field(default_factory=list)

    @property
    def counted(self) -> list[Sample]:
        since = float("inf") if self.began is None else self.began + WARMUP
        return [sample for at, sample in self.samples if at >= since]

    def thirds(self, measure: str) -> tuple[float, float]:
        """Return the medians of the first and the last third of the samples."""
        values = [getattr(sample, measure) for sample in self.counted]
        third = len(values) // 3
        return statistics.median(values[:third]), statistics.median(values[-third:])

    def grows(self, measure: str) -> bool:
        first, last = self.thirds(measure)
        if measure == "pss":  # shared pages count more for each process once another one has ended
            return False
        return last - first > (first * SHARE + MEBIBYTES if measure == "uss" else 0.0)


def sampled(process: psutil.Process) -> Sample:
    """Return what the process holds now. Raises psutil.Error if it has ended."""
    memory = process.memory_full_info()
    with process.oneshot():
        threads, descriptors = process.num_threads(), process.num_fds()
    maps = [each.path for each in process.memory_maps(grouped=False)]
    segments = sum(path.startswith(("/memfd:", "/dev/shm")) for path in maps)
    return Sample(memory.pss / 2**20, memory.uss / 2**20, threads, descriptors, segments)


def processes(launcher: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the processes of the job, each with its role: launcher, agent or worker."""
    yield "launcher", launcher
    for process in launcher.children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue  # the process has just ended
        if "dadt.launch.agent" in command and not command.startswith("sh"):
            yield "agent", process
        elif "soak.py" in command:
            yield "worker", process


@dataclass
class Soak:
    """Observations of a job."""

    lives: dict[tuple[int, float], Life] = field(default_factory=dict)
    """The life of each process, by its pid and start time, since pids are used again."""
    losses: int = 0
    restarts: int = 0
    seconds: float = 0.0
    end: str = ""
    """Why the job did not end well; empty if it did."""

    def look(self, launcher: psutil.Process, logs: str) -> None:
        """Sample all processes of the job. logs: what the workers have printed so far."""
        training = set(map(int, re.findall(r"trains as (\d+)", logs)))
        found = list(processes(launcher))
        job_trains = any(process.pid in training for _, process in found)
        for role, process in found:
            try:
                life = self.lives.setdefault((process.pid, process.create_time()), Life(role))
                if life.began is None and (process.pid in training if role == "worker" else job_trains):
                    life.began = time.monotonic()
                life.samples.append((time.monotonic(), sampled(process)))
            except psutil.Error:
                continue  # the process has just ended

    def long_enough(self, role: str) -> list[Life]:
        return [life for life in self.lives.values() if life.role == role and len(life.counted) >= SAMPLES]

    @property
    def faults(self) -> list[str]:
        """Texts about what is wrong; empty if nothing is."""
        found = [self.end] if self.end else []
        for role in ("launcher", "agent", "worker"):
            lives = self.long_enough(role)
            found += [] if lives else [f"no {role} has lived for {SAMPLES} samples after {WARMUP:g} s"]
            for measure in MEASURES:
                if growing := [life for life in lives if life.grows(measure)]:
                    first, last = max((life.thirds(measure) for life in growing), key=lambda each: each[1] - each[0])
                    found.append(f"{measure} of {len(growing)} of {len(lives)} {role}s: {first:.1f} -> {last:.1f}")
        return found


def soak(steps: int, every: float, options: Sequence[str], interval: float = 2.0) -> Soak:
    """Run the job and observe it. every: seconds between two losses. interval: seconds between two samples."""
    found, begin = Soak(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dadt-soak-") as name:
        folder = Path(name)
        (folder / "soak.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "dadt_cli", "run", "-np", str(RANKS), "--min-np", str(LEAST)]
        command += ["--output", "rank0", "--max-restarts", "100000", *options, "soak.py", str(steps)]
        with (folder / "said").open("w+") as said:
            job = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
            try:
                _watch(found, job, folder, every, interval)
            finally:
                job.terminate()
                job.wait(60)
            said.seek(0)
            text = said.read()
        found.losses = len(re.findall(r"training goes on without it", text))
        found.restarts = len(re.findall(r": restart \d+ of", text))
        logs = _logs(folder)
    found.seconds = time.monotonic() - begin
    digests = re.findall(rf"weights {steps} (\w+)", logs)
    if job.returncode or len(set(digests)) != 1:
        found.end = f"the job ended with {job.returncode}, weights {digests}: {text[-2000:]}"
    return found


def _watch(found: Soak, job: subprocess.Popen[bytes], folder: Path, every: float, interval: float) -> None:
    launcher, lost, chance = psutil.Process(job.pid), time.monotonic(), random.Random(0)
    while job.poll() is None:
        found.look(launcher, _logs(folder))
        workers = [process for role, process in processes(launcher) if role == "worker"]
        if time.monotonic() > lost + every and len(workers) >= LEAST:
            os.kill(chance.choice(workers).pid, signal.SIGKILL)
            lost = time.monotonic()
        try:
            job.wait(interval)
        except subprocess.TimeoutExpired:
            continue


def _logs(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("dadt-logs/*/rank*.log"))


def page(found: Soak, steps: int, every: float, options: Sequence[str]) -> str:
    given = " ".join(["--min-np", str(LEAST), *options])
    lines = [
        f"Made on {date.today()} with `make soak`, on a shared virtual machine of {os.cpu_count()} cores:",
        f"{steps:,} steps of a tiny model by {RANKS} workers on one host, `{given}`, in {found.seconds:,.0f} s.",
        f"Every {every:g} s a worker was killed: training went on {found.losses} times, and the job started again",
        f"{found.restarts} times, once fewer than {LEAST} were left.",
        "",
        "For each process: the median of the first and the last third of its samples, from",
        f"{WARMUP:g} s after the first step on. What a process has for itself (uss) may grow by {SHARE:.0%} and",
        f"{MEBIBYTES:g} MiB; pss, in which shared pages count by their share, grows where other processes end; nothing",
        "else may grow. The table has the medians over processes, and the most by which one has grown.",
        "",
    ]
    rows = []
    for role in ("launcher", "agent", "worker"):
        lives = found.long_enough(role)
        for measure in MEASURES if lives else ():
            firsts, lasts = zip(*(life.thirds(measure) for life in lives), strict=True)
            most = max(last - first for first, last in zip(firsts, lasts, strict=True))
            unit = " (MiB)" if measure in ("pss", "uss") else ""
            figures = [f"{value:.1f}" for value in (statistics.median(firsts), statistics.median(lasts), most)]
            rows.append([role, len(lives), measure + unit, *figures])
    lines.append(table(["Process", "lives", "Figure", "first third", "last third", "most growth"], rows))
    if faults := found.faults:
        lines += ["**Not as it should be:**", "", *(f"- {fault}" for fault in faults)]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description="A long training that keeps losing workers.")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=float, default=120.0, metavar="SECONDS", help="between two losses")
    parser.add_argument("--options", default="", help="further ones of dadt run, such as '--executor gloo'")
    parser.add_argument("--write", type=Path, metavar="FILE", help="page whose section `soak` gets the table")
    asked = parser.parse_args()
    found = soak(asked.steps, asked.every, asked.options.split())
    text = page(found, asked.steps, asked.every, asked.options.split())
    print(text)
    if asked.write:
        put(asked.write, "soak", text)
    sys.exit("; ".join(found.faults) or 0)


if __name__ == "__main__":
    main()
