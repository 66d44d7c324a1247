"""Measures the seconds to the same loss on two simulated hosts with a slow link. As root: python -m
benchmarks.convergence.slow_link

DDP over Gloo sets the target: 5 % above its final loss, since validation losses near the end differ by about as much.
Each method, DDP included, gets the shortest schedule with which it reaches the target, since many cheap steps may be
worth more than few expensive ones. Seconds count from before the ranks connect, and include the validations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.convergence.family import FAMILIES
from benchmarks.convergence.interval import interval, shown
from benchmarks.convergence.study import save
from benchmarks.page import table as markdown
from benchmarks.picture import panels

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))
from harness.machine import Network  # type: ignore[import-not-found] # noqa: E402

WARMUP = 10
"""Number of synchronous steps at the beginning, for each method. On such a link, each of them takes as long as many
others."""
LOCAL = ["--algorithm", "local", "--sync-every", "32"]
DILOCO = [*LOCAL, "--outer-lr", "0.7", "--outer-momentum"]
METHODS = {
    "pipe": [],
    "auto": ["--algorithm", "auto", "--compression", "auto"],
    "pipe + int8": ["--compression", "int8"],
    "pipe + PowerSGD": ["--compression", "powersgd:4"],
    "local": LOCAL,
    "local + 4 fragments": [*LOCAL, "--fragments", "4"],
    "DiLoCo 0.9": [*DILOCO, "0.9"],
    "DiLoCo 0.5": [*DILOCO, "0.5"],
    "DiLoCo 0.5 + int8": [*DILOCO, "0.5", "--compression", "int8"],
}
TRAIN = ["-m", "benchmarks.convergence.train"]
PORT = 29481
ABOVE = 1.05
"""The loss to reach, as a multiple of DDP's final loss."""
SECONDS = 3600.0
Outcome = dict[str, Any]
"""What rank 0 reports about a training, and the number of steps."""


class LinkedHosts:
    """Two simulated hosts, and a training of two ranks on them."""

    def __init__(self, network: Network, script: Sequence[object], folder: Path) -> None:
        self.network = network
        self.script = [*script, "--out", folder]
        self.folder = folder

    def train(self, name: str, steps: int) -> Outcome:
        if name == "DDP":
            return {**self._by_hand(["--ddp", "--steps", steps]), "steps": steps}
        flags = [*METHODS[name], "--warmup-steps", WARMUP]
        return {**self._dadt(flags, ["--steps", steps]), "steps": steps}

    def alone(self) -> Outcome:
        """Train on each host alone, at the same time and with a rank's part of the batch, to measure the computation of
        a step."""
        return self._by_hand(["--steps", 40])

    def _by_hand(self, flags: list[object]) -> Outcome:
        master = {"MASTER_ADDR": self.network[0].address, "MASTER_PORT": str(PORT), "WORLD_SIZE": "2"}
        processes = []
        for rank, host in enumerate(self.network.hosts):
            command = [sys.executable, *TRAIN, *self.script, *flags, "--rank", rank]
            env = {**master, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0", "DADT_INJECT": "none"}
            processes.append(started(host.enter(command, ROOT), env))
        return self._ended(processes)

    def _dadt(self, flags: list[object], script: list[object]) -> Outcome:
        dadt = [sys.executable, "-m", "dadt_cli", "run", "--ssh-config", self.network.config]
        where = ["-H", self.network.list(1), "--batch", "global", "--executor", "gloo", "--log-dir", self.folder]
        command = [*dadt, *where, *flags, *TRAIN, *self.script, *script, "--rank", "{rank}"]
        home = {"HOME": str(self.network.launcher.home)}
        return self._ended([started(self.network.launcher.enter(command, ROOT), home)])

    def _ended(self, processes: list[subprocess.Popen[str]]) -> Outcome:
        """Wait for the processes, and return what rank 0 has found."""
        try:
            said = [process.communicate(timeout=SECONDS)[0] for process in processes]
            if any(process.returncode for process in processes):
                raise RuntimeError("\n".join(said))
        finally:
            for process in processes:
                process.kill()
        outcome: Outcome = json.loads((self.folder / "rank0.json").read_text())
        return outcome


def started(command: Sequence[object], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def step_seconds(outcome: Outcome) -> float:
    """Return the median seconds of a step, which leaves out steps with a validation."""
    times: list[float] = outcome["times"]
    return statistics.median(b - a for a, b in pairwise(times))


def reached(outcome: Outcome, loss: float) -> float | None:
    """Return the seconds until a validation found this loss or less; None if none did."""
    return next((float(seconds) for _, seconds, seen in outcome["looks"] if seen <= loss), None)


def measure(network: Network, options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """Return the figures of each method, for one seed."""
    batch = options.batch or FAMILIES[options.family].batch
    script = ["--family", options.family, "--rate", options.rate, "--every", options.every, "--seed", seed]
    alone = step_seconds(LinkedHosts(network, [*script, "--batch", batch // 2], folder).alone())
    link = LinkedHosts(network, [*script, "--batch", batch], folder)
    ddp = link.train("DDP", options.steps)
    target = ABOVE * ddp["looks"][-1][2]
    shorter = shortest(link, "DDP", target, [steps for steps in options.lengths if steps < options.steps])
    outcomes = {"DDP": shorter or ddp}
    for name in options.methods:
        outcomes[name] = shortest(link, name, target, options.lengths) or link.train(name, options.steps)
    return {"seed": seed, **compared(alone, target, outcomes)}


def shortest(link: LinkedHosts, name: str, target: float, lengths: Sequence[int]) -> Outcome | None:
    """Return the outcome of the first of these schedules that reaches the target loss; None if none does. lengths:
    numbers of steps."""
    for steps in lengths:
        outcome = link.train(name, steps)
        if reached(outcome, target) is not None:
            return outcome
    return None


def compared(computed: float, target: float, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Compare all outcomes with DDP's. computed: seconds of a step's computation."""
    step = step_seconds(outcomes["DDP"])
    ratio = (step - computed) / computed
    print(f"a step computes {1e3 * computed:.0f} ms and DDP's exchange takes {1e3 * (step - computed):.0f} ms more:")
    print(f"ratio {ratio:.1f}; who hid all of it would be {1 + ratio:.1f} times as fast for each step")
    rows: dict[str, dict[str, Any]] = {
        name: {
            "steps": found["steps"],
            "step": step_seconds(found),
            "seconds": reached(found, target),
            "loss": found["loss"],
        }
        for name, found in outcomes.items()
    }
    base = rows["DDP"]["seconds"]
    for name, row in rows.items():
        row["faster"] = base / row["seconds"] if base and row["seconds"] else None
        times = f"{row['seconds']:.1f} s, {row['faster']:.2f} times DDP" if row["seconds"] else "not reached"
        print(
            f"{name:16} {row['steps']:4} steps of {1e3 * row['step']:4.0f} ms, to loss {target:.3f}: {times}",
            flush=True,
        )
    looks = {name: found["looks"] for name, found in outcomes.items()}
    return {"ratio": ratio, "computed": computed, "target": target, "rows": rows, "looks": looks}


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return a table of means over seeds, and each method's speed relative to DDP with an interval, if all seeds have
    reached the loss."""
    lines = []
    for name in found[0]["rows"]:
        rows = [each["rows"][name] for each in found]
        steps = ", ".join(map(str, sorted({row["steps"] for row in rows})))
        there = [row for row in rows if row["seconds"] is not None]
        seconds = f"{statistics.fmean(row['seconds'] for row in there):.1f}" if there else ""
        faster = shown(interval([row["faster"] for row in rows]), ".2f") if len(there) == len(rows) else ""
        step = f"{1e3 * statistics.fmean(row['step'] for row in rows):.0f} ms"
        lines.append([name, steps, step, seconds, faster, f"{len(there)} of {len(rows)}"])
    return markdown(["", "steps", "a step", "seconds", "as fast as DDP (95 %)", "reached"], lines)


def picture(figures: dict[str, Any], path: Path) -> None:
    """Draw validation loss against seconds, for one seed."""
    colors = ("#9dbbd6", "#1f3b57", "#2a9d8f", "#e9b44c", "#c8553d", "#7b4b94", "#5a5a5a", "#d98cb3", "#b5a642")
    with panels(path, (7.0, 3.4)) as (panel,):
        for color, (name, looks) in zip(colors, figures["looks"].items(), strict=False):
            # The curves of DDP and pipe, which sends as many bytes, cover each other.
            width = 4.0 if name == "DDP" else 1.5
            seconds, losses = [each[1] for each in looks], [each[2] for each in looks]
            panel.plot(seconds, losses, color=color, label=name, linewidth=width)
        panel.axhline(figures["target"], color="#999999", linewidth=0.8, label="the loss to reach")
        panel.set(xlabel="seconds", ylabel="validation loss", xscale="log")
        last = max(seconds for looks in figures["looks"].values() for _, seconds, _ in looks)
        panel.set_xticks([tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if tick < 1.3 * last], minor=False)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=list(FAMILIES), default="mlp")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=0, help="of both hosts together; 0: the family's")
    parser.add_argument("--steps", type=int, default=300, help="of the training by DDP that sets the loss")
    parser.add_argument("--lengths", default="200,300,450,600,900", help="of schedules, shortest first")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=20, help="steps between two looks at the loss")
    parser.add_argument("--mbit", type=int, default=25, help="speed of the link, each way")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", type=Path, help="file for the figures; the picture goes beside it")
    options = parser.parse_args()
    options.methods = options.methods.split(",")
    options.lengths = [int(steps) for steps in options.lengths.split(",")]
    if unknown := set(options.methods) - set(METHODS):
        parser.error(f"--methods {', '.join(unknown)}: unknown; choose of {', '.join(METHODS)}")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dadt-slow-link-") as name:
        network = Network(Path(name), 2)
        try:
            for host in network.hosts:
                host.slow(f"{options.mbit}mbit")
            for seed in range(options.seeds):
                found.append(measure(network, options, seed, Path(name)))
        finally:
            network.close()
    print(table(found))
    if options.json:
        save(options.json, {"seeds": found})
        picture(found[0], options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
