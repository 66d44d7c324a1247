"""As root: PYTHONPATH=tests:. python -m hosts.full_link --seconds 3600 --json docs/results/full-link.json

Two hosts and a launcher behind links that a job keeps full both ways: what control frames and heartbeats wait there,
and whether dadt warns of a silent host. Beside the job, packets as those of heartbeats and of control connections go
to and fro between the hosts and from the launcher, each with and without their priority.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from harness.machine import Machine, Network
from harness.patience import PATIENCE

from benchmarks.page import publish, table
from dadt.control.priority import set_urgent
from dadt_cli.bench.figure import conditions

SCRIPT = """
import sys, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(1000, 1250, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad(); model(torch.randn(1, 1000)).mean().backward(); optimizer.step()
"""
STEP_BYTES = 4 * 1000 * 1250
EVERY = 0.25
FRAME = bytes(100)
ROUTER = "600ms"
"""How long packets wait at most in the queue of a link."""


class Echo:
    """Frames that go to and fro between two machines for as long as it is open."""

    def __init__(self, here: Machine, there: Machine, kind: socket.SocketKind, urgent: bool) -> None:
        self.seconds: list[float] = []
        self._ended = threading.Event()
        address = there.address
        with there.entered():
            server = socket.socket(socket.AF_INET, kind)
            server.bind((address, 0))
        with here.entered():
            self._client = socket.socket(socket.AF_INET, kind)
        if kind == socket.SOCK_STREAM:
            server.listen()
        self._client.connect(server.getsockname())
        other = server
        if kind == socket.SOCK_STREAM:
            other = server.accept()[0]
            server.close()
        for each in (self._client, other):
            set_urgent(each, urgent)
            if kind == socket.SOCK_STREAM:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client.settimeout(PATIENCE)
        self._threads = [threading.Thread(target=_answer, args=(other, kind)), threading.Thread(target=self._ask)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        number = 0
        while not self._ended.wait(EVERY):
            number += 1
            begun = time.monotonic()
            self._client.send(number.to_bytes(8, "big") + FRAME)
            try:
                while int.from_bytes(self._client.recv(len(FRAME) + 8, socket.MSG_WAITALL)[:8], "big") < number:
                    pass  # an answer to an earlier one, which came late
            except TimeoutError:
                pass
            self.seconds.append(time.monotonic() - begun)

    def close(self) -> None:
        self._ended.set()
        self._threads[1].join()
        self._client.send(bytes(8) + FRAME)
        self._threads[0].join()
        self._client.close()


def _answer(server: socket.socket, kind: socket.SocketKind) -> None:
    with server:
        while True:
            data, address = server.recvfrom(len(FRAME) + 8, socket.MSG_WAITALL)
            if not any(data):
                return
            if kind == socket.SOCK_STREAM:
                server.sendall(data)
            else:
                server.sendto(data, address)


def slow(network: Network, mbit: float) -> None:
    """Give every link this speed both ways, and each host the queue that Linux gives it."""
    shape = f"handle 1: tbf rate {mbit:g}mbit burst 20k latency {ROUTER}"
    for machine in network.all:
        route = f"10.7.0.0/24 dev eth0 proto kernel scope link src {machine.address} congctl cubic"
        machine.run("ip", "route", "replace", *route.split())
        machine.run(*f"tc qdisc replace dev eth0 root {shape}".split())
        machine.run(*["tc", "qdisc", "replace", "dev", "eth0", "parent", "1:1", "pfifo_fast"])
    network.slow(shape)


def measure(mbit: float, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="dadt-full-link-") as folder:
        network = Network(Path(folder), 2)
        try:
            slow(network, mbit)
            return _measured(network, Path(folder), max(5, round(seconds * 0.93e6 * mbit / 8 / STEP_BYTES)))
        finally:
            network.close()


def _measured(network: Network, folder: Path, steps: int) -> dict[str, Any]:
    (folder / "train.py").write_text(SCRIPT)
    first, second = network.hosts
    echoes = {
        f"{name}{' without priority' * (not urgent)}": Echo(here, there, kind, urgent)
        for urgent in (True, False)
        for name, here, there, kind in (
            ("heartbeats between hosts", first, second, socket.SOCK_DGRAM),
            ("control frames between hosts", first, second, socket.SOCK_STREAM),
            ("control frames from the launcher", network.launcher, first, socket.SOCK_STREAM),
        )
    }
    dadt = str(Path(sys.executable).with_name("dadt"))
    command = [dadt, "run", "-v", "-np", 2, "-H", network.list(1), "--ssh-config", network.config, "--warmup-steps", 2]
    begun = time.monotonic()
    done = subprocess.run(
        network.launcher.enter([*command, "train.py", steps], cwd=folder), capture_output=True, text=True
    )
    took = time.monotonic() - begun
    for echo in echoes.values():
        echo.close()
    assert done.returncode == 0, done.stderr
    waits = {name: sorted(echo.seconds) for name, echo in echoes.items()}
    return {
        "conditions": conditions(),
        "seconds": took,
        "Mbit/s each way": 8e-6 * STEP_BYTES * steps / took,
        "warnings": [line for line in done.stderr.splitlines() if "warning" in line],
        "waits": {
            name: {
                "frames": len(found),
                "median": found[len(found) // 2],
                "99 %": found[-len(found) // 100],
                "worst": found[-1],
            }
            for name, found in waits.items()
        },
    }


def page(study: dict[str, Any]) -> str:
    rows = [
        [name, f"{found['frames']:,}", *(f"{1e3 * found[which]:.0f}" for which in ("median", "99 %", "worst"))]
        for name, found in study["waits"].items()
    ]
    told = "; ".join(study["warnings"]) or "none"
    return (
        f"{study['seconds']:.0f} s, {study['Mbit/s each way']:.1f} Mbit/s of gradients each way; warnings: {told}.\n\n"
        + table(["to and fro, in ms", "frames", "median", "99 %", "worst"], rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hosts.full_link", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--mbit", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="page whose section `full link` is written")
    options = parser.parse_args()
    study = measure(options.mbit, options.seconds)
    publish(study, page(study), "full link", options.json, options.write)


if __name__ == "__main__":
    main()
