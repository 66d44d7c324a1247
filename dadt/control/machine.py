"""Facts about this host (cores, GPUs, memory), read from the kernel and the driver's tools, never from torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from dadt.config.version import VERSION
from dadt.control import network

MOST_PORTS = 64
LOWEST_PORT = 15_000
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
CGROUPS = Path("/sys/fs/cgroup")
NVIDIA_SMI_SECONDS = 20.0
MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)


def report(env: Mapping[str, str]) -> dict[str, Any]:
    """Return an agent's report about its host: versions, hardware, addresses and ports. env: the environment of the
    workers."""
    installed = _installed_gpus()
    return {
        "version": VERSION,
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": _version("torch"),
        "hostname": socket.gethostname(),
        "machine": identity(),
        "cores": cores(),
        "gpus": gpus(env, installed),
        "gpu_models": list(dict.fromkeys(installed)),
        "addresses": network.addresses(),
        "ports": free_ports(),
        "pid": os.getpid(),
    }


def identity() -> str:
    """Return an id of the machine that is independent of its name. Each network namespace counts as a machine of its
    own."""
    return f"{read_text(Path('/proc/sys/kernel/random/boot_id'))} {Path('/proc/self/ns/net').readlink()}"


def free_ports(count: int = MOST_PORTS) -> list[int]:
    """Return `count` different TCP ports that are free at the moment. They lie below the ports of outgoing connections
    where these leave room, so that no connection takes one of them before a worker listens there."""
    first, _, _ = read_text(OUTGOING_PORTS).partition("\t")
    below = range(LOWEST_PORT, int(first) if first.isdigit() else LOWEST_PORT)
    some = random.SystemRandom().sample(below, min(len(below), 4 * count))
    found: list[int] = []
    with ExitStack() as stack:
        for port in (*some, *[0] * count):
            probe = stack.enter_context(socket.socket())
            with suppress(OSError) if port else nullcontext():  # another program may listen there
                probe.bind(("", port))
                found.append(int(probe.getsockname()[1]))
            if len(found) == count:
                break
    return found


def cores() -> int:
    """Return the number of CPU cores that this process may use, according to its affinity and its cgroup's quota."""
    usable = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders():
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            usable = min(usable, max(1, int(quota) // int(period)))
    return usable


def gpus(env: Mapping[str, str] = os.environ, installed: Sequence[str] | None = None) -> list[str]:
    """Return the visible NVIDIA GPUs in the notation of CUDA_VISIBLE_DEVICES: indices, UUIDs or MIG instances.
    installed: the models of all GPUs, if the caller knows them already."""
    installed = _installed_gpus() if installed is None else installed
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(len(installed))]
    names = []
    for name in (part.strip() for part in visible.split(",")):
        # CUDA itself ignores everything from the first invalid index on.
        if not name or name.startswith("-"):
            break
        names.append(name)
    return names if installed else []


def resident(pid: int) -> int:
    """Return the bytes of physical memory that the process uses; 0 if it has ended."""
    fields = read_text(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def memory_limit() -> int:
    """Return the bytes that this host's processes may use together: the cgroup's limit, or the machine's memory."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    names = ("memory.max", "memory.limit_in_bytes")
    texts = (read_text(folder / name) for folder in _cgroup_folders() for name in names)
    limits.extend(int(text) for text in texts if text.isdigit())
    return min(limits)


def memory_kills() -> int:
    """Return the number of this cgroup's processes that the kernel has killed for lack of memory so far."""
    kills = 0
    for folder in _cgroup_folders():
        for name in ("memory.events", "memory.oom_control"):
            for line in read_text(folder / name).splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdigit():
                    kills = max(kills, int(value))
    return kills


def memory_facts(peak: int, kills_before: int) -> dict[str, int]:
    """Return the memory figures with which a worker's end is reported. peak: largest number of bytes that the worker
    used. kills_before: value of `memory_kills` when the worker began."""
    return {"peak_memory": peak, "memory_limit": memory_limit(), "memory_kills": memory_kills() - kills_before}


def process_limit() -> int:
    """Return the largest number of processes and threads that this cgroup may have at once; 0 if there is no limit."""
    texts = (read_text(folder / "pids.max") for folder in _cgroup_folders())
    return min((int(text) for text in texts if text.isdigit()), default=0)


def _installed_gpus() -> list[str]:
    """Return the model name of each installed NVIDIA GPU, in order of index."""
    if shutil.which("nvidia-smi"):
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=NVIDIA_SMI_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return []  # if the driver does not answer, workers could not use the GPUs either
        lines = [line for line in listed.stdout.decode(errors="replace").splitlines() if line.startswith("GPU ")]
        return [line.partition(": ")[2].partition(" (UUID")[0] for line in lines]
    folder = Path("/proc/driver/nvidia/gpus")
    files = sorted(folder.glob("*/information")) if folder.is_dir() else []
    return [next(iter(MODEL.findall(read_text(file))), "unknown") for file in files]


def _cgroup_folders() -> Iterator[Path]:
    """Yield the folders of this process's cgroups (that of version 2, and the memory cgroup of version 1), each
    followed by all its parents."""
    for line in read_text(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if names not in ("", "memory"):
            continue
        root = CGROUPS / names
        folder = root / path.lstrip("/")
        # In a container, the folder may exist on the host alone; its nearest parent that exists in the container is
        # used.
        while not folder.is_dir() and folder != root:
            folder = folder.parent
        yield folder
        while folder != root:
            folder = folder.parent
            yield folder


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def read_text(path: Path) -> str:
    """Return the text of one of the kernel's files; empty if it cannot be read, as not every kernel has every file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
