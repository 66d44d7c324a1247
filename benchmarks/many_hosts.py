"""As root: python -m benchmarks.many_hosts --json docs/results/many-hosts.json --write docs/results/speed.md

Measures averages among 4, 8 and 16 simulated hosts, compared with the least time that is possible, and with Gloo, which
uses a ring: at one switch, in two racks with a thin link between them, and with one slower host. The rates are so low
that this machine's cores are not the limit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.page import publish, table
from dadt import _core
from dadt.comm import executors
from dadt.comm.backend.rendezvous import GroupRendezvous
from dadt.comm.executors.meet import Apart
from dadt.config import Config
from dadt.launch.hosts.simulated import CLONE_NEWNET, Network, SimulatedLink
from dadt.world import World
from dadt_cli.bench.figure import conditions

BYTES = 100_000_000
PATIENCE = 300.0


@dataclass(frozen=True)
class Scene:
    """A number of hosts, and the links between them."""

    hosts: int
    mbit: float
    uplink: float = 0.0
    """Mbit/s between the two racks of hosts; 0: all hosts are at one switch."""
    slow: float = 0.0
    """Mbit/s of the last host, if its link is slower; otherwise 0."""
    size: int = BYTES
    """Bytes that are averaged."""
    per_host: int = 1
    """Ranks on each host. Several average within their host first, and each then a part of all among hosts."""

    @property
    def title(self) -> str:
        racks = f", racks joined by {self.uplink:g}" if self.uplink else ""
        slow = f", one of {self.slow:g}" if self.slow else ""
        size = f", {self.size / 1e6:g} MB" if self.size != BYTES else ""
        ranks = f" with {self.per_host} ranks each" if self.per_host > 1 else ""
        return f"{self.hosts} x {self.mbit:g} Mbit/s{ranks}{racks}{slow}{size}"

    @property
    def least(self) -> float:
        """Least seconds that any algorithm needs: for what each host, and the slow one, has to send and receive."""
        return 8e-6 * self.size * max(2 * (self.hosts - 1) / self.hosts / self.mbit, 1 / self.slow if self.slow else 0)


SCENES = (
    *(Scene(hosts, 100, size=size) for hosts in (4, 8, 16) for size in (2_000_000, 10_000_000, BYTES)),
    Scene(4, 200),
    Scene(16, 50),
    Scene(4, 200, slow=40, size=10_000_000),
    Scene(4, 200, slow=40),
    Scene(8, 100, slow=50, size=10_000_000),
    Scene(8, 100, slow=50),
    Scene(8, 100, uplink=100),
    Scene(8, 100, uplink=200),
    Scene(16, 50, uplink=100),
    Scene(8, 100, size=400_000),
    *(Scene(8, 100, per_host=2, size=size) for size in (2_000_000, 10_000_000, BYTES)),
)


class Averages(NamedTuple):
    """What one contender did."""

    seconds: list[float]
    """Of each average, on the slowest rank. In the first average nothing is known of the links."""
    sent: list[int]
    """Bytes that each rank has sent in all averages; 0 if they are not known."""
    resent: list[int]
    """Bytes that were sent again."""


def averages(scene: Scene, contenders: Sequence[str], rounds: int) -> dict[str, Averages]:
    """Return what each contender did in turns."""
    network = Network(SimulatedLink(1e6 * scene.mbit))
    try:
        hosts = [network.add()[1].removeprefix("--net=") for _ in range(scene.hosts)]
        _shape(scene, f"/proc/{os.getpid()}/fd/{network._switch}", hosts)
        with tempfile.TemporaryDirectory(prefix="dadt-many-") as folder:
            children = []
            for rank in range(scene.hosts * scene.per_host):
                host = hosts[rank // scene.per_host]
                child = os.fork()
                if child == 0:
                    _run(rank, host, scene, contenders, rounds, Path(folder))
                children.append(child)
            ended = [os.waitpid(child, 0)[1] for child in children]
            if any(ended):
                raise SystemExit(f"{scene.title}: ranks ended with {ended}")
            told = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(scene.hosts * scene.per_host)]
    finally:
        network.close()
    found = {}
    for name in contenders:
        seconds, sent, resent = zip(*(rank[name] for rank in told), strict=True)
        found[name] = Averages([max(each) for each in zip(*seconds, strict=True)], list(sent), list(resent))
    return found


def _shape(scene: Scene, switch: str, hosts: Sequence[str]) -> None:
    lines = [(host, "ip route replace 10.77.0.0/24 dev eth0 congctl cubic") for host in hosts]
    if scene.uplink:
        shape = f"root tbf rate {scene.uplink:g}mbit burst 200k latency 50ms"
        lines += [
            (switch, "ip link add sw1 type bridge mcast_snooping 0"),
            (switch, "ip link add up0 type veth peer name up1"),
            *((switch, f"ip link set {name} up") for name in ("sw1", "up0", "up1")),
            *((switch, f"ip link set up{number} master sw{number}") for number in (0, 1)),
            *((switch, f"ip link set p{number + 1} master sw1") for number in range(scene.hosts // 2, scene.hosts)),
            *((switch, f"tc qdisc add dev up{number} {shape}") for number in (0, 1)),
        ]
    if scene.slow:
        shape = f"root tbf rate {scene.slow:g}mbit burst 90k latency 50ms"
        lines += [
            (switch, f"tc qdisc replace dev p{scene.hosts} {shape}"),
            (hosts[-1], f"tc qdisc replace dev eth0 {shape}"),
        ]
    for namespace, line in lines:
        subprocess.run(["nsenter", f"--net={namespace}", *line.split()], check=True)


def _run(rank: int, host: str, scene: Scene, contenders: Sequence[str], rounds: int, folder: Path) -> None:
    """Run one rank in a forked process, and end the process."""
    code = 1
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(os.open(host, os.O_RDONLY), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        torch.set_num_threads(1)
        (folder / str(rank)).write_text(json.dumps(_averages(rank, scene, contenders, rounds, folder)))
        code = 0
    except Exception:  # noqa: BLE001 (the process ends with it)
        traceback.print_exc()
    finally:
        os._exit(code)


def _averages(rank: int, scene: Scene, contenders: Sequence[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Return each contender's seconds, bytes sent and bytes sent again, on this rank."""
    host, local_rank = divmod(rank, scene.per_host)
    size, place = scene.hosts * scene.per_host, {"cross_rank": host, "address": f"10.77.0.{host + 1}"}
    world = World(rank=rank, world_size=size, local_rank=local_rank, local_size=scene.per_host, **place)
    store = FileStore(str(folder / "store"), size)
    meet = GroupRendezvous(store, rank, size, PATIENCE)
    within = "hierarchical:" if scene.per_host > 1 else ""
    connections = {
        name: executors.connect(
            Config(executor=within + name, timeout=PATIENCE, start_timeout=PATIENCE, streams=1),
            world,
            Apart(meet, name),
        )
        for name in contenders
    }
    tensor = torch.zeros(scene.size // 4)
    layout = _core.Layout(_core.DType.float32, [len(tensor)])
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, connection in connections.items():
            connection.engine.allgather(b"", f"together {turn}").wait(PATIENCE)
            begun = time.perf_counter()
            at = [tensor.data_ptr()]
            connection.engine.allreduce(layout, at, at, f"{turn}").wait(PATIENCE)
            taken[name].append(time.perf_counter() - begun)
    found = {}
    for name, connection in connections.items():
        connection.engine.close(PATIENCE)
        links = connection.links().values()
        found[name] = (taken[name], sum(link.sent for link in links), sum(link.resent for link in links))
        connection.close()
    return found


def page(study: dict[str, Any]) -> str:
    lines = []
    for found in study["scenes"]:
        scene = Scene(**found["scene"])
        cells = [scene.title, f"{scene.least:.2f}"]
        for first, *later in found["seconds"].values():
            rest = later[-max(2, len(later) // 2) :]  # once it is known in which groups ranks average
            cells += [f"{first:.2f}", f"{median(rest):.2f} ({scene.least / median(rest):.0%})"]
        resent = [f"{sum(found['resent'][name]) / sum(sent):.2%}" for name, sent in found["sent"].items() if sum(sent)]
        lines.append([*cells, ", ".join(resent)])
    names = [head for name in found["seconds"] for head in (f"{name}: first", "then")]
    return table(["hosts", "least, s", *names, "tcp: sent again"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_hosts", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--json", type=Path, help="file of the figures")
    parser.add_argument("--write", type=Path, help="page whose section `many hosts` is written from them")
    parser.add_argument("--rounds", type=int, default=2, help="of 100 MB; fewer bytes are averaged five times as often")
    parser.add_argument("--contenders", default="tcp,gloo")
    parser.add_argument("--only", help="numbers of the scenes to measure, from 0")
    options = parser.parse_args()
    chosen = [SCENES[int(number)] for number in options.only.split(",")] if options.only else SCENES
    study: dict[str, Any] = {"conditions": conditions(), "scenes": []}
    for scene in chosen:
        rounds = options.rounds * (1 if scene.size == BYTES else 5)
        found = averages(scene, options.contenders.split(","), rounds)
        study["scenes"].append(
            {
                "scene": asdict(scene),
                **{field: {name: getattr(each, field) for name, each in found.items()} for field in Averages._fields},
            }
        )
        print(scene.title, {name: f"{median(each.seconds[1:]):.3f}" for name, each in found.items()}, flush=True)
    publish(study, page(study), "many hosts", options.json, options.write)


if __name__ == "__main__":
    main()
