"""Two simulated hosts and a long link between them, on which packets take time and get lost. Needs root and a C
compiler."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from dadt.launch.hosts.simulated import Network, SimulatedLink

DEVICE = "wan0"
PROGRAM = Path(__file__).with_name("long_link.c")


class LongLink:
    """Two simulated hosts with a long link. hosts: words that run a command on each host. addresses: where the other
    host reaches each."""

    addresses = ("10.78.0.1", "10.78.0.2")

    def __init__(
        self,
        folder: Path,
        mbit: float,
        round_trip: float = 0.0,
        loss: float = 0.0,
        queue: float = 0.05,
        mtu: int = 1500,
        congestion: str = "cubic",
    ) -> None:
        """folder: for the program that simulates the link. round_trip, queue: seconds; packets that would wait longer
        than `queue` are dropped. loss: share of packets that are lost."""
        self._network = Network(SimulatedLink())
        self.hosts = [self._network.add() for _ in range(2)]
        program = folder / "long_link"
        subprocess.run(["cc", "-O2", "-o", program, PROGRAM], check=True)
        namespaces = [host[1].removeprefix("--net=") for host in self.hosts]
        numbers = [f"{number:.0f}" for number in (1e6 * mbit, 5e5 * round_trip, 1e6 * loss, 1e6 * queue)]
        self._process = subprocess.Popen([program, *namespaces, DEVICE, *numbers], stdout=subprocess.PIPE, text=True)
        try:
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n"
            for host, address, other in zip(self.hosts, self.addresses, self.addresses[::-1], strict=True):
                lines = [
                    f"addr add {address}/32 dev {DEVICE}",
                    f"link set {DEVICE} mtu {mtu} txqueuelen 1000 up",
                    "link set eth0 down",
                    f"route add {other} dev {DEVICE} congctl {congestion}",
                ]
                subprocess.run([*host, "ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(AttributeError):
            self._process.stdout.close()  # type: ignore[union-attr]
        self._network.close()
