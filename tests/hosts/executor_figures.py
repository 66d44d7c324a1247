"""The executors' figures: `make figures` (as root, on an idle machine).

Each allreduce beside the library called directly, on this host, under both MPIs and between simulated hosts with
links of 1 and 10 Gbit/s; the bytes on the wire. DDP on the backend `dadt` has a command of its own, `dadt bench ddp`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.machine import Network
from harness.patience import PATIENCE

from dadt_cli.bench import ddp
from dadt_cli.bench.figure import conditions
from dadt_cli.bench.ratio import Interval

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAM = [sys.executable, str(BENCHMARKS / "executor.py")]
SIZES = "64,4096,65536,1048576,8388608,67108864,268435456"
MEBIBYTE = 1 << 20
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
Rows = list[dict[str, Any]]


def on_this_host(executor: str, ranks: int, sizes: str, seconds: float) -> Rows:
    """Against torch's Gloo."""
    with tempfile.TemporaryDirectory(prefix="dadt-figures-") as folder:
        where = ["--np", ranks, "--store", f"{folder}/store", "--sizes", sizes, "--seconds", seconds]
        return ended([started([*PROGRAM, executor, "--rank", rank, *where]) for rank in range(ranks)])


def under_mpi(mpirun: str, sizes: str, seconds: float) -> Rows:
    """Against mpi4py, which asks for Debian's MPICH by another name."""
    command = [mpirun, "-np", 2, *PROGRAM, "mpi", "--against", "mpi4py"]
    with tempfile.TemporaryDirectory(prefix="dadt-figures-") as folder:
        more = ["--store", f"{folder}/store", "--sizes", sizes, "--seconds", seconds]
        env = {**AS_ROOT, "DADT_INJECT": "none"}
        if mpirun == "mpirun.mpich":
            Path(folder, "libmpi.so.12").symlink_to(next(Path("/usr/lib").glob("*/libmpich.so.12")))
            env["LD_LIBRARY_PATH"] = folder
        return ended([started([*command, *more], env)])


def burst(ranks: int) -> Any:
    """A thousand tensors of 4 KiB by name over shared memory, against one Gloo allreduce after the other."""
    with tempfile.TemporaryDirectory(prefix="dadt-figures-") as folder:
        program = [sys.executable, str(BENCHMARKS / "burst.py"), "shm", "--np", ranks, "--store", f"{folder}/store"]
        return ended([started([*program, "--rank", rank]) for rank in range(ranks)])


def between_hosts(
    network: Network, executor: str, sizes: str, seconds: float, *more: object, local_size: int = 2
) -> Rows:
    """So many ranks on each host, against torch's Gloo."""
    hosts = network.hosts
    ranks = local_size * len(hosts)
    what = ["--sizes", sizes, "--seconds", seconds, *more]
    processes = []
    with tempfile.TemporaryDirectory(prefix="dadt-figures-") as folder:
        where = ["--np", ranks, "--local-size", local_size, "--store", f"{folder}/store"]
        for rank in range(ranks):
            host = hosts[rank // local_size]
            command = [*PROGRAM, executor, "--rank", rank, "--address", host.address, *where, *what]
            processes.append(started(host.enter(command)))
        return ended(processes)


def bytes_on_the_wire(network: Network, executor: str, only: str) -> float:
    """That one host sends for each byte of an allreduce."""
    repeat = 5
    before = sent(network)
    between_hosts(network, executor, str(16 * MEBIBYTE), 0, "--only", only, "--repeat", repeat)
    return (sent(network) - before) / (repeat * 16 * MEBIBYTE)


def sent(network: Network) -> int:
    (link,) = json.loads(network[0].run("ip", "-json", "-statistics", "link", "show", "eth0"))
    return int(link["stats64"]["tx"]["bytes"])


def started(command: Sequence[object], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(map(str, command)), env={**ENV, **(env or {})}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )


def ended(processes: Sequence[subprocess.Popen[str]]) -> Rows:
    """What the first of them said, as JSON."""
    try:
        said = [process.communicate(timeout=8 * PATIENCE)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes), [p.returncode for p in processes]
    finally:
        for process in processes:
            process.kill()
    return json.loads(said[0].splitlines()[-1])


def show(title: str, rows: Rows) -> None:
    print(f"\n{title}")
    heads = ("bytes", "library us", "dadt us", "dadt / library", "over us", "loaded: library", "dadt")
    heads += ("processor: library", "dadt")
    widths = (12, 11, 10, 22, 9, 16, 12, 19, 10)
    print(" ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for row in rows:
        ratio = row["ratio"]
        span = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        library, dadt, over = (1e6 * row[name]["median"] for name in ("library", "dadt", "over"))
        loaded = [1e6 * row[name]["median"] for name in ("loaded_library", "loaded_dadt")]
        values = [f"{row['bytes']:,}", *(f"{v:,.0f}" for v in (library, dadt)), span, f"{over:,.0f}"]
        values += [f"{v:,.0f}" for v in (*loaded, 1e6 * row["processor_library"], 1e6 * row["processor_dadt"])]
        print(" ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True)), flush=True)


def keep(path: Path, figures: dict[str, Any]) -> None:
    """Beside those that the file has, each with the conditions of its run."""
    known = json.loads(path.read_text()) if path.exists() else {}
    now = conditions()
    known |= {title: {"conditions": now, "figures": found} for title, found in figures.items()}
    path.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size")
    parser.add_argument("--only", default="shm,gloo,burst,ddp,mpi,tcp,hierarchical,wire", help="of these figures, some")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    try:
        take(options, figures)
    finally:
        if options.json:
            keep(options.json, figures)


def take(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Adds each as soon as it is there."""
    chosen = options.only.split(",")

    def add(title: str, rows: Rows) -> None:
        figures[title] = rows
        show(title, rows)

    for executor in ("shm", "gloo"):
        if executor in chosen:
            for ranks in (2, 4):
                rows = on_this_host(executor, ranks, options.sizes, options.seconds)
                add(f"{executor}, {ranks} ranks on one host, against Gloo", rows)
    for ranks in (2, 4) if "burst" in chosen else ():
        figures[f"1,000 tensors of 4 KiB, {ranks} ranks"] = found = burst(ranks)
        print(
            f"\n1,000 tensors of 4 KiB by name, {ranks} ranks: Gloo takes {Interval(**found['gloo_per_dadt'])} as long"
        )
    if "ddp" in chosen:
        row = ddp.measure(ranks=2, width=2240, batch_size=2, rounds=20)
        figures["DDP, 25 M parameters, batch 2, 2 ranks"] = asdict(row)
        print(f"\nDDP of 25 M parameters, batch 2, 2 ranks: over Gloo it takes {row.gloo_per_dadt} as long")
    if "mpi" in chosen:
        for mpirun in ("mpirun.openmpi", "mpirun.mpich"):
            assert shutil.which(mpirun), f"there is no {mpirun}"
            add(f"mpi under {mpirun}, 2 ranks, against mpi4py", under_mpi(mpirun, options.sizes, options.seconds))
    with tempfile.TemporaryDirectory(prefix="dadt-figures-") as folder:
        network = Network(Path(folder), 2)
        try:
            for rate in ("no limit", "1gbit") if "tcp" in chosen else ():
                for host in network.hosts if rate != "no limit" else ():
                    host.slow(rate)
                rows = between_hosts(network, "tcp", options.sizes, options.seconds, local_size=1)
                add(f"tcp, 2 hosts, {rate}, against Gloo", rows)
            for rate in ("1gbit", "10gbit") if "hierarchical" in chosen else ():
                for host in network.hosts:
                    host.slow(rate)
                rows = between_hosts(network, "hierarchical:tcp", options.sizes, options.seconds)
                add(f"hierarchical:tcp, 2 hosts x 2 ranks, {rate}, against flat Gloo", rows)
            if "wire" in chosen:
                for executor, only in (("gloo", "library"), ("hierarchical:tcp", "dadt")):
                    share = bytes_on_the_wire(network, executor, only)
                    figures[f"bytes that a host sends per byte reduced, {executor}"] = share
                    print(f"{executor}: a host sends {share:.2f} bytes for each byte reduced")
        finally:
            network.close()


if __name__ == "__main__":
    main()
