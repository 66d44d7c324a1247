"""Connects to a host's SSH server, through other hosts if needed: finds the route, connects by TCP, checks the host's
key, and logs in."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from dataclasses import replace

import paramiko

from dadt.config import Config
from dadt.errors import LaunchError
from dadt.launch.hosts.host import Host
from dadt.launch.ssh import refusals
from dadt.launch.ssh import route as routes
from dadt.launch.ssh.attempt import Transient, left
from dadt.launch.ssh.gate import Gates
from dadt.launch.ssh.host_key import HostKey, KnownHosts
from dadt.launch.ssh.identity import Identities
from dadt.launch.ssh.route import Route
from dadt.launch.ssh.transport import Proxy, dial, tunnel

BANNER_SECONDS = 15.0
ANSWER_SECONDS = 30.0
"""Timeout in seconds of the key exchange, of each step of the log-in, and of opening a channel."""
RSA = ("rsa-sha2-512", "rsa-sha2-256")
"""The signature algorithms to request from a host whose known key has the type ssh-rsa."""

Jump = tuple[str, ...]
"""The jump hosts through which a host is reached, in order, in the notation of ProxyJump."""
Note = Callable[[str], None]
"""Function that is called with a note for the user about a host, which continues the host's name."""

# Without a handler, Python would print Paramiko's log messages, with tracebacks, between DADT's own lines.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshConnection:
    """An SSH connection on which the log-in has succeeded."""

    def __init__(self, transport: paramiko.Transport, proxy: Proxy | None) -> None:
        self.transport = transport
        self._proxy = proxy

    def close(self) -> None:
        """Close the connection and the ProxyCommand that carries it, if any. May be called repeatedly."""
        self.transport.close()
        if self._proxy is not None:
            self._proxy.close()


class Jumps:
    """Keeps the connections to jump hosts. All hosts behind a jump host share one connection to it, because its SSH
    server would refuse many log-ins at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[Jump, Future[SshConnection]] = {}

    def find(self, jumps: Jump, deadline: float, connect: Callable[[], SshConnection]) -> SshConnection:
        """Return the connection to the last of these jump hosts. An existing connection is used, also one that is still
        being made; a lost one is replaced. Raises LaunchError."""
        with self._lock:
            future = self._futures.get(jumps)
            is_ours = future is None or _is_lost(future)
            if future is None or is_ours:
                future = self._futures[jumps] = Future()
        if is_ours:
            _fill(future, connect)
        try:
            return future.result(left(deadline, float("inf")))
        except TimeoutError:
            raise LaunchError(f"timeout: ProxyJump {','.join(jumps)} is not connected within --start-timeout") from None

    def close(self) -> None:
        """Close all connections. A connection that is still being made is closed as soon as it exists."""
        with self._lock:
            futures = list(self._futures.values())
        for future in futures:
            future.add_done_callback(_close)


def _fill(future: Future[SshConnection], connect: Callable[[], SshConnection]) -> None:
    try:
        future.set_result(connect())
    except BaseException as error:  # noqa: BLE001 (the future passes any exception on to all who wait)
        future.set_exception(error)


def _is_lost(future: Future[SshConnection]) -> bool:
    return future.done() and (future.exception() is not None or not future.result().transport.is_active())


def _close(future: Future[SshConnection]) -> None:
    if future.exception() is None:
        future.result().close()


class Connector:
    """Connects to hosts as the configuration says. `connect` may be called from several threads."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._jumps = Jumps()
        self._gates = Gates()

    def close(self) -> None:
        """Close the connections to jump hosts. Idempotent."""
        self._jumps.close()

    def connect(self, host: Host, deadline: float, note: Note) -> SshConnection:
        """Connect to a host and log in. Raises LaunchError, or its subclass Transient if another attempt may
        succeed."""
        config = self._config
        route = routes.find(config, host.name, host.user, config.ssh_port, config.ssh_identity_file)
        return self._connect(route, deadline, note, ())

    def _connect(self, route: Route, deadline: float, note: Note, before: tuple[Jump, ...]) -> SshConnection:
        """Connect to the host of a route and log in. before: the chains of jump hosts whose connections wait for this
        one, so that circular jumps are detected."""
        over = self._find_jump(route, deadline, note, before) if route.jumps else None
        with self._gates.passed(",".join([*route.jumps, route.where]), deadline):
            return self._log_in(route, over, deadline, note)

    def _log_in(self, route: Route, over: SshConnection | None, deadline: float, note: Note) -> SshConnection:
        proxy = None
        if over is not None:
            wire: socket.socket | paramiko.Channel = tunnel(over.transport, route, left(deadline, ANSWER_SECONDS))
        elif route.proxy_command:
            proxy = Proxy(route)
            wire = proxy.socket
        else:
            wire = dial(route, left(deadline, route.connect_timeout), self._config.orphan_timeout)
        transport = paramiko.Transport(wire)
        connection = SshConnection(transport, proxy)
        try:
            self._negotiate(transport, route, proxy, deadline, note)
            transport.auth_timeout = left(deadline, ANSWER_SECONDS)
            Identities(route).log_in(transport)
        except (paramiko.SSHException, EOFError, OSError) as error:
            connection.close()
            raise Transient(f"the connection was lost while logging in ({error or 'closed'})") from error
        except BaseException:
            connection.close()
            raise
        if route.alive_interval:
            transport.set_keepalive(route.alive_interval)
        return connection

    def _find_jump(self, route: Route, deadline: float, note: Note, before: tuple[Jump, ...]) -> SshConnection:
        """Connect to the last jump host of the route, through the jump hosts that come before it."""
        if route.jumps in before:
            raise LaunchError(f"ProxyJump {','.join(route.jumps)} goes in a circle -> correct the SSH configuration")
        *first, last = route.jumps
        jump = routes.find_jump(self._config, last)
        if first:
            jump = replace(jump, jumps=tuple(first))
        elif [routes.find_jump(self._config, text).key_name for text in jump.jumps] == [jump.key_name]:
            jump = replace(jump, jumps=())  # a ProxyJump under `Host *` is not meant for jump hosts themselves

        def connect() -> SshConnection:
            return self._connect(
                jump, deadline, lambda text: note(f"(ProxyJump {last}) {text}"), (*before, route.jumps)
            )

        try:
            return self._jumps.find(route.jumps, deadline, connect)
        except LaunchError as error:
            raise type(error)(f"ProxyJump {last}: {error}") from error

    def _negotiate(
        self, transport: paramiko.Transport, route: Route, proxy: Proxy | None, deadline: float, note: Note
    ) -> None:
        known = KnownHosts(route)
        options = transport.get_security_options()
        first = [kind for known_kind in known.kinds for kind in (RSA if known_kind == "ssh-rsa" else (known_kind,))]
        options.key_types = sorted(options.key_types, key=lambda kind: kind not in first)
        transport.banner_timeout = left(deadline, BANNER_SECONDS)
        seconds = left(deadline, BANNER_SECONDS + ANSWER_SECONDS)
        try:
            transport.start_client(timeout=seconds)
        except paramiko.ssh_exception.IncompatiblePeer as error:
            raise LaunchError(refusals.no_algorithm(str(error), "--ssh-backend openssh")) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise _failed(route, proxy, error) from error
        if not transport.initial_kex_done:
            raise Transient(refusals.overloaded(seconds))
        key = transport.get_remote_server_key()
        if text := known.check(HostKey(key.get_name(), key.asbytes()), self._config.ssh_host_keys):
            note(text)


def _failed(route: Route, proxy: Proxy | None, error: Exception) -> LaunchError:
    if proxy is not None:
        return LaunchError(f"{proxy.explain()} -> try `ssh {refusals.login(route)}`")
    if "protocol version" in str(error):
        return LaunchError(refusals.no_ssh(route.where, str(error)))
    return Transient(refusals.closed(route.where))
