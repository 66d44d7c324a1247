"""As root: python -m benchmarks.streams --json docs/results/streams.json --write docs/results/speed.md

Several TCP connections between two ranks on a long link that loses packets, beside as many of iperf3, by turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.long_link import LongLink
from benchmarks.page import publish, spread, table
from dadt.errors import DadtError
from dadt_cli.bench.figure import conditions
from dadt_cli.bench.ratio import ratio

MBIT, ROUND_TRIP, LOSS = 200, 0.05, 0.001
SECONDS = 8
WARM_SECONDS = 2
BUCKET = 50 << 20


def rank(number: int, streams: Sequence[int], store: str, address: str) -> None:
    """Run one of two ranks: for each number of connections that it reads from stdin, it averages over that many
    connections, and prints the Mbit/s each way. streams: the numbers of connections that may be asked for."""
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from dadt import _core
    from dadt.comm import executors
    from dadt.comm.backend.rendezvous import GroupRendezvous
    from dadt.comm.executors.meet import Apart
    from dadt.config import Config
    from dadt.world import World

    world = World(rank=number, world_size=2, local_size=1, cross_rank=number, address=address)
    meet = GroupRendezvous(FileStore(store, 2), number, 2, 60.0)
    connections = {
        count: executors.connect(Config(executor="tcp", streams=count), world, Apart(meet, f"{count}"))
        for count in streams
    }
    tensors = [torch.zeros(BUCKET // 4) for _ in range(2)]
    layout = _core.Layout(_core.DType.float32, [BUCKET // 4])

    def averaged(count: int, seconds: float) -> float:
        engine = connections[count].engine
        begun, done = time.perf_counter(), 0
        works: list[_core.Work] = []
        go_on = True
        while go_on or works:
            while go_on and len(works) < 2:
                # all ranks do as many: each operation carries whether rank 0's time is over
                lane = bytes([number == 0 and time.perf_counter() - begun > seconds])
                at = [tensors[done % 2].data_ptr()]
                works.append(engine.allreduce(layout, at, at, f"{count} {done}", lane=lane))
                done += 1
            first = works.pop(0)
            first.wait(120.0)
            go_on = go_on and first.lanes[0] == b"\0"
        return 8e-6 * BUCKET * done / (time.perf_counter() - begun)

    print("ready", flush=True)
    for line in sys.stdin:
        averaged(int(line), WARM_SECONDS)
        print(averaged(int(line), SECONDS), flush=True)
    for each in connections.values():
        each.engine.close(10.0)
        each.close()


def iperf(link: LongLink, streams: int) -> float:
    """Return the Mbit/s each way of this number of connections of iperf3; that of the slower direction."""
    server = [*link.hosts[0], "iperf3", "--server", "--one-off", "--forceflush"]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as serving:
        while "listening" not in said(serving.stdout):
            pass
        asked = f"iperf3 --client {link.addresses[0]} --parallel {streams} --bidir --omit {WARM_SECONDS}"
        done = subprocess.run(
            [*link.hosts[1], *asked.split(), "--time", str(SECONDS), "--json"],
            capture_output=True,
            text=True,
            timeout=60 + SECONDS,
        )
        serving.communicate(timeout=60)
    end = json.loads(done.stdout)["end"]
    return min(end["sum_received"]["bits_per_second"], end["sum_received_bidir_reverse"]["bits_per_second"]) / 1e6


def said(pipe: IO[str] | None) -> str:
    assert pipe is not None
    line = pipe.readline()
    if not line:
        raise DadtError("a rank has failed")
    return line


def measure(streams: Sequence[int], rounds: int) -> dict[str, Any]:
    rates: dict[str, dict[str, list[float]]] = {f"{count}": {"iperf3": [], "dadt": []} for count in streams}
    with tempfile.TemporaryDirectory(prefix="dadt-streams-") as folder:
        link = LongLink(Path(folder), MBIT, ROUND_TRIP, LOSS)
        itself = [sys.executable, "-m", "benchmarks.streams", "--streams", ",".join(map(str, streams))]
        ranks = [
            subprocess.Popen(
                [*host, *itself, "--rank", str(number), "--store", f"{folder}/store", "--address", address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, (host, address) in enumerate(zip(link.hosts, link.addresses, strict=True))
        ]
        try:
            for each in ranks:
                said(each.stdout)
            for _ in range(rounds):
                for count in streams:
                    rates[f"{count}"]["iperf3"].append(iperf(link, count))
                    for each in ranks:
                        print(count, file=each.stdin, flush=True)
                    rates[f"{count}"]["dadt"].append(min(float(said(each.stdout)) for each in ranks))
                    print(count, {who: round(found[-1], 1) for who, found in rates[f"{count}"].items()}, flush=True)
            for each in ranks:
                each.communicate(timeout=60)
        finally:
            for each in ranks:
                each.kill()
                each.wait()
            link.close()
    return {"conditions": conditions(), "Mbit/s": rates}


def page(study: dict[str, Any]) -> str:
    lines = []
    for count, found in study["Mbit/s"].items():
        share = ratio(found["dadt"], found["iperf3"])
        middles = [f"{median(found[who]):.0f}" for who in ("iperf3", "dadt")]
        lines.append(
            [count, *middles, spread(share.median, share.low, share.high), "yes" if share.median >= 0.9 else "no"]
        )
    return table(["connections", "iperf3, Mbit/s each way", "dadt", "dadt / iperf3", "at least 0.9"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--json", type=Path, help="file of the figures")
    parser.add_argument("--write", type=Path, help="page whose section `streams` is written from them")
    parser.add_argument("--streams", default="8,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    streams = [int(count) for count in options.streams.split(",")]
    if options.rank is not None:
        rank(options.rank, streams, options.store, options.address)
        return
    study = measure(streams, options.rounds)
    publish(study, page(study), "streams", options.json, options.write)


if __name__ == "__main__":
    main()
