"""What an agent tells of its host before it has workers there: what the host has, and which others it reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dadt.config.version import VERSION
from dadt.control.frame import Frame
from simulation.world import address_of

if TYPE_CHECKING:
    from simulation.job import SimulatedJob


def report_of(machine: int, uptime: float, date: float, how: str) -> Frame:
    """The report about a host. date: the time by the clock that is set. how: what is the matter with it."""
    address = {"interface": "eth0", "address": address_of(machine), "speed": 1000.0}
    version = "0" if how == "has another version" else VERSION
    facts = {
        **dict.fromkeys(("python", "torch", "hostname", "executable"), "x"), "version": version,
        "machine": f"machine{machine}", "cores": 8, "gpus": [], "gpu_models": [], "addresses": [address],
        "ports": [2000, 2002], "pid": 100, "probe_port": 2001, "token": "00", "marker": None, "clock": uptime,
        "date": date,
        "problems": ["train.py: not there"] if how == "has a problem" else [],
    }  # fmt: skip
    return Frame("ready", facts)


def probed(job: SimulatedJob, machine: int, order: Frame) -> Frame:
    """Which addresses of others a host reaches now."""

    def reaches(address: str) -> bool:
        other = next((each for each in job.machines.values() if address_of(each.machine) == address), None)
        return other is not None and other.process.alive and job.network.joined(machine, other.machine)

    return Frame("probed", {"reached": {
        str(target["index"]): {each: 0.001 for each in target["addresses"] if reaches(each)}
        for target in order["targets"]
    }})  # fmt: skip
