"""Launchers, the classes that start the agents of a job's hosts. Each is in a module of this package, and has a line in
dadt/config/extensions.py."""

from __future__ import annotations

from importlib import import_module

from dadt.config.extensions import LAUNCHERS
from dadt.launch.channel import AgentRequest, Launcher
from dadt.launch.hosts.simulated import wanted

UNNAMED = {
    "simulated": "dadt.launch.launchers.simulated:SimulatedLauncher",
    "manual": "dadt.launch.launchers.manual:HandLauncher",
}
"""Launchers that cannot be named by --launcher, because other flags select them."""


def launcher_of(request: AgentRequest) -> Launcher:
    """Return the launcher for a request. The launcher's module is imported by this call, as the SSH library takes long
    to import."""
    module, _, function = {**LAUNCHERS, **UNNAMED}[_name(request)].partition(":")
    made: Launcher = getattr(import_module(module), function)(request)
    return made


def _name(request: AgentRequest) -> str:
    config = request.config
    if wanted(config):
        return "simulated"
    if config.nnodes:
        return "manual"
    if config.launcher in ("auto", "slurm"):
        return "slurm" if request.allocated else "local"
    return config.launcher
