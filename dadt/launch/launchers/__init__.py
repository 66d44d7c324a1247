"""Ways to start the agents of a job's hosts, one file each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dadt.config import Config
from dadt.launch.channel import Launcher
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.simulated import wanted


def launcher_of(
    config: Config,
    hosts: Sequence[Host],
    command: Sequence[str],
    job: str,
    turned_away: Callable[[str], None] = lambda text: None,
) -> Launcher:
    """How the agents of these hosts are started. command: of each worker. turned_away: is told, by any thread, of
    strangers who came to where agents are awaited."""
    # Each one is imported where it is used: an SSH library takes longer to import than all else.
    if wanted(config):
        from dadt.launch.launchers.simulated import SimulatedLauncher

        return SimulatedLauncher(config)
    if config.nnodes:
        from dadt.launch.launchers.manual import HandLauncher

        return HandLauncher(config, job, command, turned_away)
    if config.launcher == "mpi":
        from dadt.launch.launchers.mpi import MpiLauncher

        return MpiLauncher(config, hosts, job, turned_away)
    named = bool(config.hosts or config.hostfile)
    if any(host.name for host in hosts) and not named and config.launcher in ("auto", "slurm"):
        from dadt.launch.launchers.slurm import SlurmLauncher

        return SlurmLauncher(config, hosts, turned_away)
    from dadt.launch.launchers.nearby import NearbyLauncher, ssh_launcher

    return ssh_launcher(config) if config.launcher == "ssh" else NearbyLauncher(config)
