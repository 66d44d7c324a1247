"""Checks cores, threads and memory of this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from dadt.control import machine
from dadt.launch.ending.failure import size
from dadt_cli.check_env.check import Check, CheckOptions, good, warn

LEAST_FREE = 1 << 30
"""Bytes of memory that should be free, since torch alone needs a few hundred MiB in each worker."""
BUSY = 1.5
"""Processes waiting to run per core, above which the machine counts as busy."""


def checks(asked: CheckOptions) -> Iterator[Check]:
    cores, installed = machine.cores(), os.cpu_count() or 1
    of = "" if cores == installed else f" of {installed} (affinity, or the cgroup's quota)"
    yield good("cores", f"{cores}{of}, {_model()}")
    load = os.getloadavg()[0]
    if load > BUSY * cores:
        yield warn("load", f"{load:.1f} processes want to run", "wait for what else runs here, or end it")
    yield _threads(cores)
    yield _memory()


def _threads(cores: int) -> Check:
    """Check OMP_NUM_THREADS. If unset, `dadt run` divides the cores among the workers."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if not chosen:
        return good("threads", f"dadt run gives each of N workers {cores}/N, at least 1")
    if not chosen.isdigit() or int(chosen) < 1:
        return warn("threads", f"OMP_NUM_THREADS={chosen}", "unset OMP_NUM_THREADS, or set it to a number")
    if int(chosen) > cores:
        hint = f"unset OMP_NUM_THREADS, or set it to {cores} divided by the workers of a host"
        return warn("threads", f"OMP_NUM_THREADS={chosen} for each worker, on {cores} cores", hint)
    return good("threads", f"OMP_NUM_THREADS={chosen} for each worker")


def _memory() -> Check:
    free, limit = psutil.virtual_memory().available, machine.memory_limit()
    value = f"{size(limit)} for all workers of this host, {size(free)} of the machine are free"
    if min(free, limit) < LEAST_FREE:
        return warn("memory", value, "end what else runs here, or raise the container's limit")
    return good("memory", value)


def _model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return os.uname().machine
