"""Checks which scheduler manages this machine, and how `dadt run` gets its hosts from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch.hosts.ray import IN_JOB, survey
from dadt.launch.hosts.slurm import slurm_hosts
from dadt_cli.check_env.check import Check, CheckOptions, fail, good, refused, warn

OTHERS = {
    "PBS_JOBID": ("PBS", "dadt run --hostfile with the hosts of $PBS_NODEFILE, each once"),
    "LSB_JOBID": ("LSF", "dadt run -H with the hosts of $LSB_HOSTS, each once"),
    "PE_HOSTFILE": ("Grid Engine", "dadt run -H with the hosts of $PE_HOSTFILE"),
    "KUBERNETES_SERVICE_HOST": ("Kubernetes", "dadt run --nnodes N --node-rank I --rendezvous host:port in each pod"),
}
"""Other schedulers by the variable that each scheduler sets: the scheduler's name, and how to call `dadt run` under it.
"""


def checks(asked: CheckOptions) -> Iterator[Check]:
    found = False
    if "SLURM_JOB_ID" in os.environ:
        found = True
        yield _slurm()
    if os.environ.get("RAY_ADDRESS") or IN_JOB in os.environ:
        found = True
        yield from _ray()
    for variable, (name, remedy) in OTHERS.items():
        if variable in os.environ:
            found = True
            yield good(name, f"{variable} is set", remedy)
    if not found:
        contained = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
        yield good("scheduler", "none" + (", in a container" if contained else ""))


def _slurm() -> Check:
    job = os.environ["SLURM_JOB_ID"]
    try:
        hosts = slurm_hosts(os.environ) or []
    except (ConfigError, ValueError) as error:
        return refused("Slurm", f"job {job}: {error}", "call dadt in the batch script, without srun")
    names = ", ".join(f"{host.name}:{host.slots}" if host.slots else host.name for host in hosts)
    return good("Slurm", f"job {job}; dadt run takes {names or 'this host'}")


def _ray() -> Iterator[Check]:
    """Check the nodes of the Ray cluster, and the versions installed on each."""
    if find_spec("ray") is None:
        yield warn("Ray", f"it is not installed for {sys.executable}", "pip install 'dadt[ray]' for --launcher ray")
        return
    try:
        nodes = survey(Config(launcher="ray", ship=False))
    except ConfigError as error:
        yield fail("Ray", error, "`ray status` on the head tells whether it runs")
        return
    yield good("Ray", f"{len(nodes)} nodes; dadt run --launcher ray takes them")
    first = next((node.versions for node in nodes if node.versions), {})
    for node in nodes:
        value = f"{node.resources}; " + (", ".join(" ".join(each) for each in node.versions.items()) or "no answer")
        missing = [name for name, version in node.versions.items() if not version]
        differing = [name for name, version in node.versions.items() if version != first.get(name)]
        if not node.versions:
            yield fail(f"Ray node {node.name}", value, "`ray list nodes` and the logs in /tmp/ray there tell more")
        elif missing:
            yield fail(f"Ray node {node.name}", value, f"pip install {' '.join(missing)} for the Python of Ray there")
        elif differing:
            yield warn(f"Ray node {node.name}", value, f"install the same {', '.join(differing)} on all nodes")
        else:
            yield good(f"Ray node {node.name}", value)
