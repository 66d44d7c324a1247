"""The scheduler that shares out this machine, and how `dadt run` gets its hosts from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dadt.errors import ConfigError
from dadt.launch.hosts.slurm import slurm_hosts
from dadt_cli.check_env.check import Asked, Check, good, refused

OTHERS = {
    "PBS_JOBID": ("PBS", "dadt run --hostfile with the hosts of $PBS_NODEFILE, each once"),
    "LSB_JOBID": ("LSF", "dadt run -H with the hosts of $LSB_HOSTS, each once"),
    "PE_HOSTFILE": ("Grid Engine", "dadt run -H with the hosts of $PE_HOSTFILE"),
    "RAY_JOB_ID": ("Ray", "dadt run -H with the hosts of its placement group: dadt does not ask Ray"),
    "KUBERNETES_SERVICE_HOST": ("Kubernetes", "dadt run --nnodes N --node-rank I --rendezvous host:port in each pod"),
}
"""By the variable that they set."""


def checks(asked: Asked) -> Iterator[Check]:
    found = False
    if "SLURM_JOB_ID" in os.environ:
        found = True
        yield _slurm()
    for variable, (name, remedy) in OTHERS.items():
        if variable in os.environ:
            found = True
            yield good(name, f"{variable} is set", remedy)
    if not found:
        yield good("scheduler", "none" + (", in a container" if _in_container() else ""))


def _slurm() -> Check:
    job = os.environ["SLURM_JOB_ID"]
    try:
        hosts = slurm_hosts(os.environ) or []
    except (ConfigError, ValueError) as error:
        return refused("Slurm", f"job {job}: {error}", "call dadt in the batch script, without srun")
    names = ", ".join(f"{host.name}:{host.slots}" if host.slots else host.name for host in hosts)
    return good("Slurm", f"job {job}; dadt run takes {names or 'this host'}")


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
