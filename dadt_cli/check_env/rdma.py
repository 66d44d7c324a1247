"""Checks InfiniBand and RoCE, which NCCL and MPI use automatically if they work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dadt.control import machine
from dadt_cli.check_env.check import Check, CheckOptions, good, warn

FOLDER = Path("/sys/class/infiniband")
MODULES = Path("/sys/module")
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
GPUS = Path("/proc/driver/nvidia/gpus")


def checks(asked: CheckOptions) -> Iterator[Check]:
    found = devices()
    if not found:
        yield good("devices", "none")
        return
    for device in found:
        for port in sorted((device / "ports").glob("*")):
            yield _port(device, port)
    if GPUS.is_dir():
        loaded = [name for name in PEER_MODULES if (MODULES / name).is_dir()]
        if loaded:
            yield good("GPU memory", f"read by RDMA directly ({loaded[0]})")
        else:
            yield warn("GPU memory", "goes through the host's memory", "modprobe nvidia-peermem, for GPUDirect RDMA")


def devices() -> list[Path]:
    return sorted(FOLDER.iterdir()) if FOLDER.is_dir() else []


def _port(device: Path, port: Path) -> Check:
    name = f"{device.name} port {port.name}"
    state = machine.read_text(port / "state").partition(": ")[2] or "unknown"
    value = f"{state}, {machine.read_text(port / 'link_layer')}, {machine.read_text(port / 'rate')}"
    if state == "ACTIVE":
        return good(name, value)
    return warn(name, value, "check the cable and the subnet manager, or leave it out with NCCL_IB_HCA")
