"""Two simulated hosts on a slow link: seconds to the same loss. As root: python -m benchmarks.convergence.slow_link

DDP over Gloo sets the loss: what it reaches at its end. The others may take half as many steps again; their seconds
count from the first step, looks at the loss included, as DDP's do.
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
from benchmarks.convergence.study import conditions

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "hosts"))
from machine import Network  # type: ignore[import-not-found] # noqa: E402

LOCAL = ["--algorithm", "local", "--sync-every", "32", "--warmup-steps", "10"]
"""Few synchronous steps: on such a link each takes as long as ten others."""
DILOCO = [*LOCAL, "--outer-lr", "0.7", "--outer-momentum", "0.9"]
METHODS = {
    "pipe": [],
    "pipe + int8": ["--compression", "int8"],
    "pipe + PowerSGD": ["--compression", "powersgd:4"],
    "local": LOCAL,
    "DiLoCo": DILOCO,
    "DiLoCo + int8": [*DILOCO, "--compression", "int8"],
}
TRAIN = ["-m", "benchmarks.convergence.train"]
PORT = 29481
MORE = 1.5
SECONDS = 3600.0
Outcome = dict[str, Any]


class Link:
    """Two hosts, and a training of two ranks on them."""

    def __init__(self, network: Network, script: Sequence[object], folder: Path) -> None:
        self.network = network
        self.script = [*script, "--out", folder]
        self.folder = folder

    def ddp(self) -> Outcome:
        return self._by_hand(["--ddp"])

    def alone(self) -> Outcome:
        """Each host on its own at the same time, with a rank's part of the batch: what a step computes."""
        return self._by_hand([])

    def _by_hand(self, flags: list[str]) -> Outcome:
        master = {"MASTER_ADDR": self.network[0].address, "MASTER_PORT": str(PORT), "WORLD_SIZE": "2"}
        processes = []
        for rank, host in enumerate(self.network.hosts):
            command = [sys.executable, *TRAIN, *self.script, *flags, "--rank", rank]
            env = {**master, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0", "DADT_INJECT": "none"}
            processes.append(started(host.enter(command, ROOT), env))
        return self._ended(processes)

    def dadt(self, flags: list[str], steps: int) -> Outcome:
        dadt = [sys.executable, "-m", "dadt_cli", "run", "--ssh-config", self.network.config]
        where = ["-H", self.network.list(1), "--batch", "global", "--executor", "gloo", "--log-dir", self.folder]
        command = [*dadt, *where, *flags, *TRAIN, *self.script, "--rank", "{rank}", "--steps", steps]
        home = {"HOME": str(self.network.launcher.home)}
        return self._ended([started(self.network.launcher.enter(command, ROOT), home)])

    def _ended(self, processes: list[subprocess.Popen[str]]) -> Outcome:
        """What rank 0 has found."""
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
    """Median, so without the steps at which the script looks at its loss."""
    times: list[float] = outcome["times"]
    return statistics.median(b - a for a, b in pairwise(times))


def reached(outcome: Outcome, loss: float) -> float | None:
    """Seconds until a look found this loss or less."""
    return next((float(seconds) for _, seconds, seen in outcome["looks"] if seen <= loss), None)


def measure(network: Network, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    batch = options.batch or FAMILIES[options.family].batch
    script = ["--family", options.family, "--rate", options.rate, "--steps", options.steps, "--every", options.every]
    for host in network.hosts:
        host.slow(f"{options.mbit}mbit")
    computed = step_seconds(Link(network, [*script, "--batch", batch // 2, "--steps", 40], folder).alone())
    link = Link(network, [*script, "--batch", batch], folder)
    outcomes = {"DDP": link.ddp()}
    step = step_seconds(outcomes["DDP"])
    ratio = (step - computed) / computed
    print(f"a step computes {1e3 * computed:.0f} ms and DDP's exchange takes {1e3 * (step - computed):.0f} ms more:")
    print(f"ratio {ratio:.1f}; who hid all of it would be {1 + ratio:.1f} times as fast for each step", flush=True)
    target = outcomes["DDP"]["looks"][-1][2]
    for name in options.methods:
        outcomes[name] = link.dadt(METHODS[name], int(MORE * options.steps))
    rows = {
        name: {"step": step_seconds(found), "seconds": reached(found, target), "loss": found["loss"]}
        for name, found in outcomes.items()
    }
    base = rows["DDP"]["seconds"]
    for name, row in rows.items():
        times = f"{base / row['seconds']:.2f} times DDP" if row["seconds"] else "not reached"
        print(f"{name:14} {1e3 * row['step']:7.0f} ms a step, to loss {target:.3f}: {row['seconds']} s, {times}")
    looks = {name: found["looks"] for name, found in outcomes.items()}
    return {"ratio": ratio, "computed": computed, "target": target, "rows": rows, "looks": looks}


def picture(figures: dict[str, Any], path: Path) -> None:
    """Loss on other data against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(5.6, 3.4))
    for color, (name, looks) in zip(
        ("#1f3b57", "#8fa3b5", "#2a9d8f", "#e9b44c", "#c8553d", "#7b4b94", "#5a5a5a"),
        figures["looks"].items(),
        strict=False,
    ):
        panel.plot([seconds for _, seconds, _ in looks], [loss for *_, loss in looks], color=color, label=name)
    panel.axhline(figures["target"], color="#999999", linewidth=0.8)
    panel.set(xlabel="seconds", ylabel="validation loss")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=list(FAMILIES), default="gpt")
    parser.add_argument("--rate", type=float, default=2.5e-3)
    parser.add_argument("--batch", type=int, default=8, help="of both hosts together; 0: the family's")
    parser.add_argument("--steps", type=int, default=400, help="of DDP")
    parser.add_argument("--every", type=int, default=20, help="steps between two looks at the loss")
    parser.add_argument("--mbit", type=int, default=25, help="speed of the link, each way")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", type=Path, help="file for the figures; the picture goes beside it")
    options = parser.parse_args()
    options.methods = options.methods.split(",")
    if unknown := set(options.methods) - set(METHODS):
        parser.error(f"--methods {', '.join(unknown)}: unknown; choose of {', '.join(METHODS)}")
    with tempfile.TemporaryDirectory(prefix="dadt-slow-link-") as name:
        network = Network(Path(name), 2)
        try:
            figures = measure(network, options, Path(name))
        finally:
            network.close()
    if options.json:
        command = " ".join(["python -m benchmarks.convergence.slow_link", *sys.argv[1:]])
        options.json.write_text(json.dumps({"conditions": conditions(command), **figures}, indent=1) + "\n")
        picture(figures, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
