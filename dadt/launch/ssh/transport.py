"""Makes the connection that carries SSH to a server: a TCP connection, a ProxyCommand, or a channel through another
host."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
from typing import IO

import paramiko

from dadt.control.priority import set_urgent
from dadt.errors import LaunchError
from dadt.launch.child import end
from dadt.launch.ssh import refusals
from dadt.launch.ssh.attempt import Transient
from dadt.launch.ssh.route import Route

TOKEN = re.compile(r"%([%hnpr])")
END_SECONDS = 1.0


def dial(route: Route, timeout: float, silence: float) -> socket.socket:
    """Connect to the route's host by TCP. silence: seconds without an answer of the host after which the connection
    counts as lost. Raises LaunchError."""
    try:
        found = socket.getaddrinfo(route.hostname, route.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        kind = Transient if error.errno == socket.EAI_AGAIN else LaunchError
        raise kind(refusals.unknown_host(route.hostname, error.strerror or str(error))) from error
    except UnicodeError as error:
        raise LaunchError(refusals.unknown_host(route.hostname, str(error))) from error
    errors = []
    for family, kind_, protocol, _, address in found:
        wire = socket.socket(family, kind_, protocol)
        try:
            _watch(wire, silence)
            wire.settimeout(timeout)
            wire.connect(address)
            return wire
        except OSError as error:
            wire.close()
            errors.append(error)
    raise _unreachable(route, timeout, errors) from errors[0]


def _watch(wire: socket.socket, silence: float) -> None:
    """Have the kernel detect that the other side cannot be reached any more, since nothing reports this if the network
    was cut."""
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    set_urgent(wire)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence / 3)))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(silence / 3)))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))


def _unreachable(route: Route, timeout: float, errors: list[OSError]) -> LaunchError:
    if any(isinstance(error, ConnectionRefusedError) for error in errors):
        return LaunchError(refusals.refused(route.where))
    if any(isinstance(error, ConnectionResetError) for error in errors):
        return Transient(refusals.closed(route.where))
    if any(isinstance(error, TimeoutError) for error in errors):
        return LaunchError(refusals.silent(route.where, timeout))
    return LaunchError(refusals.unreachable(route.where, errors[0].strerror or str(errors[0])))


def tunnel(over: paramiko.Transport, route: Route, timeout: float) -> paramiko.Channel:
    """Open a channel to the host through the SSH connection to another host. Raises LaunchError."""
    try:
        return over.open_channel("direct-tcpip", (route.hostname, route.port), ("127.0.0.1", 0), timeout=timeout)
    except paramiko.ChannelException as error:
        raise LaunchError(
            f"ProxyJump {route.jumps[-1]} does not get to {route.where} ({error.text}) -> try "
            f"`ssh {refusals.login(route)}`"
        ) from error
    except paramiko.SSHException as error:
        raise Transient(f"ProxyJump {route.jumps[-1]} is lost or does not answer ({error})") from error


class Proxy:
    """A running ProxyCommand, whose input and output serve as the connection to the host."""

    def __init__(self, route: Route) -> None:
        values = {"%": "%", "h": route.hostname, "n": route.host, "p": str(route.port), "r": route.user}
        self._command = TOKEN.sub(lambda found: values[found[1]], route.proxy_command)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {self._command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._stderr,
                start_new_session=True,
            )

    def explain(self) -> str:
        """Return a text that contains the last line that the ProxyCommand printed before it failed."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"ProxyCommand `{self._command}`" + (f": {lines[-1]}" if lines else " ended without a word")

    def close(self) -> None:
        self.socket.close()
        end(self._process, END_SECONDS)
        self._stderr.close()
