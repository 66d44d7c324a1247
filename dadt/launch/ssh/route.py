"""Finds the route by which SSH reaches a host, from SSH's configuration and from DADT's flags, which take
precedence."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dadt.config import Config
from dadt.errors import LaunchError

ANSWER_SECONDS = 10.0
CONNECT_SECONDS = 10.0
"""Seconds to wait for a TCP connection if the SSH configuration does not set ConnectTimeout."""
SSH_PORT = 22
JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>.+)@)?(?:\[(?P<six>[^\]]+)\]|(?P<name>[^:]+))(?::(?P<port>\d+))?/?")

Settings = Mapping[str, Sequence[str]]
"""Settings of the SSH configuration, by their names in lower case. A setting may have several values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """A host with the SSH settings for reaching it."""

    host: str
    """Name of the host as the user has written it, which may be an alias in the SSH configuration."""
    hostname: str
    port: int
    user: str
    identities: tuple[Path, ...]
    identities_only: bool
    uses_agent: bool
    jumps: tuple[str, ...]
    proxy_command: str
    known_hosts: tuple[Path, ...]
    """Paths of the known_hosts files. New host keys are written to the first one."""
    alias: str
    strict: bool
    """Whether the host's key must be known, whatever --ssh-host-keys says."""
    connect_timeout: float
    alive_interval: float

    @property
    def key_name(self) -> str:
        """The host's name as it is written in known_hosts files, with its port unless that is 22."""
        if self.alias:
            return self.alias
        return self.hostname.lower() if self.port == SSH_PORT else f"[{self.hostname.lower()}]:{self.port}"

    @property
    def where(self) -> str:
        return f"{self.hostname} port {self.port}"


def find(config: Config, host: str, user: str = "", port: int = 0, identity: str = "") -> Route:
    """Return the route to a host. user, port, identity: values that take precedence over the SSH configuration. Raises
    LaunchError."""
    if identity and not Path(identity).expanduser().is_file():
        raise LaunchError(f"there is no private key {identity} -> give the right path with -i")
    ssh = shutil.which("ssh")
    settings = _of_ssh(ssh, config, host, user) if ssh else _of_files(config, host)
    one = {name: values[-1] for name, values in settings.items() if values and values[-1].lower() != "none"}
    jumps = [part for part in one.get("proxyjump", "").split(",") if part]
    identities = [identity] if identity else [file for file in settings.get("identityfile", []) if file != "none"]
    known = one.get("userknownhostsfile", "~/.ssh/known_hosts").split()
    known += one.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2").split()
    hostname = one.get("hostname", host).replace("%h", host)
    return Route(
        host=host,
        hostname=hostname,
        port=port or int(one.get("port", SSH_PORT)),
        user=user or one.get("user") or getpass.getuser(),
        identities=tuple(Path(file).expanduser() for file in identities),
        identities_only=bool(identity) or _is_yes(one.get("identitiesonly", "")),
        uses_agent=settings.get("identityagent", [""])[-1].lower() != "none",
        jumps=tuple(jumps),
        proxy_command=one.get("proxycommand", ""),
        known_hosts=tuple(Path(file).expanduser() for file in known),
        alias=one.get("hostkeyalias", ""),
        strict=_is_yes(one.get("stricthostkeychecking", "")),
        connect_timeout=float(one.get("connecttimeout", 0)) or CONNECT_SECONDS,
        alive_interval=float(one.get("serveraliveinterval", 0)),
    )


def find_jump(config: Config, text: str) -> Route:
    """Return the route to a host that ProxyJump names in the form [user@]host[:port]."""
    found = JUMP.fullmatch(text)
    if found is None:
        raise LaunchError(f"ProxyJump {text} is not understood -> [user@]host[:port] in the SSH configuration")
    return find(config, found["six"] or found["name"], found["user"] or "", int(found["port"] or 0))


def _of_ssh(ssh: str, config: Config, host: str, user: str) -> Settings:
    """Return the SSH settings for a host, as the program `ssh` reports them. Unlike Paramiko, it supports all of
    OpenSSH's configuration, such as Include, Match and canonical names."""
    options = ["-F", config.ssh_config] if config.ssh_config else []
    options += ["-l", user] if user else []
    try:
        done = subprocess.run(
            [ssh, "-G", *options, "--", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`ssh -G {host}` has not answered within {ANSWER_SECONDS:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LaunchError(f"the SSH configuration is not understood: {said[0]} -> check it with `ssh -G {host}`")
    settings: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name.lower(), []).append(value)
    return settings


def _of_files(config: Config, host: str) -> Settings:
    """Return the SSH settings for a host as Paramiko reads them from the configuration files, where the program `ssh`
    is missing. Paramiko does not support Include."""
    import paramiko

    files = [config.ssh_config] if config.ssh_config else ["~/.ssh/config", "/etc/ssh/ssh_config"]
    settings: dict[str, list[str]] = {}
    for file in files:
        path = Path(file).expanduser()
        if not path.is_file():
            if config.ssh_config:
                raise LaunchError(f"there is no SSH configuration {file} -> give the right path with --ssh-config")
            continue
        try:
            found = paramiko.SSHConfig.from_path(path).lookup(host)
        except paramiko.ConfigParseError as error:
            raise LaunchError(f"the SSH configuration {file} is not understood: {error}") from error
        for name, value in found.items():
            if name == "identityfile":
                settings.setdefault(name, []).extend(value)
            elif name != "hostname" or value != host:
                settings.setdefault(name, [value])
    settings.setdefault("identityfile", [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")])
    return settings


def _is_yes(text: str) -> bool:
    return text.lower() in ("yes", "true")
