"""The default launcher: the agent of this machine is a child process, and the agents of other hosts are started by
SSH."""

from __future__ import annotations

from concurrent.futures import Future

from dadt.config import Config
from dadt.launch.channel import AgentRequest, Channel, Launcher
from dadt.launch.hosts.host import Host
from dadt.launch.launchers.local import LocalLauncher


def launcher(request: AgentRequest) -> Launcher:
    return NearbyLauncher(request.config)


def ssh(request: AgentRequest) -> Launcher:
    return ssh_launcher(request.config)


class NearbyLauncher:
    """Starts the agents of hosts that are this machine by LocalLauncher, and all others by SSH."""

    extends = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._local = LocalLauncher(config)
        self._far: Launcher | None = None

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        far = [host for host in hosts if not host.is_here]
        futures = dict(zip(far, self._ssh().launch(far), strict=True)) if far else {}
        return [futures[host] if host in futures else self._local.launch([host])[0] for host in hosts]

    def command(self, host: Host) -> str:
        return self._local.command(host) if host.is_here else self._ssh().command(host)

    def close(self) -> None:
        if self._far is not None:
            self._far.close()

    def _ssh(self) -> Launcher:
        if self._far is None:
            self._far = ssh_launcher(self._config)
        return self._far


def ssh_launcher(config: Config) -> Launcher:
    # The module is imported only if needed, as the SSH library takes long to import.
    if config.ssh_backend == "openssh":
        from dadt.launch.launchers.openssh import OpensshLauncher

        return OpensshLauncher(config)
    from dadt.launch.launchers.ssh import SshLauncher

    return SshLauncher(config)
